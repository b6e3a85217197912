"""Progress of operations that take longer than five seconds: a bar of tqdm, or plain lines.

    with show_progress("loading weights", unit="B") as report:
        load(path, model, progress=report)
    for document in track(documents, "tokenizing"):
        ...

Rank 0 shows it on stderr, so that stdout keeps the results. Where stderr is no terminal, or tqdm is
missing, a line is printed every `INTERVAL_S` seconds. Operations that end before `DELAY_S` show
nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

import torch.distributed as dist

from moecore.base.tables import shown_bytes

T = TypeVar("T")
DELAY_S, INTERVAL_S = 5.0, 10.0
Report = Callable[[int, int], None]  # gets what is done, and the total; total 0 = it is not known


class ProgressLines:
    """Prints a line about an operation every `INTERVAL_S` seconds, first after `DELAY_S`."""

    def __init__(self, label: str, unit: str) -> None:
        self._label, self._unit = label, unit
        self._start = self._next = 0.0
        self._count: int | None = None  # None = the operation has not begun

    def report(self, count: int, total: int) -> None:
        """Print a line if one is due. A number that falls is the next operation's."""
        seconds = time.monotonic()
        if self._count is None or count < self._count:
            self._start, self._next = seconds, seconds + DELAY_S
        self._count = count
        if seconds < self._next:
            return
        self._next = seconds + INTERVAL_S
        numbers = self._text(count)
        if total:
            numbers += f" of {self._text(total)} ({count / total:.0%})"
        print_line(f"{self._label}: {numbers}, {seconds - self._start:.0f} s")

    def _text(self, number: int) -> str:
        if self._unit == "B":
            return shown_bytes(number)
        return f"{number} {self._unit}".rstrip()


@contextmanager
def show_progress(label: str, *, unit: str = "", lines: bool = False) -> Iterator[Report]:
    """Give a function to call with what is done and the total; it may be called from any thread.

    Args:
        label: the operation.
        unit: of the numbers; "B" = bytes.
        lines: print lines also on a terminal, where another bar may be.
    """
    tqdm = None if lines or not sys.stderr.isatty() else import_tqdm()
    if not is_shown():
        yield _ignore
    elif tqdm is None:
        yield ProgressLines(label, unit).report
    else:
        is_bytes = unit == "B"
        options: dict[str, Any] = {"unit": unit or "it", "unit_scale": is_bytes, "leave": False}
        with tqdm.tqdm(desc=label, delay=DELAY_S, **options) as bar:

            def report(count: int, total: int) -> None:
                bar.total = total or None
                bar.update(count - bar.n)

            yield report


def track(
    items: Iterable[T], label: str, *, total: int = 0, unit: str = "", lines: bool = False
) -> Iterator[T]:
    """Yield the items of an operation, whose progress is their number; total 0 = their length."""
    total = total or (len(items) if isinstance(items, Sized) else 0)
    with show_progress(label, unit=unit, lines=lines) as report:
        report(0, total)
        for number, item in enumerate(items, start=1):
            yield item
            report(number, total)


def is_shown() -> bool:
    """Return whether this process shows progress: rank 0 does."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def print_line(line: str) -> None:
    """Print a line to stderr, above a bar of tqdm that may be there."""
    if "tqdm" in sys.modules and sys.stderr.isatty():
        sys.modules["tqdm"].tqdm.write(f"moecore: {line}", file=sys.stderr)
    else:
        print(f"moecore: {line}", file=sys.stderr, flush=True)


def import_tqdm() -> ModuleType | None:
    """Return tqdm with a lock of threads, or None where it is missing."""
    try:
        import tqdm
    except ImportError:
        return None
    tqdm.tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a rank would leave
    module: ModuleType = tqdm
    return module


def _ignore(count: int, total: int) -> None:
    pass
