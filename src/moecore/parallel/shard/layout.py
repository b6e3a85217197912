"""Where each parameter of a unit lies in flat buffers: the shard of a rank, and the whole unit.

    flat shard      | a: padded shard |..| b: padded shard |..|        .. alignment
    flat whole      | a: rank 0 | a: rank 1 |..| b: rank 0 | b: rank 1 |..|

Parameters are cut as FSDP2 cuts them, so that checkpoints and DTensors do not see which engine
gathers: rank r has rows r * n to (r + 1) * n of dim 0, n = ceil(rows / ranks), and the last ranks
what is left. An all-gather that has one entry per parameter puts each whole one in place: it is a
view of the flat whole, with its padding behind it. One that is cut along another dim (few experts
among many ranks) is not: its ranks' parts must be moved side by side.

Note "alignment": shards begin at multiples of 128 elements, a line of a GPU's L2 (128 bytes) in a
dtype of one byte, and so of whole lines in any dtype in which a unit is stored, gathered or
reduced: offsets depend on no dtype. Kernels and NCCL then move 16 bytes at a time, TMA and grouped
products find the alignment that they ask for, and no two parameters share a line that two kernels
write. Offsets in the whole are a multiple of those, and as well aligned. It costs at most 127
elements of a parameter's shard.

Example, 4 ranks, a [600, 2] and b [3]: a has 150 rows and 300 elements per shard, b 1 and 1. Shard
offsets 0 and 384, whole offsets 0 and 1536, 512 elements of a shard, 2048 of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set

import torch

from moecore.base.options.precision import Recipe
from moecore.parallel.shard.plan import FlatLayout, FlatSlot, ParamPlan

ALIGNMENT = 128  # elements


def flat_layouts(
    params: Iterable[ParamPlan],
    *,
    ranks: int,
    gather_dtype: str | None = None,
    recipes: Mapping[str, Recipe] | None = None,
    fp32: Set[str] = frozenset(),
) -> tuple[FlatLayout, ...]:
    """Return where the parameters of a unit lie: a layout for those that are gathered alike.

    Args:
        params: in order.
        ranks: over which the unit is sharded.
        gather_dtype: of floating ones; None = that in which they are stored.
        recipes: of those that are gathered in FP8, by name.
        fp32: names of those that are gathered as they are stored, whatever `gather_dtype`.
    """
    alike: dict[tuple[str, str, Recipe | None], list[ParamPlan]] = {}
    for param in params:
        recipe, gathers = (recipes or {}).get(param.name), param.dtype
        if recipe is not None:
            gathers = "float8_e4m3fn"
        elif gather_dtype is not None and param.name not in fp32:
            is_float = getattr(torch, param.dtype).is_floating_point
            gathers = gather_dtype if is_float else param.dtype
        alike.setdefault((param.dtype, gathers, recipe), []).append(param)
    return tuple(_flat_layout(*how, params, ranks) for how, params in alike.items())


def _flat_layout(
    dtype: str, gathers: str, recipe: Recipe | None, params: Iterable[ParamPlan], ranks: int
) -> FlatLayout:
    slots, offset = [], 0
    for param in params:
        dim, shape = 0, list(param.computed_shape())
        if param.data_placement is not None and param.data_placement.dim is not None:
            dim = param.data_placement.dim
        whole, shape[dim] = math.prod(shape), -(-shape[dim] // ranks)
        numel = math.prod(shape)
        slots.append(
            FlatSlot(
                param=param.name,
                dim=dim,
                rows=shape[dim],
                shard_offset=offset,
                shard_numel=numel,
                whole_offset=offset * ranks,
                numel=whole,
            )
        )
        offset += -(-numel // ALIGNMENT) * ALIGNMENT
    return FlatLayout(
        dtype=dtype,
        gathers=gathers,
        recipe=recipe,
        ranks=ranks,
        slots=tuple(slots),
        shard_numel=offset,
        whole_numel=offset * ranks,
    )
