"""GPUs that a plan knows by name. Numbers of their makers, memory as torch reports it.

Host memory is that of the maker's own servers: DGX A100 640GB, H100, H200 and B200 have 2 TB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from moecore.base.fields import NumBytes, Positive, check_fields
from moecore.base.options.names import GpuName

GIB = 1 << 30
TERA, GIGA = 10**12, 10**9
NODE = 8  # GPUs of a server, which NVLink connects


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One kind of GPU, in a server of 8. Rates are peaks per second, of dense products.

    Attributes:
        memory: bytes that a process can allocate.
        bf16_flops: of bf16 and fp16.
        fp8_flops: None where there is no FP8.
        fp32_flops: of fp32.
        memory_bandwidth: bytes, read and written together.
        nvlink: bytes, both directions together.
        pcie: bytes in one direction, to and from the host.
        network: bytes, both directions together, of a GPU's share of the network cards.
        host_memory: bytes of a server.
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
        "b200-180": Gpu(
            memory=178 * GIB,
            bf16_flops=2250 * TERA,
            fp8_flops=4500 * TERA,
            fp32_flops=75 * TERA,
            memory_bandwidth=8000 * GIGA,
            nvlink=1800 * GIGA,
            pcie=64 * GIGA,
            network=100 * GIGA,
        ),
    }
)


def gpu_of(gpu: GpuName | Gpu) -> Gpu:
    """Return the record of a name, or a GPU of the caller's own."""
    return gpu if isinstance(gpu, Gpu) else GPUS[gpu]
