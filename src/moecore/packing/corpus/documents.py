"""Sources of a corpus, options of its rows, and the token ids of a source's documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn
from weakref import WeakValueDictionary

import numpy as np

from moecore.base.fields import Bound, CheckedRecord, Count, Positive, Rules, Seed, quote
from moecore.packing.corpus.files import shorten_text
from moecore.packing.corpus.order import IndexedDocuments, StreamedDocuments
from moecore.packing.corpus.partitions import Rule
from moecore.packing.documents import Integers

MAX_PARTITIONS = 1 << 20  # each rank keeps a list of the partitions that it reads
EMPTY_IN_TURN = 100_000  # more consecutive documents without tokens are an error
Partitions = Annotated[int, Bound(">=", 1), Bound("<=", MAX_PARTITIONS)]


class CorpusError(ValueError):
    """An error in a source's document, or a difference between data ranks, as one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSource(CheckedRecord):
    """A source of documents in a mixture.

    Attributes:
        name: the source's name in errors and saved positions; unique in a loader.
        documents: a dataset with a length and items by index, which is shuffled anew in each epoch,
            or an object that can be iterated repeatedly, such as a streaming dataset, which is
            shuffled in blocks. The object may have two more attributes: `fingerprint`, a text that
            changes with the content and is compared on resume, and `location(index)`, which returns
            the text by which errors name a document.
        tokenize: returns the token ids of a document, including the end-of-document id. Equal
            documents must give equal ids. None = the documents are token ids. Documents without
            ids are skipped.
        weight: the source's share of the rows is `weight` over the sum of all weights.
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
    """Options of a corpus's rows.

    Attributes:
        row_tokens: tokens of a row.
        documents: "split" = documents are concatenated and cut at the end of each row; "whole" =
            documents are packed into rows, and only documents longer than a row are cut.
        window: number of documents that "whole" packs together, per source and partition.
        multiple: each document's tokens in a row are padded to a multiple of this number: 2 * cp.
        vocab_size: token ids must be below this number; None = any id.
        seed: seed of all shuffles.
        shuffle: False = documents are read in their order.
        shuffle_buffer: number of documents of a stream that are shuffled together.
        partitions: number of partitions of the documents, see `loader.py`; None = 8 per row of a
            global batch. The number decides the rows, so a resumed run keeps the saved number.
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


class DocumentReader:
    """Reads and tokenizes a source's documents: `reader(ordinal)` returns token ids.

    If several partitions read one document at a time, the reader tokenizes the document once.
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
        self._number: int | None = None  # index of the last read document in the source
        self._empty = 0  # documents without tokens since the last one with tokens

    def __call__(self, ordinal: int) -> Integers:
        """Return the token ids of a document. Raise CorpusError if it cannot be read."""
        self._number = None
        try:
            self._number, read = self.documents.take(ordinal)
            ids = self._shared.get(self._number)
            if ids is None:
                ids = tokenize_document(self._source, read(), self._vocab_size)
                self._shared[self._number] = ids
            self._empty = 0 if len(ids) else self._empty + 1
            if self._empty > EMPTY_IN_TURN:
                raise ValueError(f"must have tokens: {self._empty} documents in turn have none")
            return ids
        except Exception as error:  # files, networks and users' tokenizers raise any class
            raise self._make_error(error) from error

    def refuse(self, problem: str) -> NoReturn:
        """Raise a CorpusError that names the last read document."""
        raise self._make_error(problem)

    def _make_error(self, problem: object) -> CorpusError:
        name, line = shorten_text(self._source.name), shorten_text(problem)
        if not isinstance(problem, str | ValueError):  # a KeyError's text is the key
            line = f"{type(problem).__name__}: {line}"
        if self._number is None:
            return CorpusError(f"{name}: {line}")
        place = describe_location(self._source.documents, self._number)
        if not place.startswith(name):  # a source is often named by its file
            name = f"{name}, {place}" if place not in line else name
        elif place in line:
            return CorpusError(line)
        else:
            name = place
        return CorpusError(f"{name}: {line}")


def describe_location(documents: Any, number: int) -> str:
    """Return the text by which errors name a document: `documents.location`, or its number."""
    location = getattr(documents, "location", None)
    return location(number) if callable(location) else f"document {number}"


def tokenize_document(source: CorpusSource, document: Any, vocab_size: int | None) -> Integers:
    """Return the token ids of a document, in the smallest dtype that holds them."""
    ids = document if source.tokenize is None else source.tokenize(document)
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
