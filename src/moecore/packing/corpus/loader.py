"""Rows of a corpus for each data rank: one order of rows for all ranks, and a position in it.

The rows of a run are dealt from L lanes: row i is the next one of lane i mod L. Lane l reads the
documents with ordinals l, l + L, l + 2L, ... of each source, on its own, so whoever reads a lane
tokenizes its documents alone, and rows do not depend on the number of ranks or workers. The
position is the number of rows taken and the cursor of each source in each lane.

Ranks and workers that divide L read lanes of their own; else some read the same lanes, and skip
each other's rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from moecore.base.fields import (
    Count,
    CountOrZero,
    Positive,
    Rules,
    Seed,
    check_arguments,
    check_fields,
    shown,
)
from moecore.kernels.cross_entropy import IGNORE_INDEX
from moecore.packing.collate import PackedBatch
from moecore.packing.corpus.lanes import Cursor, Ids, Lane, Piece, RowShape, Rule
from moecore.packing.corpus.order import ByIndex, Stream, key_of
from moecore.packing.documents import Integers

Cursors = dict[int, list[Cursor]]  # by lane
LANES_PER_ROW = 8  # workers of a rank that read lanes of their own
EMPTY_IN_TURN = 100_000  # more documents without tokens are an error


class CorpusError(ValueError):
    """A document that cannot be trained on: one line that names its source and what is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSource:
    """Documents, how they become token ids, and their share of the rows.

    Attributes:
        name: in errors and positions.
        documents: with a length and items by index, each epoch in an order of its own. Else what
            can be iterated again and again, such as a streaming dataset, shuffled in blocks.
        tokenize: a document -> its token ids, with what ends a document; None = documents are ids.
            Documents without ids are passed over.
        weight: of the rows, over the sum of all weights.
    """

    name: str
    documents: Annotated[Any, "documents by index, or an iterable of them"]
    tokenize: Annotated[Any, "a function of a document, or None"] = None
    weight: Positive = 1.0

    def __post_init__(self) -> None:
        check_fields(self, self._rules)

    def _rules(self) -> Rules:
        if not isinstance(self.documents, Iterable) and not self.is_indexed:
            yield "documents", "have items by index or be iterable: pass a list or a dataset"
        if self.is_indexed and not len(self.documents):
            yield "documents", "have at least one document: leave the source out"

    @property
    def is_indexed(self) -> bool:
        """Whether documents have a length and items by index."""
        return hasattr(self.documents, "__getitem__") and hasattr(self.documents, "__len__")


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusOptions:
    """How documents become rows.

    Attributes:
        row_tokens: tokens of a row.
        documents: "split": documents lie end to end and are cut at the end of a row. "whole": they
            are packed into rows, and only one longer than a row is cut; rows end with padding.
        window: documents of a source that "whole" packs together, per lane.
        multiple: the tokens of a document in a row are rounded up to a multiple of it: 2 * cp.
        vocab_size: token ids must be below it; None = any.
        seed: of all orders.
        shuffle: False = documents in their order.
        shuffle_buffer: documents of a stream that are read and shuffled together.
        lanes: see `loader.py`; None = 8 per row of a batch of all ranks. Ids of another number are
            other rows, so a resumed run keeps that of its position.
    """

    row_tokens: Count
    documents: Rule = "split"
    window: Count = 256
    multiple: Count = 1
    vocab_size: Count | None = None
    seed: Seed = 0
    shuffle: bool = True
    shuffle_buffer: Count = 10_000
    lanes: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self, self._rules)

    def _rules(self) -> Rules:
        if self.row_tokens % self.multiple:
            yield "row_tokens", f"be a multiple of multiple ({self.multiple}): round it up"


