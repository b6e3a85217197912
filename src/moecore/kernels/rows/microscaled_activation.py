"""The activation between an expert's two products in MXFP8, quantised by the same kernel.

    a      = act(h) * weight, as `weighted_activation` rounds it
    dh, a  = gradients of h and the activation, as `weighted_activation_bwd` rounds them

Operands have the bits of `quantise_microscaled` of these rows. Backward reads dh summed over
columns, and dh and a summed over rows: one pass over h and da writes the three.

Letters: R expert rows, P with each expert's rows padded to full blocks, F hidden dim, C columns of
h: 2F of an activation with a gate, otherwise F. Bytes read and written per row, with b per element
of h and v per quantised value: forward C * b + F * v, backward (C + F) * b + (2C + F) * v.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecore.kernels.common import cdiv, launch
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.activation_kernel import activate_with_gradients
from moecore.kernels.rows.e4m3 import (
    FP8,
    abs_without_nan,
    compute_block_scale,
    from_e4m3,
    to_e4m3,
)
from moecore.kernels.rows.microscaling import FORWARD, PACKED_FORWARD, get_emulated_dtype
from moecore.kernels.rows.quantised_activation import SUM_ROWS, sum_parts_kernel
from moecore.kernels.rows.row_tiles import mask_rows_in_use
from moecore.kernels.rows.scaling import Blocks
from moecore.kernels.triton_api import tl, triton

PROGRAM = {"B": 64, "num_warps": 4}  # 16 elements per thread
SIZE = 32  # elements of a block


class ExpertOrder(NamedTuple):
    """Number of experts, and expert rows in a layout that pads each expert to full blocks."""

    num_experts: int
    pack: bool  # whether operands are bytes, as in `quantise_microscaled`
    # int64, only read in backward: expert row of each row of the padded layout, -1 = zeros
    source_rows_P: Tensor | None = None


@triton.jit
def _store_blocks(x, values_ptr, values_at, scales_ptr, scales_at, mask, PACK: tl.constexpr):
    """Quantise x, fp32 [G, B, 32], and store values, and with PACK E8M0 scales; mask is [G, B]."""
    scale, inverse = compute_block_scale(tl.max(abs_without_nan(x), 2), True)
    code = to_e4m3(x * inverse[:, :, None])
    if PACK:
        tl.store(values_ptr + values_at, code, mask=mask[:, :, None])
        exponent = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
        tl.store(scales_ptr + scales_at, exponent, mask=mask)
    else:
        wide = (from_e4m3(code) * scale[:, :, None]).to(values_ptr.dtype.element_ty)
        tl.store(values_ptr + values_at, wide, mask=mask[:, :, None])


@triton.jit(do_not_specialize=["R", "M"])
def microscaled_activation_kernel(
    h_ptr,  # [R, C]
    da_ptr,  # [R, F]; None = forward, whose `rows` are a
    weights_ptr,  # [R] fp32, or None for 1
    num_rows_ptr,  # 0-dim int32, or None for R; only read in forward
    source_rows_ptr,  # [M] int64, row of h of each operand row, -1 = zeros; None in forward, M = R
    # values and with PACK block scales, out; in backward `rows` are dh [R, C]
    rows_ptr,
    rows_scales_ptr,
    dh_ptr,  # [C, M], without PACK [M, C]
    dh_scales_ptr,
    a_ptr,  # [F, M], without PACK [M, F]
    a_scales_ptr,
    parts_ptr,  # fp32 [F / B, R], out: parts of dweights
    R,
    M,
    F: tl.constexpr,
    ACT: tl.constexpr,  # ActivationConstants
    PACK: tl.constexpr,
    SIZE: tl.constexpr,  # elements of a block
    B: tl.constexpr,  # columns of a program
):
    """Write all operands of SIZE rows and B columns of a."""
    C: tl.constexpr = 2 * F if ACT.GATED else F
    TILES: tl.constexpr = (F + B - 1) // B
    tile, start = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES * B
    places = tile * SIZE + tl.arange(0, SIZE)
    if source_rows_ptr is None:
        row = tl.where(mask_rows_in_use(places, M, num_rows_ptr), places, -1)
    else:
        row = tl.load(source_rows_ptr + places)
    block = start // SIZE + tl.arange(0, B // SIZE)
    column = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    in_block = (row >= 0)[:, None] & (block < F // SIZE)[None, :]
    inside = in_block[:, :, None]
    at = row[:, None, None] * C + column[None, :, :]
    for part in tl.static_range(3):  # gradients of gate and up, and a; h is in L1 after the first
        if part == 2 or (da_ptr is not None and (part == 0 or ACT.GATED)):
            gate = tl.load(h_ptr + at, mask=inside, other=0.0).to(tl.float32)
            up = gate
            if ACT.GATED:
                up = tl.load(h_ptr + at + F, mask=inside, other=0.0).to(tl.float32)
            a, dgate, dup = activate_with_gradients(gate, up, ACT)
            weights = 1.0
            if weights_ptr is not None:
                weights = tl.load(weights_ptr + row, mask=row >= 0, other=0.0)[:, None, None]
            x = a * weights
            if da_ptr is not None:
                from_da = da_ptr + row[:, None, None] * F + column[None, :, :]
                da = tl.load(from_da, mask=inside, other=0.0).to(tl.float32)
                if part != 2:
                    x = da * weights * (dgate if part == 0 else dup)
                else:
                    sums = tl.sum(tl.sum(da * a, 2), 1)
                    tl.store(parts_ptr + (start // B).to(tl.int64) * R + row, sums, mask=row >= 0)
            x = x.to(h_ptr.dtype.element_ty).to(tl.float32)
            K = F if part == 2 else C
            offset = F if part == 1 else 0
            if part != 2 or da_ptr is None:
                to = row[:, None, None] * K + offset + column[None, :, :]
                scales_to = row[:, None] * (K // SIZE) + offset // SIZE + block[None, :]
                _store_blocks(x, rows_ptr, to, rows_scales_ptr, scales_to, in_block, PACK)
            if da_ptr is not None:
                x = tl.reshape(tl.trans(tl.reshape(x, (SIZE, B))), (B, 1, SIZE))
                k = (start + tl.arange(0, B)).to(tl.int64)[:, None]
                scales_to = (k + offset) * (M // SIZE) + tile
                if PACK:
                    to = (k + offset)[:, :, None] * M + places[None, None, :]
                else:
                    to = (k + offset)[:, :, None] + places[None, None, :] * K
                if part != 2:
                    _store_blocks(x, dh_ptr, to, dh_scales_ptr, scales_to, k < F, PACK)
                else:
                    _store_blocks(x, a_ptr, to, a_scales_ptr, scales_to, k < F, PACK)


def _make_empty(x: Tensor, shape: tuple[int, int], order: ExpertOrder, transposed: bool) -> Blocks:
    """Return an uninitialised operand [M, K], packed [K, M] if `transposed`, on x's device."""
    if not order.pack:
        scales = x.new_ones(order.num_experts + 1, dtype=torch.float32)
        return Blocks(x.new_empty(shape, dtype=get_emulated_dtype(x)), scales, FORWARD)
    M, K = shape[::-1] if transposed else shape
    scales = x.new_empty(M, K // SIZE, dtype=torch.uint8)
    return Blocks(x.new_empty(M, K, dtype=FP8), scales, PACKED_FORWARD)


def microscaled_activation(
    h_RC: Tensor,
    da_RF: Tensor | None,
    weights_R: Tensor | None,
    num_rows: Tensor | None,
    options: ActivationOptions,
    order: ExpertOrder,
) -> tuple[list[Blocks], Tensor | None]:
    """Return the MXFP8 operand of act(h) * weight, or with da_RF the results of backward.

    These are three operands and the gradient of weights: the gradient of h [R, C] for sums over
    columns, and for sums over the P rows of the padded layout the gradient of h and the activation.
    The gradient of weights is fp32, zero from num_rows on. Rows [R] of no expert are uninitialised.
    The same bits in every run. No autograd, no host sync.

    Args:
        h_RC, da_RF: contiguous, of one dtype, gate columns first. da_RF None = forward.
        weights_R, num_rows, options: as in `weighted_activation`. Experts have num_rows rows.
    """
    R, C = h_RC.shape
    F = C // 2 if options.gated else C
    rows_P: Any = order.source_rows_P
    M = R if da_RF is None else rows_P.shape[0]
    shapes = [(R, F)] if da_RF is None else [(R, C), (M, C), (M, F)]
    operands = [_make_empty(h_RC, shape, order, i > 0) for i, shape in enumerate(shapes)]
    parts = dweights_R = None
    if da_RF is not None:
        parts = da_RF.new_empty(cdiv(F, PROGRAM["B"]), R, dtype=torch.float32)
        dweights_R = da_RF.new_empty(R, dtype=torch.float32)
    outputs: list[Tensor | None] = []
    for x in operands:
        outputs += x.values.view(torch.uint8) if order.pack else x.values, x.scales
    outputs += [None] * (6 - len(outputs))
    inputs = h_RC, da_RF, weights_R, num_rows, None if da_RF is None else rows_P
    launch(
        microscaled_activation_kernel,
        cdiv(M, SIZE) * cdiv(F, PROGRAM["B"]),
        *(*inputs, *outputs, parts, R, M),
        F=F,
        ACT=options.constants,
        PACK=order.pack,
        SIZE=SIZE,
        **PROGRAM,
    )
    if parts is not None:
        args, grid = (parts, num_rows, dweights_R, R), cdiv(R, SUM_ROWS)
        launch(sum_parts_kernel, grid, *args, PARTS=len(parts), BLOCK_R=SUM_ROWS)
    return operands, dweights_R
