"""UnitParam: a parameter as its owner trains it, and as its module computes with it.

    sharded   a DTensor of the model's name and shape; optimizers and checkpoints see it
    whole     a view of its unit's buffer, registered on the module in forward and backward

dim 0 is cut into even chunks, as DTensor's Shard(0) does, so the chunks of all ranks one after the
other are the whole parameter: it is gathered where it is used, and nothing is copied. Chunks of
another dim are gathered beside it and copied. `UnitViews` cuts a unit's flat memory into them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from moecore.base.copies import as_part
from moecore.base.params import GATHERED_BLOCKS, READS_PLAIN, grad_placements
from moecore.base.torch_private import (
    StridedShard,
    call_accumulate_hooks,
    foreach_copy_,
    has_value_hooks,
    local_of,
    parameter_like,
    through_hooks,
    wrapped_like,
)
from moecore.moe.param_reader import gathered_blocks
from moecore.parallel.fsdp.plan import FlatSlot

LARGE = 1 << 22  # elements, from which a copy of its own is faster than a part of one for many
Owners = list[tuple[nn.Module, str]]  # modules, and their attributes that are one parameter


class UnitParam:
    """One parameter of a unit. Replaces it by its sharded form, without communication."""

    def __init__(
        self,
        slot: FlatSlot,
        owners: Owners,
        mesh: DeviceMesh | None,
        *,
        device_type: str,
        is_cut: bool,
        join: Callable[..., DeviceMesh],
    ) -> None:
        self.slot, self.owners = slot, owners
        dim, chunk = slot.dim, slot.rows
        module, attribute = owners[0]
        param = module._parameters[attribute]
        assert param is not None, "units are made of parameters"
        self.num_ranks, self.rank = 1, 0
        if mesh is not None and is_cut:
            self.num_ranks = mesh.size(mesh.ndim - 1)
            self.rank = mesh.get_local_rank(mesh.ndim - 1)
        self._inner = (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
        self._is_plain = self._inner is None or hasattr(param, READS_PLAIN)
        data = local_of(param).detach()
        self.shape = data.shape  # of the whole, which tensor and expert parallelism have cut
        self.shard_shape = (*self.shape[:dim], chunk, *self.shape[dim + 1 :])
        start = min(self.rank * chunk, self.shape[dim])
        local_data = data.narrow(dim, start, min(chunk, self.shape[dim] - start))
        local_data = local_data.to(device_type) if not local_data.is_meta else local_data
        shard = local_data.clone(memory_format=torch.contiguous_format)
        place = _placements(param, dim if is_cut else None, mesh, join)
        self.sharded = parameter_like(as_part(shard, *place, of=param), param)
        self.shard = local_of(self.sharded)  # this rank's part
        self.unsharded: nn.Parameter | None = None  # before the first gather
        register_params([self], unsharded=False)

    @property
    def is_strided(self) -> bool:
        """Whether the shards of all ranks, one after the other, are not the parameter."""
        return self.slot.dim > 0 and self.num_ranks > 1

    @property
    def is_partial(self) -> bool:
        """Whether tensor parallel ranks have it alike, so that gradients are summed over them."""
        return self._inner is not None and any(p.is_replicate() for p in self._inner[1])

    @property
    def dtype(self) -> torch.dtype:
        """Of the sharded parameter."""
        return self.shard.dtype

    def refresh(self) -> bool:
        """Take the parameter that stands in the module now; return whether its memory changed."""
        module, attribute = self.owners[0]
        param = module._parameters[attribute]
        if param is self.sharded:
            local = local_of(param)  # torch may return another object each time
            if local is self.shard or (
                local.data_ptr() == self.shard.data_ptr() and local.device == self.shard.device
            ):
                return False
        if not isinstance(param, DTensor) or param.shape != self.sharded.shape:
            raise ValueError(
                f"{self.slot.param} ({type(param).__name__}) must stay the DTensor that "
                "parallelize_moe has made: copy values into it"
            )
        self.sharded, self.shard = param, local_of(param)
        register_params([self], unsharded=False)  # at its other owners too
        return True

    def make_unsharded(self, data: Tensor) -> list[Tensor]:
        """Make the whole parameter of its memory; return the tensors that count its changes."""
        local = data.data
        if self._inner is not None and not self._is_plain:
            local = as_part(local, *self._inner, of=self.sharded)
        self.unsharded = parameter_like(local, self.sharded)
        blocks = gathered_blocks(self.sharded)
        if blocks is not None:  # `precision/stored.py`: the shard has no values
            setattr(self.unsharded, GATHERED_BLOCKS, blocks)
        return [self.unsharded] if self._is_plain else [self.unsharded, local_of(self.unsharded)]

    def take_grad(self, unsharded: nn.Parameter) -> Tensor:
        """Return the gradient of the whole parameter, and drop it there. May communicate."""
        grad, unsharded.grad = unsharded.grad, None
        assert grad is not None, "the caller passes a parameter that has a gradient"
        if self._inner is None:
            return grad
        if self._is_plain:
            grad = self._placed(grad)
        # Over tensor parallel ranks it is summed where the parameter is replicated.
        if grad.placements != self._inner[1]:  # type: ignore[attr-defined]
            grad = grad.redistribute(placements=self._inner[1])  # type: ignore[attr-defined]
        return local_of(grad)

    def add_grad(self, grad: Tensor) -> None:
        """Make, or add to, the gradient of the whole parameter, as autograd does; keep `grad`."""
        unsharded = self.unsharded
        assert unsharded is not None, "a forward has made it"
        grad = grad.view(self.shape)
        if not self._is_plain:
            grad = self._placed(grad)
        unsharded.grad = grad if unsharded.grad is None else unsharded.grad + grad

    def _placed(self, grad: Tensor) -> DTensor:
        """Return this rank's gradient of the whole parameter as a DTensor over its inner mesh."""
        assert self._inner is not None, "plain ones are placed nowhere"
        mesh, placements = self._inner
        return as_part(grad, mesh, grad_placements(placements), of=self.sharded)

    def put_grad(self, grad: Tensor) -> None:
        """Make, or add to, the gradient of the sharded parameter, with its hooks; keep `grad`."""
        self.accumulate(grad)
        call_accumulate_hooks(self.sharded)

    def accumulate(self, grad: Tensor) -> None:
        """Make, or add to, the gradient of the sharded parameter, behind `register_hook`'s."""
        if has_value_hooks(self.sharded):
            grad = local_of(through_hooks(self.sharded, wrapped_like(grad, self.sharded)))
        if self.sharded.grad is None:
            self.sharded.grad = wrapped_like(grad, self.sharded)
        else:
            local_of(self.sharded.grad).add_(grad)


