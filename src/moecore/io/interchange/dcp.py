"""DCP directories: read any box of a stored tensor, and write new directories chunk by chunk.

Reading unpickles no objects: `dcp_metadata.py` parses `.metadata`, and torch loads a chunk with
`weights_only`. Writing uses `torch.distributed.checkpoint.save` with a planner that computes each
chunk when it is written, so one chunk is in memory at a time.
"""

from __future__ import annotations

import io
import math
import os
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from moecore.base.fields import format_name
from moecore.io.checkpoint.files import open_regular_file
from moecore.io.checkpoint.shard_file import Meter
from moecore.io.checkpoint.storage import make_dcp_metadata
from moecore.io.hf.files import Box, find_common_boxes, format_error
from moecore.io.interchange.dcp_metadata import DCPChunk, read_metadata


class DCPFiles:
    """Reads boxes (slices) of tensors in a DCP directory, and caches the last chunk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = read_metadata(path)
        self._last: tuple[DCPChunk, Tensor] | None = None

    def read(self, name: str, box: Box) -> Tensor:
        """Read a box (a slice with start and stop per dim) of a tensor into a new CPU tensor."""
        entry = self.tensors[name]
        out = torch.empty([s.stop - s.start for s in box], dtype=entry.dtype, device="cpu")
        for chunk, source, target in find_common_boxes(box, entry.chunks):
            out[target] = self._load_chunk(name, chunk, entry.dtype)[source]
        return out

    def _load_chunk(self, name: str, chunk: DCPChunk, dtype: torch.dtype) -> Tensor:
        """Return a chunk of tensor `name`; raise OSError if the file has no such chunk."""
        if self._last is not None and self._last[0] is chunk:
            return self._last[1]
        self._last = None
        file = self.path / chunk.file
        with open(open_regular_file(file, follow_symlinks=True), "rb") as stream:
            part = io.BufferedReader(_ChunkPart(stream, chunk.start, chunk.length))
            try:
                _check_entry_sizes(part, chunk.length)
                value = torch.load(part, map_location="cpu", weights_only=True)
            except Exception as error:  # of any kind: the bytes are damaged
                raise OSError(
                    f"path ({file}) must hold {format_name(name)}: {format_error(error):.200}"
                ) from None
        is_tensor = isinstance(value, Tensor) and value.layout == torch.strided
        if not is_tensor or value.is_meta or (value.dtype, value.shape) != (dtype, chunk.sizes):
            raise OSError(
                f"path ({file}) must hold {format_name(name)} as {dtype} {chunk.sizes}, as "
                ".metadata names it"
            )
        self._last = chunk, value.detach()
        return self._last[1]


def _check_entry_sizes(zip_file: IO[bytes], max_bytes: int) -> None:
    """Raise ValueError if a zip file's entries unpack to more than `max_bytes`; then rewind."""
    if zipfile.is_zipfile(zip_file):
        zip_file.seek(0)
        with zipfile.ZipFile(zip_file) as entries:
            if sum(entry.file_size for entry in entries.infolist()) > max_bytes:
                raise ValueError(
                    f"its entries have more than its {max_bytes} bytes: store them plain"
                )
    zip_file.seek(0)


class _ChunkPart(io.RawIOBase):
    """Read-only file object over a byte range of a file."""

    def __init__(self, stream: Any, start: int, length: int) -> None:
        """View the bytes from `start` to `start + length` of the binary file `stream`."""
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset in the chunk; return the new position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read bytes from the current position into a buffer; return their number."""
        self._stream.seek(self._start + self._at)
        count = max(0, min(len(buffer), self._length - self._at))
        read: int = self._stream.readinto(memoryview(buffer)[:count])
        self._at += read
        return read


@dataclass(frozen=True, slots=True)
class NewChunk:
    """A block of a tensor to write, and the function `make` that computes its values."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    make: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class NewTensor:
    """Shape, dtype and chunks of a tensor to write; the chunks cover the tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Sequence[NewChunk]


def write_dcp(path: Path, tensors: Mapping[str, NewTensor], meter: Meter) -> None:
    """Write a DCP directory, one chunk at a time; `meter` counts bytes of tensor data."""
    meter.expect(
        sum(math.prod(c.sizes) * t.dtype.itemsize for t in tensors.values() for c in t.chunks)
    )
    planner, writer = _ChunkPlanner(tensors, meter), dcp.FileSystemWriter(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:
            ((cause, _),) = error.failures.values()
            raise cause from None


class _ChunkPlanner(dcp.DefaultSavePlanner):
    """DCP save planner that computes the values of each chunk only when DCP writes the chunk."""

    def __init__(self, tensors: Mapping[str, NewTensor], meter: Meter) -> None:
        super().__init__()
        self._meter = meter
        self._chunks: dict[MetadataIndex, NewChunk] = {}
        self._metadata = make_dcp_metadata(tensors)
        self._items: list[WriteItem] = []
        for name, tensor in tensors.items():
            entry: Any = self._metadata.state_dict_metadata[name]
            for i, (chunk, block) in enumerate(zip(tensor.chunks, entry.chunks, strict=True)):
                index = MetadataIndex(name, block.offsets, i)
                data = TensorWriteData(block, properties=entry.properties, size=entry.size)
                self._chunks[index] = chunk
                self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))

    def create_local_plan(self) -> SavePlan:
        """Return the plan of all chunks, in order."""
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plan of the only process, and the metadata of all tensors."""
        return all_plans, self._metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Compute and return the values of a chunk."""
        chunk = self._chunks[write_item.index]
        value = chunk.make().reshape(chunk.sizes).contiguous()
        self._meter.add(value.nbytes)
        return value


def find_prefixes(files: DCPFiles, ending: str) -> list[str]:
    """Return each prefix ("model.") of a tensor name with this ending, except optimizer state."""
    names = [name for name in files.tensors if name == ending or name.endswith(f".{ending}")]
    parts = [name.removesuffix(ending) for name in names]
    return [p for p in parts if not any(part.startswith("optim") for part in p.split("."))]