class CorpusLoader:
    """Yields the batches of this data rank without end, from a position that any ranks resume.

        loader = CorpusLoader([source], CorpusOptions(row_tokens=4096), rows=2, workers=2)
        batch = next(loader)                 # a PackedBatch of 2 rows
        state = loader.state_dict()          # behind that batch, whatever workers have prefetched

    Labels of a batch are shifted: each is the token that follows, also across a cut.

    Args:
        sources: their names differ; rows are a mixture by their weights.
        options: of rows.
        rows: of a batch.
        data_rank: this one; ranks with the same data share it.
        data_ranks: ranks with different data.
        workers: processes that read, tokenize and pack ahead; 0 = this one does when asked.

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
        names = [source.name for source in sources]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"sources ({names}) must be at least one, each with a name of its own")
        if data_rank >= data_ranks:
            raise ValueError(
                f"data_rank ({data_rank}) must be < data_ranks ({data_ranks}): count from 0"
            )
        lanes = options.lanes or rows * data_ranks * LANES_PER_ROW
        self._batches = _Batches(sources, options, rows, data_rank, data_ranks, lanes)
        self._workers = workers
        self._coming: Iterator[Any] | None = None
        self._rows = 0  # of all ranks, taken
        self._cursors: Cursors = {}  # behind what this rank has taken
        self._lengths: dict[str, int | None] = {}

    def __iter__(self) -> CorpusLoader:
        return self

    def __next__(self) -> PackedBatch:
        if self._coming is None:
            ahead: Any = {"prefetch_factor": 2} if self._workers else {}
            loader = DataLoader(
                self._batches,
                batch_size=None,
                num_workers=self._workers,
                collate_fn=_as_it_is,
                generator=torch.Generator(),  # not torch's own, whose state a run has saved
                **ahead,
            )
            self._coming = iter(loader)
        batch, cursors, lengths = next(self._coming)
        if isinstance(batch, CorpusError):
            self.close()
            raise batch
        self._cursors |= cursors
        self._lengths |= lengths
        self._rows += self._batches.rows * self._batches.data_ranks
        found: PackedBatch = batch
        return found

    def close(self) -> None:
        """End the workers; the next batch starts others at this position."""
        self._batches.begin_at(self._rows, self._cursors, self._lengths)
        self._coming = None

    def epochs(self) -> dict[str, int]:
        """Return by source how often its documents were read to the end, in the slowest lane.

        Of this rank's lanes. A stream counts from the end of its first epoch.
        """
        sources = enumerate(self._batches.names)
        least = {
            name: min((of[i].ordinal for of in self._cursors.values()), default=0)
            for i, name in sources
        }
        return {name: least[name] // (self._lengths.get(name) or 2**62) for name in least}

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch, as JSON; the same on every rank.

        Collective where torch.distributed is initialized and there are several data ranks.
        """
        own = self._state()
        if self._batches.data_ranks == 1 or not dist.is_initialized():
            return own
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, own)
        return joined(states)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where loaders of the same sources and options were.

        Their ranks, rows and workers may have been others.

        Raises:
            ValueError: for the state of other sources or options, or no state.
        """
        check_arguments(CorpusLoader.load_state_dict, locals())
        if not {"rows", "lanes", "cursors", "lengths", "facts"} <= state.keys():
            raise ValueError(f"state ({shown(state)}) must be a state_dict(): pass one")
        for name, value in self._batches.facts().items():
            if state["facts"].get(name) != value:
                raise ValueError(
                    f"state[{name!r}] ({shown(state['facts'].get(name))}) must be that of this "
                    f"loader ({shown(value)}): make it as it was"
                )
        self._batches.lanes = state["lanes"]
        self._rows, self._lengths = state["rows"], dict(state["lengths"])
        self._cursors = {
            lane: [Cursor(*cursor) for cursor in cursors] for lane, cursors in state["cursors"]
        }
        self.close()

    def _state(self) -> dict[str, Any]:
        """Return the position, with the lanes that this rank knows."""
        return {
            "rows": self._rows,
            "lanes": self._batches.lanes,
            "cursors": [
                [lane, [list(cursor) for cursor in cursors]]
                for lane, cursors in sorted(self._cursors.items())
            ],
            "lengths": self._lengths,
            "facts": self._batches.facts(),
        }


def _as_it_is(batch: Any) -> Any:
    return batch


def joined(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the position of all ranks, of the states of each: of a lane the one that is ahead."""
    ahead: dict[int, list[list[int]]] = {}
    lengths: dict[str, int | None] = {}
    for state in states:
        for lane, cursors in state["cursors"]:
            if lane not in ahead or _rows_of(cursors) > _rows_of(ahead[lane]):
                ahead[lane] = cursors
        lengths |= {name: n for name, n in state["lengths"].items() if n or name not in lengths}
    return {**states[0], "cursors": [[lane, ahead[lane]] for lane in sorted(ahead)]} | {
        "lengths": lengths
    }


