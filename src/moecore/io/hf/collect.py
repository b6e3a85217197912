"""Hugging Face tensors assembled from all ranks' shards, on one rank or on all (`stream.py`).

An item is a Hugging Face tensor to assemble. It consists of pieces (`pieces.py`), and a box is the
part of a piece that one shard has. The writer of an item is the rank that needs it.

The ranks exchange once which parts they have (`Holders`). Each tensor then takes one message per
sender. One of the ranks that replicate a part sends it, and the writer copies its own. A rank with
an error (such as out of memory) must still send and receive, or the other ranks hang. Message
buffers are therefore allocated in advance, and an error is raised when ranks agree on errors
(`check`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.params import global_indices
from moecore.io.checkpoint.manifest import Manifest, StoredTensor
from moecore.io.checkpoint.ranks import gather, on_every_rank, rank_and_world
from moecore.io.checkpoint.shard_file import CHUNK_BYTES, Meter, ShardReader, layout_of
from moecore.io.hf.files import Box, common_part
from moecore.io.hf.pieces import (
    Holding,
    PieceOverlap,
    TensorPiece,
    holding_of,
    local_part,
    overlaps,
)
from moecore.moe.param_reader import gathered_blocks
from moecore.precision.stored import stored_values

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor of the directory, and its parts: (name of the model's tensor, piece)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[str, TensorPiece], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * self.dtype.itemsize


def by_size(things: Iterable[T], size_of: Callable[[T], int], max_size: int) -> Iterator[list[T]]:
    """Yield groups of consecutive items of at most `max_size`; a larger item is a group."""
    group: list[T] = []
    total = 0
    for thing in things:
        size = size_of(thing)
        if group and total + size > max_size:
            yield group
            group, total = [], 0
        group.append(thing)
        total += size
    if group:
        yield group


class _Part(NamedTuple):
    """A part of an item: a piece of the model's tensor `source`, or of a copy of it."""

    source: str
    piece: TensorPiece
    dtype: torch.dtype


class Collector(Protocol):
    """Source of complete tensors. Every rank requests the same tensors in the same order."""

    def collect(self, item: Item, writer: int) -> Tensor | None:
        """Return the complete tensor on the CPU of its writer, and None on other ranks."""

    def release(self, tensor: Tensor | None) -> None:
        """Subtract a tensor that the writer has freed from the counted memory."""

    def check(self) -> None:
        """Raise the first error of this rank that `collect` has not raised."""


class ErrorKeeper:
    """Stores the first error of this rank, because other ranks wait for its messages."""

    _error: Exception | None = None

    @contextmanager
    def _keep_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._error = self._error or error

    def check(self) -> None:
        """Raise the first error of this rank."""
        if self._error is not None:
            raise self._error


class HeldPart(NamedTuple):
    """The part of a tensor that one rank has; shape and dtype are of the full tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    holding: Holding


class Holders:
    """For each tensor of all pipeline stages: the ranks that have each part. Collective."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        parts = on_every_rank(lambda: {name: held_of(tensor) for name, tensor in tensors.items()})
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._ranks: dict[str, dict[Holding, list[int]]] = {}
        self.world = 0
        for rank, rank_parts in enumerate(gather(parts)):
            self.world += 1
            for name, (shape, dtype, holding) in rank_parts.items():
                self.shapes[name], self.dtypes[name] = shape, dtype
                self._ranks.setdefault(name, {}).setdefault(holding, []).append(rank)

    def merge(self, other: Holders) -> Holders:
        """Return the union with the holders of other tensors."""
        result = copy(self)
        result.shapes, result.dtypes = self.shapes | other.shapes, self.dtypes | other.dtypes
        result._ranks = self._ranks | other._ranks
        return result

    def of(self, name: str) -> dict[Holding, list[int]]:
        """Return part -> ranks that have it, for a tensor."""
        return self._ranks[name]

    def boxes(
        self, source: str, piece: TensorPiece, holding: Holding, max_numel: int = 1 << 62
    ) -> list[PieceOverlap]:
        """Return the boxes that a shard and a piece of a tensor have in common."""
        return list(overlaps(holding, piece, self.shapes[source], max_numel=max_numel))


def part_of(tensor: Tensor, box: tuple[slice, ...]) -> Tensor:
    """Return a box of this rank's part of a tensor; a copy if the values are only stored in FP8."""
    local = local_part(tensor)
    return local[box] if gathered_blocks(tensor) is None else stored_values(tensor, box)


