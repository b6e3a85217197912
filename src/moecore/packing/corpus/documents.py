"""Token ids of a source's documents by ordinal, and errors that say where a document is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import numpy as np

from moecore.base.fields import quote
from moecore.packing.corpus.files import cut
from moecore.packing.corpus.options import CorpusError, CorpusSource
from moecore.packing.corpus.order import IndexedDocuments, StreamedDocuments
from moecore.packing.documents import Integers

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
