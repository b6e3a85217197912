"""Shows the progress of operations that take longer than five seconds: a tqdm bar or text lines.

    with show_progress("loading weights", unit="B") as report:
        load(path, model, progress=report)
    for document in track_progress(documents, "tokenizing"):
        ...

Rank 0 shows progress on stderr. If stderr is not a terminal or tqdm is missing, it prints a line
every `INTERVAL_S` seconds. Operations that end before `DELAY_S` seconds show nothing.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

import torch.distributed as dist

from moecore.base.text import format_bytes

T = TypeVar("T")
DELAY_S, INTERVAL_S = 5.0, 10.0
Report = Callable[[int, int], None]  # (number done, total); total 0 = unknown


class ProgressLines:
    """Prints an operation's progress every `INTERVAL_S` seconds, first after `DELAY_S` seconds.

    Each line begins with `label`. `unit` is the unit of the numbers; "B" = bytes.
    """

    def __init__(self, label: str, unit: str) -> None:
        self._label, self._unit = label, unit
        self._start = self._next = 0.0
        self._count: int | None = None  # None = the operation has not begun

    def report(self, num_completed: int, total: int) -> None:
        """Print a line if the interval has passed; `total` 0 = an unknown number of items.

        If `num_completed` is smaller than in the last call, a new operation begins.
        """
        seconds = time.monotonic()
        if self._count is None or num_completed < self._count:
            self._start, self._next = seconds, seconds + DELAY_S
        self._count = num_completed
        if seconds < self._next:
            return
        self._next = seconds + INTERVAL_S
        numbers = self._format_number(num_completed)
        if total:
            numbers += f" of {self._format_number(total)} ({num_completed / total:.0%})"
        print_line(f"{self._label}: {numbers}, {seconds - self._start:.0f} s")

    def _format_number(self, number: int) -> str:
        if self._unit == "B":
            return format_bytes(number)
        return f"{number} {self._unit}".rstrip()


@contextmanager
def show_progress(label: str, *, unit: str = "", as_lines: bool = False) -> Iterator[Report]:
    """Return a context that shows progress and yields the function `report(number_done, total)`.

    Any thread can call `report`. `unit` is the unit of the numbers ("B" = bytes). `as_lines` prints
    text lines instead of a tqdm bar.
    """
    tqdm = None if as_lines or not sys.stderr.isatty() else _import_tqdm()
    is_initialized = dist.is_available() and dist.is_initialized()
    rank = str(dist.get_rank()) if is_initialized else os.environ.get("RANK", "0")
    if rank != "0":
        yield lambda count, total: None
    elif tqdm is None:
        yield ProgressLines(label, unit).report
    else:
        options: dict[str, Any] = {"unit": unit or "it", "unit_scale": unit == "B", "leave": False}
        with tqdm.tqdm(desc=label, delay=DELAY_S, **options) as bar:

            def report(count: int, total: int) -> None:
                bar.total = total or None
                bar.update(count - bar.n)

            yield report


def track_progress(
    items: Iterable[T], label: str, *, total: int = 0, unit: str = "", as_lines: bool = False
) -> Iterator[T]:
    """Yield the items and show how many are done (`show_progress`); `total` 0 = `len(items)`."""
    total = total or (len(items) if isinstance(items, Sized) else 0)
    with show_progress(label, unit=unit, as_lines=as_lines) as report:
        report(0, total)
        for number, item in enumerate(items, start=1):
            yield item
            report(number, total)


def print_line(line: str) -> None:
    """Print a line to stderr, above a tqdm bar if one exists."""
    if "tqdm" in sys.modules and sys.stderr.isatty():
        sys.modules["tqdm"].tqdm.write(f"moecore: {line}", file=sys.stderr)
    else:
        print(f"moecore: {line}", file=sys.stderr, flush=True)


def _import_tqdm() -> ModuleType | None:
    try:
        import tqdm
    except ImportError:
        return None
    tqdm.tqdm.set_lock(threading.RLock())  # tqdm's own lock is a semaphore that a killed rank leaks
    module: ModuleType = tqdm
    return module
