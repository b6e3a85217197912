"""`Partition` makes rows from every L-th document of each source, as a mixture of the sources.

`CorpusOptions.documents` selects how a source's documents become rows:

    split   documents are concatenated; the remainder of a document begins the source's next row
    whole   `window` documents are packed by first-fit decreasing; only a document longer than a
            row is cut

Pieces of a document do not attend to each other. The label of a piece's last token is the first
token of the next piece, so a cut loses no label.

Example, documents [1 2 3] and [4 5 6 7 8] in rows of 4: "split" makes [1 2 3 4] [5 6 7 8], with
labels [2 3 - 5] [6 7 8 -]; "whole" makes [1 2 3 8] [4 5 6 7], with labels [2 3 - -] [5 6 7 8].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moecore.kernels.cross_entropy import IGNORE_INDEX
from moecore.packing.bins import pack_lengths
from moecore.packing.collate import Piece
from moecore.packing.corpus.sources import BITS_64, CorpusOptions, DocumentReader
from moecore.packing.documents import Integers, cut_lengths, hash_values


class Cursor(NamedTuple):
    """The position of a source within one partition (share) of its documents, saved to resume."""

    rows: int  # rows that the source has produced
    ordinal: int  # ordinal of the current document, or of the first document of the window
    offset: int  # consumed tokens of that document, or consumed rows of the window
    credit: float  # the source's share of the partition's rows minus `rows`
    tokens: int  # tokens of the document or window, which a resumed run compares


class RowPacker(ABC):
    """Base class that packs one source's documents of one partition into rows, from `cursor` on."""

    def __init__(
        self, documents: DocumentReader, options: CorpusOptions, cursor: Cursor, *, partitions: int
    ) -> None:
        self._documents, self._options, self._partitions = documents, options, partitions
        self.cursor = cursor

    @abstractmethod
    def make_next_row(self) -> list[Piece]:
        """Return the next row, as consecutive parts of documents, and advance `cursor`."""

    def _check_window_unchanged(self, num_tokens: int, max_offset: int) -> None:
        """Raise a CorpusError if the resumed document or window has changed."""
        cursor = self.cursor
        if cursor.rows and (num_tokens != cursor.tokens or cursor.offset > max_offset):
            self._documents.raise_error(
                f"the document or its window ({num_tokens} tokens) must have {cursor.tokens}, as "
                "when the position was saved: use the files and the tokenizer of that run"
            )


