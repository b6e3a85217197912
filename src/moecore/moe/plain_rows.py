"""Row movers in plain PyTorch, for the oracle and for biases (fast: `kernels/rows/move.py`).

Legend: S source rows, R expert rows, D any columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, ids_R: Tensor) -> Tensor:
        ctx.save_for_backward(ids_R)
        ctx.num_rows = x_SD.shape[0]
        return x_SD.index_select(0, ids_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _add_rows(grads[0], ctx.saved_tensors[0], ctx.num_rows), None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, ids_R: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(ids_R)
        return _add_rows(y_RD, ids_R, num_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


def _add_rows(y_RD: Tensor, ids_R: Tensor, num_rows: int) -> Tensor:
    dtype = torch.promote_types(y_RD.dtype, torch.float32)
    out = torch.zeros(num_rows, *y_RD.shape[1:], dtype=dtype, device=y_RD.device)
    return out.index_add_(0, ids_R, y_RD.to(dtype)).to(y_RD.dtype)


def gather_plain(x_SD: Tensor, ids_R: Tensor) -> Tensor:
    """Return x_SD[ids_R]; its backward adds in fp32."""
    return _GatherRows.apply(x_SD, ids_R)


def sum_plain(y_RD: Tensor, ids_R: Tensor, num_rows: int) -> Tensor:
    """Return out[s] = sum of y_RD[r] over ids_R[r] == s, added in fp32 and rounded once.

    Not bit-reproducible on CUDA: the adds are atomic.
    """
    return _SumRows.apply(y_RD, ids_R, num_rows)
