"""Runs the command line of moecore for `python -m moecore`."""

import os
import signal
import sys

before = signal.getsignal(signal.SIGINT)
if before is signal.default_int_handler:  # Ctrl-C while the command line itself is imported
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
try:
    from moecore.cli import main
finally:
    signal.signal(signal.SIGINT, before)

if __name__ == "__main__":
    sys.exit(main())
