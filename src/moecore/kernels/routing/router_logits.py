"""x_TD @ weight_ED.T + bias_E in fp32 from bf16 tokens: tensor cores, and the error of fp32.

Letters: T tokens, D model dim, E experts, P bf16 parts of an fp32 number.

Budget: forward reads 2TD bytes of x (again from L2 for every further tile of experts) and the
weight from L2, writes 4TE, and takes 2TDE flops per part. Backward reads 4TE and 2TD, writes 2TD,
and writes and reads dlogits in parts, 4TE (8TE for an fp32 weight). Launches: forward 1 (2 with an
fp32 weight), backward 5, and 1 for the bias.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.base.torch_private import is_in_forward_mode
from moecore.kernels.common import (
    can_use_kernel,
    cdiv,
    count_sms,
    disable_autocast,
    launch,
    next_power_of_2,
)
from moecore.kernels.ops import Op
from moecore.kernels.rows.scaling import round_up
from moecore.kernels.triton_api import INTERPRET, tl, triton

# Tensor cores truncate the terms that they add to an accumulator (Source: arXiv:2203.03341), so
# each step of 16 terms moves a sum towards zero. Simulated in fp64, the relative error of 2048
# terms is 2.4e-6 and of 7168 terms 9.6e-6, and of rounded additions 0.4e-6 and 0.9e-6. So an
# accumulator has CHUNK terms (0.5e-6 for any number) and is then added to an fp32 total. The parts
# mid and lo, 2**-8 of the sum, share one accumulator for all terms.
CHUNK = 512  # terms of one accumulator
SPLIT_TOKENS = 2048  # fewest tokens of one program of dweight
SUM_BLOCK = 1024  # elements of one program of _sum_splits_kernel
ALIGNED = 8  # rows or columns of a bf16 part are padded to a multiple of 16 bytes
SPLIT_BLOCK = 4096  # elements of one program of _split_kernel


def router_logits_ref(
    x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Compute `router_logits` in plain PyTorch, in `dtype`; inputs have any float dtype."""
    # Gradients are in `dtype` too, also where backward runs under autocast; forward must not.
    bias_E = None if bias_E is None else bias_E.to(dtype)
    x_TD, weight_ED = x_TD.to(dtype), weight_ED.to(dtype)
    # A compiled backward runs without autocast; forward-mode derivatives have none.
    if torch.compiler.is_compiling() or is_in_forward_mode():
        return F.linear(x_TD, weight_ED, bias_E)
    return _RouterLinear.apply(x_TD, weight_ED, bias_E)  # type: ignore[no-any-return]


