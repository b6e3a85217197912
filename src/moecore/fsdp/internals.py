"""The private state of FSDP2. No other file of moecore reads or writes it.

Every private name that is used here, by its owner: `tests/fsdp/test_internals.py` fails by name
when torch renames one. `_fsdp_param_group` is the spelling of 2.11, `_fsdp_param_groups` that of
2.13.

    FSDPModule        _get_fsdp_state
    FSDPState         _modules                  the modules of the unit
                      _fsdp_param_groups        groups of parameters that communicate together
                      _is_root                  None until the first forward
                      _training_state           FORWARD inside of a forward
                      _modules_to_run_forward   modules of the unit that this forward has not run
                      _pre_backward             all-gathers the unit for backward
                      _state_ctx, _comm_ctx     shared by all units of a root
    FSDPStateContext  iter_forward_root         the state whose forward runs
                      post_backward_final_callback_queued   a backward runs, or has failed
    FSDPCommContext   post_forward_order        groups in the order of forward, for prefetch
                      all_gather_state          the last all-gather, kept until the next one
                      all_gather_copy_in_stream, all_gather_stream
    FSDPParamGroup    fsdp_params, is_unsharded, unshard, wait_for_unshard, _training_state
                      _post_forward_indices     places in post_forward_order
                      _all_gather_result        an all-gather that nothing has waited for
                      _module_to_pre_save_state_dict_hook_handle   frees the group in state_dict()
    FSDPParam         sharded_param, _unsharded_param, unsharded_accumulated_grad
                      _setattr_on_modules       registers a parameter on the modules that use it
    AllGatherResult   all_gather_event, all_gather_work

`FSDPModule.reset_iter_state` (2.13) would drop the gradients of a step's other micro-batches too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


class Unit:
    """One FSDP2 unit: modules whose parameters are all-gathered and reduced together.

    Args:
        module: one of its modules.

    Attributes:
        module: the same, for the public calls of FSDP2.
        modules: all of them.
    """

    def __init__(self, module: FSDPModule) -> None:
        self.module = module
        self._state: Any = module._get_fsdp_state()
        self._groups = groups_of(self._state)
        self.modules: tuple[nn.Module, ...] = self._state._modules

    @property
    def params(self) -> list[Any]:
        """FSDP2's records of the parameters."""
        return [param for group in self._groups for param in group.fsdp_params]

    @property
    def is_unsharded(self) -> bool:
        """Whether the whole parameters are resident."""
        return all(group.is_unsharded for group in self._groups)

    def register(self, *, sharded: bool) -> None:
        """Register the sharded or the unsharded parameters of a resident unit. Frees nothing."""
        for group in self._groups:
            if group.is_unsharded:
                for param in group.fsdp_params:
                    which = param.sharded_param if sharded else param._unsharded_param
                    param._setattr_on_modules(which)

    def unshard(self) -> None:
        """All-gather what another module's forward or backward has freed."""
        for group in self._groups:
            if not group.is_unsharded:
                group.unshard()
                group.wait_for_unshard()
                if group._training_state == TrainingState.POST_BACKWARD:
                    group._training_state = TrainingState.IDLE  # or gradients are not reduced

    def unshard_for_backward(self, grad: Tensor) -> None:
        """All-gather what has been freed since forward, as at the output of the unit."""
        if not self.is_unsharded:
            self._state._pre_backward(grad)

    def reshard(self) -> None:
        """Free the unsharded parameters, and drop an all-gather of modules that did not run."""
        for group in self._groups:
            pending = group._all_gather_result
            if pending is not None:
                if pending.all_gather_event is not None:
                    torch.accelerator.current_stream().wait_event(pending.all_gather_event)
                if isinstance(pending.all_gather_work, dist.Work):
                    pending.all_gather_work.wait()
                group._all_gather_result = None
        self.module.reshard()

    def drop_gradients(self) -> None:
        """Drop the gradients that wait for the last micro-batch."""
        for param in self.params:
            if "unsharded_accumulated_grad" in vars(param):  # 2.15 reads the gradient below
                param.unsharded_accumulated_grad = None
            unsharded = getattr(param, "_unsharded_param", None)  # made by the first forward
            if unsharded is not None:
                unsharded.grad = None

    def end_forward(self) -> None:
        """End a forward that has left modules out, as 2.13 does where the root has run."""
        self._state._modules_to_run_forward.clear()
        for run in (self._state, *self._groups):
            if run._training_state == TrainingState.FORWARD:
                run._training_state = TrainingState.IDLE

    def drop_order(self) -> None:
        """Drop the place in the order of forward, which a failed one has on this rank alone."""
        for group in self._groups:
            group._post_forward_indices.clear()

    def keep_in_state_dict(self) -> None:
        """Remove the hook by which `state_dict()` frees the unit. After the first forward."""
        for group in self._groups:
            for hook in group._module_to_pre_save_state_dict_hook_handle.values():
                hook.remove()


class Root(Unit):
    """The unit that holds all others."""

    @property
    def has_run(self) -> bool:
        """Whether FSDP2 has seen a forward."""
        return self._state._is_root is not None

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward runs, or has failed."""
        return bool(self._state._training_state == TrainingState.FORWARD)

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward runs, or has failed."""
        return bool(self._state._state_ctx.post_backward_final_callback_queued)

    def end_forward(self) -> None:
        """End the forward, of whichever unit it is."""
        super().end_forward()
        self._state._state_ctx.iter_forward_root = None

    def drop_order(self) -> None:
        """Drop the order of forward, and the all-gather that is kept for the next one's sake."""
        super().drop_order()
        comm = self._state._comm_ctx
        comm.post_forward_order.clear()
        last = comm.all_gather_state
        if last is not None:
            comm.all_gather_copy_in_stream.wait_event(last.event)
            comm.all_gather_stream.wait_event(last.event)
            comm.all_gather_state = None


def groups_of(state: Any) -> list[Any]:
    """Return the groups of a unit's parameters, of which 2.13 may have several."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [group for group in [state._fsdp_param_group] if group is not None]
    return list(groups)


def units_of(root: nn.Module) -> list[Unit]:
    """Return the units of a model, once each; the first is a `Root`."""
    modules = [m for m in root.modules() if isinstance(m, FSDPModule)]
    first_of: dict[Any, Any] = {}
    for module in modules:
        first_of.setdefault(module._get_fsdp_state(), module)
    own, *others = first_of.values()
    return [Root(own), *map(Unit, others)]
