"""The kernels of `microscaled.py`.

A program handles G x B blocks of ROWS x COLUMNS elements, as ROWS tensors [G, B, COLUMNS]: tensor i
has row i of each block. So each thread has all rows of its columns, and needs no exchange for the
transform, a block's largest magnitude and the two values of a byte.

Divisions are IEEE's (`div_rn`), as PyTorch's. A product that is added to is exact, so the compiler
may fuse both operations without changing a bit.
"""

from moecore.kernels.rows.e4m3 import abs_without_nan, compute_block_scale, from_e4m3, to_e4m3
from moecore.kernels.rows.microscaling import SEED, SIGNS
from moecore.kernels.triton_api import tl, triton

SIGN_BITS, FIRST_DRAW = tl.constexpr(SIGNS), tl.constexpr(SEED)
VALUES, PACKED_ROWS, PACKED_COLUMNS = (tl.constexpr(i) for i in range(3))  # what is stored


@triton.jit
def _apply_hadamard(x):  # 16 tensors of fp32: rows times their signs
    """Return the Hadamard transform of 16 rows (a tuple of fp32), like `apply_hadamard`."""
    for k in tl.static_range(4):
        sums: tl.tuple = ()
        for i in tl.static_range(16):
            if i & (8 >> k) == 0:
                total = x[i] + x[i + (8 >> k)]
            else:
                total = x[i - (8 >> k)] - x[i]
            sums += (total * (0.25 if k == 3 else 1.0),)
        x = sums
    return x


