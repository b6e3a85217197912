"""Modules that a forward skips while other ranks may run them: LayerDrop, branches by data.

Ranks of a unit issue the same collectives in the same order. So a rank that skips a module issues
those of its units where it would have run the module: in forward when the next module beside it
begins or the module around it ends, in backward likewise. It adds zeros to gradients.

    this rank      block 0           block 2            other ranks run block 1
    gathers        0        1        2
    reduces        2        1        0                  1: zeros

Modules run in the order in which they were registered. One that runs earlier or again joins
nothing.
A layer whose tokens travel to experts on other ranks cannot be skipped by some ranks only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from moecore.parallel.shard.unit import Unit


class Place:
    """A hooked module among those of the module around it."""

    __slots__ = ("around", "children", "module", "number", "units")

    def __init__(self, module: nn.Module, units: list[Unit], around: Place | None) -> None:
        self.module, self.units, self.around = module, units, around
        self.number = 0  # among the places of the module around it
        self.children: list[Place] = []
        if around is not None:
            self.number = len(around.children)
            around.children.append(self)

    def walk(self) -> Iterator[Place]:
        """Yield this place and the places inside of it."""
        yield self
        for child in self.children:
            yield from child.walk()


class Visit:
    """The progress of one forward through the places of a module."""

    __slots__ = ("next", "outer", "place", "skipped")

    def __init__(self, place: Place, outer: Visit | None) -> None:
        self.place, self.outer = place, outer
        self.next = 0  # number of the first child that was not reached
        self.skipped: list[Place] = []  # children whose backward was not joined


class SkippedModules:
    """Joins the collectives of modules that forwards with gradients skip.

    Args:
        use: makes a unit whole, and prefetches other units.
        settle: reduces and frees a unit whose backward has ended, if no other one is waited for.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[Unit],
        use: Callable[[Unit, Sequence[Unit]], None],
        settle: Callable[[Unit], None],
    ) -> None:
        self._use, self._settle = use, settle
        self._open: list[Visit] = []  # forwards that run, innermost last
        of_module = defaultdict[nn.Module, list[Unit]](list)
        for unit in units:
            for module in unit.modules:
                of_module[module].append(unit)
        top = Place(root, of_module[root], None)
        _find_children(top, root, of_module, {root})
        self._places = {place.module: place for place in top.walk()}

    def clear(self) -> None:
        """Drop forwards that run."""
        self._open.clear()

    def enter(self, unit: Unit, module: nn.Module) -> Visit:
        """Begin a forward of a module; join those that were skipped before it."""
        place = self._places[module]
        if unit is place.units[-1]:  # whose hook runs first
            outer = self._open[-1] if self._open else None
            if outer is not None and outer.place is not place.around:
                outer = None
            self._open.append(Visit(place, outer))
            if outer is not None:
                self._pass(outer, place.number)
                outer.next = max(outer.next, place.number + 1)
        return self._open[-1]

    def leave(self, unit: Unit, *, has_failed: bool) -> None:
        """End the forward of a module; join those that were skipped at its end."""
        if self._open and unit is self._open[-1].place.units[-1]:  # whose hook runs last
            visit = self._open.pop()
            if not has_failed:
                self._pass(visit, len(visit.place.children))

    def begin_backward(self, visit: Visit) -> None:
        """Begin the backward of a forward; join those of modules that were skipped behind it."""
        if visit.outer is not None:
            self._join(visit.outer, visit.place.number)

    def end_backward(self, visit: Visit) -> None:
        """End the backward of a forward; join those of modules that were skipped in it."""
        self._join(visit, -1)

    def _pass(self, outer: Visit, number: int) -> None:
        if torch.is_grad_enabled():
            for place in outer.place.children[outer.next : number]:
                self._join_forward(place)
                outer.skipped.append(place)
            outer.next = max(outer.next, number)

    def _join_forward(self, place: Place) -> None:
        units = [unit for unit in reversed(place.units) if unit.gradients.has_others]
        for unit in units:
            unit.forwards += 1
            self._use(unit, unit.ahead_in_forward if place.module is unit.modules[0] else ())
            unit.waiting.add(place)
        for child in place.children:
            self._join_forward(child)
        for unit in reversed(units):
            unit.forwards -= 1
            if not (unit.in_use or unit.options.stays):
                unit.free()

    def _join(self, outer: Visit, number: int) -> None:
        while outer.skipped and outer.skipped[-1].number > number:
            self._join_backward(outer.skipped.pop())

    def _join_backward(self, place: Place) -> None:
        units = [unit for unit in reversed(place.units) if unit.gradients.has_others]
        for unit in units:
            unit.backwards += 1
            self._use(unit, unit.ahead_in_backward if place.module is unit.modules[-1] else ())
        for child in reversed(place.children):
            self._join_backward(child)
        for unit in reversed(units):
            unit.backwards -= 1
            unit.waiting.discard(place)
            unit.gradients.skip(place.module)
            self._settle(unit)


def _find_children(
    place: Place, module: nn.Module, of_module: dict[nn.Module, list[Unit]], seen: set[nn.Module]
) -> None:
    """Give a place the hooked modules in `module` that are in no other hooked module."""
    for child in module.children():
        if child in seen:
            continue
        seen.add(child)
        inner = Place(child, of_module[child], place) if child in of_module else place
        _find_children(inner, child, of_module, seen)
