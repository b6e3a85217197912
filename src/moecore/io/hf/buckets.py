"""WeightBucket: Hugging Face tensors in one flat buffer, assembled from the shards of all ranks.

    shards of a sender -> boxes packed into a preallocated message -> boxes of the bucket

An item is a Hugging Face tensor, and a box is a rectangular part of a tensor. A stream broadcasts
each message to every rank. An export sends the message to the rank that writes the file. Every rank
computes the boxes of each message from `PartOwners`, so no sizes are sent. If several ranks store a
box, the first of these ranks sends it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.failures import run_and_share_errors
from moecore.base.params import chunk_by_size
from moecore.base.rank_checks import Group
from moecore.base.torch_private import foreach_copy_
from moecore.io.checkpoint.ranks import get_rank_and_world
from moecore.io.hf.collect import ErrorKeeper, Item, PartOwners, read_shard_box, write_piece
from moecore.io.hf.pieces import PieceOverlap, find_overlaps

ALIGNMENT = 16  # bytes
MESSAGE_BYTES = 64 << 20  # maximum of an export
Read = Callable[[str, tuple[slice, ...]], Tensor]  # a tensor's name, a box of this rank's shard


class WeightMeta(NamedTuple):
    """Name, dtype and shape of a Hugging Face tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Several Hugging Face tensors (`metas`) in one buffer: `flat`, uint8 on the model's device."""

    metas: tuple[WeightMeta, ...]
    flat: Tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for each tensor in order; the tensors are views of `flat`."""
        at = 0
        for meta in self.metas:
            part = self.flat[at : at + meta.nbytes]
            yield meta.name, part.view(meta.dtype).view(meta.shape)
            at += align_bytes(meta.nbytes)

    @classmethod
    def empty(cls, metas: Sequence[WeightMeta], device: torch.device) -> WeightBucket:
        """Allocate an uninitialized bucket for the tensors that `metas` describes."""
        size = sum(align_bytes(meta.nbytes) for meta in metas)
        return cls(tuple(metas), torch.empty(size, dtype=torch.uint8, device=device))


def align_bytes(num_bytes: int) -> int:
    """Round a number of bytes up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class _SentBox(NamedTuple):
    """A box (rectangular part) of a Hugging Face tensor to send, and the ranks that have it."""

    source: str  # name of the model tensor
    part: int  # which of the item's parts
    overlap: PieceOverlap
    shape: tuple[int, ...]  # in the shard
    num_bytes: int
    ranks: list[int]  # that have the box

    def find_sender(self, writer_rank: int | None) -> int:
        """Return the rank that sends to `writer_rank` (None = all); -1 = receivers have the box."""
        _, world = get_rank_and_world()
        has_box = len(self.ranks) == world if writer_rank is None else writer_rank in self.ranks
        return -1 if has_box else self.ranks[0]


_Copy = tuple[int, _SentBox]  # index of a bucket's tensor, and the box to copy to it


