"""The kernels of `quantised_activation.py`.

Letters: as there.
"""

from functools import partial

from moecore.kernels.common import tl, triton
from moecore.kernels.rows.activation_kernel import activate, activate_with_gradients
from moecore.kernels.rows.quantised_kernel import store_row_blocks, store_token_tile


# `partial` because jit with options, as a decorator, needs Triton to be installed.
@partial(triton.jit, do_not_specialize=["num_expert_rows", "stride"])
def quantised_activation_fwd_kernel(
    h_ptr,  # [R, C]
    weights_ptr,  # [R] fp32, or None for 1
    num_rows_ptr,  # 0-dim int32, or None for R
    values_ptr,  # [R, F] uint8, out
    scales_ptr,  # [F / 128, R4] fp32, out
    num_expert_rows,  # R
    stride,  # R4
    F: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write the weighted activation of BLOCK_R rows and 128 columns."""
    BLOCKS: tl.constexpr = F // 128
    C: tl.constexpr = 2 * F if GATED else F
    block = tl.program_id(0) % BLOCKS
    rows = (tl.program_id(0) // BLOCKS).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    used = rows < num_expert_rows
    if num_rows_ptr is not None:
        used = used & (rows < tl.load(num_rows_ptr))
    at = h_ptr + rows[:, None] * C + block * 128 + tl.arange(0, 128)[None, :]
    gate = tl.load(at, mask=used[:, None], other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(at + F, mask=used[:, None], other=0.0).to(tl.float32)
    a = activate(gate, up, KIND, LIMIT, ALPHA)
    if weights_ptr is not None:
        a = a * tl.load(weights_ptr + rows, mask=used, other=0.0)[:, None]
    store_row_blocks(a, values_ptr, scales_ptr, rows, used, block, stride, F, POWER_OF_TWO)


@triton.jit
def _load_gradients(
    h_ptr,  # [R, C]
    da_ptr,  # [R, F]
    weights_ptr,  # [R] fp32, or None for 1
    sums_ptr,  # [R] fp32, out: the block's part of each row's dweights
    rows,  # int64
    end,  # rows from there on are 0
    block,  # which 128 columns of F
    F: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
):
    """Return the weighted activation, dgate and dup, fp32 [rows, 128]; store dweights' part."""
    C: tl.constexpr = 2 * F if GATED else F
    used = rows < end
    columns = block * 128 + tl.arange(0, 128)[None, :]
    at = h_ptr + rows[:, None] * C + columns
    gate = tl.load(at, mask=used[:, None], other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(at + F, mask=used[:, None], other=0.0).to(tl.float32)
    da = tl.load(da_ptr + rows[:, None] * F + columns, mask=used[:, None], other=0.0)
    da = da.to(tl.float32)
    a, dgate, dup = activate_with_gradients(gate, up, KIND, LIMIT, ALPHA)
    tl.store(sums_ptr + rows, tl.sum(da * a, axis=1), mask=used)
    if weights_ptr is not None:
        weights = tl.load(weights_ptr + rows, mask=used, other=0.0)[:, None]
        a = a * weights
        da = da * weights
    return a, da * dgate, da * dup


@partial(triton.jit, do_not_specialize=["num_expert_rows", "stride"])
def quantised_activation_bwd_kernel(
    h_ptr,  # [R, C]
    da_ptr,  # [R, F]
    weights_ptr,  # [R] fp32, or None for 1
    map_ptr,  # [1 + tiles, FIELDS] int32
    dh_ptr,  # [R, C] uint8, out
    dh_scales_ptr,  # [C / 128, R4] fp32, out
    dh_words_ptr,  # [tiles, C, 32] int32, out
    dh_tile_scales_ptr,  # [tiles, C] fp32, out
    a_words_ptr,  # [tiles, F, 32] int32, out
    a_tile_scales_ptr,  # [tiles, F] fp32, out
    sums_ptr,  # [F / 128, R] fp32, out: parts of dweights
    num_expert_rows,  # R
    stride,  # R4
    F: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    FIELDS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Write all of one row tile and 128 columns of F."""
    BLOCKS: tl.constexpr = F // 128
    C: tl.constexpr = 2 * F if GATED else F
    tile, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    if tile < tl.load(map_ptr):
        at = map_ptr + (1 + tile) * FIELDS
        end = tl.load(at + 2)
        r0 = tl.load(at + 1).to(tl.int64) + 4 * tl.arange(0, 32)
        r1, r2, r3 = r0 + 1, r0 + 2, r0 + 3
        s = sums_ptr + block.to(tl.int64) * num_expert_rows
        w = weights_ptr
        a0, g0, u0 = _load_gradients(
            h_ptr, da_ptr, w, s, r0, end, block, F, KIND, GATED, LIMIT, ALPHA
        )
        a1, g1, u1 = _load_gradients(
            h_ptr, da_ptr, w, s, r1, end, block, F, KIND, GATED, LIMIT, ALPHA
        )
        a2, g2, u2 = _load_gradients(
            h_ptr, da_ptr, w, s, r2, end, block, F, KIND, GATED, LIMIT, ALPHA
        )
        a3, g3, u3 = _load_gradients(
            h_ptr, da_ptr, w, s, r3, end, block, F, KIND, GATED, LIMIT, ALPHA
        )
        inside = block * 128 + tl.arange(0, 128)
        at_a = tile.to(tl.int64) * F + inside
        store_token_tile(a0, a1, a2, a3, a_words_ptr, a_tile_scales_ptr, at_a, POWER_OF_TWO)
        at_h = tile.to(tl.int64) * C + inside
        store_token_tile(g0, g1, g2, g3, dh_words_ptr, dh_tile_scales_ptr, at_h, POWER_OF_TWO)
        out, scales = dh_ptr, dh_scales_ptr
        store_row_blocks(g0, out, scales, r0, r0 < end, block, stride, C, POWER_OF_TWO)
        store_row_blocks(g1, out, scales, r1, r1 < end, block, stride, C, POWER_OF_TWO)
        store_row_blocks(g2, out, scales, r2, r2 < end, block, stride, C, POWER_OF_TWO)
        store_row_blocks(g3, out, scales, r3, r3 < end, block, stride, C, POWER_OF_TWO)
        if GATED:
            at_h += F
            block += BLOCKS
            store_token_tile(u0, u1, u2, u3, dh_words_ptr, dh_tile_scales_ptr, at_h, POWER_OF_TWO)
            store_row_blocks(u0, out, scales, r0, r0 < end, block, stride, C, POWER_OF_TWO)
            store_row_blocks(u1, out, scales, r1, r1 < end, block, stride, C, POWER_OF_TWO)
            store_row_blocks(u2, out, scales, r2, r2 < end, block, stride, C, POWER_OF_TWO)
            store_row_blocks(u3, out, scales, r3, r3 < end, block, stride, C, POWER_OF_TWO)


@partial(triton.jit, do_not_specialize=["num_expert_rows"])
def sum_parts_kernel(
    sums_ptr,  # [parts, R] fp32
    num_rows_ptr,  # 0-dim int32, or None for R
    out_ptr,  # [R] fp32, out
    num_expert_rows,  # R
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Add the parts of each row in their order; 0 from num_rows on."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    used = rows < num_expert_rows
    if num_rows_ptr is not None:
        used = used & (rows < tl.load(num_rows_ptr))
    total = tl.zeros([BLOCK_R], tl.float32)
    at = sums_ptr + rows
    for _ in range(PARTS):
        total += tl.load(at, mask=used, other=0.0)
        at += num_expert_rows
    tl.store(out_ptr + rows, total, mask=rows < num_expert_rows)
