"""Signals that end a rank: at once, or after the step and a checkpoint while it trains."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def exit_at_interrupt() -> None:
    """End this process at SIGINT from now on, unless it is ignored, as in a shell's background."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))


class StopRequest:
    """Notes SIGINT and SIGTERM, so that the rank stops between steps; a second SIGINT exits.

    Attributes:
        number: of the first signal; 0 = none has come.
    """

    def __init__(self) -> None:
        self.number = 0

    def note(self, number: int, _: FrameType | None = None) -> None:
        """Handle a signal."""
        if self.number and number == signal.SIGINT:
            os._exit(128 + number)
        self.number = self.number or number


@contextmanager
def noting_signals() -> Iterator[StopRequest]:
    """Within, SIGINT and SIGTERM are noted; only the main thread gets signals."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a background job
        numbers.remove(signal.SIGINT)
    before = {number: signal.signal(number, request.note) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
