"""Modules whose backward a rank lacks while other ranks may have it: skipped, or run in vain.

Ranks of a unit issue the same collectives in the same order. Which modules get a gradient is known
to each rank alone: one skips a block (LayerDrop, branches by data), or runs it and its output does
not enter the loss. So the order is that of a forward which runs all modules:

    forward     modules in the order of their forwards, skipped ones where they stand in the model
    backward    the reverse: when the backward of a module begins, that of all later ones is over,
                and when it ends, that of all modules in it

What a rank lacks it joins there: it gathers the units and adds zeros to their gradients.

    this rank      block 0           block 2            other ranks run block 1
    gathers        0        1        2
    reduces        2        1        0                  1: zeros

Autograd runs the nodes of later forwards first, so this is the order on a rank that uses every
module, too: nothing waits for it. A module without a gradient on any rank is joined by all of them.

A layer whose tokens travel to experts on other ranks is run for the others' tokens, which reach the
experts of this rank: one that was skipped with no tokens, forward and backward, one that was run in
vain with zeros as the gradient of the outermost such module.

Modules run in the order in which they were registered. One that runs earlier or again joins
nothing in forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from moecore.base.torch_names import is_recomputing
from moecore.parallel.fsdp.runs import EmptyRun, ExchangeLayer, ForwardRun, Output, Place, Visit
from moecore.parallel.fsdp.unit import Unit


class SkippedModules:
    """Joins the collectives of modules whose backward this rank lacks."""

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[Unit],
        active: Sequence[ForwardRun],
        *,
        exchanges: Mapping[nn.Module, nn.Module],
        use: Callable[[Unit, Sequence[Unit]], None],
        settle: Callable[[Unit, int], None],
        finish: Callable[[ForwardRun], None],
    ) -> None:
        self._use, self._settle, self._finish = use, settle, finish
        self._active = active  # runs whose backward runs, innermost last
        # Forwards that run, innermost last: [0] first ones, [1] recomputed ones.
        self._open: tuple[list[Visit], list[Visit]] = [], []
        self._tops: list[Visit] = []  # outermost forwards whose backward has not begun
        of_module = defaultdict[nn.Module, list[Unit]](list)
        for unit in units:
            for module in unit.modules:
                of_module[module].append(unit)
        top = Place(root, of_module[root], None)
        self._root = root
        self._places = {module: Place(module, found, None) for module, found in of_module.items()}
        _find_children(top, root, of_module, exchanges, {root})
        self._places |= {place.module: place for place in top.walk()}
        for place in top.walk():
            if place.around is not None and place.layer in (None, place.module):
                place.is_cut = any(inner.layer is not None for inner in place.walk())

    def clear(self) -> None:
        """Drop all forwards."""
        for visit in self._tops:
            visit.drop_graph()
        self._open[0].clear()
        self._open[1].clear()
        self._tops.clear()

    def enter(self, unit: Unit, module: nn.Module, forward: int, *, is_again: bool) -> Visit | None:
        """Begin a forward of a module; join those that were skipped before it.

        A recomputed forward has a visit only where the first one had no gradients.
        """
        place = self._places[module]
        opened = self._open[is_again]
        if unit is place.units[-1]:  # whose hook runs first
            outer = opened[-1] if opened else None
            if outer is not None and outer.place is not place.around:
                outer = None
            if is_again and outer is None:
                found = self._resume(place)
                if found is not None:
                    opened.append(found)
                return found
            begun = Visit(place, outer, forward, is_skipped=False)
            if begun.joins and not opened:
                self._tops.append(begun)
            opened.append(begun)
            if outer is not None:
                self._pass(outer, place.number)
                outer.next = max(outer.next, place.number + 1)
                if begun.joins:
                    outer.children.append(begun)
        visit = opened[-1] if opened else None
        return visit if visit is not None and visit.place is place and visit.joins else None

    def leave(self, unit: Unit, module: nn.Module, *, is_again: bool, has_failed: bool) -> None:
        """End the forward of a module; join those that were skipped at its end."""
        opened = self._open[is_again]
        if not opened or module is not opened[-1].place.module:
            return
        if unit is opened[-1].place.units[0]:  # whose hook runs first: all units are in use
            visit = opened.pop()
            if not has_failed:
                self._pass(visit, len(visit.place.children))

    def begin_backward(self, visit: Visit) -> None:
        """Begin the backward of a forward; those of all later ones end before."""
        if visit.has_begun:
            return
        self._begin(visit)
        if visit.outer is None:
            if visit in self._tops:
                self._tops.remove(visit)
            return
        beside = visit.outer.children
        if beside and beside[-1] is not visit and visit in beside:
            self._join_behind(visit.outer, visit)

    def end_backward(self, run: ForwardRun, visit: Visit) -> None:
        """End the backward of a forward; those of all in it end before."""
        self._join_behind(visit, None)
        run.unit.waiting.discard(visit)
        if run in visit.runs:
            visit.runs.remove(run)

    def begin_around(self, visit: Visit) -> list[ForwardRun]:
        """Return the runs of the forward around one, if its backward has not begun."""
        outer = visit.outer
        return [] if outer is None or outer.has_begun else outer.runs.copy()

    def without_backward(self) -> list[ForwardRun]:
        """Return the runs of outermost forwards whose backward has not begun."""
        return [run for visit in self._tops for run in visit.runs]

    def _begin(self, visit: Visit) -> None:
        visit.has_begun = True
        visit.inputs.clear()
        visit.outputs.clear()

    def _pass(self, outer: Visit, number: int) -> None:
        if outer.joins:
            for place in outer.place.children[outer.next : number]:
                self._join_forward(place, outer)
            outer.next = max(outer.next, number)

    def _join_forward(self, place: Place, outer: Visit) -> None:
        visit = Visit(place, outer, outer.forward, is_skipped=True)
        outer.children.append(visit)
        units, is_again = _units_of(place), is_recomputing()
        for unit in units:
            unit.runs[is_again].append(None)
            self._use(unit, unit.ahead_in_forward if place.module is unit.modules[0] else ())
            visit.wait_in(unit)
        for child in place.children:
            self._join_forward(child, visit)
        if place.layer is not None:
            visit.empty = self._run_empty(place.layer, place.units[0])
        for unit in reversed(units):
            unit.runs[is_again].pop()
            if not (unit.in_use or unit.options.stays):
                unit.free()

    def _resume(self, place: Place) -> Visit | None:
        """Return the visit without gradients whose forward a reentrant checkpoint repeats."""
        visits = [run.visit for run in reversed(self._active) if run.visit is not None]
        if visits and visits[0].place is place:  # its backward has begun: no reentrant checkpoint
            return None
        outer = next((visit for visit in visits if visit.place is place.around), None)
        ahead = [] if outer is None else outer.children
        for i, visit in reversed(list(enumerate(ahead))):
            if visit.place is place and not (visit.has_begun or visit.is_skipped or visit.runs):
                # A checkpoint of several modules repeats those that follow in it next.
                behind = ahead[i + 1 :]
                inside = list(takewhile(lambda later: not later.has_inputs, behind))
                for later in reversed(behind):
                    if later.is_skipped or later.has_begun or later not in inside:
                        ahead.remove(later)
                        self._end(later)
                self._drop_children(visit)
                visit.next, visit.has_begun = 0, True
                return visit
        return None

    def _join_behind(self, outer: Visit, until: Visit | None) -> None:
        """End the backwards in a forward that come after a visit's; None = all of them."""
        while outer.children and (visit := outer.children[-1]) is not until:
            outer.children.pop()
            self._end(visit)

    def _end(self, visit: Visit) -> None:
        """End the backward of a visit, whatever of it has begun."""
        if not visit.has_begun:
            if self._has_backward(visit):
                self._join(visit)
            else:
                self._drop(visit)
            return
        for run in visit.runs.copy():
            self._finish(run)
        for unit in visit.place.units:
            if unit.gradients.is_expected:  # the gradient of an input came before the last weight's
                self._settle(unit, visit.forward)

    def _has_backward(self, visit: Visit) -> bool:
        """Whether a rank may have the backward of a visit that this rank lacks."""
        if visit.needs_grad or any(
            unit.trains for place in visit.place.walk() for unit in place.units
        ):
            return True
        return visit.is_skipped and self._follows_trained(visit.place.module)

    def _follows_trained(self, module: object) -> bool:
        """Whether a module's inputs need gradients: one that runs before it is trained."""
        before = takewhile(lambda other: other is not module, self._root.modules())
        return any(p.requires_grad for m in before for p in m.parameters(recurse=False))

    def _drop(self, visit: Visit) -> None:
        """Expect no backward of a visit."""
        self._drop_children(visit)
        for run in visit.runs:
            run.end_waiting()
        for unit in visit.place.units:
            unit.waiting.discard(visit)
        self._begin(visit)

    def _drop_children(self, visit: Visit) -> None:
        for child in visit.children:
            self._drop(child)
        visit.children.clear()

    def _join(self, visit: Visit) -> None:
        """Issue the collectives of a visit's backward, with zeros as gradients."""
        place, units = visit.place, _units_of(visit.place)
        outputs, inputs = visit.outputs.copy(), visit.inputs.copy()
        self._begin(visit)
        for unit in units:
            unit.backwards += 1
            self._use(unit, unit.ahead_in_backward if place.module is unit.modules[-1] else ())
        if visit.empty is not None:
            self._end_empty(place, visit.empty, visit.forward)
        elif outputs:
            self._end_with_zeros(place, outputs, inputs)
        self._join_behind(visit, None)
        for run in visit.runs.copy():
            self._finish(run)
        for unit in place.units:
            unit.waiting.discard(visit)
        for unit in reversed(units):
            unit.backwards -= 1
            unit.gradients.is_expected = True
            self._settle(unit, visit.forward)

    def _run_empty(self, layer: ExchangeLayer, experts: Unit) -> EmptyRun:
        """Run a layer with no tokens, whose gradients go where those of other ranks go."""
        needs_grad = self._follows_trained(layer)
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

    def _end_empty(self, place: Place, run: EmptyRun, forward: int) -> None:
        """Run the backward of a layer without tokens; its experts alone may get a gradient."""
        assert place.layer is not None, "it has run"
        inputs = [run.x_0D] if run.x_0D.requires_grad else []
        others = list[tuple[nn.Module, Unit]]()
        for module in place.layer.modules():
            inner = self._places.get(module)
            for unit in () if inner is None else inner.units:
                if module is place.module and not run.is_skipped:
                    inputs += unit.trained_wholes()
                else:
                    others.append((module, unit))
        if inputs and run.y_0D.requires_grad:
            self._run_backward([run.y_0D], [torch.zeros_like(run.y_0D)], inputs)
        for module, unit in others:
            runs = [of for of in unit.waiting if getattr(of, "module", None) is module]
            left = [of for of in runs if of.forward == forward]
            for of in left:  # no gradient has reached it; other micro-batches' runs still wait
                of.end_waiting()
                unit.gradients.is_expected = True
                self._settle(unit, forward)

    def _end_with_zeros(
        self,
        place: Place,
        outputs: Sequence[Output],
        inputs: Sequence[GradientEdge],
    ) -> None:
        """Run a cut place's backward for the tokens of others; experts alone get a gradient."""
        edges = [output.edge for output in outputs]
        zeros = [torch.zeros(o.shape, dtype=o.dtype, device=o.device) for o in outputs]
        experts, dense = list[Tensor](), list[Tensor]()
        for inner in place.walk():
            for unit in inner.units:
                (dense if inner.layer is None else experts).extend(unit.trained_wholes())
        without = [whole for whole in dense if whole.grad is None]
        # Dense weights make autograd run what other ranks run to reach theirs.
        if inputs or dense or experts:
            self._run_backward(edges, zeros, [*inputs, *dense, *experts])
        for whole in without:
            whole.grad = None

    def _run_backward(
        self, ends: Sequence[Any], zeros: Sequence[Tensor], inputs: Sequence[Any]
    ) -> None:
        """Run a backward within another one; runs that begin in it end in it."""
        outside = len(self._active)
        # A later backward of the same forward may use what this one lacks.
        torch.autograd.backward(ends, zeros, retain_graph=True, inputs=inputs)
        while len(self._active) > outside:
            self._finish(self._active[-1])


def _units_of(place: Place) -> list[Unit]:
    """Return the units that a rank joins which skips a place, in the order of its hooks."""
    if place.layer is place.module:  # whose forward reads them
        return place.units[::-1]
    if place.layer is not None:  # whose forward has the hooks of the experts
        return []
    return [unit for unit in reversed(place.units) if unit.gradients.has_others]


def _find_children(
    place: Place,
    module: nn.Module,
    of_module: Mapping[nn.Module, list[Unit]],
    exchanges: Mapping[nn.Module, nn.Module],
    seen: set[nn.Module],
) -> None:
    """Give a place the hooked modules in `module` that are in no other hooked module."""
    for child in module.children():
        if child in seen:
            continue
        seen.add(child)
        inner = Place(child, of_module[child], place) if child in of_module else place
        experts = exchanges.get(child)
        if experts is not None:
            if experts is not child:
                inner = Place(experts, of_module[experts], inner)
            inner.layer = cast(ExchangeLayer, child)
            seen.update(child.modules())
        else:
            _find_children(inner, child, of_module, exchanges, seen)
