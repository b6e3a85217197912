"""The kernels of `quantised.py`, and device functions for `quantised_activation.py`.

A tile of 128 rows that is transposed is four tensors of 32 rows: tensor j has the rows 4i + j. Then
the four bytes of a transposed word are in one thread, and threads exchange words instead of bytes.
"""

from moecore.kernels.rows.e4m3 import (
    abs_without_nan,
    compute_block_scale,
    pack_e4m3_words,
    to_e4m3,
    transpose_e4m3_words,
)
from moecore.kernels.rows.row_tiles import mask_rows_in_use
from moecore.kernels.triton_api import tl, triton


@triton.jit
def store_row_blocks(
    x,  # fp32 [rows, 128]
    values_ptr,  # [R, C] uint8, out
    scales_ptr,  # fp32 [C / 128, R4], out; or [R, C / 128], as `quantise_rows` has them
    rows,  # int64
    row_mask,  # bool, of each row
    block,  # which 128 columns
    scales_stride,  # R4; None for the other layout
    C: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Quantise x, 128 columns of `rows`, to e4m3; store values and a scale per row."""
    scale, inverse = compute_block_scale(tl.max(abs_without_nan(x), axis=1), POWER_OF_TWO)
    at = rows[:, None] * C + block * 128 + tl.arange(0, 128)[None, :]
    tl.store(values_ptr + at, to_e4m3(x * inverse[:, None]), mask=row_mask[:, None])
    if scales_stride is None:
        tl.store(scales_ptr + rows * (C // 128) + block, scale, mask=row_mask)
    else:
        tl.store(scales_ptr + block.to(tl.int64) * scales_stride + rows, scale, mask=row_mask)


@triton.jit(do_not_specialize=["num_blocks"])
def quantise_rows_kernel(
    x_ptr,  # [blocks, 128]
    num_rows_ptr,  # 0-dim int32, or None for all rows
    values_ptr,  # [blocks, 128] uint8, out
    scales_ptr,  # [blocks] fp32, out
    num_blocks,  # of all rows
    ROW_BLOCKS: tl.constexpr,  # D / 128
    POWER_OF_TWO: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Quantise and store BLOCKS blocks of 128 columns, except in rows from num_rows on."""
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    block_mask = blocks < num_blocks
    if num_rows_ptr is not None:
        block_mask = block_mask & (blocks < tl.load(num_rows_ptr).to(tl.int64) * ROW_BLOCKS)
    at = blocks[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + at, mask=block_mask[:, None], other=0.0).to(tl.float32)
    scale, inverse = compute_block_scale(tl.max(abs_without_nan(x), axis=1), POWER_OF_TWO)
    tl.store(values_ptr + at, to_e4m3(x * inverse[:, None]), mask=block_mask[:, None])
    tl.store(scales_ptr + blocks, scale, mask=block_mask)


@triton.jit(do_not_specialize=["num_expert_rows", "num_scale_programs", "scales_stride"])
def gather_row_blocks_kernel(
    values_ptr,  # [S, D] uint8, W apart
    scales_ptr,  # [S, D / 128] fp32, SCALES_W apart
    row_ids_ptr,  # [R] int32, or None: S == R, only scales move
    slots_ptr,  # [S, K] int32, -1 = none
    num_rows_ptr,  # 0-dim int32, or None for R
    out_ptr,  # [R, D] uint8, out
    out_scales_ptr,  # [D / 128, R4] fp32, out
    num_expert_rows,  # R
    num_scale_programs,  # programs that move scales; the rest move values
    scales_stride,  # R4
    D: tl.constexpr,
    W: tl.constexpr,
    SCALES_W: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two
    BLOCK_D: tl.constexpr,
    SCALE_R: tl.constexpr,
    SCALE_B: tl.constexpr,
):
    """Copy BLOCK_D values of a token to its expert rows, or transposed scales of SCALE_R rows."""
    pid = tl.program_id(0)
    if pid < num_scale_programs:
        rows = pid.to(tl.int64) * SCALE_R + tl.arange(0, SCALE_R)
        row_mask = mask_rows_in_use(rows, num_expert_rows, num_rows_ptr)
        sources = rows
        if row_ids_ptr is not None:
            sources = tl.load(row_ids_ptr + rows, mask=row_mask, other=0).to(tl.int64)
        B: tl.constexpr = D // 128
        for start in range(0, B, SCALE_B):
            blocks = start + tl.arange(0, SCALE_B)
            mask = row_mask[:, None] & (blocks < B)[None, :]
            scales = tl.load(scales_ptr + sources[:, None] * SCALES_W + blocks[None, :], mask=mask)
            at = blocks.to(tl.int64)[None, :] * scales_stride + rows[:, None]
            tl.store(out_scales_ptr + at, scales, mask=mask)
    elif row_ids_ptr is not None:
        PARTS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
        source = ((pid - num_scale_programs) // PARTS).to(tl.int64)
        columns = (pid - num_scale_programs) % PARTS * BLOCK_D + tl.arange(0, BLOCK_D)
        choices = tl.arange(0, BLOCK_K)
        slots = tl.load(slots_ptr + source * K + choices, mask=choices < K, other=-1)
        inside = (columns < D) & (tl.max(slots, axis=0) >= 0)
        codes = tl.load(values_ptr + source * W + columns, mask=inside, other=0)
        for k in range(K):
            slot = tl.load(slots_ptr + source * K + k).to(tl.int64)
            tl.store(out_ptr + slot * D + columns, codes, mask=inside & (slot >= 0))


@triton.jit
def _load_words(words_ptr, scales_ptr, row_ids_ptr, rows, row_end, W, SCALES_W: tl.constexpr):
    """Return the first 32 words (int32, four FP8 values each) and the scales of `rows`.

    Rows from row_end on are 0. W and SCALES_W are the row strides in words and scales.
    """
    row_mask = rows < row_end
    sources = rows
    if row_ids_ptr is not None:
        sources = tl.load(row_ids_ptr + rows, mask=row_mask, other=0).to(tl.int64)
    at = sources[:, None] * W + tl.arange(0, 32)[None, :]
    words = tl.load(words_ptr + at, mask=row_mask[:, None], other=0)
    return words, tl.load(scales_ptr + sources * SCALES_W, mask=row_mask, other=0.0)


@triton.jit
def _compute_scale_ratio(scale, target_scale):
    """Return scale / target_scale as fp16 [rows, 1], the factor that rescales values."""
    return tl.div_rn(scale, target_scale).to(tl.float16)[:, None]


@triton.jit(do_not_specialize=["scales_stride"])
def tile_tokens_kernel(
    words_ptr,  # [S, D / 4] int32, W words apart
    scales_ptr,  # fp32 [S, D / 128], SCALES_W apart, or [D / 128, stride]
    row_ids_ptr,  # [R] int32, or None: S == R
    map_ptr,  # [1 + tiles, FIELDS] int32
    out_ptr,  # [tiles, D, 32] int32, out
    out_scales_ptr,  # [tiles, D / 128] fp32, out
    scales_stride,  # from the scales of 128 columns to those of the next
    D: tl.constexpr,
    W: tl.constexpr,
    SCALES_W: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Store 128 columns of 128 expert rows, transposed and rescaled to the largest row scale."""
    B: tl.constexpr = D // 128
    tile, block = tl.program_id(0) // B, tl.program_id(0) % B
    if tile < tl.load(map_ptr):
        at = map_ptr + (1 + tile) * FIELDS
        end = tl.load(at + 2)
        r = tl.load(at + 1).to(tl.int64) + 4 * tl.arange(0, 32)
        words = words_ptr + block * 32
        scales = scales_ptr + block.to(tl.int64) * scales_stride
        w0, s0 = _load_words(words, scales, row_ids_ptr, r, end, W, SCALES_W)
        w1, s1 = _load_words(words, scales, row_ids_ptr, r + 1, end, W, SCALES_W)
        w2, s2 = _load_words(words, scales, row_ids_ptr, r + 2, end, W, SCALES_W)
        w3, s3 = _load_words(words, scales, row_ids_ptr, r + 3, end, W, SCALES_W)
        largest = tl.max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)), axis=0)
        f0, f1 = _compute_scale_ratio(s0, largest), _compute_scale_ratio(s1, largest)
        f2, f3 = _compute_scale_ratio(s2, largest), _compute_scale_ratio(s3, largest)
        o0, o1, o2, o3 = transpose_e4m3_words(w0, w1, w2, w3, f0, f1, f2, f3)
        columns = block * 128 + 4 * tl.arange(0, 32)
        out = out_ptr + (tile.to(tl.int64) * D + columns[:, None]) * 32 + tl.arange(0, 32)[None, :]
        tl.store(out, tl.trans(o0))
        tl.store(out + 32, tl.trans(o1))
        tl.store(out + 64, tl.trans(o2))
        tl.store(out + 96, tl.trans(o3))
        tl.store(out_scales_ptr + tile * B + block, largest)


@triton.jit
def quantise_weights_kernel(
    w_ptr,  # [e, N, K]
    values_ptr,  # [e, N, K] uint8, out; None = not this layout
    words_ptr,  # [e, K, N / 4] int32, out; None = not this layout
    scales_ptr,  # [e, N / 128, K / 128] fp32, out
    N: tl.constexpr,
    K: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Quantise a 128 x 128 block to e4m3; store it in values_ptr and/or transposed in words_ptr."""
    BLOCKS: tl.constexpr = K // 128
    pid = tl.program_id(0)
    row_block = (pid // BLOCKS).to(tl.int64)  # of [e * N / 128]
    columns = pid % BLOCKS * 128 + tl.arange(0, 128)
    at = (row_block * 128 + 4 * tl.arange(0, 32))[:, None] * K + columns[None, :]
    w0 = tl.load(w_ptr + at).to(tl.float32)
    w1 = tl.load(w_ptr + at + K).to(tl.float32)
    w2 = tl.load(w_ptr + at + 2 * K).to(tl.float32)
    w3 = tl.load(w_ptr + at + 3 * K).to(tl.float32)
    low = tl.maximum(abs_without_nan(w0), abs_without_nan(w1))
    high = tl.maximum(abs_without_nan(w2), abs_without_nan(w3))
    amax = tl.max(tl.max(tl.maximum(low, high), axis=0), axis=0)
    scale, inverse = compute_block_scale(amax, POWER_OF_TWO)
    w0, w1, w2, w3 = w0 * inverse, w1 * inverse, w2 * inverse, w3 * inverse
    if values_ptr is not None:
        tl.store(values_ptr + at, to_e4m3(w0))
        tl.store(values_ptr + at + K, to_e4m3(w1))
        tl.store(values_ptr + at + 2 * K, to_e4m3(w2))
        tl.store(values_ptr + at + 3 * K, to_e4m3(w3))
    if words_ptr is not None:
        expert, part = row_block // (N // 128), row_block % (N // 128)
        words_at = (expert * K + columns)[:, None] * (N // 4) + part * 32
        words_at += tl.arange(0, 32)[None, :]
        tl.store(words_ptr + words_at, tl.trans(pack_e4m3_words(w0, w1, w2, w3)))
    tl.store(scales_ptr + row_block * BLOCKS + pid % BLOCKS, scale)
