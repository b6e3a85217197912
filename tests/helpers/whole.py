"""Whole tensors on one rank in one exchange: `full_tensor` takes one or two for each of them.

A rank sends what it holds of all tensors in one message. The other lays every shard where its
placements put it: it cuts a tensor of positions as DTensor cuts tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from moecore.base.rank_checks import gather_objects

K, T = TypeVar("K"), TypeVar("T")


@dataclass(frozen=True)
class Held:
    """What this rank holds of a tensor, and where it belongs."""

    local: Tensor
    shape: tuple[int, ...]
    placements: tuple[Placement, ...] = ()
    mesh: tuple[int, ...] = ()  # the sizes of the mesh's axes
    coordinate: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensor: Tensor) -> Held:
        if not isinstance(tensor, DTensor):
            return cls(tensor.detach(), tuple(tensor.shape))
        assert not any(p.is_partial() for p in tensor.placements)
        mesh = tensor.device_mesh
        place = tuple(mesh.get_coordinate() or ())
        with torch.no_grad():  # else torch plans an operation on the DTensor
            local = tensor.to_local()
        return cls(local, tuple(tensor.shape), tensor.placements, tuple(mesh.shape), place)


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return the elements of a whole tensor that this rank holds of `like`, as it holds them."""
    held = Held.of(like)
    at = positions(held.shape, held.placements, held.mesh, held.coordinate)
    return whole.detach().flatten()[at].view(held.local.shape)


def by_turns(keys: Iterable[K], compute: Callable[[K], T]) -> dict[K, T]:
    """Return what `compute` makes of each key, of which every rank computes some for all.

    For references of one process, which all ranks compare with.
    """
    mine = {key: compute(key) for key in list(keys)[dist.get_rank() :: dist.get_world_size()]}
    return {key: found for of_rank in gather_objects(mine) for key, found in of_rank.items()}


def gather_whole(tensors: dict[str, Any], rank: int = 0) -> dict[str, Tensor]:
    """Return the tensors of all ranks on `rank`'s CPU, DTensors whole; {} on the other ranks.

    Ranks that hold the same elements must hold the same bits, but for losses of their own.
    """
    held = {n: t if isinstance(t, Held) else Held.of(t) for n, t in tensors.items()}
    parts: dict[torch.dtype, list[Tensor]] = {}
    for h in held.values():
        parts.setdefault(h.local.dtype, []).append(h.local.detach().flatten().cpu())
    # Arrays, which are pickled as they are; a tensor becomes a file.
    flat = {dtype: torch.cat(same).view(torch.uint8).numpy() for dtype, same in parts.items()}
    specs = {
        n: (h.local.dtype, h.local.numel(), (h.shape, h.placements, h.mesh, h.coordinate))
        for n, h in held.items()
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.gather_object((specs, flat), everyone if dist.get_rank() == rank else None, rank)
    found: dict[str, Tensor] = {}
    written: dict[str, Tensor] = {}
    for specs, arrays in everyone if dist.get_rank() == rank else ():
        flat = {dtype: torch.from_numpy(array).view(dtype) for dtype, array in arrays.items()}
        starts = dict.fromkeys(flat, 0)
        for name, (dtype, size, place) in specs.items():
            values = flat[dtype][starts[dtype] : starts[dtype] + size]
            starts[dtype] += size
            whole = found.setdefault(name, torch.empty(place[0], dtype=dtype)).view(-1)
            mask = written.setdefault(name, torch.zeros(whole.shape, dtype=torch.bool))
            at = positions(*place)
            was = mask[at]
            same = torch.equal(whole[at][was], values[was])
            assert same or name.startswith("loss/"), f"{name} differs between ranks"
            whole[at[~was]], mask[at] = values[~was], True
    assert all(mask.all() for mask in written.values())
    return found


@cache
def positions(
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> Tensor:
    """Return where in the flat whole tensor the elements of one rank belong."""
    at = torch.arange(prod(shape)).view(shape)
    last: list[int] = []  # mesh dims that cut what those behind them have cut
    dims: list[Any] = [getattr(placement, "dim", None) for placement in placements]
    for i, placement in enumerate(placements):
        behind = prod(mesh[j] for j in range(i + 1, len(mesh)) if dims[j] == dims[i])
        if getattr(placement, "split_factor", 1) == behind > 1:
            last.append(i)
        elif not placement.is_replicate():
            at = placement._split_tensor(at, mesh[i], with_padding=False)[0][coordinate[i]]
    for i in reversed(last):
        at = Shard(dims[i])._split_tensor(at, mesh[i], with_padding=False)[0][coordinate[i]]
    return at.flatten()
