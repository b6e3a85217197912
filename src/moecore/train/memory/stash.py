"""Stash: used rows of routed experts in pages on the device, between forward and backward.

    stash = Stash(device, StashOptions(), num_layers)
    stash.attach(model.layers, part_of)

A stash is an `Offload` whose store is a `PageStore`. Where matrices of experts have worst-case
capacity, pages hold their used rows only. A part is a whole MoE layer, so the memory of its
matrices is free before the next layer dispatches:

    forward     MoE layer n ends       -> copies of its used rows to pages start
                MoE layer n + 1 begins -> the memory of layer n's matrices is freed
    backward    layer n has run        -> copies of layer n - 1's rows from pages start

A stash takes only matrices whose used rows the device counts (`saved.counting_rows`). Rows without
a page become NaN and are a shortage.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from moecore.base.options.memory import StashOptions
from moecore.moe.dispatch.exchange import ExchangeError
from moecore.moe.shortage import Holder, Shortage, this_rank
from moecore.train.memory.groups import StorageGroup
from moecore.train.memory.offload import Offload
from moecore.train.memory.page_store import PageStore


class Stash(Offload, Holder):
    """Stores used rows of a model's experts in pages; `num_layers` counts MoE layers."""

    option = "StashOptions.factor"
    _rows_alone = True

    def __init__(self, device: torch.device, options: StashOptions, num_layers: int) -> None:
        super().__init__(device, min_bytes=0)
        self._options, self._num_layers = options, num_layers
        self._store = self.pages = PageStore(self._streams, options, num_layers)
        # Groups of last layers, and whether they are of a captured CUDA graph. They stay on the
        # device unless the next forward begins before their backward, as with pipeline stages.
        self._resting: list[tuple[StorageGroup, bool]] = []

    def __reduce__(self) -> Any:
        return partial(Stash, self._streams.device, self._options, self._num_layers), ()

    def _keys_of(self, module: nn.Module) -> frozenset[int]:
        """Return no keys: the device counts rows of no weight."""
        return frozenset()

    def _send(self, group: StorageGroup) -> None:
        if group.layer.is_last:
            self._resting.append((group, self._streams.is_capturing()))
        super()._send(group)

    def _start_forward(self, share: float) -> None:
        super()._start_forward(share)
        with self._locked():
            in_capture, resting, self._resting = self._streams.is_capturing(), self._resting, []
            for group, of_graph in resting:
                if of_graph != in_capture:  # copies of eager groups are not captured
                    self._resting.append((group, of_graph))
                elif group.readers.alive and not group.is_asked:
                    self._put(group)
            self._resting = [entry for entry in self._resting if entry[0].readers.alive]

    @property
    def factor(self) -> float:
        """Device pages over the pages that even loads fill."""
        return self._options.factor

    @property
    def shortages(self) -> tuple[Shortage, ...]:
        """The shortage of the pool of pages; () before there is a pool."""
        shortage = self.pages.shortage
        return () if shortage is None else (shortage,)

    def resize(self, factor: float) -> None:
        """Free all pages, which hold no rows; later forwards make a pool with this factor."""
        self.wait()  # copies may read what is freed now
        self._options = replace(self._options, factor=factor)
        self.pages.resize(self._options)

    def error(self, shortage: Shortage) -> ExchangeError:
        """Return the error that names the factor."""
        least = math.ceil(shortage.factor_seen * 1000) / 1000
        return ExchangeError(
            f"{self.option} ({self.factor}) must be >= {least:g} for the {shortage.num_seen} pages "
            f"of rows that rank {this_rank()} keeps: raise it, or set host_bytes; results since "
            "then are not valid",
            stash_factor=least,
        )

    def wait(self) -> None:
        """Wait for the GPU, which writes the reports of shortages. Host sync."""
        if self._streams.device.type == "cuda":
            torch.cuda.synchronize(self._streams.device)
