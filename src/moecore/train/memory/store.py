"""Where what a part has saved lies while it is not in its own memory on the device.

`offload.py` decides when a storage leaves and when it comes back, and a store where it lies:
pinned host memory here.
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
        """Whether a storage that is being saved may go there, by its rows in use; None = all."""
        ...

    def put(self, copies: Sequence[HostCopy]) -> list[HostCopy]:
        """Start to copy out what finds room; return those, with `piece`, `out` and `busy` set."""
        ...

    def bring(self, copies: Sequence[HostCopy], gone: Sequence[Any] = ()) -> None:
        """Start to fill the `data` of copies, which is as large as the storage was; sets `busy`.

        Args:
            copies: of one group.
            gone: pieces to take back, as `give` does.
        """
        ...

    def give(self, pieces: Sequence[Any]) -> None:
        """Take the pieces of copies back, which nobody asks for any more."""
        ...

    def clear(self) -> None:
        """Free all memory, which no launched work uses any more."""
        ...


class HostStore:
    """Copies in pinned host memory."""

    def __init__(self, streams: CopyStreams, pool: HostPool) -> None:
        self._streams, self._pool = streams, pool
        self._is_full = False  # which is logged once

    def takes(self, used: UsedRows | None) -> bool:
        """Whatever it is."""
        return True

    def put(self, copies: Sequence[HostCopy]) -> list[HostCopy]:
        """Start to copy out what finds room."""
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
        """Start to copy storages back; each is waited for alone, since the host's link is slow."""
        self.give(gone)
        for copy in copies:
            assert copy.data is not None and copy.out is not None
            transfer = Transfer(copy.data, _host_memory(copy), _counted(copy))
            copy.busy = self._streams.copy_back([transfer], copy.out)

    def give(self, pieces: Sequence[HostPiece]) -> None:
        """Take host memory back. Whoever gets it next copies after its last reader."""
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
    """Return how many first rows of how many bytes travel; None = all bytes do."""
    used = copy.used
    if used is None or used.num_rows is None:
        return None
    return used.num_rows, copy.size // used.length


def _host_memory(copy: HostCopy) -> Tensor:
    """Return the host memory of a copy, without what the size class adds."""
    memory: Tensor = copy.piece.memory
    return memory[: copy.size]
