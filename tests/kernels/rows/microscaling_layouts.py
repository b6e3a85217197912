"""Bytes of MXFP8 and NVFP4 as tensor cores take them, for kernels to be compared with.

Source: OCP Microscaling Formats (MX) specification v1.0; cuBLAS's "1D block scaling factors
layout" for `swizzle_scales`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from moecore.kernels.common import cdiv
from moecore.kernels.rows.microscaling import E2M1

SCALES_ROWS, SCALES_COLUMNS = 128, 4  # of a tile of swizzled scales


def pack_e2m1(values: Tensor) -> Tensor:
    """Return uint8 [..., K / 2] of E2M1 values [..., K]: the first of two in the low four bits.

    A code is a sign, two bits of exponent, one of mantissa. Example: (1, -6) is 0xF2.
    """
    magnitudes = torch.tensor(E2M1, device=values.device)
    codes = torch.searchsorted(magnitudes, values.abs().float().contiguous())
    codes = codes + 8 * values.signbit()
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (low | high << 4).to(torch.uint8)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Return the fp32 values [..., K] of bytes [..., K / 2]."""
    numbers = torch.tensor((*E2M1, *(-x for x in E2M1)), device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return numbers[codes.long()]


def to_e8m0(scales: Tensor) -> Tensor:
    """Return fp32 powers of two as bytes: biased exponents; infinity is E8M0's NaN, 255."""
    return (scales.view(torch.int32) >> 23).to(torch.uint8)


def swizzle_scales(scales_MB: Tensor) -> Tensor:
    """Return one-byte scales [M, B] as tensor cores take them, flat, padded with zeros.

    Tiles of 128 rows and 4 columns lie one after the other, columns first. A tile is [32, 16]: row
    r, column c at r % 32, 4 * (r // 32) + c. Example: row 33, column 2 is byte 16 + 4 + 2.
    """
    M, B = scales_MB.shape
    rows, columns = cdiv(M, SCALES_ROWS), cdiv(B, SCALES_COLUMNS)
    padded = pad(scales_MB, (0, columns * SCALES_COLUMNS - B, 0, rows * SCALES_ROWS - M))
    return padded.view(rows, 4, 32, columns, SCALES_COLUMNS).permute(0, 3, 2, 1, 4).flatten()


def unswizzle_scales(flat: Tensor, M: int, B: int) -> Tensor:
    """Return the scales [M, B] that `swizzle_scales` has laid out."""
    rows, columns = cdiv(M, SCALES_ROWS), cdiv(B, SCALES_COLUMNS)
    tiles = flat.view(rows, columns, 32, 4, SCALES_COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows * SCALES_ROWS, columns * SCALES_COLUMNS)[:M, :B]
