"""The kernels of `convolution.py`. A program has BLOCK_T tokens and BLOCK_D channels."""

from moecore.kernels.common import tl, triton


@triton.jit
def _load_tokens(ptr, tokens, first, end, d, D):
    """Return rows of [T, D] in fp32; rows before `first` or from `end` on are zero."""
    mask = ((tokens >= first) & (tokens < end))[:, None] & (d < D)[None, :]
    cells = tokens.to(tl.int64)[:, None] * D + d[None, :]
    return tl.load(ptr + cells, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _convolve(x_ptr, weight_ptr, bias_ptr, tokens, first, end, d, D, W: tl.constexpr, HAS_BIAS):
    """Return a tile of the convolution, before the activation."""
    y = tl.zeros([tokens.shape[0], d.shape[0]], dtype=tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(W):
        weight = tl.load(weight_ptr + d * W + tap, mask=d < D, other=0.0).to(tl.float32)
        y += weight[None, :] * _load_tokens(x_ptr, tokens - (W - 1 - tap), first, end, d, D)
    return y


@triton.jit(do_not_specialize=["num_tokens"])
def convolution_fwd_kernel(
    x_ptr,  # [T, D]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D]
    borders_ptr,  # int32 [2, T]: the first token and the end of each token's document
    y_ptr,  # [T, D], out
    num_tokens,
    D,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the outputs of BLOCK_T tokens and BLOCK_D channels."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.load(borders_ptr + t, mask=t < num_tokens, other=0)
    y = _convolve(x_ptr, weight_ptr, bias_ptr, t, first, num_tokens, d, D, W, HAS_BIAS)
    if SILU:
        y *= tl.sigmoid(y)
    mask = (t < num_tokens)[:, None] & (d < D)[None, :]
    cells = t.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(y_ptr + cells, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def convolution_bwd_kernel(
    x_ptr,  # [T, D]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D]
    borders_ptr,  # int32 [2, T]
    dy_ptr,  # [T, D]
    dx_ptr,  # [T, D], out
    sums_ptr,  # fp32 [tiles of tokens, W + 1, D], out: gradients of the weight and of the bias
    num_tokens,
    D,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write a tile of dx, and the tile's sums for the gradients of weight and bias."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.load(borders_ptr + t, mask=t < num_tokens, other=0)
    end = tl.load(borders_ptr + num_tokens + t, mask=t < num_tokens, other=0)
    dx = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    sums_ptr += tl.program_id(0).to(tl.int64) * (W + 1) * D + d
    for lag in tl.static_range(W):  # the token `lag` of t reads t with this tap from the last
        dy = _load_tokens(dy_ptr, t + lag, first, end, d, D)
        if SILU:
            y = _convolve(x_ptr, weight_ptr, bias_ptr, t + lag, first, end, d, D, W, HAS_BIAS)
            gate = tl.sigmoid(y)
            dy *= gate * (1.0 + y * (1.0 - gate))
        weight = tl.load(weight_ptr + d * W + W - 1 - lag, mask=d < D, other=0.0).to(tl.float32)
        dx += weight[None, :] * dy
        dweight = tl.sum(dy * _load_tokens(x_ptr, t, first, end, d, D), 0)
        tl.store(sums_ptr + (W - 1 - lag) * D, dweight, mask=d < D)
        if lag == 0:
            tl.store(sums_ptr + W * D, tl.sum(dy, 0), mask=d < D)
    mask = (t < num_tokens)[:, None] & (d < D)[None, :]
    cells = t.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(dx_ptr + cells, dx.to(dx_ptr.dtype.element_ty), mask=mask)
