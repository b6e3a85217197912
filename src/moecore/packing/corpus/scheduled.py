"""Steps of a corpus under dynamic context parallelism: a cp for each micro-batch.

The rows of a step are those of a `CorpusLoader`, so is their order, and so is the position. All
documents in them, or pieces of documents, are those of a `ScheduledCollator`. Every rank reads the
rows of the whole step.

    rows of a step      [d0 d1 d2] [d3 d3 d3] [d4 d5 d6]       of `row_tokens`
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist

from moecore.base.fields import Count, CountOrZero, check_arguments
from moecore.base.rank_checks import difference
from moecore.packing.corpus.batches import RankBatches, Rows
from moecore.packing.corpus.loader import PositionedLoader, check_sources
from moecore.packing.corpus.options import CorpusError, CorpusOptions, CorpusSource
from moecore.packing.corpus.scheduled_batch import ScheduledBatch, ScheduledCollator
from moecore.packing.cost import DocumentCost, MeasuredCost
from moecore.packing.schedule import DEFAULT_COST
from moecore.packing.split import multiple_of


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
        collator = ScheduledCollator(
            max_tokens=max_tokens, cost=cost, data_rank=data_rank, data_ranks=data_ranks
        )
        _check_shape(options, collator)
        share = partial(_of_rows, collator)
        batches = RankBatches(sources, options, rows, 0, 1, share)
        super().__init__(batches, workers, data_ranks=data_ranks)
        if data_ranks > 1 and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")  # hosts compare, and no GPU is waited for

    def __next__(self) -> ScheduledBatch:
        batch = super().__next__()
        if self._group is not None:
            description = f"documents or plan of the step up to row {self._rows}"
            problem = difference({description: batch.digest}, "cpu", group=self._group)
            if problem is not None:
                raise CorpusError(
                    f"{problem} on every rank: give all ranks the same files, tokenizer, options "
                    "and cost"
                )
        return batch


def _check_shape(options: CorpusOptions, collator: ScheduledCollator) -> None:
    largest, max_tokens = collator.largest, collator.max_tokens
    if options.multiple > 1:
        raise ValueError(
            f"CorpusOptions.multiple ({options.multiple}) must be 1: groups pad to their own cp"
        )
    if options.row_tokens % multiple_of(largest):
        raise ValueError(
            f"row_tokens ({options.row_tokens}) must be a multiple of {multiple_of(largest)}, two "
            f"chunks of each of {largest} ranks, the most of a group: round it up"
        )
    rank_tokens = options.row_tokens // largest
    if rank_tokens > max_tokens:
        raise ValueError(
            f"max_tokens ({max_tokens}) must be >= {rank_tokens}, what each of {largest} ranks, "
            f"the most of a group, holds of a document of row_tokens ({options.row_tokens}): raise "
            "it, or use shorter rows or more ranks"
        )


def _of_rows(collator: ScheduledCollator, rows: Rows) -> ScheduledBatch:
    return collator.of_pieces([piece for row in rows for piece in row])
