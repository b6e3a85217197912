"""Where the tensors of an export come from: put together on their writer from all ranks' shards.

Who holds what is exchanged once. Then each tensor takes one message per sender: of the ranks with
the same part (replicas) one sends, and the writer itself if it is among them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.checkpoint.agree import gather
from moecore.checkpoint.hf.names import Piece, Recipe
from moecore.checkpoint.hf.target import Overlap, local_part, overlaps
from moecore.moe.params import global_indices

Holding = tuple[tuple[tuple[int, int], ...], ...]  # per dim: runs (first index, length)


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor of the directory: a piece of a tensor of the model, or of a copy of it.

    Attributes:
        name: in the directory.
        source: name of the model's tensor.
        piece: which part of that.
        dtype: as written.
    """

    name: str
    source: str
    piece: Piece
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.piece.shape) * self.dtype.itemsize


@dataclass(slots=True)
class InFlight:
    """Bytes that are held now, and the most there ever were."""

    now: int = 0
    peak: int = 0

    def hold(self, num_bytes: int) -> None:
        """Count memory that was taken."""
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def release(self, num_bytes: int) -> None:
        """Count memory that was let go."""
        self.now -= num_bytes


class Collector(Protocol):
    """Where the tensors come from; every rank asks for the same ones in the same order."""

    def collect(self, item: Item, writer: int) -> Tensor | None:
        """Return the whole tensor on its writer, on the CPU, and None elsewhere."""
        ...

    def done(self, whole: Tensor | None) -> None:
        """Note that the writer has let go of a tensor."""
        ...


class RankCollector:
    """Puts tensors together on their writers. Every rank calls it for the same items in order.

    Args:
        tensors: of the model, by name.
        recipes: of each tensor.
    """

    def __init__(self, tensors: Mapping[str, Tensor], recipes: Mapping[str, Recipe]) -> None:
        self.in_flight = InFlight()
        self._tensors, self._recipes = tensors, recipes
        self._rank, _ = rank_and_world()
        self._holders: dict[str, dict[Holding, list[int]]] = {name: {} for name in recipes}
        for rank, holdings in enumerate(gather({n: _holding(tensors[n]) for n in recipes})):
            for name, holding in holdings.items():
                self._holders[name].setdefault(holding, []).append(rank)

    def collect(self, item: Item, writer: int) -> Tensor | None:
        """Return the whole tensor on its writer, a new CPU tensor, and None elsewhere."""
        whole = None
        if self._rank == writer:
            whole = torch.empty(item.piece.shape, dtype=item.dtype)
            self.in_flight.hold(whole.nbytes)
        for holding, holders in self._holders[item.source].items():
            if not _touches(holding, item.piece):
                continue
            sender = writer if writer in holders else holders[0]
            if self._rank in (sender, writer):
                shape = self._recipes[item.source].shape
                boxes = list(overlaps(_indices(holding), item.piece, shape))
                self._move(item, boxes, sender, writer, whole)
        return whole

    def done(self, whole: Tensor | None) -> None:
        """Note that the writer has let go of a tensor."""
        if whole is not None:
            self.in_flight.release(whole.nbytes)

    def _move(
        self, item: Item, boxes: list[Overlap], sender: int, writer: int, whole: Tensor | None
    ) -> None:
        """Bring boxes from the sender's shard into the writer's tensor, as one message."""
        local = local_part(self._tensors[item.source])
        parts = [local[box.target] for box in boxes] if self._rank == sender else []
        targets = [] if whole is None else [whole[box.source] for box in boxes]
        if sender == writer:
            for part, target in zip(parts, targets, strict=True):
                target.view(part.shape).copy_(part)
            return
        numel = sum(math.prod(s.stop - s.start for s in box.source) for box in boxes)
        message = torch.empty(numel, dtype=item.dtype, device=local.device)
        self.in_flight.hold(message.nbytes)
        if parts:
            for piece, part in zip(_split(message, parts), parts, strict=True):
                piece.copy_(part)
            dist.send(message, writer)
        else:
            dist.recv(message, sender)
            for piece, target in zip(_split(message, targets), targets, strict=True):
                target.copy_(piece)
        self.in_flight.release(message.nbytes)


def _split(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """View a flat tensor as one after the other of these shapes."""
    parts = message.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


def _touches(holding: Holding, piece: Piece) -> bool:
    """Whether a shard holds any of a piece; without tensors, as it is asked for every rank."""
    for runs, part in zip(holding, piece.region, strict=False):
        start, stop = (part, part + 1) if isinstance(part, int) else (part.start, part.stop)
        if not any(first < stop and start < first + length for first, length in runs):
            return False
    return all(holding)


def _holding(tensor: Tensor) -> Holding:
    return tuple(_runs(index) for index in global_indices(tensor))


def _runs(index: Tensor) -> tuple[tuple[int, int], ...]:
    if not index.numel():
        return ()
    edges = [0, *(index.diff() != 1).nonzero().flatten().add(1).tolist(), index.numel()]
    return tuple((int(index[a]), b - a) for a, b in itertools.pairwise(edges))


def _indices(holding: Holding) -> list[Tensor]:
    empty = torch.empty(0, dtype=torch.int64)
    return [torch.cat([empty, *(torch.arange(a, a + n) for a, n in runs)]) for runs in holding]


def rank_and_world() -> tuple[int, int]:
    """Return this rank and the number of ranks; 0 and 1 without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
