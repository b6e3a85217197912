"""GPUS: data-sheet numbers of GPUs by name; read_gpu: a GPU from a file.

`memory` is the number that torch reports. `host_memory` is the manufacturer's server: DGX A100
640GB, H100, H200 and B200 have 2 TB, and trays of GB200 and GB300 have 0.96 TB.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from moecore.base.fields import Bound, CheckedRecord, NumBytes, quote
from moecore.base.options.names import GpuName
from moecore.base.options.precision import Precision
from moecore.io.checkpoint.files import read_regular_file

GIB = 1 << 30
TERA, GIGA = 10**12, 10**9
MAX_GPU_BYTES = 1 << 20  # the largest file of a `Gpu`
# A rate outside these bounds has another unit.
Rate = Annotated[float, Bound(">=", 1e6), Bound("<=", 1e24), "pass operations or bytes per second"]
NodeSize = Annotated[int, Bound(">=", 1), Bound("<=", 2**16)]
NODE = 8  # GPUs of a server, and of an NVLink domain of servers without an external switch


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu(CheckedRecord):
    """A kind of GPU. Rates are peaks per second.

    Attributes:
        memory: bytes that a process can allocate.
        bf16_flops: FLOP/s of dense bf16 and fp16 matmuls.
        fp8_flops: FLOP/s of dense FP8 matmuls; None = the GPU has no FP8.
        fp4_flops: FLOP/s of dense FP4 matmuls; None = the GPU has no FP4.
        fp32_flops: FLOP/s of fp32.
        memory_bandwidth: bytes/s of memory, reads and writes together.
        nvlink: bytes/s of NVLink, both directions together; bytes/s of PCIe on GPUs without NVLink.
        pcie: bytes/s to the host, in one direction.
        network: bytes/s of a GPU's share of the network cards, both directions together.
        host_memory: bytes of host memory of a server.
        server: GPUs of a server.
        domain: GPUs that NVLink connects.
        has_blockwise: whether moecore has blockwise FP8 kernels for the GPU.
        has_block_scales: whether the GPU's tensor cores support MXFP8 and NVFP4.
        has_peer_access: whether GPUs of a server access each other's memory.
        measured: whether plans of moecore were compared with runs on the GPU.
    """

    memory: NumBytes
    bf16_flops: Rate
    fp8_flops: Rate | None
    fp32_flops: Rate
    memory_bandwidth: Rate
    nvlink: Rate
    pcie: Rate
    network: Rate
    host_memory: NumBytes = 2048 * GIB
    server: NodeSize = NODE
    domain: NodeSize = NODE
    fp4_flops: Rate | None = None
    has_blockwise: bool = False
    has_block_scales: bool = False
    has_peer_access: bool = True
    measured: bool = False


H100 = Gpu(
    memory=79 * GIB,
    bf16_flops=989.4 * TERA,
    fp8_flops=1978.9 * TERA,
    fp32_flops=66.9 * TERA,
    memory_bandwidth=3350 * GIGA,
    nvlink=900 * GIGA,
    pcie=64 * GIGA,
    network=100 * GIGA,  # ConnectX-7: 400 Gb/s each way
    has_blockwise=True,
    measured=True,
)
B200 = Gpu(
    memory=178 * GIB,
    bf16_flops=2250 * TERA,
    fp8_flops=4500 * TERA,
    fp4_flops=9e15,
    fp32_flops=75 * TERA,
    memory_bandwidth=8000 * GIGA,
    nvlink=1800 * GIGA,
    pcie=64 * GIGA,
    network=100 * GIGA,
    has_block_scales=True,
)
GB200 = replace(  # a 72nd of GB200 NVL72
    B200,
    memory=184 * GIB,  # torch reports 2 GB less than the data sheet on other GPUs
    bf16_flops=2500 * TERA,
    fp8_flops=5000 * TERA,
    fp4_flops=10e15,
    fp32_flops=80 * TERA,
    pcie=225 * GIGA,  # NVLink-C2C: 450 GB/s each way of a Grace, which two GPUs share
    host_memory=960 * GIGA,  # of two Graces, 480 GB of LPDDR5X each
    server=4,
    domain=72,
)
L40S = Gpu(
    memory=44 * GIB,
    bf16_flops=362 * TERA,
    fp8_flops=733 * TERA,
    fp32_flops=91.6 * TERA,
    memory_bandwidth=864 * GIGA,
    nvlink=64 * GIGA,
    pcie=32 * GIGA,
    network=25 * GIGA,  # of OVX L40S, where two GPUs share a card of 200 Gb/s each way
    host_memory=1024 * GIB,
)
RTX4090 = Gpu(
    memory=23 * GIB,
    bf16_flops=165.2 * TERA,  # summed in fp32
    fp8_flops=330.3 * TERA,
    fp32_flops=82.6 * TERA,
    memory_bandwidth=1008 * GIGA,
    nvlink=64 * GIGA,
    pcie=32 * GIGA,
    # Assumed: 8 GPUs of a server share a card of 100 Gb/s each way, and half a TB of memory.
    network=25 / 8 * GIGA,
    host_memory=512 * GIB,
    has_peer_access=False,
)
GPUS: Mapping[GpuName, Gpu] = MappingProxyType(
    {
        "a100-80": Gpu(
            memory=79 * GIB,
            bf16_flops=312 * TERA,
            fp8_flops=None,
            fp32_flops=19.5 * TERA,
            memory_bandwidth=2039 * GIGA,
            nvlink=600 * GIGA,
            pcie=32 * GIGA,
            network=50 * GIGA,  # 200 Gb/s each way
        ),
        "h100-80": H100,
        "h200-141": replace(H100, memory=139 * GIB, memory_bandwidth=4800 * GIGA),
        "h20-96": replace(
            H100,
            memory=95 * GIB,
            bf16_flops=148 * TERA,
            fp8_flops=296 * TERA,
            fp32_flops=44 * TERA,
            memory_bandwidth=4000 * GIGA,
            measured=False,
        ),
        "b200-180": B200,
        "b300-262": replace(  # ConnectX-8
            B200, memory=260 * GIB, fp4_flops=13.5e15, network=200 * GIGA
        ),
        "gb200-186": GB200,
        "gb300-279": replace(GB200, memory=276 * GIB, fp4_flops=15e15, network=200 * GIGA),
        "l40s-48": L40S,
        "rtx4090-24": RTX4090,
        "rtx5090-32": replace(
            RTX4090,
            memory=31 * GIB,
            bf16_flops=209.5 * TERA,
            fp8_flops=419 * TERA,
            fp32_flops=104.8 * TERA,
            memory_bandwidth=1792 * GIGA,
            nvlink=128 * GIGA,
            pcie=64 * GIGA,
        ),
    }
)


def get_gpu(gpu: GpuName | Gpu) -> Gpu:
    """Return the record of a GPU's name; a record is returned unchanged."""
    return gpu if isinstance(gpu, Gpu) else GPUS[gpu]