class RankCollector(ErrorKeeper):
    """Assembles tensors on their writers. Every rank calls it for the same items in order."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        holders: Holders,
        items: Iterable[Item],
        device: torch.device,
    ) -> None:
        self._current_bytes = self.peak_bytes = 0
        self._tensors, self._holders = tensors, holders
        self._rank, _ = rank_and_world()
        largest = self._largest_message(items)
        self._buffer = on_every_rank(lambda: torch.empty(largest, dtype=torch.uint8, device=device))
        self._hold(largest)

    def collect(self, item: Item, writer: int) -> Tensor | None:
        """Return the new full tensor on its writer's CPU; None on other ranks or after an error."""
        tensor = self._new(item.shape, item.dtype, writer)
        for source, piece in item.parts:
            is_view = piece.view is not None  # in an order of its own, put in place afterwards
            part = self._new(piece.shape, item.dtype, writer) if is_view else tensor
            self._collect_part(_Part(source, piece, item.dtype), writer, part)
            if is_view and part is not None and tensor is not None:
                with self._keep_error():
                    put(part, piece, tensor)
                self.release(part)
        return tensor

    def _new(self, shape: Sequence[int], dtype: torch.dtype, writer: int) -> Tensor | None:
        tensor = None
        if self._rank == writer:
            with self._keep_error():
                tensor = torch.empty(shape, dtype=dtype)
                self._hold(tensor.nbytes)
        return tensor

    def _collect_part(self, item: _Part, writer: int, tensor: Tensor | None) -> None:
        for holding, holders in self._holders.of(item.source).items():
            numel = _num_common(holding, item.piece, self._holders.shapes[item.source])
            if not numel:
                continue
            sender = writer if writer in holders else holders[0]
            if self._rank == sender == writer:
                self._copy(item, holding, tensor)
            elif self._rank == sender:
                self._send(item, holding, numel, writer)
            elif self._rank == writer:
                self._receive(item, holding, numel, sender, tensor)

    def release(self, tensor: Tensor | None) -> None:
        """Subtract a tensor that the writer has freed from the counted memory."""
        if tensor is not None:
            self._current_bytes -= tensor.nbytes

    def _hold(self, num_bytes: int) -> None:
        self._current_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._current_bytes)

    def _copy(self, item: _Part, holding: Holding, tensor: Tensor | None) -> None:
        """Copy the writer's own part into its tensor."""
        if tensor is None:
            return
        with self._keep_error():
            for box in self._boxes(item, holding):
                part = part_of(self._tensors[item.source], box.target)
                tensor[box.source].view(part.shape).copy_(part)

    def _send(self, item: _Part, holding: Holding, numel: int, writer: int) -> None:
        message = self._message(item, numel)
        with self._keep_error():
            tensor = self._tensors[item.source]
            parts = [part_of(tensor, box.target) for box in self._boxes(item, holding)]
            for piece, part in zip(_split(message, parts), parts, strict=True):
                piece.copy_(part)
        dist.send(message, writer)

    def _receive(
        self, item: _Part, holding: Holding, numel: int, sender: int, tensor: Tensor | None
    ) -> None:
        message = self._message(item, numel)
        dist.recv(message, sender)
        if tensor is None:
            return
        with self._keep_error():
            targets = [tensor[box.source] for box in self._boxes(item, holding)]
            for piece, target in zip(_split(message, targets), targets, strict=True):
                target.copy_(piece)

    def _boxes(self, item: _Part, holding: Holding) -> list[PieceOverlap]:
        return self._holders.boxes(item.source, item.piece, holding)

    def _message(self, item: _Part, numel: int) -> Tensor:
        """Return a flat view with `numel` elements of the preallocated buffer."""
        return self._buffer[: numel * item.dtype.itemsize].view(item.dtype)

    def _largest_message(self, items: Iterable[Item]) -> int:
        """Return an upper bound of the bytes of a message, equal on all ranks."""
        largest = 0
        for item in (_Part(*part, entry.dtype) for entry in items for part in entry.parts):
            holders = self._holders.of(item.source)
            if any(len(ranks) == self._holders.world for ranks in holders.values()):
                continue  # nothing is sent
            # A message is part of an item and of a shard.
            shard = max(math.prod(sum(n for _, n in runs) for runs in dims) for dims in holders)
            size = min(math.prod(item.piece.shape), shard) * item.dtype.itemsize
            largest = max(largest, size)
        return largest


class StoredCollector:
    """Reads boxes or complete Hugging Face tensors from the model of a native checkpoint."""

    def __init__(
        self, path: Path, manifest: Manifest, tensors: Mapping[str, StoredTensor], stack: ExitStack
    ) -> None:
        self._path, self._manifest, self._tensors, self._stack = path, manifest, tensors, stack
        self._readers: dict[str, ShardReader] = {}
        self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a stored tensor as a new CPU tensor."""
        entry = self._tensors[name]
        out = torch.empty([s.stop - s.start for s in box], dtype=entry.dtype)
        for chunk in entry.chunks:
            common = common_part(box, chunk.offsets, chunk.sizes)
            if common is not None:
                source, target = common
                offsets, reader = [s.start for s in source], self._reader(chunk.file)
                reader.read(chunk.key, entry.dtype, chunk.sizes, offsets, out[target])
        return out

    def collect(self, item: Item, writer: int) -> Tensor:
        """Return the complete tensor."""
        tensor = torch.empty(item.shape, dtype=item.dtype)
        for source, piece in item.parts:
            part = self.read(source, piece.box_in(self._tensors[source].shape))
            if piece.view is None:
                return part.view(item.shape).to(item.dtype)
            put(part, piece, tensor)
        return tensor

    def release(self, tensor: Tensor | None) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Do nothing, because `collect` raises errors itself and no other rank waits."""

    def _reader(self, file: str) -> ShardReader:
        if file not in self._readers:
            layout = layout_of(self._manifest.entries_of(file))
            reader = ShardReader(self._path / file, layout, self._buffer, Meter())
            self._readers[file] = self._stack.enter_context(reader)
        return self._readers[file]


def put(part: Tensor, piece: TensorPiece, file_tensor: Tensor) -> None:
    """Copy a piece, in its own order, into its file tensor."""
    assert piece.view is not None, "other pieces are file tensors"
    target = piece.view.of(file_tensor)
    target.copy_(part.view(target.shape))


def _split(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a flat tensor into consecutive views with these shapes."""
    parts = message.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


def _num_common(holding: Holding, piece: TensorPiece, shape: Sequence[int]) -> int:
    """Return the number of elements that a piece and a shard share. It cannot fail."""
    return math.prod(
        sum(max(0, min(a + n, part.stop) - max(a, part.start)) for a, n in runs)
        for runs, part in zip(holding, piece.box_in(shape), strict=True)
    )


def held_of(tensor: Tensor) -> HeldPart:
    """Return the part of a tensor that this rank has."""
    return HeldPart(tuple(tensor.shape), tensor.dtype, holding_of(global_indices(tensor)))
