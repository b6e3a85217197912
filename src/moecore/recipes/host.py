"""What a rank asks of its host: CPUs beside its GPU, and no garbage collection within a step.

Ranks wait for each other in every exchange, so a step takes as long as the latest host. Python's
collector stops a host for milliseconds, at another place on each rank; by hand all of them collect
at the end of the same steps. Memory of the host on another NUMA node is farther for each launch.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

COLLECT_EVERY = 100  # steps
SYSTEM = Path("/sys")


def bind_to_gpu(system: Path = SYSTEM) -> set[int] | None:
    """Run this process on the CPUs of its GPU's NUMA node; None = the system names no node."""
    if not torch.cuda.is_available():
        return None
    gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    place = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    cpus = cpus_beside(place, system) & os.sched_getaffinity(0)  # a scheduler may have given fewer
    if not cpus:
        return None
    os.sched_setaffinity(0, cpus)
    return cpus


def cpus_beside(place: str, system: Path = SYSTEM) -> set[int]:
    """Return the CPUs of the NUMA node of a PCI device such as "0000:1b:00.0"; empty = unknown."""
    try:
        node = int((system / "bus/pci/devices" / place / "numa_node").read_text())
        ranges = (system / f"devices/system/node/node{node}/cpulist").read_text().strip()
    except (OSError, ValueError):
        return set()
    cpus: set[int] = set()
    for part in filter(None, ranges.split(",")):  # "0-15,32-47"
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


@contextmanager
def collecting_by_hand() -> Iterator[None]:
    """Within, Python collects no garbage by itself: see `collect`."""
    gc.collect()
    gc.freeze()  # what lives by now is not looked at again
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def collect(step: int) -> None:
    """Collect garbage at the end of a step, if it is due and the collector is off."""
    if step % COLLECT_EVERY == 0 and not gc.isenabled():
        gc.collect()
