"""Host memory for copies of tensors, and storages that move between device and host.

    HostPool      a piece of a slab for each saved activation      Offload
    HostCopies    memory by name, the same in every step           StateOffload, TrainingOffload,
                                                                   FrozenOffload, ParamOffload
    HostSlots     a few slots for chunks of tensors                HostAdamW (`optim/host_step.py`)

The classes on the right choose which tensors are copied and when. All memory is allocated as slabs,
because pinning the size of a GPU's memory takes seconds. torch rounds every pinned allocation up
to a power of two, so the size of a slab is a power of two. All copies run on a `CopyStream`
(`streams.py`), and a `CopyEvent` marks the end of a copy.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from moecore.base.torch_private import allocate_as_host_memory, get_storage_key
from moecore.kernels.common import device_of, next_power_of_2
from moecore.kernels.rows.move import copy_first_rows
from moecore.kernels.rows.scaling import round_up
from moecore.train.memory.groups import StorageCopy
from moecore.train.memory.streams import CopyJob, CopyStream, CopyStreams

logger = logging.getLogger("moecore.train.memory")

SLAB_BYTES = 2**30  # large compared with a tensor, so that few bytes at its end are wasted
ALIGN_BYTES = 64  # a cache line; no dtype needs more


@dataclass(slots=True)
class Slab:
    """A block of uint8 memory from which pieces are allocated front to back and never freed."""

    memory: Tensor
    used_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """Number of free bytes."""
        return self.memory.numel() - self.used_bytes

    def allocate(self, num_bytes: int) -> Tensor:
        """Return an uninitialised uint8 view of `num_bytes`; the caller checks `free_bytes`."""
        data = self.memory[self.used_bytes : self.used_bytes + num_bytes]
        self.used_bytes += round_up(num_bytes, ALIGN_BYTES)
        return data


class Slabs:
    """A growing list of slabs in host memory, pinned for copies of "cuda" tensors."""

    def __init__(self, device_type: str) -> None:
        self._is_pinned = device_type == "cuda"
        self._device = "meta" if device_type == "meta" else "cpu"  # meta: without memory
        self.slabs: list[Slab] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.memory.numel() for slab in self.slabs)

    def find_slab(self, num_bytes: int) -> Slab | None:
        """Return a slab with at least `num_bytes` (an aligned size) free; None if there is none."""
        return next((slab for slab in self.slabs if slab.free_bytes >= num_bytes), None)

    def allocate_slab(self, num_bytes: int) -> Slab:
        """Allocate a slab; a RuntimeError if host memory is insufficient. Pinning is slow."""
        with allocate_as_host_memory():
            memory = torch.empty(
                num_bytes, dtype=torch.uint8, device=self._device, pin_memory=self._is_pinned
            )
        self.slabs.append(Slab(memory))
        return self.slabs[-1]

    def clear(self) -> None:
        """Free all slabs; torch caches pinned memory for its next user."""
        self.slabs.clear()


@dataclass(frozen=True, slots=True)
class HostPiece:
    """A part of a `Slab` (uint8); if `of_graph`, a CUDA graph writes to it in every replay."""

    memory: Tensor
    of_graph: bool


class HostPool:
    """Host memory for copies of storages; freed memory is reused for copies of equal size."""

    def __init__(self, streams: CopyStreams, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes  # of all slabs; None = the host's memory
        self.used_bytes = 0  # of the pieces that are in use
        self._streams, self._slabs = streams, Slabs(streams.device.type)
        self._free: defaultdict[tuple[int, bool], list[Tensor]] = defaultdict(list)
        self._is_full = False  # logged once

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that the pool has allocated."""
        return self._slabs.num_bytes

    def copy_to_store(self, copies: Sequence[StorageCopy]) -> list[StorageCopy]:
        """Start to copy storages to host memory; return the copies that fit into its limit."""
        for copy in copies:
            copy.piece = self._allocate_piece(copy.size)
        new_copies = [copy for copy in copies if copy.piece is not None]
        if new_copies:
            jobs = [
                CopyJob(copy.piece.memory[: copy.size], copy.data, _make_row_copier(copy))
                for copy in new_copies
            ]
            event = self._streams.out.start_copies(jobs)
            for copy in new_copies:
                copy.out = copy.busy = event
        return new_copies

    def copy_to_device(
        self, copies: Sequence[StorageCopy], freed_pieces: Sequence[HostPiece] = ()
    ) -> None:
        """Start to copy storages back to `data` on the device; free `freed_pieces` for reuse."""
        self.free_pieces(freed_pieces)
        # Each storage has an event of its own: the host's link is slow, and backward waits for the
        # storage that it reads, not for the whole group.
        for copy in copies:
            assert copy.out is not None
            host_memory = copy.piece.memory[: copy.size]  # without padding of its size class
            job = CopyJob(copy.data, host_memory, _make_row_copier(copy))
            copy.busy = self._streams.back.start_copies([job], copy.out)

    def free_pieces(self, pieces: Sequence[HostPiece]) -> None:
        """Free pieces for reuse. A later copy into a piece waits until its last read is done."""
        for piece in pieces:
            self.used_bytes -= piece.memory.numel()
            self._free[piece.memory.numel(), piece.of_graph].append(piece.memory)

    def clear(self) -> None:
        """Free all memory."""
        self._free.clear()
        self._slabs.clear()

    def _allocate_piece(self, num_bytes: int) -> HostPiece | None:
        """Reserve host memory of at least `num_bytes`; return None if the pool is full."""
        size, in_capture = round_up_to_size_class(num_bytes), self._streams.is_capturing()
        kinds = (True, False) if in_capture else (False,)
        free_lists = [self._free[size, of_graph] for of_graph in kinds]
        memory = next((pieces.pop() for pieces in free_lists if pieces), None)
        if memory is None:
            slab = self._slabs.find_slab(size)
            if slab is None and not in_capture:
                slab = self._add_slab(size)
            memory = None if slab is None else slab.allocate(size)
        if memory is not None:
            self.used_bytes += memory.numel()
            return HostPiece(memory, in_capture)
        if not self._is_full:
            self._is_full = True
            logger.warning(
                "offload: host memory (%d bytes) is full: further storages stay on the device",
                self.num_bytes,
            )
        return None

    def _add_slab(self, piece_bytes: int) -> Slab | None:
        """Allocate a slab for a piece of `piece_bytes`; None if it would exceed `max_bytes`."""
        # The slab is as large as all slabs together, at most `SLAB_BYTES` unless `size` is larger.
        pool_bytes = self.num_bytes
        limit = float("inf") if self.max_bytes is None else self.max_bytes
        min_bytes = next_power_of_2(piece_bytes)
        doubled_bytes = max(min_bytes, min(next_power_of_2(pool_bytes), SLAB_BYTES))
        for num_bytes in (doubled_bytes, min_bytes):
            if pool_bytes + num_bytes > limit:
                continue
            try:
                return self._slabs.allocate_slab(num_bytes)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                raise RuntimeError(
                    f"host memory for offloaded tensors ({pool_bytes} bytes) could not grow by "
                    f"{num_bytes} ({reason}): set max_host_bytes to what the host has"
                ) from error
        return None


