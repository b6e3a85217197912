"""Modules that a forward skips while other ranks may run them: LayerDrop, branches by data.

Ranks of a unit issue the same collectives in the same order. So a rank that skips a module issues
those of its units where it would have run the module: in forward when the next module beside it
begins or the module around it ends, in backward likewise. It adds zeros to gradients.

    this rank      block 0           block 2            other ranks run block 1
    gathers        0        1        2
    reduces        2        1        0                  1: zeros

A layer whose tokens travel to experts on other ranks is run with no tokens, forward and backward:
the others' tokens reach the experts of this rank. A layer that all ranks skip has no gradient.

Modules run in the order in which they were registered. One that runs earlier or again joins
nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moecore.moe.dispatch.local import LocalDispatcher
from moecore.moe.layer import RoutedLayer
from moecore.parallel.shard.unit import Unit


class Place:
    """A hooked module among those of the module around it."""

    __slots__ = ("around", "children", "layer", "module", "number", "units")

    def __init__(self, module: nn.Module, units: list[Unit], around: Place | None) -> None:
        self.module, self.units, self.around = module, units, around
        self.layer: RoutedLayer | None = None  # whose experts these are, if its tokens travel
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


class EmptyRun(NamedTuple):
    """A forward of a layer without tokens, which waits for its backward."""

    x_0D: Tensor
    y_0D: Tensor
    is_skipped: bool  # by all ranks


Empty = dict[Place, EmptyRun]  # the runs in a place that was joined


class Visit:
    """The progress of one forward through the places of a module."""

    __slots__ = ("next", "outer", "place", "skipped")

    def __init__(self, place: Place, outer: Visit | None) -> None:
        self.place, self.outer = place, outer
        self.next = 0  # number of the first child that was not reached
        self.skipped: list[tuple[Place, Empty]] = []  # children whose backward was not joined


class SkippedModules:
    """Joins the collectives of modules that forwards with gradients skip."""

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
        self._root = root
        self._places = {module: Place(module, found, None) for module, found in of_module.items()}
        _find_children(top, root, of_module, {root})
        self._places |= {place.module: place for place in top.walk()}

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
                outer.skipped.append((place, {}))
                self._join_forward(*outer.skipped[-1])
            outer.next = max(outer.next, number)

    def _join_forward(self, place: Place, empty: Empty) -> None:
        units = _units_of(place)
        for unit in units:
            unit.forwards += 1
            self._use(unit, unit.ahead_in_forward if place.module is unit.modules[0] else ())
            unit.waiting.add(place)
        for child in place.children:
            self._join_forward(child, empty)
        if place.layer is not None:
            empty[place] = self._run_empty(place.layer, place.units[0])
        for unit in reversed(units):
            unit.forwards -= 1
            if not (unit.in_use or unit.options.stays):
                unit.free()

    def _join(self, outer: Visit, number: int) -> None:
        while outer.skipped and outer.skipped[-1][0].number > number:
            self._join_backward(*outer.skipped.pop())

    def _join_backward(self, place: Place, empty: Empty) -> None:
        units = _units_of(place)
        for unit in units:
            unit.backwards += 1
            self._use(unit, unit.ahead_in_backward if place.module is unit.modules[-1] else ())
        if place in empty:
            self._end_empty(place, empty.pop(place))
        for child in reversed(place.children):
            self._join_backward(child, empty)
        for unit in reversed(units):
            unit.backwards -= 1
            unit.waiting.discard(place)
            unit.gradients.skip(place.module)
            self._settle(unit)

    def _run_empty(self, layer: RoutedLayer, experts: Unit) -> EmptyRun:
        """Run a layer with no tokens, whose gradients go where those of other ranks go."""
        before = takewhile(lambda module: module is not layer, self._root.modules())
        needs_grad = any(p.requires_grad for m in before for p in m.parameters(recurse=False))
        shape = 0, layer.config.dim
        x_0D = torch.zeros(shape, dtype=experts.dtype, device=experts.device)
        attendance = getattr(layer.dispatcher, "attendance", None)  # None = "nvlink" asks nobody
        if attendance is None:
            return EmptyRun(x_0D, layer.run_empty(x_0D.requires_grad_(needs_grad)), False)
        attendance.joins = True
        try:
            y_0D = layer.run_empty(x_0D.requires_grad_(needs_grad))
        finally:
            attendance.joins = False
        return EmptyRun(x_0D, y_0D, attendance.is_skipped)

    def _end_empty(self, place: Place, run: EmptyRun) -> None:
        """Run the backward of a layer without tokens; its experts alone may get a gradient."""
        assert place.layer is not None, "it has run"
        inputs = [run.x_0D] if run.x_0D.requires_grad else []
        for module in place.layer.modules():
            inner = self._places.get(module)
            for unit in () if inner is None else inner.units:
                if module is place.module and not run.is_skipped:
                    wholes = (param.whole for param in unit.params)
                    inputs += [x for x in wholes if x is not None and x.requires_grad]
                else:
                    unit.gradients.skip(module)
        if inputs and run.y_0D.requires_grad:
            torch.autograd.backward([run.y_0D], [torch.zeros_like(run.y_0D)], inputs=inputs)


def _units_of(place: Place) -> list[Unit]:
    """Return the units that a rank joins which skips a place, in the order of its hooks."""
    if place.layer is place.module:  # whose forward reads them
        return place.units[::-1]
    if place.layer is not None:  # whose forward has the hooks of the experts
        return []
    return [unit for unit in reversed(place.units) if unit.gradients.has_others]


def _find_children(
    place: Place, module: nn.Module, of_module: dict[nn.Module, list[Unit]], seen: set[nn.Module]
) -> None:
    """Give a place the hooked modules in `module` that are in no other hooked module."""
    for child in module.children():
        if child in seen:
            continue
        seen.add(child)
        inner = Place(child, of_module[child], place) if child in of_module else place
        if isinstance(child, RoutedLayer) and not isinstance(child.dispatcher, LocalDispatcher):
            experts = child.part("experts")
            if experts is not child:
                inner = Place(experts, of_module[experts], inner)
            inner.layer = child
            seen.update(child.modules())
        else:
            _find_children(inner, child, of_module, seen)
