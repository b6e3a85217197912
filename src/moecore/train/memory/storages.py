"""SavedStorages: copies saved storages to a store in forward, and back to the device in backward.

A handle replaces each saved tensor and refers to its storage; views of one storage share one copy.
A `Store` has the copies: host memory, or pages (`stash.py`). `Offload` calls these methods when
parts of blocks begin and end:

    _pack_tensor          a tensor is saved           -> its handle; None = not offloaded
    _copy_group_to_store  a part's forward has ended  -> copies of its storages to the store start
    _free_copied_groups   a later layer's part begins -> the device memory of the group is freed
    _fetch_storage        a handle is unpacked        -> the storage, copied back now at the latest
    _process_deletions    handles were deleted        -> copies of the next groups back start
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moecore.base.saved_tensors import (
    Handle,
    TensorHandle,
    UsedRows,
    find_used_rows,
    make_in_place_error,
)
from moecore.base.torch_private import get_storage_key, sum_version_counters
from moecore.train.memory.groups import StorageCopy, StorageGroup, StorageUse
from moecore.train.memory.host import HostPool, view_bytes
from moecore.train.memory.streams import CopyStreams


class Store(Protocol):
    """Protocol of memory for copies of storages, called by one thread at a time. No host sync."""

    def copy_to_store(self, copies: Sequence[StorageCopy]) -> list[StorageCopy]:
        """Start copies of storages to the store; return the copies that the store accepted."""

    def copy_to_device(
        self, copies: Sequence[StorageCopy], freed_pieces: Sequence[Any] = ()
    ) -> None:
        """Start copies from the store to `data` of `copies`; also free pieces `freed_pieces`."""

    def free_pieces(self, pieces: Sequence[Any]) -> None:
        """Free the pieces of the store whose copies backward no longer needs."""

    def clear(self) -> None:
        """Free all memory; the caller ensures that no launched work uses it."""


class _OffloadedTensor:
    """The handle that replaces a saved tensor until backward: a view of its storage's copy."""

    __slots__ = ("_dtype", "_offset", "_shape", "_storages", "_stride", "_use")

    def __init__(self, storages: "SavedStorages", storage_use: StorageUse, tensor: Tensor) -> None:
        self._storages, self._use = storages, storage_use
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()

    def unpack(self) -> Tensor:
        """Return the saved tensor; a RuntimeError if it was changed in place since forward."""
        data = self._storages._fetch_storage(self._use, self._shape)
        view = torch.empty(0, dtype=self._dtype, device=data.device)
        return view.set_(data.untyped_storage(), self._offset, self._shape, self._stride)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._storages._deleted_uses.append(self._use)
            self._storages._process_deletions_if_unlocked()