def _rows_of(cursors: Sequence[Sequence[int]]) -> int:
    return sum(cursor[0] for cursor in cursors)


class _Batches(IterableDataset[Any]):
    """Batches of a data rank, or those of one worker of it, each with cursors behind it."""

    def __init__(
        self,
        sources: Sequence[CorpusSource],
        options: CorpusOptions,
        rows: int,
        data_rank: int,
        data_ranks: int,
        lanes: int,
    ) -> None:
        self._sources, self._options = sources, options
        self.rows, self.data_rank, self.data_ranks, self.lanes = rows, data_rank, data_ranks, lanes
        self.names = [source.name for source in sources]
        self.begin_at(0, {}, {})

    def begin_at(self, row: int, cursors: Cursors, lengths: Mapping[str, int | None]) -> None:
        """Begin the next iteration at a row of the run."""
        self._first, self._cursors, self._lengths = row, dict(cursors), dict(lengths)

    def facts(self) -> dict[str, Any]:
        """Return what loaders of the same rows have in common."""
        options = self._options
        sources = [
            [s.name, s.weight, len(s.documents) if s.is_indexed else None] for s in self._sources
        ]
        return {
            "sources": sources,
            "row_tokens": options.row_tokens,
            "documents": options.documents,
            "window": options.window,
            "multiple": options.multiple,
            "seed": options.seed,
            "shuffle": options.shuffle,
            "shuffle_buffer": options.shuffle_buffer,
        }

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._all()
        except CorpusError as error:  # a worker's would come with its traceback
            yield error, {}, {}

    def _all(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        numbers = range(worker, 2**62, workers)
        mine = self._lanes_of(worker, workers)
        documents = {s.name: self._documents(i, s, mine) for i, s in enumerate(self._sources)}
        ids = {s.name: self._ids(s, documents[s.name]) for s in self._sources}
        weights = {source.name: source.weight for source in self._sources}
        shape = RowShape(self._options.row_tokens, self._options.multiple, self._options.window)
        lanes: dict[int, Lane] = {}
        for number in numbers:
            taken = [self._row(number, b) for b in range(self.rows)]
            found = []
            for row in taken:
                lane = row % self.lanes
                if lane not in lanes:
                    lanes[lane] = Lane(
                        lane,
                        ids,
                        weights,
                        self._cursors.get(lane),
                        rule=self._options.documents,
                        shape=shape,
                        lanes=self.lanes,
                        seed=self._options.seed,
                    )
                while lanes[lane].rows < row // self.lanes:
                    lanes[lane].next()  # another rank's or worker's row
                found.append(lanes[lane].next())
            cursors = {row % self.lanes: lanes[row % self.lanes].cursors for row in taken}
            lengths = {name: source.length for name, source in documents.items()}
            yield batch_of(found, self._options), cursors, lengths

    def _row(self, number: int, place: int) -> int:
        """Return which row of the run is that of a batch of this rank."""
        return self._first + (number * self.data_ranks + self.data_rank) * self.rows + place

    def _lanes_of(self, worker: int, workers: int) -> frozenset[int]:
        """Return the lanes that a worker reads."""
        period = self.lanes // math.gcd(self.lanes, workers * self.data_ranks * self.rows)
        numbers = range(worker, worker + period * workers, workers)
        return frozenset(
            self._row(number, b) % self.lanes for number in numbers for b in range(self.rows)
        )

    def _documents(
        self, place: int, source: CorpusSource, mine: frozenset[int]
    ) -> ByIndex | Stream:
        """Return the documents of a source by ordinal."""
        options = self._options
        key = key_of(options.seed, "order", source.name) if options.shuffle else None
        if source.is_indexed:
            return ByIndex(source.documents, key)
        starts = (
            self._cursors[lane][place].ordinal if lane in self._cursors else lane for lane in mine
        )
        return Stream(
            source.documents,
            key,
            block=options.shuffle_buffer,
            first=min(starts),
            lanes=self.lanes,
            mine=mine,
            length=self._lengths.get(source.name),
        )

    def _ids(self, source: CorpusSource, documents: ByIndex | Stream) -> Ids:
        """Return the function of an ordinal that gives its document's ids."""
        empty = 0

        def ids(ordinal: int) -> Integers:
            nonlocal empty
            try:
                found = documents.take(ordinal)
                made = found if source.tokenize is None else source.tokenize(found)
                made = checked_ids(made, self._options.vocab_size)
                empty = 0 if len(made) else empty + 1
                if empty > EMPTY_IN_TURN:
                    raise ValueError(f"must have tokens: {empty} documents in turn have none")
                return made
            except Exception as error:  # of any kind: files, networks, tokenizers of others
                line = " ".join(str(error).split())
                raise CorpusError(f"{source.name}, document {ordinal}: {line}") from error

        return ids


def checked_ids(ids: Any, vocab_size: int | None) -> Integers:
    """Return the ids of a document as int64, or refuse what is none."""
    found = np.asarray(ids)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ValueError(f"token ids ({shown(ids)}) must be whole numbers in one row: tokenize it")
    found = found.astype(np.int64)
    if found.size and (found.min() < 0 or (vocab_size and found.max() >= vocab_size)):
        wrong = found.min() if found.min() < 0 else found.max()
        raise ValueError(
            f"token id ({wrong}) must be >= 0 and < vocab_size ({vocab_size}): take the tokenizer "
            "of the model, or a larger vocabulary"
        )
    return found


def batch_of(rows: Sequence[Sequence[Piece]], options: CorpusOptions) -> PackedBatch:
    """Return rows of pieces as a batch; see `PackedBatch`."""
    B, T, multiple = len(rows), options.row_tokens, options.multiple
    ids_BT, labels_BT = np.zeros((B, T), np.int64), np.full((B, T), IGNORE_INDEX, np.int64)
    padding_BT, borders = np.ones((B, T), bool), [0]
    for b, pieces in enumerate(rows):
        start = 0
        for ids, next_id in pieces:
            stop = start + len(ids)
            ids_BT[b, start:stop] = ids
            labels_BT[b, start : stop - 1] = ids[1:]
            labels_BT[b, stop - 1] = next_id
            padding_BT[b, start:stop] = False
            start += -(-len(ids) // multiple) * multiple
            borders.append(b * T + start)
        if start < T:
            borders.append((b + 1) * T)
    cu_n = np.array(borders)
    lengths_n = np.diff(cu_n)
    positions_N = np.arange(B * T) - np.repeat(cu_n[:-1], lengths_n)
    return PackedBatch(
        input_ids=torch.from_numpy(ids_BT),
        labels=torch.from_numpy(labels_BT),
        position_ids=torch.from_numpy(positions_N.reshape(B, T)),
        padding_mask=torch.from_numpy(padding_BT),
        cu_seqlens=torch.from_numpy(cu_n).int(),
        max_seqlen=int(lengths_n.max()),
        num_tokens=torch.tensor(int((labels_BT != IGNORE_INDEX).sum())),
    )
