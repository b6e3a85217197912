"""Grouped products of block-scaled operands, MXFP8 and NVFP4, on tensor cores that multiply scales.

    block_scaled_gemm   out[r] = scale[i] * a[r] @ b[i]^T      i = expert of row r

Both operands are bytes with a scale per block along K: E4M3 and E8M0 per 32, or two codes of E2M1
in a byte and E4M3 per 16 (`rows/microscaling.py`). `tl.dot_scaled` is one instruction on Blackwell,
tcgen05.mma.block_scale, and products in bf16 of widened operands on older GPUs. NVFP4 needs Triton
3.9. Tests compile it for Blackwell and interpret it. No Blackwell GPU has run it, so no products of
the experts call it: `experts/emulated_products.py` multiplies in bf16.

Letters: R expert rows (length), e experts, N columns, K the summed dim, B elements of a scale, P
elements of a byte. A persistent grid as in `gemm.py`, whose order of tiles it has. Bytes moved at
least: (R + e * N) * K * (1 / P + 1 / B) + 2 * R * N; 2 * R * N * K floating-point operations.
"""

import torch
from torch import Tensor

from moecore.kernels.common import launch, next_power_of_2, num_sms, rows_of_experts, tl, triton
from moecore.kernels.grouped.gemm import _locate, _row_tiles
from moecore.kernels.rows.e4m3 import FP8
from moecore.kernels.rows.microscaling import unpack_e2m1

# 128 rows are one instruction's. With 128 columns registers spill on sm_120. Nothing is measured.
PROGRAM = {"BLOCK_M": 128, "BLOCK_N": 64, "GROUP_M": 8, "STAGES": 4, "num_warps": 8}
BYTES_K = 128


def block_scaled_gemm_ref(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, scale_e: Tensor, offsets_e: Tensor
) -> Tensor:
    """Return what `block_scaled_gemm` does, by expert, in fp32; 0 past the rows. Host sync."""
    a_RK, b_eNK = _widened(a, a_scales), _widened(b, b_scales)
    out_RN = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    for i, rows in enumerate(rows_of_experts(offsets_e)):
        out_RN[rows] = a_RK[rows] @ b_eNK[i].T * scale_e[i]
    return out_RN.bfloat16()


def _widened(values: Tensor, scales: Tensor) -> Tensor:
    wide = values.float() if values.dtype == FP8 else unpack_e2m1(values)
    wide_scales = scales.view(torch.float8_e8m0fnu if values.dtype == FP8 else FP8).float()
    return wide * wide_scales.repeat_interleave(wide.shape[-1] // scales.shape[-1], -1)


@triton.jit(do_not_specialize=["num_experts"])
def _block_scaled_gemm_kernel(
    a_ptr,  # [R, K / P] e4m3, or uint8 with two e2m1
    a_scales_ptr,  # [R, K / B] uint8 with e8m0, or e4m3
    b_ptr,  # [e, N, K / P]
    b_scales_ptr,  # [e, N, K / B]
    scale_ptr,  # [e] fp32
    offsets_ptr,  # [e] int32
    out_ptr,  # [R, N] bf16, out; rows past the last offset stay as they are
    num_experts,
    N,
    K,
    FORMAT: tl.constexpr,  # "e4m3" or "e2m1"
    P: tl.constexpr,
    B: tl.constexpr,
    E_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    starts, tiles, sums, total = _row_tiles(offsets_ptr, num_experts, E_POW2, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    packed, blocks = K // P, K // B
    steps = tl.arange(0, BLOCK_K // P)
    scale_steps = tl.arange(0, BLOCK_K // B)
    for tile in tl.range(tl.program_id(0), total * num_n, tl.num_programs(0)):
        expert, row, n = _locate(tile, num_n, starts, tiles, sums, total, E_POW2, BLOCK_M, GROUP_M)
        rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
        in_rows = (rows < tl.load(offsets_ptr + expert))[:, None]
        columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
        in_columns = (columns < N)[:, None]
        b_rows = expert.to(tl.int64) * N + columns
        out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
            k = step * (BLOCK_K // P) + steps
            block = step * (BLOCK_K // B) + scale_steps
            in_k, in_block = (k < packed)[None, :], (block < blocks)[None, :]
            a = tl.load(a_ptr + rows[:, None] * packed + k[None, :], mask=in_rows & in_k, other=0.0)
            b = tl.load(
                b_ptr + b_rows[:, None] * packed + k[None, :], mask=in_columns & in_k, other=0.0
            )
            # A scale of what is masked multiplies zeros; its byte 0 is no NaN of either format.
            a_scales = tl.load(
                a_scales_ptr + rows[:, None] * blocks + block[None, :],
                mask=in_rows & in_block,
                other=0.0,
            )
            b_scales = tl.load(
                b_scales_ptr + b_rows[:, None] * blocks + block[None, :],
                mask=in_columns & in_block,
                other=0.0,
            )
            out = tl.dot_scaled(a, a_scales, FORMAT, b.T, b_scales, FORMAT, out)
        out *= tl.load(scale_ptr + expert)
        at = out_ptr + rows[:, None] * N + columns[None, :]
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=in_rows & (columns < N)[None, :])


def block_scaled_gemm(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, scale_e: Tensor, offsets_e: Tensor
) -> Tensor:
    """Return each expert row times its expert's matrix, [R, N] bf16. No autograd, no host sync.

    Args:
        a: [R, K] e4m3, or [R, K / 2] uint8 as `pack_e2m1` packs; rows in expert order, contiguous.
        a_scales: [R, K / 32] uint8 as `to_e8m0` returns, or [R, K / 16] e4m3; not swizzled.
        b: [e, N, K], or [e, N, K / 2], of the format of `a`.
        b_scales: [e, N, K / 32], or [e, N, K / 16].
        scale_e: fp32, the product of the tensors' scales of each expert.
        offsets_e: int32 on the device, running sum of the experts' rows, at most R.
    """
    (R, packed), (e, N, _) = a.shape, b.shape
    P = 1 if a.dtype == FP8 else 2
    K, blocks = packed * P, a_scales.shape[1]
    out_RN = a.new_empty(R, N, dtype=torch.bfloat16)
    if not R:
        return out_RN
    launch(
        _block_scaled_gemm_kernel,
        num_sms(a.device),
        *(a, a_scales, b, b_scales, scale_e, offsets_e, out_RN, e, N, K),
        FORMAT="e4m3" if P == 1 else "e2m1",
        P=P,
        B=K // blocks,
        E_POW2=next_power_of_2(e),
        BLOCK_K=BYTES_K * P,
        **PROGRAM,
    )
    return out_RN
