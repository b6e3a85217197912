"""The activation between an expert's two FP8 products, quantised from fp32.

    a[r, f] = act(gate[r, f], up[r, f]) * weight[r]

    backward, in one pass over h and da:
    dh[r]      = da[r] * weight[r] * act'(h[r])
    a[r]       recomputed
    dweight[r] = sum over f of da[r, f] * act(h[r])[f]

Letters: R expert rows (length), F hidden dim, C columns of h: 2F of an activation with a gate,
otherwise F. Gate columns come first, then up columns. The forward may also write h in FP8, in the
format of `quantise_rows`, and then the backward reads that.

Bytes moved per expert row, with b bytes per element of h (1 if backward reads FP8): forward C * b +
F, and C to write h in FP8; backward C * b + F * b + C + F. The scales add 1/32 of the FP8 bytes,
the parts of dweights 1/16 of F.
"""

import torch
from torch import Tensor

from moecore.kernels.common import can_use_kernel, cdiv, launch
from moecore.kernels.rows.activation import (
    ActivationOptions,
    activate_rows,
    weighted_activation_bwd_ref,
)
from moecore.kernels.rows.activation_kernel import activate, activate_with_gradients
from moecore.kernels.rows.e4m3 import BLOCK, from_e4m3
from moecore.kernels.rows.quantised import (
    check_multiple_of_128,
    make_empty_row_blocks,
    make_empty_rows,
    quantise_row_blocks_ref,
    quantise_rows_ref,
)
from moecore.kernels.rows.quantised_kernel import store_row_blocks
from moecore.kernels.rows.record import Rows
from moecore.kernels.rows.row_tiles import mask_rows_in_use
from moecore.kernels.rows.scaling import Blocks
from moecore.kernels.triton_api import tl, triton

FWD_PROGRAM = {"BLOCK_R": 32, "num_warps": 4}  # 32 elements per thread
BWD_PROGRAM = {"BLOCK_R": 16, "num_warps": 4}  # 16 elements per thread of each of three gradients
SUM_ROWS = 256  # whose parts a program adds


def quantised_activation_ref(
    h_RC: Tensor,
    weights_R: Tensor | None,
    options: ActivationOptions,
    *,
    power_of_two: bool,
    quantise_h: bool = False,
) -> tuple[Blocks, Rows | None]:
    """Compute `quantised_activation` in plain PyTorch."""
    h = quantise_rows_ref(h_RC, power_of_two=power_of_two) if quantise_h else None
    a_RF = activate_rows(h_RC, options)
    if weights_R is not None:
        a_RF = a_RF * weights_R[:, None]
    return quantise_row_blocks_ref(a_RF, power_of_two), h


def quantised_activation_bwd_ref(
    h: Rows,
    da_RF: Tensor,
    weights_R: Tensor | None,
    num_rows: Tensor | None,
    options: ActivationOptions,
    *,
    power_of_two: bool,
) -> tuple[Blocks, Tensor, Blocks]:
    """Compute `quantised_activation_bwd` in plain PyTorch."""
    wide = h.widen().float(), da_RF.float()  # in which nothing is rounded before it is quantised
    dh_RC, dweights_R, a_RF = weighted_activation_bwd_ref(*wide, weights_R, num_rows, options)
    dh, a = (quantise_row_blocks_ref(x, power_of_two) for x in (dh_RC, a_RF))
    return dh, dweights_R, a


