"""`ScheduledLoader` iterates over steps for dynamic context parallelism: a cp per micro-batch.

Every rank reads all rows of the step, in the order and at the position of a `CorpusLoader`. Every
rank computes the same schedule of their documents, so the schedule needs no communication, and a
rank's workers can prefetch steps. The rank collates only the documents of its groups.

    rows of a step      [d0 d1 d2] [d3 d3 d3] [d4 d5 d6]       of `row_tokens`

    round 0             ranks 0 .. 3: d3
    round 1             ranks 0, 1: d0 d4     rank 2: d1 d5     rank 3: d2 d6
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moecore.base.fields import CheckedRecord, Count, CountOrZero, FieldErrors, check_arguments
from moecore.base.rank_checks import find_difference
from moecore.base.streams import copy_to_device
from moecore.packing.collate import (
    PackedBatch,
    Rows,
    build_batch,
    get_length_multiple,
    read_document,
)
from moecore.packing.corpus.loader import PositionedLoader, RankBatches, check_sources
from moecore.packing.corpus.sources import CorpusError, CorpusOptions, CorpusSource
from moecore.packing.documents import Document, DocumentCost, MeasuredCost
from moecore.packing.schedule import DEFAULT_COST, schedule_documents

TILE = 128  # a rank's micro-batch has a multiple of TILE tokens: few shapes, full tiles of FP8
# Argument of a forward -> field of a `PackedBatch`.
DECODER = {"tokens_BT": "input_ids", "labels_BT": "labels", "padding_mask_BT": "padding_mask"}
DECODER |= {name: name for name in ("cu_seqlens", "max_seqlen")}
# transformers computes a loss only if `labels` is given.
NAMES = ("input_ids", "labels", "padding_mask", "cu_seqlens", "max_seqlen")
TRANSFORMERS = {name: name for name in NAMES} | {"shift_labels": "labels"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledBatch:
    """A step of one data rank: one micro-batch per round of a `DocumentSchedule`, on the CPU."""

    micro_batches: tuple[PackedBatch, ...]  # the full row [1, cp * tokens] of this rank's groups
    cps: tuple[int, ...]  # number of ranks of this rank's groups
    is_first: tuple[bool, ...]  # whether this rank is the first of its groups
    num_labels: int  # of the step in the loss, over all ranks
    num_tokens: int  # of the step over all ranks, without padding
    digest: str  # SHA-256 of the documents and the schedule of all ranks

    def count_labels_and_tokens(self) -> Tensor:
        """Return int64 [4]: labels, tokens without padding, squared lengths, tokens with padding.

        Sum the results over data ranks: of ranks that share documents, only the first counts them.
        """
        totals = torch.zeros(4, dtype=torch.int64, device="cpu")
        for batch, cp, is_first in zip(self.micro_batches, self.cps, self.is_first, strict=True):
            totals[3] += batch["padding_mask"].numel() // cp
            if is_first:
                tokens_N = F.pad((~batch["padding_mask"]).flatten().cumsum(0), (1, 0))
                lengths = tokens_N[batch["cu_seqlens"].long()].diff()
                totals[:3] += torch.stack([batch["num_tokens"], lengths.sum(), lengths @ lengths])
        return totals

    def inputs(
        self, device: torch.device | str, *, transformers: bool = False
    ) -> list[dict[str, Any]]:
        """Return the arguments of a forward for each micro-batch, copied without a host sync.

        Args:
            device: the device of the copies.
            transformers: True = arguments for a model of transformers; False = for `Decoder`.
        """
        names = TRANSFORMERS if transformers else DECODER
        shared = {"num_tokens": max(1, self.num_labels)}
        shared |= {"use_cache": False} if transformers else {}
        inputs: list[dict[str, Any]] = []
        for batch, cp in zip(self.micro_batches, self.cps, strict=True):
            arguments: dict[str, Any] = {**shared, "cp": cp}
            for name, key in names.items():
                value = batch[key]  # type: ignore[literal-required]
                is_tensor = isinstance(value, Tensor)
                arguments[name] = copy_to_device(value, device) if is_tensor else value
            inputs.append(arguments)
        return inputs

    def compute_local_loss(self, losses: Tensor) -> Tensor:
        """Return this rank's part of the mean loss; the sum over data ranks is the step's loss.

        Args:
            losses: fp32 [rounds], a loss per micro-batch, as `TrainStep.forward_backward` returns.
        """
        cps = torch.tensor(self.cps, dtype=torch.int64, device="cpu")
        return (losses / copy_to_device(cps, losses.device)).sum()


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledCollator(CheckedRecord):
    """A `collate_fn` for DataLoader that makes a `ScheduledBatch` from the documents of a step.

        collator = ScheduledCollator(max_tokens=8192, data_rank=..., data_ranks=...)
        for batch in DataLoader(documents, batch_size=64, collate_fn=collator):
            step.num_micro_batches = len(batch.cps)
            loss = batch.compute_local_loss(step.forward_backward(batch.inputs("cuda")))
            done = step.finish()

    Parallelize the model with `ContextOptions(dynamic=True)` and loss="sum". Every data rank must
    receive the same documents in the same order.

    Attributes:
        max_tokens: the largest number of tokens of a rank's micro-batch, a multiple of tp. If ranks
            share documents, this number must also be a multiple of 2.
        cost: the cost model of a document, by its length and cp.
        data_rank: this rank's index, `meshes.data_rank`.
        data_ranks: number of data ranks. Up to G ranks share a document, where G is the largest
            power of two that divides this number. Documents on cp ranks are padded to multiples of
            2 * cp.
    """

    max_tokens: Count
    cost: DocumentCost | MeasuredCost = DEFAULT_COST
    data_rank: CountOrZero = 0
    data_ranks: Count = 1

    def _find_field_errors(self) -> FieldErrors:
        if self.data_rank >= self.data_ranks:
            yield "data_rank", f"be < data_ranks ({self.data_ranks}): take both from the meshes"
        if self.max_group_ranks > 1 and self.max_tokens % 2:
            yield "max_tokens", "be even: cp ranks hold two chunks"

    @property
    def max_group_ranks(self) -> int:
        """The largest number of ranks (cp) that may share a document."""
        return min(self.data_ranks & -self.data_ranks, self.cost.max_cp or self.data_ranks)

    def __call__(self, documents: Sequence[Document]) -> ScheduledBatch:
        """Return this rank's batch of a step.

        Args:
            documents: token ids or mappings: see `PackedCollator`.

        Raises:
            ValueError: if `PackedCollator` refuses a document, or a document exceeds `max_tokens`
                per rank of the largest group.
        """
        check_arguments(ScheduledCollator.__call__, locals())
        pieces = [read_document(document, number) for number, document in enumerate(documents)]
        return self.schedule_rows([pieces])

    def schedule_rows(self, rows: Rows) -> ScheduledBatch:
        """Return this rank's batch of the documents in `rows`, which must be equal on all ranks."""
        pieces = [piece for row in rows for piece in row]
        lengths = [len(piece.ids) for piece in pieces]
        plan = schedule_documents(
            lengths,
            ranks=self.data_ranks,
            max_tokens=self.max_tokens,
            cost=self.cost,
            num_labels=[piece.num_labels for piece in pieces],
        )
        groups = plan.select_rank_groups(self.data_rank)
        shares = [(g.first_rank, g.cp, g.documents) for groups in plan.rounds for g in groups]
        digest = hashlib.sha256(repr(shares).encode())
        for piece in pieces:
            digest.update(piece.ids.tobytes())
            digest.update(b"" if piece.labels is None else piece.labels.tobytes())
        multiple = get_length_multiple(self.max_group_ranks)
        longest = -(-max(lengths) // multiple) * multiple
        micro_batches = []
        for group in groups:
            tokens = min(self.max_tokens, max(1, -(-group.tokens // TILE)) * TILE)
            micro_batch = build_batch(
                [[pieces[i] for i in group.documents]],
                row_tokens=tokens * group.cp,
                multiple=get_length_multiple(group.cp),
                max_padding_tokens=longest,  # more could exceed the model's positions
            )
            micro_batches.append(micro_batch)
        return ScheduledBatch(
            micro_batches=tuple(micro_batches),
            cps=tuple(group.cp for group in groups),
            is_first=tuple(group.first_rank == self.data_rank for group in groups),
            num_labels=plan.num_labels,
            num_tokens=sum(lengths),
            digest=digest.hexdigest(),
        )


class ScheduledLoader(PositionedLoader[ScheduledBatch]):
    """An endless iterator over the steps of this data rank. See `ScheduledCollator` for a loop.

    A `CorpusLoader` of the same sources and options can load the state of a `ScheduledLoader`, and
    the reverse. The constructor is collective: it creates a gloo group to compare schedules.

    Args:
        sources: sources of the corpus: see `CorpusLoader`.
        options: options of the rows. `multiple` must be 1, and `row_tokens` a multiple of
            2 * the largest number of ranks that may share a document.
        rows: rows of a step, over all data ranks.
        max_tokens, cost: see `ScheduledCollator`.
        data_rank: this rank's index, `meshes.data_rank`.
        data_ranks: number of data ranks, `meshes.data_ranks`.
        workers: processes that prefetch steps: see `CorpusLoader`. If `workers` is 1, 2, 4 or 8,
            no two workers of a rank read the same partition.

    Raises:
        ValueError: as `CorpusLoader`, and if `row_tokens` > `max_tokens` * that number of ranks.
        CorpusError: from `next`, as `CorpusLoader`, and on every rank if ranks read different
            documents or computed different schedules.
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
        collator = ScheduledCollator(
            max_tokens=max_tokens, cost=cost, data_rank=data_rank, data_ranks=data_ranks
        )
        if options.multiple > 1:
            relation = "must be 1: groups pad to their own cp"
            raise ValueError(f"CorpusOptions.multiple ({options.multiple}) {relation}")
        largest, row_tokens = collator.max_group_ranks, options.row_tokens
        multiple = get_length_multiple(largest)
        if row_tokens % multiple:
            raise ValueError(
                f"row_tokens ({row_tokens}) must be a multiple of {multiple}, two chunks of each "
                f"of {largest} ranks, the most of a group: round it up"
            )
        if row_tokens // largest > max_tokens:
            raise ValueError(
                f"max_tokens ({max_tokens}) must be >= {row_tokens // largest}, what each of "
                f"{largest} ranks, the most of a group, holds of a document of row_tokens "
                f"({row_tokens}): raise it, or use shorter rows or more ranks"
            )
        batches = RankBatches(sources, options, rows, 0, 1, collator.schedule_rows)
        super().__init__(batches, workers, data_ranks=data_ranks)
        if data_ranks > 1 and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")  # hosts compare, and no GPU is waited for

    def __next__(self) -> ScheduledBatch:
        """Return the next batch; CorpusError if ranks have different documents or schedules."""
        batch = super().__next__()
        if self._group is not None:
            description = f"documents or plan of the step up to row {self._rows}"
            problem = find_difference({description: batch.digest}, "cpu", group=self._group)
            if problem is not None:
                raise CorpusError(
                    f"{problem} on every rank: give all ranks the same files, tokenizer, options "
                    "and cost"
                )
        return batch
