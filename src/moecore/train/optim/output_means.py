"""NorMuon: each output of an orthogonalised update is divided by its root mean square.

Legend: n matrices, R rows, C columns; an output is a row, or a column of a transposed matrix.

    O -> v <- beta2 v + (1 - beta2) mean(O^2) over inputs -> O / sqrt(v) -> scaled to the norm of O

Muon's updates have singular values near 1, but the norms of their outputs differ. The division
makes these norms about equal. The matrix is then rescaled to the norm of O. v has one number per
output.

Source: arXiv:2510.05491; its published code rescales the norm.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from moecore.base.torch_private import get_local_tensor
from moecore.train.optim.matrices import MatrixLayout

EPS = 1e-10  # the least root, and the least norm, by which is divided
PART_NUMEL = 1 << 26  # elements that are fp32 at once


def make_output_means(param: Tensor, layout: MatrixLayout, dtype: torch.dtype) -> Tensor:
    """Return zeros for running mean squares: like `param`, but with size 1 in the input dim."""
    dim = param.ndim - 2 if layout.transposed else param.ndim - 1
    local = get_local_tensor(param.detach())
    means = torch.zeros(_reduce_shape(local.shape, dim), dtype=dtype, device=local.device)
    if not isinstance(param, DTensor):
        return means
    # Ranks with other inputs of the same outputs have replicas.
    placements = [Replicate() if p.is_shard(dim) else p for p in param.placements]
    shape = _reduce_shape(param.shape, dim)
    stride = torch.empty(shape, device="meta", dtype=torch.float32).stride()
    return DTensor.from_local(
        means, param.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


def divide_by_means_(
    x_nRC: Tensor, means: Tensor, *, beta2: float, found_inf: Tensor | None = None
) -> None:
    """Update running mean squares of outputs, and divide an update by their roots, in place.

    `means` is [n, R, 1] or [n, 1, C] for n matrices of R rows and C columns, and `beta2` the
    decay of the means. Each matrix keeps its norm. If the scalar `found_inf` is above 0, the means
    do not change.
    """
    inputs = x_nRC.numel() / means.numel()
    new = torch.full((), 1 - beta2, dtype=means.dtype, device=means.device)
    if found_inf is not None:
        new = new.masked_fill(found_inf > 0, 0.0)
    max_matrices = max(1, PART_NUMEL // x_nRC[0].numel())
    for x, mean in zip(x_nRC.split(max_matrices), means.split(max_matrices), strict=True):
        wide = x.to(mean.dtype)
        mean.lerp_(wide.square().sum_to_size(mean.shape) / inputs, new)
        divided = wide / (mean.sqrt() + EPS)
        norm = torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True)
        new_norm = torch.linalg.vector_norm(divided, dim=(1, 2), keepdim=True)
        x.copy_(divided * (norm / new_norm.clamp(min=EPS)))


def _reduce_shape(shape: torch.Size, reduced_dim: int) -> torch.Size:
    return torch.Size((*shape[:reduced_dim], 1, *shape[reduced_dim + 1 :]))
