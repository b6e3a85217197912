"""`UnitParam`: the sharded and the unsharded form of a parameter (FSDP2's `FSDPParam`).

    sharded     a DTensor with the model's name and global shape, for optimizers and checkpoints
    unsharded   a view of the unit's buffer, registered on the module in forward and backward

Dim 0 is sharded into even chunks, as by DTensor's Shard(0). The concatenated chunks of all ranks
are the unsharded parameter, so the all-gather writes it directly. Chunks of another dim are
all-gathered first and then copied. `UnitViews` has the views of a unit's buffer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from moecore.base.copies import make_dtensor
from moecore.base.params import GATHERED_BLOCKS, READS_PLAIN, make_grad_placements
from moecore.base.torch_private import (
    StridedShard,
    apply_tensor_hooks,
    call_accumulate_hooks,
    foreach_copy_,
    get_local_tensor,
    has_accumulate_hooks,
    has_tensor_hooks,
    make_dtensor_like,
    make_parameter_like,
)
from moecore.moe.param_reader import get_fp8_blocks
from moecore.parallel.fsdp.plan import FlatSlot
from moecore.parallel.fsdp.transport import ShardCopies

LARGE = 1 << 22  # elements from which a separate copy is faster than a fused copy
Owners = list[tuple[nn.Module, str]]  # modules and attributes that have one parameter


class UnitParam:
    """One parameter of a unit (FSDP2's parameter group): its sharded and its unsharded form.

    The constructor replaces the parameter of `owners` by this rank's shard on `device_type`. No
    communication. `mesh` has the axes of the data ranks, the sharding axis last; None = only this
    rank has the parameter. If not `is_sharded`, the last axis of `mesh` replicates it, too.
    """

    def __init__(
        self,
        slot: FlatSlot,
        owners: Owners,
        mesh: DeviceMesh | None,
        *,
        device_type: str,
        is_sharded: bool,
        join_meshes: Callable[..., DeviceMesh],
    ) -> None:
        self.slot, self.owners = slot, owners
        dim, chunk = slot.dim, slot.rows
        module, attribute = owners[0]
        param = module._parameters[attribute]
        assert param is not None, "units are made of parameters"
        self.num_ranks, self.rank = 1, 0
        if mesh is not None and is_sharded:
            self.num_ranks = mesh.size(mesh.ndim - 1)
            self.rank = mesh.get_local_rank(mesh.ndim - 1)
        self._inner = (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
        self._is_plain = self._inner is None or hasattr(param, READS_PLAIN)
        data = get_local_tensor(param).detach()
        self.shape = data.shape  # unsharded over data ranks, local over tp, ep and etp
        self.shard_shape = (*self.shape[:dim], chunk, *self.shape[dim + 1 :])
        self.start = min(self.rank * chunk, self.shape[dim])  # of this rank's shard, in `slot.dim`
        local_data = data.narrow(dim, self.start, min(chunk, self.shape[dim] - self.start))
        local_data = local_data.to(device_type) if not local_data.is_meta else local_data
        shard = local_data.clone(memory_format=torch.contiguous_format)
        place = _make_placements(param, dim if is_sharded else None, mesh, join_meshes)
        self.sharded = make_parameter_like(make_dtensor(shard, *place, like=param), param)
        self.shard = get_local_tensor(self.sharded)  # this rank's local tensor
        self.unsharded: nn.Parameter | None = None  # None before the first all-gather
        self.shard_copies: ShardCopies | None = None  # None = the shard is on the device
        self.device_shard: Tensor | None = None  # a copy of a shard that is in host memory
        register_params([self], unsharded=False)

    @property
    def is_strided(self) -> bool:
        """Whether a dim > 0 is sharded, so all-gathered shards must be copied to be contiguous."""
        return self.slot.dim > 0 and self.num_ranks > 1

    @property
    def is_partial(self) -> bool:
        """Whether the parameter is replicated over tp, so that its gradient is a partial sum."""
        return self._inner is not None and any(p.is_replicate() for p in self._inner[1])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the sharded parameter."""
        return self.shard.dtype

    @property
    def device(self) -> torch.device:
        """Device of compute, also if the shard is in host memory."""
        if self.shard_copies is None or self.shard.is_meta:
            return self.shard.device
        return self.shard_copies.device

    def move_to_host(self, host_shard: Tensor, shard_copies: ShardCopies) -> None:
        """Replace the sharded parameter by `host_shard`; `shard_copies` copies it to the device."""
        if not self.shard.is_meta:
            host_shard.copy_(self.shard)
        self.sharded = make_parameter_like(
            make_dtensor_like(host_shard, self.sharded), self.sharded
        )
        self.shard, self.shard_copies = get_local_tensor(self.sharded), shard_copies
        register_params([self], unsharded=False)

    def refresh_sharded_param(self) -> bool:
        """Read the module's current sharded parameter; return whether its memory is new."""
        module, attribute = self.owners[0]
        param, shard = module._parameters[attribute], self.shard
        if param is self.sharded:
            local = get_local_tensor(param)  # torch may return a new object at each call
            is_moved = local.data_ptr() != shard.data_ptr() or local.device != shard.device
            if local is shard or not is_moved:
                return False
        if not isinstance(param, DTensor) or param.shape != self.sharded.shape:
            raise ValueError(
                f"{self.slot.param} ({type(param).__name__}) must stay the DTensor that "
                "parallelize_moe has made: copy values into it"
            )
        self.sharded, self.shard = param, get_local_tensor(param)
        if self.shard_copies is not None and self.shard.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"{self.slot.param} (on {self.shard.device}) must be in host memory with "
                "MemoryOptions.offload_params: call materialize(model, device=...)"
            )
        register_params([self], unsharded=False)  # on all modules that share it
        return True

    def make_unsharded(self, memory: Tensor) -> list[Tensor]:
        """Create the unsharded parameter as a view of `memory`, without a copy.

        Returns the tensors whose versions autograd checks: the parameter, a DTensor's local tensor.
        """
        local = memory.data
        if self._inner is not None and not self._is_plain:
            local = make_dtensor(local, *self._inner, like=self.sharded)
        self.unsharded = make_parameter_like(local, self.sharded)
        blocks = get_fp8_blocks(self.sharded)
        if blocks is not None:  # `precision/stored.py`: the shard has no values
            setattr(self.unsharded, GATHERED_BLOCKS, blocks)
        if self._is_plain:
            return [self.unsharded]
        return [self.unsharded, get_local_tensor(self.unsharded)]

    def pop_grad(self, unsharded_param: nn.Parameter) -> Tensor:
        """Pop the unsharded parameter's local gradient; all-reduce it if replicated over tp."""
        grad, unsharded_param.grad = unsharded_param.grad, None
        assert grad is not None, "the caller passes a parameter that has a gradient"
        if self._inner is None:
            return grad
        if self._is_plain:
            grad = self._wrap_as_dtensor(grad)
        if grad.placements != self._inner[1]:  # type: ignore[attr-defined]
            grad = grad.redistribute(placements=self._inner[1])  # type: ignore[attr-defined]
        return get_local_tensor(grad)

    def add_grad(self, grad: Tensor) -> None:
        """Add a local gradient to `.grad` of the unsharded parameter, which may alias `grad`."""
        unsharded = self.unsharded
        assert unsharded is not None, "a forward has made it"
        grad = grad.view(self.shape)
        if not self._is_plain:
            grad = self._wrap_as_dtensor(grad)
        unsharded.grad = grad if unsharded.grad is None else unsharded.grad + grad

    def _wrap_as_dtensor(self, grad: Tensor) -> DTensor:
        assert self._inner is not None, "the parameter has no inner mesh"
        mesh, placements = self._inner
        return make_dtensor(grad, mesh, make_grad_placements(placements), like=self.sharded)

    def accumulate_grad_with_hooks(self, grad: Tensor) -> None:
        """Add a local gradient to the shard's `.grad`; call its post-accumulate-grad hooks."""
        self.accumulate_grad(grad)
        if self.shard_copies is not None:
            self.wait_for_host_grad()
        call_accumulate_hooks(self.sharded)

    def wait_for_host_grad(self) -> None:
        """If post-accumulate-grad hooks exist, wait until `.grad` has arrived in host memory."""
        if self.shard_copies is not None and has_accumulate_hooks(self.sharded):
            self.shard_copies.synchronize()

    def accumulate_grad(self, grad: Tensor) -> None:
        """Apply tensor hooks to a local gradient; add it to the shard's `.grad`, or set `.grad`."""
        if has_tensor_hooks(self.sharded):
            grad = apply_tensor_hooks(self.sharded, make_dtensor_like(grad, self.sharded))
            grad = get_local_tensor(grad)
        if self.shard_copies is not None:
            self.shard_copies.add_grad(self.sharded, grad)
        elif self.sharded.grad is None:
            self.sharded.grad = make_dtensor_like(grad, self.sharded)
        else:
            get_local_tensor(self.sharded.grad).add_(grad)


