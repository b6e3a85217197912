"""The kernels of `cast.py`, and device functions for `grouped/scaled_rows.py`; e matrices."""

from moecore.kernels.rows.e4m3 import INTERPRETED, abs_without_nan, compute_block_scale, encode_e4m3
from moecore.kernels.rows.row_tiles import load_expert_ranges
from moecore.kernels.triton_api import tl, triton


@triton.jit
def _encode_fp8(x, E5M2: tl.constexpr):  # fp32
    """Return fp32 values as FP8 bits in uint8: round to nearest, ties to even, saturate."""
    # The GPU's own conversion takes one instruction for two values; Triton's interpreter rounds FP8
    # otherwise (3.6), so there integer operations do it.
    largest: tl.constexpr = 57344.0 if E5M2 else 448.0
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -largest), largest), x)
    if E5M2:
        bits = x.to(tl.int32, bitcast=True)
        positive = bits & 0x7FFFFFFF
        # A normal result keeps the upper bits of the mantissa; a smaller one is a multiple of
        # 2^-16, to which the sum with 2^7 rounds.
        normal = (positive + 0x000FFFFF + ((positive >> 21) & 1) >> 21) - (112 << 2)
        small = (tl.abs(x) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
        code = tl.where(positive < 0x38800000, small, normal)
        code = tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)
    else:
        code = encode_e4m3(x)
    return code.to(tl.uint8)


@triton.jit
def to_fp8(x, values_ptr, E5M2: tl.constexpr):  # fp32
    """Return fp32 as FP8 in the element type of values_ptr (uint8 if interpreted). Saturates."""
    if INTERPRETED:
        return _encode_fp8(x, E5M2)
    else:
        return x.to(values_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["T", "num_experts"])
