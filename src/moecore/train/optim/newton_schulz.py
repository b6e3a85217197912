"""Newton-Schulz: a matrix U S V^T becomes about U V^T, by matrix products alone.

Legend: n matrices, R rows, C columns.

Each step is X <- a X + (b A + c A A) X with A = X X^T, of the shorter side. With the usual
coefficients singular values end between 0.7 and 1.2, not at 1: they are chosen for the steepest
start. Flops of a step: 2 m^2 (2 l + m), m the shorter side, l the longer.

Source: https://kellerjordan.github.io/posts/muon.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
BATCH_NUMEL = 1 << 26  # of matrices that are multiplied at once


def orthogonalize(
    x_nRC: Tensor,
    *,
    steps: int = 5,
    coefficients: Sequence[float] = COEFFICIENTS,
    eps: float = 1e-7,
) -> Tensor:
    """Return x with its singular values moved to about 1, in its dtype; of zeros, zeros.

    Products add in fp32 and round to the dtype of x.

    Args:
        x_nRC: finite, any strides.
        steps: of the iteration.
        coefficients: a, b and c.
        eps: least norm by which a matrix is divided.
    """
    a, b, c = coefficients
    is_tall = x_nRC.shape[1] > x_nRC.shape[2]
    x = x_nRC.mT if is_tall else x_nRC
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=wide)
    x = x / norm.clamp(min=eps).to(x.dtype)  # no singular value is above 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def orthogonalize_all(matrices: Sequence[Tensor], **options: object) -> list[Tensor]:
    """Return `orthogonalize` of each [n, R, C], those of one shape in as few products as fit.

    Args:
        matrices: of one dtype and device.
        options: of `orthogonalize`.
    """
    of_shape: dict[torch.Size, list[int]] = {}
    for i, x in enumerate(matrices):
        of_shape.setdefault(x.shape[1:], []).append(i)
    found: list[Tensor] = list(matrices)
    for shape, places in of_shape.items():
        joined = matrices[places[0]]
        if len(places) > 1:
            joined = torch.cat([matrices[i] for i in places])
        most = max(1, BATCH_NUMEL // shape.numel())
        parts = [orthogonalize(part, **options) for part in joined.split(most)]  # type: ignore[arg-type]
        done = parts[0] if len(parts) == 1 else torch.cat(parts)
        sizes = [matrices[i].shape[0] for i in places]
        for i, part in zip(places, done.split(sizes), strict=True):
            found[i] = part
    return found
