"""Batches of one data rank, or of one worker of it, as `loader.py` describes their order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from moecore.kernels.cross_entropy import IGNORE_INDEX
from moecore.packing.collate import PackedBatch
from moecore.packing.corpus.documents import (
    CorpusError,
    CorpusOptions,
    CorpusSource,
    DocumentReader,
)
from moecore.packing.corpus.order import IndexedDocuments, StreamedDocuments, key_of
from moecore.packing.corpus.partitions import Partition, Piece, RowShape
from moecore.packing.corpus.position import Cursors, facts_of, position_of

Rows = Sequence[Sequence[Piece]]
PARTITIONS_PER_ROW = 8  # so many workers of a rank read partitions of their own


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
        self.sources, self._options, self._collate = sources, options, collate
        self.rows = rows
        self.partitions = options.partitions or rows * data_ranks * PARTITIONS_PER_ROW
        self.data_rank, self.data_ranks = data_rank, data_ranks
        self.names = [source.name for source in sources]
        self._facts: dict[str, Any] | None = None
        self.begin_at(0, {}, {})

    def begin_at(self, row: int, cursors: Cursors, lengths: Mapping[str, int | None]) -> None:
        """Begin the next iteration at a row of the run."""
        self._first, self._cursors, self._lengths = row, dict(cursors), dict(lengths)

    def facts(self) -> dict[str, Any]:
        """Return what loaders of the same rows have in common; reads a few documents once."""
        if self._facts is None:
            self._facts = facts_of(self.sources, self._options)
        return self._facts

    def facts_of_ranks(self) -> dict[str, Any]:
        """Return the facts that must be equal on all data ranks of a run."""
        return {
            **self.facts(),
            **{f"weight of {s.name}": s.weight for s in self.sources},
            "vocab_size": self._options.vocab_size,
            "partitions": self.partitions,
            "rows of a batch": self.rows,
            "data_ranks": self.data_ranks,
            "rows before this batch": self._first,
            "position": position_of(self._cursors, self._lengths),
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
        partition_ids = self._partitions_of(worker, workers)
        readers = {
            s.name: DocumentReader(
                s, self._documents(i, s, partition_ids), self._options.vocab_size
            )
            for i, s in enumerate(self.sources)
        }
        partitions: dict[int, Partition] = {}
        for number in numbers:
            row_ids = [self._row(number, b) for b in range(self.rows)]
            rows = []
            for row in row_ids:
                partition_id = row % self.partitions
                if partition_id not in partitions:
                    partitions[partition_id] = self._partition(partition_id, readers)
                while partitions[partition_id].rows < row // self.partitions:
                    partitions[partition_id].next()  # another rank's or worker's row
                rows.append(partitions[partition_id].next())
            cursors = {
                partition_id: partitions[partition_id].cursors
                for partition_id in {r % self.partitions for r in row_ids}
            }
            lengths = {name: reader.documents.length for name, reader in readers.items()}
            yield self._collate(rows), cursors, lengths

    def _partition(self, number: int, readers: Mapping[str, DocumentReader]) -> Partition:
        options = self._options
        return Partition(
            number,
            readers,
            {source.name: source.weight for source in self.sources},
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
        self, place: int, source: CorpusSource, partition_ids: frozenset[int]
    ) -> IndexedDocuments | StreamedDocuments:
        """Return the documents of a source by ordinal."""
        options = self._options
        key = key_of(options.seed, "order", source.name) if options.shuffle else None
        if source.is_indexed:
            return IndexedDocuments(source.documents, key, partitions=self.partitions)
        starts = (
            self._cursors[partition][place].ordinal if partition in self._cursors else partition
            for partition in partition_ids
        )
        source_cursors = (cursors[place] for cursors in self._cursors.values())
        read = (cursor.ordinal for cursor in source_cursors if cursor.rows)
        return StreamedDocuments(
            source.documents,
            key,
            block=options.shuffle_buffer,
            first=min(starts),
            last=max(read, default=-1),
            partitions=self.partitions,
            partition_ids=partition_ids,
            length=self._lengths.get(source.name),
        )


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
