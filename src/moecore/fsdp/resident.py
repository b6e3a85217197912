"""Units that stay resident between forward and backward, and when they are freed.

Routers, heads, the root and what `FSDPOptions` keeps stay unsharded from forward to backward, whose
end frees them. Outside of forward and backward every module holds its sharded parameters all the
same: `parameters()` and `state_dict()` hand those out, free nothing and start no collective, so one
rank alone may call them. The unsharded ones are registered while a forward or a backward runs.

No backward follows an evaluation, a generation or a micro-batch that is dropped, and the next
forward would compute with the weights of before the last step. So all ranks free units

    after a forward without gradients, or that failed,
    before every forward, unless micro-batches of a step share them,
    at the end of a step, and where one is dropped.

Note "several modules": FSDP2 gathers a unit of several modules before the first of them in a
forward, and for backward at the output of the last one. That is enough where all modules run once,
one after the other, and all outputs have gradients. It is not enough where a forward leaves modules
out or recomputes some of them, or where a loss needs an inner block alone: the unit may be freed by
then, and 2.11 would compute with this rank's shard. So every module gathers what has been freed,
before its forward and at its output's gradient, as it would as a unit of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moecore._autograd import call_after_backward, continues, disable_dynamo, is_recomputing
from moecore.fsdp.internals import Root, Unit, units_of
from moecore.fsdp.progress import Progress

RESIDENT = "_moecore_resident_units"
BACKWARD = "backward"


class ResidentUnits:
    """What the units of a model hold between forwards. Hooks the forwards of their modules.

    Args:
        root: an FSDP2 unit that holds all others.
        kept: one module of each unit that forward leaves unsharded.
    """

    def __init__(self, root: nn.Module, kept: Sequence[nn.Module]) -> None:
        self._units = units_of(root)
        first = self._units[0]
        assert isinstance(first, Root)
        self._root = first
        self._kept = [unit for unit in self._units if not set(unit.modules).isdisjoint(kept)]
        self._is_shared = False  # by the micro-batches of a step, until its last forward
        self._is_last = False
        self._is_kept_in_state_dict = False
        self._running: nn.Module | str | None = None  # the outermost module, or BACKWARD
        self.progress: Callable[[], Progress | None] = lambda: None  # of the step that owns it
        root.register_forward_pre_hook(self._before_root, prepend=True)
        for unit in self._units:
            for module in unit.modules:
                module.register_forward_pre_hook(partial(self._before_forward, unit))
                # Before FSDP2's: what is refused in backward must not have begun there.
                after = partial(self._after_forward, unit)
                module.register_forward_hook(after, prepend=True, always_call=True)
        root.register_forward_hook(self._after_root, always_call=True)

    def free(self) -> None:
        """Free all unsharded parameters. No communication."""
        self._running = None
        for unit in self._units:
            unit.end_forward()  # FSDP2 keeps what a forward is in the middle of
            unit.reshard()

    def start_micro_batch(self, *, is_last: bool) -> None:
        """Announce a forward that shares what is unsharded with the others of its step."""
        if not self._is_shared:
            self.free()
        self._is_shared, self._is_last = True, is_last
        self._reduce_next(is_last)

    def drop_step(self) -> None:
        """Free all units, and drop their gradients and their step's micro-batches."""
        self._is_shared = self._is_last = False
        progress = self.progress()
        if progress is not None:
            progress.restart()
        self.free()
        self._reduce_next(True)
        for unit in self._units:
            unit.drop_gradients()

    def _reduce_next(self, is_last: bool) -> None:
        """Set whether the next backward reduces and frees the units that are kept."""
        for unit in self._kept:
            unit.module.set_requires_gradient_sync(is_last, recurse=False)
            unit.module.set_reshard_after_backward(is_last, recurse=False)

    @disable_dynamo
    def _before_root(self, root: nn.Module, _args: Any) -> None:
        if is_recomputing():
            return
        if torch.is_inference_mode_enabled() and not self._root.has_run:
            raise RuntimeError(
                "the first forward must not run under torch.inference_mode(), whose tensors FSDP2 "
                "could not train with later: evaluate under torch.no_grad()"
            )
        if self._root.is_in_backward:
            raise RuntimeError(
                "the last backward ended in an exception: gradients, counts and gathered weights "
                "are those of half a step, so start again from a checkpoint, in new processes"
            )
        if self._is_shared:
            self._end_forward()
        else:
            self.free()
        if self._is_last and torch.is_grad_enabled():
            self._is_shared = self._is_last = False
        self._enter(root)

    @disable_dynamo
    def _after_root(self, root: nn.Module, *_: Any) -> None:
        if is_recomputing():
            return
        if self._root.has_run and not self._is_kept_in_state_dict:
            self._is_kept_in_state_dict = True
            for unit in self._units:
                unit.keep_in_state_dict()
        has_failed = self._root.is_in_forward
        self._end_forward()
        if has_failed:
            for unit in self._units:
                unit.drop_order()
        if not torch.is_grad_enabled() or (has_failed and not self._is_shared):
            self.free()
        self._leave(root)

    def _end_forward(self) -> None:
        for unit in self._units:
            unit.end_forward()

    @disable_dynamo
    def _before_forward(self, unit: Unit, module: nn.Module, _args: Any) -> None:
        self._enter(module)
        if len(unit.modules) > 1:
            unit.unshard()

    @disable_dynamo
    def _after_forward(self, unit: Unit, module: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(partial(self._before_backward, unit))
        if module is not self._root.module:
            self._leave(module)

    def _before_backward(self, unit: Unit, grad: Tensor) -> Tensor:
        if torch.is_grad_enabled() and continues():
            raise NotImplementedError(
                "create_graph (True) must be False for a model of parallelize_moe, whose gathered "
                "weights are freed after backward: take second derivatives of a plain model, or "
                "of what follows from its output alone"
            )
        progress = self.progress()
        if progress is not None and not progress.is_open:
            raise ValueError(
                "backward must run within `with step.micro_batch():` of the model's TrainStep: "
                "finish() counts micro-batches and ends their communication"
            )
        if self._running is None:
            self._enter(BACKWARD)  # for what is recomputed
            call_after_backward(partial(self._leave, BACKWARD))
        if len(unit.modules) > 1:
            unit.unshard_for_backward(grad)
        return grad

    def _enter(self, who: nn.Module | str) -> None:
        """Register the unsharded parameters of resident units, until `who` leaves."""
        if self._running is None:
            self._running = who
            for unit in self._units:
                unit.register(sharded=False)

    def _leave(self, who: nn.Module | str) -> None:
        if self._running is who:
            self._running = None
            for unit in self._units:
                unit.register(sharded=True)


def free_units(model: nn.Module) -> None:
    """Free what the units of a model hold unsharded; nothing for a plain one."""
    for resident in resident_units(model):
        resident.free()


def resident_units(model: nn.Module) -> list[ResidentUnits]:
    """Return the records of the parallelized models that a model is or holds."""
    found = (vars(module).get(RESIDENT) for module in model.modules())
    return [resident for resident in found if resident is not None]


def progress_of(model: nn.Module) -> Progress | None:
    """Return where the step of a model is; None for one without a `TrainStep`."""
    found = (resident.progress() for resident in resident_units(model))
    return next((progress for progress in found if progress is not None), None)
