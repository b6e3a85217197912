"""The order in which documents are read: IndexedDocuments for datasets, StreamedDocuments.

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

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from moecore.packing.documents import hash_parts

ROUNDS = 6
READ_BATCH = 64  # rows of a streaming dataset
BITS_64 = 2**64 - 1
DocumentRead = tuple[int, Callable[[], Any]]  # a document's index, and a function that reads it


def permute_index(index: int, count: int, key: int) -> int:
    """Return entry `index` of a pseudo-random permutation of 0 .. count - 1 with this key."""
    half = max(1, -(-(count - 1).bit_length() // 2))
    mask = (1 << half) - 1
    while True:
        high_bits, low_bits = index >> half, index & mask
        for number in range(ROUNDS):
            high_bits, low_bits = (
                low_bits,
                high_bits ^ (_hash_integer(key + number * BITS_64 // ROUNDS + low_bits) & mask),
            )
        index = high_bits << half | low_bits
        if index < count:
            return index


def _hash_integer(number: int) -> int:
    """Return a 64-bit hash of a number (the finalizer of splitmix64)."""
    number &= BITS_64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & BITS_64
    number = (number ^ number >> 27) * 0x94D049BB133111EB & BITS_64
    return number ^ number >> 31


def find_first_document(ordinal: int, count: int, partitions: int) -> int:
    """Return the document, of `count`, with which an ordinal's epoch begins without a key."""
    return ordinal // math.lcm(count, partitions) % math.gcd(count, partitions)


class IndexedDocuments:
    """The documents of a dataset by ordinal; key None = the order of the dataset."""

    def __init__(self, documents: Any, key: int | None, *, partitions: int) -> None:
        self._documents, self._key, self.length = documents, key, len(documents)
        self._partitions = partitions

    def take(self, ordinal: int) -> DocumentRead:
        """Return the index of an ordinal's document, and a function that reads the document."""
        epoch, index = divmod(ordinal, self.length)
        if self._key is None:
            index = (
                index + find_first_document(ordinal, self.length, self._partitions)
            ) % self.length
        else:
            index = permute_index(index, self.length, hash_parts(self._key, epoch))
        return index, lambda: self._documents[index]


class StreamedDocuments:
    """The documents of an iterable by ordinal. Each ordinal can be taken once.

    The stream is read and shuffled in blocks. Documents that are read before they are taken are
    buffered. Documents of partitions of other processes are discarded. Each epoch calls `iter`. If
    the iterable has a method `skip`, as Hugging Face streaming datasets have, resuming is faster.
    """

    def __init__(
        self,
        documents: Iterable[Any],
        key: int | None,  # None = the order of the stream
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
        self._stream = self._read_from(first)

    def take(self, ordinal: int) -> DocumentRead:
        """Return the index of an ordinal's document, and a function that reads the document."""
        while ordinal not in self._buffer:
            stream_ordinal, number, document = next(self._stream)
            if stream_ordinal % self._partitions in self._partition_ids:
                self._buffer[stream_ordinal] = (number, document)
        number, document = self._buffer.pop(ordinal)
        return number, lambda: document

    def _read_from(self, ordinal: int) -> Iterator[tuple[int, int, Any]]:
        """Yield the ordinal, the index in the stream and the document, from an ordinal on."""
        while True:
            epoch, inside = divmod(ordinal, self.length) if self.length else (0, ordinal)
            begin, read = ordinal - inside, inside - inside % self._block
            first, stream = read, self._read_epoch(begin, read)
            offset = self._find_epoch_start(begin)
            while block := list(islice(stream, self._block)):
                if self.length and read + len(block) > self.length:
                    raise _make_length_error(self.length, "more")
                key = hash_parts(self._key, epoch, read)
                for i in range(len(block)):
                    if begin + read + i >= ordinal:
                        place = permute_index(i, len(block), key)
                        yield (
                            begin + read + i,
                            self._wrap_index(offset + read + place),
                            block[place],
                        )
                read += len(block)
            if read == first:  # the stream is not longer than the skipped documents
                read = sum(1 for _ in self._skip_documents(0))
            if not read:
                raise ValueError("must have at least one document: it ended at once")
            expected_length = self.length or max(read, self._last + 1)
            if read != expected_length:
                raise _make_length_error(expected_length, str(read))
            self.length, ordinal = read, max(ordinal, begin + read)

    def _wrap_index(self, index: int) -> int:
        return index % self.length if self.length else index

    def _find_epoch_start(self, begin: int) -> int:
        """Return the document with which the epoch from ordinal `begin` on begins."""
        if self.length and self._key is None:
            return find_first_document(begin, self.length, self._partitions)
        return 0

    def _read_epoch(self, begin: int, count: int) -> Iterator[Any]:
        """Yield the documents of the epoch from ordinal `begin` on, without the first `count`."""
        first = self._find_epoch_start(begin)
        skip_count = max(0, count - (self.length or 0) + first) if first else 0  # of 0 .. first
        if not skip_count:
            yield from self._skip_documents(first + count)
        yield from islice(self._skip_documents(skip_count), first - skip_count)

    def _skip_documents(self, count: int) -> Iterable[Any]:
        """Iterate over the stream from its start, and skip the first `count` documents."""
        documents: Any = self._documents
        if hasattr(documents, "skip"):
            count, documents = 0, documents.skip(count) if count else documents
        if hasattr(documents, "iter"):
            documents = _read_examples(documents)
        return islice(iter(documents), count, None)


def _make_length_error(expected_length: int, count: str) -> ValueError:
    return ValueError(
        f"the stream ({count} documents) must have {expected_length}, as when it was read before: "
        "do not change the data of a run"
    )


def _read_examples(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yield all rows of a streaming dataset, whose `__iter__` would yield a worker's part."""
    if "fsspec.asyn" in sys.modules:  # its lock does not survive a fork, see datasets
        sys.modules["fsspec.asyn"].reset_lock()
    for batch in dataset.iter(batch_size=READ_BATCH):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))
