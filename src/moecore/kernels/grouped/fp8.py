"""Grouped products of FP8 operands, promoted to fp32 every 128 of the summed dim.

    fp8_gemm    out[r] = a[r] @ b[expert(r)]^T
    fp8_wgrad   out[i] = sum over the rows r of expert i of  x[r]^T y[r]

Letters: R expert rows (length), e experts, K the summed dim, N columns, M columns of x, t row
tiles.

Operands are "grouped" ones of `rows/scaling.py`. One persistent program runs on each multiprocessor
of Hopper: a warp fills a ring of stages by TMA, two warp groups share a tile of 128 x 256. 2 * R *
N * K floating-point operations each (K or M columns of a). Bytes moved at least: each operand and
the output once.

Other devices run the references, which differ only in the order in which fp32 terms are added.
"""

import torch
from torch import Tensor

from moecore.kernels.common import (
    count_sms,
    has_hopper_kernels,
    iterate_expert_slices,
    launch,
    make_gluon_descriptor,
)
from moecore.kernels.grouped.fp8_kernels import (
    sm90_fp8_grouped_nt_kernel,
    sm90_fp8_grouped_wgrad_kernel,
)
from moecore.kernels.grouped.skeleton import GroupedConstants
from moecore.kernels.grouped.wgrad import scale_and_store_grad
from moecore.kernels.rows.e4m3 import BLOCK
from moecore.kernels.rows.row_tiles import BLOCK_M, RowTiles
from moecore.kernels.rows.scaling import Blocks

BLOCK_N = 256
CONST = GroupedConstants(
    *(BLOCK_M, BLOCK_N, BLOCK), GROUP_M=8, STAGES=3, PRODUCER_REGISTERS=24, CONSUMER_REGISTERS=240
)


def fp8_gemm_ref(a: Blocks, b: Blocks, offsets_e: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `fp8_gemm` in plain PyTorch; rows past offsets_e[-1] are 0. Host sync."""
    R, N = a.values.shape[0], b.values.shape[1]
    out_RN = torch.zeros(R, N, device=b.values.device, dtype=torch.float32)
    for i, rows in enumerate(iterate_expert_slices(offsets_e)):
        for k in range(a.values.shape[1] // BLOCK):
            part = slice(k * BLOCK, (k + 1) * BLOCK)
            product = a.values[rows, part].float() @ b.values[i, :, part].float().T
            scales_N = b.scales[i, :, k].repeat_interleave(BLOCK)
            out_RN[rows] += product * (a.scales[k, rows, None] * scales_N)
    return out_RN.to(dtype)


def fp8_gemm(
    a: Blocks, b: Blocks, offsets_e: Tensor, tiles: RowTiles, dtype: torch.dtype
) -> Tensor:
    """Return each expert row times its expert's matrix, [R, N]. No autograd; no sync on Hopper.

    Summed in fp32, rounded once; bit-reproducible. Rows past the last expert's are uninitialised.

    Args:
        a: R rows in expert order, a scale per 1 x 128; `tiles` is from their `map_row_tiles`.
        b: matrices [e, N, K] with a scale per 128 x 128; N and K are multiples of 128.
        offsets_e: int32, running sum of the experts' row counts. Only the reference reads it.
        dtype: dtype of the result, bf16 or fp16 on a GPU.
    """
    (R, K), N, device = a.values.shape, b.values.shape[1], b.values.device
    out_RN = torch.empty(R, N, dtype=dtype, device=device)
    if not R:
        return out_RN
    if not has_hopper_kernels(device):
        return out_RN if out_RN.is_meta else fp8_gemm_ref(a, b, offsets_e, dtype)
    a_desc = make_gluon_descriptor(a.values, (BLOCK_M, BLOCK))
    b_desc = make_gluon_descriptor(b.values.view(-1, K), (BLOCK_N, BLOCK))
    out_desc = make_gluon_descriptor(out_RN, (BLOCK_M // 2, BLOCK_N // 2))
    args = (a_desc, b_desc, tiles.map, a.scales, b.scales, out_RN, out_desc)
    sizes, grid = (K, N, a.scales.stride(0), *b.scales.stride()), count_sms(device)
    launch(sm90_fp8_grouped_nt_kernel, grid, *args, *sizes, CONST=CONST, num_warps=4)
    return out_RN


def fp8_wgrad_ref(x: Blocks, y: Blocks, tiles: RowTiles) -> Tensor:
    """Compute `fp8_wgrad` in plain PyTorch, tile by tile, in fp32. Host sync."""
    M, N = x.values.shape[1], y.values.shape[1]
    out_eMN = x.scales.new_zeros(tiles.ends_e.shape[0], M, N)
    for i, of_expert in enumerate(iterate_expert_slices(tiles.ends_e)):
        for t in range(of_expert.start, of_expert.stop):
            product = x.values[t].float() @ y.values[t].float().T
            x_scales_M = x.scales[t].repeat_interleave(BLOCK)
            y_scales_N = y.scales[t].repeat_interleave(BLOCK)
            out_eMN[i] += product * (x_scales_M[:, None] * y_scales_N)
    return out_eMN


def fp8_wgrad(
    x: Blocks,
    y: Blocks,
    tiles: RowTiles,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> Tensor:
    """Return each expert's weight gradient [M, N], the sum of x[r]^T y[r] over its rows r.

    Summed in fp32 and rounded once; zero (nothing added) for an expert without rows.
    Bit-reproducible. No autograd; no host sync on Hopper. x and y are row tiles from `tile_tokens`,
    [tiles, M, 128] and [tiles, N, 128]; M and N are multiples of 128. `out`, `accumulate`, `dtype`
    and `scale` are as for `grouped_wgrad`.
    """
    if not has_hopper_kernels(tiles.map.device):
        return scale_and_store_grad(fp8_wgrad_ref(x, y, tiles), out, accumulate, dtype, scale)
    M, N, e = x.values.shape[1], y.values.shape[1], tiles.ends_e.shape[0]
    out_eMN = x.values.new_empty(e, M, N, dtype=dtype) if out is None else out
    x_desc = make_gluon_descriptor(x.values.view(-1, BLOCK), (BLOCK_M, BLOCK))
    y_desc = make_gluon_descriptor(y.values.view(-1, BLOCK), (BLOCK_N, BLOCK))
    desc = None if accumulate else make_gluon_descriptor(out_eMN, (1, BLOCK_M // 2, BLOCK_N // 2))
    args = (x_desc, y_desc, x.scales, y.scales, tiles.ends_e, out_eMN, desc, e, M, N, scale)
    grid = count_sms(out_eMN.device)
    launch(sm90_fp8_grouped_wgrad_kernel, grid, *args, CONST=CONST, num_warps=4)
    return out_eMN