@triton.jit
def _load_blocks(
    x_ptr,  # [T, K], `row_stride` apart
    source_rows_ptr,  # [M] int64, -1 = zeros, or None: row i is x's row i
    T,
    M,
    row_stride,
    K: tl.constexpr,
    HADAMARD: tl.constexpr,  # whether each 16 rows are transformed
    ROWS: tl.constexpr,  # of a block
    COLUMNS: tl.constexpr,  # of a block
    G: tl.constexpr,  # blocks of a program, one below the other
    B: tl.constexpr,  # blocks of a program, side by side
):
    """Load G x B blocks of x; return first rows [G], block columns [B], columns, and x's rows.

    The columns are [B, COLUMNS]. x is a tuple of ROWS fp32 tensors [G, B, COLUMNS].
    """
    TILES: tl.constexpr = (K + B * COLUMNS - 1) // (B * COLUMNS)
    first = (tl.program_id(0) // TILES * G + tl.arange(0, G)).to(tl.int64) * ROWS
    blocks = tl.program_id(0) % TILES * B + tl.arange(0, B)
    columns = blocks[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x: tl.tuple = ()
    for i in tl.static_range(ROWS):
        row = first + i
        if source_rows_ptr is not None:
            row = tl.load(source_rows_ptr + row, mask=row < M, other=-1).to(tl.int64)
        inside = ((row >= 0) & (row < T))[:, None, None] & (columns < K)[None, :, :]
        at = x_ptr + row[:, None, None] * row_stride + columns[None, :, :]
        loaded = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if HADAMARD:
            loaded *= 1.0 if (SIGN_BITS >> i) & 1 else -1.0
        x += (loaded,)
    if HADAMARD:
        x = _apply_hadamard(x)
    return first, blocks, columns, x


@triton.jit
def _find_experts(experts_ptr, first_rows, M, rows_per_expert):
    """Return the expert of each block; without experts_ptr, each has rows_per_expert rows."""
    if experts_ptr is not None:
        return tl.load(experts_ptr + first_rows, mask=first_rows < M, other=0)
    else:
        return tl.minimum(first_rows, M - 1) // rows_per_expert


@triton.jit(do_not_specialize=["T", "M", "rows_per_expert"])
def finite_amax_kernel(
    x_ptr,  # [T, K], `row_stride` apart
    source_rows_ptr,  # [M] int64, or None
    experts_ptr,  # [M] int64, or None
    amax_ptr,  # fp32 [experts], in and out: at least 0 on entry
    T,
    M,
    rows_per_expert,
    row_stride,
    K: tl.constexpr,
    HADAMARD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    G: tl.constexpr,
    B: tl.constexpr,
):
    """Update amax_ptr[expert] (atomic max) with the finite magnitudes of this program's blocks."""
    first, _, _, x = _load_blocks(
        x_ptr, source_rows_ptr, T, M, row_stride, K, HADAMARD, ROWS, COLUMNS, G, B
    )
    largest = tl.zeros((G, B, COLUMNS), tl.float32)
    for i in tl.static_range(ROWS):
        size = tl.abs(x[i])
        largest = tl.maximum(largest, tl.where(size < float("inf"), size, 0.0))
    amax = tl.max(tl.max(largest, 2), 1)
    expert = _find_experts(experts_ptr, first, M, rows_per_expert)
    # A maximum does not depend on the order. Most programs have rows of one expert.
    low = tl.min(expert, 0)
    if low == tl.max(expert, 0):
        tl.atomic_max(amax_ptr + low, tl.max(amax, 0))
    else:
        tl.atomic_max(amax_ptr + expert, amax)


@triton.jit
def compute_nvfp4_tensor_scale(amax, POWER_OF_TWO: tl.constexpr):  # fp32, finite
    """Return a tensor's fp32 NVFP4 scale: amax / 2688, or the next power of two."""
    scale = tl.div_rn(amax, tl.full(amax.shape, 2688.0, tl.float32))  # 6 * 448
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True) + 0x007FFFFF & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    return tl.maximum(scale, 1.1754943508222875e-38)  # 2^-126


@triton.jit
def _hash_uint32(x):  # uint32
    """Return MurmurHash3's finalizer of uint32, with the bits of `microscaling._hash_int32`."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _draw_uniform(x, rows, columns):  # fp32 [G, B, COLUMNS], int64 [G], [B, COLUMNS]
    """Return pseudorandom fp32 in [0, 1), hashes of position and value, as `draw_uniform` does."""
    of_row = _hash_uint32(rows.to(tl.uint32) + FIRST_DRAW)[:, None, None]
    of_place = _hash_uint32(of_row + columns.to(tl.uint32)[None, :, :])
    hashed = _hash_uint32(of_place ^ (x.to(tl.uint32, bitcast=True) >> 16))
    return (hashed >> 8).to(tl.float32) * 2.0**-24


@triton.jit
def compute_nvfp4_block_scale(amax, tensor_scale):  # fp32 of one number of dims
    """Return NVFP4 block scales, E4M3 bits and fp32 values, from amax and the tensor's scale."""
    exact = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
    exact = tl.div_rn(exact, tl.broadcast_to(tensor_scale, amax.shape))
    code = tl.where(amax < float("inf"), to_e4m3(tl.minimum(exact, 448.0)), 0x7F)
    return code, from_e4m3(code.to(tl.uint8))


@triton.jit
def encode_e2m1(magnitude, sign_bit):  # as `to_e2m1` returns them
    """Return the 4-bit E2M1 code in int32 of a magnitude and a sign from `to_e2m1`."""
    code = tl.where(magnitude < 2.0, magnitude * 2.0, magnitude + 2.0)
    return (
        tl.where(magnitude < 4.0, code, magnitude * 0.5 + 4.0).to(tl.int32) | (sign_bit >> 28) & 8
    )


@triton.jit
def to_e2m1(x, scale, uniform_draw):  # fp32; scale of the block times scale of the tensor
    """Round x / scale to E2M1; return the magnitude in fp32, and the sign in bit 31 of int32."""
    x = tl.where(scale > 0.0, tl.div_rn(x, scale), 0.0)  # 0 where the scale is NaN, too
    size = tl.minimum(tl.abs(x), 6.0)
    unit = tl.where(size < 4.0, tl.where(size < 2.0, 0.5, 1.0), 2.0)
    units = size * tl.where(size < 4.0, tl.where(size < 2.0, 2.0, 1.0), 0.5)
    if uniform_draw is None:
        units = (units + 8388608.0) - 8388608.0  # 2^23, from which on fp32 are whole numbers
    else:
        down = tl.floor(units)
        units = down + tl.where(units - down > uniform_draw, 1.0, 0.0)
    return units * unit, x.to(tl.int32, bitcast=True) & -0x80000000


@triton.jit(do_not_specialize=["T", "M", "rows_per_expert"])
def quantise_microscaled_kernel(
    x_ptr,  # [T, K], `row_stride` apart
    source_rows_ptr,  # [M] int64, or None
    experts_ptr,  # [M] int64, or None
    amax_ptr,  # fp32 [NUM_SCALES], or None: E4M3
    out_ptr,  # [M, K] values, or their packed bytes, out
    block_scales_ptr,  # uint8, out; only if packed
    scales_ptr,  # fp32 [NUM_SCALES], out
    T,
    M,
    rows_per_expert,
    row_stride,
    K: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    LAYOUT: tl.constexpr,  # VALUES (emulated, like x), PACKED_ROWS or PACKED_COLUMNS (bytes)
    POWER_OF_TWO: tl.constexpr,
    HADAMARD: tl.constexpr,
    RANDOM: tl.constexpr,  # stochastic rounding of E2M1
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    G: tl.constexpr,
    B: tl.constexpr,
):
    """Quantise and write G x B blocks of an operand; program 0 also writes the tensors' scales."""
    E2M1: tl.constexpr = amax_ptr is not None
    if tl.program_id(0) == 0:
        for start in range(0, NUM_SCALES, 128):
            i = start + tl.arange(0, 128)
            scale = tl.full((128,), 1.0, tl.float32)
            if E2M1:
                amax = tl.load(amax_ptr + i, mask=i < NUM_SCALES, other=0.0)
                scale = compute_nvfp4_tensor_scale(amax, POWER_OF_TWO)
            tl.store(scales_ptr + i, scale, mask=i < NUM_SCALES)
    first, blocks, columns, x = _load_blocks(
        x_ptr, source_rows_ptr, T, M, row_stride, K, HADAMARD, ROWS, COLUMNS, G, B
    )
    largest = tl.zeros((G, B, COLUMNS), tl.float32)
    for i in tl.static_range(ROWS):
        if E2M1:
            largest = tl.maximum(largest, tl.where(x[i] == x[i], tl.abs(x[i]), float("inf")))
        else:
            largest = tl.maximum(largest, abs_without_nan(x[i]))
    amax = tl.max(largest, 2)
    if E2M1:
        expert = _find_experts(experts_ptr, first, M, rows_per_expert)
        scale = compute_nvfp4_tensor_scale(tl.load(amax_ptr + expert), POWER_OF_TWO)[:, None]
        scale_code, block = compute_nvfp4_block_scale(amax, scale)
        step = tl.broadcast_to((block * scale)[:, :, None], (G, B, COLUMNS))
    else:
        block, inverse = compute_block_scale(amax, True)
        scale_code = block.to(tl.int32, bitcast=True) >> 23
    # Of packed columns a word is neighbouring rows, 4 or 8 bits each.
    PER_WORD: tl.constexpr = 8 if E2M1 else 4
    matrix, row_in_matrix = first // rows_per_expert, first % rows_per_expert
    word = tl.zeros((G, B, COLUMNS), tl.int32)
    for i in tl.static_range(ROWS):
        if E2M1:
            draw = None
            if RANDOM:
                draw = _draw_uniform(x[i], first + i, columns)
            value, sign = to_e2m1(x[i], step, draw)
            code = encode_e2m1(value, sign)
            value = (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        else:
            e4m3 = to_e4m3(x[i] * inverse[:, :, None])
            value, code = from_e4m3(e4m3), e4m3.to(tl.int32)
        row = (first + i)[:, None, None]
        inside = (row < M) & (columns < K)[None, :, :]
        at = row * K + columns[None, :, :]
        if LAYOUT == VALUES:
            value *= block[:, :, None]
            tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=inside)
        elif LAYOUT == PACKED_COLUMNS:
            word |= code << (i % PER_WORD * (32 // PER_WORD))
            if i % PER_WORD == PER_WORD - 1:
                at = (matrix[:, None, None] * K + columns[None, :, :]) * rows_per_expert
                at = (at + (row_in_matrix + i)[:, None, None]) // PER_WORD
                tl.store(out_ptr + at, word, mask=inside)
                word = tl.zeros((G, B, COLUMNS), tl.int32)
        elif E2M1:
            low, high = tl.split(tl.reshape(code, (G, B, COLUMNS // 2, 2)))
            pairs = blocks[:, None] * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, :]
            inside = (row < M) & (pairs < K // 2)[None, :, :]
            at = out_ptr + row * (K // 2) + pairs[None, :, :]
            tl.store(at, (low | high << 4).to(tl.uint8), mask=inside)
        else:
            tl.store(out_ptr + at, code.to(tl.uint8), mask=inside)
    if LAYOUT != VALUES:
        at = first[:, None] // ROWS * (K // COLUMNS) + blocks[None, :]
        if LAYOUT == PACKED_COLUMNS:
            at = (matrix[:, None] * (K // COLUMNS) + blocks[None, :]) * (rows_per_expert // ROWS)
            at += row_in_matrix[:, None] // ROWS
        inside = (first < M)[:, None] & (blocks < K // COLUMNS)[None, :]
        tl.store(block_scales_ptr + at, scale_code.to(tl.uint8), mask=inside)