def amax_parts_kernel(
    x_ptr,  # [e, T, D], rows `row_stride` apart
    ends_ptr,  # [experts] int32 running sum of the rows in use; None = all T
    past_amax_ptr,  # fp32 [1]: if not 0, this is written and x is not read; None = 0
    partial_amax_ptr,  # fp32 [e, PARTS], out
    T,
    D,
    row_stride,
    num_experts,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program i writes the largest magnitude in the tiles i, i + PARTS, i + 2 * PARTS, ..."""
    part, matrix = tl.program_id(0), tl.program_id(1)
    num_rows = T
    if ends_ptr is not None:
        num_rows = tl.load(ends_ptr + num_experts - 1)
    past = 0.0
    if past_amax_ptr is not None:
        past = tl.load(past_amax_ptr)
        num_rows = tl.where(past > 0, 0, num_rows)
    width = tl.cdiv(D, COLUMNS)
    largest = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(part, tl.cdiv(num_rows, ROWS) * width, PARTS):
        t = tile // width * ROWS + tl.arange(0, ROWS)
        d = tile % width * COLUMNS + tl.arange(0, COLUMNS)
        inside = (t < num_rows)[:, None] & (d < D)[None, :]
        at = x_ptr + (matrix.to(tl.int64) * T + t)[:, None] * row_stride + d[None, :]
        x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, abs_without_nan(x))
    largest = tl.maximum(tl.max(tl.max(largest, 1), 0), past)
    tl.store(partial_amax_ptr + matrix * PARTS + part, largest)


@triton.jit
def load_amax(partial_amax_ptr, PARTS: tl.constexpr):
    """Return the maximum of the PARTS magnitudes that `amax_parts_kernel` wrote."""
    return tl.max(tl.load(partial_amax_ptr + tl.arange(0, PARTS)), 0)


@triton.jit
def record_amax(x, new_amax_ptr, HAS_AMAX: tl.constexpr):
    """Raise *new_amax_ptr to x's largest finite magnitude; return x (HAS_AMAX: NaN for inf)."""
    if new_amax_ptr is not None:
        largest = abs_without_nan(x)
        largest = tl.where(largest < float("inf"), largest, 0.0)
        tl.atomic_max(new_amax_ptr, tl.max(tl.max(largest, 1), 0))
    if HAS_AMAX:  # otherwise the scale of an infinity is infinite
        x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
    return x


@triton.jit(do_not_specialize=["T", "num_experts"])
def cast_rows_kernel(
    x_ptr,  # [T, D], rows `row_stride` apart
    ends_ptr,  # as in `amax_parts_kernel`: other rows are not written
    values_ptr,  # FP8 [M, K], out
    scales_ptr,  # fp32 [M], out
    T,
    D,
    row_stride,
    num_experts,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FITS: tl.constexpr,  # COLUMNS are not less than K
):
    """Quantise ROWS full rows of x with one scale each. Rows longer than COLUMNS are read twice."""
    M, K = tl.cdiv(T, 16) * 16, tl.cdiv(D, 16) * 16
    if ends_ptr is not None:
        M = tl.load(ends_ptr + num_experts - 1)
        T = M
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.arange(0, COLUMNS)
    at = x_ptr + t[:, None] * row_stride
    x = tl.load(at + d[None, :], mask=(t < T)[:, None] & (d < D)[None, :], other=0.0)
    x = x.to(tl.float32)
    largest = abs_without_nan(x)
    if not FITS:
        for first in range(COLUMNS, D, COLUMNS):
            inside = (t < T)[:, None] & (first + d < D)[None, :]
            x_next = tl.load(at + first + d[None, :], mask=inside, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, abs_without_nan(x_next))
    scale, inverse = compute_block_scale(tl.max(largest, 1), POWER_OF_TWO, E5M2)
    tl.store(scales_ptr + t, scale, mask=t < M)
    to = values_ptr + t[:, None] * K
    value = to_fp8(x * inverse[:, None], values_ptr, E5M2)
    tl.store(to + d[None, :], value, mask=(t < M)[:, None] & (d < K)[None, :])
    if not FITS:
        for first in range(COLUMNS, K, COLUMNS):
            inside = (t < T)[:, None] & (first + d < D)[None, :]
            x = tl.load(at + first + d[None, :], mask=inside, other=0.0).to(tl.float32)
            value = to_fp8(x * inverse[:, None], values_ptr, E5M2)
            inside = (t < M)[:, None] & (first + d < K)[None, :]
            tl.store(to + first + d[None, :], value, mask=inside)


@triton.jit
def locate_row_tile(
    tile_idx, offsets_ptr, num_experts, rows_per_expert, E_POW2: tl.constexpr, BLOCK: tl.constexpr
):
    """Return a tile's (expert, start, end, first): the expert's rows are [start, end).

    The tile begins at row start + first. An expert without rows has one tile. Past the last tile
    the expert is `num_experts`. offsets_ptr None = each expert has `rows_per_expert` rows.
    """
    if offsets_ptr is None:
        per_expert = tl.cdiv(rows_per_expert, BLOCK)
        expert = (tile_idx // per_expert).to(tl.int64)
        start, end, first = (
            expert * rows_per_expert,
            (expert + 1) * rows_per_expert,
            tile_idx % per_expert * BLOCK,
        )
    else:
        experts = tl.arange(0, E_POW2)
        starts, ends, exists = load_expert_ranges(offsets_ptr, num_experts, E_POW2)
        tiles = tl.where(exists, tl.cdiv(tl.maximum(ends - starts, 1), BLOCK), 0)
        is_before = (tl.cumsum(tiles, 0) <= tile_idx) & exists
        expert = tl.sum(is_before.to(tl.int32), 0).to(tl.int64)
        first = (tile_idx - tl.sum(tl.where(is_before, tiles, 0), 0)) * BLOCK
        start = tl.sum(tl.where(experts == expert, starts, 0), 0).to(tl.int64)
        end = tl.sum(tl.where(experts == expert, ends, 0), 0).to(tl.int64)
    return expert, start, end, first


@triton.jit(do_not_specialize=["num_experts", "N", "R"])
def amax_kernel(
    x_ptr,  # [R, D] or [e, N, D], rows `row_stride` apart
    offsets_ptr,  # [e] int32; None = N rows each
    amax_ptr,  # fp32, >= 0, in and out: of rows [R] (only with ROWS), then of columns [e, D]
    num_experts,
    N,
    R,
    D,
    row_stride,
    ROWS: tl.constexpr,
    E_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Raise amax_ptr to a tile's magnitudes, per expert and column and (if ROWS) per row."""
    width = tl.cdiv(D, BLOCK)
    tile = tl.program_id(0) // width
    expert, start, end, first = locate_row_tile(tile, offsets_ptr, num_experts, N, E_POW2, BLOCK)
    if expert < num_experts:
        row = start + first + tl.arange(0, BLOCK)
        d = tl.program_id(0) % width * BLOCK + tl.arange(0, BLOCK)
        inside = (row < end)[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + row[:, None] * row_stride + d[None, :], mask=inside, other=0.0)
        x = abs_without_nan(x.to(tl.float32))
        of_columns = amax_ptr + expert * D + d
        if ROWS:  # a maximum is the same in any order
            tl.atomic_max(amax_ptr + row, tl.max(x, 1), mask=row < end)
            of_columns += R
        tl.atomic_max(of_columns, tl.max(x, 0), mask=d < D)


@triton.jit
def _store_operand_tile(
    x,  # fp32 tile
    rows,  # [BLOCK] row indices of the operand
    columns,  # [BLOCK] column indices of the operand
    row_tile,  # number of the row tile
    column_tile,  # number of the column tile
    amax_ptr,  # "row": fp32, of each row; "tensor": of parts
    values_ptr,  # FP8 [M, K], out
    scales_ptr,  # out
    num_rows,  # without padding
    M,
    K,
    AXIS: tl.constexpr,  # of x that is summed: 1, or 0 for the transposed operand
    KIND: tl.constexpr,  # as in `cast_kernel`
    PARTS: tl.constexpr,  # entries of amax_ptr of a "tensor"
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise a tile of x along dim AXIS; store FP8 in values_ptr and scales in scales_ptr."""
    lane = tl.arange(0, BLOCK)
    if KIND == 0:
        amax = tl.max(abs_without_nan(x), AXIS)
        place = column_tile.to(tl.int64) * M + rows
        scale_mask = (rows < M) & (column_tile * BLOCK < K)
    elif KIND == 1:
        amax = tl.zeros((BLOCK,), tl.float32) + tl.max(tl.max(abs_without_nan(x), AXIS), 0)
        width = tl.cdiv(tl.cdiv(K, BLOCK), 4) * 4
        place = row_tile * width + column_tile + lane
        # The last tile of a row writes what fills it, too.
        is_last = (column_tile + 1) * BLOCK >= K
        scale_mask = (lane == 0) | (is_last & (column_tile + lane < width))
        scale_mask &= (row_tile * BLOCK < M) & (column_tile * BLOCK < K)
    elif KIND == 2:
        amax = tl.load(amax_ptr + rows, mask=rows < num_rows, other=0.0)
        place = rows
        scale_mask = (rows < M) & (column_tile == 0)
    else:
        amax = tl.zeros((BLOCK,), tl.float32) + load_amax(amax_ptr, PARTS)
        place = lane
        scale_mask = (lane == 0) & (row_tile == 0) & (column_tile == 0)
    scale, inverse = compute_block_scale(amax, POWER_OF_TWO, E5M2)
    if KIND == 1:
        tl.store(scales_ptr + place, tl.where(lane == 0, scale, 0.0), mask=scale_mask)
    else:
        tl.store(scales_ptr + place, scale, mask=scale_mask)
    value = to_fp8(x * tl.expand_dims(inverse, AXIS), values_ptr, E5M2)
    if AXIS == 0:
        value = tl.trans(value)
    at = values_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
    tl.store(at, value, mask=(rows < M)[:, None] & (columns < K)[None, :])


@triton.jit(do_not_specialize=["T"])
def cast_kernel(
    x_ptr,  # [T, D]
    amax_ptr,  # fp32: "row" as in `amax_kernel`; "tensor" [PARTS]
    new_amax_ptr,  # fp32 [1]: grows to the largest finite magnitude, in and out; None = it does not
    rows_ptr,  # FP8 [M, K], out; None = not this operand
    row_scales_ptr,  # out
    columns_ptr,  # FP8 [m, k], out; None = not this operand
    column_scales_ptr,  # out
    T,
    D,
    row_stride,  # of x's rows
    KIND: tl.constexpr,  # 0 "tile", 1 "block", 2 "row", 3 "tensor"
    PARTS: tl.constexpr,
    HAS_AMAX: tl.constexpr,  # the amax is another tensor's
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise a tile of x [T, D] along rows, along columns, or both."""
    WIDTH: tl.constexpr = BLOCK if KIND < 2 else 16  # of which K and k are multiples
    M, K = tl.cdiv(T, 16) * 16, tl.cdiv(D, WIDTH) * WIDTH
    m, k = tl.cdiv(D, 16) * 16, tl.cdiv(T, WIDTH) * WIDTH
    tiles = tl.cdiv(tl.maximum(K, m), BLOCK)
    tile_t, tile_d = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    t = tile_t * BLOCK + tl.arange(0, BLOCK)
    d = tile_d * BLOCK + tl.arange(0, BLOCK)
    inside = (t < T)[:, None] & (d < D)[None, :]
    at = x_ptr + t.to(tl.int64)[:, None] * row_stride + d[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    x = record_amax(x, new_amax_ptr, HAS_AMAX)
    if rows_ptr is not None:
        _store_operand_tile(
            x, t, d, tile_t, tile_d, amax_ptr, rows_ptr, row_scales_ptr, T, M, K,
            1, KIND, PARTS, E5M2, POWER_OF_TWO, BLOCK,
        )  # fmt: skip
    if columns_ptr is not None:
        of_columns = amax_ptr
        if KIND == 2 and rows_ptr is not None:
            of_columns += T
        _store_operand_tile(
            x, d, t, tile_d, tile_t, of_columns, columns_ptr, column_scales_ptr, D, m, k,
            0, KIND, PARTS, E5M2, POWER_OF_TWO, BLOCK,
        )  # fmt: skip
