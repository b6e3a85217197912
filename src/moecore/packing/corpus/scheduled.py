"""Steps of a corpus under dynamic context parallelism: a cp for each micro-batch.

The rows of a step are those of a `CorpusLoader`, so is their order, and so is the position. All
documents in them, or pieces of documents, are the global batch of `schedule_documents`. Every rank
reads the rows of the whole step and makes the plan by itself: nothing travels, and workers of a
rank do it ahead. It then collates what its own groups share.

    rows of a step      [d0 d1 d2] [d3 d3 d3] [d4 d5 d6]       of `row_tokens`
    round 0             ranks 0 .. 3: d3
    round 1             ranks 0, 1: d0 d4     rank 2: d1 d5     rank 3: d2 d6
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moecore.base.agreement import difference
from moecore.base.fields import Count, CountOrZero, check_arguments
from moecore.kernels.cross_entropy import IGNORE_INDEX
from moecore.packing.collate import PackedBatch
from moecore.packing.corpus.batches import RankBatches, Rows, batch_of
from moecore.packing.corpus.loader import PositionedLoader, check_sources
from moecore.packing.corpus.options import CorpusError, CorpusOptions, CorpusSource
from moecore.packing.corpus.partitions import Piece
from moecore.packing.cost import Cost, DocumentCost, MeasuredCost
from moecore.packing.schedule import DEFAULT_COST, DocumentGroup, schedule_documents
from moecore.packing.split import multiple_of

TILE = 128  # tokens of a rank's micro-batch are a multiple of it: few shapes, whole tiles of FP8


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledBatch:
    """A step of one data rank: a micro-batch for each round of the plan, on the CPU.

    Attributes:
        micro_batches: each has one row, the whole row of this rank's group; [1, cp * tokens].
        cps: ranks of the group, by micro-batch.
        is_first: whether this rank is the first of its group, by micro-batch.
        num_labels: of the step, over all ranks.
        digest: of the documents and the plan of all ranks.
    """

    micro_batches: tuple[PackedBatch, ...]
    cps: tuple[int, ...]
    is_first: tuple[bool, ...]
    num_labels: int
    digest: str

    def counts(self) -> Tensor:
        """Return labels that count, tokens without padding, pairs, tokens with padding: int64 [4].

        Sums over data ranks are those of the step: the first rank of a group counts its documents,
        and each rank its own tokens with padding. Pairs are squared lengths of documents.
        """
        found = torch.zeros(4, dtype=torch.int64)
        for batch, cp, is_first in zip(self.micro_batches, self.cps, self.is_first, strict=True):
            found[3] += batch["padding_mask"].numel() // cp
            if is_first:
                tokens_N = F.pad((~batch["padding_mask"]).flatten().cumsum(0), (1, 0))
                lengths = tokens_N[batch["cu_seqlens"].long()].diff()
                found[:3] += torch.stack([batch["num_tokens"], lengths.sum(), lengths @ lengths])
        return found

    def inputs(self, device: torch.device | str) -> list[dict[str, Any]]:
        """Return the arguments of `Decoder` for each micro-batch, copied without a host sync."""
        return [
            {
                "tokens_BT": _copied(batch["input_ids"], device),
                "labels_BT": _copied(batch["labels"], device),
                "padding_mask_BT": _copied(batch["padding_mask"], device),
                "cu_seqlens": _copied(batch["cu_seqlens"], device),
                "max_seqlen": batch["max_seqlen"],
                "num_tokens": max(1, self.num_labels),
                "cp": cp,
            }
            for batch, cp in zip(self.micro_batches, self.cps, strict=True)
        ]

    def loss_of(self, losses: Tensor) -> Tensor:
        """Return this rank's part of the mean loss; its sum over data ranks is that of the step.

        Args:
            losses: of the micro-batches, as `TrainStep.forward_backward` returns them.
        """
        return (losses / torch.tensor(self.cps, device=losses.device)).sum()


class ScheduledLoader(PositionedLoader[ScheduledBatch]):
    """Yields the steps of this data rank without end; each micro-batch has a cp of its own.

        where = dict(data_rank=meshes.data_rank, data_ranks=meshes.data_ranks)
        for batch in ScheduledLoader([source], options, rows=8, max_tokens=8192, **where):
            step.num_micro_batches = len(batch.cps)
            loss = batch.loss_of(step.forward_backward(batch.inputs("cuda")))
            done = step.finish()

    The model is parallelized with `ContextOptions(dynamic=True)` and loss="sum". Positions are
    those of a `CorpusLoader` of the same sources and options: either goes on where the other was.

    Made on every rank at once, because ranks compare their plans through a gloo group of its own.

    Args:
        sources: as for `CorpusLoader`.
        options: likewise; no document is longer than `row_tokens`, padding included, which is a
            multiple of 2 * the largest group. `multiple` is 1.
        rows: of a step, all data ranks together.
        max_tokens: of one rank's micro-batch; it is even, and a multiple of tp.
        cost: of a document, by its length and cp.
        data_rank: this one; tp ranks share it.
        data_ranks: ranks with different data.
        workers: as for `CorpusLoader`. With 1, 2, 4 or 8 none reads what another one reads.

    Raises:
        ValueError: as `CorpusLoader`, or for rows that the largest group of ranks cannot hold.
        CorpusError: from `next`, as `CorpusLoader`, and on every rank when ranks read different
            documents or made different plans.
    """

    def __init__(
        self,
        sources: Sequence[CorpusSource],
        options: CorpusOptions,
        *,
        rows: Count,
        max_tokens: Count,
        cost: DocumentCost | MeasuredCost = DEFAULT_COST,
        data_rank: CountOrZero = 0,
        data_ranks: Count = 1,
        workers: CountOrZero = 0,
    ) -> None:
        check_arguments(ScheduledLoader.__init__, locals())
        check_sources(sources, data_rank, data_ranks)
        _check_shape(options, max_tokens, data_ranks, cost)
        share = _Share(
            ranks=data_ranks,
            rank=data_rank,
            max_tokens=max_tokens,
            longest=options.row_tokens,
            cost=cost,
        )
        super().__init__(RankBatches(sources, options, rows, 0, 1, share), workers)
        self._group: dist.ProcessGroup | None = None
        if data_ranks > 1 and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")  # hosts compare, and no GPU is waited for

    def __next__(self) -> ScheduledBatch:
        batch = super().__next__()
        if self._group is not None:
            where = f"documents or plan of the step up to row {self._rows}"
            problem = difference({where: batch.digest}, "cpu", group=self._group)
            if problem is not None:
                raise CorpusError(
                    f"{problem} on every rank: give all ranks the same files, tokenizer, options "
                    "and cost"
                )
        return batch


def _check_shape(options: CorpusOptions, max_tokens: int, ranks: int, cost: Cost) -> None:
    if options.multiple > 1:
        raise ValueError(
            f"CorpusOptions.multiple ({options.multiple}) must be 1: groups pad to their own cp"
        )
    largest = min(ranks & -ranks, cost.most_cp or ranks)
    if largest > 1 and max_tokens % 2:
        raise ValueError(f"max_tokens ({max_tokens}) must be even: cp ranks hold two chunks")
    if options.row_tokens % multiple_of(largest):
        raise ValueError(
            f"row_tokens ({options.row_tokens}) must be a multiple of {multiple_of(largest)}, two "
            f"chunks of each of {largest} ranks, the most of a group: round it up"
        )
    held = options.row_tokens // largest
    if held > max_tokens:
        raise ValueError(
            f"max_tokens ({max_tokens}) must be >= {held}, what each of {largest} ranks, the most "
            f"of a group, holds of a document of row_tokens ({options.row_tokens}): raise it, or "
            "use shorter rows or more ranks"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """Makes of the rows of a step what one rank computes."""

    ranks: int
    rank: int
    max_tokens: int
    longest: int
    cost: Cost

    def __call__(self, rows: Rows) -> ScheduledBatch:
        pieces = [piece for row in rows for piece in row]
        lengths = [len(piece.ids) for piece in pieces]
        labels = [len(piece.ids) - (piece.next_id == IGNORE_INDEX) for piece in pieces]
        plan = schedule_documents(
            lengths,
            ranks=self.ranks,
            max_tokens=self.max_tokens,
            cost=self.cost,
            num_labels=labels,
        )
        groups = plan.of_rank(self.rank)
        shares = [(g.first_rank, g.cp, g.documents) for groups in plan.rounds for g in groups]
        digest = hashlib.sha256(repr(shares).encode())
        for piece in pieces:
            digest.update(piece.ids.tobytes())
        return ScheduledBatch(
            micro_batches=tuple(self._batch(group, pieces) for group in groups),
            cps=tuple(group.cp for group in groups),
            is_first=tuple(group.first_rank == self.rank for group in groups),
            num_labels=plan.num_labels,
            digest=digest.hexdigest(),
        )

    def _batch(self, group: DocumentGroup, pieces: Sequence[Piece]) -> PackedBatch:
        tokens = min(self.max_tokens, max(1, -(-group.tokens // TILE)) * TILE)
        row = [pieces[i] for i in group.documents]
        return batch_of(
            [row],
            row_tokens=tokens * group.cp,
            multiple=multiple_of(group.cp),
            longest=self.longest,
        )


def _copied(x: Tensor, device: torch.device | str) -> Tensor:
    if torch.device(device).type == "cuda":
        x = x.pin_memory()  # from other memory the host would wait
    return x.to(device, non_blocking=True)
