"""Collectives of a rank that skips the forward or backward of a module that other ranks may run.

All ranks of a unit must issue the same collectives in the same order. But a rank may skip a block
(LayerDrop, branches that depend on data), or the output of a block may not enter its loss. Other
ranks do not know this. So every rank issues the collectives of a forward that runs all modules:

    forward     in the order of the forwards; a skipped module has its position in the model
    backward    in the reverse order: the backward of a module begins after the backward of all
                later modules has ended, and ends after the backward of its submodules has ended

For a module that it skips, a rank unshards the units and reduce-scatters zeros as gradients:

    this rank      block 0           block 2            other ranks run block 1
    unshards       0        1        2
    reduces        2        1        0                  1: zeros

Autograd runs the nodes of later forwards first. So a rank that skips no module has this order
anyway and never waits for it. If no rank has a gradient of a module, all ranks reduce zeros.

If a rank skips an MoE layer whose experts are on several ranks, it still runs the layer, so that
other ranks' tokens reach its experts. It runs a skipped forward and its backward with zero tokens.
It runs the backward of a layer that does not enter the loss with zeros as the gradient of the
outermost module around the layer that has no gradient.

Modules are expected to run in the order in which they were registered. A module that runs earlier
or again skips no other module in forward.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from moecore.base.torch_private import is_inside_backward
from moecore.parallel.fsdp.runs import (
    EmptyRun,
    ExchangeLayer,
    ForwardRun,
    ForwardVisit,
    ModuleNode,
    Output,
)
from moecore.parallel.fsdp.unit import Unit


class UnevenRanks:
    """Issues, for modules that this rank skips, the collectives that other ranks expect.

    `experts_by_layer` maps MoE layers to their experts. `active_runs` lists the engine's forwards
    whose backward has begun. The three functions are methods of `UnitEngine`.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[Unit],
        active_runs: Sequence[ForwardRun],
        *,
        experts_by_layer: Mapping[nn.Module, nn.Module],
        unshard_for_use: Callable[[Unit, Sequence[Unit]], None],
        reshard_if_unused: Callable[[Unit, int], None],
        end_run_backward: Callable[[ForwardRun], None],
    ) -> None:
        self._unshard_for_use, self._end_run_backward = unshard_for_use, end_run_backward
        self._reshard_if_unused = reshard_if_unused
        self._active = active_runs  # runs whose backward has begun, innermost last
        # Forwards that have begun, innermost last: [0] first forwards, [1] recomputed forwards.
        self._open_visits: tuple[list[ForwardVisit], list[ForwardVisit]] = [], []
        # Outermost forwards whose backward has not begun.
        self._outermost_visits: list[ForwardVisit] = []
        units_of = defaultdict[nn.Module, list[Unit]](list)
        for unit in units:
            for module in unit.modules:
                units_of[module].append(unit)
        top, self._root = ModuleNode(root, units_of[root], None), root
        self._nodes = {m: ModuleNode(m, units, None) for m, units in units_of.items()}
        _add_child_nodes(top, root, units_of, experts_by_layer, {root})
        self._nodes |= {node.module: node for node in top.walk()}
        for node in top.walk():
            if node.parent is not None and node.layer in (None, node.module):
                has_layer = any(inner.layer is not None for inner in node.walk())
                node.has_separate_backward = has_layer

    def clear_visits(self) -> None:
        """Drop all recorded forwards (`ForwardVisit`) and their graph edges."""
        for visit in self._outermost_visits:
            visit.drop_graph_edges()
        self._open_visits[0].clear()
        self._open_visits[1].clear()
        self._outermost_visits.clear()

    def pre_forward(
        self, unit: Unit, module: nn.Module, forward_idx: int, *, is_recompute: bool
    ) -> ForwardVisit | None:
        """Record that a module's forward begins; issue collectives of modules skipped before it.

        Returns the forward's record, or None. A recomputed forward has a record only if the first
        forward ran without gradients. `forward_idx` counts forwards of the outermost module.
        """
        node, opened = self._nodes[module], self._open_visits[is_recompute]
        if unit is node.units[-1]:  # whose hook runs first
            outer = opened[-1] if opened else None
            if outer is not None and outer.node is not node.parent:
                outer = None
            if is_recompute and outer is None:
                resumed_visit = self._find_recomputed_visit(node)
                if resumed_visit is not None:
                    opened.append(resumed_visit)
                return resumed_visit
            new_visit = ForwardVisit(node, outer, forward_idx, is_skipped=False)
            if new_visit.joins and not opened:
                self._outermost_visits.append(new_visit)
            opened.append(new_visit)
            if outer is not None:
                self._issue_skipped_forwards(outer, node.index)
                outer.next = max(outer.next, node.index + 1)
                if new_visit.joins:
                    outer.children.append(new_visit)
        visit = opened[-1] if opened else None
        return visit if visit is not None and visit.node is node and visit.joins else None

    def post_forward(
        self, unit: Unit, module: nn.Module, *, is_recompute: bool, has_failed: bool
    ) -> None:
        """Record that a forward ends; unless it failed, issue skipped submodules' collectives."""
        opened = self._open_visits[is_recompute]
        if not opened or module is not opened[-1].node.module:
            return
        if unit is opened[-1].node.units[0]:  # whose hook runs first: all units are in use
            visit = opened.pop()
            if not has_failed:
                self._issue_skipped_forwards(visit, len(visit.node.children))

    def pre_backward(self, visit: ForwardVisit) -> None:
        """Record that a forward's backward begins; end the backwards of later sibling forwards."""
        if visit.is_in_backward:
            return
        self._record_backward_start(visit)
        if visit.parent is None:
            if visit in self._outermost_visits:
                self._outermost_visits.remove(visit)
            return
        siblings = visit.parent.children
        if siblings and siblings[-1] is not visit and visit in siblings:
            self._end_child_backwards(visit.parent, visit)

    def post_backward(self, run: ForwardRun, visit: ForwardVisit) -> None:
        """Record that a forward's backward ends; first end the backwards of its submodules.

        If this rank skips a submodule's backward, that backward's collectives are issued here.
        """
        self._end_child_backwards(visit, None)
        run.unit.pending_backwards.discard(visit)
        if run in visit.runs:
            visit.runs.remove(run)

    def list_parent_runs(self, visit: ForwardVisit) -> list[ForwardRun]:
        """Return the `ForwardRun`s of the enclosing module; [] if its backward has begun."""
        parent = visit.parent
        return [] if parent is None or parent.is_in_backward else parent.runs.copy()

    def list_runs_without_backward(self) -> list[ForwardRun]:
        """Return the `ForwardRun`s of outermost forwards whose backward has not begun."""
        return [run for visit in self._outermost_visits for run in visit.runs]

    def _record_backward_start(self, visit: ForwardVisit) -> None:
        visit.is_in_backward = True
        visit.inputs.clear()
        visit.outputs.clear()

    def _issue_skipped_forwards(self, parent: ForwardVisit, end_idx: int) -> None:
        if parent.joins:
            for node in parent.node.children[parent.next : end_idx]:
                self._issue_skipped_forward(node, parent)
            parent.next = max(parent.next, end_idx)

    def _issue_skipped_forward(self, node: ModuleNode, parent: ForwardVisit) -> None:
        """Issue the forward collectives of a skipped module and of its submodules.

        Their units are unsharded and resharded. An MoE layer runs on zero tokens.
        """
        visit = ForwardVisit(node, parent, parent.forward_idx, is_skipped=True)
        parent.children.append(visit)
        units, is_recompute = _list_units(node), is_inside_backward()
        for unit in units:
            unit.runs[is_recompute].append(None)
            prefetch = unit.prefetch_forward if node.module is unit.modules[0] else ()
            self._unshard_for_use(unit, prefetch)
            visit.add_to_pending_backwards(unit)
        for child in node.children:
            self._issue_skipped_forward(child, visit)
        if node.layer is not None:
            visit.empty = self._run_empty_forward(node.layer, node.units[0])
        for unit in reversed(units):
            unit.runs[is_recompute].pop()
            if not (unit.is_in_use or unit.options.is_resident):
                unit.reshard()

    def _find_recomputed_visit(self, node: ModuleNode) -> ForwardVisit | None:
        """Return the record of the forward that a reentrant checkpoint recomputes now, or None."""
        visits = [run.visit for run in reversed(self._active) if run.visit is not None]
        if visits and visits[0].node is node:  # its backward has begun: no reentrant checkpoint
            return None
        outer = next((visit for visit in visits if visit.node is node.parent), None)
        siblings = [] if outer is None else outer.children
        for i, visit in reversed(list(enumerate(siblings))):
            if visit.node is node and not (visit.is_in_backward or visit.is_skipped or visit.runs):
                # A checkpoint of several modules repeats the following modules next.
                successors = siblings[i + 1 :]
                inside = list(takewhile(lambda sibling: not sibling.has_inputs, successors))
                for sibling in reversed(successors):
                    if sibling.is_skipped or sibling.is_in_backward or sibling not in inside:
                        siblings.remove(sibling)
                        self._end_backward(sibling)
                self._drop_children(visit)
                visit.next, visit.is_in_backward = 0, True
                return visit
        return None

    def _end_child_backwards(self, parent: ForwardVisit, after_child: ForwardVisit | None) -> None:
        """End the backward of the parent's children after `after_child`; None = all children."""
        while parent.children and (visit := parent.children[-1]) is not after_child:
            parent.children.pop()
            self._end_backward(visit)

    def _end_backward(self, visit: ForwardVisit) -> None:
        """End a forward's backward; issue its collectives if only other ranks may run it."""
        node = visit.node
        if visit.is_in_backward:
            for run in visit.runs.copy():
                self._end_run_backward(run)
            for unit in node.units:
                if unit.gradients.is_expected:  # an input gradient preceded the last weight's
                    self._reshard_if_unused(unit, visit.forward_idx)
            return
        is_trained = visit.needs_grad or any(u.is_trained for n in node.walk() for u in n.units)
        if is_trained or (visit.is_skipped and self._has_trained_predecessor(node.module)):
            self._issue_skipped_backward(visit)  # another rank may run this backward
        else:
            self._drop_visit(visit)

    def _has_trained_predecessor(self, module: object) -> bool:
        """Whether an earlier module is trained, so that this module's inputs need gradients."""
        before = takewhile(lambda other: other is not module, self._root.modules())
        return any(p.requires_grad for m in before for p in m.parameters(recurse=False))

    def _drop_visit(self, visit: ForwardVisit) -> None:
        """Stop expecting the backwards of a forward and of its submodules' forwards."""
        self._drop_children(visit)
        for run in visit.runs:
            run.remove_from_pending_backwards()
        for unit in visit.node.units:
            unit.pending_backwards.discard(visit)
        self._record_backward_start(visit)

    def _drop_children(self, visit: ForwardVisit) -> None:
        """Stop expecting the backwards of a forward's submodules, and drop their records."""
        for child in visit.children:
            self._drop_visit(child)
        visit.children.clear()

    def _issue_skipped_backward(self, visit: ForwardVisit) -> None:
        """Issue the collectives of a backward that this rank does not run, with zero gradients."""
        node, units = visit.node, _list_units(visit.node)
        outputs, inputs = visit.outputs.copy(), visit.inputs.copy()
        self._record_backward_start(visit)
        for unit in units:
            unit.backwards += 1
            prefetch = unit.prefetch_backward if node.module is unit.modules[-1] else ()
            self._unshard_for_use(unit, prefetch)
        if visit.empty is not None:
            self._run_empty_backward(node, visit.empty, visit.forward_idx)
        elif outputs:
            self._run_zero_backward(node, outputs, inputs)
        self._end_child_backwards(visit, None)
        for run in visit.runs.copy():
            self._end_run_backward(run)
        for unit in node.units:
            unit.pending_backwards.discard(visit)
        for unit in reversed(units):
            unit.backwards -= 1
            unit.gradients.is_expected = True
            self._reshard_if_unused(unit, visit.forward_idx)

    def _run_empty_forward(self, layer: ExchangeLayer, experts_unit: Unit) -> EmptyRun:
        needs_grad = self._has_trained_predecessor(layer)
        shape = 0, layer.config.dim
        x_0D = torch.zeros(shape, dtype=experts_unit.dtype, device=experts_unit.device)
        x_0D.requires_grad_(needs_grad)
        layer_check = getattr(layer.dispatcher, "layer_check", None)  # "nvlink" has None
        if layer_check is None:
            return EmptyRun(x_0D, layer.run_on_zero_tokens(x_0D), False)
        layer_check.joins = True
        try:
            return EmptyRun(x_0D, layer.run_on_zero_tokens(x_0D), layer_check.is_skipped)
        finally:
            layer_check.joins = False

    def _run_empty_backward(self, node: ModuleNode, empty_run: EmptyRun, forward_idx: int) -> None:
        assert node.layer is not None, "it has run"
        inputs = [empty_run.x_0D] if empty_run.x_0D.requires_grad else []
        inner_units = list[tuple[nn.Module, Unit]]()
        for module in node.layer.modules():
            inner = self._nodes.get(module)
            for unit in () if inner is None else inner.units:
                if module is node.module and not empty_run.is_skipped:
                    inputs += unit.list_trained_params()
                else:
                    inner_units.append((module, unit))
        if inputs and empty_run.y_0D.requires_grad:
            self._run_backward([empty_run.y_0D], [torch.zeros_like(empty_run.y_0D)], inputs)
        for module, unit in inner_units:
            runs = [run for run in unit.pending_backwards if getattr(run, "module", None) is module]
            for pending_run in [run for run in runs if run.forward_idx == forward_idx]:
                pending_run.remove_from_pending_backwards()  # no gradient has reached it
                unit.gradients.is_expected = True
                self._reshard_if_unused(unit, forward_idx)

    def _run_zero_backward(
        self, node: ModuleNode, outputs: Sequence[Output], inputs: Sequence[GradientEdge]
    ) -> None:
        """Run a backward with zero gradients, so that dispatchers join other ranks' backwards."""
        edges = [output.edge for output in outputs]
        zeros = [torch.zeros(o.shape, dtype=o.dtype, device=o.device) for o in outputs]
        experts, dense = list[Tensor](), list[Tensor]()
        for inner in node.walk():
            for unit in inner.units:
                (dense if inner.layer is None else experts).extend(unit.list_trained_params())
        without = [param for param in dense if param.grad is None]
        # With dense weights as inputs, autograd runs the same nodes as on other ranks.
        if inputs or dense or experts:
            self._run_backward(edges, zeros, [*inputs, *dense, *experts])
        for param in without:
            param.grad = None

    def _run_backward(
        self, outputs: Sequence[Any], zero_grads: Sequence[Tensor], inputs: Sequence[Any]
    ) -> None:
        """Run a backward with zero gradients; end the backwards of modules that begin in it."""
        outside = len(self._active)
        # The graph is retained, because a later backward of the same forward may need it.
        torch.autograd.backward(outputs, zero_grads, retain_graph=True, inputs=inputs)
        while len(self._active) > outside:
            self._end_run_backward(self._active[-1])


def _list_units(node: ModuleNode) -> list[Unit]:
    """Return the units whose collectives a rank issues if it skips a module, in hook order."""
    if node.layer is node.module:  # whose forward reads them
        return node.units[::-1]
    if node.layer is not None:  # whose forward has the hooks of the experts
        return []
    return [unit for unit in reversed(node.units) if unit.gradients.spans_ranks]


def _add_child_nodes(
    node: ModuleNode,
    module: nn.Module,
    module_units: Mapping[nn.Module, list[Unit]],
    experts_by_layer: Mapping[nn.Module, nn.Module],
    visited_modules: set[nn.Module],
) -> None:
    """Add modules with hooks inside `module` to the tree; `visited_modules` are in it already."""
    for child in module.children():
        if child in visited_modules:
            continue
        visited_modules.add(child)
        inner = ModuleNode(child, module_units[child], node) if child in module_units else node
        experts = experts_by_layer.get(child)
        if experts is not None:
            if experts is not child:
                inner = ModuleNode(experts, module_units[experts], inner)
            inner.layer = cast(ExchangeLayer, child)
            visited_modules.update(child.modules())
        else:
            _add_child_nodes(inner, child, module_units, experts_by_layer, visited_modules)
