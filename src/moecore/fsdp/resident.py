"""Lets go of units that a forward has left gathered when no backward comes to do it.

Routers, heads, the root and what `FSDPOptions` keeps stay gathered from forward to backward, which
frees them. After evaluation, generation or a micro-batch that is dropped they would stay so: an
optimizer made then would hold gathered copies, clipping would miss their gradients, and the next
forward would compute with the weights of before the last step. So they are let go

    after a forward without gradients,
    before every forward, unless `start_micro_batch` has said that it shares what is gathered,
    before `clip_grad_norm_` looks for gradients,
    when the model's parameters are asked for by `parameters()`, `named_parameters()` or
    `requires_grad_()`, such as for an optimizer. (Backward gathers them again.)

A forward that leaves modules out, or ends in an exception, has gathered for modules that never ran:
that goes with it, or a forward after later steps would compute with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from moecore._autograd import continues, disable_dynamo, is_recomputing
from moecore._compat import fsdp_groups

GATHERED = "_moecore_gathered"


class Gathered:
    """What the units of a model hold between forwards. Hooks the model's forward.

    Args:
        root: an FSDP2 unit that holds all others.
    """

    def __init__(self, root: FSDPModule) -> None:
        assert isinstance(root, nn.Module)
        self._state = root._get_fsdp_state()
        modules = [m for m in root.modules() if isinstance(m, FSDPModule)]
        self._unit_of = {m._get_fsdp_state(): m for m in modules}  # state -> one of its modules
        self._is_shared = False  # by the micro-batches of a step, until its last forward
        self._is_last = False
        self.calls_before_backward: Callable[[], None] | None = None
        root.register_forward_pre_hook(self._before_forward, prepend=True)
        root.register_forward_hook(self._after_forward, always_call=True)
        for state in self._unit_of:
            before = partial(self._before_backward, state._pre_backward)
            state._pre_backward = before  # type: ignore[method-assign]
        self._named_parameters = root.named_parameters
        root.named_parameters = self._own_parameters  # type: ignore[method-assign]

    def let_go(self) -> None:
        """Free all gathered parameters: modules hold those that the optimizer knows."""
        self._end_forward()  # FSDP2 keeps what a forward is in the middle of
        for unit in self._unit_of.values():
            for group in fsdp_groups(unit):
                _drop_pending(group)
            unit.reshard()

    def start_micro_batch(self, *, is_last: bool) -> None:
        """Say that the next forward shares what is gathered with those of its step."""
        if not self._is_shared:
            self.let_go()
        self._is_shared, self._is_last = True, is_last

    def drop_step(self) -> None:
        """Let go, and forget what was said of micro-batches."""
        self._is_shared = self._is_last = False
        self.let_go()

    def _own_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Stand before `named_parameters` of the root, which all who want parameters go through."""
        is_between = self._state._training_state == TrainingState.IDLE
        if is_between and not self._is_shared and not is_recomputing():
            self.let_go()
        return self._named_parameters(*args, **kwargs)

    @disable_dynamo
    def _before_forward(self, *_: Any) -> None:
        if is_recomputing():
            return
        if torch.is_inference_mode_enabled() and self._state._is_root is None:
            raise RuntimeError(
                "the first forward must not run under torch.inference_mode(), whose tensors FSDP2 "
                "could not train with later: evaluate under torch.no_grad()"
            )
        if self._state._state_ctx.post_backward_final_callback_queued:
            raise RuntimeError(
                "the last backward ended in an exception: gradients, counts and gathered weights "
                "are those of half a step, so start again from a checkpoint, in new processes"
            )
        self._end_forward()
        if not self._is_shared:
            self.let_go()
        if self._is_last and torch.is_grad_enabled():
            self._is_shared = self._is_last = False

    def _before_backward(self, gather: Callable[[Tensor], Tensor], grad: Tensor) -> Tensor:
        """Stand before what FSDP2 does when backward comes to the output of a unit."""
        if torch.is_grad_enabled() and continues():
            raise NotImplementedError(
                "create_graph (True) must be False for a model of parallelize_moe, whose gathered "
                "weights are freed after backward: take second derivatives of a plain model, or "
                "of what follows from its output alone"
            )
        if self.calls_before_backward is not None:
            self.calls_before_backward()
        return gather(grad)

    @disable_dynamo
    def _after_forward(self, *_: Any) -> None:
        if is_recomputing():
            return
        has_failed = self._state._training_state == TrainingState.FORWARD
        self._end_forward()
        if has_failed:
            self._forget_order()
        if not torch.is_grad_enabled() or (has_failed and not self._is_shared):
            self.let_go()

    def _forget_order(self) -> None:
        """Forget in which order a forward that has failed, on this rank alone perhaps, gathered."""
        comm = self._state._comm_ctx
        comm.post_forward_order.clear()
        for unit in self._unit_of.values():
            for group in fsdp_groups(unit):
                group._post_forward_indices.clear()
        last = comm.all_gather_state  # held for the next gather's sake
        if last is not None:
            comm.all_gather_copy_in_stream.wait_event(last.event)
            comm.all_gather_stream.wait_event(last.event)
            comm.all_gather_state = None

    def _end_forward(self) -> None:
        """End the forward of units that are in the middle of one.

        Such are, after an exception or a call of a part of the model, units whose modules did not
        all run. (2.13 ends them itself where the root has run.)
        """
        context = self._state._state_ctx
        if context.iter_forward_root in self._unit_of:
            context.iter_forward_root = None
        for state, unit in self._unit_of.items():
            state._modules_to_run_forward.clear()
            for run in (state, *fsdp_groups(unit)):
                if run._training_state == TrainingState.FORWARD:
                    run._training_state = TrainingState.IDLE


def _drop_pending(group: Any) -> None:
    """Forget what a unit has gathered for modules that did not run."""
    pending = group._all_gather_result
    if pending is None:
        return
    if pending.all_gather_event is not None:
        torch.accelerator.current_stream().wait_event(pending.all_gather_event)
    if isinstance(pending.all_gather_work, dist.Work):
        pending.all_gather_work.wait()
    group._all_gather_result = None


def watch_gathered(root: FSDPModule) -> None:
    """Let units of a model go in time from now on."""
    setattr(root, GATHERED, Gathered(root))


def let_go(model: nn.Module) -> None:
    """Free what the units of a model hold gathered; nothing for a plain one."""
    for gathered in _held(model):
        gathered.let_go()


def call_before_backward(model: nn.Module, function: Callable[[], None]) -> None:
    """Call a function before each unit's backward from now on, in place of the one before.

    Args:
        model: of `parallelize_moe`, or one that holds it; nothing for any other.
        function: of which only the first call of a backward may find something to do.
    """
    for gathered in _held(model):
        gathered.calls_before_backward = function


def say_backward(model: nn.Module) -> None:
    """Call that function for a backward that runs no hooks."""
    for gathered in _held(model):
        if gathered.calls_before_backward is not None:
            gathered.calls_before_backward()


def _held(model: nn.Module) -> list[Gathered]:
    """Return what watches the parallelized models that a model is or holds."""
    found = (vars(module).get(GATHERED) for module in model.modules())
    return [gathered for gathered in found if gathered is not None]
