"""Access to parameters that may be sharded: local tensors, layout-independent initialisation.

Layers compute with plain local tensors. The DTensor placements of a parameter say whether it is
unsharded, sharded over ep, etp or tp, or replicated over tp.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from moecore.base.copies import make_dtensor
from moecore.base.torch_private import get_local_tensor, make_parameter_like

T = TypeVar("T")
BLOCK_NUMEL = 1 << 20  # values drawn at once by `init_normal_`
READS_PLAIN = "_moecore_reads_plain"  # attribute of a sharded parameter, see `shard_parameter`
PARALLEL_STATE = "_moecore_parallel_state"  # attribute of a parallelized model
GATHERED_BLOCKS = "_moecore_gathered"  # attribute of a parameter in FP8 blocks
# Attribute of a parameter without values: a function (box, values) that stores them quantised.
WRITE_VALUES = "_moecore_write_values"
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def clean_name(name: str) -> str:
    """Remove the name parts that torch.compile, checkpointing and FSDP1 add to a qualified name."""
    name += "."  # the name of a wrapped module ends in the wrapper's part
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removesuffix(".")


def get_local_param(param: Tensor, *, needs_values: bool = True) -> Tensor:
    """Return this rank's local tensor of a parameter; differentiable.

    Raises NotImplementedError if the parameter has only FP8 blocks (values with scales), unless
    `needs_values` is False: the caller then reads the blocks (`get_fp8_blocks`).
    """
    local = param
    if isinstance(param, DTensor) and torch.compiler.is_compiling():
        local = param.to_local(grad_placements=make_grad_placements(param.placements))
    elif isinstance(param, DTensor):
        local = _ToLocal.apply(param)
    if needs_values:
        check_has_values(local)
    return local


class _ToLocal(torch.autograd.Function):
    """`DTensor.to_local` whose backward accepts None, if the gradient was stored elsewhere."""

    @staticmethod
    def forward(ctx: Any, param: DTensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.param = param
        local = get_local_tensor(param)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        param, placements = ctx.param, make_grad_placements(ctx.param.placements)
        return make_dtensor(grad, param.device_mesh, placements, like=param)


def has_values(local_tensor: Tensor) -> bool:
    """Whether a local tensor has memory for its values; False if only FP8 blocks store them."""
    return local_tensor.numel() < 2 or any(local_tensor.stride())


def write_values(param: Tensor, box: tuple[slice, ...], values: Tensor) -> None:
    """Write `values` to the slices `box` of a local tensor, quantised if the parameter is."""
    target, write = get_local_tensor(param).detach()[box], getattr(param, WRITE_VALUES, None)
    if write is None:
        target.copy_(values.view(target.shape))
    else:
        write(box, values.view(target.shape))


def check_has_values(local_tensor: Tensor) -> None:
    """Raise NotImplementedError for a local tensor without memory, stored only as FP8 blocks."""
    if not has_values(local_tensor):
        raise NotImplementedError(
            f"a weight {list(local_tensor.shape)} was gathered or is stored in FP8, so products of "
            "its recipe alone can read it, outside of torch.compile and dispatch modes (selective "
            "checkpointing): set FSDPOptions.fp8_param_gather to False, or do not store it so"
        )


def make_grad_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return the gradient's placements for a parameter's placements: Replicate becomes Partial."""
    # Ranks with a replicated parameter have different tokens (sequence parallelism), or parts of
    # the gradient of equal tokens (transformers models), so each gradient is a partial sum.
    return tuple(Partial() if p.is_replicate() else p for p in placements)


def init_normal_(param: Tensor, *, std: float, key: str, seed: int = 0) -> None:
    """Fill `param` with N(0, std^2); values depend on `key`, `seed`, device type, not sharding."""
    # A generator seeded by (seed, key, block) draws each block of about `BLOCK_NUMEL` values along
    # dim 0 of the global tensor. A rank draws only the blocks of its shard.
    _fill_shard(param, key, seed, lambda values, g: values.normal_(0.0, std, generator=g))


def init_uniform_(param: Tensor, *, bound: float, key: str, seed: int = 0) -> None:
    """Fill `param` with U(-bound, bound); values depend on the arguments of `init_normal_`."""
    _fill_shard(param, key, seed, lambda values, g: values.uniform_(-bound, bound, generator=g))