class SplitPacker(RowPacker):
    """Packs rows from concatenated documents, which are cut at the end of each row."""

    _document: Integers | None = None

    def make_next_row(self) -> list[Piece]:
        """Return the next row: consecutive documents, cut at the end of the row."""
        rows, ordinal, offset, credit, _ = self.cursor
        document = self._document
        if document is None:
            document = self._documents(ordinal)
            self._check_window_unchanged(len(document), len(document))
        pieces: list[Piece] = []
        remaining, multiple = self._options.row_tokens, self._options.multiple
        while remaining:
            if offset >= len(document):
                ordinal, offset = ordinal + self._partitions, 0
                document = self._documents(ordinal)
                continue
            piece = cut_piece(document, offset, offset + remaining)
            offset += len(piece.ids)
            remaining -= -(-len(piece.ids) // multiple) * multiple
            pieces.append(piece)
        self._document = document
        self.cursor = Cursor(rows + 1, ordinal, offset, credit, len(document))
        return pieces


class WholePacker(RowPacker):
    """Packs a window of documents into rows, and cuts only documents longer than a row."""

    _window: _Window | None = None

    def make_next_row(self) -> list[Piece]:
        """Return the next row of the current window of documents, or of the next window."""
        rows, ordinal, offset, credit, _ = self.cursor
        window = self._window
        if window is None:
            window = self._read_window(ordinal)
            self._check_window_unchanged(window.tokens, len(window))
        while offset >= len(window):
            ordinal, offset = ordinal + self._partitions * self._options.window, 0
            self._window = None  # frees the window before the next window is read
            window = self._read_window(ordinal)
        self._window = window
        self.cursor = Cursor(rows + 1, ordinal, offset + 1, credit, window.tokens)
        return window.make_row(offset)

    def _read_window(self, first_ordinal: int) -> _Window:
        """Read and pack the next documents of this partition, from `first_ordinal` on."""
        numbers = range(self._options.window)
        ordinals = (first_ordinal + number * self._partitions for number in numbers)
        return _Window([self._documents(ordinal) for ordinal in ordinals], self._options)


class _Window:
    """Documents that are packed together, as rows in the order of their first documents."""

    def __init__(self, documents: Sequence[Integers], options: CorpusOptions) -> None:
        self._documents, self._row_tokens = documents, options.row_tokens
        lengths = np.array([len(document) for document in documents])
        self.tokens = int(lengths.sum())
        # A piece is stored as its document and its start, because a long document has many pieces.
        self._document, self._start, piece_lengths = cut_lengths(lengths, options.row_tokens)
        padded_lengths = -(-piece_lengths // options.multiple) * options.multiple
        self._rows = pack_lengths(padded_lengths, options.row_tokens)
        firsts = self._rows.documents[self._rows.offsets[:-1]]
        self._order = np.argsort(firsts, kind="stable")

    def __len__(self) -> int:
        return len(self._rows)

    def make_row(self, row_idx: int) -> list[Piece]:
        """Return the document pieces that are packed into row `row_idx` of the window."""
        pieces = self._rows[int(self._order[row_idx])]
        numbers, starts = self._document[pieces].tolist(), self._start[pieces].tolist()
        return [
            cut_piece(self._documents[document_idx], start, start + self._row_tokens)
            for document_idx, start in zip(numbers, starts, strict=True)
        ]


def cut_piece(document: Integers, start: int, stop: int) -> Piece:
    """Return a view of a document's tokens [start, stop); the last one's label is token `stop`."""
    after = int(document[stop]) if stop < len(document) else IGNORE_INDEX
    return Piece(document[start:stop], after)


class Partition:
    """Produces the rows of one partition, which has 1 / `partitions` of each source's documents.

    The next row is from the source with the largest credit: the source's share of all rows minus
    its rows. A source of share w has n * w of n rows, with an error below the number of sources.
    Initial credits are pseudo-random, so that partitions change sources at different rows.
    """

    def __init__(
        self,
        number: int,  # the index of the partition
        documents: Mapping[str, DocumentReader],  # by the name of the source
        weights: Mapping[str, float],  # by the name of the source
        cursors: Sequence[Cursor] | None,  # None = the start of each source
        options: CorpusOptions,
        *,
        partitions: int,
    ) -> None:
        packer: type[RowPacker] = SplitPacker if options.documents == "split" else WholePacker
        phases = [hash_values(options.seed, "phase", name, number) / BITS_64 for name in documents]
        mean, total = sum(phases) / len(phases), sum(weights.values())
        starts = cursors or [Cursor(0, number, 0, phase - mean, 0) for phase in phases]
        self._sources = [
            packer(reader, options, Cursor(*cursor), partitions=partitions)
            for reader, cursor in zip(documents.values(), starts, strict=True)
        ]
        self._shares = [weight / total for weight in weights.values()]

    @property
    def cursors(self) -> list[Cursor]:
        """The cursor of each source."""
        return [source.cursor for source in self._sources]

    @property
    def rows(self) -> int:
        """The number of rows that the partition has produced."""
        return sum(cursor.rows for cursor in self.cursors)

    def make_next_row(self) -> list[Piece]:
        """Return the next row, as parts of documents of one source, and advance the cursors."""
        credits = [c.credit + w for c, w in zip(self.cursors, self._shares, strict=True)]
        source_idx = int(np.argmax(credits))
        pieces = self._sources[source_idx].make_next_row()
        for i, source in enumerate(self._sources):
            source.cursor = source.cursor._replace(credit=credits[i] - (i == source_idx))
        return pieces
