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

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from moecore.kernels.cross_entropy import IGNORE_INDEX
from moecore.packing.bins import pack_lengths
from moecore.packing.corpus.order import BITS_64, key_of
from moecore.packing.documents import Integers

Ids = Callable[[int], Integers]  # of a document, by ordinal
Rule = Literal["split", "whole"]


class Piece(NamedTuple):
    """Tokens of one document that lie in one row, and the label of the last of them."""

    ids: Integers
    next_id: int
    labels: Integers | None = None  # of the tokens themselves, -100 = not learned; None = ids

    @property
    def num_labels(self) -> int:
        """Labels that count."""
        own = len(self.ids) - 1
        if self.labels is not None:
            own = int((self.labels[1:] != IGNORE_INDEX).sum())
        return own + (self.next_id != IGNORE_INDEX)


class Cursor(NamedTuple):
    """The position of one source in one partition."""

    rows: int  # that it has given
    ordinal: int  # "split": of the document that is being cut; "whole": of the first in the window
    taken: int  # "split": tokens of that document; "whole": rows of the window
    credit: float  # rows that the source has less than its share


class SplitPacker:
    """Rows of documents that are cut at the end of a row."""

    def __init__(self, ids: Ids, shape: RowShape, cursor: Cursor, *, partitions: int) -> None:
        self._ids, self._shape, self._partitions = ids, shape, partitions
        self.cursor = cursor
        self._document: Integers | None = None

    def next(self) -> list[Piece]:
        """Return the pieces of the next row."""
        rows, ordinal, taken, credit = self.cursor
        document = self._ids(ordinal) if self._document is None else self._document
        pieces: list[Piece] = []
        room = self._shape.tokens
        while room:
            if taken == len(document):
                ordinal, taken = ordinal + self._partitions, 0
                document = self._ids(ordinal)
                continue
            piece = piece_of(document, taken, taken + room)
            taken += len(piece.ids)
            room -= self._shape.rounded(len(piece.ids))
            pieces.append(piece)
        self._document, self.cursor = document, Cursor(rows + 1, ordinal, taken, credit)
        return pieces


class WholePacker:
    """Rows of documents that are cut only where they are longer than a row."""

    def __init__(self, ids: Ids, shape: RowShape, cursor: Cursor, *, partitions: int) -> None:
        self._ids, self._shape, self._partitions = ids, shape, partitions
        self.cursor = cursor
        self._rows: list[list[Piece]] | None = None

    def next(self) -> list[Piece]:
        """Return the pieces of the next row."""
        rows, ordinal, taken, credit = self.cursor
        found = self._packed(ordinal) if self._rows is None else self._rows
        while taken == len(found):
            ordinal, taken = ordinal + self._partitions * self._shape.window, 0
            found = self._packed(ordinal)
        self._rows, self.cursor = found, Cursor(rows + 1, ordinal, taken + 1, credit)
        return found[taken]

    def _packed(self, first: int) -> list[list[Piece]]:
        """Return the rows of a window of documents, by their first document."""
        T, window = self._shape.tokens, self._shape.window
        documents = [self._ids(first + i * self._partitions) for i in range(window)]
        pieces = [
            piece_of(document, start, start + T)
            for document in documents
            for start in range(0, len(document), T)
        ]
        bins = pack_lengths([self._shape.rounded(len(piece.ids)) for piece in pieces], T)
        return [[pieces[i] for i in bin_] for bin_ in sorted(bins, key=lambda bin_: int(bin_[0]))]


class RowShape(NamedTuple):
    """How pieces of documents become rows."""

    tokens: int  # of a row
    multiple: int  # to which the tokens of a piece are rounded up
    window: int  # documents that "whole" packs together

    def rounded(self, length: int) -> int:
        """Return the space that a piece takes."""
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
        ids: Mapping[str, Ids],  # by source, as the next two
        weights: Mapping[str, float],
        cursors: Sequence[Cursor] | None,  # None = all begin
        *,
        rule: Rule,
        shape: RowShape,
        partitions: int,
        seed: int,
    ) -> None:
        kind: Any = SplitPacker if rule == "split" else WholePacker
        phases = [key_of(seed, "phase", name, number) / BITS_64 for name in ids]
        mean, total = sum(phases) / len(phases), sum(weights.values())
        starts = cursors or [Cursor(0, number, 0, phase - mean) for phase in phases]
        self._sources = [
            kind(of, shape, Cursor(*cursor), partitions=partitions)
            for of, cursor in zip(ids.values(), starts, strict=True)
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
        chosen = int(np.argmax(credits))
        pieces: list[Piece] = self._sources[chosen].next()
        for i, source in enumerate(self._sources):
            source.cursor = source.cursor._replace(credit=credits[i] - (i == chosen))
        return pieces
