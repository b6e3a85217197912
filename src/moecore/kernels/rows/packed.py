"""Rows packed as FP8 for exchange between ranks: half the bytes of bf16, one scale per 128 columns.

A scale is the smallest power of two with which the largest value of its 128 columns fits 448. So a
widened row is exact in bf16 and fp16, and packing it again gives the same values. Values and scales
of a row are adjacent, so a row is sent, and saved for backward, as one piece of memory. The kernels
round and widen by integer operations, so they need no FP8 unit.

Letters: S source rows, D columns, B = D / 128 scales, W bytes of a packed row, K slots per source
row, R expert rows. Bytes moved with b per element: pack reads S * D * b and writes S * W; gather
reads S * W and writes R * D * b.

Source: DeepSeek-V3 (arXiv:2412.19437) for blocks of 128 columns and scales that are powers of two.
"""

from functools import cache

import torch
from torch import Tensor

from moecore.kernels.common import can_use_kernel, cdiv, launch, next_power_of_2
from moecore.kernels.ops import Op
from moecore.kernels.rows.e4m3 import (
    BLOCK,
    FP8,
    abs_without_nan,
    compute_block_scale,
    decode_e4m3,
    encode_e4m3,
)
from moecore.kernels.rows.move import gather_rows_ref
from moecore.kernels.rows.scaling import quantise_ref
from moecore.kernels.triton_api import tl, triton

ROW_BYTES = 16  # of which packed rows are multiples
PACKED_DTYPE = torch.uint8
PACKED_COLUMNS = 16  # of which D is a multiple


def count_packed_bytes(dim: int) -> int:
    """Return the size in bytes of a packed row of `dim` columns: 2048 columns take 2112 bytes."""
    return cdiv(dim + 4 * cdiv(dim, BLOCK), ROW_BYTES) * ROW_BYTES


def pack_rows_ref(x_SD: Tensor) -> Tensor:
    """Compute `pack_rows` in plain PyTorch."""
    S, D = x_SD.shape
    B = cdiv(D, BLOCK)
    padded_x = torch.nn.functional.pad(x_SD.float(), (0, B * BLOCK - D))
    values, scales_SB1 = quantise_ref(padded_x.view(S, B, BLOCK), -1, power_of_two=True)
    bytes_SW = x_SD.new_zeros(S, count_packed_bytes(D), dtype=PACKED_DTYPE)
    bytes_SW[:, :D] = values.view(PACKED_DTYPE).flatten(1)[:, :D]
    bytes_SW[:, D : D + 4 * B] = scales_SB1[..., 0].view(PACKED_DTYPE)
    return bytes_SW


