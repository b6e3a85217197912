"""Which document comes at which place: by index, or from a stream.

An ordinal counts the documents that are read, over all epochs: 0, 1, 2, ... Of n documents ordinal
q is of epoch q // n. Each epoch has an order of its own, which is computed place by place, so no
permutation lies in memory.

    permuted(i, 5, key) for i in 0 .. 4: each of 0 .. 4 once

Without a key an epoch is in the order of the documents. After lcm(n, L) ordinals, when each of L
partitions has read n / gcd(n, L) documents, epochs begin one document later: so each partition
reads all documents. Example, 2 documents and 2 partitions: 0 1 | 1 0 | 0 1.

Source of `permuted`: a Feistel network whose result is permuted again while it is out of range
("cycle walking"; Black and Rogaway, Ciphers with arbitrary finite domains, 2002).
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

ROUNDS = 6
READ_BATCH = 64  # rows of a streaming dataset
BITS_64 = 2**64 - 1
DocumentRead = tuple[
    int, Callable[[], Any]
]  # number of a document in its source; reads the document


def key_of(*parts: object) -> int:
    """Return a number of 64 bits that the same parts always give."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def permuted(index: int, count: int, key: int) -> int:
    """Return the place of `index` in an order of 0 .. count - 1 that the key chooses."""
    half = max(1, -(-(count - 1).bit_length() // 2))
    mask = (1 << half) - 1
    while True:
        high_bits, low_bits = index >> half, index & mask
        for number in range(ROUNDS):
            high_bits, low_bits = (
                low_bits,
                high_bits ^ (_mixed(key + number * BITS_64 // ROUNDS + low_bits) & mask),
            )
        index = high_bits << half | low_bits
        if index < count:
            return index


def _mixed(number: int) -> int:
    """Return 64 bits that each bit of the number changes (the finalizer of splitmix64)."""
    number &= BITS_64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & BITS_64
    number = (number ^ number >> 27) * 0x94D049BB133111EB & BITS_64
    return number ^ number >> 31


def turned(ordinal: int, count: int, partitions: int) -> int:
    """Return at which of `count` documents the epoch of an ordinal begins without a key."""
    # Where sizes have a common divisor a partition would have the same documents in all epochs.
    return ordinal // math.lcm(count, partitions) % math.gcd(count, partitions)


class IndexedDocuments:
    """Documents by ordinal, of at least one that has an index."""

    # key None = in their order; ordinals are dealt among `partitions`
    def __init__(self, documents: Any, key: int | None, *, partitions: int) -> None:
        self._documents, self._key, self.length = documents, key, len(documents)
        self._partitions = partitions

    def take(self, ordinal: int) -> DocumentRead:
        """Return the number of an ordinal's document and a function that reads it."""
        epoch, index = divmod(ordinal, self.length)
        if self._key is None:
            index = (index + turned(ordinal, self.length, self._partitions)) % self.length
        else:
            index = permuted(index, self.length, key_of(self._key, epoch))
        return index, lambda: self._documents[index]


class StreamedDocuments:
    """Documents by ordinal, of what is read from its start: each ordinal is taken at most once.

    A block of documents is read and shuffled at a time. A document that is read before its turn
    waits. What no partition of this process takes is read and dropped. Documents begin anew with
    each `iter`; with a method `skip`, as datasets has it, a resumed stream is faster.
    """

    def __init__(
        self,
        documents: Iterable[Any],
        key: int | None,  # of the order of all epochs; None = as they come
        *,
        block: int,  # documents that are shuffled together
        first: int,  # least ordinal that is taken
        last: int,  # largest ordinal that was read before the position was saved; -1 = none
        partitions: int,
        partition_ids: frozenset[int],  # remainders by `partitions` of the ordinals that are taken
        length: int | None,  # documents of an epoch; None = not known before the first has ended
    ) -> None:
        self._documents, self._key, self._block = documents, key, block if key is not None else 1
        self._partitions, self._partition_ids, self._last, self.length = (
            partitions,
            partition_ids,
            last,
            length,
        )
        self._buffer: dict[int, tuple[int, Any]] = {}
        self._stream = self._read(first)

    def take(self, ordinal: int) -> DocumentRead:
        """Return the number of an ordinal's document in the stream and a function that reads it."""
        while ordinal not in self._buffer:
            stream_ordinal, number, document = next(self._stream)
            if stream_ordinal % self._partitions in self._partition_ids:
                self._buffer[stream_ordinal] = (number, document)
        number, document = self._buffer.pop(ordinal)
        return number, lambda: document

    def _read(self, ordinal: int) -> Iterator[tuple[int, int, Any]]:
        """Yield ordinal, number in the stream and document, from an ordinal on."""
        while True:
            epoch, inside = divmod(ordinal, self.length) if self.length else (0, ordinal)
            begin, read = ordinal - inside, inside - inside % self._block
            first, stream = read, self._turned(begin, read)
            turn = self._turn(begin)
            while block := list(islice(stream, self._block)):
                if self.length and read + len(block) > self.length:
                    raise _length_error(self.length, "more")
                key = key_of(self._key, epoch, read)
                for i in range(len(block)):
                    if begin + read + i >= ordinal:
                        place = permuted(i, len(block), key)
                        yield begin + read + i, self._number(turn + read + place), block[place]
                read += len(block)
            if read == first:  # the stream has ended at the place to which it was skipped or before
                read = sum(1 for _ in self._documents_from(0))
            if not read:
                raise ValueError("must have at least one document: it ended at once")
            expected_length = self.length or max(read, self._last + 1)
            if read != expected_length:
                raise _length_error(expected_length, str(read))
            self.length, ordinal = read, max(ordinal, begin + read)

    def _number(self, place: int) -> int:
        return place % self.length if self.length else place

    def _turn(self, begin: int) -> int:
        """Return the document with which the epoch that begins at an ordinal begins."""
        if self.length and self._key is None:
            return turned(begin, self.length, self._partitions)
        return 0

    def _turned(self, begin: int, count: int) -> Iterator[Any]:
        """Yield the documents of the epoch that begins at an ordinal, without the first ones."""
        first = self._turn(begin)
        before = max(0, count - (self.length or 0) + first) if first else 0  # of those from 0
        if not before:
            yield from self._documents_from(first + count)
        yield from islice(self._documents_from(before), first - before)

    def _documents_from(self, count: int) -> Iterable[Any]:
        """Return the documents without the first ones."""
        documents: Any = self._documents
        if hasattr(documents, "skip"):
            count, documents = 0, documents.skip(count) if count else documents
        if hasattr(documents, "iter"):
            documents = _examples(documents)
        return islice(iter(documents), count, None)


def _length_error(expected_length: int, count: str) -> ValueError:
    return ValueError(
        f"the stream ({count} documents) must have {expected_length}, as when it was read before: "
        "do not change the data of a run"
    )


def _examples(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yield all rows of a streaming dataset of datasets: its `__iter__` gives a worker a part."""
    if "fsspec.asyn" in sys.modules:  # its lock does not survive a fork, see datasets
        sys.modules["fsspec.asyn"].reset_lock()
    for batch in dataset.iter(batch_size=READ_BATCH):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))
