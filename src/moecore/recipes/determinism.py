"""--deterministic: a command computes identical bits in every run on the same machine.

The sums of moecore's kernels have an order that depends only on shapes. The option selects such
algorithms in other libraries: cuBLAS, NCCL and Transformer Engine read the environment, and torch,
Inductor and FlashAttention read torch's setting.
"""

import os
from typing import Any

import torch

from moecore.families.transformers.linear_attention import find_linear_layers

ENVIRONMENT = {  # variable -> the values that the option accepts; the first is the default
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_NVLS_ENABLE": ("0",),  # switches add in the order of arrival (NVIDIA/nccl#1497)
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}


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
