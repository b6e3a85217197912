"""Quantisation of one matrix for its products: along rows, along columns, or both in one pass.

    cast   [T, D] -> an operand summed over D, and one summed over T that lies transposed
    amax   [T, D] -> the largest magnitude, fp32 [1]

FP8 tensor cores want the summed dim innermost, and gradients of a linear sum over another dim than
its forward: hence the transposed copy. Kinds and layouts of scales are those of `scaling.py`, which
is also the reference.

Letters: T rows and D columns of what is quantised; M, K rows and columns of the first operand, m, k
of the second. Bytes moved with b per element: T * D * (b + 1 per operand), plus scales; "row" and
"tensor" read T * D * b once more for the largest magnitudes, unless one is given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecore.kernels.common import INTERPRET, cdiv, launch, tl, triton, use_kernel
from moecore.kernels.ops import Op
from moecore.kernels.rows.e4m3 import BLOCK, encode, magnitude
from moecore.kernels.rows.scaling import (
    BY_BLOCKS,
    DTYPES,
    SCALE_COLUMNS,
    Blocks,
    Both,
    add_seen_ref_,
    amax_ref,
    cast_ref,
    operand_shape,
    scales_shape,
)

PROGRAM = {"num_warps": 8, "maxnreg": 128}  # two programs on a multiprocessor
WIDE_PROGRAM = {"num_warps": 8}  # where that would spill
KIND_CODES = {"tile": 0, "block": 1, "row": 2, "tensor": 3}


@triton.jit
def _scale_of(amax, E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Return what `block_scale` does, of either format. To divide by a number would spill."""
    if POWER_OF_TWO:
        # Both formats end at 1.75 times a power of two: more than that needs the next one.
        bits = amax.to(tl.int32, bitcast=True) + 0x001FFFFF & 0x7F800000
        bits = tl.maximum(bits - ((15 if E5M2 else 8) << 23), 0x00800000)
        scale = bits.to(tl.float32, bitcast=True)
        inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    else:
        largest = tl.full(amax.shape, 57344.0 if E5M2 else 448.0, tl.float32)
        scale = tl.maximum(tl.div_rn(amax, largest), 1.1754943508222875e-38)
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    is_finite = amax < float("inf")
    return tl.where(is_finite, scale, float("inf")), tl.where(is_finite, inverse, float("nan"))


@triton.jit
def _encode(x, E5M2: tl.constexpr):  # fp32
    """Return FP8 as uint8: nearest, ties to even, saturated."""
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
        code = encode(x)
    return code.to(tl.uint8)


