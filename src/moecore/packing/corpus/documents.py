"""Token ids of a source's documents by ordinal, and errors that say where a document is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn
from weakref import WeakValueDictionary

import numpy as np

from moecore.base.fields import Bound, CheckedRecord, Count, Positive, Rules, Seed, quote
from moecore.packing.corpus.files import cut
from moecore.packing.corpus.order import IndexedDocuments, StreamedDocuments
from moecore.packing.corpus.partitions import Rule
from moecore.packing.documents import Integers

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


EMPTY_IN_TURN = 100_000  # more documents without tokens are an error


class DocumentReader:
    """Returns the token ids of a document by its ordinal: `reader(ordinal)`.

    Partitions that are in one document at one time share its array, and it is tokenized once.
    """

    def __init__(
        self,
        source: CorpusSource,
        documents: IndexedDocuments | StreamedDocuments,
        vocab_size: int | None,
    ) -> None:
        self.documents = documents
        self._source, self._vocab_size = source, vocab_size
        self._shared: WeakValueDictionary[int, Integers] = WeakValueDictionary()
        self._number: int | None = None  # of the last document in the source
        self._empty = 0  # documents without tokens since the last one with tokens

    def __call__(self, ordinal: int) -> Integers:
        """Return the token ids of the document of an ordinal."""
        self._number = None
        try:
            self._number, read = self.documents.take(ordinal)
            ids = self._shared.get(self._number)
            if ids is None:
                ids = tokens_of(self._source, read(), self._vocab_size)
                self._shared[self._number] = ids
            self._empty = 0 if len(ids) else self._empty + 1
            if self._empty > EMPTY_IN_TURN:
                raise ValueError(f"must have tokens: {self._empty} documents in turn have none")
            return ids
        except Exception as error:  # of any kind: files, networks, tokenizers of others
            raise self._error(error) from error

    def refuse(self, ordinal: int, problem: str) -> NoReturn:
        """Raise a CorpusError that names the document of an ordinal that was just read."""
        raise self._error(problem)

    def _error(self, problem: object) -> CorpusError:
        name, line = cut(self._source.name), cut(problem)
        if not isinstance(problem, str | ValueError):  # a KeyError's text is the key
            line = f"{type(problem).__name__}: {line}"
        if self._number is None:
            return CorpusError(f"{name}: {line}")
        place = location_of(self._source.documents, self._number)
        if not place.startswith(name):  # a source is often named by its file
            name = f"{name}, {place}" if place not in line else name
        elif place in line:
            return CorpusError(line)
        else:
            name = place
        return CorpusError(f"{name}: {line}")


def location_of(documents: Any, number: int) -> str:
    """Return where a document is: file and line where the source knows them."""
    location = getattr(documents, "location", None)
    return location(number) if callable(location) else f"document {number}"


def tokens_of(source: CorpusSource, document: Any, vocab_size: int | None) -> Integers:
    """Return the token ids of a document, in the smallest dtype that holds them."""
    return checked_ids(
        document if source.tokenize is None else source.tokenize(document), vocab_size
    )


def checked_ids(ids: Any, vocab_size: int | None) -> Integers:
    """Return a copy of a document's ids in the smallest unsigned dtype, or refuse them."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"token ids ({quote(ids)}) must be whole numbers in one row: tokenize it")
    if not array.size:
        return np.empty(0, np.uint8)
    # A negative id is a large unsigned one, so one pass over the ids finds both.
    largest = int(array.view(array.dtype.str.replace("i", "u")).max())
    if largest > min((vocab_size or 2**63) - 1, np.iinfo(array.dtype).max):
        smallest = int(array.min())
        wrong = smallest if smallest < 0 else largest
        raise ValueError(
            f"token id ({wrong}) must be >= 0 and < vocab_size ({vocab_size}): take the tokenizer "
            "of the model, or a larger vocabulary"
        )
    return array.astype(np.min_scalar_type(largest))


def sample_of(documents: Any, count: int) -> Sequence[int]:
    """Return numbers of up to `count` documents, evenly spaced, the first and the last included."""
    numbers: list[int] = np.unique(np.linspace(0, len(documents) - 1, count).astype(int)).tolist()
    return numbers
