"""One rank's shard file: safetensors, written sequentially and read in slices.

    8 bytes little-endian: length of the header | header: JSON, padded with blanks to 8 | tensors

Tensors have no gaps and are sorted by decreasing item size, then by key, so each is aligned. Keys,
dtypes and sizes determine the header. The reader compares the header with the manifest's.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from moecore.io.checkpoint.files import open_file
from moecore.io.checkpoint.manifest import DTYPE_NAMES, StoredFile
from moecore.io.checkpoint.object_storage import AnyPath
from moecore.io.checkpoint.ranks import is_first_rank

CHUNK_BYTES = 16 * 2**20  # additional memory of a save or load per open file
DIRECT_BYTES = 2**20  # larger host tensors are written without a copy
RUN_BYTES = 256 * 2**10  # contiguous runs of at least this size are read one by one
Progress = Callable[[int, int], None]

logger = logging.getLogger("moecore.io")


class Meter:
    """Counts this rank's read or written bytes; calls `progress(bytes done, bytes expected)`."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress, self._lock = progress, Lock()
        self._start = time.perf_counter()
        self.moved_bytes = self.total = 0

    def expect(self, num_bytes: int) -> None:
        """Add a number of bytes to the expected total."""
        with self._lock:
            self.total += num_bytes

    def add(self, num_bytes: int) -> None:
        """Add a number of read or written bytes, and report the progress."""
        with self._lock:
            self.moved_bytes += num_bytes
            if self._progress:
                self._progress(self.moved_bytes, self.total)

    def log(self, message: str) -> None:
        """On rank 0, log `message` with the moved GB, the seconds since construction and GB/s."""
        if not is_first_rank():
            return
        seconds, size = time.perf_counter() - self._start, self.moved_bytes / 1e9
        text = "%s: %.3f GB of rank 0 in %.2f s, %.2f GB/s"
        logger.info(text, message, size, seconds, size / seconds)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Header of a safetensors file, byte position of each tensor, and size of the file in bytes."""

    header: bytes  # the first bytes of the file, its length field included
    begins: dict[str, int]  # key -> position of the first byte in the file
    size: int  # bytes of the whole file


def compute_layout(entries: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> FileLayout:
    """Return the `FileLayout` of a safetensors file with these tensors: key -> (dtype, shape)."""
    order = sorted(entries, key=lambda key: (-entries[key][0].itemsize, key))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    spans, end = {}, 0
    for key in order:
        dtype, sizes = entries[key]
        spans[key] = (end, end := end + math.prod(sizes) * dtype.itemsize)
        header[key] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(sizes),
            "data_offsets": list(spans[key]),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    begins = {key: start + begin for key, (begin, _) in spans.items()}
    return FileLayout(len(text).to_bytes(8, "little") + text, begins, start + end)


class ShardWriter:
    """Writes one new safetensors file sequentially; a second thread computes its SHA-256."""

    def __init__(self, path: AnyPath, header: bytes, *, pinned: bool, meter: Meter) -> None:
        self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned, device="cpu")
        self._file = open_file(path, is_new=True)
        self._sha256, self._size, self._meter = hashlib.sha256(), 0, meter
        self._hasher = ThreadPoolExecutor(1)
        self._filled = 0
        try:
            self._write_and_hash(memoryview(header))
        except BaseException:  # the caller has no object to close yet
            self.__exit__()
            raise

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._hasher.shutdown()
        self._file.close()

    def add(self, tensor: Tensor) -> None:
        """Append the tensor that is next in the order of `FileLayout` to the file. Host sync."""
        for piece in iterate_chunks(tensor.detach()):
            if piece.device.type == "cpu" and piece.is_contiguous() and piece.nbytes > DIRECT_BYTES:
                self._flush_buffer()
                self._write_and_hash(get_memory_view(piece))
                continue
            if self._filled + piece.nbytes > CHUNK_BYTES:
                self._flush_buffer()
            # Aligned, because tensors of wider dtypes precede and a flush starts at 0.
            end = self._filled + piece.nbytes
            self._buffer[self._filled : end].view(piece.dtype).view(piece.shape).copy_(piece)
            self._filled = end

    def finish(self) -> StoredFile:
        """Flush and fsync the file, or complete its upload; return its size and digest."""
        self._flush_buffer()
        self._file.commit()
        return StoredFile(size=self._size, sha256=self._sha256.hexdigest())

    def _flush_buffer(self) -> None:
        """Write the buffered bytes to the file."""
        if self._filled:
            self._write_and_hash(get_memory_view(self._buffer[: self._filled]))
            self._filled = 0

    def _write_and_hash(self, data: memoryview) -> None:
        """Write bytes to the file while the second thread hashes them."""
        hash_update = self._hasher.submit(self._sha256.update, data)
        try:
            remaining = data
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        finally:
            hash_update.result()  # before the buffer is reused
        self._size += len(data)
        self._meter.add(len(data))


def iterate_chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Split a tensor into views of at most `CHUNK_BYTES`, in row-major order."""
    if tensor.nbytes <= CHUNK_BYTES:
        yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(CHUNK_BYTES // tensor.itemsize)
    else:
        rows = CHUNK_BYTES * tensor.shape[0] // tensor.nbytes
        for part in tensor.split(max(1, rows)):
            yield from iterate_chunks(part[0] if rows < 1 else part)


def get_memory_view(tensor: Tensor) -> memoryview:
    """Return a memoryview of a contiguous CPU tensor's memory, without a copy."""
    # Not by numpy(), after which torch does not resize the storage, see `TrainingOffload`.
    data: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    data.tensor = tensor  # keeps the memory as long as the view exists
    return memoryview(data).cast("B")


class ShardReader:
    """Reads slices of the tensors in a safetensors file.

    `begins` maps a tensor's key to the position of the tensor's first byte in the file. Slices
    that are not contiguous in the file are read into `buffer` first. `meter` counts the bytes. The
    path may be a symlink if `follow_symlinks`.
    """

    def __init__(
        self,
        path: AnyPath,
        begins: Mapping[str, int],
        buffer: Tensor,
        meter: Meter,
        *,
        follow_symlinks: bool = False,
    ) -> None:
        self._path, self._begins, self._buffer, self._meter = path, begins, buffer, meter
        self._file = open_file(path, follow_symlinks=follow_symlinks)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(
        self,
        key: str,
        dtype: torch.dtype,
        sizes: Sequence[int],
        offsets: Sequence[int],
        out: Tensor,
    ) -> None:
        """Fill `out` (any dtype, device, strides) from `offsets` of a tensor of shape `sizes`."""
        if out.numel() == 0:
            return
        strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
        first = sum(o * s for o, s in zip(offsets, strides, strict=True))
        reach = sum((n - 1) * s for n, s in zip(out.shape, strides, strict=True))
        begin = self._begins[key] + first * dtype.itemsize
        span, num_bytes = (reach + 1) * dtype.itemsize, out.numel() * dtype.itemsize
        is_plain = out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous()
        if span == num_bytes and is_plain:
            self._read_bytes(get_memory_view(out), begin, self._meter)
            return
        # Bytes between short runs are read too, because disks read ahead anyway.
        is_split = (
            span > 2 * num_bytes
            and _count_contiguous_elements(sizes, out.shape) * dtype.itemsize >= RUN_BYTES
        )
        if span <= self._buffer.numel() and not is_split:
            block = self._buffer[:span]
            self._read_bytes(get_memory_view(block), begin)
            out.copy_(block.view(dtype).as_strided(out.shape, strides))
            self._meter.add(num_bytes)
            return
        dim = next(d for d, n in enumerate(out.shape) if n > 1)
        half = out.shape[dim] // 2
        after = [*offsets[:dim], offsets[dim] + half, *offsets[dim + 1 :]]
        self.read(key, dtype, sizes, offsets, out.narrow(dim, 0, half))
        self.read(key, dtype, sizes, after, out.narrow(dim, half, out.shape[dim] - half))

    def _read_bytes(self, target: memoryview, first_byte: int, meter: Meter | None = None) -> None:
        """Fill `target` with the file's bytes from `first_byte` on; `meter` counts the bytes."""
        offset = 0
        while offset < len(target):
            piece = target[offset : offset + CHUNK_BYTES]
            count = self._file.read_into(piece, first_byte + offset)
            if count == 0:
                raise OSError(
                    f"{self._path} ended at byte {first_byte + offset}: it was cut meanwhile"
                )
            offset += count
            if meter:
                meter.add(count)


def _count_contiguous_elements(tensor_shape: Sequence[int], slice_shape: Sequence[int]) -> int:
    """Return the elements in a contiguous run of a slice of a row-major tensor."""
    run = 1
    for size, length in zip(reversed(tensor_shape), reversed(slice_shape), strict=True):
        run *= length
        if length != size:
            break
    return run


def find_file_problem(
    path: AnyPath, layout: FileLayout, stored_file: StoredFile, *, full: bool, meter: Meter
) -> str | None:
    """Return an error text if size, header or, if `full`, SHA-256 differ from the manifest's."""
    try:
        with closing(open_file(path)) as file:
            size = file.get_size()
            if not size == stored_file.size == layout.size:
                return (
                    f"has {size} bytes instead of {stored_file.size}, with {layout.size} of tensors"
                )
            header = bytearray(len(layout.header))
            if file.read_into(memoryview(header), 0) != len(header) or header != layout.header:
                return "has a header that is not the manifest's"
            sha256, end = hashlib.sha256(), 0
            buffer = memoryview(bytearray(min(file.piece_bytes, size) if full else 0))
            while full and end < size:
                count = file.read_into(buffer[: size - end], end)
                if count == 0:
                    return f"ended at byte {end}"
                sha256.update(buffer[:count])
                meter.add(count)
                end += count
    except FileNotFoundError:
        return "is missing"
    except ValueError:
        return "is no regular file"
    if full and sha256.hexdigest() != stored_file.sha256:
        return "has another sha256 than the manifest"
    return None
