"""pack_lengths: packs documents into bins of at most a fixed number of tokens.

Legend: N documents, b bins.

First-fit decreasing puts each document, longest first, into the first bin that has the capacity.
Each node of a tree over the bins has the largest remaining capacity of its bins, so a search takes
log2(b) steps. The first such bin takes as many documents of one length as fit. So N documents take
at most N searches, and far fewer if lengths repeat.

Example, lengths 3 6 4 2 5 in bins of 8: 6 opens bin 0, 5 opens bin 1, 4 opens bin 2, 3 fits bin 1,
and 2 fits bin 0, so the bins are [1, 3], [0, 4] and [2].

Source: Johnson, Near-optimal bin packing algorithms (1973): at most 11/9 of the fewest bins + 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from moecore.base.fields import Count, check_arguments
from moecore.packing.documents import (
    Document,
    Integers,
    Lengths,
    as_lengths,
    check_fits,
    cut_document,
    length_of,
)

TooLong = Literal["raise", "cut"]


@dataclass(frozen=True, slots=True)
class Bins:
    """Documents by bin: `bins[i]` is an int64 array with the document indices of bin i.

    Attributes:
        documents: int64 [N], the document indices of bin 0, then of bin 1, and so on.
        offsets: int64 [b + 1]; bin i is `documents[offsets[i] : offsets[i + 1]]`.
    """

    documents: Integers
    offsets: Integers

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Integers:
        if not 0 <= index < len(self):
            raise IndexError(f"bin {index} of {len(self)}")
        return self.documents[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[Integers]:
        return (self[i] for i in range(len(self)))


def pack_lengths(lengths: Lengths, bin_tokens: Count) -> Bins:
    """Pack documents of these lengths into bins of at most `bin_tokens` (first-fit decreasing).

    Document indices ascend within a bin. Deterministic; O(N log b): a million documents take
    seconds.

    Raises:
        ValueError: if a document is longer than a bin.
    """
    check_arguments(pack_lengths, locals())
    lengths_N = as_lengths(lengths)
    check_fits(lengths_N, bin_tokens)
    by_length = np.argsort(-lengths_N, kind="stable")
    values, counts = np.unique(-lengths_N, return_counts=True)
    max_bins = min(len(lengths_N), 2 * int(lengths_N.sum()) // bin_tokens + 1)
    opened = _Rooms(bin_tokens, max_bins=max_bins)
    bins: list[int] = []
    numbers: list[int] = []
    for length, count in zip((-values).tolist(), counts.tolist(), strict=True):
        while count:
            index, room = opened.first_with(length)
            number = min(count, room // length)
            opened.set(index, room - number * length)
            bins.append(index)
            numbers.append(number)
            count -= number
    bin_of = np.empty(len(lengths_N), np.int64)
    bin_of[by_length] = np.repeat(np.array(bins, np.int64), numbers)
    sizes = np.bincount(bin_of) if bins else np.zeros(0, np.int64)
    return Bins(np.argsort(bin_of, kind="stable"), np.concatenate([[0], np.cumsum(sizes)]))


class _Rooms:
    """A tree of the remaining capacities of at most `max_bins` bins, in tokens."""

    # First fit opens a bin only for a document that no earlier bin can take. So at most one bin is
    # half full or less, which bounds the number of bins.

    def __init__(self, bin_tokens: int, max_bins: int) -> None:
        self._leaves = 1 << max(max_bins, 1).bit_length()
        self._largest = [bin_tokens] * (2 * self._leaves)  # of a node; children 2i and 2i + 1

    def first_with(self, tokens: int) -> tuple[int, int]:
        """Return the first bin that can take `tokens` tokens, and its remaining capacity."""
        largest, node = self._largest, 1
        while node < self._leaves:
            node *= 2
            if largest[node] < tokens:
                node += 1
        return node - self._leaves, largest[node]

    def set(self, index: int, room: int) -> None:
        largest, node = self._largest, index + self._leaves
        largest[node] = room
        while node > 1:
            node //= 2
            left_largest, right_largest = largest[2 * node], largest[2 * node + 1]
            room = left_largest if left_largest > right_largest else right_largest
            if largest[node] == room:
                return
            largest[node] = room


def pack_documents(
    documents: Iterable[Document],
    bin_tokens: Count,
    *,
    window: Count = 4096,
    too_long: TooLong = "raise",
) -> Iterator[list[Document]]:
    """Yield lists of documents of at most `bin_tokens` tokens each, from a possibly endless stream.

    The function buffers at most `window` documents and packs them together. It yields the fullest
    half of the bins and the bin of the oldest document, and refills the buffer. Deterministic.

    Args:
        documents: token ids, or dataset rows with `input_ids`: see `PackedCollator`.
        bin_tokens: the largest number of tokens in a bin.
        window: size of the buffer in documents. A larger buffer leaves less padding.
        too_long: for a document of more than `bin_tokens` tokens: "raise" an error, or "cut" the
            document into pieces that are separate documents.

    Raises:
        ValueError: for an object that is no document, a document without tokens and, with "raise",
            a document that is too long.
    """
    check_arguments(pack_documents, locals())
    return _pack(_pieces(documents, bin_tokens, too_long), bin_tokens, window)


def _pieces(
    documents: Iterable[Document], bin_tokens: int, too_long: TooLong
) -> Iterator[tuple[Document, int]]:
    """Yield each document or its pieces of at most `bin_tokens` tokens, with their lengths."""
    for number, document in enumerate(documents):
        length = length_of(document)
        if not length or (length > bin_tokens and too_long == "raise"):
            relation = "have >= 1 token: leave it out"
            if length:
                relation = f"have <= bin_tokens ({bin_tokens}) tokens: use too_long='cut'"
            raise ValueError(f"documents (number {number}, {length} tokens) must {relation}")
        if length <= bin_tokens:
            yield document, length
            continue
        for start in range(0, length, bin_tokens):
            stop = min(start + bin_tokens, length)
            yield cut_document(document, start, stop), stop - start


def _pack(
    pieces: Iterator[tuple[Document, int]], bin_tokens: int, window: int
) -> Iterator[list[Document]]:
    window_pieces = list(islice(pieces, window))
    while window_pieces:
        bins = list(pack_lengths([length for _, length in window_pieces], bin_tokens))
        full_bins = sorted(
            bins, key=lambda bin_: int(bin_[0])
        )  # by the document that waits longest
        if len(window_pieces) == window:
            full_bins = _fullest_half(full_bins, [length for _, length in window_pieces])
        for bin_ in full_bins:
            yield [window_pieces[i][0] for i in bin_]
        indices = {int(i) for bin_ in full_bins for i in bin_}
        window_pieces = [piece for i, piece in enumerate(window_pieces) if i not in indices]
        window_pieces.extend(islice(pieces, window - len(window_pieces)))


def _fullest_half(bins: list[Integers], lengths: list[int]) -> list[Integers]:
    """Return the first bin and the fullest other bins, half of all bins, in their order."""
    tokens = [sum(lengths[i] for i in bin_) for bin_ in bins]
    fullest = sorted(range(1, len(bins)), key=lambda b: (-tokens[b], b))
    return [bins[b] for b in sorted([0, *fullest[: (len(bins) - 1) // 2]])]
