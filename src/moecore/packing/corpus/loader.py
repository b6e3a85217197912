"""Rows of a corpus for each data rank: one order of rows for all ranks, and a position in it.

Documents are in L partitions, and row i of a run is the next one of partition i mod L. Partition l
reads the documents with ordinals l, l + L, l + 2L, ... of each source, apart from the others. So
whoever reads a partition tokenizes its documents alone, and rows do not depend on the number of
ranks or workers. The position is the number of rows taken, and the cursor of each source in each
partition.

Ranks and workers whose product with the rows of a batch divides L read partitions of their own.
Others read some of the same ones, and pass over each other's rows.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, Self, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from moecore.base.fields import Count, CountOrZero, check_arguments, quote
from moecore.base.rank_checks import gather
from moecore.packing.collate import PackedBatch
from moecore.packing.corpus.batches import RankBatches, batch_of
from moecore.packing.corpus.documents import CorpusError, CorpusOptions, CorpusSource
from moecore.packing.corpus.files import cut
from moecore.packing.corpus.position import Cursors, check_ranks, check_state

Batch = TypeVar("Batch")


class PositionedLoader(Generic[Batch]):
    """Yields the batches of a `RankBatches` without end, and has the position behind the last."""

    def __init__(self, batches: RankBatches, workers: int, *, data_ranks: int) -> None:
        self._batches, self._workers, self._data_ranks = batches, workers, data_ranks
        self._group: dist.ProcessGroup | None = None  # of the data ranks; None = all ranks
        self._has_checked_ranks = False  # with the other data ranks, since it was made or loaded
        self._batch_iterator: Iterator[Any] | None = None
        self._rows = 0  # of all ranks, taken
        self._loaded: Cursors = {}  # where all ranks began
        self._cursors: Cursors = {}  # behind what this rank has taken since
        self._last: Cursors = {}  # of its last batch
        self._lengths: dict[str, int | None] = {}

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        self._compare()
        if self._batch_iterator is None:
            self._batch_iterator = self._start()
        batch, cursors, lengths = self._receive(self._batch_iterator)
        if isinstance(batch, CorpusError):
            self.close()
            raise batch
        self._cursors |= cursors
        self._last = cursors
        self._lengths |= lengths
        self._rows += self._batches.rows * self._batches.data_ranks
        result: Batch = batch
        return result

    def _compare(self) -> None:
        """Raise when data ranks have other sources, options or positions. Collective, once."""
        if self._has_checked_ranks:
            return
        if self._data_ranks > 1:
            local_facts = self._batches.facts_of_ranks(), self._batches.data_rank
            facts, numbers = zip(*gather(local_facts, self._group), strict=True)
            check_ranks(facts)
            missing = set(range(self._batches.data_ranks)) - set(numbers)
            if missing and dist.is_initialized():
                raise CorpusError(
                    f"data_rank ({quote(sorted(set(numbers)))} on all ranks) must also be "
                    f"{min(missing)}, because data_ranks is {self._batches.data_ranks}: give each "
                    "rank its number"
                )
        self._has_checked_ranks = True

    def _start(self) -> Iterator[Any]:
        loader = DataLoader(
            self._batches,
            batch_size=None,
            num_workers=self._workers,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # not torch's own, whose state a run has saved
            prefetch_factor=2 if self._workers else None,
        )
        with _same_handler():
            return iter(loader)

    def _receive(self, batches: Iterator[Any]) -> Any:
        """Return the batch of the next worker. Raise CorpusError if the worker has ended."""
        try:
            return next(batches)
        except (RuntimeError, OSError, EOFError) as error:
            text = cut(error)
            if not self._workers or text.startswith("Caught "):  # an error that a worker raised
                raise
            self.close()
            raise CorpusError(
                f"a data worker of this rank has ended ({type(error).__name__}: {text}): look for "
                "a lack of memory or a file that was changed, then go on from the last checkpoint"
            ) from error

    def close(self) -> None:
        """End the workers; the next batch starts others at this position."""
        self._batches.begin_at(self._rows, self._loaded | self._cursors, self._lengths)
        self._batch_iterator = None

    def epochs(self) -> dict[str, int]:
        """Return by source which epoch the last batch was of; 0 while a stream's first lasts."""
        return {
            name: max((of[i].ordinal for of in self._last.values()), default=0)
            // (self._lengths.get(name) or 2**62)
            for i, name in enumerate(self._batches.names)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch, as JSON; the same on every rank.

        Collective where torch.distributed is initialized and there are several data ranks.
        """
        local_state = self._state(self._cursors)
        states = gather(local_state) if self._batches.data_ranks > 1 else [local_state]
        check_ranks([{**state["facts"], "rows taken": state["rows"]} for state in states])
        return merge_positions([self._state(self._loaded), *states])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where loaders of the same sources and options were.

        Their ranks, rows and workers may have been others, and their weights: new ones count for
        the rows to come.

        Raises:
            ValueError: for the state of other sources or options, or no state.
        """
        check_arguments(PositionedLoader.load_state_dict, locals())
        position = check_state(state, self._batches.facts(), self._batches.sources)
        self._batches.partitions = position.partitions
        self._rows, self._lengths = position.rows, position.lengths
        self._cursors, self._last, self._loaded = {}, {}, position.cursors
        self._has_checked_ranks = False
        self.close()

    def _state(self, cursors: Cursors) -> dict[str, Any]:
        return {
            "rows": self._rows,
            "partitions": self._batches.partitions,
            "cursors": [[n, [list(cursor) for cursor in cursors[n]]] for n in sorted(cursors)],
            "lengths": self._lengths,
            "facts": self._batches.facts(),
        }


class CorpusLoader(PositionedLoader[PackedBatch]):
    """Yields the batches of this data rank without end, from a position that any ranks resume.

        loader = CorpusLoader([source], CorpusOptions(row_tokens=4096), rows=2, workers=2)
        batch = next(loader)                 # a PackedBatch of 2 rows
        state = loader.state_dict()          # behind that batch, whatever workers have prefetched

    Labels of a batch are shifted: each is the token that follows, also across a cut. The first
    `next` after the start or a load compares data ranks: it is collective over all ranks.

    Args:
        sources: their names differ; rows are a mixture by their weights.
        options: of rows.
        rows: of a batch.
        data_rank: this one; ranks with the same data share it.
        data_ranks: ranks with different data.
        workers: processes that read, tokenize and pack ahead; 0 = this one does when asked. Where
            processes are not forked, sources must pickle.

    Raises:
        ValueError: for no sources, two of one name, or a rank that is not one of the ranks.
        CorpusError: from `next`, for a document that cannot be read or tokenized, or has ids
            outside of the vocabulary. Other ranks do not know: end them.
    """

    def __init__(
        self,
        sources: Sequence[CorpusSource],
        options: CorpusOptions,
        *,
        rows: Count = 1,
        data_rank: CountOrZero = 0,
        data_ranks: Count = 1,
        workers: CountOrZero = 0,
    ) -> None:
        check_arguments(CorpusLoader.__init__, locals())
        check_sources(sources, data_rank, data_ranks)
        collate = partial(batch_of, row_tokens=options.row_tokens, multiple=options.multiple)
        super().__init__(
            RankBatches(sources, options, rows, data_rank, data_ranks, collate),
            workers,
            data_ranks=data_ranks,
        )


def check_sources(sources: Sequence[CorpusSource], data_rank: int, data_ranks: int) -> None:
    """Raise for no sources, two of one name, or a rank that is not one of the ranks."""
    names = [source.name for source in sources]
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"sources ({quote(names)}) must be at least one, each with a name of its own"
        )
    if data_rank >= data_ranks:
        raise ValueError(
            f"data_rank ({data_rank}) must be < data_ranks ({data_ranks}): count from 0"
        )


@contextmanager
def _same_handler() -> Iterator[None]:
    """Return a context that restores the handler of SIGCHLD.

    torch's handler raises the death of a worker wherever the main thread is at that moment.
    Without the handler, the next batch raises it.
    """
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is not before:  # set in the main thread only
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)


def _as_it_is(batch: Any) -> Any:
    return batch


def merge_positions(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the position of all ranks: of each partition the cursors that are ahead."""
    furthest: dict[int, list[list[float]]] = {}
    lengths: dict[str, int | None] = {}
    for state in states:
        for partition, cursors in state["cursors"]:
            if partition not in furthest or _rows_of(cursors) > _rows_of(furthest[partition]):
                furthest[partition] = cursors
        lengths |= {name: n for name, n in state["lengths"].items() if n or name not in lengths}
    return {
        **states[0],
        "cursors": [[n, furthest[n]] for n in sorted(furthest)],
        "lengths": lengths,
    }


def _rows_of(cursors: Sequence[Sequence[float]]) -> float:
    return sum(cursor[0] for cursor in cursors)
