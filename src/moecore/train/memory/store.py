"""Stores: the memory in which copies of saved storages lie until backward.

`offload.py` decides when a storage is copied out and back; a `Store` decides where its copy lies.
`HostStore` has pinned host memory; `PageStore` (`page_store.py`) has pages on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from moecore.base.saved import UsedRows
from moecore.train.memory.groups import HostCopy
from moecore.train.memory.host import HostPiece, HostPool
from moecore.train.memory.streams import CopyStreams, Transfer

logger = logging.getLogger("moecore.train.memory")


class Store(Protocol):
    """Holds copies of storages. Called by one thread at a time; no call waits for the device."""

    def takes(self, used: UsedRows | None) -> bool:
        """Return whether a storage with these rows in use (None = all) may be copied here."""
        ...

    def put(self, copies: Sequence[HostCopy]) -> list[HostCopy]:
        """Start to copy out the storages that fit, set `piece`, `out` and `busy`; return them."""
        ...

    def bring(self, copies: Sequence[HostCopy], gone: Sequence[Any] = ()) -> None:
        """Start to copy back to `data`, which has the storage's size; sets `busy`.

        Args:
            copies: the copies of one group.
            gone: pieces that are freed on the way, as `give` frees them.
        """
        ...

    def give(self, pieces: Sequence[Any]) -> None:
        """Free the pieces of copies that no handle needs any more."""
        ...

    def clear(self) -> None:
        """Free all memory; no launched work uses it any more."""
        ...


class HostStore:
    """Copies in pinned host memory."""

    def __init__(self, streams: CopyStreams, pool: HostPool) -> None:
        self._streams, self._pool = streams, pool
        self._is_full = False  # logged once

    def takes(self, used: UsedRows | None) -> bool:
        """Return True: host memory takes any storage."""
        return True

    def put(self, copies: Sequence[HostCopy]) -> list[HostCopy]:
        """Start to copy out the storages for which there is host memory."""
        for copy in copies:
            copy.piece = self._piece(copy.size)
        going = [copy for copy in copies if copy.piece is not None]
        if going:
            mark = self._streams.copy_out(
                Transfer(_host_memory(copy), copy.data, _counted(copy))
                for copy in going
                if copy.data is not None
            )
            for copy in going:
                copy.out = copy.busy = mark
        return going

    def bring(self, copies: Sequence[HostCopy], gone: Sequence[HostPiece] = ()) -> None:
        """Start to copy storages back."""
        self.give(gone)
        # Each storage has a mark of its own: the host's link is slow, and backward waits for the
        # storage that it reads, not for the whole group.
        for copy in copies:
            assert copy.data is not None and copy.out is not None
            transfer = Transfer(copy.data, _host_memory(copy), _counted(copy))
            copy.busy = self._streams.copy_back([transfer], copy.out)

    def give(self, pieces: Sequence[HostPiece]) -> None:
        """Free host memory. The next copy into it comes after its last reader."""
        for piece in pieces:
            self._pool.give(piece)

    def clear(self) -> None:
        """Free host memory."""
        self._pool.clear()

    def _piece(self, size: int) -> HostPiece | None:
        piece = self._pool.take(size, in_capture=self._streams.is_capturing())
        if piece is None and not self._is_full:
            self._is_full = True
            logger.warning(
                "offload: host memory (%d bytes) is full: what goes beyond stays on the device",
                self._pool.num_bytes,
            )
        return piece


def _counted(copy: HostCopy) -> tuple[Tensor, int] | None:
    """Return how many first rows are copied, and the bytes of a row; None = all bytes."""
    used = copy.used
    if used is None or used.num_rows is None:
        return None
    return used.num_rows, copy.size // used.length


def _host_memory(copy: HostCopy) -> Tensor:
    """Return the host memory of a copy, without the bytes that its size class adds."""
    memory: Tensor = copy.piece.memory
    return memory[: copy.size]