class SavedStorages:
    """The storages that a model's blocks save for backward, and their copies in a `Store`.

    `fraction` is the maximum share of saved bytes that is copied, `min_bytes` is the size of the
    smallest copied storage, and `max_host_bytes` limits pinned memory (None = no limit).
    """

    _rows_only = False  # True: only matrices whose used rows are counted are copied

    def __init__(
        self, device: torch.device, fraction: float, min_bytes: int, max_host_bytes: int | None
    ) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.fraction, self.min_bytes = fraction, min_bytes
        self.candidate_bytes = 0  # of storages from `min_bytes` up, without those of last layers
        self.out_bytes = self.back_bytes = 0  # copied out, with unused rows, and back
        self.late_bytes = 0  # of `back_bytes`: the copy began only at the unpacking
        self.observe: Callable[[Tensor], None] | None = None  # of tensors that get a handle
        self._streams = CopyStreams(device)
        self._pool = HostPool(self._streams, max_host_bytes)
        self._store: Store = self._pool
        self._nothing = torch.empty(0, device=device, dtype=torch.float32)
        self._share = fraction  # of this forward
        self._pending_free: list[StorageGroup] = []  # groups whose device memory is not freed yet
        # Storage -> its last copy. The key is not the storage's address, because a unit may free
        # and allocate the memory of a storage that stays.
        self._copies: dict[int, StorageCopy] = {}
        self._staying: dict[int, StorageWeakRef] = {}  # beyond the fraction, or a `resident_input`
        self._finished_groups: list[StorageGroup] = []  # groups whose backward has just run
        self._forward_bytes = self._offload_bytes = 0  # bytes of this forward
        self._deleted_uses: deque[StorageUse] = deque()
        # Forward, autograd's thread and the thread that frees a graph of autograd call this object.
        self._lock = threading.Lock()

    @property
    def host_bytes(self) -> int:
        """Bytes of reserved host memory, whether in use or not."""
        return self._pool.num_bytes

    @property
    def stored_keys(self) -> frozenset[int]:
        """Keys (`StorageWeakRef.cdata`) of the storages that have a copy in the store."""
        return frozenset(key for key, copy in self._copies.items() if copy.piece is not None)

    # Forward.

    def _start_forward(self, max_share: float) -> None:
        """Begin a forward that offloads at most this share of saved bytes; drop old records."""
        self._share = max_share
        self._forward_bytes = self._offload_bytes = 0
        with self._hold_lock():
            items = self._copies.items()
            self._copies = {a: c for a, c in items if c.handles.alive or not c.ref.expired()}
            self._staying = {a: ref for a, ref in self._staying.items() if not ref.expired()}

    def _pack_tensor(self, group: StorageGroup, tensor: Tensor) -> Handle | None:
        """Return the handle that replaces a tensor saved by `group`; None = not offloaded."""
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            return None
        rows = find_used_rows(tensor)
        if self._rows_only and (rows is None or rows.balanced is None):
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < max(self.min_bytes, 1) or tensor.device != self._streams.device:
            return None
        if get_storage_key(tensor) in group.weights:
            return TensorHandle(tensor)
        if tensor.is_conj() or tensor.is_neg():
            return None
        with self._lock:  # handles that die meanwhile are counted by the next call
            ref = StorageWeakRef(storage)
            copy = self._copies.get(ref.cdata)
            # A storage that exists after `_free_copied_groups` freed it has another owner, as a
            # rotary table has: an offload would free no memory, so it stays.
            outlives = copy is not None and not copy.ref.expired()
            if copy is None or not outlives or not copy.has_storage_of(tensor):
                if outlives or not (group.is_last or self._reserve_share(ref, storage.nbytes())):
                    return None
                copy = self._add_copy(tensor, ref, group, rows)
            use = StorageUse(copy, group, copy.handles.add_handle(), group.handles.add_handle())
        if self.observe is not None:
            self.observe(tensor)
        return _OffloadedTensor(self, use, tensor)

    def _reserve_share(self, storage_ref: StorageWeakRef, num_bytes: int) -> bool:
        """Return whether `fraction` allows to offload a newly saved storage; count its bytes."""
        stays = self._staying.get(storage_ref.cdata)
        if stays is not None and not stays.expired():
            return False
        self._forward_bytes += num_bytes
        self.candidate_bytes += num_bytes
        if self._offload_bytes + num_bytes <= self._share * self._forward_bytes:
            self._offload_bytes += num_bytes
            return True
        self._staying[storage_ref.cdata] = storage_ref
        return False

    def _add_copy(
        self,
        tensor: Tensor,
        storage_ref: StorageWeakRef,
        group: StorageGroup,
        used_rows: UsedRows | None,
    ) -> StorageCopy:
        storage = tensor.untyped_storage()
        counter = tensor.detach()
        if not tensor.is_inference():
            counter.data = self._nothing
        copy = StorageCopy(
            size=storage.nbytes(),
            ref=storage_ref,
            counter=counter,
            version=sum_version_counters(tensor),
            data=view_bytes(storage),
            home=group.stream,
            used_rows=used_rows,
        )
        self._copies[storage_ref.cdata] = copy
        group.new_copies.append(copy)
        return copy

    def _copy_group_to_store(self, group: StorageGroup) -> None:
        """Start to copy the group's storages to the store, unless changed or without handles."""
        ready = [copy for copy in group.new_copies if copy.handles.alive and copy.is_unchanged()]
        stored_copies = self._store.copy_to_store(ready)
        self._offload_bytes -= sum(copy.size for copy in group.new_copies if copy.piece is None)
        if stored_copies:
            self.out_bytes += sum(copy.size for copy in stored_copies)
            self._pending_free.append(group)

    def _free_copied_groups(self, is_due: Callable[[StorageGroup], bool]) -> None:
        for group in self._pending_free:
            if is_due(group):
                group.free_device_memory()
        self._pending_free = [group for group in self._pending_free if not is_due(group)]

    # Backward.

    def _fetch_storage(self, use: StorageUse, tensor_shape: torch.Size) -> Tensor:
        """Return the bytes of a saved tensor's storage on the device, copied back if needed.

        Counts the call, since the last one of a backward frees the copy. `tensor_shape` is for the
        error about a tensor that was changed in place.
        """
        copy, group = use.copy, use.group
        with self._hold_lock():
            version = sum_version_counters(copy.counter)
            if version != copy.version:
                raise make_in_place_error(tensor_shape, version, copy.version)
            if copy.data is None:
                self.late_bytes += copy.size
                self._copy_storages_to_device([copy])
            data = copy.data
            assert data is not None
            if copy.is_back:
                assert copy.busy is not None
                current = self._streams.get_current_stream()
                copy.busy.make_stream_wait(current)
                # A part may run on another stream than its block, if that stream begins with a wait
                # for the block's.
                if isinstance(current, torch.cuda.Stream) and current != copy.home:
                    data.record_stream(current)
            # A retained graph begins a further backward, which copies the storage back once more.
            use.copy_backward_idx, is_over = copy.handles.count_unpack(use.copy_backward_idx)
            if is_over and copy.piece is not None:
                copy.free_device_memory()
            group.has_unpacked = True
            use.group_backward_idx, is_over = group.handles.count_unpack(use.group_backward_idx)
            if is_over:
                self._finished_groups.append(group)
        return data

    def _copy_groups_to_device(
        self, groups: Iterable[StorageGroup], freed_pieces: Sequence[Any] = ()
    ) -> None:
        """Start to copy groups to the device in order; free store memory `freed_pieces`."""
        for group in groups:
            copies = [c for c in reversed(group.new_copies) if c.handles.alive and c.data is None]
            if copies:
                self._copy_storages_to_device(copies, freed_pieces)
                freed_pieces = ()
        if freed_pieces:
            self._store.free_pieces(freed_pieces)

    def _copy_storages_to_device(
        self, copies: Sequence[StorageCopy], freed_pieces: Sequence[Any] = ()
    ) -> None:
        """Allocate `data` of storages on the device, start to copy back; free `freed_pieces`."""
        home = self._streams.get_current_stream()
        for copy in copies:
            copy.data = torch.empty(copy.size, dtype=torch.uint8, device=self._streams.device)
            copy.home, copy.is_back = home, True
            self.back_bytes += copy.size
        self._store.copy_to_device(copies, freed_pieces)

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Return a context under the lock; pending deletions of handles are counted first."""
        with self._lock:
            self._process_deletions()
            yield
        self._process_deletions_if_unlocked()

    def _process_deletions_if_unlocked(self) -> None:
        """Call `_process_deletions`, unless another thread has the lock and will call it."""
        while self._deleted_uses and self._lock.acquire(blocking=False):
            try:
                self._process_deletions(more_deletions_follow=True)
            finally:
                self._lock.release()

    def _process_deletions(self, *, more_deletions_follow: bool = False) -> None:
        """Count deleted handles, free their copies, and start to copy back the next groups."""
        # Backward of a part has run when each of its handles was unpacked or has died. The copy
        # back of the next part starts when all of them have died, or at the next unpacking, which
        # is after the launch of the part's last operation. With `more_deletions_follow` it waits
        # for all: they die one by one, and one launch of the store then returns their pieces.
        if not self._deleted_uses and not self._finished_groups:
            return
        freed_pieces = []
        while self._deleted_uses:
            use = self._deleted_uses.popleft()
            copy, group = use.copy, use.group
            is_over = copy.handles.remove_handle(use.copy_backward_idx)
            if not copy.handles.alive or (is_over and copy.piece is not None):
                copy.free_device_memory()
            # The next user of host memory copies after work that has waited for its last reader.
            if not copy.handles.alive and copy.piece is not None:
                freed_pieces.append(copy.piece)
                copy.piece = None
            if group.handles.remove_handle(use.group_backward_idx) and group.has_unpacked:
                self._finished_groups.append(group)
        groups, self._finished_groups = self._finished_groups, []
        prefetch_groups: list[StorageGroup] = []
        for group in groups:
            if more_deletions_follow and group.handles.alive:
                self._finished_groups.append(group)
                continue
            group.has_unpacked = False
            prefetch_groups += group.prefetch_groups
        self._copy_groups_to_device(prefetch_groups, freed_pieces)