@contextmanager
def explain_memory_errors(subject: str) -> Iterator[None]:
    """Return a context that converts RuntimeErrors inside it to MemoryErrors about `subject`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = str(error).partition("\n")[0]
        raise MemoryError(f"{subject} must fit in host memory: lower it ({reason})") from error


def _make_row_copier(copy: StorageCopy) -> Callable[[Tensor, Tensor], None] | None:
    """Return a function (target, source) that copies only the used rows; None = copy all rows."""
    rows = copy.used_rows
    if rows is None or rows.num_rows is None or copy.data is None or copy.data.is_meta:
        return None
    num_rows, row_bytes = rows.num_rows, copy.size // rows.length
    return lambda target, source: copy_first_rows(
        target.view(-1, row_bytes), source.view(-1, row_bytes), num_rows
    )


def round_up_to_size_class(num_bytes: int) -> int:
    """Return the size class in bytes: 1000 -> 1024, 1025 -> 1152, 1153 -> 1280; 1 -> 64."""
    step = max(ALIGN_BYTES, next_power_of_2(num_bytes) // 16)
    return round_up(max(num_bytes, 1), step)


def view_bytes(storage: torch.UntypedStorage) -> Tensor:
    """View a full storage as a uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass(slots=True)
class MovedStorage:
    """A device storage, the tensors that are views of it, and host memory for its bytes."""

    memory: Tensor  # uint8, all bytes of the storage
    host: Tensor  # uint8, as many
    tensors: list[tuple[Tensor, Tensor]]  # each with another tensor of its place in the storage

    def move_to_host(self) -> None:
        """Make the tensors views of the host copy that the caller made; free the device memory."""
        for tensor, place in self.tensors:
            tensor.data = self._view_like(place, self.host)
        self.free_device_memory()

    def allocate_device_memory(self) -> None:
        """Allocate uninitialised device memory for the storage, on the current stream."""
        if self.memory.is_meta:  # a dry run counts a storage from its first tensor to its last
            self.memory = self.memory.new_empty(self.host.numel())
            self.tensors = [(x, self._view_like(at, self.memory)) for x, at in self.tensors]
        else:
            self.memory.untyped_storage().resize_(self.host.numel())

    def free_device_memory(self) -> None:
        """Free the device memory, once the current stream's work so far is done."""
        if self.memory.is_meta:
            self.memory = self.memory.new_empty(0)
            self.tensors = [(tensor, self._view_like(at, self.host)) for tensor, at in self.tensors]
        else:
            self.memory.untyped_storage().resize_(0)

    def _view_like(self, like: Tensor, memory: Tensor) -> Tensor:
        """View `memory` with the dtype, shape, strides and storage offset of `like`."""
        itemsize = like.element_size()
        is_host = get_storage_key(like) == get_storage_key(self.host)
        first = int(self.host.storage_offset()) // itemsize if is_host else 0
        flat = memory[: memory.numel() // itemsize * itemsize].view(like.dtype)
        start = int(like.storage_offset()) - first + int(flat.storage_offset())
        return flat.as_strided(like.shape, like.stride(), start)

    def move_to_device(self) -> None:
        """Make the tensors views of device memory, to which the caller has copied the bytes."""
        host_key = get_storage_key(self.host)
        for tensor, place in self.tensors:
            if get_storage_key(tensor) != host_key:  # its owner gave it other memory
                place.copy_(tensor)
            tensor.data = place


class HostCopies:
    """Pinned host memory by name, reused in each step; `copy_tensors` overwrites older copies."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._slabs = {of: Slabs(of) for of in ("cpu", "cuda", "meta")}  # by the source's device
        self._streams: dict[torch.device, CopyStream] = {}

    def reserve_like(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name -> pinned host tensor with each tensor's shape and dtype, uninitialised."""
        new = [name for name in tensors if name not in self._copies]
        for name in tensors.keys() - new:
            tensor, copy = tensors[name], self._copies[name]
            if (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                # Memory of its own can be freed; in a slab each change would take further bytes.
                self._copies[name] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda, device="cpu"
                )
        remaining_bytes = Counter[str]()
        for name in new:
            size = round_up(tensors[name].nbytes, ALIGN_BYTES)
            remaining_bytes[tensors[name].device.type] += size
        for name in sorted(new, key=lambda name: -tensors[name].nbytes):
            like, device_type = tensors[name], tensors[name].device.type
            slabs, size = self._slabs[device_type], round_up(like.nbytes, ALIGN_BYTES)
            # Of more than `SLAB_BYTES`, the largest power of two: little is added by rounding up.
            rest = remaining_bytes[device_type]
            rest = rest if rest <= SLAB_BYTES else next_power_of_2(rest + 1) // 2
            slab_bytes = max(size, rest)
            slab = slabs.find_slab(size)
            slab = slab or slabs.allocate_slab(next_power_of_2(slab_bytes))
            self._copies[name] = slab.allocate(like.nbytes).view(like.dtype).view(like.shape)
            remaining_bytes[device_type] -= size
        return {name: self._copies[name] for name in tensors}

    def reserve_storages(self, storage_views: Mapping[str, Sequence[Tensor]]) -> list[MovedStorage]:
        """Reserve host memory for each named storage, given by all its views; copy nothing."""
        items = storage_views.items()
        memory = {name: view_bytes(views[0].untyped_storage()) for name, views in items}
        tensors = {name: [(x, x.data) for x in views] for name, views in items}
        hosts = self.reserve_like(memory).items()
        return [MovedStorage(memory[name], host, tensors[name]) for name, host in hosts]

    def copy_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy plain tensors to the host after the current streams' work; return name -> copy."""
        # The tensors may change after the call. The copies are valid until the next `copy_tensors`.
        copies = self.reserve_like(tensors)
        self.copy_and_wait([(copies[name], tensor) for name, tensor in tensors.items()])
        return copies

    def copy_and_wait(self, targets_and_sources: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy (host target, source) pairs after the current streams' work. One host sync."""
        # One host sync waits for the copies and the work before them. Other streams go on.
        jobs = defaultdict[torch.device, list[CopyJob]](list)
        for target, source in targets_and_sources:
            jobs[source.device].append(CopyJob(target, source))
        devices = sorted(jobs, key=lambda device: device.type == "cpu")  # while a GPU copies
        streams = [self._streams.get(device) or CopyStream(device) for device in devices]
        self._streams |= dict(zip(devices, streams, strict=True))
        try:
            for device, stream in zip(devices, streams, strict=True):
                with device_of(jobs[device][0].source):
                    stream.start_copies(jobs[device])
        finally:  # also after an error: no copy may write into memory that the caller frees
            for stream in streams:
                stream.synchronize()

    def count_bytes(self) -> int:
        """Return the bytes of all slabs."""
        return sum(slabs.num_bytes for slabs in self._slabs.values())

    def clear(self) -> None:
        """Free all memory; torch caches pinned memory for its next user."""
        self._copies.clear()
        for slabs in self._slabs.values():
            slabs.clear()
