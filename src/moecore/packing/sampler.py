"""Which documents a data rank packs next: a pure function of lengths, seed, epoch and position.

An epoch shuffles the documents, packs each 4096 neighbours to bins, and shuffles the bins. A batch
of all data ranks takes the next `data_ranks * rows` bins; each rank has `rows` of them. So the
position is a number of bins, the same on every rank, and a run may go on with other ranks or rows.
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

WINDOW = 4096  # documents that are packed together: bins are full, and neighbours change by epoch


class PackedBatchSampler:
    """The `batch_sampler` of a DataLoader: yields the documents of this data rank's next batch.

    Each epoch has every document once over all data ranks. All ranks have equally many batches: in
    the last, some may have fewer bins than rows, or no document at all.

    Attributes:
        epoch: that the next iteration begins with, or goes on in.

    Args:
        lengths: tokens of each document, rounded up where the collator does (`padded_lengths`).
        bin_tokens: of a bin, the collator's `row_tokens`.
        rows: bins of a batch, the collator's `rows`.
        data_rank: this one; ranks with the same data share it.
        data_ranks: ranks with different data.
        seed: of all epochs.
        shuffle: False = documents in their order; bins by their first document.

    Raises:
        ValueError: for no documents, one longer than a bin, or a rank that is not one of the ranks.
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
        self._end_bin = 0  # bins up to which it has gone
        self._epoch_bins: tuple[int, Bins] | None = None

    def __len__(self) -> int:
        """Return how many batches the next iteration has."""
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
        """Begin the next iteration with another epoch; with the same one nothing changes."""
        check_arguments(PackedBatchSampler.set_epoch, locals())
        if epoch != self.epoch:
            self.epoch, self._first, self._iteration_start, self._end_bin = epoch, 0, (epoch, 0), 0

    def state_dict(self, batches: CountOrZero | None = None) -> dict[str, Any]:
        """Return the position, as JSON; the same on every rank.

        Args:
            batches: that this rank has trained on since its latest `iter`. None = all that were
                handed out, which is more when a DataLoader's workers fetch ahead.
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
        """Return what two samplers with the same bins have in common."""
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
        """Return the bins of an epoch, in the order in which they are taken."""
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
