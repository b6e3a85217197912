"""The record of token rows, wide or packed in FP8, and a kernel that widens rows.

Letters: S source rows, R rows, D or C columns, B = C / 128 scales of a row. `widen_rows`, with b
bytes per wide element and U <= R rows in use, reads U * C * (1 + 1 / 32) and writes U * C * b.
"""

from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from moecore.base.torch_private import register_dataclass
from moecore.kernels.common import can_use_kernel, cdiv, launch
from moecore.kernels.rows.e4m3 import from_e4m3
from moecore.kernels.rows.microscaled_rows import widen_microscaled_rows
from moecore.kernels.rows.packed import gather_packed_rows, unpack_rows, view_packed_rows
from moecore.kernels.triton_api import tl, triton

PROGRAM = {"BLOCKS": 32, "num_warps": 4}  # scales of one program: 32 elements per thread


@dataclass(frozen=True, slots=True)
class Rows:
    """A matrix [S, D] with a row per token, unquantised or in FP8 with a scale per 128 columns.

    Rows that are saved for backward may be in MXFP8 or NVFP4, with uint8 scales.
    """

    values: Tensor  # [S, D] bf16, fp16, fp32 or fp64; float8_e4m3fn with scales, rows maybe strided
    scales: Tensor | None = None  # None, or fp32 [S, ceil(D / 128)]: factor of each 128 columns
    wide_dtype: torch.dtype | None = None  # with scales: the dtype in which products multiply
    # whether another operation saves the values for backward (a router reads them too), so that a
    # copy in fewer bytes would not save memory
    is_saved_elsewhere: bool = False
    # with scales: the tensor that receives the wide gradient of these rows, [S, D] without memory
    # (stride 0) and never read; None = no gradient, or the handle of `UnsummedInput`
    grad_handle_SD: Tensor | None = None

    @classmethod
    def from_bytes(
        cls, bytes_SW: Tensor, dim: int, dtype: torch.dtype, grad_handle_SD: Tensor | None = None
    ) -> Self:
        """View bytes from `pack_rows` as FP8 rows, which `widen` dequantises to `dtype`."""
        return cls(*view_packed_rows(bytes_SW, dim), dtype, grad_handle_SD=grad_handle_SD)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which matmuls use the rows: for FP8 rows the dtype after dequantisation."""
        return self.values.dtype if self.wide_dtype is None else self.wide_dtype

    def widen(self) -> Tensor:
        """Return rows [S, D] in `dtype`; the result's gradient flows to `grad_handle_SD`."""
        if self.scales is None:
            return self.values
        if self.scales.dtype == torch.uint8:
            return widen_microscaled_rows(self.values, self.scales, self.dtype)
        if self.grad_handle_SD is None:
            return _widen(self.values, self.scales, self.dtype)
        return _Widened.apply(self.grad_handle_SD, self.values, self.scales)  # type: ignore[no-any-return]


def _widen(values_SD: Tensor, scales_SB: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise FP8 rows to `dtype`; a kernel runs if both are views of `pack_rows`' output."""
    # The kernel reads values and scales side by side, as `pack_rows` leaves them; a compiler fuses
    # the plain form.
    is_packed = values_SD.stride(0) == 4 * scales_SB.stride(0)
    if not is_packed or torch.compiler.is_compiling() or not can_use_kernel(values_SD):
        return unpack_rows(values_SD, scales_SB, dtype)
    ids_S = torch.arange(values_SD.shape[0], dtype=torch.int32, device=values_SD.device)
    return gather_packed_rows(values_SD, scales_SB, dtype, ids_S, ids_S[:, None], None)


class _Widened(torch.autograd.Function):
    """Autograd node that widens FP8 rows; their gradient is returned for `grad_handle_SD`."""

    @staticmethod
    def forward(ctx: Any, grad_handle_SD: Tensor, values_SD: Tensor, scales_SB: Tensor) -> Tensor:
        return _widen(values_SD, scales_SB, grad_handle_SD.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


# Units find the tensors of a module's inputs through pytree.
register_dataclass(Rows, field_names=[f.name for f in fields(Rows)], drop_field_names=[])


@triton.jit(do_not_specialize=["num_blocks"])
def _widen_rows_kernel(
    values_ptr,  # [R, C] uint8
    scales_ptr,  # [R, B] fp32
    num_rows_ptr,  # 0-dim int32, or None for R
    out_ptr,  # [R, C], out
    num_blocks,  # R * B
    ROW_BLOCKS: tl.constexpr,  # B
    BLOCKS: tl.constexpr,
):
    """Write values times scales of BLOCKS blocks of 128 columns; skip rows from num_rows on."""
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = blocks < num_blocks
    if num_rows_ptr is not None:
        inside = inside & (blocks < tl.load(num_rows_ptr).to(tl.int64) * ROW_BLOCKS)
    at = blocks[:, None] * 128 + tl.arange(0, 128)[None, :]
    code = tl.load(values_ptr + at, mask=inside[:, None], other=0)
    scale = tl.load(scales_ptr + blocks, mask=inside, other=0.0)
    x = from_e4m3(code) * scale[:, None]
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def widen_rows(rows: Rows, num_rows: Tensor | None = None) -> Tensor:
    """Dequantise FP8 rows [R, C] to `rows.dtype`, by a kernel on a GPU. No autograd, no host sync.

    Rows without scales are returned unchanged. Rows and scales are contiguous, C is a multiple of
    128. Rows from num_rows (0-dim int32 on the device; None = R) on are uninitialised.
    """
    if rows.scales is None or not can_use_kernel(rows.values):
        return rows.widen()
    out_RC = rows.values.new_empty(rows.values.shape, dtype=rows.dtype)
    num_blocks, row_blocks = rows.scales.numel(), rows.scales.shape[1]
    args = (rows.values.view(torch.uint8), rows.scales, num_rows, out_RC, num_blocks)
    grid = cdiv(num_blocks, PROGRAM["BLOCKS"])
    launch(_widen_rows_kernel, grid, *args, ROW_BLOCKS=row_blocks, **PROGRAM)
    return out_RC
