"""State that all benchmarks of one `pytest benchmarks` share; conftest.py creates it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks import harness, records
from benchmarks.records import Environment, Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """State that all benchmarks of a run share.

    Attributes:
        device: of the benchmarks.
        effort: of each group of variants.
        environment: the same in all records.
        folder: of the records.
        saves_rows: whether the folder outlives the run.
        backends: chosen by --backend; empty = all.
        config: pytest's, to print despite its capture.
    """

    device: torch.device
    effort: harness.Effort
    environment: Environment
    folder: Path
    saves_rows: bool
    backends: tuple[str, ...]
    config: pytest.Config

    def add(self, row: Row) -> None:
        """Print the row and append it to the records."""
        self.print(records.describe(row))
        records.append(self.folder, self.environment, row)

    def print(self, line: str) -> None:
        """Write a line to the terminal at once, even while pytest captures output."""
        writer = self.config.get_terminal_writer()
        capture = self.config.pluginmanager.get_plugin("capturemanager")
        with capture.global_and_fixture_disabled():
            if writer.width_of_current_line:
                writer.line()
            writer.line(line)
            writer.flush()


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates measured in this session: GB/s of a copy, TFLOP/s of a dense product."""

    gbps: float
    tflops: float
