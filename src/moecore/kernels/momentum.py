"""The momentum of Muon in one pass: update the momentum, and return it in another dtype.

Budget per element with fp32 gradient and momentum: 8 bytes read, 4 written, and 2 for a result in
bf16. The gradient is divided by `grad_scale` while it is read, and is not changed.
"""

import torch
from torch import Tensor

from moecore.kernels.common import KERNEL_DTYPES, can_use_kernel, cdiv, launch
from moecore.kernels.triton_api import tl, triton

BLOCK = 4096  # elements of one program
NUM_WARPS = 8


def momentum_ref_(
    grad: Tensor,
    momentum: Tensor,
    out_dtype: torch.dtype,
    *,
    decay: float,
    nesterov: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """Compute `momentum_` in plain PyTorch."""
    grad = grad.to(momentum.dtype)
    if grad_scale is not None:
        grad = grad / grad_scale.to(grad.dtype)
    new = torch.full((), 1 - decay, dtype=grad.dtype, device=grad.device)
    if found_inf is not None:  # a nan times 0 is a nan
        grad, new = (x.masked_fill(found_inf > 0, 0.0) for x in (grad, new))
    momentum.lerp_(grad, new)
    return (grad.lerp(momentum, decay) if nesterov else momentum).to(out_dtype, copy=True)


@triton.jit
def _momentum_kernel(
    grad_ptr,  # [numel]
    momentum_ptr,  # [numel] fp32, in place
    out_ptr,  # [numel], out
    grad_scale_ptr,  # fp32 scalar or None
    found_inf_ptr,  # fp32 scalar or None: if above 0, nothing changes
    numel,
    decay,  # fp32
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update BLOCK elements of the momentum in place, and write the result to `out_ptr`."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(grad_ptr + i, mask=i < numel, other=0.0).to(tl.float32)
    m = tl.load(momentum_ptr + i, mask=i < numel, other=0.0)
    new = 1 - decay
    if grad_scale_ptr is not None:
        g = g / tl.load(grad_scale_ptr)
    if found_inf_ptr is not None:
        skip = tl.load(found_inf_ptr) > 0
        g = tl.where(skip, 0.0, g)
        new = tl.where(skip, 0.0, new)
    m += new * (g - m)
    tl.store(momentum_ptr + i, m, mask=i < numel)
    u = g + decay * (m - g) if NESTEROV else m
    tl.store(out_ptr + i, u.to(out_ptr.dtype.element_ty), mask=i < numel)


def momentum_(
    grad: Tensor,
    momentum: Tensor,
    out_dtype: torch.dtype,
    *,
    decay: float,
    nesterov: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """Update momentum in place, m <- decay * m + (1 - decay) * g, and return a copy in `out_dtype`.

    g is grad / grad_scale; grad_scale is an fp32 scalar, None = 1. The momentum is fp32 or fp64,
    the decay in [0, 1). With `nesterov`, the result is decay * m + (1 - decay) * g. If `found_inf`,
    an fp32 scalar, is above 0, the momentum does not change and the result is finite.
    """
    plain = momentum.dtype != torch.float32 or not {grad.dtype, out_dtype} <= {*KERNEL_DTYPES}
    if plain or not can_use_kernel(momentum) or not momentum.is_contiguous():
        signals = dict(grad_scale=grad_scale, found_inf=found_inf)
        return momentum_ref_(grad, momentum, out_dtype, decay=decay, nesterov=nesterov, **signals)
    out = torch.empty_like(momentum, dtype=out_dtype)
    args = (grad.contiguous(), momentum, out, grad_scale, found_inf, out.numel(), decay)
    constants = dict(NESTEROV=nesterov, BLOCK=BLOCK, num_warps=NUM_WARPS)
    launch(_momentum_kernel, cdiv(out.numel(), BLOCK), *args, **constants)
    return out
