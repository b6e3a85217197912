"""UnitEngine: unshards, reshards and reduces the units of a model as its modules run.

A unit is a parameter group of FSDP2. The engine registers these hooks:

    pre_forward     wait for the unit's all-gather; prefetch the all-gathers of the next units
    post_forward    reshard the unit, unless it is resident
    pre_backward    the gradient of an output arrives: as pre_forward
    post_backward   the gradient of the last input arrives: reduce the unit's gradients, reshard it
    end of backward reduce remaining units, reshard units without further use in the step, join

Outside of forward and backward the modules have their sharded parameters. A resident unit
(`UnitOptions.is_resident`) stays unsharded until its backward. Two counts, which are equal on all
ranks, decide when a resident unit is reduced and resharded:

    `_pending_forwards`         announced forwards with gradients that have not ended
    `Unit.pending_backwards`    forwards of the unit's modules whose backward has not ended

The micro-batches of a step share resident units and run in any order. A resident unit is resharded
when both counts are 0, or at the end of the micro-batches. A unit that accumulates gradients is
reduced at that point, any other resident unit by each backward. A forward that is not announced is
a separate step with new all-gathers, whose backward reduces and reshards all units.

`defer_weight_gradients` splits a backward in two:

    D    backward: gradients of inputs, and the weight gradients that autograd computes
    W    `WeightGradients.run`: the deferred matmuls, unit by unit from the last to the first

D and W each reduce the gradients that they compute. A unit that accumulates is reduced once, after
its last matmul. W reads no weight, so D reshards a unit as any backward does.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.failures import publish_errors, withdraw_error_records
from moecore.base.torch_private import (
    call_after_backward,
    has_next_node,
    is_inside_backward,
    sum_version_counters,
    tree_leaves,
    tree_map_only,
)
from moecore.parallel.fsdp.deferred import WeightGradients
from moecore.parallel.fsdp.progress import Progress
from moecore.parallel.fsdp.runs import ForwardRun, GradBoundary
from moecore.parallel.fsdp.transport import UnitStreams
from moecore.parallel.fsdp.uneven_ranks import UnevenRanks
from moecore.parallel.fsdp.unit import CollectiveHeader, State, Unit

GRAD_BOUNDARY = "_moecore_grad_boundary"


class UnitEngine:
    """Hooks that unshard, reshard and reduce a model's units (FSDP2's parameter groups).

    Args:
        units: parameter groups in the order of forward, with the unit of the root module last.
        experts_by_layer: MoE layer -> its experts, for layers that dispatch tokens to other ranks.
            A rank may then skip modules that other ranks run (`UnevenRanks`). None = ranks may not.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[Unit],
        streams: UnitStreams,
        *,
        experts_by_layer: Mapping[nn.Module, nn.Module] | None,
    ) -> None:
        self.units, self._root, self._streams = tuple(units), root, streams
        # In a pair the forward uses `_depth`, `_outermost_run`, and units' `runs[False]`. The
        # backward uses `_active_runs`, `_in_backward`, and units' `runs[True]` and `backwards`.
        # Both read `pending_backwards` and `_pending_forwards`, in which a forward counts until it
        # has ended: only then all its units expect its backward.
        self._depth = 0  # nested forwards of hooked modules that run
        self._outermost_run: ForwardRun | None = None  # run of the outermost of these forwards
        self._in_step = False  # whether announced micro-batches share resident units
        self._pending_forwards = 0.0  # announced forwards with gradients that have not ended
        self._in_parts = False  # whether an announced forward runs a part of the modules
        self._is_paired = False  # whether a forward and a backward alternate
        self._forward = 0  # number of outermost forwards that have begun
        self._step = 0  # number of steps that have ended or were dropped
        self._active_runs: list[ForwardRun] = []  # runs whose backward has begun
        self._uneven: UnevenRanks | None = None
        if experts_by_layer is not None:
            self._uneven = UnevenRanks(
                root,
                units,
                self._active_runs,
                experts_by_layer=experts_by_layer,
                unshard_for_use=self._unshard_for_use,
                reshard_if_unused=self._reshard_if_unused,
                end_run_backward=self._end_run_backward,
            )
        self._in_backward = False  # stays True after a backward that failed
        self._deferred: list[WeightGradients] = []  # deferred products, in the order of their D's
        self.progress: Callable[[], Progress | None] = lambda: None  # of the model's `TrainStep`
        self._header = CollectiveHeader(root, units, streams.device_type)
        for unit in units:
            unit.header = self._header
            for module in unit.modules:
                before, after = partial(self._pre_forward, unit), partial(self._post_forward, unit)
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                module.register_forward_hook(after, always_call=True)

    def reshard(self) -> None:
        """Reshard all units, including units whose backward has not ended. No communication."""
        self._depth, self._outermost_run = 0, None
        if self._uneven is not None:
            self._uneven.clear_visits()
        for unit in self.units:
            unit.backwards = 0
            unit.pending_backwards.clear()
            for runs in unit.runs:
                runs.clear()
            unit.reshard()

    def close(self) -> None:
        """Reshard units; free memory registered with NCCL until the next forward. Collective."""
        self.reshard()
        for buffer in (buffer for unit in self.units for buffer in unit.list_buffers()):
            if buffer.registered is not None:
                buffer.free()

    def start_micro_batches(self, *, pending_forwards: float, runs_stages: bool = False) -> None:
        """Announce micro-batches of a step; resident units then stay unsharded between forwards.

        `pending_forwards` is the number of forwards with gradients that the step will still run;
        math.inf = unknown. If `runs_stages`, a forward runs only the modules of a pipeline stage.
        """
        if not self._in_step:
            self.reshard()
        self._in_step, self._pending_forwards, self._in_parts = True, pending_forwards, runs_stages

    def end_micro_batches(self) -> None:
        """Run deferred matmuls, reduce the step's gradients, and reshard all units. Collective."""
        self._pending_forwards, self._in_parts = 0, False
        for deferred in self._deferred.copy():
            self._compute_deferred(deferred)
        self._in_step = False
        for unit in reversed(self.units):
            self._reduce_grads(unit)
        self._streams.wait_for_collectives()
        self.reshard()

    def run_missing_backwards(self) -> None:
        """Run a backward with zero gradients for model forwards without a backward. Collective."""
        runs = [] if self._uneven is None else self._uneven.list_runs_without_backward()
        for run in runs:
            start = torch.zeros((), requires_grad=True, dtype=torch.float32, device="cpu")
            start.register_hook(lambda _, run=run: self.pre_backward(run))
            start.backward()

    def end_step(self) -> None:
        """Reshard all units before weights change; backwards of earlier forwards then raise."""
        self._step += 1
        self.reshard()

    def drop_step(self) -> None:
        """Discard the step: reshard all units; drop unreduced gradients and deferred matmuls."""
        self._in_step, self._pending_forwards, self._in_parts = False, 0, False
        progress = self.progress()
        if progress is not None:
            progress.start_next_step()
        self.end_step()
        for deferred in self._deferred:
            deferred.drop()
        self._deferred.clear()
        for unit in self.units:
            unit.gradients.drop_unreduced()

    @contextmanager
    def defer_weight_gradients(self, deferred: WeightGradients) -> Iterator[None]:
        """Return a context in which backwards store their weight-gradient matmuls in `deferred`.

        Do not pass `inputs` to these `backward()` calls. Use `deferred` only with this engine.
        """
        deferred.compute_and_reduce = partial(self._compute_deferred_in_step, deferred)
        if deferred not in self._deferred:
            self._deferred.append(deferred)
        for unit in self.units:
            unit.gradients.deferred = deferred
        try:
            yield
        finally:
            for unit in self.units:
                unit.gradients.deferred = None

    def _compute_deferred_in_step(self, deferred: WeightGradients) -> None:
        """Run the deferred matmuls unless they have run; ValueError outside of a micro-batch."""
        if deferred in self._deferred:
            self._check_micro_batch_is_open("WeightGradients.run()")
            self._compute_deferred(deferred)

    def _compute_deferred(self, deferred: WeightGradients) -> None:
        """Compute deferred matmuls and reduce their gradients, last unit first. Collective."""
        self._check_no_failed_backward()
        self._in_backward = True
        for unit in reversed(self.units):
            products = deferred.products.pop(unit.gradients, None)
            if products:
                unit.gradients.compute_deferred(products)
                self._reduce_grads(unit)
        self._streams.wait_for_collectives()
        self._deferred.remove(deferred)
        self._in_backward = False

    @contextmanager
    def alternate_passes(self) -> Iterator[None]:
        """Return a context for an alternating forward and backward; `unshard_pass` switches."""
        self._check_no_failed_backward()
        self._is_paired = True
        try:
            yield
        finally:
            self._is_paired = False

    def unshard_pass(self, is_backward: bool) -> None:
        """Unshard the units in use by the backward if `is_backward`, otherwise by the forward."""
        # The other pass may have resharded these units. Skipped modules count as running modules.
        for unit in self.units:
            if unit.runs[is_backward] or (is_backward and unit.backwards):
                self._unshard_for_use(unit, ())

    @torch.compiler.disable
    def _pre_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Unshard the unit before its module's forward; return (args, kwargs), cast if needed."""
        is_recompute, forward = is_inside_backward(), self._forward
        if not self._depth and not is_recompute:
            self._root_pre_forward()
            args, kwargs = self._streams.copy_to_device((args, kwargs))
            forward = self._forward
        elif is_recompute and self._active_runs:
            forward = self._active_runs[-1].forward_idx
        run = visit = None
        if torch.is_grad_enabled():
            run = ForwardRun(unit, module, step_idx=self._step, forward_idx=forward)
        if self._uneven is not None and not self._in_parts:
            visit = self._uneven.pre_forward(unit, module, forward, is_recompute=is_recompute)
            if run is not None and visit is not None:
                run.visit = visit
                visit.runs.append(run)
        if not is_recompute:
            if not self._depth:
                self._outermost_run = run
            self._depth += 1
        unit.runs[is_recompute].append(run)  # `_post_forward` removes it and decreases `_depth`
        is_first = module is unit.modules[0] and not is_recompute
        self._unshard_for_use(unit, unit.prefetch_forward if is_first else ())
        # A recomputed forward expects no further backward. The first forward of a reentrant
        # checkpoint runs without gradients: its visit, or the outermost run, counts instead.
        waits = None if is_recompute else run or visit or self._outermost_run
        if waits is not None:
            waits.add_to_pending_backwards(unit)
        if run is None and visit is not None:
            visit.has_inputs = any(_requires_grad(leaf) for leaf in _list_leaves((args, kwargs)))
        if run is not None:
            run.versions = unit.list_versions()
            for leaf in _list_leaves((args, kwargs)):  # parameters outlive a step
                if _requires_grad(leaf) and not isinstance(leaf, nn.Parameter):
                    self._get_or_register_boundary(leaf).ends.append(run)
                    run.inputs += 1
            if visit is not None and not is_recompute:
                args, kwargs = visit.record_inputs((args, kwargs))
        return _cast_floating_tensors((args, kwargs), unit.options.cast_inputs)

    @torch.compiler.disable
    def _post_forward(self, unit: Unit, module: nn.Module, _args: Any, output: Any) -> Any:
        """Reshard the unit after forward, unless it is resident or in use; return `output`."""
        is_recompute = is_inside_backward()
        if not unit.runs[is_recompute]:  # the forward failed before its own hook
            return output
        has_failed = output is None and sys.exc_info()[0] is not None
        if self._uneven is not None:  # before `runs` changes, as on ranks that run this module
            options = {"is_recompute": is_recompute, "has_failed": has_failed}
            self._uneven.post_forward(unit, module, **options)
        run = unit.runs[is_recompute].pop()
        if run is not None:
            output = self._unalias_outputs(output, run)
            for leaf in _list_leaves(output):
                if _requires_grad(leaf):
                    self._get_or_register_boundary(leaf).begins.append(run)
                    if run.visit is not None and not is_recompute:
                        run.visit.record_output(leaf)
        if is_recompute:  # the backward of a recomputed forward follows and reshards the unit
            return output
        if not (unit.is_in_use or unit.options.is_resident):
            unit.reshard()
        self._depth -= 1
        if self._depth:
            return output
        self._outermost_run = None
        if module is self._root and torch.is_grad_enabled():
            self._pending_forwards = max(0, self._pending_forwards - 1)
        if not self._in_step and (has_failed or not torch.is_grad_enabled()):
            self.reshard()
            return output
        for other in self.units:
            other.register_params(unsharded=False)
            if other.state is State.UNSHARDING and not self._is_shared(other):
                other.reshard()  # prefetched for a module that did not run
        return output

    def _root_pre_forward(self) -> None:
        """Begin an outermost forward: read the current sharded parameters of all modules."""
        withdraw_error_records()
        self._header.begin_forward(self.progress())
        self._forward += 1
        if not self._is_paired:
            self._check_no_failed_backward()
        if not self._in_step:
            self.reshard()
        with torch.no_grad():  # `to_local` takes a fifth of the time without gradients
            for unit in self.units:
                if not self._in_backward:
                    unit.clear_events()  # the end of backward has waited for all marks
                unit.refresh_sharded_params()
        self._streams.sync_gather_stream()

    def _check_no_failed_backward(self) -> None:
        if self._in_backward:
            raise RuntimeError(
                "the last backward ended in an exception: gradients, counts and gathered weights "
                "are those of half a step, so start again from a checkpoint, in new processes"
            )

    def _check_micro_batch_is_open(self, caller: str) -> None:
        progress = self.progress()
        if progress is not None and not progress.is_open:
            raise ValueError(
                f"{caller} must run within `with step.micro_batch():` of the model's TrainStep: "
                "finish() counts micro-batches and ends their communication"
            )

    def _unshard_for_use(self, unit: Unit, prefetched_units: Sequence[Unit]) -> None:
        """Unshard a unit, register its parameters, and launch all-gathers of `prefetched_units`."""
        unit.wait_for_unshard()
        unit.register_params(unsharded=True)
        for other in prefetched_units:
            if other.can_unshard():
                other.unshard()

    def _get_or_register_boundary(self, activation: Tensor) -> GradBoundary:
        """Return an activation's tensor hook for arriving gradients; register a missing hook."""
        boundary: GradBoundary | None = getattr(activation, GRAD_BOUNDARY, None)
        version = sum_version_counters(activation)
        if boundary is None or boundary.version != version or boundary.engine is not self:
            boundary = GradBoundary(self, version, is_leaf=activation.is_leaf)
            activation.register_hook(boundary)
            setattr(activation, GRAD_BOUNDARY, boundary)
        return boundary

    def _unalias_outputs(self, output: Any, run: ForwardRun) -> Any:
        """Return nested outputs, with a view in place of each output that is also an input."""

        def as_output(leaf: Tensor) -> Tensor:
            boundary: GradBoundary | None = getattr(leaf, GRAD_BOUNDARY, None)
            return leaf if boundary is None or run not in boundary.ends else leaf.view_as(leaf)

        leaves = _list_leaves(output)
        if all(not isinstance(leaf, Tensor) or as_output(leaf) is leaf for leaf in leaves):
            return output
        return tree_map_only(Tensor, as_output, output)

    def pre_backward(self, run: ForwardRun) -> None:
        """Unshard the unit of a forward for its backward; a hook on its first output gradient."""
        if torch.is_grad_enabled() and has_next_node():
            raise NotImplementedError(
                "create_graph (True) must be False for a model of parallelize_moe, whose gathered "
                "weights are freed after backward: take second derivatives of a plain model, or "
                "of what follows from its output alone"
            )
        self._check_micro_batch_is_open("backward")
        if run.step != self._step:
            raise RuntimeError(
                "backward must come before finish() or drop() of its forward's step, which change "
                "weights or drop gradients: run the forward again"
            )
        if run.is_active:
            return
        run.check_unchanged()
        if not self._in_backward:
            self._in_backward = True
            for unit in self.units:
                unit.sync_requires_grad()  # parameters may have been frozen since the forward
            call_after_backward(self._root_post_backward)
        if self._uneven is not None and run.visit is not None:
            for parent in self._uneven.list_parent_runs(run.visit):  # whose outputs no module read
                self.pre_backward(parent)
            self._uneven.pre_backward(run.visit)
        run.is_active, run.pending = True, run.inputs
        self._active_runs.append(run)
        run.unit.backwards += 1
        is_first = run.module is run.unit.modules[-1]
        self._unshard_for_use(run.unit, run.unit.prefetch_backward if is_first else ())

    def post_backward(self, run: ForwardRun) -> None:
        """Hook on the input gradients of a forward; the last input gradient ends its backward."""
        run.pending -= 1
        if run.is_active and not run.pending:
            self._end_run_backward(run)

    def _end_run_backward(self, run: ForwardRun) -> None:
        """End a forward's backward and reshard its unit; cancel a backward that has not begun."""
        if run.is_active:
            self._record_backward_end(run)
            self._reshard_if_unused(run.unit, run.forward_idx)
        else:
            run.remove_from_pending_backwards()

    def _reshard_if_unused(self, unit: Unit, forward_idx: int) -> None:
        """Reduce and reshard a unit, unless a backward of forward `forward_idx` still uses it."""
        if unit.backwards or unit.runs[True]:
            return
        if not unit.options.is_resident:
            if not unit.expects_backward(forward_idx) and unit.gradients.is_complete():
                self._reduce_grads(unit)
            if not unit.is_in_use:
                unit.reshard()
            return
        is_last = not (unit.pending_backwards or self._pending_forwards)
        if is_last and unit.gradients.is_complete():
            self._reduce_grads(unit)
            unit.reshard()

    def _record_backward_end(self, run: ForwardRun) -> None:
        """Record that the backward of a forward has ended, without resharding its unit."""
        if self._uneven is not None and run.visit is not None:
            self._uneven.post_backward(run, run.visit)
        self._active_runs.remove(run)
        run.is_active = False
        run.unit.backwards -= 1
        run.unit.gradients.is_expected = True
        run.remove_from_pending_backwards()

    def _root_post_backward(self) -> None:
        """End the model's backward: reduce and reshard remaining units, and join all streams."""
        while self._active_runs:
            run = self._active_runs[-1]
            self._record_backward_end(run)
            if run.visit is not None and run.visit.parent is not None:
                self._reshard_if_unused(run.unit, run.forward_idx)
        *children, root = self.units
        for unit in (*reversed(children), root):  # the order of collectives on all ranks
            self._reduce_grads(unit)
            if self._expects_grads(unit):
                unit.register_params(unsharded=False)
            else:
                unit.reshard()
        self._streams.wait_for_collectives()
        self._in_backward = False

    def _reduce_grads(self, unit: Unit) -> None:
        """Reduce a unit's gradients, or accumulate them if later backwards will add gradients."""
        grads, is_last = unit.gradients, True
        if unit.options.accumulates and self._is_shared(unit):
            has_products = any(grads in deferred.products for deferred in self._deferred)
            is_last = not (self._expects_grads(unit) or has_products)
        grads.reduces = is_last
        with publish_errors(f"the reduction of {unit.options.name}"):
            grads.reduce_to_shards()

    def _expects_grads(self, unit: Unit) -> bool:
        """Whether later backwards of the step add gradients to a unit that stays unsharded."""
        return self._is_shared(unit) and bool(unit.pending_backwards or self._pending_forwards)

    def _is_shared(self, unit: Unit) -> bool:
        """Whether the micro-batches of an open step share the unit, which stays unsharded."""
        return self._in_step and unit.options.is_resident


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _list_leaves(nested: Any) -> list[Any]:
    return [nested] if isinstance(nested, Tensor) else tree_leaves(nested)


def _cast_floating_tensors(nested: Any, dtype: torch.dtype | None) -> Any:
    """Return nested containers with floating point tensors cast to a dtype; None = no cast."""

    def needs_cast(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype

    if dtype is None or not any(map(needs_cast, _list_leaves(nested))):
        return nested
    return tree_map_only(Tensor, lambda x: x.to(dtype) if needs_cast(x) else x, nested)
