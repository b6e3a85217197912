"""Ctrl-C ends a rank with exit code 130, without a traceback."""

from __future__ import annotations

import os
import signal


def exit_at_interrupt() -> None:
    """End this process at SIGINT from now on, unless it is ignored, as in a shell's background."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