# Pattern of a device's name -> FLOP/s of models that differ from their name in `GPUS`; None = the
# rate is not known. A MIG device is a part of a GPU.
OTHER_BF16_FLOPS: Mapping[str, float | None] = MappingProxyType(
    {r"MIG|Laptop|[45]090 D": None, r"H[12]00 NVL": 835 * TERA, r"H100 PCIe": 756 * TERA}
)


def find_gpu_name(device_name: str) -> GpuName | None:
    """Return the key of `GPUS` for torch's device name, such as "NVIDIA H200"; None = no key."""
    for name in GPUS:
        model = name.partition("-")[0].replace("rtx", "rtx ")
        if re.search(rf"\b{model}\b", device_name, re.IGNORECASE):
            return name
    return None


def find_bf16_flops(device_name: str) -> float | None:
    """Return dense bf16 FLOP/s by torch's device name; None = the GPU is not known."""
    for pattern, flops in OTHER_BF16_FLOPS.items():
        if re.search(rf"\b({pattern})\b", device_name):
            return flops
    name = find_gpu_name(device_name)
    return None if name is None else GPUS[name].bf16_flops


def read_file(path: str | os.PathLike[str], argument: str, max_bytes: int, fix: str) -> bytes:
    """Return a file's contents; ValueError on `argument` if it is missing or above `max_bytes`."""
    try:
        return read_regular_file(Path(path), follow_symlinks=True, max_bytes=max_bytes)
    except (OSError, ValueError):
        raise ValueError(f"{argument} must be a file of at most {max_bytes} bytes: {fix}") from None


