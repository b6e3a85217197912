"""`pack_lengths` packs documents into bins of a fixed size; `PackedBatchSampler` yields their ids.

Legend: N documents, b bins.

First-fit decreasing puts each document, longest first, into the first bin that has the capacity.
Each node of a tree over the bins has the largest remaining capacity of its bins, so a search takes
log2(b) steps. Documents of one length fill the bin of a search before the next search.

Example, lengths 3 6 4 2 5 in bins of 8: 6 opens bin 0, 5 opens bin 1, 4 opens bin 2, 3 fits bin 1,
and 2 fits bin 0, so the bins are [1, 3], [0, 4] and [2].

Source: Johnson, Near-optimal bin packing algorithms (1973): at most 11/9 of the fewest bins + 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import torch

from moecore.base.fields import Count, CountOrZero, Seed, check_arguments, quote
from moecore.packing.documents import (
    Document,
    Integers,
    Lengths,
    as_lengths,
    check_max_length,
    count_document_tokens,
    cut_document,
    hash_values,
)

TooLong = Literal["raise", "cut"]


@dataclass(frozen=True, slots=True)
class Bins:
    """Documents packed into bins: `bins[i]` is an int64 array, the document indices of bin i."""

    documents: Integers  # int64 [N], the document indices of bin 0, then of bin 1, and so on
    offsets: Integers  # int64 [b + 1]; bin i is `documents[offsets[i] : offsets[i + 1]]`

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

    Document indices ascend within a bin. Deterministic; a million documents take seconds. Raises a
    ValueError if a document is longer than a bin.
    """
    check_arguments(pack_lengths, locals())
    lengths_N = as_lengths(lengths)
    check_max_length(lengths_N, bin_tokens)
    by_length = np.argsort(-lengths_N, kind="stable")
    values, counts = np.unique(-lengths_N, return_counts=True)
    # First fit opens a bin only for a document that fits no earlier bin, so at most one bin is half
    # full or less.
    max_bins = min(len(lengths_N), 2 * int(lengths_N.sum()) // bin_tokens + 1)
    opened = _BinCapacities(bin_tokens, max_bins=max_bins)
    bins: list[int] = []
    numbers: list[int] = []
    for length, count in zip((-values).tolist(), counts.tolist(), strict=True):
        while count:
            index, capacity = opened.find_first_bin(length)
            number = min(count, capacity // length)
            opened.set_capacity(index, capacity - number * length)
            bins.append(index)
            numbers.append(number)
            count -= number
    bin_of = np.empty(len(lengths_N), np.int64)
    bin_of[by_length] = np.repeat(np.array(bins, np.int64), numbers)
    sizes = np.bincount(bin_of) if bins else np.zeros(0, np.int64)
    return Bins(np.argsort(bin_of, kind="stable"), np.concatenate([[0], np.cumsum(sizes)]))


class _BinCapacities:
    """A tree of the remaining capacities of at most `max_bins` bins, in tokens."""

    def __init__(self, bin_tokens: int, max_bins: int) -> None:
        self._leaves = 1 << max(max_bins, 1).bit_length()
        self._largest = [bin_tokens] * (2 * self._leaves)  # of a node; children 2i and 2i + 1

    def find_first_bin(self, min_tokens: int) -> tuple[int, int]:
        """Return the first bin whose remaining capacity is >= `min_tokens`: (index, capacity)."""
        largest, node = self._largest, 1
        while node < self._leaves:
            node *= 2
            if largest[node] < min_tokens:
                node += 1
        return node - self._leaves, largest[node]

    def set_capacity(self, bin_idx: int, capacity: int) -> None:
        """Set the remaining capacity of bin `bin_idx`, in tokens."""
        largest, node = self._largest, bin_idx + self._leaves
        largest[node] = capacity
        while node > 1:
            node //= 2
            left_largest, right_largest = largest[2 * node], largest[2 * node + 1]
            capacity = left_largest if left_largest > right_largest else right_largest
            if largest[node] == capacity:
                return
            largest[node] = capacity


def pack_documents(
    documents: Iterable[Document],
    bin_tokens: Count,
    *,
    window: Count = 4096,
    too_long: TooLong = "raise",
) -> Iterator[list[Document]]:
    """Yield lists of documents of at most `bin_tokens` tokens each, from a possibly endless stream.

    The function packs a buffer of `window` documents into bins, yields the fullest half of the bins
    and the bin of the oldest document, and refills the buffer. Deterministic.

    Args:
        documents: each is 1-D token ids, or a dict with `input_ids` (and labels or masks).
        bin_tokens: the largest number of tokens in a bin.
        window: size of the buffer in documents. A larger buffer leaves less padding.
        too_long: for a document of more than `bin_tokens` tokens: "raise" an error, or "cut" the
            document into pieces that are separate documents.

    Raises:
        ValueError: for a document that is empty, of another type or, with "raise", too long.
    """
    check_arguments(pack_documents, locals())
    return _pack_windows(_cut_long_documents(documents, bin_tokens, too_long), bin_tokens, window)


def _cut_long_documents(
    documents: Iterable[Document], bin_tokens: int, too_long: TooLong
) -> Iterator[tuple[Document, int]]:
    """Yield (document, length), or with "cut" (piece, length) of at most `bin_tokens` tokens."""
    for number, document in enumerate(documents):
        length = count_document_tokens(document)
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


def _pack_windows(
    pieces: Iterator[tuple[Document, int]], bin_tokens: int, window_documents: int
) -> Iterator[list[Document]]:
    """Yield the documents of bins; a full window yields the first bin and the fullest half."""
    window_pieces = list(islice(pieces, window_documents))
    while window_pieces:
        lengths = [length for _, length in window_pieces]
        # The first bin has the document that waits longest.
        bins = sorted(pack_lengths(lengths, bin_tokens), key=itemgetter(0))
        if len(window_pieces) == window_documents:
            tokens = [sum(lengths[i] for i in bin_) for bin_ in bins]
            fullest = sorted(range(1, len(bins)), key=lambda b: (-tokens[b], b))
            bins = [bins[b] for b in sorted([0, *fullest[: (len(bins) - 1) // 2]])]
        for bin_ in bins:
            yield [window_pieces[i][0] for i in bin_]
        indices = {int(i) for bin_ in bins for i in bin_}
        window_pieces = [piece for i, piece in enumerate(window_pieces) if i not in indices]
        window_pieces.extend(islice(pieces, window_documents - len(window_pieces)))


WINDOW = 4096  # documents that are packed together, enough to fill the bins


class PackedBatchSampler:
    """A `batch_sampler` for DataLoader that yields the document indices of this rank's batches.

    In an epoch, each document is in one batch of one data rank. All data ranks have the same number
    of batches. In the last batch, a rank may have fewer bins than `rows`, or no document.

    Attributes:
        epoch: the epoch of the running iteration; between iterations, of the next.

    Args:
        lengths: tokens of each document. Use `padded_lengths` if the collator pads documents.
        bin_tokens: the largest number of tokens of a bin, equal to the collator's `row_tokens`.
        rows: bins of a batch, equal to the collator's `rows`.
        data_rank: this rank's index, `meshes.data_rank`.
        data_ranks: number of ranks with different batches, `meshes.data_ranks`.
        seed: seed of the shuffles of all epochs.
        shuffle: False = documents keep their order, and bins are ordered by their first document.

    Raises:
        ValueError: if `lengths` is empty, a document exceeds a bin, or `data_rank` >= `data_ranks`.
    """

    def __init__(
        self,
        lengths: Lengths,
        bin_tokens: Count,
        *,
        rows: Count = 1,
        data_rank: CountOrZero = 0,
        data_ranks: Count = 1,
        seed: Seed = 0,
        shuffle: bool = True,
    ) -> None:
        check_arguments(PackedBatchSampler.__init__, locals())
        self._lengths = as_lengths(lengths)
        if not self._lengths.size:
            raise ValueError("lengths ([]) must have at least one document: pass some")
        check_max_length(self._lengths, bin_tokens)
        if data_rank >= data_ranks:
            raise ValueError(
                f"data_rank ({data_rank}) must be < data_ranks ({data_ranks}): count from 0"
            )
        self._bin_tokens, self._rows = bin_tokens, rows
        self._data_rank, self._data_ranks = data_rank, data_ranks
        self._seed, self._shuffle = seed, shuffle
        self.epoch = 0
        self._first = 0  # bin with which the next iteration begins
        self._iteration_start = (0, 0)  # epoch and first bin of the latest iteration
        self._end_bin = 0  # end of the latest global batch, in bins
        self._epoch_bins: tuple[int, Bins] | None = None

    def __len__(self) -> int:
        """Return the number of batches in the next iteration."""
        return -(-(len(self._get_bins(self.epoch)) - self._first) // self._batch_bins)

    def __iter__(self) -> Iterator[list[int]]:
        bins = self._get_bins(self.epoch)
        self._iteration_start = (self.epoch, self._first)
        rank_offset = self._data_rank * self._rows
        for first in range(self._first, len(bins), self._batch_bins):
            self._end_bin = first + self._batch_bins
            bin_ids = range(first + rank_offset, min(first + rank_offset + self._rows, len(bins)))
            yield [int(document) for index in bin_ids for document in bins[index]]
        self.epoch, self._first = self.epoch + 1, 0

    def set_epoch(self, epoch: CountOrZero) -> None:
        """Start the next iteration at the beginning of `epoch`, unless it is the current epoch."""
        check_arguments(PackedBatchSampler.set_epoch, locals())
        if epoch != self.epoch:
            self.epoch, self._first, self._iteration_start, self._end_bin = epoch, 0, (epoch, 0), 0

    def state_dict(self, batches: CountOrZero | None = None) -> dict[str, Any]:
        """Return the position as a dict of JSON values, identical on every rank.

        Entries are "epoch", "bins" (trained bins of the epoch, of all ranks) and the settings that
        decide the bins. Not collective.

        Args:
            batches: number of batches that this rank has trained on since its latest `iter`. None =
                all yielded batches, which are too many if a DataLoader's workers prefetch.
        """
        check_arguments(PackedBatchSampler.state_dict, locals())
        epoch, first = self._iteration_start
        bins = self._end_bin if batches is None else first + batches * self._batch_bins
        if bins >= len(self._get_bins(epoch)):
            epoch, bins = epoch + 1, 0
        return {"epoch": epoch, "bins": bins} | self._collect_settings()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a sampler with the same documents, bins and seed.

        `data_ranks` and `rows` may differ: bins do not change, but batches consist of other bins.

        Raises:
            ValueError: if the state has other documents, bins or seeds, or is no `state_dict()`.
        """
        check_arguments(PackedBatchSampler.load_state_dict, locals())
        for name, value in {"epoch": None, "bins": None, **self._collect_settings()}.items():
            if name not in state:
                raise ValueError(f"state ({quote(state)}) must have {name!r}: pass a state_dict()")
            relation = None
            if value is None and (type(state[name]) is not int or state[name] < 0):
                relation = "a whole number >= 0: pass a state_dict()"
            if value is not None and state[name] != value:
                relation = f"that of this sampler ({value!r}): make it as it was"
            if relation is not None:
                raise ValueError(f"state[{name!r}] ({quote(state[name])}) must be {relation}")
        self.epoch, self._first = state["epoch"], state["bins"]
        self._iteration_start, self._end_bin = (self.epoch, self._first), self._first

    @property
    def _batch_bins(self) -> int:
        """Number of bins in one batch of all data ranks."""
        return self._rows * self._data_ranks

    def _collect_settings(self) -> dict[str, Any]:
        """Return the arguments that decide the bins, by name, with a hash of the lengths."""
        digest = hashlib.sha256(self._lengths.tobytes()).hexdigest()[:12]
        settings = {"seed": self._seed, "shuffle": self._shuffle, "bin_tokens": self._bin_tokens}
        return settings | {"documents": digest}

    def _get_bins(self, epoch: int) -> Bins:
        """Return the bins of an epoch in the order of their use; the first call packs them."""
        if self._epoch_bins is not None and self._epoch_bins[0] == epoch:
            return self._epoch_bins[1]
        count = len(self._lengths)
        order = self._shuffle_indices("documents", epoch, count)
        bins: list[Integers] = []
        for first in range(0, count, WINDOW):
            ids = order[first : first + WINDOW]
            window_bins = pack_lengths(self._lengths[ids], self._bin_tokens)
            bins.extend(ids[numbers] for numbers in sorted(window_bins, key=itemgetter(0)))
        bins = [bins[i] for i in self._shuffle_indices("bins", epoch, len(bins))]
        epoch_bins = Bins(np.concatenate(bins), np.cumsum([0, *map(len, bins)]))
        self._epoch_bins = (epoch, epoch_bins)
        return epoch_bins

    def _shuffle_indices(self, purpose: str, epoch: int, num_indices: int) -> Integers:
        """Return int64 0 .. num_indices - 1, shuffled if `shuffle` is set."""
        if not self._shuffle:
            return np.arange(num_indices)
        generator = torch.Generator().manual_seed(hash_values(self._seed, purpose, epoch) >> 1)
        return torch.randperm(num_indices, generator=generator, device="cpu").numpy()
