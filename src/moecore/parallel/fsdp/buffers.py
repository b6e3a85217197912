"""Buffers of units, planned from a `ShardPlan` and allocated once.

Units that are resharded after each use share buffers of unsharded parameters. The number of buffers
is the number of units of one role that are unsharded at the same time. These units also share two
buffers of gradient sums: backward fills one buffer while the other buffer is reduced. A resident
unit does not share its buffer, and allocates memory for its gradients.

A unit always uses the same buffer. Its unsharded parameters therefore keep their addresses, so
tensors that autograd saved in forward are valid again in backward, and CUDA graphs can replay.

With `FSDPOptions.nccl_ub` resident units have buffers of gradient sums too, and the buffers of all
sharded units are in memory that is registered with NCCL.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.torch_private import register_allocations
from moecore.parallel.fsdp.plan import ALIGNMENT, ShardPlan, UnitPlan
from moecore.parallel.fsdp.transport import StreamEvent

Holder = TypeVar("Holder")  # a unit, or its gradients
SUMS = 2  # buffers of gradient sums
LayoutIndex = tuple[str, int]  # name of a unit, and index in `UnitPlan.layouts`


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferPlan:
    """Plan of a flat buffer of unsharded weights or gradient sums, used by one unit at a time."""

    contents: Literal["weights", "sums"]  # unsharded parameters, or sums of gradients
    dtype: str
    numel: int  # elements of the largest layout
    places: tuple[LayoutIndex, ...]  # the layouts, in the order of forward

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.numel * int(getattr(torch, self.dtype).itemsize)


def plan_buffers(plan: ShardPlan) -> Iterator[BufferPlan]:
    """Yield a `BufferPlan` per buffer, first buffers that units share; identical on all ranks."""
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
            yield from _assign_layouts_to_buffers("sums", dtype, reduced, SUMS, plan.nccl_ub)
    trained = {param.name for param in plan.params if param.trainable}
    resident = defaultdict(list)  # layouts by role, dtype, and layout of sums over micro-batches
    for unit in plan.units:
        if unit not in sharing:
            for dtype, layouts in _group_by_dtype([unit]).items():
                yield from _assign_layouts_to_buffers("weights", dtype, layouts, len(layouts))
            for i, layout in enumerate(unit.layouts):
                if layout.ranks > 1 and any(slot.param in trained for slot in layout.slots):
                    layout_idx = (unit.name, i) if unit.accumulates else None
                    resident[unit.role, layout.reduces, layout_idx].append((unit, i))
    for (_, dtype, _), layouts in resident.items() if plan.nccl_ub else ():
        yield from _assign_layouts_to_buffers("sums", dtype, layouts, SUMS, has_flags=True)


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
    has_flags: bool = False,
) -> Iterator[BufferPlan]:
    """Assign layouts (unit, index) round-robin to at most `max_buffers` buffers.

    `has_flags` = the buffers have space for the flags that are reduced with the sums.
    """
    for first in range(min(max_buffers, len(layouts))):
        users = layouts[first::max_buffers]
        numel = 0
        for layout in (unit.layouts[i] for unit, i in users):
            packing = layout.values_per_byte if contents == "weights" else 1
            flags = 3 * layout.ranks * len(layout.slots) if has_flags else 0
            numel = max(numel, layout.buffer_numel // packing + flags)
        places = tuple((unit.name, i) for unit, i in users)
        yield BufferPlan(contents=contents, dtype=dtype, numel=numel, places=places)


class RegisteredMemory:
    """A block of memory that is registered with NCCL's communicator of `group`.

    The block contains all buffers: NCCL's symmetric kernels need equal offsets on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._num_bytes = group, 0
        self._block: Tensor | None = None  # its storage is empty after `free`
        self._deregister: Callable[[], None] | None = None  # None = not allocated

    def reserve(self, num_bytes: int) -> int:
        """Reserve aligned bytes in the block before `allocate`; return their offset in bytes."""
        offset = self._num_bytes
        self._num_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return offset

    def allocate(self, device: torch.device) -> None:
        """Allocate and register the block, unless it is allocated or on meta. Collective."""
        if self._deregister is not None or device.type == "meta":
            return
        if self._block is None:
            with torch.inference_mode(False):
                self._block = torch.empty(0, dtype=torch.uint8, device=device)
        self._wait_for_ranks(self._block)
        with register_allocations(self._group, device) as deregister:
            self._block.untyped_storage().resize_(self._num_bytes)
        self._deregister = deregister

    def free(self) -> None:
        """Deregister and free the block; buffers are invalid until `allocate`. Collective."""
        if self._block is not None and self._deregister is not None:
            self._wait_for_ranks(self._block)
            self._deregister()
            self._block.untyped_storage().resize_(0)
            self._deregister = None  # drops the memory pool

    def make_view(self, offset: int, num_bytes: int) -> Tensor:
        """Return bytes of the block from byte `offset` on, uint8, with a new version counter."""
        assert self._block is not None, "the first all-gather has allocated the block"
        storage = self._block.untyped_storage()
        return self._block.new_empty(0).set_(storage, offset, (num_bytes,), (1,))

    def _wait_for_ranks(self, like: Tensor) -> None:
        """Wait on the host for the ranks of the group; the first call creates a communicator."""
        word = like.new_zeros(1)
        dist.all_reduce(word, group=self._group)
        word.item()


class Buffer(Generic[Holder]):
    """A flat tensor that units (parameter groups) use one at a time; `holder` is the current user.

    `last_use` is the event of the last use. The next user waits for the event before it overwrites
    the tensor. If `registered` is None, the tensor is not in memory registered with NCCL.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        last_use: StreamEvent,
        registered: RegisteredMemory | None = None,
    ) -> None:
        self.numel, self.dtype, self.last_use, self.registered = numel, dtype, last_use, registered
        self.holder: Holder | None = None
        if registered is not None:
            self._offset = registered.reserve(numel * dtype.itemsize)
        self._flat: Tensor | None = None

    def get_flat(self, device: torch.device) -> Tensor:
        """Return the buffer as a 1-D tensor; the first call allocates it, uninitialised."""
        if self._flat is None or self._flat.device != device:
            with torch.inference_mode(False):
                if self.registered is None or device.type == "meta":
                    self._flat = torch.empty(self.numel, dtype=self.dtype, device=device)
                else:
                    num_bytes = self.numel * self.dtype.itemsize
                    self._flat = self.registered.make_view(self._offset, num_bytes).view(self.dtype)
        return self._flat

    def check_is_replaceable(self) -> None:
        """Raise a RuntimeError if NCCL-registered: reductions must then use this buffer."""
        if self.registered is not None:  # NCCL fails if the other ranks use the buffer
            raise RuntimeError(
                f"FSDPOptions.nccl_ub (True) must be False for a model in which more than {SUMS} "
                "units of a role (blocks, experts) have gradients that are not reduced: drop it"
            )

    def free(self) -> None:
        """Free the buffer's memory; views of the buffer are invalid until `reallocate`."""
        if self.registered is not None:
            self.registered.free()
        elif self._flat is not None:
            self._flat.untyped_storage().resize_(0)

    def reallocate(self) -> None:
        """Allocate the buffer's memory again after `free`; its values are uninitialised."""
        if self.registered is not None and self._flat is not None:
            self.registered.allocate(self._flat.device)
        elif self._flat is not None:
            self._flat.untyped_storage().resize_(self._flat.nbytes)
