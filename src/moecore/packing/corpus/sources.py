"""Sources of a corpus, options of its rows, and the token ids of documents by ordinal.

An ordinal counts documents over all epochs: 0, 1, 2, ... Ordinal q of n documents is in epoch
q // n. Each epoch has another permutation, which `permute_index` computes entry by entry without an
array.

    permute_index(i, 5, key) for i in 0 .. 4: each of 0 .. 4 once

Without a key each epoch has the order of the documents. If n and the number of partitions L had a
common divisor, a partition would read the same documents in every epoch. So after every lcm(n, L)
ordinals, epochs begin one document later. Example, 2 documents, 2 partitions: 0 1 | 1 0 | 0 1.

Source of `permute_index`: a Feistel network whose result is permuted again while it is out of range
("cycle walking"; Black and Rogaway, Ciphers with arbitrary finite domains, 2002).
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal, NoReturn
from weakref import WeakValueDictionary

import numpy as np

from moecore.base.fields import Bound, CheckedRecord, Count, FieldErrors, Positive, Seed, quote
from moecore.packing.corpus.files import shorten_text
from moecore.packing.documents import Integers, hash_values

MAX_PARTITIONS = 1 << 20  # each rank keeps a list of the partitions that it reads
EMPTY_IN_TURN = 100_000  # more consecutive documents without tokens are an error
Rule = Literal["split", "whole"]
Partitions = Annotated[int, Bound(">=", 1), Bound("<=", MAX_PARTITIONS)]


class CorpusError(ValueError):
    """Raised for an unreadable document, or for data ranks with different data or options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSource(CheckedRecord):
    """A source of documents in a mixture.

    Attributes:
        name: the source's name in errors and saved positions; unique in a loader.
        documents: a dataset with a length and an index (each epoch has a new shuffle), or an object
            that can be iterated repeatedly, such as a streaming dataset (shuffled in blocks). The
            object may have the attribute `fingerprint`, a text that changes with the content and is
            compared on resume, and `location(index)`, which returns a document's name for errors.
        tokenize: function that returns a document's token ids, with the end-of-document id; equal
            documents must give equal ids. None = documents are token ids. Empty ids are skipped.
        weight: the source's share of the rows is `weight` divided by the sum of all weights.
    """

    name: str
    documents: Annotated[Any, "documents by index, or an iterable of them"]
    tokenize: Callable[[Any], Any] | None = None
    weight: Positive = 1.0

    def _find_field_errors(self) -> FieldErrors:
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
    """Options that decide the rows (packed token sequences) of a corpus.

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

    def _find_field_errors(self) -> FieldErrors:
        if self.row_tokens % self.multiple:
            yield "row_tokens", f"be a multiple of multiple ({self.multiple}): round it up"


ROUNDS = 6
READ_BATCH = 64  # rows of a streaming dataset
BITS_64 = 2**64 - 1
DocumentRead = tuple[int, Callable[[], Any]]  # a document's index, and a function that reads it


def permute_index(index: int, num_items: int, key: int) -> int:
    """Return entry `index` of the pseudo-random permutation of range(num_items) with this key."""
    half = max(1, -(-(num_items - 1).bit_length() // 2))
    mask = (1 << half) - 1
    while True:
        high_bits, low_bits = index >> half, index & mask
        for number in range(ROUNDS):
            hashed = _hash_integer(key + number * BITS_64 // ROUNDS + low_bits)
            high_bits, low_bits = low_bits, high_bits ^ (hashed & mask)
        index = high_bits << half | low_bits
        if index < num_items:
            return index


def _hash_integer(integer: int) -> int:
    """Return a 64-bit hash of an integer (the finalizer of splitmix64)."""
    integer &= BITS_64
    integer = (integer ^ integer >> 30) * 0xBF58476D1CE4E5B9 & BITS_64
    integer = (integer ^ integer >> 27) * 0x94D049BB133111EB & BITS_64
    return integer ^ integer >> 31


def find_epoch_start(ordinal: int, num_documents: int, num_partitions: int) -> int:
    """Return the index of the first document in the epoch of `ordinal`, if it is unshuffled.

    An ordinal counts the documents of a source over all epochs.
    """
    counts = num_documents, num_partitions
    return ordinal // math.lcm(*counts) % math.gcd(*counts)


class IndexedDocuments:
    """Reads documents of an indexed dataset by ordinal: a count of documents over all epochs.

    `key` is the seed of the shuffle; None = the dataset's order.
    """

    def __init__(self, documents: Any, key: int | None, *, partitions: int) -> None:
        self._documents, self._key, self.length = documents, key, len(documents)
        self._partitions = partitions

    def find_document(self, ordinal: int) -> DocumentRead:
        """Return document `ordinal`, counted over epochs, as (index, function that reads it)."""
        epoch, index = divmod(ordinal, self.length)
        if self._key is None:
            first = find_epoch_start(ordinal, self.length, self._partitions)
            index = (index + first) % self.length
        else:
            index = permute_index(index, self.length, hash_values(self._key, epoch))
        return index, lambda: self._documents[index]


class StreamedDocuments:
    """Reads documents of an iterable by ordinal: a count of documents over all epochs.

    The stream is read and shuffled in blocks. Each ordinal is requested once. Documents that are
    read before their ordinal is requested are buffered, and documents of other processes'
    partitions are discarded. Each epoch calls `iter`. If the iterable has a method `skip`, as
    Hugging Face streaming datasets have, resuming is faster.
    """

    def __init__(
        self,
        documents: Iterable[Any],
        key: int | None,  # seed of the shuffles; None = the order of the stream
        *,
        block: int,  # documents that are shuffled together
        first: int,  # the smallest ordinal that is taken
        last: int,  # the largest ordinal that was read before the position was saved; -1 = none
        partitions: int,
        partition_ids: frozenset[int],  # the partitions whose ordinals are taken
        length: int | None,  # documents of an epoch; None = unknown until the first epoch ends
    ) -> None:
        self._documents, self._key, self._block = documents, key, block if key is not None else 1
        self._partitions, self._partition_ids = partitions, partition_ids
        self._last, self.length = last, length
        self._buffer: dict[int, tuple[int, Any]] = {}
        self._stream = self._iterate_from_ordinal(first)

    def find_document(self, ordinal: int) -> DocumentRead:
        """Return document `ordinal`, counted over epochs, as (index, function that returns it)."""
        while ordinal not in self._buffer:
            stream_ordinal, number, document = next(self._stream)
            if stream_ordinal % self._partitions in self._partition_ids:
                self._buffer[stream_ordinal] = (number, document)
        number, document = self._buffer.pop(ordinal)
        return number, lambda: document

    def _iterate_from_ordinal(self, ordinal: int) -> Iterator[tuple[int, int, Any]]:
        """Yield (ordinal, index in the stream, document) without end, from this ordinal on."""
        while True:
            epoch, inside = divmod(ordinal, self.length) if self.length else (0, ordinal)
            begin, read = ordinal - inside, inside - inside % self._block
            first, stream = read, self._read_epoch(begin, read)
            offset = self._find_epoch_start(begin)
            while block := list(islice(stream, self._block)):
                if self.length and read + len(block) > self.length:
                    raise _make_length_error(self.length, "more")
                key = hash_values(self._key, epoch, read)
                for i in range(len(block)):
                    if begin + read + i >= ordinal:
                        place = permute_index(i, len(block), key)
                        index = offset + read + place
                        index = index % self.length if self.length else index
                        yield begin + read + i, index, block[place]
                read += len(block)
            if read == first:  # the stream is not longer than the skipped documents
                read = sum(1 for _ in self._skip_documents(0))
            if not read:
                raise ValueError("must have at least one document: it ended at once")
            expected_length = self.length or max(read, self._last + 1)
            if read != expected_length:
                raise _make_length_error(expected_length, str(read))
            self.length, ordinal = read, max(ordinal, begin + read)

    def _find_epoch_start(self, epoch_ordinal: int) -> int:
        """Return the index in the source of the document with which an epoch starts.

        `epoch_ordinal` is the position of this document in the stream over all epochs.
        """
        if self.length and self._key is None:
            return find_epoch_start(epoch_ordinal, self.length, self._partitions)
        return 0

    def _read_epoch(self, epoch_ordinal: int, start_idx: int) -> Iterator[Any]:
        """Yield the documents of the epoch that starts at `epoch_ordinal`, from `start_idx` on."""
        first = self._find_epoch_start(epoch_ordinal)
        skip_count = max(0, start_idx - (self.length or 0) + first) if first else 0  # of 0 .. first
        if not skip_count:
            yield from self._skip_documents(first + start_idx)
        yield from islice(self._skip_documents(skip_count), first - skip_count)

    def _skip_documents(self, num_documents: int) -> Iterable[Any]:
        """Iterate over the stream from its start, and skip the first `num_documents` documents."""
        documents: Any = self._documents
        if num_documents and hasattr(documents, "skip"):
            num_documents, documents = 0, documents.skip(num_documents)
        if hasattr(documents, "iter"):
            documents = _iterate_dataset_rows(documents)
        return islice(iter(documents), num_documents, None)


def _make_length_error(expected_length: int, stream_length: str) -> ValueError:
    """Return the error for a stream of `stream_length` ("more" or a number) documents."""
    return ValueError(
        f"the stream ({stream_length} documents) must have {expected_length}, as when it was read "
        "before: do not change the data of a run"
    )


def _iterate_dataset_rows(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yield all rows of a Hugging Face streaming dataset, not only this worker's part."""
    if "fsspec.asyn" in sys.modules:  # its lock does not survive a fork, see datasets
        sys.modules["fsspec.asyn"].reset_lock()
    for batch in dataset.iter(batch_size=READ_BATCH):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


