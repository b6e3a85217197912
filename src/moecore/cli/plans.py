"""The options of `moecore measure`, `doctor` and `report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from moecore.base.command_options import POSITIONAL
from moecore.base.fields import Bound


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """Measure products, attention, copies and kernels on this machine's GPU, as a table for plans.

    Under torchrun the command measures collectives too.

    Attributes:
        out: the file to write.
    """

    out: Path = Path("table.json")


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Check the machines of a job, as it will train.

    The command compares versions, environment and clocks of all ranks. It checks limits, memory,
    disks and peer access of their hosts, and measures their links.

    example, on every host of a job:
      torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500
      -m moecore doctor --checkpoints /shared/runs

    Attributes:
        checkpoints: a directory that all ranks write, which is tried; None = none.
        timeout: seconds that ranks wait for each other.
    """

    checkpoints: Path | None = None
    timeout: Annotated[int, Bound(">=", 1), Bound("<=", 86_400), "pass seconds, a day at most"] = 60


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Report where a step's time went on one rank's GPU, and what to try next.

    The command reads a Chrome trace of torch.profiler. It prints what bounds the step, which
    communication is exposed, why the GPU is idle, and the options that may win most.

    example: moecore report trace.json.gz --steps 3

    Attributes:
        trace: a .json or .json.gz file of one rank, as `export_chrome_trace` writes it.
        steps: steps of the trace; None = as profile.step() has marked, otherwise 1.
        json: print one JSON object.
    """

    trace: Annotated[Path, POSITIONAL]
    steps: int | None = None
    json: bool = False