@torch.no_grad()
def _fill_shard(
    param: Tensor, key: str, seed: int, fill_: Callable[[Tensor, torch.Generator], Tensor]
) -> None:
    """Fill a shard with its part of global values, which depend only on `key` and `seed`.

    `fill_` receives a block of global rows in fp32, and the generator that draws its values.
    """
    local = get_local_tensor(param)
    if local.numel() == 0:
        return
    indices = compute_global_indices(param)
    block_rows = max(1, BLOCK_NUMEL // max(1, math.prod(param.shape[1:])))
    rows = indices[0]
    generator = torch.Generator(device=local.device)
    start = 0
    while start < rows.numel():
        block = int(rows[start]) // block_rows
        first = block * block_rows
        size = min(block_rows, param.shape[0] - first)
        stop = start + int((rows[start:] // block_rows == block).to(torch.int64).cumprod(0).sum())
        generator.manual_seed(derive_seed(seed, key, block))
        values = torch.empty((size, *param.shape[1:]), device=local.device, dtype=torch.float32)
        fill_(values, generator)
        part = values[(rows[start:stop] - first).to(local.device)]
        for dim, index in enumerate(indices[1:], start=1):
            if index.numel() != param.shape[dim]:
                part = part.index_select(dim, index.to(local.device))
        write_values(param, (slice(start, stop),), part)
        start = stop


def compute_global_indices(param: Tensor, coordinate: Sequence[int] | None = None) -> list[Tensor]:
    """Return the global indices of a shard per dim, sorted int64 on the CPU.

    `coordinate` is a rank's position in the mesh; None = this rank.
    """
    # Example: [8] over (edp_shard=2, ep=2) with placements (_StridedShard(0, split_factor=2),
    # Shard(0)): ep splits first, so rank (edp 1, ep 0) holds [2, 3].
    indices = [torch.arange(n, device="cpu") for n in param.shape]
    if not isinstance(param, DTensor):
        return indices
    mesh = param.device_mesh
    coordinate = mesh.get_coordinate() if coordinate is None else coordinate
    assert coordinate is not None, "a rank outside the mesh holds no shard"
    for dim, index in enumerate(indices):
        # A StridedShard means that mesh axes to its right split the same dim first. Without such
        # axes it means interleaved parts (gate and up of one expert).
        strided: list[tuple[int, int]] = []
        inner = 1
        for mesh_dim in reversed(range(mesh.ndim)):
            placement = param.placements[mesh_dim]
            if placement.is_replicate() or placement.dim != dim:  # type: ignore[attr-defined]
                continue
            parts = getattr(placement, "split_factor", 1)
            size, rank = mesh.size(mesh_dim), coordinate[mesh_dim]
            if parts > 1 and parts != inner:
                index = index.view(parts, size, -1)[:, rank].reshape(-1)  # a chunk of each part
            elif parts > 1:
                strided.append((size, rank))
            else:
                index = _get_chunk_indices(index, size, rank)
            inner *= size
        for size, rank in strided:
            index = _get_chunk_indices(index, size, rank)
        indices[dim] = index
    return indices


def _get_chunk_indices(indices: Tensor, num_chunks: int, chunk_idx: int) -> Tensor:
    """Return chunk `chunk_idx` of indices that `torch.chunk` would split into `num_chunks`."""
    step = -(-indices.numel() // num_chunks)
    return indices[chunk_idx * step : (chunk_idx + 1) * step]


def find_consecutive_runs(indices: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (first index, length) of each run of consecutive numbers in sorted `indices`."""
    if indices.numel():
        edges = [0, *(indices.diff() != 1).nonzero().flatten().add(1).tolist(), indices.numel()]
        yield from ((int(indices[a]), b - a) for a, b in itertools.pairwise(edges))


def derive_seed(seed: int, key: str, block_idx: int = 0) -> int:
    """Return a generator's seed, 0 <= seed < 2^63, as a hash of seed, key and block number."""
    digest = hashlib.sha256(f"{seed}/{key}/{block_idx}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def shard_parameter(
    module: nn.Module,
    name: str,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    *,
    reads_local_tensor: bool = False,
) -> None:
    """Replace a module's unsharded parameter `name` by a DTensor of this rank's shard.

    No communication: each rank must have equal values. If `reads_local_tensor`, the module computes
    with the local tensor, not with the DTensor.
    """
    # With `reads_plain` the module's unit registers the local tensor, and its gradient has
    # `make_grad_placements`. Sharded dims must divide evenly. `_StridedShard(dim, split_factor=n)`
    # shards each of n equal parts of the dim (gate and up of one expert).
    param = getattr(module, name)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh holds no shard"
    local = param.detach()
    for mesh_dim, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim, size, rank = placement.dim, mesh.size(mesh_dim), coordinate[mesh_dim]  # type: ignore[attr-defined]
        parts = getattr(placement, "split_factor", 1)
        pieces = local.unflatten(dim, (parts, size, local.shape[dim] // (parts * size)))
        local = pieces.select(dim + 1, rank).flatten(dim, dim + 1)
    if not local.is_meta:
        local = local.to(mesh.device_type)
    local = local.clone(memory_format=torch.contiguous_format)
    sharded = make_parameter_like(make_dtensor(local, mesh, placements, like=param), param)
    if reads_local_tensor:
        setattr(sharded, READS_PLAIN, True)
    module.register_parameter(name, sharded)


def chunk_by_size(
    items: Iterable[T], get_size: Callable[[T], int], max_size: int
) -> Iterator[list[T]]:
    """Yield lists of consecutive items with total size <= `max_size`, or a single larger item."""
    group: list[T] = []
    total = 0
    for item in items:
        size = get_size(item)
        if group and total + size > max_size:
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group