class _RouterLinear(torch.autograd.Function):
    """F.linear whose backward runs without autocast, so that gradients are not rounded."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
        return F.linear(x_TD, weight_ED, bias_E)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        (x_TD, weight_ED, _), (need_dx, need_dweight, _) = inputs, ctx.needs_input_grad
        ctx.save_for_backward(x_TD if need_dweight else None, weight_ED if need_dx else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_ED = ctx.saved_tensors
        need_dx, need_dweight, need_dbias = ctx.needs_input_grad
        dlogits_TE = grads[0]
        dx_TD = dweight_ED = None
        with disable_autocast(dlogits_TE):
            if need_dx:
                dx_TD = _RouterLinear.apply(dlogits_TE, weight_ED.t(), None)
            if need_dweight:
                dweight_ED = _RouterLinear.apply(dlogits_TE.t(), x_TD.t(), None)
        return dx_TD, dweight_ED, dlogits_TE.sum(0) if need_dbias else None


# A product of two bf16 numbers (8 bits of mantissa) is exact in fp32. An fp32 number (24 bits) is
# the exact sum of three bf16 numbers, hi = bf16(v), mid = bf16(v - hi), lo = bf16(v - hi - mid),
# except below 2**-110. Every part is multiplied by the one bf16 tensor, never by other parts, so no
# cross terms are dropped. Zero parts make inf * 0: for an infinite x the result is NaN, not inf.


@triton.jit
def _extract_bf16_part(x, PART_IDX: tl.constexpr):
    """Return bf16 part 0 (hi), 1 (mid) or 2 (lo) of fp32 x; for infinity, parts 1 and 2 are 0."""
    part = x.to(tl.bfloat16)
    for _ in tl.static_range(PART_IDX):
        x = tl.where(tl.abs(part.to(tl.float32)) == float("inf"), 0.0, x - part.to(tl.float32))
        part = x.to(tl.bfloat16)
    return part


@triton.jit(do_not_specialize=["num_rows", "num_out_rows"])
def _split_kernel(
    matrix,  # [num_rows, COLUMNS], fp32 or bf16, contiguous
    out,  # out, bf16: part s of an element at row * ROW_STRIDE + s * PART_STRIDE + column
    num_rows,
    num_out_rows,  # rows and columns past those of v become 0
    COLUMNS: tl.constexpr,
    OUT_COLUMNS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    PART_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,  # which part goes where, for example (0, 1)
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Write a [BR, BC] block of a matrix to `out` as bf16 parts, whose sum is the fp32 value."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    column = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    real = (row < num_rows) & (column < COLUMNS)
    value = tl.load(matrix + row * COLUMNS + column, mask=real, other=0.0).to(tl.float32)
    inside = (row < num_out_rows) & (column < OUT_COLUMNS)
    for s in tl.static_range(len(PARTS)):
        place = out + row * ROW_STRIDE + s * PART_STRIDE + column
        tl.store(place, _extract_bf16_part(value, PARTS[s]), mask=inside)


@triton.jit
def _add_product(a, b, total, WIDEN: tl.constexpr):
    """Return total + a @ b. WIDEN converts bf16 to fp32 first, for the interpreter."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total)


