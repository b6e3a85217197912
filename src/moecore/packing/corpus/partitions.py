"""Rows of one partition: of each source every L-th document, and which source has the next row.

A row is cut from documents by one of two rules ("documents" of `CorpusOptions`):

    split   end to end; what a row has no space for begins the next row of the source
    whole   `window` documents of the source are packed by first-fit decreasing; only a document
            longer than a row is cut

Pieces of a document do not attend to each other, but the label across a cut is that of the next
piece's first token, so no label is lost.

Example, documents [1 2 3] and [4 5 6 7 8] in rows of 4: "split" makes [1 2 3 4] [5 6 7 8], with
labels [2 3 - 5] [6 7 8 -]; "whole" makes [1 2 3 8] [4 5 6 7], with labels [2 3 - -] [5 6 7 8].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import numpy as np

from moecore.kernels.cross_entropy import IGNORE_INDEX
from moecore.packing.bins import pack_lengths
from moecore.packing.corpus.order import BITS_64, key_of
from moecore.packing.documents import Integers

Rule = Literal["split", "whole"]


class Piece(NamedTuple):
    """Tokens of one document that lie in one row, and the label of the last of them."""

    ids: Integers
    next_id: int
    labels: Integers | None = None  # of the tokens themselves, -100 = not learned; None = ids

    @property
    def num_labels(self) -> int:
        """Labels that count."""
        count = len(self.ids) - 1
        if self.labels is not None:
            count = int((self.labels[1:] != IGNORE_INDEX).sum())
        return count + (self.next_id != IGNORE_INDEX)


class Cursor(NamedTuple):
    """The position of one source in one partition."""

    rows: int  # that it has given
    ordinal: int  # "split": of the document that is being cut; "whole": of the first in the window
    offset: int  # "split": tokens of that document; "whole": rows of the window
    credit: float  # rows that the source has less than its share
    tokens: int  # of that document or window; a resumed run compares them


class DocumentsByOrdinal(Protocol):
    """Returns the token ids of a document by ordinal, as `DocumentReader` does."""

    def __call__(self, ordinal: int) -> Integers:
        """Return the token ids of the document of an ordinal."""

    def refuse(self, ordinal: int, problem: str) -> NoReturn:
        """Raise an error that names the document."""


class SplitPacker:
    """Rows of documents that are cut at the end of a row."""

    def __init__(
        self, documents: DocumentsByOrdinal, shape: RowShape, cursor: Cursor, *, partitions: int
    ) -> None:
        self._documents, self._shape, self._partitions = documents, shape, partitions
        self.cursor = cursor
        self._document: Integers | None = None

    def next(self) -> list[Piece]:
        """Return the pieces of the next row."""
        rows, ordinal, offset, credit, _ = self.cursor
        document = self._document
        if document is None:
            document = self._documents(ordinal)
            check_unchanged(self._documents, self.cursor, len(document), len(document))
        pieces: list[Piece] = []
        room = self._shape.tokens
        while room:
            if offset == len(document):
                ordinal, offset = ordinal + self._partitions, 0
                document = self._documents(ordinal)
                continue
            piece = piece_of(document, offset, offset + room)
            offset += len(piece.ids)
            room -= self._shape.rounded(len(piece.ids))
            pieces.append(piece)
        self._document = document
        self.cursor = Cursor(rows + 1, ordinal, offset, credit, len(document))
        return pieces


class WholePacker:
    """Rows of documents that are cut only where they are longer than a row."""

    def __init__(
        self, documents: DocumentsByOrdinal, shape: RowShape, cursor: Cursor, *, partitions: int
    ) -> None:
        self._documents, self._shape, self._partitions = documents, shape, partitions
        self.cursor = cursor
        self._window: _Window | None = None

    def next(self) -> list[Piece]:
        """Return the pieces of the next row."""
        rows, ordinal, offset, credit, _ = self.cursor
        window = self._window
        if window is None:
            window = self._read(ordinal)
            check_unchanged(self._documents, self.cursor, window.tokens, len(window))
        while offset == len(window):
            ordinal, offset = ordinal + self._partitions * self._shape.window, 0
            self._window = None  # before the next window is read
            window = self._read(ordinal)
        self._window = window
        self.cursor = Cursor(rows + 1, ordinal, offset + 1, credit, window.tokens)
        return window.row(offset)

    def _read(self, first: int) -> _Window:
        ordinals = range(first, first + self._partitions * self._shape.window, self._partitions)
        return _Window([self._documents(ordinal) for ordinal in ordinals], self._shape)


class _Window:
    """Rows of documents that are packed together, in the order of their first documents."""

    def __init__(self, documents: Sequence[Integers], shape: RowShape) -> None:
        self._documents, self._row_tokens = documents, shape.tokens
        lengths = np.array([len(document) for document in documents])
        self.tokens = int(lengths.sum())
        # Pieces are two numbers each: a long document has many of them.
        counts = -(-lengths // shape.tokens)
        self._document = np.repeat(np.arange(len(documents)), counts)
        first_piece = np.repeat(np.cumsum(counts) - counts, counts)
        self._start = (np.arange(len(self._document)) - first_piece) * shape.tokens
        of_pieces = np.minimum(lengths[self._document] - self._start, shape.tokens)
        self._rows = pack_lengths(shape.rounded(of_pieces), shape.tokens)
        firsts = self._rows.documents[self._rows.offsets[:-1]]
        self._order = np.argsort(firsts, kind="stable")

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> list[Piece]:
        """Return the pieces of a row."""
        pieces = self._rows[int(self._order[number])]
        numbers, starts = self._document[pieces].tolist(), self._start[pieces].tolist()
        return [
            piece_of(self._documents[number], start, start + self._row_tokens)
            for number, start in zip(numbers, starts, strict=True)
        ]


def check_unchanged(documents: DocumentsByOrdinal, cursor: Cursor, tokens: int, end: int) -> None:
    """Raise when a saved position does not fit the document, or the window, that is read now.

    `end` is what `cursor.taken` counts up to: tokens of the document, or rows of the window.
    """
    if cursor.rows and (tokens != cursor.tokens or cursor.offset > end):
        documents.refuse(
            cursor.ordinal,
            f"the document or its window ({tokens} tokens) must have {cursor.tokens}, as when the "
            "position was saved: use the files and the tokenizer of that run",
        )


class RowShape(NamedTuple):
    """How pieces of documents become rows."""

    tokens: int  # of a row
    multiple: int  # to which the tokens of a piece are rounded up
    window: int  # documents that "whole" packs together

    def rounded(self, length: Any) -> Any:
        """Return the space that a piece takes, or that each of an array of pieces takes."""
        return -(-length // self.multiple) * self.multiple


def piece_of(document: Integers, start: int, stop: int) -> Piece:
    """Return tokens start .. stop of a document."""
    after = int(document[stop]) if stop < len(document) else IGNORE_INDEX
    return Piece(document[start:stop], after)


class Partition:
    """One of the L sequences of rows of which the rows of a run are dealt.

    The source that lacks most rows of its share has the next one (the largest deficit, or credit).
    So of n rows a source of share w has n * w, give or take less than one per source. Credits begin
    at random, so that partitions do not change sources all at once.
    """

    def __init__(
        self,
        number: int,
        documents: Mapping[str, DocumentsByOrdinal],  # by source, as the weights
        weights: Mapping[str, float],
        cursors: Sequence[Cursor] | None,  # None = all begin
        *,
        rule: Rule,
        shape: RowShape,
        partitions: int,
        seed: int,
    ) -> None:
        kind: Any = SplitPacker if rule == "split" else WholePacker
        phases = [key_of(seed, "phase", name, number) / BITS_64 for name in documents]
        mean, total = sum(phases) / len(phases), sum(weights.values())
        starts = cursors or [Cursor(0, number, 0, phase - mean, 0) for phase in phases]
        self._sources = [
            kind(of, shape, Cursor(*cursor), partitions=partitions)
            for of, cursor in zip(documents.values(), starts, strict=True)
        ]
        self._shares = [weight / total for weight in weights.values()]

    @property
    def cursors(self) -> list[Cursor]:
        """By source."""
        return [source.cursor for source in self._sources]

    @property
    def rows(self) -> int:
        """How many rows it has given."""
        return sum(cursor.rows for cursor in self.cursors)

    def next(self) -> list[Piece]:
        """Return the pieces of the next row."""
        credits = [c.credit + w for c, w in zip(self.cursors, self._shares, strict=True)]
        source_idx = int(np.argmax(credits))
        pieces: list[Piece] = self._sources[source_idx].next()
        for i, source in enumerate(self._sources):
            source.cursor = source.cursor._replace(credit=credits[i] - (i == source_idx))
        return pieces
