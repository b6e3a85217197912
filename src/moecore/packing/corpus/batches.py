"""Batches of one data rank, or of one worker of it, as `loader.py` describes their order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from moecore.base.fields import shown
from moecore.kernels.cross_entropy import IGNORE_INDEX
from moecore.packing.collate import PackedBatch
from moecore.packing.corpus.options import CorpusError, CorpusOptions, CorpusSource
from moecore.packing.corpus.order import IndexedDocuments, StreamedDocuments, key_of
from moecore.packing.corpus.partitions import Cursor, Ids, Partition, Piece, RowShape
from moecore.packing.documents import Integers

Cursors = dict[int, list[Cursor]]  # by partition
Rows = Sequence[Sequence[Piece]]
PARTITIONS_PER_ROW = 8  # so many workers of a rank read partitions of their own
EMPTY_IN_TURN = 100_000  # more documents without tokens are an error


class RankBatches(IterableDataset[Any]):
    """Batches of a data rank, or those of one worker of it, each with cursors behind it.

    `collate` makes a batch of its rows.
    """

    def __init__(
        self,
        sources: Sequence[CorpusSource],
        options: CorpusOptions,
        rows: int,
        data_rank: int,
        data_ranks: int,
        collate: Callable[[Rows], Any],
    ) -> None:
        self._sources, self._options, self._collate = sources, options, collate
        self.rows = rows
        self.partitions = options.partitions or rows * data_ranks * PARTITIONS_PER_ROW
        self.data_rank, self.data_ranks = data_rank, data_ranks
        self.names = [source.name for source in sources]
        self.begin_at(0, {}, {})

    def begin_at(self, row: int, cursors: Cursors, lengths: Mapping[str, int | None]) -> None:
        """Begin the next iteration at a row of the run."""
        self._first, self._cursors, self._lengths = row, dict(cursors), dict(lengths)

    def facts(self) -> dict[str, Any]:
        """Return what loaders of the same rows have in common."""
        options = self._options
        sources = [[s.name, len(s.documents) if s.is_indexed else None] for s in self._sources]
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
        mine = self._partitions_of(worker, workers)
        documents = {s.name: self._documents(i, s, mine) for i, s in enumerate(self._sources)}
        ids = {s.name: self._ids(s, documents[s.name]) for s in self._sources}
        partitions: dict[int, Partition] = {}
        for number in numbers:
            taken = [self._row(number, b) for b in range(self.rows)]
            found = []
            for row in taken:
                own = row % self.partitions
                if own not in partitions:
                    partitions[own] = self._partition(own, ids)
                while partitions[own].rows < row // self.partitions:
                    partitions[own].next()  # another rank's or worker's row
                found.append(partitions[own].next())
            cursors = {own: partitions[own].cursors for own in {r % self.partitions for r in taken}}
            lengths = {name: source.length for name, source in documents.items()}
            yield self._collate(found), cursors, lengths

    def _partition(self, number: int, ids: Mapping[str, Ids]) -> Partition:
        options = self._options
        return Partition(
            number,
            ids,
            {source.name: source.weight for source in self._sources},
            self._cursors.get(number),
            rule=options.documents,
            shape=RowShape(options.row_tokens, options.multiple, options.window),
            partitions=self.partitions,
            seed=options.seed,
        )

    def _row(self, number: int, place: int) -> int:
        """Return which row of the run is that of a batch of this rank."""
        return self._first + (number * self.data_ranks + self.data_rank) * self.rows + place

    def _partitions_of(self, worker: int, workers: int) -> frozenset[int]:
        """Return the partitions that a worker reads."""
        period = self.partitions // math.gcd(self.partitions, workers * self.data_ranks * self.rows)
        numbers = range(worker, worker + period * workers, workers)
        return frozenset(
            self._row(number, b) % self.partitions for number in numbers for b in range(self.rows)
        )

    def _documents(
        self, place: int, source: CorpusSource, mine: frozenset[int]
    ) -> IndexedDocuments | StreamedDocuments:
        """Return the documents of a source by ordinal."""
        options = self._options
        key = key_of(options.seed, "order", source.name) if options.shuffle else None
        if source.is_indexed:
            return IndexedDocuments(source.documents, key, partitions=self.partitions)
        starts = (
            self._cursors[partition][place].ordinal if partition in self._cursors else partition
            for partition in mine
        )
        return StreamedDocuments(
            source.documents,
            key,
            block=options.shuffle_buffer,
            first=min(starts),
            partitions=self.partitions,
            mine=mine,
            length=self._lengths.get(source.name),
        )

    def _ids(self, source: CorpusSource, documents: IndexedDocuments | StreamedDocuments) -> Ids:
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


def batch_of(
    rows: Rows, *, row_tokens: int, multiple: int, longest: int | None = None
) -> PackedBatch:
    """Return rows of pieces as a batch; see `PackedBatch`.

    What a row has left is padding in documents of at most `longest` tokens, by default in one.
    """
    B, T = len(rows), row_tokens
    ids_BT, labels_BT = np.zeros((B, T), np.int64), np.full((B, T), IGNORE_INDEX, np.int64)
    padding_BT, borders = np.ones((B, T), bool), [0]
    for b, pieces in enumerate(rows):
        start = 0
        for ids, next_id, labels in pieces:
            stop = start + len(ids)
            ids_BT[b, start:stop] = ids
            labels_BT[b, start : stop - 1] = (ids if labels is None else labels)[1:]
            labels_BT[b, stop - 1] = next_id
            padding_BT[b, start:stop] = False
            start += -(-len(ids) // multiple) * multiple
            borders.append(b * T + start)
        if start < T:
            borders.extend(range(b * T + start, (b + 1) * T, longest or T)[1:])
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