OrderedDocuments = IndexedDocuments | StreamedDocuments


class DocumentReader:
    """Reads a source's documents: `reader(ordinal)` returns the token ids of document `ordinal`."""

    def __init__(
        self, source: CorpusSource, documents: OrderedDocuments, vocab_size: int | None
    ) -> None:
        self.documents = documents
        self._source, self._vocab_size = source, vocab_size
        self._shared: WeakValueDictionary[int, Integers] = WeakValueDictionary()
        self._number: int | None = None  # index of the last read document in the source
        self._empty = 0  # documents without tokens since the last one with tokens

    def __call__(self, ordinal: int) -> Integers:
        """Return the token ids of an ordinal's document, unsigned; CorpusError if unreadable."""
        self._number = None
        try:
            self._number, read = self.documents.find_document(ordinal)
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

    def raise_error(self, problem: str) -> NoReturn:
        """Raise a CorpusError with text `problem` and the location of the last read document."""
        raise self._make_error(problem)

    def _make_error(self, problem: object) -> CorpusError:
        """Return a CorpusError that names source and document; `problem` is a text or exception."""
        name, line = shorten_text(self._source.name), shorten_text(problem)
        if not isinstance(problem, str | ValueError):  # a KeyError's text is the key
            line = f"{type(problem).__name__}: {line}"
        if self._number is None:
            return CorpusError(f"{name}: {line}")
        place = describe_location(self._source.documents, self._number)
        is_file = place.startswith(name)  # a source is often named by its file
        if place in line:
            return CorpusError(line if is_file else f"{name}: {line}")
        return CorpusError(f"{place}: {line}" if is_file else f"{name}, {place}: {line}")


def describe_location(documents: Any, document_idx: int) -> str:
    """Return `documents.location(document_idx)`, or "document 7" without such a method."""
    location = getattr(documents, "location", None)
    return location(document_idx) if callable(location) else f"document {document_idx}"


def tokenize_document(source: CorpusSource, document: Any, vocab_size: int | None) -> Integers:
    """Return 1-D token ids in the smallest unsigned dtype that holds them.

    Raises a ValueError for an id that is negative or not below `vocab_size` (None = any).
    """
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