def register_params(params: Sequence[UnitParam], *, unsharded: bool) -> None:
    """Give the modules of each parameter its unsharded, or its sharded, form."""
    for param in params:
        for module, attribute in param.owners:
            module._parameters[attribute] = param.unsharded if unsharded else param.sharded


def _placements(
    param: Tensor, dim: int | None, mesh: DeviceMesh | None, join: Callable[..., DeviceMesh]
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return where the sharded parameter lies: over data ranks, then as it was before."""
    inner = param.device_mesh if isinstance(param, DTensor) else None
    before = param.placements if isinstance(param, DTensor) else ()
    if mesh is None:
        assert inner is not None, "only experts have no mesh of data ranks, and these are DTensors"
        return inner, before
    placements: list[Placement] = [Replicate()] * mesh.ndim
    if dim is not None:
        cuts = 1
        for mesh_dim, placement in enumerate(before):
            if inner is not None and not placement.is_replicate() and placement.dim == dim:  # type: ignore[attr-defined]
                cuts *= inner.size(mesh_dim)
        # Tensor and expert parallelism have cut the dim first.
        placements[-1] = Shard(dim) if cuts == 1 else StridedShard(dim, split_factor=cuts)
    return (mesh if inner is None else join(mesh, inner)), (*placements, *before)


@dataclass(frozen=True, slots=True)
class UnitViews:
    """Pieces of a unit's memory, one of each kind per parameter."""

    flat: Tensor
    regions: list[Tensor]  # the shards of all ranks
    padded_local: list[Tensor]  # this rank's part of each region
    local: list[Tensor]  # the same without padding
    parameters: list[Tensor]  # where dim 0 is cut, the regions without padding


def cut_views(
    params: Sequence[UnitParam], flat: Tensor, beside: int, values_per_byte: int = 1
) -> UnitViews:
    """Cut a unit's memory; strided parameters lie from `beside` on, behind all regions."""
    # An element of the memory is `values_per_byte` values of a last dim.
    views, beside = UnitViews(flat, [], [], [], []), beside // values_per_byte
    for param in params:
        slot, size = param.slot, param.shape.numel() // values_per_byte
        n, at = slot.shard_numel // values_per_byte, slot.whole_offset // values_per_byte
        region = flat[at : at + param.num_ranks * n]
        padded_view = region[param.rank * n : (param.rank + 1) * n]
        if param.is_strided:
            at, beside = beside, beside + size
        views.regions.append(region)
        views.padded_local.append(padded_view)
        views.local.append(padded_view[: param.shard.numel() // values_per_byte])
        shape = (*param.shape[:-1], param.shape[-1] // values_per_byte)
        views.parameters.append(flat[at : at + size].view(shape))
    return views


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors, small ones in one launch, and cast them."""
    small: tuple[list[Tensor], list[Tensor]] = [], []
    for target, source in zip(targets, sources, strict=True):
        if target.numel() >= LARGE:
            target.copy_(source)
        else:
            small[0].append(target)
            small[1].append(source)
    if small[0]:
        foreach_copy_(*small)
