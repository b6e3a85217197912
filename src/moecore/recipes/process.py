"""The process of a rank: CPU affinity, garbage collection, --deterministic and --profile.

`--deterministic` computes identical bits in every run of a command on the same machine. The sums of
moecore's kernels have an order that depends only on shapes. The option selects such algorithms in
other libraries: cuBLAS, NCCL and Transformer Engine read the environment, and torch, Inductor and
FlashAttention read torch's setting.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from moecore.families.transformers.linear_attention import find_linear_layers
from moecore.recipes.options import RunConfig

COLLECT_EVERY = 100  # steps
SYSTEM = Path("/sys")
ENVIRONMENT = {  # variable -> the values that the option accepts; the first is the default
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_NVLS_ENABLE": ("0",),  # switches add in the order of arrival (NVIDIA/nccl#1497)
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}
TRACE = "trace.json.gz"
SETTLING = 10  # steps of a start that compile, allocate and warm caches


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
    """Return a context without automatic garbage collection; call `collect_garbage` each step."""
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


def use_deterministic_algorithms() -> None:
    """Enable torch's deterministic algorithms; ValueError if environment variables forbid them."""
    for name, values in ENVIRONMENT.items():
        value = os.environ.setdefault(name, values[0])
        if value not in values:
            raise ValueError(f"{name} ({value}) must be {values[0]} with --deterministic: unset it")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def check_deterministic(model: Any, device: torch.device) -> None:
    """Raise ValueError for a model whose kernels are not deterministic on the device."""
    is_linear = getattr(model.config, "linear_attention", None) or find_linear_layers(model)
    if device.type == "cuda" and is_linear:
        raise ValueError(
            "--deterministic must not go with linear attention on GPUs, whose kernels are selected "
            "by their measured times: drop it"
        )


def check_profile(args: RunConfig, start: int) -> None:
    """Raise ValueError if a run from step `start` has too few steps for --profile."""
    num_steps = args.steps - start - SETTLING
    if args.profile and start < args.steps and args.profile > num_steps:
        raise ValueError(
            f"--profile ({args.profile}) must be <= {max(num_steps, 0)}, the steps that this start "
            f"has after its first {SETTLING}: raise the number of steps, or drop it"
        )


@contextmanager
def trace_steps(args: RunConfig) -> Iterator[Callable[[], None]]:
    """Return a context with a function to call after each step; rank 0 writes --profile's trace."""
    if not args.profile or dist.get_rank() > 0:
        yield lambda: None
        return
    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    steps = schedule(wait=SETTLING - 1, warmup=1, active=args.profile, repeat=1)

    def write(profiler: profile) -> None:
        profiler.export_chrome_trace(str(args.run_dir / TRACE))

    with profile(activities=kinds, schedule=steps, on_trace_ready=write) as profiler:
        yield profiler.step
