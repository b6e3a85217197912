"""Power and clock of a GPU during a call, sampled by nvidia-smi.

A step that always runs at the GPU's power limit is bound by energy: overlapping work does not make
it faster, less work does.
"""

from __future__ import annotations

import statistics
import subprocess
from types import TracebackType

import torch

PERIOD_MS = 100
FIELDS = ("power.draw", "power.limit", "clocks.sm")  # W, W, MHz


class PowerLog:
    """Samples one GPU within a `with` block; without nvidia-smi there are no samples.

    Args:
        device: the GPU; other devices are not sampled.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process: subprocess.Popen[str] | None = None
        self._samples: list[tuple[float, ...]] = []

    def __enter__(self) -> PowerLog:
        """Start sampling."""
        if self._device.type == "cuda":
            uuid = torch.cuda.get_device_properties(self._device).uuid
            self._start(f"GPU-{uuid}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop sampling."""
        if self._process is None:
            return
        self._process.terminate()
        out, _ = self._process.communicate()
        self._samples = parse_samples(out)

    def _start(self, gpu: str) -> None:
        """Start nvidia-smi if it exists."""
        query = f"--query-gpu={','.join(FIELDS)}"
        how = ("--format=csv,noheader,nounits", f"--id={gpu}", f"--loop-ms={PERIOD_MS}")
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            self._process = subprocess.Popen(["nvidia-smi", query, *how], **pipes)  # type: ignore[call-overload]
        except OSError:
            return

    def summary(self) -> dict[str, float]:
        """Return mean power and power limit in watts and mean clock in MHz; {} = no samples."""
        if not self._samples:
            return {}
        watts, limits, mhz = (
            statistics.fmean(values) for values in zip(*self._samples, strict=True)
        )
        return {"power_watts": watts, "power_limit_watts": limits, "sm_mhz": mhz}


def parse_samples(text: str) -> list[tuple[float, ...]]:
    """Return the samples of complete lines with numbers only."""
    found = []
    for line in text.splitlines():
        try:
            values = tuple(float(word) for word in line.split(","))
        except ValueError:
            continue
        if len(values) == len(FIELDS):
            found.append(values)
    return found
