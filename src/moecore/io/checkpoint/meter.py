"""How many bytes have moved on this rank, how fast, and who wants to know."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Lock

from moecore.io.checkpoint.ranks import is_first_rank

Progress = Callable[[int, int], None]

logger = logging.getLogger("moecore.io")


class Meter:
    """Counts bytes from any thread, which calls `progress` with (done, expected so far)."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress, self._lock = progress, Lock()
        self._start = time.perf_counter()
        self.moved_bytes = self.total = 0

    def expect(self, num_bytes: int) -> None:
        """Announce bytes to come."""
        with self._lock:
            self.total += num_bytes

    def add(self, num_bytes: int) -> None:
        """Count bytes that have moved."""
        with self._lock:
            self.moved_bytes += num_bytes
            if self._progress:
                self._progress(self.moved_bytes, self.total)

    def log(self, message: str) -> None:
        """Log one line on rank 0: bytes of this rank, seconds, GB/s."""
        if not is_first_rank():
            return
        seconds, size = time.perf_counter() - self._start, self.moved_bytes / 1e9
        text = "%s: %.3f GB of rank 0 in %.2f s, %.2f GB/s"
        logger.info(text, message, size, seconds, size / seconds)
