"""Token rows packed in MXFP8 or NVFP4, in which experts save X and H for backward.

    recipe   values [S, ...]              scales, uint8
    mxfp8    float8_e4m3fn [S, D]         [S, D / 32] E8M0
    nvfp4    uint8 [S, D / 2], E2M1       [S, D / 16 + 1] E4M3, then the E8M0 scale of the row

The blocks are along a row, with the rounding of `microscaling.py`. NVFP4 has a power of two per row
as its outer scale, so the result does not depend on other rows, nor on the rank that has them. A
widened value is exact in bf16.

Letters: S rows, D columns. Bytes moved with b per element: packing reads S * D * b and writes S * D
* 1.03 ("nvfp4": 0.56); widening moves the same bytes in the other direction.
"""

from dataclasses import replace

import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.common import can_use_kernel, cdiv, launch
from moecore.kernels.rows.e4m3 import (
    FP8,
    abs_without_nan,
    compute_block_scale,
    from_e4m3,
    to_e4m3,
)
from moecore.kernels.rows.microscaled_kernel import (
    compute_nvfp4_block_scale,
    compute_nvfp4_tensor_scale,
    encode_e2m1,
    to_e2m1,
)
from moecore.kernels.rows.microscaling import (
    compute_finite_magnitude,
    compute_tensor_scales,
    pack_e2m1,
    quantise_mxfp8,
    quantise_nvfp4,
    unpack_e2m1,
)
from moecore.kernels.triton_api import tl, triton

COLUMNS, NUM_WARPS = 1024, 4  # of one step of a program, which has one row