def register_params(params: Sequence[UnitParam], *, unsharded: bool) -> None:
    """Register parameters on their modules: unsharded if `unsharded`, otherwise sharded."""
    for param in params:
        for module, attribute in param.owners:
            module._parameters[attribute] = param.unsharded if unsharded else param.sharded


def _make_placements(
    param: Tensor,
    dim: int | None,
    data_mesh: DeviceMesh | None,
    join_meshes: Callable[..., DeviceMesh],
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return mesh and placements of the sharded form of `param`: data axes, then tp, ep, etp.

    The last axis of `data_mesh` shards `dim`; None = replicated. `data_mesh` None = only this rank
    has the parameter.
    """
    inner = param.device_mesh if isinstance(param, DTensor) else None
    before = param.placements if isinstance(param, DTensor) else ()
    if data_mesh is None:
        assert inner is not None, "only experts, which are DTensors, have no mesh of data ranks"
        return inner, before
    placements: list[Placement] = [Replicate()] * data_mesh.ndim
    if dim is not None:
        cuts = 1
        for mesh_dim, placement in enumerate(before):
            if inner is not None and not placement.is_replicate() and placement.dim == dim:  # type: ignore[attr-defined]
                cuts *= inner.size(mesh_dim)
        # tp, ep and etp have sharded the dim first.
        placements[-1] = Shard(dim) if cuts == 1 else StridedShard(dim, split_factor=cuts)
    return (data_mesh if inner is None else join_meshes(data_mesh, inner)), (*placements, *before)


@dataclass(frozen=True, slots=True)
class UnitViews:
    """Views of a unit's buffer per parameter: all ranks' shards, local shard, full parameter."""

    flat: Tensor
    regions: list[Tensor]  # the padded shards of all ranks
    padded_local: list[Tensor]  # this rank's shard of each region
    local: list[Tensor]  # this rank's shard without padding
    parameters: list[Tensor]  # unsharded parameters; for dim 0 the regions without padding


def make_views(
    params: Sequence[UnitParam], flat_buffer: Tensor, copies_offset: int, values_per_byte: int = 1
) -> UnitViews:
    """Return views of a unit's 1-D buffer `flat_buffer`, one per parameter in each list.

    Each element of `flat_buffer` contains `values_per_byte` values of a parameter. Unsharded copies
    of `is_strided` parameters begin `copies_offset` values after the start of `flat_buffer`.
    """
    views, copies_offset = UnitViews(flat_buffer, [], [], [], []), copies_offset // values_per_byte
    for param in params:
        slot, size = param.slot, param.shape.numel() // values_per_byte
        n, at = slot.shard_numel // values_per_byte, slot.unsharded_offset // values_per_byte
        region = flat_buffer[at : at + param.num_ranks * n]
        padded_view = region[param.rank * n : (param.rank + 1) * n]
        if param.is_strided:
            at, copies_offset = copies_offset, copies_offset + size
        views.regions.append(region)
        views.padded_local.append(padded_view)
        views.local.append(padded_view[: param.shard.numel() // values_per_byte])
        shape = (*param.shape[:-1], param.shape[-1] // values_per_byte)
        views.parameters.append(flat_buffer[at : at + size].view(shape))
    return views


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to the target at its index, with a cast. Small tensors use one launch."""
    small: tuple[list[Tensor], list[Tensor]] = [], []
    for target, source in zip(targets, sources, strict=True):
        if target.numel() >= LARGE:
            target.copy_(source)
        else:
            small[0].append(target)
            small[1].append(source)
    if small[0]:
        foreach_copy_(*small)
