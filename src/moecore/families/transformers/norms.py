"""Replaces RMS norms of transformers models by torch's fused kernel on GPUs.

The transformers classes run seven operations per norm. Any module that computes this function is
replaced, and its class name need only contain "RMSNorm":

    y = weight * x / sqrt(mean of x^2 over the last dim + eps)

The kernel sums in fp32 and rounds once; most classes round x / sqrt(..) and the product. The
class's code still runs on CPUs, under autocast, under torch.compile, and if the dtypes of weight
and x differ.
"""

from __future__ import annotations

from inspect import signature
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

EPS = ("variance_epsilon", "eps")  # attribute names of eps in transformers' classes
FP32_DISTANCE = 1e-5  # bound on the difference between a class that computes in fp32 and torch
SIZES = (1.0, 1e-3)  # magnitudes of the test elements; eps matters only at the second


def fuse_norms(model: nn.Module) -> None:
    """Replace the forward of a model's RMS norms by one that uses the fused kernel on GPUs."""
    for module in model.modules():
        if "RMSNorm" in type(module).__name__ and is_rms_norm(module):
            module.forward = MethodType(_fused, module)


def is_rms_norm(module: nn.Module) -> bool:
    """Whether a module, on any device including meta, computes the same as `F.rms_norm`."""
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
