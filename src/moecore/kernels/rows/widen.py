"""Rows in FP8 -> wide rows: each value times the scale of its 128 columns, rounded once.

Letters: R rows, C columns, B = C / 128 scales of a row. Bytes moved with b per wide element:
reads U * C * (1 + 1 / 32) and writes U * C * b for the U <= R rows in use.
"""

import torch
from torch import Tensor

from moecore.kernels.common import cdiv, on_device, tl, triton, use_kernel
from moecore.kernels.rows.e4m3 import from_e4m3
from moecore.kernels.rows.record import Rows

PROGRAM = {"BLOCKS": 32, "num_warps": 4}  # scales of one program: 32 elements per thread


@triton.jit
def _widen_rows_kernel(
    values_ptr,  # [R, C] uint8
    scales_ptr,  # [R, B] fp32
    num_rows_ptr,  # 0-dim int32
    out_ptr,  # [R, C], out
    ROW_BLOCKS: tl.constexpr,  # B
    BLOCKS: tl.constexpr,
):
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = blocks < tl.load(num_rows_ptr).to(tl.int64) * ROW_BLOCKS
    at = blocks[:, None] * 128 + tl.arange(0, 128)[None, :]
    code = tl.load(values_ptr + at, mask=inside[:, None], other=0)
    scale = tl.load(scales_ptr + blocks, mask=inside, other=0.0)
    x = from_e4m3(code) * scale[:, None]
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def widen_rows(rows: Rows, num_rows: Tensor) -> Tensor:
    """Return rows in their wide dtype. No autograd, no host sync.

    Args:
        rows: with scales, both contiguous; C a multiple of 128.
        num_rows: 0-dim int32 on the device, at most R: rows from there on are not read and
            uninitialised in the result.
    """
    if rows.scales is None or not use_kernel(rows.values):
        return rows.widen()
    out_RC = rows.values.new_empty(rows.values.shape, dtype=rows.dtype)
    if rows.scales.numel():
        with on_device(rows.values):
            _widen_rows_kernel[(cdiv(rows.scales.numel(), PROGRAM["BLOCKS"]),)](
                rows.values.view(torch.uint8),
                rows.scales,
                num_rows,
                out_RC,
                ROW_BLOCKS=rows.scales.shape[1],
                **PROGRAM,
            )
    return out_RC
