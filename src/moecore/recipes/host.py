"""CPU affinity of a rank, and garbage collection between steps."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

COLLECT_EVERY = 100  # steps
SYSTEM = Path("/sys")


def bind_to_gpu(sysfs_root: Path = SYSTEM) -> set[int] | None:
    """Bind this process to the CPUs of its GPU's NUMA node; return them, or None if unknown."""
    if not torch.cuda.is_available():
        return None
    gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    place = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    # A scheduler may have given this process fewer CPUs.
    cpus = find_numa_cpus(place, sysfs_root) & os.sched_getaffinity(0)
    if not cpus:
        return None
    os.sched_setaffinity(0, cpus)
    return cpus


def find_numa_cpus(pci_address: str, sysfs_root: Path = SYSTEM) -> set[int]:
    """Return the CPUs of the NUMA node of a PCI device such as "0000:1b:00.0"; empty = unknown."""
    try:
        node = int((sysfs_root / "bus/pci/devices" / pci_address / "numa_node").read_text())
        ranges = (sysfs_root / f"devices/system/node/node{node}/cpulist").read_text().strip()
    except (OSError, ValueError):
        return set()
    cpus: set[int] = set()
    for part in filter(None, ranges.split(",")):  # "0-15,32-47"
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


@contextmanager
def disable_garbage_collection() -> Iterator[None]:
    """Return a context without automatic garbage collection; `collect_garbage` collects."""
    is_enabled, is_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()  # later collections skip the objects that exist now
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
        if not is_frozen:
            gc.unfreeze()


def collect_garbage(step: int) -> None:
    """Collect garbage every 100 steps, if the automatic collector is disabled."""
    if step % COLLECT_EVERY == 0 and not gc.isenabled():
        gc.collect()
