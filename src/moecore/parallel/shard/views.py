"""A unit's flat memory, cut into what each parameter has of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moecore.base.torch_names import foreach_copy_
from moecore.parallel.shard.params import UnitParam

LARGE = 1 << 22  # elements, from which a copy of its own is faster than a part of one for many


@dataclass(frozen=True, slots=True)
class Views:
    """Pieces of a unit's memory, one of each kind per parameter.

    Attributes:
        flat: the memory.
        regions: the shards of all ranks.
        padded: this rank's part of each.
        own: that without padding.
        parameters: the whole parameters; where dim 0 is cut, the regions without padding.
    """

    flat: Tensor
    regions: list[Tensor]
    padded: list[Tensor]
    own: list[Tensor]
    parameters: list[Tensor]


def cut_views(params: Sequence[UnitParam], flat: Tensor, beside: int) -> Views:
    """Cut a unit's memory.

    Args:
        params: of the unit.
        flat: the memory.
        beside: where the memory of strided parameters begins, behind all regions.
    """
    views = Views(flat, [], [], [], [])
    for param in params:
        slot, size = param.slot, param.shape.numel()
        n, at = slot.shard_numel, slot.whole_offset
        region = flat[at : at + param.num_ranks * n]
        padded = region[param.rank * n : (param.rank + 1) * n]
        if param.is_strided:
            at, beside = beside, beside + size
        views.regions.append(region)
        views.padded.append(padded)
        views.own.append(padded[: param.shard.numel()])
        views.parameters.append(flat[at : at + size].view(param.shape))
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
