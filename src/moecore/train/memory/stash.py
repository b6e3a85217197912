"""Rows of routed experts in pages between forward and backward, where shapes are the worst case.

    stash = Stash(device, StashOptions(), num_layers)
    stash.attach(model.layers, part_of)

An `Offload` whose store are pages (`page_store.py`). Its parts are whole MoE layers, so that the
memory of one is free before the next dispatches:

    forward     MoE layer n ends       -> its used rows start to go to pages
                MoE layer n + 1 begins -> the memory of layer n's matrices is freed
    backward    layer n has run        -> rows of layer n - 1 start to come back

What it takes are matrices whose used rows the device counts (`saved.counting_rows`), and nothing
else. The last layer's stay where they are until the next forward begins, if that comes before their
backward, as between pipeline stages. Rows that found no page come back as NaN, and `poll` raises.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.options.memory import StashOptions
from moecore.moe.dispatch.exchange import ExchangeError
from moecore.moe.room import larger, warn_of_skipped
from moecore.train.memory.groups import Group
from moecore.train.memory.offload import Offload
from moecore.train.memory.page_store import PageStore


class Stash(Offload):
    """Keeps used rows of a model's experts in pages.

    Args:
        device: of the model.
        options: sizes.
        num_layers: MoE layers of a forward.

    Attributes:
        pages: where the rows are.
    """

    option = "StashOptions.factor"
    may_be_small = True
    _rows_alone = True

    def __init__(self, device: torch.device, options: StashOptions, num_layers: int) -> None:
        super().__init__(device, min_bytes=0)
        self._options, self._num_layers = options, num_layers
        self._store = self.pages = PageStore(self._streams, options, num_layers)
        # Of last layers, and whether a CUDA graph that was captured holds them.
        self._resting: list[tuple[Group, bool]] = []
        self._asks_later = False

    def __reduce__(self) -> Any:
        return partial(Stash, self._streams.device, self._options, self._num_layers), ()

    def _keys_of(self, module: nn.Module) -> frozenset[int]:
        """Return none: no weight has rows that the device counts."""
        return frozenset()

    def _send(self, group: Group) -> None:
        if group.layer.is_last:
            self._resting.append((group, self._streams.is_capturing()))
        super()._send(group)

    def _start_forward(self, share: float) -> None:
        super()._start_forward(share)
        with self._locked():
            in_capture, resting, self._resting = self._streams.is_capturing(), self._resting, []
            for group, of_graph in resting:
                if of_graph != in_capture:  # nothing of eager code may go into a graph
                    self._resting.append((group, of_graph))
                elif group.readers.alive and not group.is_asked:
                    self._put(group)
            self._resting = [entry for entry in self._resting if entry[0].readers.alive]

    @property
    def factor(self) -> float:
        """Device pages over those that even loads fill."""
        return self._options.factor

    @property
    def is_short(self) -> bool:
        """Whether rows found no page, as far as the host can see."""
        return self.pages.is_short

    @contextmanager
    def asked_later(self) -> Iterator[None]:
        """Within, missing pages are no error: `needed_factor` has them."""
        self._asks_later = True
        try:
            yield
        finally:
            self._asks_later = False

    def needed_factor(self) -> Tensor:
        """Return the least factor that had held all rows; 0 = they fit. No host sync."""
        return self.pages.needed_factor()

    def grow(self, factor: float | None) -> None:
        """Give later forwards more pages, None = as many, and clear what was needed.

        Args:
            factor: when no rows lie in pages.
        """
        if factor is None:
            self.pages.clear_needed()
            return
        self._options = replace(self._options, factor=factor)
        self.pages.resize(self._options)

    def settle(self) -> None:
        """Give later forwards the pages that earlier ones needed, as far as the host can see.

        Waits for the device where there were too few. When no rows lie in pages.
        """
        shortage = self.pages.shortage()
        now = 0.0 if shortage is None else larger(shortage.factor)
        if now > self.factor:  # else a step that ran before they grew
            warn_of_skipped(self.option, self.factor, now)
            if self._streams.device.type == "cuda":
                torch.cuda.synchronize(self._streams.device)  # copies may read what is freed now
            self.grow(now)

    def clear_state(self) -> None:
        """Let the rows of the next step be counted anew on the device. No host sync."""
        self.pages.clear_needed(report=False)

    def poll(self) -> None:
        """Raise what has gone wrong so far, as far as the host can see without waiting; once.

        Raises:
            ExchangeError: when pages were missing. Results since then are not valid.
        """
        shortage = None if self._asks_later else self.pages.shortage()
        if shortage is not None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            least = math.ceil(shortage.factor * 1000) / 1000
            raise ExchangeError(
                f"StashOptions.factor ({self._options.factor}) must be >= {least:g} for the "
                f"{shortage.num_pages} pages of rows that rank {rank} keeps: raise it, or set "
                "host_bytes; results since then are not valid",
                stash_factor=least,
            )

    def check(self) -> None:
        """Raise what has gone wrong so far. One host sync.

        Raises:
            ExchangeError: see `poll`.
        """
        if self._streams.device.type == "cuda":
            torch.cuda.synchronize(self._streams.device)  # reports are written by the device
        self.poll()