def view_packed_rows(bytes_SW: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return views of packed rows: values, float8_e4m3fn [S, dim], and scales, fp32 [S, B]."""
    ends = dim + 4 * cdiv(dim, BLOCK)
    values_SD = bytes_SW[:, :dim].view(FP8)
    return values_SD, bytes_SW[:, dim:ends].view(torch.float32)


def unpack_rows(values_SD: Tensor, scales_SB: Tensor, dtype: torch.dtype) -> Tensor:
    """Return e4m3 values times their scales (one per 128 columns) as `dtype`, [S, D]."""
    scales_SD = scales_SB.repeat_interleave(BLOCK, 1)[:, : values_SD.shape[1]]
    return (values_SD.float() * scales_SD).to(dtype)


@cache
def _choose_program(dim: int) -> dict[str, int]:
    """Return BLOCKS, the number of 128-column blocks of a program, and num_warps."""
    # The most scales, up to 16, that leave at most 1/8 idle.
    B = cdiv(dim, BLOCK)
    fits = (n for n in (16, 8, 4) if cdiv(B, n) * n * 8 <= B * 9)
    blocks = next(fits, min(4, next_power_of_2(B)))
    return {"BLOCKS": blocks, "num_warps": max(1, blocks // 4)}


@triton.jit
def _pack_rows_kernel(
    x_ptr,  # [S, D]
    packed_ptr,  # [S, W] uint8, out
    scales_ptr,  # fp32, the same memory, out
    D: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Quantise BLOCKS blocks of 128 columns of one row to e4m3, and write values and scales."""
    PARTS: tl.constexpr = (D + BLOCKS * BLOCK - 1) // (BLOCKS * BLOCK)
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    blocks = tl.program_id(0) % PARTS * BLOCKS + tl.arange(0, BLOCKS)
    columns = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * D + columns, mask=columns < D, other=0.0).to(tl.float32)
    scale, inverse = compute_block_scale(tl.max(abs_without_nan(x), axis=1), True)
    code = encode_e4m3(x * inverse[:, None])
    code = tl.where((scale == float("inf"))[:, None], 0x7F, code)  # whatever sign a NaN has
    tl.store(packed_ptr + row * W + columns, code.to(tl.uint8), mask=columns < D)
    tl.store(scales_ptr + row * (W // 4) + D // 4 + blocks, scale, mask=blocks * BLOCK < D)


@triton.jit
def _gather_packed_rows_kernel(
    values_ptr,  # [S, D] uint8, W apart
    scales_ptr,  # [S, B] fp32, W bytes apart
    slots_ptr,  # [S, K] int32, -1 = none
    out_ptr,  # [R, D], out
    D: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two
):
    """Dequantise BLOCKS blocks of 128 columns of a token's row; write them to its expert rows."""
    PARTS: tl.constexpr = (D + BLOCKS * BLOCK - 1) // (BLOCKS * BLOCK)
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    blocks = tl.program_id(0) % PARTS * BLOCKS + tl.arange(0, BLOCKS)
    columns = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    choices = tl.arange(0, BLOCK_K)
    slots = tl.load(slots_ptr + row * K + choices, mask=choices < K, other=-1)
    is_used = tl.max(slots, axis=0) >= 0
    inside = (columns < D) & is_used
    code = tl.load(values_ptr + row * W + columns, mask=inside, other=0).to(tl.int32)
    has_scale = (blocks * BLOCK < D) & is_used
    scale = tl.load(scales_ptr + row * (W // 4) + blocks, mask=has_scale, other=0.0)
    x = (decode_e4m3(code) * scale[:, None]).to(out_ptr.dtype.element_ty)
    for k in range(K):
        slot = tl.load(slots_ptr + row * K + k).to(tl.int64)
        tl.store(out_ptr + slot * D + columns, x, mask=inside & (slot >= 0))


def _launch_pack(x_SD: Tensor) -> Tensor:
    """Compute `pack_rows` by the kernel, or on a CPU in plain PyTorch."""
    if not can_use_kernel(x_SD):
        return pack_rows_ref(x_SD)
    (S, D), program = x_SD.shape, _choose_program(x_SD.shape[1])
    bytes_SW = _make_empty_bytes(x_SD)
    args = (x_SD, bytes_SW, bytes_SW.view(torch.float32))
    num_programs = S * cdiv(D, BLOCK * program["BLOCKS"])
    launch(_pack_rows_kernel, num_programs, *args, D=D, W=bytes_SW.shape[1], BLOCK=BLOCK, **program)
    return bytes_SW


def _make_empty_bytes(x_SD: Tensor) -> Tensor:
    """Return uninitialised packed rows, uint8 [rows, bytes]."""
    return x_SD.new_empty(x_SD.shape[0], count_packed_bytes(x_SD.shape[1]), dtype=PACKED_DTYPE)


_pack_rows = Op("pack_rows", _launch_pack, _make_empty_bytes)


def pack_rows(x_SD: Tensor) -> Tensor:
    """Quantise rows to e4m3 with one scale per 128 columns, in bytes. No autograd, no host sync.

    Rows are bf16, fp16 or fp32, contiguous; D is a multiple of `PACKED_COLUMNS`. A row of the
    result, uint8 [S, W], has D values, ceil(D / 128) fp32 scales, and padding to a multiple of 16.
    An infinity makes its 128 columns NaN; a NaN stays a NaN.
    """
    return _pack_rows(x_SD.detach())


def gather_packed_rows(
    values_SD: Tensor,
    scales_SB: Tensor,
    dtype: torch.dtype,
    row_ids_R: Tensor,
    slots_SK: Tensor,
    num_rows: Tensor | None,
) -> Tensor:
    """Dequantise FP8 source rows to `dtype` and gather them in expert order, [R, D]. No autograd.

    Values and scales are from `view_packed_rows`; the last three arguments are as in `gather_rows`.
    Padding rows are uninitialised. No host sync.
    """
    (S, D), K, R = values_SD.shape, slots_SK.shape[1], row_ids_R.shape[0]
    if not can_use_kernel(values_SD):
        wide_SD = unpack_rows(values_SD, scales_SB, dtype)
        return gather_rows_ref(wide_SD, row_ids_R, slots_SK, num_rows)
    out_RD, program = values_SD.new_empty(R, D, dtype=dtype), _choose_program(D)
    args = (values_SD.view(PACKED_DTYPE), scales_SB, slots_SK.contiguous(), out_RD)
    grid = S * cdiv(D, BLOCK * program["BLOCKS"]) if R else 0
    sizes = dict(D=D, W=values_SD.stride(0), K=K, BLOCK=BLOCK, BLOCK_K=next_power_of_2(K))
    launch(_gather_packed_rows_kernel, grid, *args, **sizes, **program)
    return out_RD