@triton.jit(do_not_specialize=["T"])
def _amax_kernel(
    x_ptr,  # [T, D]
    row_ptr,  # fp32 [T]: largest of each row, or [1]: of all; at least 0 on entry, in and out
    column_ptr,  # fp32 [D], likewise
    T,
    D,
    stride,
    WHOLE: tl.constexpr,  # the largest of all
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tiles = tl.cdiv(D, BLOCK)
    t = tl.program_id(0) // tiles * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    inside = (t < T)[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + t.to(tl.int64)[:, None] * stride + d[None, :], mask=inside, other=0.0)
    x = magnitude(x.to(tl.float32))
    # Magnitudes are ordered as their bits, and a maximum is the same in any order.
    if WHOLE:
        tl.atomic_max(row_ptr, tl.max(tl.max(x, 1), 0))
    if ROWS:
        tl.atomic_max(row_ptr + t, tl.max(x, 1), mask=t < T)
    if COLUMNS:
        tl.atomic_max(column_ptr + d, tl.max(x, 0), mask=d < D)


@triton.jit
def _cast_along(
    x,  # fp32 tile
    i,  # of the operand's rows
    j,  # of its columns
    tile_i,
    tile_j,
    amax_ptr,  # "row": fp32, of each row; "tensor": of all
    values_ptr,  # FP8 [M, K], out
    scales_ptr,  # out
    num_rows,  # without padding
    M,
    K,
    AXIS: tl.constexpr,  # of x that is summed: 1, or 0 for the transposed operand
    KIND: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Store a tile of an operand, and its scales."""
    is_first = tl.arange(0, BLOCK) == 0
    if KIND == 0:
        amax = tl.max(magnitude(x), AXIS)
        place = tile_j.to(tl.int64) * M + i
        is_mine = (i < M) & (tile_j * BLOCK < K)
    elif KIND == 1:
        amax = tl.zeros((BLOCK,), tl.float32) + tl.max(tl.max(magnitude(x), AXIS), 0)
        place = tile_i * (tl.cdiv(tl.cdiv(K, BLOCK), 4) * 4) + tile_j + tl.zeros_like(i)
        is_mine = is_first & (tile_i * BLOCK < M) & (tile_j * BLOCK < K)
    elif KIND == 2:
        amax = tl.load(amax_ptr + i, mask=i < num_rows, other=0.0)
        place = i
        is_mine = (i < M) & (tile_j == 0)
    else:
        amax = tl.zeros((BLOCK,), tl.float32) + tl.load(amax_ptr)
        place = tl.zeros_like(i)
        is_mine = is_first & (tile_i == 0) & (tile_j == 0)
    scale, inverse = _scale_of(amax, E5M2, POWER_OF_TWO)
    tl.store(scales_ptr + place, scale, mask=is_mine)
    value = x * tl.expand_dims(inverse, AXIS)
    if INTERPRETED:
        value = _encode(value, E5M2)
    else:  # saturates
        value = value.to(values_ptr.dtype.element_ty)
    if AXIS == 0:
        value = tl.trans(value)
    at = values_ptr + i.to(tl.int64)[:, None] * K + j[None, :]
    tl.store(at, value, mask=(i < M)[:, None] & (j < K)[None, :])


@triton.jit(do_not_specialize=["T"])
def _cast_kernel(
    x_ptr,  # [T, D]
    row_amax_ptr,  # "row": fp32 [T]; "tensor": fp32 [1]
    column_amax_ptr,  # "row": fp32 [D]; "tensor": fp32 [1]
    seen_ptr,  # fp32 [1]: grows to the largest finite magnitude, in and out
    rows_ptr,  # FP8 [M, K], out
    row_scales_ptr,  # out
    columns_ptr,  # FP8 [m, k], out
    column_scales_ptr,  # out
    T,
    D,
    stride,  # of x's rows
    M,
    K,
    m,
    k,
    KIND: tl.constexpr,  # 0 "tile", 1 "block", 2 "row", 3 "tensor"
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEEN: tl.constexpr,
    GIVEN: tl.constexpr,  # the amax is another tensor's
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,  # FP8 is stored as bytes
):
    tiles = tl.cdiv(tl.maximum(K, m), BLOCK)
    tile_t, tile_d = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    t = tile_t * BLOCK + tl.arange(0, BLOCK)
    d = tile_d * BLOCK + tl.arange(0, BLOCK)
    inside = (t < T)[:, None] & (d < D)[None, :]
    at = x_ptr + t.to(tl.int64)[:, None] * stride + d[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if SEEN:
        largest = magnitude(x)
        largest = tl.where(largest < float("inf"), largest, 0.0)
        tl.atomic_max(seen_ptr, tl.max(tl.max(largest, 1), 0))
    if GIVEN:  # else an infinity is its scale's
        x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
    if ROWS:
        _cast_along(
            x, t, d, tile_t, tile_d, row_amax_ptr, rows_ptr, row_scales_ptr, T, M, K,
            1, KIND, E5M2, POWER_OF_TWO, BLOCK, INTERPRETED,
        )  # fmt: skip
    if COLUMNS:
        _cast_along(
            x, d, t, tile_d, tile_t, column_amax_ptr, columns_ptr, column_scales_ptr, D, m, k,
            0, KIND, E5M2, POWER_OF_TWO, BLOCK, INTERPRETED,
        )  # fmt: skip


class _CastOptions(NamedTuple):
    """Arguments of `cast` that are no tensors."""

    kind: str
    fmt: str
    power_of_two: bool
    rows: bool
    columns: bool


def _cast(x_TD: Tensor, amax: Tensor | None, seen: Tensor | None, *flat: Any) -> tuple[Tensor, ...]:
    """Return values and scales of both operands, as bytes and fp32; empty where not asked for."""
    kind, fmt, power_of_two, rows, columns = options = _CastOptions(*flat)
    if not _has_kernel(x_TD):
        return _cast_ref(x_TD, amax, seen, *options)
    if x_TD.stride(1) != 1:
        x_TD = x_TD.contiguous()
    T, D = x_TD.shape
    outputs = _cast_fake(x_TD, amax, seen, *options)
    row_amax, column_amax = _amaxes(x_TD, amax, kind, rows, columns)
    (M, K), (m, k) = operand_shape(T, D, kind), operand_shape(D, T, kind)
    for width, wanted, scales in ((K, rows, outputs[1]), (k, columns, outputs[3])):
        if kind == "block" and wanted and width % (SCALE_COLUMNS * BLOCK):
            scales.zero_()  # what fills their rows is read
    is_narrow = power_of_two and kind != "block" and seen is None
    stored = torch.uint8 if INTERPRET else DTYPES[fmt]
    values = (outputs[0].view(stored), outputs[2].view(stored))
    operands = (values[0], outputs[1], values[1], outputs[3])
    launch(
        _cast_kernel,
        cdiv(max(M, k), BLOCK) * cdiv(max(K, m), BLOCK),
        *(x_TD, row_amax, column_amax, seen, *operands, T, D, x_TD.stride(0), M, K, m, k),
        KIND=KIND_CODES[kind],
        ROWS=rows,
        COLUMNS=columns,
        SEEN=seen is not None,
        GIVEN=amax is not None,
        E5M2=fmt == "e5m2",
        POWER_OF_TWO=power_of_two,
        BLOCK=BLOCK,
        INTERPRETED=INTERPRET,
        **(PROGRAM if is_narrow else WIDE_PROGRAM),
    )
    return outputs


def _amaxes(
    x_TD: Tensor, amax: Tensor | None, kind: str, rows: bool, columns: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return what the scales of both operands come from where that is not their own tile."""
    if kind in BY_BLOCKS:
        return None, None
    if kind == "tensor":
        amax = _amax(x_TD) if amax is None else amax
        return amax, amax
    T, D = x_TD.shape
    row_amax, column_amax = torch.zeros(T + D, device=x_TD.device).split((T, D))
    _launch_amax(x_TD, row_amax, column_amax, WHOLE=False, ROWS=rows, COLUMNS=columns)
    return row_amax, column_amax


def _launch_amax(x_TD: Tensor, rows: Tensor, columns: Tensor, **which: bool) -> None:
    (T, D), how = x_TD.shape, dict(**which, BLOCK=BLOCK, num_warps=8)
    args = (x_TD, rows, columns, T, D, x_TD.stride(0))
    launch(_amax_kernel, cdiv(T, BLOCK) * cdiv(D, BLOCK), *args, **how)


def _has_kernel(x_TD: Tensor) -> bool:
    return use_kernel(x_TD) and x_TD.numel() > 0 and x_TD.dtype != torch.float64


def _cast_ref(
    x_TD: Tensor, amax: Tensor | None, seen: Tensor | None, *flat: Any
) -> tuple[Tensor, ...]:
    """Return what `_cast` returns, in plain PyTorch."""
    how = _CastOptions(*flat)
    if seen is not None:
        add_seen_ref_(x_TD, seen)
    outputs: list[Tensor] = []
    for wanted, x in ((how.rows, x_TD), (how.columns, x_TD.T)):
        if wanted:
            operand = cast_ref(x, amax, *how[:3])
            outputs += [operand.values.view(torch.uint8), operand.scales]
        else:
            outputs += [x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.float32)]
    return tuple(outputs)


def _cast_fake(x_TD, amax, seen, *flat):  # type: ignore[no-untyped-def]
    outputs: list[Tensor] = []
    (T, D), how = x_TD.shape, _CastOptions(*flat)
    for wanted, shape in ((how.rows, (T, D)), (how.columns, (D, T))):
        M, K = operand_shape(*shape, how.kind)
        sizes = ((M, K), scales_shape(M, K, how.kind)) if wanted else ((0,), (0,))
        outputs.append(x_TD.new_empty(sizes[0], dtype=torch.uint8))
        outputs.append(x_TD.new_empty(sizes[1], dtype=torch.float32))
    return tuple(outputs)


def _amax(x_TD: Tensor) -> Tensor:
    if not _has_kernel(x_TD):
        return amax_ref(x_TD)
    if x_TD.stride(1) != 1:
        x_TD = x_TD.contiguous()
    largest = torch.zeros(1, device=x_TD.device)
    _launch_amax(x_TD, largest, largest, WHOLE=True, ROWS=False, COLUMNS=False)
    return largest


# Two operations, because a compiler computes one that mutates nothing once for equal arguments.
_SCHEMA = (
    "(Tensor x_TD, Tensor? amax{}, str kind, str fmt, bool power_of_two, bool rows, bool columns) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_cast_op = Op(
    "fp8_cast",
    lambda x_TD, amax, *flat: _cast(x_TD, amax, None, *flat),
    lambda x_TD, amax, *flat: _cast_fake(x_TD, amax, None, *flat),
    schema=_SCHEMA.format(""),
)
_SEEN = _SCHEMA.format(", Tensor(a!) seen")
_cast_seen_op = Op("fp8_cast_seen", _cast, _cast_fake, mutates_args=("seen",), schema=_SEEN)
_amax_op = Op("fp8_amax", _amax, lambda x_TD: x_TD.new_empty(1, dtype=torch.float32))


def cast(
    x_TD: Tensor,
    kind: str,
    fmt: str = "e4m3",
    *,
    power_of_two: bool,
    rows: bool = True,
    columns: bool = True,
    amax: Tensor | None = None,
    seen: Tensor | None = None,
) -> Both:
    """Return a matrix as operands of FP8 products. Not differentiable, no host sync.

    Args:
        x_TD: bf16, fp16, fp32 or fp64.
        kind: of the scales, see `scaling.py`.
        rows: whether to make the operand that is summed over D.
        columns: whether to make the one that is summed over T.
        amax: "tensor": fp32 [1] that the scale comes from; None = of x_TD.
        seen: fp32 [1], which grows to the largest finite magnitude of x_TD.
    """
    how = (kind, fmt, power_of_two, rows, columns)
    if seen is None:
        parts = _cast_op(x_TD.detach(), amax, *how)
    else:
        parts = _cast_seen_op(x_TD.detach(), amax, seen, *how)
    return Both(
        operand(parts[0], parts[1], kind, fmt) if rows else None,
        operand(parts[2], parts[3], kind, fmt) if columns else None,
    )


def operand(values_MK: Tensor, scales: Tensor, kind: str, fmt: str) -> Blocks:
    """Return an operand of its bytes and scales."""
    return Blocks(values_MK.view(DTYPES[fmt]), scales, kind)


def amax(x_TD: Tensor) -> Tensor:
    """Return the largest magnitude as fp32 [1], NaN left out. No autograd, no host sync."""
    largest: Tensor = _amax_op(x_TD.detach())
    return largest