@triton.jit
def load_h(h_ptr, h_scales_ptr, rows, row_mask, block, wide_dtype: tl.constexpr, C: tl.constexpr):
    """Return 128 columns of h [R, C] in fp32; FP8 h is dequantised and rounded to `wide_dtype`."""
    at = rows[:, None] * C + block * 128 + tl.arange(0, 128)[None, :]
    h = tl.load(h_ptr + at, mask=row_mask[:, None], other=0)
    if h_scales_ptr is not None:
        scales = tl.load(h_scales_ptr + rows * (C // 128) + block, mask=row_mask, other=0.0)
        h = (from_e4m3(h) * scales[:, None]).to(wide_dtype)
    return h.to(tl.float32)


@triton.jit(do_not_specialize=["num_expert_rows", "scales_stride"])
def quantised_activation_fwd_kernel(
    h_ptr,  # [R, C]
    weights_ptr,  # [R] fp32, or None for 1
    num_rows_ptr,  # 0-dim int32, or None for R
    values_ptr,  # [R, F] uint8, out
    scales_ptr,  # [F / 128, R4] fp32, out
    h_values_ptr,  # [R, C] uint8, out, or None
    h_scales_ptr,  # [R, C / 128] fp32, out, or None
    num_expert_rows,  # R
    scales_stride,  # R4
    F: tl.constexpr,
    ACT: tl.constexpr,  # ActivationConstants
    POWER_OF_TWO: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Quantise 128 columns of the weighted activation, and h too if h_values_ptr is not None."""
    BLOCKS: tl.constexpr = F // 128
    C: tl.constexpr = 2 * F if ACT.GATED else F
    block = tl.program_id(0) % BLOCKS
    rows = (tl.program_id(0) // BLOCKS).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = mask_rows_in_use(rows, num_expert_rows, num_rows_ptr)
    at = h_ptr + rows[:, None] * C + block * 128 + tl.arange(0, 128)[None, :]
    gate = tl.load(at, mask=mask[:, None], other=0.0).to(tl.float32)
    up = gate
    if ACT.GATED:
        up = tl.load(at + F, mask=mask[:, None], other=0.0).to(tl.float32)
    if h_values_ptr is not None:
        store_row_blocks(gate, h_values_ptr, h_scales_ptr, rows, mask, block, None, C, POWER_OF_TWO)
        if ACT.GATED:
            of_up = block + BLOCKS
            store_row_blocks(
                up, h_values_ptr, h_scales_ptr, rows, mask, of_up, None, C, POWER_OF_TWO
            )
    a = activate(gate, up, ACT)
    if weights_ptr is not None:
        a = a * tl.load(weights_ptr + rows, mask=mask, other=0.0)[:, None]
    store_row_blocks(a, values_ptr, scales_ptr, rows, mask, block, scales_stride, F, POWER_OF_TWO)


@triton.jit(do_not_specialize=["num_expert_rows", "scales_stride"])
def quantised_activation_bwd_kernel(
    h_ptr,  # [R, C], uint8 with scales
    h_scales_ptr,  # [R, C / 128] fp32, or None
    da_ptr,  # [R, F]
    weights_ptr,  # [R] fp32, or None for 1
    num_rows_ptr,  # 0-dim int32, or None for R
    dh_ptr,  # [R, C] uint8, out
    dh_scales_ptr,  # [C / 128, R4] fp32, out
    a_ptr,  # [R, F] uint8, out
    a_scales_ptr,  # [F / 128, R4] fp32, out
    partial_dweights_ptr,  # [F / 128, R] fp32, out: parts of dweights
    num_expert_rows,  # R
    scales_stride,  # R4
    F: tl.constexpr,
    ACT: tl.constexpr,  # ActivationConstants
    POWER_OF_TWO: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write FP8 gradients of h, FP8 activations, and weights' gradients per 128 columns."""
    BLOCKS: tl.constexpr = F // 128
    C: tl.constexpr = 2 * F if ACT.GATED else F
    block = tl.program_id(0) % BLOCKS
    rows = (tl.program_id(0) // BLOCKS).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = mask_rows_in_use(rows, num_expert_rows, num_rows_ptr)
    at = da_ptr + rows[:, None] * F + block * 128 + tl.arange(0, 128)[None, :]
    da = tl.load(at, mask=mask[:, None], other=0.0)
    wide: tl.constexpr = da.dtype
    da = da.to(tl.float32)
    gate = load_h(h_ptr, h_scales_ptr, rows, mask, block, wide, C)
    up = gate
    if ACT.GATED:
        up = load_h(h_ptr, h_scales_ptr, rows, mask, block + BLOCKS, wide, C)
    a, dgate, dup = activate_with_gradients(gate, up, ACT)
    at = partial_dweights_ptr + block.to(tl.int64) * num_expert_rows + rows
    tl.store(at, tl.sum(da * a, axis=1), mask=mask)
    if weights_ptr is not None:
        weights = tl.load(weights_ptr + rows, mask=mask, other=0.0)[:, None]
        a = a * weights
        da = da * weights
    store_row_blocks(a, a_ptr, a_scales_ptr, rows, mask, block, scales_stride, F, POWER_OF_TWO)
    dgate = da * dgate
    store_row_blocks(
        dgate, dh_ptr, dh_scales_ptr, rows, mask, block, scales_stride, C, POWER_OF_TWO
    )
    if ACT.GATED:
        dup, block = da * dup, block + BLOCKS
        store_row_blocks(
            dup, dh_ptr, dh_scales_ptr, rows, mask, block, scales_stride, C, POWER_OF_TWO
        )


@triton.jit(do_not_specialize=["num_expert_rows"])
def sum_parts_kernel(
    parts_ptr, num_rows_ptr, out_ptr, num_expert_rows, PARTS: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Sum [PARTS, R] over the first dim in order, for BLOCK_R rows; write 0 from num_rows on."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_mask = mask_rows_in_use(rows, num_expert_rows, num_rows_ptr)
    total = tl.zeros([BLOCK_R], tl.float32)
    at = parts_ptr + rows
    for _ in range(PARTS):
        total += tl.load(at, mask=row_mask, other=0.0)
        at += num_expert_rows
    tl.store(out_ptr + rows, total, mask=rows < num_expert_rows)


def quantised_activation(
    h_RC: Tensor,
    weights_R: Tensor | None,
    num_rows: Tensor | None,
    options: ActivationOptions,
    *,
    power_of_two: bool,
    quantise_h: bool = False,
) -> tuple[Blocks, Rows | None]:
    """Return act(h) * weight of each row in FP8, quantised from fp32. No autograd, no host sync.

    The results are an operand [R, F] with a scale per 1 x 128, and h by `quantise_rows` (None
    unless `quantise_h`). Rows from num_rows on are uninitialised. h_RC, FC1's output, is contiguous
    bf16, fp16 or fp32, gate columns first; F % 128 = 0. weights_R (contiguous) and num_rows are as
    in `weighted_activation`. Scales are powers of two if `power_of_two`, otherwise amax / 448.
    """
    R, C = h_RC.shape
    F = C // 2 if options.gated else C
    check_multiple_of_128("F", F)
    if not can_use_kernel(h_RC):
        return quantised_activation_ref(
            h_RC, weights_R, options, power_of_two=power_of_two, quantise_h=quantise_h
        )
    out, h = make_empty_row_blocks(h_RC, R, F), None
    h_out: tuple[Tensor | None, Tensor | None] = (None, None)
    if quantise_h:
        h = make_empty_rows(h_RC)
        h_out = h.values.view(torch.uint8), h.scales
    outputs = (out.values.view(torch.uint8), out.scales, *h_out)
    args = (h_RC, weights_R, num_rows, *outputs, R, out.scales.shape[1])
    grid = cdiv(R, FWD_PROGRAM["BLOCK_R"]) * (F // BLOCK)
    constants = dict(F=F, ACT=options.constants, POWER_OF_TWO=power_of_two, **FWD_PROGRAM)
    launch(quantised_activation_fwd_kernel, grid, *args, **constants)
    return out, h


def quantised_activation_bwd(
    h: Rows,
    da_RF: Tensor,
    weights_R: Tensor | None,
    num_rows: Tensor | None,
    options: ActivationOptions,
    *,
    power_of_two: bool,
) -> tuple[Blocks, Tensor, Blocks]:
    """Return (dh, dweights, a): gradients of h and weights, and act(h) * weight recomputed.

    h (in FP8 or not) and da_RF are contiguous and of one dtype. dh and a are FP8 operands with a
    scale per 1 x 128, uninitialised from row num_rows on. dweights is fp32, zero from num_rows on.
    No autograd, no host sync; the same bits in every run.
    """
    (R, C), F = h.values.shape, da_RF.shape[1]
    check_multiple_of_128("F", F)
    if not can_use_kernel(h.values, da_RF):
        return quantised_activation_bwd_ref(
            h, da_RF, weights_R, num_rows, options, power_of_two=power_of_two
        )
    dh, a = make_empty_row_blocks(da_RF, R, C), make_empty_row_blocks(da_RF, R, F)
    dweights_R = da_RF.new_empty(R, dtype=torch.float32)
    sums = da_RF.new_empty(F // BLOCK, R, dtype=torch.float32)
    if F:
        outputs = (dh.values.view(torch.uint8), dh.scales, a.values.view(torch.uint8), a.scales)
        h_in = h.values if h.scales is None else h.values.view(torch.uint8)
        args = (h_in, h.scales, da_RF, weights_R, num_rows, *outputs, sums, R, dh.scales.shape[1])
        grid = cdiv(R, BWD_PROGRAM["BLOCK_R"]) * (F // BLOCK)
        constants = dict(F=F, ACT=options.constants, POWER_OF_TWO=power_of_two, **BWD_PROGRAM)
        launch(quantised_activation_bwd_kernel, grid, *args, **constants)
        sum_args, grid = (sums, num_rows, dweights_R, R), cdiv(R, SUM_ROWS)
        launch(sum_parts_kernel, grid, *sum_args, PARTS=F // BLOCK, BLOCK_R=SUM_ROWS)
    return dh, dweights_R, a
