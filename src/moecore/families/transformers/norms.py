"""RMS norms of transformers models by torch's fused kernel, on GPUs.

Their classes compute in fp32 what is seven operations in eager, of 2 to 4 bytes per element each
way. A norm is taken for what it computes, whatever its class is called:

    y = weight * x / sqrt(mean of x^2 over the last dim + eps)

The kernel sums in fp32 and rounds once, where most classes round x / sqrt(..) and the product. What
is not plain keeps the class's own code: CPUs, autocast, a weight in another dtype than x. So do
compilers, which fuse that code with what comes before and after it.
"""

from __future__ import annotations

from inspect import signature
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

EPS = ("variance_epsilon", "eps")  # as classes name it
FP32_DISTANCE = 1e-5  # of classes that compute in fp32, whatever they get
SIZES = (1.0, 1e-3)  # of elements: with the second one eps counts


def fuse_norms(model: nn.Module) -> None:
    """Let the RMS norms of a model run as one kernel on GPUs. No communication."""
    for module in model.modules():
        if "RMSNorm" in type(module).__name__ and is_rms_norm(module):
            module.forward = MethodType(_fused, module)


def is_rms_norm(module: nn.Module) -> bool:
    """Return whether a module on any device, also meta, computes what `F.rms_norm` does."""
    eps, weight = _eps(module), getattr(module, "weight", None)
    has_other_tensors = len(list(module.parameters())) + len(list(module.buffers())) != 1
    has_other_inputs = len(signature(type(module).forward).parameters) != 2  # self and x
    if eps is None or weight is None or weight.ndim != 1 or has_other_tensors or has_other_inputs:
        return False
    with torch.no_grad(), torch.device("cpu"):
        g = torch.Generator().manual_seed(0)
        weight_D = torch.randn(weight.shape, generator=g)
        x_TD = torch.randn(2, len(weight_D), generator=g)
        for size in SIZES:
            reference_TD = F.rms_norm(size * x_TD, weight_D.shape, weight_D, eps)
            y_TD = functional_call(module, {"weight": weight_D}, (size * x_TD,))
            if not torch.allclose(
                y_TD, reference_TD, rtol=FP32_DISTANCE, atol=FP32_DISTANCE * size
            ):
                return False
    return True


def _eps(module: nn.Module) -> float | None:
    return next(
        (value for name in EPS if isinstance(value := getattr(module, name, None), float)), None
    )


def _fused(module: Any, x: Tensor) -> Tensor:
    weight_D = module.weight
    is_plain = x.is_cuda and weight_D.dtype == x.dtype and not torch.is_autocast_enabled("cuda")
    if torch.compiler.is_compiling() or not is_plain:
        y: Tensor = type(module).forward(module, x)
        return y
    return F.rms_norm(x, weight_D.shape, weight_D, _eps(module))
