"""Records of an offloaded forward: saved storages by part and layer, and counts of their handles.

A handle is the object that replaces a saved tensor until backward unpacks it. A storage belongs to
the group that saved it first. Each storage counts its handles, and so does each group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moecore.base.saved_tensors import UsedRows
from moecore.base.streams import Stream
from moecore.base.torch_private import sum_version_counters
from moecore.train.memory.streams import CopyEvent

Key = tuple[str, int]  # a part's name, and how often its layer has entered that name before
REST: Key = ("", 0)  # tensors that a block saves outside of parts


@dataclass(slots=True)
class HandleCounts:
    """Counts of the handles that replace the saved tensors of a storage or a group."""

    alive: int = 0  # handles that exist
    remaining: int = 0  # handles that the current backward has not unpacked
    backward_idx: int = 0  # of the current backward, from 0

    def add_handle(self) -> int:
        """Count a new handle; return the index of the backward that will unpack the handle."""
        self.alive += 1
        self.remaining += 1
        return self.backward_idx

    def count_unpack(self, backward_idx: int) -> tuple[int, bool]:
        """Count an unpack of a handle in backward `backward_idx`.

        Returns the index of the next backward that can unpack the handle, and whether all handles
        of the current backward are now unpacked.
        """
        if backward_idx != self.backward_idx:
            return backward_idx, False
        self.remaining -= 1
        return backward_idx + 1, self._end_backward_if_unpacked()

    def remove_handle(self, backward_idx: int) -> bool:
        """Count a deleted handle; return whether the current backward has ended."""
        self.alive -= 1
        if backward_idx != self.backward_idx:
            return False
        self.remaining -= 1
        return self._end_backward_if_unpacked()

    def _end_backward_if_unpacked(self) -> bool:
        """Start counting the next backward if no handle remains; return whether it started."""
        if self.remaining:
            return False
        self.backward_idx, self.remaining = self.backward_idx + 1, self.alive
        return True


@dataclass(eq=False, slots=True)
class StorageCopy:
    """A saved storage of `size` bytes, and its copy in host memory or in pages on the device."""

    size: int
    ref: StorageWeakRef  # to the saved storage
    counter: Tensor  # without memory; shares the version counter of the saved tensors
    version: int
    data: Tensor | None  # uint8, on the device; None while only the store has it
    home: Stream | None  # waits before `data` is freed
    used_rows: UsedRows | None  # the rows in use; None = all
    piece: Any = None  # its place in the store; None where the storage stays
    out: CopyEvent | None = None  # the end of the copy to the store
    busy: CopyEvent | None = None  # the end of the last copy that reads or writes `data`
    is_back: bool = False  # whether `data` was copied back
    handles: HandleCounts = field(default_factory=HandleCounts)

    def has_storage_of(self, tensor: Tensor) -> bool:
        """Whether `data` is the storage of `tensor`, not modified since it was saved."""
        if self.data is None or self.is_back:
            return False
        has_size = self.size == tensor.untyped_storage().nbytes()
        return has_size and self.version == sum_version_counters(tensor)

    def free_device_memory(self) -> None:
        """Free the device memory after a running copy; the stream `home` waits, not the host."""
        if self.busy is not None:
            self.busy.make_stream_wait(self.home)
        self.data, self.busy, self.is_back = None, None, False

    def is_unchanged(self) -> bool:
        """Whether the storage on the device still has its memory and its saved values."""
        assert self.data is not None
        has_memory = self.data.untyped_storage().nbytes() == self.size
        return has_memory and sum_version_counters(self.counter) == self.version


@dataclass(eq=False, slots=True)
class StorageGroup:
    """The storages that one part of a block, such as attention, saves for backward in a forward."""

    key: Key
    layer: ReferenceType[Layer]  # weak: its layer has it, and a cycle keeps counts on the device
    is_last: bool  # whether the layer is the last block, which stays on the device
    stream: Stream | None  # current stream of the layer's forward
    weights: frozenset[int]  # keys of the storages of the part's parameters and buffers
    # Storages that this group saved first.
    new_copies: list[StorageCopy] = field(default_factory=list)
    # Groups that are copied back after the backward of this one.
    prefetch_groups: list[StorageGroup] = field(default_factory=list)
    handles: HandleCounts = field(default_factory=HandleCounts)
    has_unpacked: bool = False  # whether backward has unpacked one of its handles

    def free_device_memory(self) -> None:
        """Free the device memory of storages whose copies to host memory or pages have started."""
        for copy in self.new_copies:
            if copy.busy is not None and not copy.is_back:
                copy.free_device_memory()


@dataclass(eq=False, slots=True, weakref_slot=True)
class Layer:
    """Record of one forward of a block: a `StorageGroup` for each part, such as attention."""

    index: int  # of the block in its stage
    is_last: bool
    stream: Stream | None  # the current stream; None on a CPU
    groups: dict[Key, StorageGroup] = field(default_factory=dict)

    def link_to_previous(self, previous_layer: Layer | None) -> None:
        """Make each part's backward prefetch offloaded tensors of the previous layer's part."""
        self.groups = {key: group for key, group in self.groups.items() if group.handles.alive}
        previous_groups = dict(previous_layer.groups) if previous_layer is not None else {}
        if not self.groups:
            self.groups = previous_groups
            return
        for key, group in self.groups.items():
            if key in previous_groups:
                group.prefetch_groups.append(previous_groups.pop(key))
        # Parts that this layer lacks are copied back after the part whose backward comes first.
        next(reversed(self.groups.values())).prefetch_groups += previous_groups.values()


@dataclass(eq=False, slots=True)
class OffloadChunk:
    """Record of one offloaded forward of several blocks, such as the blocks of a pipeline stage."""

    offloads_last_block: bool  # whether the last block is also offloaded
    layers: list[Layer] = field(default_factory=list)
    pending_free: list[StorageGroup] = field(default_factory=list)  # copied out, not freed yet


@dataclass(slots=True)
class StorageUse:
    """Storage and group of a handle, and the index of the next backward that unpacks each."""

    copy: StorageCopy
    group: StorageGroup
    copy_backward_idx: int
    group_backward_idx: int
