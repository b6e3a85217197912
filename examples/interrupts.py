"""Ends this process at Ctrl-C with code 130, instead of a traceback from the middle of an import.

A script imports this module first, because torch takes seconds to import. Ranks keep the handler.
The process that waits for ranks replaces it while it waits: see `launch`.
"""

from __future__ import annotations

import os
import signal

# A shell starts background jobs with SIGINT ignored, and that stays so.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
