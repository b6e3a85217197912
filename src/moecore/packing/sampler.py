"""PackedBatchSampler: batches of documents, a pure function of lengths, seed, epoch and position.

An epoch shuffles the documents, packs every 4096 consecutive documents into bins, and shuffles the
bins. A global batch is the next `data_ranks * rows` bins, `rows` bins per data rank. The position
is a number of bins, equal on every rank. So a resumed run may have other numbers of ranks or rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from moecore.base.fields import Count, CountOrZero, Seed, check_arguments, quote
from moecore.packing.bins import Bins, pack_lengths
from moecore.packing.corpus.order import key_of
from moecore.packing.documents import Integers, Lengths, as_lengths, check_fits

WINDOW = 4096  # documents that are packed together, enough to fill the bins


class PackedBatchSampler:
    """A `batch_sampler` for DataLoader that yields the document indices of this rank's batches.

    In an epoch, each document is in one batch of one data rank. All data ranks have the same number
    of batches. In the last batch, a rank may have fewer bins than `rows`, or no document.

    Attributes:
        epoch: the epoch of the current iteration, or of the next.

    Args:
        lengths: tokens of each document. Use `padded_lengths` if the collator pads documents.
        bin_tokens: the largest number of tokens of a bin, equal to the collator's `row_tokens`.
        rows: bins of a batch, equal to the collator's `rows`.
        data_rank: this rank's index, `meshes.data_rank`.
        data_ranks: number of ranks with different batches, `meshes.data_ranks`.
        seed: seed of the shuffles in all epochs.
        shuffle: False = documents keep their order, and bins are ordered by their first document.

    Raises:
        ValueError: if there is no document, a document is longer than a bin, or `data_rank` is not
            less than `data_ranks`.
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
        check_fits(self._lengths, bin_tokens)
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
        return -(-(len(self._bins(self.epoch)) - self._first) // self._step)

    def __iter__(self) -> Iterator[list[int]]:
        bins = self._bins(self.epoch)
        self._iteration_start = (self.epoch, self._first)
        rank_offset = self._data_rank * self._rows
        for first in range(self._first, len(bins), self._step):
            self._end_bin = first + self._step
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

        Args:
            batches: number of batches that this rank has trained on since its latest `iter`. None =
                all yielded batches, which are too many if a DataLoader's workers prefetch.
        """
        check_arguments(PackedBatchSampler.state_dict, locals())
        epoch, first = self._iteration_start
        bins = self._end_bin if batches is None else first + batches * self._step
        if bins >= len(self._bins(epoch)):
            epoch, bins = epoch + 1, 0
        return {"epoch": epoch, "bins": bins} | self._facts()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a sampler of the same documents, bins and seed was.

        Its ranks and rows may have been others: then batches are cut anew, bins are the same.

        Raises:
            ValueError: for the state of other documents, bins or seeds, or no state.
        """
        check_arguments(PackedBatchSampler.load_state_dict, locals())
        for name, value in {"epoch": None, "bins": None, **self._facts()}.items():
            if name not in state:
                raise ValueError(f"state ({quote(state)}) must have {name!r}: pass a state_dict()")
            if value is None and (type(state[name]) is not int or state[name] < 0):
                raise ValueError(
                    f"state[{name!r}] ({quote(state[name])}) must be a whole number >= 0: pass a "
                    "state_dict()"
                )
            if value is not None and state[name] != value:
                raise ValueError(
                    f"state[{name!r}] ({quote(state[name])}) must be that of this sampler "
                    f"({value!r}): make it as it was"
                )
        self.epoch, self._first = state["epoch"], state["bins"]
        self._iteration_start, self._end_bin = (self.epoch, self._first), self._first

    @property
    def _step(self) -> int:
        return self._rows * self._data_ranks

    def _facts(self) -> dict[str, Any]:
        """Return the values that a sampler must share with a state to have the same bins."""
        digest = hashlib.sha256(self._lengths.tobytes()).hexdigest()[:12]
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "bin_tokens": self._bin_tokens,
            "documents": digest,
        }

    def _bins(self, epoch: int) -> Bins:
        if self._epoch_bins is None or self._epoch_bins[0] != epoch:
            self._epoch_bins = (epoch, self._pack(epoch))
        return self._epoch_bins[1]

    def _pack(self, epoch: int) -> Bins:
        """Return the bins of an epoch, in the order of the batches."""
        count = len(self._lengths)
        order = self._order("documents", epoch, count)
        bins: list[Integers] = []
        for first in range(0, count, WINDOW):
            ids = order[first : first + WINDOW]
            window_bins = pack_lengths(self._lengths[ids], self._bin_tokens)
            bins.extend(
                ids[numbers] for numbers in sorted(window_bins, key=lambda bin_: int(bin_[0]))
            )
        bins = [bins[i] for i in self._order("bins", epoch, len(bins))]
        return Bins(np.concatenate(bins), np.cumsum([0, *map(len, bins)]))

    def _order(self, label: str, epoch: int, count: int) -> Integers:
        if not self._shuffle:
            return np.arange(count)
        generator = torch.Generator().manual_seed(key_of(self._seed, label, epoch) >> 1)
        return torch.randperm(count, generator=generator).numpy()
