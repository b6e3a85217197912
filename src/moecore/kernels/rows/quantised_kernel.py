"""The kernels of `quantised.py`, and device functions for `quantised_activation_kernel.py`.

Letters: as there.

A tile of 128 tokens is held as four tensors of 32 rows: tensor j has the rows 4i + j. Then the four
bytes of a transposed word lie in one thread, and words instead of bytes change places between
threads.
"""

from functools import partial

from moecore.kernels.common import tl, triton
from moecore.kernels.rows.e4m3 import block_scale, from_e4m3, magnitude, to_e4m3, to_words


@triton.jit
def store_token_tile(
    x0,  # fp32 [32, 128]: rows 0, 4, 8, ...
    x1,
    x2,
    x3,
    words_ptr,  # [tiles, C, 32] int32, out
    scales_ptr,  # [tiles, C] fp32, out
    columns,  # [128] int64, of [tiles * C]
    POWER_OF_TWO: tl.constexpr,
):
    """Quantise each column and store it as 128 neighbouring bytes."""
    low = tl.maximum(magnitude(x0), magnitude(x1))
    high = tl.maximum(magnitude(x2), magnitude(x3))
    scale, inverse = block_scale(tl.max(tl.maximum(low, high), axis=0), POWER_OF_TWO)
    inverse = inverse[None, :]
    words = to_words(x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse)
    at = columns[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(words_ptr + at, tl.trans(words))
    tl.store(scales_ptr + columns, scale)


@triton.jit
def store_row_blocks(
    x,  # fp32 [rows, 128]
    values_ptr,  # [R, C] uint8, out
    scales_ptr,  # [C / 128, R4] fp32, out
    rows,  # int64
    used,  # bool, of each row
    block,  # which 128 columns
    stride,  # R4
    C: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Quantise the part of each row and store it."""
    scale, inverse = block_scale(tl.max(magnitude(x), axis=1), POWER_OF_TWO)
    at = rows[:, None] * C + block * 128 + tl.arange(0, 128)[None, :]
    tl.store(values_ptr + at, to_e4m3(x * inverse[:, None]), mask=used[:, None])
    tl.store(scales_ptr + block.to(tl.int64) * stride + rows, scale, mask=used)


# `partial` because jit with options, as a decorator, needs Triton to be installed.
@partial(triton.jit, do_not_specialize=["num_blocks"])
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
    """Write BLOCKS blocks of 128 columns."""
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    used = blocks < num_blocks
    if num_rows_ptr is not None:
        used = used & (blocks < tl.load(num_rows_ptr).to(tl.int64) * ROW_BLOCKS)
    at = blocks[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + at, mask=used[:, None], other=0.0).to(tl.float32)
    scale, inverse = block_scale(tl.max(magnitude(x), axis=1), POWER_OF_TWO)
    tl.store(values_ptr + at, to_e4m3(x * inverse[:, None]), mask=used[:, None])
    tl.store(scales_ptr + blocks, scale, mask=used)


@partial(triton.jit, do_not_specialize=["num_expert_rows", "num_scale", "stride"])
def gather_row_blocks_kernel(
    values_ptr,  # [S, D] uint8, W apart
    scales_ptr,  # [S, D / 128] fp32, SCALES_W apart
    row_ids_ptr,  # [R] int32, or None: S == R, only scales move
    slots_ptr,  # [S, K] int32, -1 = none
    num_rows_ptr,  # 0-dim int32, or None for R
    out_ptr,  # [R, D] uint8, out
    out_scales_ptr,  # [D / 128, R4] fp32, out
    num_expert_rows,  # R
    num_scale,  # programs that move scales; the rest move values
    stride,  # R4
    D: tl.constexpr,
    W: tl.constexpr,
    SCALES_W: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two
    BLOCK_D: tl.constexpr,
    SCALE_R: tl.constexpr,
    SCALE_B: tl.constexpr,
):
    """Write the scales of SCALE_R expert rows, or the values of one source row."""
    pid = tl.program_id(0)
    if pid < num_scale:
        rows = pid.to(tl.int64) * SCALE_R + tl.arange(0, SCALE_R)
        used = rows < num_expert_rows
        if num_rows_ptr is not None:
            used = used & (rows < tl.load(num_rows_ptr))
        sources = rows
        if row_ids_ptr is not None:
            sources = tl.load(row_ids_ptr + rows, mask=used, other=0).to(tl.int64)
        B: tl.constexpr = D // 128
        for start in range(0, B, SCALE_B):
            blocks = start + tl.arange(0, SCALE_B)
            mask = used[:, None] & (blocks < B)[None, :]
            scales = tl.load(scales_ptr + sources[:, None] * SCALES_W + blocks[None, :], mask=mask)
            at = blocks.to(tl.int64)[None, :] * stride + rows[:, None]
            tl.store(out_scales_ptr + at, scales, mask=mask)
    elif row_ids_ptr is not None:
        PARTS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
        source = ((pid - num_scale) // PARTS).to(tl.int64)
        columns = (pid - num_scale) % PARTS * BLOCK_D + tl.arange(0, BLOCK_D)
        choices = tl.arange(0, BLOCK_K)
        slots = tl.load(slots_ptr + source * K + choices, mask=choices < K, other=-1)
        inside = (columns < D) & (tl.max(slots, axis=0) >= 0)
        codes = tl.load(values_ptr + source * W + columns, mask=inside, other=0)
        for k in range(K):
            slot = tl.load(slots_ptr + source * K + k).to(tl.int64)
            tl.store(out_ptr + slot * D + columns, codes, mask=inside & (slot >= 0))


@triton.jit
def _load_wide(
    values_ptr,  # [S, D]; uint8 with scales
    scales_ptr,  # [S, D / 128] fp32, or None
    row_ids_ptr,  # [R] int32, or None: S == R
    rows,  # int64
    end,  # rows from there on are 0
    block,  # which 128 columns
    W: tl.constexpr,
    SCALES_W: tl.constexpr,
):
    """Return fp32 [rows, 128]."""
    used = rows < end
    sources = rows
    if row_ids_ptr is not None:
        sources = tl.load(row_ids_ptr + rows, mask=used, other=0).to(tl.int64)
    columns = block * 128 + tl.arange(0, 128)
    at = values_ptr + sources[:, None] * W + columns[None, :]
    x = tl.load(at, mask=used[:, None], other=0)
    if scales_ptr is not None:
        scales = tl.load(scales_ptr + sources * SCALES_W + block, mask=used, other=0.0)
        return from_e4m3(x) * scales[:, None]
    else:
        return x.to(tl.float32)


@triton.jit
def tile_tokens_kernel(
    values_ptr,  # [S, D], W apart; uint8 with scales
    scales_ptr,  # [S, D / 128] fp32, SCALES_W apart, or None
    row_ids_ptr,  # [R] int32, or None: S == R
    map_ptr,  # [1 + tiles, FIELDS] int32
    words_ptr,  # [tiles, D, 32] int32, out
    tile_scales_ptr,  # [tiles, D] fp32, out
    D: tl.constexpr,
    W: tl.constexpr,
    SCALES_W: tl.constexpr,
    FIELDS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Write 128 columns of one row tile."""
    B: tl.constexpr = D // 128
    tile, block = tl.program_id(0) // B, tl.program_id(0) % B
    if tile < tl.load(map_ptr):
        at = map_ptr + (1 + tile) * FIELDS
        end = tl.load(at + 2)
        rows = tl.load(at + 1).to(tl.int64) + 4 * tl.arange(0, 32)
        x0 = _load_wide(values_ptr, scales_ptr, row_ids_ptr, rows, end, block, W, SCALES_W)
        x1 = _load_wide(values_ptr, scales_ptr, row_ids_ptr, rows + 1, end, block, W, SCALES_W)
        x2 = _load_wide(values_ptr, scales_ptr, row_ids_ptr, rows + 2, end, block, W, SCALES_W)
        x3 = _load_wide(values_ptr, scales_ptr, row_ids_ptr, rows + 3, end, block, W, SCALES_W)
        columns = tile.to(tl.int64) * D + block * 128 + tl.arange(0, 128)
        store_token_tile(x0, x1, x2, x3, words_ptr, tile_scales_ptr, columns, POWER_OF_TWO)


@triton.jit
def quantise_weights_kernel(
    w_ptr,  # [e, N, K]
    values_ptr,  # [e, N, K] uint8, out
    words_ptr,  # [e, K, N / 4] int32, out
    scales_ptr,  # [e, N / 128, K / 128] fp32, out
    N: tl.constexpr,
    K: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Write one block of 128 x 128, in both layouts."""
    BLOCKS: tl.constexpr = K // 128
    pid = tl.program_id(0)
    row_block = (pid // BLOCKS).to(tl.int64)  # of [e * N / 128]
    columns = pid % BLOCKS * 128 + tl.arange(0, 128)
    at = (row_block * 128 + 4 * tl.arange(0, 32))[:, None] * K + columns[None, :]
    w0 = tl.load(w_ptr + at).to(tl.float32)
    w1 = tl.load(w_ptr + at + K).to(tl.float32)
    w2 = tl.load(w_ptr + at + 2 * K).to(tl.float32)
    w3 = tl.load(w_ptr + at + 3 * K).to(tl.float32)
    low = tl.maximum(magnitude(w0), magnitude(w1))
    high = tl.maximum(magnitude(w2), magnitude(w3))
    amax = tl.max(tl.max(tl.maximum(low, high), axis=0), axis=0)
    scale, inverse = block_scale(amax, POWER_OF_TWO)
    w0, w1, w2, w3 = w0 * inverse, w1 * inverse, w2 * inverse, w3 * inverse
    tl.store(values_ptr + at, to_e4m3(w0))
    tl.store(values_ptr + at + K, to_e4m3(w1))
    tl.store(values_ptr + at + 2 * K, to_e4m3(w2))
    tl.store(values_ptr + at + 3 * K, to_e4m3(w3))
    expert, part = row_block // (N // 128), row_block % (N // 128)
    words_at = (expert * K + columns)[:, None] * (N // 4) + part * 32 + tl.arange(0, 32)[None, :]
    tl.store(words_ptr + words_at, tl.trans(to_words(w0, w1, w2, w3)))
    tl.store(scales_ptr + row_block * BLOCKS + pid % BLOCKS, scale)
