"""Rotary position embedding of queries or keys, in one pass.

    y[b, t, h] = x[b, t, h, :n], then of each pair (p, q) of the last d dims p cos - q sin and
    q cos + p sin, with cos and sin of position t and the pair

Letters: B sequences, T tokens of a sequence, H heads, n dims that are copied, d dims that are
rotated. The output has the first dims of all pairs before the second dims. Each element is read and
written once, in its own dtype; plain PyTorch moves about ten times the bytes. Backward rotates by
the negative angles and saves no activation.

Source: RoFormer (arXiv:2104.09864).
"""

import torch
from torch import Tensor

from moecore.kernels.common import can_use_kernel, cdiv, launch, next_power_of_2
from moecore.kernels.ops import Op, make_setup_context
from moecore.kernels.triton_api import tl, triton

ELEMENTS = 4096  # of one program
NUM_WARPS = 4


def rotary_ref(x_BTHw: Tensor, cos_Td: Tensor, sin_Td: Tensor, *, interleaved: bool) -> Tensor:
    """Compute `rotary` in plain differentiable PyTorch."""
    n = x_BTHw.shape[-1] - 2 * cos_Td.shape[-1]
    stays, turns = x_BTHw[..., :n], x_BTHw[..., n:]
    first, second = turns.chunk(2, dim=-1)
    if interleaved:
        first, second = turns[..., 0::2], turns[..., 1::2]
    cos, sin = cos_Td[:, None], sin_Td[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    turned = turned.to(x_BTHw.dtype)
    return torch.cat((stays, turned), dim=-1) if n else turned


@triton.jit
def _rotary_kernel(
    x_ptr,  # [B, T, H, n + d], last dim contiguous
    cos_ptr,  # fp32 [T, d / 2]
    sin_ptr,  # fp32 [T, d / 2]
    y_ptr,  # [B, T, H, n + d], contiguous, out
    stride_b,
    stride_t,
    stride_h,
    num_rows,  # B * T * H
    T,
    H,
    num_unrotated,
    num_pairs,  # d / 2
    BACKWARD: tl.constexpr,  # x is the gradient of the forward's y, y that of its x
    INTERLEAVED: tl.constexpr,  # the forward's input has pairs side by side
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,  # >= n; 0 = no dims stay
    BLOCK_HALF: tl.constexpr,
):
    """Rotate BLOCK_R (token, head) vectors. BACKWARD: by negative angles, to the input's layout."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_mask = (rows < num_rows)[:, None]
    token, h = rows // H, rows % H
    b, t = token // T, token % T
    x_row = x_ptr + (b * stride_b + t * stride_t + h * stride_h)[:, None]
    y_row = y_ptr + (rows * (num_unrotated + 2 * num_pairs))[:, None]
    if BLOCK_N > 0:
        i = tl.arange(0, BLOCK_N)[None, :]
        mask = row_mask & (i < num_unrotated)
        tl.store(y_row + i, tl.load(x_row + i, mask=mask, other=0.0), mask=mask)
    i = tl.arange(0, BLOCK_HALF)[None, :]
    mask = row_mask & (i < num_pairs)
    angle = (t * num_pairs)[:, None] + i
    cos = tl.load(cos_ptr + angle, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)
    x_first, x_second = num_unrotated + i, num_unrotated + num_pairs + i
    y_first, y_second = num_unrotated + i, num_unrotated + num_pairs + i
    if INTERLEAVED:
        if BACKWARD:
            y_first, y_second = num_unrotated + 2 * i, num_unrotated + 2 * i + 1
        else:
            x_first, x_second = num_unrotated + 2 * i, num_unrotated + 2 * i + 1
    if BACKWARD:
        sin = -sin
    first = tl.load(x_row + x_first, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_row + x_second, mask=mask, other=0.0).to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    tl.store(y_row + y_first, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(y_row + y_second, (second * cos + first * sin).to(dtype), mask=mask)


def _launch_rotary(
    x: Tensor, cos_Td: Tensor, sin_Td: Tensor, interleaved: bool, backward: bool
) -> Tensor:
    """Rotate x by the kernel. With `backward`, x is the output's gradient and is rotated back."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    B, T, H, w = x.shape
    y = x.new_empty(x.shape)
    half = cos_Td.shape[-1]
    n = w - 2 * half
    rows = max(1, ELEMENTS // next_power_of_2(w))
    if y.numel():
        launch(
            _rotary_kernel,
            cdiv(B * T * H, rows),
            *(x, cos_Td, sin_Td, y, *x.stride()[:3], B * T * H, T, H, n, half),
            BACKWARD=backward,
            INTERLEAVED=interleaved,
            BLOCK_R=rows,
            BLOCK_N=next_power_of_2(n) if n else 0,
            BLOCK_HALF=next_power_of_2(half),
            num_warps=NUM_WARPS,
        )
    return y


_SCHEMA = "(Tensor {}, Tensor cos_Td, Tensor sin_Td, bool neighbours) -> Tensor"
_rotary_bwd = Op(
    "rotary_bwd",
    lambda dy, cos, sin, neighbours: _launch_rotary(dy, cos, sin, neighbours, True),
    lambda dy, *_: dy.new_empty(dy.shape),
    schema=_SCHEMA.format("dy"),
)
_rotary = Op(
    "rotary",
    lambda x, cos, sin, neighbours: _launch_rotary(x, cos, sin, neighbours, False),
    lambda x, *_: x.new_empty(x.shape),
    setup_context=make_setup_context(slice(1, 3), slice(3, 4)),
    backward=lambda ctx, dy: (_rotary_bwd(dy, *ctx.saved_tensors, *ctx.others), None, None, None),
    schema=_SCHEMA.format("x"),
)


def rotary(x_BTHw: Tensor, cos_Td: Tensor, sin_Td: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate queries or keys by the angles of their positions; fp32 inside, rounded once.

    torch.compile, CPUs and fp64 use plain PyTorch. The kernel is differentiable once, in x.

    Args:
        x_BTHw: [B, T, H, n + d], any strides. The last d dims are rotated.
        cos_Td, sin_Td: fp32 [T, d / 2].
        interleaved: True = pairs of dims (2i, 2i + 1) as in DeepSeek; False = (i, i + d / 2).

    Returns:
        Shape and dtype of x, contiguous on a GPU: the first n dims unchanged, the first dim of
        every pair, then the second dim of every pair.
    """
    plain = torch.compiler.is_compiling() or not can_use_kernel(x_BTHw)
    if plain or torch.float64 in (x_BTHw.dtype, cos_Td.dtype):
        return rotary_ref(x_BTHw, cos_Td, sin_Td, interleaved=interleaved)
    turned: Tensor = _rotary(x_BTHw, cos_Td, sin_Td, interleaved)
    return turned
