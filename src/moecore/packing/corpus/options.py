"""Sources of documents and how they become rows: the records, and the error of a document."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from moecore.base.fields import Bound, CheckedRecord, Count, Positive, Rules, Seed
from moecore.packing.corpus.partitions import Rule

MOST_PARTITIONS = 1 << 20  # each rank lists those that it reads
Partitions = Annotated[int, Bound(">=", 1), Bound("<=", MOST_PARTITIONS)]


class CorpusError(ValueError):
    """A document that cannot be trained on: one line that names its source and what is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSource(CheckedRecord):
    """Documents, how they become token ids, and their share of the rows.

    Attributes:
        name: in errors and positions.
        documents: with a length and items by index, each epoch in an order of its own. Else what
            can be iterated again and again, such as a streaming dataset, shuffled in blocks. Two
            attributes are optional. `fingerprint`, a text that changes with the content, is part of
            a position. `location(index)` returns where a document is, for errors.
        tokenize: a document -> its token ids, with what ends a document; the same ids in each call.
            None = documents are ids.
            Documents without ids are passed over.
        weight: of the rows, over the sum of all weights.
    """

    name: str
    documents: Annotated[Any, "documents by index, or an iterable of them"]
    tokenize: Callable[[Any], Any] | None = None
    weight: Positive = 1.0

    def _rules(self) -> Rules:
        is_text = isinstance(self.documents, str | bytes)
        if is_text or not (isinstance(self.documents, Iterable) or self.is_indexed):
            yield "documents", "have items by index or be iterable: pass a list or a dataset"
        if self.is_indexed and not len(self.documents):
            yield "documents", "have at least one document: leave the source out"

    @property
    def is_indexed(self) -> bool:
        """Whether documents have a length and items by index."""
        try:
            return hasattr(self.documents, "__getitem__") and len(self.documents) >= 0
        except TypeError:  # a tensor of no dims
            return False


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusOptions(CheckedRecord):
    """How documents become rows.

    Attributes:
        row_tokens: tokens of a row.
        documents: "split": documents lie end to end and are cut at the end of a row. "whole": they
            are packed into rows, and only one longer than a row is cut; rows end with padding.
        window: documents of a source that "whole" packs together, per partition.
        multiple: the tokens of a document in a row are rounded up to a multiple of it: 2 * cp.
        vocab_size: token ids must be below it; None = any.
        seed: of all orders.
        shuffle: False = documents in their order.
        shuffle_buffer: documents of a stream that are read and shuffled together.
        partitions: into which documents are dealt, see `loader.py`; None = 8 per row of a batch of
            all ranks. Another number makes other rows: a resumed run keeps that of its position.
    """

    row_tokens: Count
    documents: Rule = "split"
    window: Count = 256
    multiple: Count = 1
    vocab_size: Count | None = None
    seed: Seed = 0
    shuffle: bool = True
    shuffle_buffer: Count = 10_000
    partitions: Partitions | None = None

    def _rules(self) -> Rules:
        if self.row_tokens % self.multiple:
            yield "row_tokens", f"be a multiple of multiple ({self.multiple}): round it up"
