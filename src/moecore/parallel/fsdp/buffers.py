"""Buffers of units, planned from a `ShardPlan` and allocated once.

Units that are resharded after each use share buffers of unsharded parameters. The number of buffers
is the number of units of one role that are unsharded at the same time. These units also share two
buffers of gradient sums: backward fills one buffer while the other buffer is reduced. A resident
unit does not share its buffer, and allocates memory for its gradients.

A unit always uses the same buffer. Its unsharded parameters therefore keep their addresses, so
tensors that autograd saved in forward are valid again in backward, and CUDA graphs can replay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from moecore.parallel.fsdp.plan import ShardPlan, UnitPlan
from moecore.parallel.fsdp.transport import StreamEvent

Holder = TypeVar("Holder")  # a unit, or its gradients
SUMS = 2  # buffers of gradient sums
LayoutIndex = tuple[str, int]  # name of a unit, and index in `UnitPlan.layouts`


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferPlan:
    """The plan of a flat buffer that units (FSDP2's parameter groups) use one at a time."""

    contents: Literal["weights", "sums"]  # unsharded parameters, or sums of gradients
    dtype: str
    numel: int  # elements of the largest layout
    places: tuple[LayoutIndex, ...]  # the layouts, in the order of forward

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.numel * int(getattr(torch, self.dtype).itemsize)


def plan_buffers(plan: ShardPlan) -> Iterator[BufferPlan]:
    """Yield a `BufferPlan` for each buffer of a rank, shared buffers first; equal on all ranks."""
    sharing = [u for u in plan.units if u.role in ("block", "experts") and not u.is_resident]
    for role in ("block", "experts"):
        units = [unit for unit in sharing if unit.role == role]
        for dtype, layouts in _group_by_dtype(units).items():
            num_live = max(  # of a unit and of the units that it prefetches in one pass
                sum(other.name in {unit.name, *prefetch} for other, _ in layouts)
                for unit in plan.units
                for prefetch in (unit.forward_prefetch, unit.backward_prefetch)
            )
            yield from _assign_layouts_to_buffers("weights", dtype, layouts, num_live)
        sharded = [(u, i) for u in units for i, layout in enumerate(u.layouts) if layout.ranks > 1]
        for dtype in dict.fromkeys(unit.layouts[i].reduces for unit, i in sharded):
            reduced = [(unit, i) for unit, i in sharded if unit.layouts[i].reduces == dtype]
            yield from _assign_layouts_to_buffers("sums", dtype, reduced, SUMS)
    for unit in plan.units:
        if unit not in sharing:
            for dtype, layouts in _group_by_dtype([unit]).items():
                yield from _assign_layouts_to_buffers("weights", dtype, layouts, len(layouts))


def _group_by_dtype(units: Sequence[UnitPlan]) -> dict[str, list[tuple[UnitPlan, int]]]:
    """Map each all-gather dtype to its layouts that need a buffer, as (unit, layout index)."""
    layouts_of = defaultdict(list)
    for unit in units:
        for i, layout in enumerate(unit.layouts):
            if layout.has_buffer:
                layouts_of[layout.gathers].append((unit, i))
    return layouts_of


def _assign_layouts_to_buffers(
    contents: Literal["weights", "sums"],
    dtype: str,
    layouts: Sequence[tuple[UnitPlan, int]],
    max_buffers: int,
) -> Iterator[BufferPlan]:
    """Assign layouts (unit, index) round-robin to at most `max_buffers` buffers."""
    for first in range(min(max_buffers, len(layouts))):
        users = layouts[first::max_buffers]
        numel = 0
        for layout in (unit.layouts[i] for unit, i in users):
            packing = layout.values_per_byte if contents == "weights" else 1
            numel = max(numel, layout.buffer_numel // packing)
        places = tuple((unit.name, i) for unit, i in users)
        yield BufferPlan(contents=contents, dtype=dtype, numel=numel, places=places)


class Buffer(Generic[Holder]):
    """A flat tensor that units use one at a time; `holder` is its current user, or None.

    `last_use` is the event of the last use. The next user waits for the event before it overwrites
    the tensor.
    """

    def __init__(self, numel: int, dtype: torch.dtype, last_use: StreamEvent) -> None:
        self.numel, self.dtype, self.last_use = numel, dtype, last_use
        self.holder: Holder | None = None
        self._flat: Tensor | None = None

    def get_flat(self, device: torch.device) -> Tensor:
        """Return the buffer as a 1-D tensor, uninitialised at the first call for a device."""
        if self._flat is None or self._flat.device != device:
            with torch.inference_mode(False):
                self._flat = torch.empty(self.numel, dtype=self.dtype, device=device)
        return self._flat

    def free(self) -> None:
        """Free the buffer's memory; views of the buffer are invalid until `reallocate`."""
        if self._flat is not None:
            self._flat.untyped_storage().resize_(0)

    def reallocate(self) -> None:
        """Allocate the buffer's memory again after `free`; its values are uninitialised."""
        if self._flat is not None:
            self._flat.untyped_storage().resize_(self._flat.nbytes)