@triton.jit(do_not_specialize=["num_tokens", "split_size"])
def _product_kernel(
    x,  # [T, D] bf16
    b,  # bf16; forward: weight parts [P, EP, D]; gradient: part p of dlogits at column p * EP
    bias,  # [E], any float dtype, or None
    out,  # out, fp32; forward: [T, E]; gradient: [splits, E, D]
    num_tokens,
    split_size,  # terms that one program adds
    D: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    GRADIENT: tl.constexpr,
    EP: tl.constexpr,  # experts with padding: rows or columns from part to part
    B_STRIDE: tl.constexpr,  # gradient: columns of a row of dlogits
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Write a [BM, BN] tile of logits (GRADIENT: of weight's gradient), summed over bf16 parts."""
    # Forward: m is a token, n an expert, k runs over D. Gradient: m is a column of D, n an expert,
    # k runs over the tokens of one split.
    tiles_n: tl.constexpr = tl.cdiv(E, BN)
    m = (tl.program_id(0) // tiles_n).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
    n = (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)[None, :]
    in_k = tl.arange(0, BK)
    if GRADIENT:
        first = tl.program_id(1).to(tl.int64) * split_size
        last = tl.minimum(first + split_size, num_tokens)
        m_ok, n_ok = m < D, n < EP
        x_at = x + in_k[None, :] * D + m
        b_at = b + in_k[:, None] * B_STRIDE + n
    else:
        first, last = 0, D
        m_ok, n_ok = m < num_tokens, n < E
        x_at = x + m * D + in_k[None, :]
        b_at = b + n * D + in_k[:, None]
    x_stride: tl.constexpr = D if GRADIENT else 1
    b_stride: tl.constexpr = B_STRIDE if GRADIENT else 1
    part_stride: tl.constexpr = EP if GRADIENT else EP * D

    total = tl.zeros([BM, BN], dtype=tl.float32)
    small = total
    for start in range(first, last, CHUNK):
        chunk = tl.zeros([BM, BN], dtype=tl.float32)
        for k in range(start, tl.minimum(start + CHUNK, last), BK):
            k_ok = in_k < last - k
            b_ok = n_ok & k_ok[:, None]
            x_tile = tl.load(x_at + k * x_stride, mask=m_ok & k_ok[None, :], other=0.0)
            b_tile = tl.load(b_at + k * b_stride, mask=b_ok, other=0.0)
            chunk = _add_product(x_tile, b_tile, chunk, WIDEN)
            for p in tl.static_range(1, P):
                b_tile = tl.load(b_at + (k * b_stride + p * part_stride), mask=b_ok, other=0.0)
                small = _add_product(x_tile, b_tile, small, WIDEN)
        total += chunk
    if P > 1:
        total += small
    if bias is not None:
        total += tl.load(bias + n, mask=n < E, other=0.0).to(tl.float32)
    if GRADIENT:
        place = out + (tl.program_id(1).to(tl.int64) * E + n) * D + m
    else:
        place = out + m * E + n
    tl.store(place, total.to(out.dtype.element_ty), mask=m_ok & (n < E))


@triton.jit
def _sum_splits_kernel(splits, out, num_splits, split_size, BLOCK: tl.constexpr):
    """Sum partial sums [num_splits, split_size] over the splits, for BLOCK elements; round once."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    at = splits + index
    for _ in range(num_splits):
        total += tl.load(at, mask=index < split_size, other=0.0)
        at += split_size
    tl.store(out + index, total.to(out.dtype.element_ty), mask=index < split_size)


def _split_into_parts(matrix: Tensor, part_ids: tuple[int, ...], *, side_by_side: bool) -> Tensor:
    """Return bf16 parts (0 hi, 1 mid, 2 lo) of a matrix, padded with zeros, in one matrix."""
    # Each part is padded with zeros to a multiple of 8 in the stacked dim.
    rows, columns = matrix.shape
    out_rows, out_columns = rows, columns
    if side_by_side:
        part_stride = out_columns = round_up(columns, ALIGNED)
        shape = (rows, len(part_ids) * out_columns)
    else:
        out_rows = round_up(rows, ALIGNED)
        shape, part_stride = (len(part_ids) * out_rows, columns), out_rows * columns
    out = matrix.new_empty(shape, dtype=torch.bfloat16)
    BC = min(128, next_power_of_2(out_columns))
    BR = SPLIT_BLOCK // BC
    grid = (cdiv(out_rows, BR), cdiv(out_columns, BC))
    sizes = dict(COLUMNS=columns, OUT_COLUMNS=out_columns, PARTS=part_ids, BR=BR, BC=BC)
    strides = dict(ROW_STRIDE=shape[1], PART_STRIDE=part_stride)
    launch(_split_kernel, grid, matrix, out, rows, out_rows, **sizes, **strides)
    return out


@cache
def _choose_tile(num_experts: int, num_parts: int) -> dict[str, Any]:
    """Return tile constants of `_product_kernel`; with two or more bf16 parts, half the columns."""
    BN = min(128 if num_parts == 1 else 64, max(16, next_power_of_2(num_experts)))
    return dict(BM=128, BN=BN, BK=64, CHUNK=CHUNK, WIDEN=INTERPRET, num_warps=8, num_stages=3)


@cache
def _make_product_constants(
    dim: int, num_experts: int, num_parts: int, padded_experts: int, gradient_stride: int
) -> dict[str, Any]:
    """Return the constants of `_product_kernel`; gradient_stride 0 = the forward's product."""
    return _choose_tile(num_experts, num_parts) | dict(
        D=dim,
        E=num_experts,
        P=num_parts,
        GRADIENT=gradient_stride > 0,
        EP=padded_experts,
        B_STRIDE=gradient_stride or 1,
    )


def run_logits_kernel(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    """Return logits [T, E], fp32, by the kernel of `router_logits`, without autograd."""
    x_TD, weight_ED = x_TD.contiguous(), weight_ED.contiguous()
    (T, D), E = x_TD.shape, weight_ED.shape[0]
    logits_TE = x_TD.new_empty((T, E), dtype=torch.float32)
    if T == 0:
        return logits_TE
    parts, P, rows = weight_ED, 1, E
    if weight_ED.dtype == torch.float32:
        parts = _split_into_parts(weight_ED, (0, 1, 2), side_by_side=False)
        P, rows = 3, round_up(E, ALIGNED)
    tile = _choose_tile(E, P)
    bias_E = None if bias_E is None else bias_E.contiguous()
    args = (x_TD, parts, bias_E, logits_TE, T, D)
    constants = _make_product_constants(D, E, P, rows, 0)
    launch(_product_kernel, cdiv(T, tile["BM"]) * cdiv(E, tile["BN"]), *args, **constants)
    return logits_TE


def _router_logits_bwd(
    dlogits_TE: Tensor, x_TD: Tensor, weight_ED: Tensor, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor, Tensor]:
    """Return dx and dweight; a gradient that is not needed is an empty tensor."""
    weight_ED, x_TD = weight_ED.contiguous(), x_TD.contiguous()
    if x_TD.shape[0] == 0:
        dx_TD, dweight_ED = _make_empty_gradients(dlogits_TE, x_TD, weight_ED, needs_dx, needs_dw)
        return dx_TD, dweight_ED.zero_()
    wide = weight_ED.dtype == torch.float32
    # A gradient that is rounded to bf16 at the end (dx always, dweight of a bf16 weight) needs no
    # more than an error far below the 2**-9 of that rounding: two parts of dlogits leave 2**-16 of
    # each term (of a product of two split tensors, hi * hi + hi * mid + mid * hi do). dweight of an
    # fp32 weight gets all three. dx is then one bf16 matmul of torch, the parts side by side along
    # its inner dim, rounded as that of any bf16 linear layer.
    # An fp32 weight: hi, hi, mid for dx, which takes mid, hi, hi of the weight; the last three
    # parts for dweight. A bf16 weight: hi, mid for both.
    dlogits = _split_into_parts(
        dlogits_TE.contiguous(), (0, 0, 1, 2) if wide else (0, 1), side_by_side=True
    )
    EP = round_up(weight_ED.shape[0], ALIGNED)
    dweight_ED = weight_ED.new_empty(weight_ED.shape if needs_dw else (0,))
    if not needs_dx:
        dx_TD = x_TD.new_empty(0)
    else:
        weight = _split_into_parts(weight_ED, (1, 0, 0) if wide else (0, 0), side_by_side=False)
        with disable_autocast(x_TD):
            dx_TD = dlogits[:, : weight.shape[0]].mm(weight)  # `out=` takes three times as long
    if needs_dw:
        _compute_dweight(dlogits[:, EP:] if wide else dlogits, x_TD, dweight_ED)
    return dx_TD, dweight_ED


def _make_empty_gradients(
    dlogits_TE: Tensor, x_TD: Tensor, weight_ED: Tensor, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor, Tensor]:
    """Return uninitialised dx [T, D] and dweight [E, D]; [0] for a gradient that is not needed."""
    dx_TD = x_TD.new_empty(x_TD.shape if needs_dx else (0,))
    return dx_TD, weight_ED.new_empty(weight_ED.shape if needs_dw else (0,))


_router_logits_bwd_op = Op("router_logits_bwd", _router_logits_bwd, _make_empty_gradients)


def _compute_dweight(dlogits_parts: Tensor, x_TD: Tensor, dweight_ED: Tensor) -> None:
    """Write dlogits^T @ x to dweight_ED, from 3 (fp32 dweight) or 2 bf16 parts of dlogits."""
    (T, D), E = x_TD.shape, dweight_ED.shape[0]
    P = 3 if dweight_ED.dtype == torch.float32 else 2
    tile = _choose_tile(E, P)
    tiles = cdiv(D, tile["BM"]) * cdiv(E, tile["BN"])
    num_splits = max(1, min(cdiv(2 * count_sms(x_TD.device), tiles), T // SPLIT_TOKENS))
    split_size = cdiv(T, num_splits)
    splits = dweight_ED
    if num_splits > 1:
        splits = x_TD.new_empty((num_splits, E, D), dtype=torch.float32)
    args = (x_TD, dlogits_parts, None, splits, T, split_size)
    constants = _make_product_constants(D, E, P, round_up(E, ALIGNED), dlogits_parts.stride(0))
    launch(_product_kernel, (tiles, num_splits), *args, **constants)
    if num_splits > 1:
        sums = (splits, dweight_ED, num_splits, E * D)
        launch(_sum_splits_kernel, cdiv(E * D, SUM_BLOCK), *sums, BLOCK=SUM_BLOCK)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save x and weight, and the dtype of the bias (None = no bias), for backward."""
    x_TD, weight_ED, bias_E = inputs
    ctx.save_for_backward(x_TD, weight_ED)
    ctx.bias_dtype = None if bias_E is None else bias_E.dtype


def compute_input_gradients(
    needs_grads: tuple[bool, bool, bool],
    bias_dtype: torch.dtype | None,
    dlogits_TE: Tensor,
    x_TD: Tensor,
    weight_ED: Tensor,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (dx, dweight, dbias); an entry is None where `needs_grads` has False."""
    need_dx, need_dw, need_dbias = needs_grads
    dx_TD = dweight_ED = dbias_E = None
    if need_dx or need_dw:
        dx_TD, dweight_ED = _router_logits_bwd_op(dlogits_TE, x_TD, weight_ED, need_dx, need_dw)
    if need_dbias:
        dbias_E = dlogits_TE.sum(0).to(bias_dtype)
    return dx_TD if need_dx else None, dweight_ED if need_dw else None, dbias_E


def compute_router_dweight(dlogits_TE: Tensor, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Return only the weight's gradient [E, D] of `router_logits`; not differentiable."""
    if has_logits_kernel(x_TD, weight_ED):
        return _router_logits_bwd(dlogits_TE, x_TD, weight_ED, False, True)[1]
    return (dlogits_TE.T @ x_TD.to(dlogits_TE.dtype)).to(weight_ED.dtype)


def _backward(ctx: Any, dlogits_TE: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of tokens, weight and bias."""
    return compute_input_gradients(
        ctx.needs_input_grad, ctx.bias_dtype, dlogits_TE, *ctx.saved_tensors
    )


_router_logits_op = Op(
    "router_logits",
    run_logits_kernel,
    lambda x_TD, w_ED, _: x_TD.new_empty(x_TD.shape[0], w_ED.shape[0], dtype=torch.float32),
    setup_context=_setup_context,
    backward=_backward,
)


def check_logits_shapes(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> None:
    """Raise a ValueError if the shapes of tokens, weight and bias do not match."""
    E = weight_ED.shape[0]
    if x_TD.shape[1:] != weight_ED.shape[1:] or (bias_E is not None and bias_E.shape != (E,)):
        bias_shape = None if bias_E is None else tuple(bias_E.shape)
        raise ValueError(
            f"x_TD {tuple(x_TD.shape)}, weight_ED {tuple(weight_ED.shape)} and bias_E {bias_shape} "
            "must agree in D and E: pass [T, D], [E, D] and [E]"
        )


def has_logits_kernel(x_TD: Tensor, weight_ED: Tensor) -> bool:
    """Return whether moecore's kernel supports these dtypes and device; otherwise torch is used."""
    wide = weight_ED.dtype in (torch.bfloat16, torch.float32)
    return x_TD.dtype == torch.bfloat16 and wide and can_use_kernel(x_TD, weight_ED)


def router_logits(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias [T, E] in fp32, with the error of an fp32 matmul.

    bf16 tokens with a bf16 or fp32 weight use a tensor-core kernel, whose precision does not depend
    on torch's settings. Other dtypes, and CPU tensors, are cast to fp32 and multiplied by torch. On
    CUDA `torch.backends.cuda.matmul.allow_tf32` then decides the precision. No host sync;
    bit-identical between runs. Gradients have the dtypes of the inputs; the gradient of the bias is
    summed in fp32. Arguments are copied if not contiguous.
    """
    check_logits_shapes(x_TD, weight_ED, bias_E)
    if has_logits_kernel(x_TD, weight_ED):
        return _router_logits_op(x_TD, weight_ED, bias_E)
    return router_logits_ref(x_TD, weight_ED, bias_E)
