"""Grouped products of FP8 operands, promoted to fp32 every 128 of the summed dim.

    fp8_gemm    out[r] = a[r] @ b[expert(r)]^T
    fp8_wgrad   out[i] = sum over the rows r of expert i of  x[r]^T y[r]

Letters: R expert rows (length), e experts, K the summed dim, N columns, M columns of x,
t row tiles.

Operands are those of `rows/quantised.py`. Each 128 of the summed dim are multiplied by FP8 tensor
cores, whose sum of them is multiplied by both scales and added in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moecore.kernels.rows.quantised import BLOCK, RowBlocks, TokenTiles


def fp8_gemm_ref(
    a: RowBlocks, b_eNK: Tensor, scales_eNK: Tensor, offsets_e: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return what `fp8_gemm` returns, block by block in plain PyTorch. Host sync."""
    R, N = a.values_RK.shape[0], b_eNK.shape[1]
    out_RN = torch.zeros(R, N, device=b_eNK.device)
    start = 0
    for i, stop in enumerate(offsets_e.tolist()):
        for k in range(a.values_RK.shape[1] // BLOCK):
            part = slice(k * BLOCK, (k + 1) * BLOCK)
            product = a.values_RK[start:stop, part].float() @ b_eNK[i, :, part].float().T
            scales_N = scales_eNK[i, :, k].repeat_interleave(BLOCK)
            out_RN[start:stop] += product * a.scales_BR[k, start:stop, None] * scales_N
        start = stop
    return out_RN.to(dtype)


def fp8_wgrad_ref(x: TokenTiles, y: TokenTiles, tile_ends_e: Tensor) -> Tensor:
    """Return fp32 [e, M, N], tile by tile in plain PyTorch. Host sync."""
    M, N = x.values_tC.shape[1], y.values_tC.shape[1]
    out_eMN = torch.zeros(tile_ends_e.shape[0], M, N, device=tile_ends_e.device)
    first = 0
    for i, last in enumerate(tile_ends_e.tolist()):
        for t in range(first, last):
            product = x.values_tC[t].float() @ y.values_tC[t].float().T
            out_eMN[i] += product * x.scales_tC[t, :, None] * y.scales_tC[t]
        first = last
    return out_eMN
