"""Cross-entropy of a linear head, in chunks: the logits of all tokens never exist at once.

Legend: N tokens, C tokens of one chunk, D model dim, V vocabulary.

One chunk's logits are made in fp32 and turned in place into the loss and then into their own
gradient, from which the chunk's parts of d_hidden and d_weight follow at once. So forward does all
the matrix work of backward too (three products per chunk, nothing recomputed), and backward only
scales by the incoming gradient. Memory: C * V * 4 bytes (C * V * 6 for 16-bit inputs) for the
chunk, D * V * 4 for the fp32 d_weight, which is added up over chunks.

Source: fusing head and loss is the idea of Liger Kernel (arXiv:2410.10989) and of cut
cross-entropy (arXiv:2411.09009); the in-place chain is written for eager PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORE_INDEX = -100  # a label that counts for nothing


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    num_tokens: Tensor | int | None = None,
    chunk_tokens: int = 2048,
) -> Tensor:
    """Return the cross-entropy of softmax(hidden @ weight^T) against the labels, an fp32 scalar.

    Args:
        hidden_ND: any float dtype; N may be 0.
        weight_VD: the head, same dtype and device.
        labels_N: int64 in [0, V), or -100 for tokens that do not count.
        num_tokens: the sum over labels is divided by it (whole number or integer scalar tensor);
            None = by the number of labels that count, or by 1 when none does.
        chunk_tokens: tokens per chunk C.

    Returns:
        Scalar, fp32 (fp64 for fp64 inputs). No host sync.

    Raises:
        ValueError: when `num_tokens` is a floating tensor or `chunk_tokens` < 1.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens ({chunk_tokens}) must be >= 1")
    # Mixed precision casts floating arguments of a module, which would round the count.
    if isinstance(num_tokens, Tensor) and num_tokens.is_floating_point():
        raise ValueError(
            f"num_tokens ({num_tokens.dtype}) must be an integer tensor: pass num_tokens.long()"
        )
    total = _LinearCrossEntropy.apply(
        hidden_ND, weight_VD, labels_N, chunk_tokens, torch.is_grad_enabled()
    )
    if num_tokens is None:
        num_tokens = count_labels(labels_N).clamp(min=1)
    return total / num_tokens


def count_labels(labels: Tensor) -> Tensor:
    """Return the number of labels that are not -100, an int64 scalar on their device."""
    return (labels != IGNORE_INDEX).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum over labels; the gradients are made in forward, see the module's text."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, chunk: int, train: bool
    ) -> Tensor:
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        want_hidden, want_weight = (train and need for need in ctx.needs_input_grad[:2])
        want = want_hidden or want_weight
        d_hidden_ND = torch.empty_like(hidden_ND) if want_hidden else None
        d_weight_VD = torch.zeros_like(weight_VD, dtype=dtype) if want_weight else None
        total = torch.zeros((), dtype=dtype, device=hidden_ND.device)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for start in range(0, hidden_ND.shape[0], chunk):
                part = slice(start, start + chunk)
                hidden_CD = hidden_ND[part]
                logits_CV = _product(hidden_CD, weight_VD.t(), dtype)
                total += _loss_and_gradient_(logits_CV, labels_N[part], want)
                d_logits_CV = logits_CV.to(hidden_ND.dtype) if want else logits_CV
                if d_hidden_ND is not None:
                    torch.mm(d_logits_CV, weight_VD, out=d_hidden_ND[part])
                if d_weight_VD is not None:
                    _add_product_(d_weight_VD, d_logits_CV.t(), hidden_CD)
        ctx.save_for_backward(d_hidden_ND, d_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden_ND, d_weight_VD = ctx.saved_tensors
        if d_hidden_ND is not None:
            d_hidden_ND = d_hidden_ND * grads[0]
        if d_weight_VD is not None:
            # One pass and one rounding; an fp32 product as large as the head never exists.
            out_VD = torch.empty_like(d_weight_VD, dtype=ctx.weight_dtype)
            d_weight_VD = torch.mul(d_weight_VD, grads[0], out=out_VD)
        return d_hidden_ND, d_weight_VD, None, None, None


def _loss_and_gradient_(logits_CV: Tensor, labels_C: Tensor, want_gradient: bool) -> Tensor:
    """Return the chunk's summed loss; logits_CV is overwritten by the sum's gradient if wanted."""
    counts_C1 = (labels_C != IGNORE_INDEX).to(logits_CV.dtype)[:, None]
    # Only the ignored label is replaced: any other one out of range fails in gather.
    labels_C1 = torch.where(labels_C == IGNORE_INDEX, 0, labels_C)[:, None]
    logits_CV.sub_(logits_CV.amax(1, keepdim=True))
    picked_C1 = logits_CV.gather(1, labels_C1)
    sums_C1 = logits_CV.exp_().sum(1, keepdim=True)
    loss = ((sums_C1.log() - picked_C1) * counts_C1).sum()
    if want_gradient:
        logits_CV.mul_(counts_C1 / sums_C1).scatter_add_(1, labels_C1, -counts_C1)
    return loss


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b in `dtype`, not rounded to the dtype of a and b on the way."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _add_product_(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to out, in the dtype of out."""
    if a.dtype != out.dtype and a.is_cuda:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))