def read_gpu(path: str | os.PathLike[str]) -> Gpu:
    """Read a `Gpu` from a TOML file with the fields of `Gpu`; ValueError for an invalid file.

    Fields that the file lacks are copied from the known GPU that the key `like` names.
    """
    file_name = f"gpu-spec ({quote(os.fspath(path))})"
    text = read_file(path, file_name, MAX_GPU_BYTES, "write fields of Gpu there")
    try:
        values = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file_name} must be TOML ({error!s:.80}): correct it") from None
    like, field_names = values.pop("like", None), {field.name for field in fields(Gpu)}
    like_gpu = next((gpu for name, gpu in GPUS.items() if name == like), None)
    if like is not None and like_gpu is None:
        raise ValueError(f"like ({quote(like)}) must be one of {', '.join(GPUS)}: choose one")
    for name in values.keys() - field_names:
        raise ValueError(
            f"{name:.80} ({quote(values[name])}) must be a field of Gpu: "
            f"{', '.join(sorted(field_names))}"
        )
    values = {"measured": False} | values
    if like_gpu is not None:
        return replace(like_gpu, **values)
    missing = [f.name for f in fields(Gpu) if f.default is MISSING and f.name not in values]
    if missing:
        raise ValueError(
            f'{file_name} must have {", ".join(missing)}: add them, or like = "h100-80"'
        )
    return Gpu(**values)


def find_time_refusal(precision: Precision | None, gpu: GpuName | Gpu) -> str | None:
    """Return the reason why the time of a precision's matmuls is not modelled on a GPU, or None."""
    # On other GPUs a dry run of MXFP8 and NVFP4 records their emulation, whose time differs from
    # the time of products on tensor cores. Without has_blockwise moecore has no FP8 kernel.
    record = get_gpu(gpu)
    for recipe in () if precision is None else precision.recipes:
        is_timed = record.has_block_scales if recipe.is_emulated else record.has_blockwise
        if not is_timed:
            subject = f"{recipe.scaling} on {gpu if isinstance(gpu, str) else 'this GPU'}"
            return f"time: not modelled for {subject}: no kernel of it has been measured"
    return None


def check_time_is_modelled(precision: Precision | None, gpu: GpuName | Gpu, fix: str) -> None:
    """Raise NotImplementedError (`find_time_refusal`, then `fix`) if the time is not modelled."""
    if (refusal := find_time_refusal(precision, gpu)) is not None:
        raise NotImplementedError(f"{refusal}{fix}")


def count_domain_ranks(gpu: GpuName | Gpu, num_gpus: int) -> int:
    """Return the number of neighbouring ranks of a job that NVLink connects."""
    # The largest divisor of `num_gpus` above half of the domain; without a divisor, the domain.
    # Example: 64 of 128 GB200 GPUs, although a rack connects 72.
    domain = get_gpu(gpu).domain
    return next((n for n in range(domain, domain // 2, -1) if num_gpus % n == 0), domain)


def count_peers(gpu: GpuName | Gpu, num_domain_ranks: int) -> int:
    """Return the number of neighbouring ranks that access each other's memory; 1 = no access."""
    record = get_gpu(gpu)
    return min(record.server, num_domain_ranks) if record.has_peer_access else 1


def are_peers(group_ranks: int, num_peers: int) -> bool:
    """Return whether each group of `group_ranks` > 1 consecutive ranks has peer memory access."""
    return group_ranks > 1 and num_peers % group_ranks == 0
