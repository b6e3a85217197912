"""Multiply a tensor by a number and cast it, in one pass and rounded once.

Budget: 2 bytes read and 4 written per element for a bf16 gradient that becomes fp32; torch's cast
and product would move 14.
"""

import torch
from torch import Tensor

from moecore.kernels.common import can_use_kernel, cdiv, launch
from moecore.kernels.triton_api import tl, triton

BLOCK = 8192  # elements of one program
NUM_WARPS = 8


def scaled_cast_ref(x: Tensor, out_dtype: torch.dtype, scale: float | Tensor) -> Tensor:
    """Return x * scale, multiplied in at least fp32, as `out_dtype`, in plain PyTorch."""
    return (x.to(torch.promote_types(x.dtype, torch.float32)) * scale).to(out_dtype)


@triton.jit
def _scaled_cast_kernel(x_ptr, y_ptr, numel, scale, ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr):
    """Write BLOCK elements of x * scale; `scale` is a pointer if ON_DEVICE, otherwise a number."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < numel, other=0.0).to(tl.float32)
    if ON_DEVICE:
        scale = tl.load(scale)
    tl.store(y_ptr + i, (x * scale).to(y_ptr.dtype.element_ty), mask=i < numel)


def scaled_cast(x: Tensor, dtype: torch.dtype, scale: float | Tensor) -> Tensor:
    """Return x * scale cast to a dtype, contiguous. Not differentiable.

    The product is in fp32 (fp64 for fp64 tensors). A tensor scale [] is read on its device.
    """
    if not can_use_kernel(x) or torch.float64 in (x.dtype, dtype) or torch.compiler.is_compiling():
        return scaled_cast_ref(x, dtype, scale)
    x = x.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    on_device, grid = isinstance(scale, Tensor), cdiv(x.numel(), BLOCK)
    args = (x, y, x.numel(), scale.float() if isinstance(scale, Tensor) else scale)
    launch(_scaled_cast_kernel, grid, *args, ON_DEVICE=on_device, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return y
