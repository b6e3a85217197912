"""What a command of `moecore` raises when it was called wrongly."""

from __future__ import annotations


class UsageError(Exception):
    """What was asked for makes no sense; exit code 2."""
