"""Cross-entropy of a linear head, in chunks: the logits of all tokens never exist at once.

Legend: N tokens, C tokens of one chunk, D model dim, V vocabulary.

One chunk's logits are made in fp32, `kernels/cross_entropy.py` makes of them the loss and their own
gradient, and from that the chunk's parts of d_hidden and d_weight follow at once. So forward does
all the matrix work of backward too (three products per chunk, nothing recomputed), and backward
only scales by the incoming gradient. Memory: C * V * 4 bytes (C * V * 6 for 16-bit inputs) for the
chunk, D * V * 4 for the fp32 d_weight, which is added up over chunks.

Source: fusing head and loss is the idea of Liger Kernel (arXiv:2410.10989) and of cut
cross-entropy (arXiv:2411.09009).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moecore.base.fields import Count, check_arguments
from moecore.base.torch_names import autocast_dtype
from moecore.kernels.common import is_gpu, no_autocast
from moecore.kernels.cross_entropy import IGNORE_INDEX, cross_entropy_
from moecore.kernels.rows.scaled_cast import scaled_cast


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    num_tokens: Tensor | int | None = None,
    chunk_tokens: Count = 2048,
) -> Tensor:
    """Return the cross-entropy of softmax(hidden @ weight^T) against the labels, an fp32 scalar.

    Under autocast products are in its dtype, as those of `F.linear` are; nothing else is rounded.

    Args:
        hidden_ND: any float dtype; N may be 0.
        weight_VD: the head, same dtype (under autocast any) and device.
        labels_N: int64 in [0, V), or -100 for tokens that do not count. Any other label raises on
            a CPU and makes the loss NaN on a GPU.
        num_tokens: the sum over labels is divided by it (whole number or integer scalar tensor);
            None = by the number of labels that count. 0 divides by 1: nothing counts.
        chunk_tokens: tokens per chunk C.

    Returns:
        Scalar, fp32 (fp64 for fp64 inputs). No host sync.

    Raises:
        ValueError: when `num_tokens` is a floating tensor, `chunk_tokens` < 1, `labels_N` is not
            one int64 label per row of `hidden_ND`, or dtypes differ without autocast.
        NotImplementedError: in backward with create_graph=True.
    """
    check_arguments(linear_cross_entropy, locals())
    # Mixed precision casts floating arguments of a module, which would round the count.
    if isinstance(num_tokens, Tensor) and num_tokens.is_floating_point():
        raise ValueError(
            f"num_tokens ({num_tokens.dtype}) must be an integer tensor: pass num_tokens.long()"
        )
    dtype = product_dtype(hidden_ND, weight_VD, labels_N)
    total = _LinearCrossEntropy.apply(
        hidden_ND, weight_VD, labels_N, chunk_tokens, torch.is_grad_enabled(), dtype
    )
    if num_tokens is None:
        num_tokens = count_labels(labels_N)
    divisor = num_tokens.clamp(min=1) if isinstance(num_tokens, Tensor) else max(1, num_tokens)
    return total / divisor


def product_dtype(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> torch.dtype:
    """Return what products of a head are in; raises for what does not fit each other."""
    if labels_N.shape != hidden_ND.shape[:1]:
        raise ValueError(
            f"labels_N {tuple(labels_N.shape)} must have one label for each row of "
            f"hidden_ND {tuple(hidden_ND.shape)}: flatten both"
        )
    if labels_N.dtype != torch.int64:
        raise ValueError(f"labels_N ({labels_N.dtype}) must be int64: pass labels_N.long()")
    dtype = hidden_ND.dtype
    wanted = autocast_dtype(hidden_ND)
    if wanted is not None and dtype != torch.float64:
        return wanted
    if weight_VD.dtype != dtype:
        raise ValueError(
            f"weight_VD ({weight_VD.dtype}) must have the dtype of hidden_ND ({dtype}): convert "
            "one of them, or call it under torch.autocast"
        )
    return dtype


def count_labels(labels: Tensor) -> Tensor:
    """Return the number of labels that are not -100, an int64 scalar on their device."""
    return (labels != IGNORE_INDEX).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum over labels; the gradients are made in forward, see the module's text."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        chunk: int,
        train: bool,
        product_dtype: torch.dtype,
    ) -> Tensor:
        ctx.hidden_dtype, ctx.weight_dtype = hidden_ND.dtype, weight_VD.dtype
        hidden_ND, weight_VD = hidden_ND.to(product_dtype), weight_VD.to(product_dtype)
        dtype = torch.promote_types(product_dtype, torch.float32)
        want_hidden, want_weight = (train and need for need in ctx.needs_input_grad[:2])
        d_hidden_ND = torch.empty_like(hidden_ND) if want_hidden else None
        d_weight_VD = torch.empty_like(weight_VD, dtype=dtype) if want_weight else None
        total = torch.zeros((), dtype=dtype, device=hidden_ND.device)
        if d_weight_VD is not None and hidden_ND.shape[0] == 0:
            d_weight_VD.zero_()
        with no_autocast(hidden_ND):
            for start in range(0, hidden_ND.shape[0], chunk):
                part = slice(start, start + chunk)
                d_hidden_CD = None if d_hidden_ND is None else d_hidden_ND[part]
                total += _add_chunk_(
                    hidden_ND[part], weight_VD, labels_N[part], d_hidden_CD, d_weight_VD, start == 0
                )
        ctx.save_for_backward(d_hidden_ND, d_weight_VD)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "create_graph (True) must be False for linear_cross_entropy, which keeps gradients "
                "and not how they came about: compute the loss from logits"
            )
        d_hidden_ND, d_weight_VD = ctx.saved_tensors
        if d_hidden_ND is not None:
            d_hidden_ND = (d_hidden_ND * grads[0]).to(ctx.hidden_dtype)
        if d_weight_VD is not None:
            # One pass and one rounding; an fp32 product as large as the head never exists.
            d_weight_VD = scaled_cast(d_weight_VD, ctx.weight_dtype, grads[0])
        return d_hidden_ND, d_weight_VD, None, None, None, None


def _add_chunk_(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    labels_C: Tensor,
    d_hidden_CD: Tensor | None,
    d_weight_VD: Tensor | None,
    first: bool,
) -> Tensor:
    """Return the chunk's summed loss; fill d_hidden and add to d_weight, which `first` fills."""
    # What is as large as the logits is gone when this returns, before the next chunk's are made.
    dtype = torch.promote_types(hidden_CD.dtype, torch.float32)
    want = d_hidden_CD is not None or d_weight_VD is not None
    logits_CV = product(hidden_CD, weight_VD.t(), dtype)
    loss, d_logits_CV = cross_entropy_(logits_CV, labels_C, hidden_CD.dtype if want else None)
    if d_logits_CV is None:
        return loss
    del logits_CV
    if d_hidden_CD is not None:
        torch.mm(d_logits_CV, weight_VD, out=d_hidden_CD)
    if d_weight_VD is not None:
        add_product_(d_weight_VD, d_logits_CV.t(), hidden_CD, beta=0 if first else 1)
    return loss


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b in `dtype`, not rounded to the dtype of a and b on the way."""
    if a.dtype == dtype:
        return a @ b
    if is_gpu(a):
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def add_product_(out: Tensor, a: Tensor, b: Tensor, *, beta: int) -> None:
    """Write out * beta + a @ b to out, in its dtype; beta 0 does not read it."""
    if a.dtype != out.dtype and is_gpu(a):
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, beta=beta, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype), beta=beta)
