"""GPUs that a plan knows by name. Numbers of their makers, memory as torch reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        memory: bytes that a process can allocate.
    """

    memory: int


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "a100-80": Gpu(memory=79 * GIB),
        "h100-80": Gpu(memory=79 * GIB),
        "h200-141": Gpu(memory=139 * GIB),
        "b200-180": Gpu(memory=178 * GIB),
    }
)