def pack_microscaled_rows_ref(x_SD: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Compute `pack_microscaled_rows` in plain PyTorch."""
    block = (1, recipe.weight_multiple)
    if recipe.scaling == "mxfp8":
        values, scales = quantise_mxfp8(x_SD.float(), block)
        return values, _get_exponents(scales)
    row_scales = compute_tensor_scales(compute_finite_magnitude(x_SD).amax(1, keepdim=True), recipe)
    values, scales = quantise_nvfp4(x_SD, block, row_scales)
    return pack_e2m1(values), torch.cat((scales.view(torch.uint8), _get_exponents(row_scales)), 1)


def _get_exponents(scales: Tensor) -> Tensor:
    """Return fp32 powers of two as E8M0 bytes; infinity is 255, E8M0's NaN."""
    return (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def widen_microscaled_rows_ref(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `widen_microscaled_rows` in plain PyTorch."""
    exponents = scales if values.dtype == FP8 else scales[:, -1:]
    powers = (exponents.int() << 23).view(torch.float32)
    powers = powers.masked_fill(exponents == 255, torch.nan)
    if values.dtype == FP8:
        wide, of_blocks = values.float(), powers
    else:
        of_blocks = scales[:, :-1].contiguous().view(FP8).float() * powers
        wide = unpack_e2m1(values)
    blocks = wide.unflatten(1, (of_blocks.shape[1], -1))
    return (blocks * of_blocks[..., None]).flatten(1).to(dtype)  # type: ignore[no-any-return]


@triton.jit
def quantise_microscaled_rows_kernel(
    x_ptr,  # [S, D]
    values_ptr,  # uint8 [S, D], or with E2M1 [S, D / 2], out
    scales_ptr,  # uint8 [S, D / SIZE], with E2M1 one more, out
    D: tl.constexpr,
    SIZE: tl.constexpr,  # columns of a block
    E2M1: tl.constexpr,
    BLOCKS: tl.constexpr,  # number of blocks that a step of the loop quantises
):
    """Write the values and block scales of one row; for E2M1 also the scale of the row."""
    row = tl.program_id(0).to(tl.int64)
    STEP: tl.constexpr = BLOCKS * SIZE
    ROW_SCALES: tl.constexpr = D // SIZE + E2M1
    row_scale = tl.full((1,), 1.0, tl.float32)
    if E2M1:
        largest = tl.zeros((STEP,), tl.float32)
        for start in range(0, D, STEP):
            columns = start + tl.arange(0, STEP)
            x = tl.load(x_ptr + row * D + columns, mask=columns < D, other=0.0).to(tl.float32)
            size = tl.abs(x)
            largest = tl.maximum(largest, tl.where(size < float("inf"), size, 0.0))
        row_scale = compute_nvfp4_tensor_scale(tl.full((1,), tl.max(largest, 0), tl.float32), True)
        exponent = (row_scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
        tl.store(scales_ptr + row * ROW_SCALES + D // SIZE + tl.arange(0, 1), exponent)
    for start in range(0, D, STEP):
        blocks = start // SIZE + tl.arange(0, BLOCKS)
        columns = blocks[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        x = tl.load(x_ptr + row * D + columns, mask=columns < D, other=0.0).to(tl.float32)
        if E2M1:
            amax = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)
            scale, block = compute_nvfp4_block_scale(amax, row_scale)
            step = tl.broadcast_to((block * row_scale)[:, None], (BLOCKS, SIZE))
            value, sign = to_e2m1(x, step, None)
            code = encode_e2m1(value, sign)
            low, high = tl.split(tl.reshape(code, (BLOCKS, SIZE // 2, 2)))
            pairs = blocks[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
            at = values_ptr + row * (D // 2) + pairs
            tl.store(at, (low | high << 4).to(tl.uint8), mask=pairs < D // 2)
        else:
            block, inverse = compute_block_scale(tl.max(abs_without_nan(x), 1), True)
            scale = block.to(tl.int32, bitcast=True) >> 23
            code = to_e4m3(x * inverse[:, None])
            tl.store(values_ptr + row * D + columns, code, mask=columns < D)
        at = scales_ptr + row * ROW_SCALES + blocks
        tl.store(at, scale.to(tl.uint8), mask=blocks < D // SIZE)


@triton.jit
def _read_power(exponent):  # uint8
    """Return the fp32 power of two of an E8M0 byte; 255 is NaN."""
    bits = exponent.to(tl.int32)
    return tl.where(bits == 255, float("nan"), (bits << 23).to(tl.float32, bitcast=True))


@triton.jit
def microscaled_widen_rows_kernel(
    values_ptr,  # as in the kernel above
    scales_ptr,
    out_ptr,  # [S, D], out
    D: tl.constexpr,
    SIZE: tl.constexpr,
    E2M1: tl.constexpr,
    BLOCKS: tl.constexpr,  # of one program
):
    """Write values times scales of BLOCKS blocks of one row."""
    STEPS: tl.constexpr = (D + BLOCKS * SIZE - 1) // (BLOCKS * SIZE)
    ROW_SCALES: tl.constexpr = D // SIZE + E2M1
    row = (tl.program_id(0) // STEPS).to(tl.int64)
    blocks = tl.program_id(0) % STEPS * BLOCKS + tl.arange(0, BLOCKS)
    columns = blocks[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    scales_ptr += row * ROW_SCALES
    code = tl.load(scales_ptr + blocks, mask=blocks < D // SIZE, other=0)
    if E2M1:
        scale = from_e4m3(code) * _read_power(tl.load(scales_ptr + D // SIZE))
        pair = tl.load(values_ptr + row * (D // 2) + columns // 2, mask=columns < D, other=0)
        code = (pair.to(tl.int32) >> (columns % 2 * 4)) & 15
        size = (code & 7).to(tl.float32)
        x = tl.where(size < 6.0, size - 2.0, size * 2.0 - 8.0)
        x = tl.where(size < 4.0, size * 0.5, x)
        x = tl.where(code < 8, x, -x)
    else:
        scale = _read_power(code)
        x = from_e4m3(tl.load(values_ptr + row * D + columns, mask=columns < D, other=0))
    x *= scale[:, None]
    tl.store(out_ptr + row * D + columns, x.to(out_ptr.dtype.element_ty), mask=columns < D)


def make_empty_microscaled_rows(x_SD: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return uninitialised results of `pack_microscaled_rows`."""
    (S, D), is_nvfp4, new = x_SD.shape, recipe.scaling == "nvfp4", x_SD.new_empty
    values = new(S, D // (1 + is_nvfp4), dtype=torch.uint8 if is_nvfp4 else FP8)
    # int, because a SymInt of torch 2.11 adds no bool
    return values, new(S, D // recipe.weight_multiple + int(is_nvfp4), dtype=torch.uint8)


def pack_microscaled_rows(x_SD: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Quantise rows to values and scales of the recipe's format. No autograd, no host sync.

    x_SD is contiguous bf16, fp16 or fp32, with full blocks in a row. The recipe is "mxfp8" or
    "nvfp4". Values are rounded to nearest. An infinity makes its block NaN. A NaN stays NaN in
    MXFP8.
    """
    (S, D), size, is_nvfp4 = x_SD.shape, recipe.weight_multiple, recipe.scaling == "nvfp4"
    if not can_use_kernel(x_SD):
        return pack_microscaled_rows_ref(x_SD, replace(recipe, power_of_two=True))
    values, scales = make_empty_microscaled_rows(x_SD, recipe)
    constants = dict(D=D, SIZE=size, E2M1=is_nvfp4, BLOCKS=COLUMNS // size, num_warps=NUM_WARPS)
    args = (x_SD, values.view(torch.uint8), scales)
    launch(quantise_microscaled_rows_kernel, S, *args, **constants)
    return values, scales


def widen_microscaled_rows(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise rows of `pack_microscaled_rows` to `dtype`, [S, D]. No autograd, no host sync."""
    if not can_use_kernel(values):
        return widen_microscaled_rows_ref(values, scales, dtype)
    is_nvfp4 = values.dtype != FP8
    S, D = values.shape[0], values.shape[1] * (1 + is_nvfp4)
    size = D // (scales.shape[1] - is_nvfp4)
    out_SD = values.new_empty(S, D, dtype=dtype)
    args = (values.view(torch.uint8), scales, out_SD)
    constants = dict(D=D, SIZE=size, E2M1=is_nvfp4, BLOCKS=COLUMNS // size, num_warps=NUM_WARPS)
    launch(microscaled_widen_rows_kernel, S * cdiv(D, COLUMNS), *args, **constants)
    return out_SD
