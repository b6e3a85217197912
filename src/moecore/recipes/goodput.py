"""Goodput: the share of a run's wall time that is spent in steps, over all starts of the run.

RUN_DIR/wall_time.json has the seconds by category:

    steps        optimizer steps whose updates the weights have
    lost steps   steps after the checkpoint from which a start continued; they run again as "steps"
    start        from the start of the process to the first step, without "load"
    load         reads of the checkpoint from which a start continued
    evaluate, sample, save    between steps; a save in the background takes only its first part
    down         from the last entry of one start to the process of the next

On GPUs, a step and the host's work after it may overlap. The sum of the categories then exceeds the
wall time, by at most one step for each evaluation or save.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from moecore.recipes.files import replace_lines

WALL_TIME = "wall_time.json"
MAX_BYTES = 1 << 16
SAVE_S = 5.0  # between writes of the file
STEPS, LOST_STEPS, START, LOAD, DOWN = "steps", "lost steps", "start", "load", "down"


class WallTime:
    """A file of a run's wall time: seconds by category since `began`, a Unix time in seconds."""

    def __init__(self, path: Path, *, lost_seconds: float = 0.0, load_seconds: float = 0.0) -> None:
        """Continue the file at `path`, if any.

        `lost_seconds` of "steps" become "lost steps", and `load_seconds` of "start" become "load".
        """
        process_start, start_end = find_process_start(), time.time()
        self.path, self._next_save = path, 0.0
        self.began, ended, self.seconds = process_start, process_start, dict[str, float]()
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # no valid file
            if path.stat().st_size <= MAX_BYTES:
                content = json.loads(path.read_bytes())
                seconds = {str(use): float(value) for use, value in content["seconds"].items()}
                began, ended = float(content["began"]), float(content["ended"])
                self.began, self.seconds = began, seconds
        self.add(DOWN, max(0.0, process_start - ended))
        self.add(START, max(0.0, start_end - max(process_start, ended) - load_seconds))
        self.add(LOAD, load_seconds)
        lost_seconds = min(lost_seconds, self.seconds.get(STEPS, 0.0))
        self.add(STEPS, -lost_seconds)
        self.add(LOST_STEPS, lost_seconds)

    def add(self, category: str, seconds: float) -> None:
        """Add seconds to a category such as "steps" or "save"."""
        self.seconds[category] = self.seconds.get(category, 0.0) + seconds

    @contextmanager
    def measure(self, category: str) -> Iterator[None]:
        """Return a context whose duration is added to a category."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(category, time.perf_counter() - begin)

    def compute_goodput(self) -> float:
        """Return the fraction of the wall time since `began` that steps have used, at most 1."""
        total = max(time.time() - self.began, 1e-9)
        return min(1.0, self.seconds.get(STEPS, 0.0) / total)

    def save(self, *, is_forced: bool = True) -> None:
        """Write the file; if `is_forced` is False, at most once in five seconds."""
        if not is_forced and time.monotonic() < self._next_save:
            return
        self._next_save = time.monotonic() + SAVE_S
        content = {"began": self.began, "ended": time.time(), "seconds": self.seconds}
        replace_lines(self.path, [json.dumps(content)])

    def format(self) -> str:
        """Return goodput, wall time and the seconds of each category as one line of text."""
        total = time.time() - self.began
        other = max(0.0, total - sum(self.seconds.values()))
        categories = sorted((self.seconds | {"other": other}).items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {value:,.1f} s" for name, value in categories if value >= 0.05)
        return f"goodput {self.compute_goodput():.1%} of {total:,.0f} s: {parts}"


@cache
def find_process_start() -> float:
    """Return this process's start as Unix time in seconds; without /proc, the current time."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()