class BucketCollector(ErrorKeeper):
    """Assembles buckets of items (Hugging Face tensors) on every rank, or only on a writer rank.

    Every rank passes the same items in the same order. The message buffer on `device` has
    `message_bytes`, or the bytes of the largest row (dim 0) of an item if that is more. After an
    error, such as out of memory, a rank still communicates, and `raise_error` raises the error.
    """

    def __init__(
        self,
        owners: PartOwners,
        items: Sequence[Item],
        device: torch.device,
        message_bytes: int,
        group: Group = None,  # of gloo, to agree in; NCCL sends tensors in the default group
    ) -> None:
        self._owners, self.device, self._group = owners, device, group
        self._rank, self._world = get_rank_and_world()
        # A box is split only along dim 0 of its tensor, so a message has at least one row.
        self.capacity = max(message_bytes, ALIGNMENT)  # bytes of a message
        for item in items:
            for source, piece in item.parts:
                rows = next(iter(piece.get_box(owners.shapes[source])), slice(0, 1))
                row_numel = math.prod(piece.shape) // max(1, rows.stop - rows.start)
                self.capacity = max(self.capacity, row_numel * item.dtype.itemsize)
        self._boxes: dict[str, list[_SentBox]] = {}
        self._message: Tensor | None = None
        self.peak_bytes = 0  # of a message and a bucket on this rank

    @contextmanager
    def open_pass(self) -> Iterator[None]:
        """Return a context that allocates the message buffer of `collect_bucket`. Collective."""
        size = self.capacity if self._world > 1 else 0

        def allocate() -> Tensor:
            if self._message is not None:
                raise ValueError(
                    "stream (with an open pass) must have one pass at a time: close the other's "
                    "generator"
                )
            return torch.empty(size, dtype=torch.uint8, device=self.device)

        self._message, self._error = run_and_share_errors(allocate, self._group), None
        self.peak_bytes = size
        try:
            yield
        finally:
            self._message = None

    def collect_bucket(
        self, items: Sequence[Item], read_box: Read, writer_rank: int | None = None
    ) -> WeightBucket | None:
        """Assemble items in a new bucket on `writer_rank`, or with None on every rank. Collective.

        The bucket of a `writer_rank` is on the CPU, otherwise on `device`. The result is None on
        other ranks, and if the allocation failed: `raise_error` raises this error.
        """
        assert self._message is not None, "a pass is open"
        bucket, parts = None, list[list[Tensor]]()
        if writer_rank in (None, self._rank):
            with self._keep_error():
                device = self.device if writer_rank is None else torch.device("cpu")
                metas = [WeightMeta(item.name, item.dtype, item.shape) for item in items]
                bucket = WeightBucket.empty(metas, device)
                parts = [
                    [
                        tensor if piece.view is None else tensor.new_empty(piece.shape)
                        for _, piece in item.parts
                    ]
                    for item, (_, tensor) in zip(items, bucket.tensors(), strict=True)
                ]
                for item, (_, tensor) in zip(items, bucket.tensors(), strict=True):
                    if item.has_padding:
                        tensor.zero_()
                size = sum(map(count_bucket_bytes, items))
                self.peak_bytes = max(self.peak_bytes, self._message.nbytes + size)
        copies = [
            (number, box)
            for number, item in enumerate(items)
            for box in self._list_sent_boxes(item, is_cached=writer_rank is None)
        ]
        for sender in sorted({box.find_sender(writer_rank) for _, box in copies}):
            group = [(n, box) for n, box in copies if box.find_sender(writer_rank) == sender]
            for message in chunk_by_size(
                group, lambda copy: align_bytes(copy[1].num_bytes), self.capacity
            ):
                if sender >= 0:
                    self._send_message(sender, writer_rank, message, items, parts, read_box)
                    continue
                with self._keep_error():
                    if parts:
                        sources = [read_box(box.source, box.overlap.target) for _, box in message]
                        foreach_copy_([_get_copy_target(copy, parts) for copy in message], sources)
        with self._keep_error():
            tensors = () if bucket is None else (tensor for _, tensor in bucket.tensors())
            for item, of_item, tensor in zip(items, parts, tensors, strict=False):
                for (_, piece), part in zip(item.parts, of_item, strict=True):
                    if piece.view is not None:
                        write_piece(part, piece, tensor)
        return bucket

    def _send_message(
        self,
        sender_rank: int,
        writer_rank: int | None,
        copies: Sequence[_Copy],
        items: Sequence[Item],
        bucket_parts: list[list[Tensor]],
        read_box: Read,
    ) -> None:
        """Send boxes of `items` to `writer_rank` (None = all), and copy them to its bucket."""
        assert self._message is not None, "a pass is open"
        pieces, at = list[Tensor](), 0
        for number, box in copies:
            piece = self._message[at : at + box.num_bytes]
            pieces.append(piece.view(items[number].dtype).view(box.shape))
            at += align_bytes(box.num_bytes)
        with self._keep_error():
            if self._rank == sender_rank:
                sources = [read_box(box.source, box.overlap.target) for _, box in copies]
                foreach_copy_(pieces, sources)
        group = self._group if self.device.type == "cpu" else None
        if writer_rank is None:
            dist.broadcast(self._message[:at], sender_rank, group=group)
        elif self._rank == sender_rank:
            dist.send(self._message[:at], writer_rank, group=group)
        elif self._rank == writer_rank:
            dist.recv(self._message[:at], sender_rank, group=group)
        with self._keep_error():
            if bucket_parts:
                foreach_copy_([_get_copy_target(copy, bucket_parts) for copy in copies], pieces)

    def _list_sent_boxes(self, item: Item, *, is_cached: bool) -> list[_SentBox]:
        """Return the boxes to send for an item; `is_cached` stores the list for the next pass."""
        if boxes := self._boxes.get(item.name):
            return boxes
        boxes, max_numel = [], self.capacity // item.dtype.itemsize
        for number, (source, piece) in enumerate(item.parts):
            full_shape = self._owners.shapes[source]
            for shard_runs, ranks in self._owners.ranks[source].items():
                for overlap in find_overlaps(shard_runs, piece, full_shape, max_numel=max_numel):
                    shape = tuple(part.stop - part.start for part in overlap.target)
                    size = math.prod(shape) * item.dtype.itemsize
                    boxes.append(_SentBox(source, number, overlap, shape, size, ranks))
        if is_cached:
            self._boxes[item.name] = boxes
        return boxes


class RankCollector(BucketCollector):
    """Assembles one tensor at a time, from this rank's `tensors`, on the rank that writes it."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        owners: PartOwners,
        items: Sequence[Item],
        device: torch.device,
    ) -> None:
        largest = max(align_bytes(item.nbytes) for item in items)
        super().__init__(owners, items, device, min(MESSAGE_BYTES, largest))
        self._tensors = tensors

    def collect_tensor(self, item: Item, writer_rank: int) -> Tensor | None:
        """Assemble the full tensor on the CPU of rank `writer_rank`; return None on other ranks."""
        read = lambda name, box: read_shard_box(self._tensors[name], box, item.dtype)  # noqa: E731
        bucket = self.collect_bucket([item], read, writer_rank)
        return None if bucket is None else next(bucket.tensors())[1]


def count_bucket_bytes(item: Item) -> int:
    """Return a tensor's bytes in a bucket, plus the bytes of temporary copies of strided parts."""
    numels = (math.prod(piece.shape) for _, piece in item.parts if piece.view is not None)
    return align_bytes(item.nbytes) + sum(numels) * item.dtype.itemsize


def _get_copy_target(copy: _Copy, bucket_parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the view of a bucket's memory to which a box (part of a tensor) is copied."""
    number, box = copy
    return bucket_parts[number][box.part][box.overlap.source].view(box.shape)
