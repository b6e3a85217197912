"""The indexer's queries and keys in FP8: each row is rotated, then quantised with one scale.

The rotation is the Hadamard matrix of 1 and -1, times i^-0.5. It is orthogonal, so dot products of
two rotated rows do not change, and it spreads outliers over all dims. Scales are powers of two.

Legend: R rows, i dims of a row, a power of two.

Source: DeepSeek-V3.2-Exp (`rotate_activation` and `act_quant` of its inference code).
"""

import torch
from torch import Tensor

from moecore.kernels.common import cdiv, launch
from moecore.kernels.rows.e4m3 import (
    FP8,
    abs_without_nan,
    abs_without_nan_ref,
    compute_block_scale,
    compute_block_scale_ref,
    from_e4m3,
    to_e4m3,
)
from moecore.kernels.triton_api import INTERPRET, tl, triton


def quantise_rotated_ref(x_Ri: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `quantise_rotated` in plain PyTorch."""
    dim = x_Ri.shape[-1]
    i = torch.arange(dim, device=x_Ri.device)
    bits = i[:, None] & i
    for shift in (8, 4, 2, 1):
        bits = bits ^ (bits >> shift)
    wide = torch.promote_types(x_Ri.dtype, torch.float32)
    hadamard = (1 - 2 * (bits & 1)).to(wide)
    rotated = (x_Ri.to(wide) @ hadamard * dim**-0.5).to(x_Ri.dtype).float()
    scales, inverses = compute_block_scale_ref(abs_without_nan_ref(rotated).amax(-1), True)
    return (rotated * inverses[..., None]).to(FP8), scales


def round_rotated(x_Ri: Tensor) -> Tensor:
    """Rotate rows, round them to FP8, and return the dequantised rows in the dtype of x."""
    values, scales = quantise_rotated_ref(x_Ri)
    return (values.float() * scales[..., None]).to(x_Ri.dtype)


@triton.jit
def multiply_tiles(a, b, WIDEN: tl.constexpr):
    """Return a @ b in fp32. If WIDEN, both operands are first converted to fp32.

    Triton's interpreter needs WIDEN: it cannot multiply 16-bit operands. FP8 operands are passed to
    the interpreter as uint8.
    """
    if WIDEN:
        a = from_e4m3(a) if a.dtype == tl.uint8 else a.to(tl.float32)
        b = from_e4m3(b) if b.dtype == tl.uint8 else b.to(tl.float32)
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(a, b)


@triton.jit(do_not_specialize=["num_rows"])
def _quantise_rotated_kernel(
    x_ptr,  # [R, DIM]
    values_ptr,  # [R, DIM] uint8, out
    scales_ptr,  # [R] fp32, out
    num_rows,
    DIM: tl.constexpr,
    WIDEN: tl.constexpr,
    BR: tl.constexpr,
):
    """Rotate BR rows, quantise them, and write their e4m3 bits and scales."""
    rows, dims = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, DIM)
    at, mask = rows[:, None] * DIM + dims[None, :], rows < num_rows
    x = tl.load(x_ptr + at, mask=mask[:, None], other=0.0)
    bits = dims[:, None] & dims[None, :]
    bits ^= bits >> 8
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    hadamard = (1 - 2 * (bits & 1)).to(tl.float32).to(x.dtype)
    rotated = multiply_tiles(x, hadamard, WIDEN) * DIM**-0.5
    rotated = rotated.to(x.dtype).to(tl.float32)
    scale, inverse = compute_block_scale(tl.max(abs_without_nan(rotated), 1), POWER_OF_TWO=True)
    tl.store(values_ptr + at, to_e4m3(rotated * inverse[:, None]), mask=mask[:, None])
    tl.store(scales_ptr + rows, scale, mask=mask)


def quantise_rotated(x_Ri: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate rows [..., i]; return their e4m3 values [..., i] and fp32 scales [...]. A kernel."""
    x_Ri = x_Ri.contiguous()
    values = torch.empty_like(x_Ri, dtype=FP8)
    scales = x_Ri.new_empty(x_Ri.shape[:-1], dtype=torch.float32)
    num_rows, dim = scales.numel(), x_Ri.shape[-1]
    launch(
        _quantise_rotated_kernel,
        cdiv(num_rows, 64),
        *(x_Ri, values.view(torch.uint8), scales, num_rows),
        DIM=dim,
        WIDEN=INTERPRET,
        BR=64,
        num_warps=4,
    )
    return values, scales
