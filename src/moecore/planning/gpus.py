"""GPUS: data-sheet numbers of GPUs by name; read_gpu: a GPU from a file.

The numbers are in tables/gpus.toml, which has a table of the format of `read_gpu` for each GPU.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_args

from moecore.base.fields import Bound, CheckedRecord, NumBytes, quote
from moecore.base.options.names import GpuName
from moecore.base.options.precision import Precision
from moecore.io.checkpoint.files import read_regular_file

GIB = 1 << 30
TERA = 10**12
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
    fp8_flops: Rate | None = None
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


def _make_gpu(values: dict[str, Any], gpus: Mapping[GpuName, Gpu], file_name: str) -> Gpu:
    """Make a `Gpu` from a table of a file; missing fields are those of the GPU in key `like`."""
    like, field_names = values.pop("like", None), {field.name for field in fields(Gpu)}
    like_gpu = next((gpu for name, gpu in gpus.items() if name == like), None)
    if like is not None and like_gpu is None:
        raise ValueError(f"like ({quote(like)}) must be one of {', '.join(gpus)}: choose one")
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


def _read_gpus() -> Mapping[GpuName, Gpu]:
    """Read the GPUs that moecore knows from tables/gpus.toml."""
    tables = tomllib.loads((Path(__file__).parent / "tables/gpus.toml").read_text())
    gpus: dict[GpuName, Gpu] = {}
    for name in get_args(GpuName):
        gpus[name] = _make_gpu(tables[name], gpus, name)
    return MappingProxyType(gpus)


GPUS = _read_gpus()


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
    return _make_gpu(values, GPUS, file_name)


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
