"""Items (Hugging Face tensors to assemble), and the ranks or files that have their parts.

An item consists of pieces (`pieces.py`). A box is the part of a piece that is in one shard. The
ranks exchange once which shards they have (`PartOwners`). `buckets.py` then assembles the items.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moecore.base.failures import run_and_share_errors
from moecore.base.params import compute_global_indices
from moecore.base.rank_checks import gather_objects
from moecore.io.checkpoint.manifest import Manifest, StoredTensor
from moecore.io.checkpoint.object_storage import AnyPath
from moecore.io.checkpoint.shard_file import CHUNK_BYTES, Meter, ShardReader, compute_layout
from moecore.io.hf.files import Box, find_common_boxes
from moecore.io.hf.pieces import ShardRuns, TensorPiece, find_shard_runs, get_detached_shard
from moecore.moe.param_reader import get_fp8_blocks
from moecore.precision.stored import read_stored_values

LocalPart = tuple[tuple[int, ...], torch.dtype, ShardRuns]  # full shape, dtype, local indices


@dataclass(frozen=True, slots=True)
class Item:
    """A Hugging Face tensor to assemble from parts: model tensor names, and slices of them."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[str, TensorPiece], ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def has_padding(self) -> bool:
        """Whether the tensor has elements that no part stores, such as padded vocabulary rows."""
        return sum(math.prod(piece.shape) for _, piece in self.parts) < math.prod(self.shape)


class Collector(Protocol):
    """Protocol of classes that assemble Hugging Face tensors; ranks request the same tensors."""

    def collect_tensor(self, item: Item, writer_rank: int) -> Tensor | None:
        """Return the full tensor on the CPU of rank `writer_rank`, and None on other ranks."""

    def raise_error(self) -> None:
        """Raise the first error of this rank that `collect_tensor` caught."""


class ErrorKeeper:
    """Stores this rank's first error, so that the rank still takes part in communication."""

    _error: Exception | None = None

    @contextmanager
    def _keep_error(self) -> Iterator[None]:
        """Return a context that stores the first exception instead of raising it."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error

    def raise_error(self) -> None:
        """Raise the first stored error of this rank."""
        if self._error is not None:
            raise self._error


class PartOwners:
    """Shapes and dtypes of all ranks' full tensors, and the ranks of each distinct shard.

    Construction, with this rank's tensors by name, is collective.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        parts = run_and_share_errors(
            lambda: {name: describe_local_part(tensor) for name, tensor in tensors.items()}
        )
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.ranks: dict[str, dict[ShardRuns, list[int]]] = {}  # by tensor and distinct shard
        for rank, rank_parts in enumerate(gather_objects(parts)):
            for name, (shape, dtype, shard_runs) in rank_parts.items():
                self.shapes[name], self.dtypes[name] = shape, dtype
                self.ranks.setdefault(name, {}).setdefault(shard_runs, []).append(rank)

    def merge(self, other: PartOwners) -> PartOwners:
        """Return the union of the tensors of two objects without common tensor names."""
        result = copy(self)
        result.shapes, result.dtypes = self.shapes | other.shapes, self.dtypes | other.dtypes
        result.ranks = self.ranks | other.ranks
        return result


def read_shard_box(
    tensor: Tensor, box: tuple[slice, ...], dtype: torch.dtype | None = None
) -> Tensor:
    """Return the slices `box` of this rank's shard: a view, or dequantised values.

    Values in 4 bits are dequantised to `dtype`, unless it is None.
    """
    local = get_detached_shard(tensor)
    return local[box] if get_fp8_blocks(tensor) is None else read_stored_values(tensor, box, dtype)


class StoredCollector(ErrorKeeper):
    """Assembles Hugging Face tensors from a native checkpoint's files, which `stack` closes."""

    def __init__(
        self,
        path: AnyPath,
        manifest: Manifest,
        tensors: Mapping[str, StoredTensor],
        stack: ExitStack,
    ) -> None:
        self._path, self._manifest, self._tensors, self._stack = path, manifest, tensors, stack
        self._readers: dict[str, ShardReader] = {}
        self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu")

    def read(self, name: str, box: Box) -> Tensor:
        """Read a box (one slice per dim) of a stored tensor, and return it as a new CPU tensor."""
        entry = self._tensors[name]
        out = torch.empty([s.stop - s.start for s in box], dtype=entry.dtype, device="cpu")
        for chunk, source, target in find_common_boxes(box, entry.chunks):
            offsets, reader = [s.start for s in source], self._open_reader(chunk.file)
            reader.read(chunk.key, entry.dtype, chunk.sizes, offsets, out[target])
        return out

    def collect_tensor(self, item: Item, writer_rank: int) -> Tensor:
        """Assemble the full Hugging Face tensor of an item; `writer_rank` is not used."""
        make = torch.zeros if item.has_padding else torch.empty
        tensor = make(item.shape, dtype=item.dtype, device="cpu")
        for source, piece in item.parts:
            part = self.read(source, piece.get_box(self._tensors[source].shape))
            if piece.view is None:
                return part.view(item.shape).to(item.dtype)
            write_piece(part, piece, tensor)
        return tensor

    def _open_reader(self, file: str) -> ShardReader:
        """Return the reader of a shard file; open it at the first call."""
        if file not in self._readers:
            layout = compute_layout(self._manifest.list_file_entries(file))
            reader = ShardReader(self._path / file, layout.begins, self._buffer, Meter())
            self._readers[file] = self._stack.enter_context(reader)
        return self._readers[file]


def write_piece(values: Tensor, piece: TensorPiece, file_tensor: Tensor) -> None:
    """Copy `values` to the part of a Hugging Face tensor (`file_tensor`) that `piece` describes."""
    target = piece.locate(file_tensor)
    target.copy_(values.reshape(target.shape))


def describe_local_part(tensor: Tensor) -> LocalPart:
    """Return a tensor's full shape and dtype, and the global indices of this rank's shard."""
    shard_runs = find_shard_runs(compute_global_indices(tensor))
    return tuple(tensor.shape), tensor.dtype, shard_runs
