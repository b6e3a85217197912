"""Grouped products in plain PyTorch."""

import torch
from torch import Tensor

from moecore.kernels.common import iterate_expert_slices
from moecore.kernels.rows.activation import ActivationOptions, weighted_activation_ref


def grouped_gemm_ref(
    a: Tensor, b: Tensor, offsets_e: Tensor, *, row_ids_R: Tensor | None = None
) -> Tensor:
    """Compute `grouped_gemm` in plain PyTorch; rows past offsets_e[-1] are 0. Host sync."""
    rows_R = a if row_ids_R is None else a.index_select(0, row_ids_R)
    dtype = torch.promote_types(a.dtype, torch.float32)
    out = torch.zeros(rows_R.shape[0], b.shape[2], dtype=dtype, device=a.device)
    for i, rows in enumerate(iterate_expert_slices(offsets_e)):
        out[rows] = rows_R[rows].to(dtype) @ b[i].to(dtype)
    return out.to(a.dtype)


def grouped_gemm_activation_ref(
    x_SD: Tensor,
    w1_eCD: Tensor,
    row_ids_R: Tensor,
    weights_R: Tensor,
    offsets_e: Tensor,
    options: ActivationOptions,
) -> tuple[Tensor, Tensor]:
    """Return FC1's output h = x @ w1^T and act(h) * weight, in plain PyTorch. Host sync."""
    h_RC = grouped_gemm_ref(x_SD, w1_eCD.transpose(1, 2), offsets_e, row_ids_R=row_ids_R)
    return h_RC, weighted_activation_ref(h_RC, weights_R, offsets_e[-1], options)
