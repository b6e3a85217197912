"""GPUs that a plan knows by name. Numbers of their makers, memory as torch reports it.

Host memory is that of the maker's own servers: DGX A100 640GB, H100, H200 and B200 have 2 TB.
GB200, GB300 and B300 are of data sheets alone: nobody has run moecore on one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from moecore.base.fields import Count, NumBytes, Positive, check_fields
from moecore.base.options.names import GpuName

GIB = 1 << 30
TERA, GIGA = 10**12, 10**9
NODE = 8  # GPUs of a server, and of a domain of servers without an NVLink switch of their own


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One kind of GPU. Rates are peaks per second, of dense products.

    Attributes:
        memory: bytes that a process can allocate.
        bf16_flops: of bf16 and fp16.
        fp8_flops: None where there is no FP8.
        fp32_flops: of fp32.
        memory_bandwidth: bytes, read and written together.
        nvlink: bytes, both directions together.
        pcie: bytes in one direction, to and from the host.
        network: bytes, both directions together, of a GPU's share of the network cards.
        host_memory: bytes of a server, or of as many as have 8 GPUs.
        server: GPUs of a server.
        domain: GPUs that NVLink connects.
        has_blockwise: whether moecore has products in blockwise FP8 for it.
    """

    memory: NumBytes
    bf16_flops: Positive
    fp8_flops: Positive | None
    fp32_flops: Positive
    memory_bandwidth: Positive
    nvlink: Positive
    pcie: Positive
    network: Positive
    host_memory: NumBytes = 2048 * GIB
    server: Count = NODE
    domain: Count = NODE
    has_blockwise: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


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
)
B200 = Gpu(
    memory=178 * GIB,
    bf16_flops=2250 * TERA,
    fp8_flops=4500 * TERA,
    fp32_flops=75 * TERA,
    memory_bandwidth=8000 * GIGA,
    nvlink=1800 * GIGA,
    pcie=64 * GIGA,
    network=100 * GIGA,
)
GB200 = replace(  # a 72nd of GB200 NVL72
    B200,
    memory=184 * GIB,  # 186 GB, less what torch reports less on others
    bf16_flops=2500 * TERA,
    fp8_flops=5000 * TERA,
    fp32_flops=80 * TERA,
    pcie=225 * GIGA,  # NVLink-C2C: 450 GB/s each way of a Grace, which two GPUs share
    host_memory=1920 * GIGA,  # 480 GB of LPDDR5X of a Grace
    server=4,
    domain=72,
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
        "b200-180": B200,
        "b300-262": replace(B200, memory=260 * GIB, network=200 * GIGA),  # ConnectX-8
        "gb200-186": GB200,
        "gb300-279": replace(GB200, memory=276 * GIB, network=200 * GIGA),
    }
)


def gpu_of(gpu: GpuName | Gpu) -> Gpu:
    """Return the record of a name, or a GPU of the caller's own."""
    return gpu if isinstance(gpu, Gpu) else GPUS[gpu]


def domain_of(gpu: GpuName | Gpu, num_gpus: int) -> int:
    """Return how many neighbouring ranks of a job NVLink connects: as many as divide the job."""
    # A job of 256 GPUs takes 64 of each rack of 72.
    domain = gpu_of(gpu).domain
    return next((n for n in range(domain, domain // 2, -1) if num_gpus % n == 0), domain)
