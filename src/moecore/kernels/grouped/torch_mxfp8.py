"""Grouped products of MXFP8 operands by torch's CUTLASS kernels, for compute capability 10.0.

    mxfp8_gemm    out[r] = a[r] @ b[i]^T                          i = expert of row r
    mxfp8_wgrad   out[i] = sum over rows r of i of x[r]^T y[r]

`rows/microscaled.py` packs the operands. Torch reads block scales in the order of Blackwell's
tensor cores: 128 rows and 4 columns of scales are a tile of 512 bytes, in which the scale of row r
and column c is byte r % 32 * 16 + r // 32 * 4 + c. Tiles are in row-major order. The first row, or
in a weight gradient the first column, of each expert begins a tile. No Blackwell GPU has run this
file: tests on CPUs read the scales by this definition, and check torch's rules for shapes.

Source: "1D Block Scaling Factors Layout" in cuBLAS's documentation. The order of experts is from
`mx8mx8bf16_grouped` in pytorch/FBGEMM, which torch calls.

Letters: R expert rows (length), e experts, M and N rows of an output, K the summed dim, C columns
of scales (K / 32), W rows with each expert's padded to full blocks.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from moecore.base.torch_private import scaled_grouped_mm
from moecore.kernels.grouped.scaled_rows import pad_rows
from moecore.kernels.rows.scaling import Blocks

ROWS, COLUMNS = 128, 4  # of a tile of scales
BLOCK = 32  # elements of a scale


def swizzle_scales(scales: Tensor) -> Tensor:
    """Return scales [..., M, C] as tiles [..., M / 128, C / 4, 512], uint8; 0 in the padding."""
    # Example, one column tile: rows 0, 32, 64, 96, 1 are at bytes 0, 4, 8, 12, 16.
    scales = pad(scales, (0, -scales.shape[-1] % COLUMNS, 0, -scales.shape[-2] % ROWS))
    *lead, M, C = scales.shape
    tiles = scales.view(*lead, M // ROWS, ROWS // 32, 32, C // COLUMNS, COLUMNS)
    tiles = tiles.movedim(-2, -4).transpose(-3, -2)
    return tiles.reshape(*lead, M // ROWS, C // COLUMNS, ROWS * COLUMNS)


def mxfp8_gemm(a: Blocks, b: Blocks, offsets_e: Tensor) -> Tensor:
    """Return each expert row times its expert's matrix, bf16 [R, N]. No autograd, no host sync.

    `a` has R > 0 rows in expert order, `b` is [experts, N, K]; N and K are multiples of 32. Rows
    past offsets_e[-1], the running sum of row counts, are uninitialised.
    """
    layout = pad_rows(offsets_e, a.scales.shape[0], ROWS, min_rows=0)
    rows = a.scales.new_zeros(layout.num_rows + 1, a.scales.shape[1])
    a_tiles = swizzle_scales(rows.index_copy_(0, layout.position_R, a.scales)[:-1])
    scales = a_tiles.view(layout.num_rows, -1), swizzle_scales(b.scales).flatten(1)
    return _multiply(a.values, b.values.transpose(1, 2), *scales, offsets_e)


def mxfp8_wgrad(x: Blocks, y: Blocks, offsets_e: Tensor) -> Tensor:
    """Return each expert's x y^T over its columns, bf16 [e, M, N]. No autograd, no host sync.

    x is [M, W] and y [N, W]. offsets_e is the running sum of the experts' padded row counts, which
    are multiples of 32 and not 0: torch does not write the output of an expert without rows.
    """
    layout = pad_rows(offsets_e // BLOCK, x.scales.shape[1], COLUMNS)
    tile_C = torch.arange(layout.num_rows // COLUMNS, dtype=torch.int32, device=offsets_e.device)
    expert_C = torch.searchsorted(layout.offsets_e // COLUMNS, tile_C, right=True)

    def order(scales: Tensor) -> Tensor:
        columns = scales.new_zeros(scales.shape[0], layout.num_rows + 1)
        tiles = swizzle_scales(columns.index_copy_(1, layout.position_R, scales)[:, :-1])
        by_expert = expert_C.expand(tiles.shape[:2]).flatten().argsort(stable=True)
        return tiles.flatten(0, 1)[by_expert].view(len(tiles) * ROWS, -1)

    return _multiply(x.values, y.values.T, order(x.scales), order(y.scales), offsets_e)


def _multiply(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, offsets: Tensor) -> Tensor:
    """Return torch's grouped product of values with swizzled E8M0 scales."""
    scales = (x.view(torch.float8_e8m0fnu) for x in (a_scales, b_scales))
    return scaled_grouped_mm(a, b, *scales, offs=offsets, out_dtype=torch.bfloat16)  # type: ignore[no-any-return]
