"""Cross-entropy of a linear head in chunks: the logits of one chunk exist at a time.

Legend: N tokens, C tokens of one chunk, D model dim, V vocabulary.

For each chunk, forward computes the logits, in fp32 or with a recipe in FP8 (`precision/head.py`).
`kernels/cross_entropy.py` computes the loss and the gradient of the logits. Two more matmuls give
the chunk's d_hidden and add to d_weight. Backward therefore recomputes nothing and only scales by
the incoming gradient. Memory: C * V * 4 bytes (C * V * 6 for 16-bit inputs) for the chunk,
D * V * 4 for the fp32 d_weight that accumulates over chunks, and in FP8 D * V * 2 for the weight.

The vocabulary may be sharded over the ranks of `group`. Then V is the vocabulary of one rank. Ranks
exchange three numbers per token, in one collective per chunk, between two passes over its logits.

Source: fusing head and loss is the idea of Liger Kernel (arXiv:2410.10989) and of cut
cross-entropy (arXiv:2411.09009).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.fields import Count, check_arguments
from moecore.base.options.precision import Recipe
from moecore.base.torch_private import get_autocast_dtype
from moecore.kernels.common import disable_autocast
from moecore.kernels.cross_entropy import IGNORE_INDEX, softmax_statistics
from moecore.kernels.rows.scaled_cast import scaled_cast
from moecore.moe.dispatch.collectives import all_gather_rows
from moecore.precision.head import HeadProducts, make_head_products

# Returns the summed loss of the tokens in a slice and, if the bool is True, the gradient of their
# logits [C, V] for `HeadProducts`. The logits may be overwritten.
ChunkLoss = Callable[
    [HeadProducts, Tensor, Tensor, slice, bool, dist.ProcessGroup | None], tuple[Tensor, Any]
]


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    num_tokens: Tensor | int | None = None,
    chunk_tokens: Count = 2048,
    group: dist.ProcessGroup | None = None,
    recipe: Recipe | None = None,
) -> Tensor:
    """Return the cross-entropy of softmax(hidden @ weight^T) against the labels, an fp32 scalar.

    Under autocast the matmuls run in the autocast dtype, as `F.linear` does. Without a recipe
    nothing else is rounded.

    Args:
        hidden_ND: any float dtype; N may be 0.
        weight_VD: the head, same dtype (under autocast any) and device.
        labels_N: int64 in [0, V), or -100 for tokens without a loss. For any other label the loss
            is NaN on a GPU or with a group; on a CPU without a group an error is raised.
        num_tokens: divisor of the loss summed over labels (int or integer scalar tensor);
            None = the number of labels other than -100. A divisor of 0 is replaced by 1.
        chunk_tokens: number of tokens C whose logits exist at a time; 2 C in FP8.
        group: ranks with identical tokens and labels, over which the head's rows are sharded evenly
            in rank order; None = weight_VD is the full head.
        recipe: "blockwise" = matmuls in FP8, if the sizes of this rank's weight are multiples of
            128 and inputs are 16-bit on a GPU. Logits are rounded to the 16-bit dtype. None = off.

    Returns:
        Scalar, fp32 (fp64 for fp64 inputs). No host sync. With a group the loss is equal on all
        ranks. The gradient of hidden_ND on a rank is partial: the sum over ranks is the gradient.

    Raises:
        ValueError: when `num_tokens` is a floating tensor, `chunk_tokens` < 1, `labels_N` is not
            one int64 label per row of `hidden_ND`, dtypes differ without autocast, or the inputs do
            not meet the conditions of `recipe`.
        NotImplementedError: in backward with create_graph=True.
    """
    check_arguments(linear_cross_entropy, locals())
    # Mixed precision casts floating arguments of a module, which would round the count.
    if isinstance(num_tokens, Tensor) and num_tokens.is_floating_point():
        raise ValueError(
            f"num_tokens ({num_tokens.dtype}) must be an integer tensor: pass num_tokens.long()"
        )
    args = hidden_ND, weight_VD, labels_N, _compute_cross_entropy_
    total = sum_head_losses(*args, chunk_tokens=chunk_tokens, group=group, recipe=recipe)
    if num_tokens is None:
        num_tokens = count_labels(labels_N)
    divisor = num_tokens.clamp(min=1) if isinstance(num_tokens, Tensor) else max(1, num_tokens)
    return total / divisor


def sum_head_losses(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    compute_loss: ChunkLoss,
    *,
    chunk_tokens: int,
    group: dist.ProcessGroup | None,
    recipe: Recipe | None = None,
) -> Tensor:
    """Return the sum of `compute_loss` over chunks; other arguments: `linear_cross_entropy`."""
    dtype = find_matmul_dtype(hidden_ND, weight_VD, labels_N)
    options = chunk_tokens, torch.is_grad_enabled(), dtype, group, recipe, compute_loss
    total: Tensor = _HeadLoss.apply(hidden_ND, weight_VD, labels_N, *options)
    return total


def find_matmul_dtype(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> torch.dtype:
    """Return the dtype of the head's matmuls; raise a ValueError for a wrong shape or dtype."""
    if labels_N.shape != hidden_ND.shape[:1]:
        raise ValueError(
            f"labels_N {tuple(labels_N.shape)} must have one label for each row of "
            f"hidden_ND {tuple(hidden_ND.shape)}: flatten both"
        )
    if labels_N.dtype != torch.int64:
        raise ValueError(f"labels_N ({labels_N.dtype}) must be int64: pass labels_N.long()")
    dtype = hidden_ND.dtype
    autocast = get_autocast_dtype(hidden_ND)
    if autocast is not None and dtype != torch.float64:
        return autocast
    if weight_VD.dtype != dtype:
        raise ValueError(
            f"weight_VD ({weight_VD.dtype}) must have the dtype of hidden_ND ({dtype}): convert "
            "one of them, or call it under torch.autocast"
        )
    return dtype


def count_labels(labels: Tensor) -> Tensor:
    """Return the number of labels other than -100 as an int64 scalar on the labels' device."""
    return (labels != IGNORE_INDEX).sum()


class _HeadLoss(torch.autograd.Function):
    """Autograd function of the loss summed over labels, whose forward computes the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        chunk_tokens: int,
        needs_grads: bool,
        product_dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        recipe: Recipe | None,
        compute_loss: ChunkLoss,
    ) -> Tensor:
        ctx.hidden_dtype, ctx.weight_dtype = hidden_ND.dtype, weight_VD.dtype
        hidden_ND, weight_VD = hidden_ND.to(product_dtype), weight_VD.to(product_dtype)
        dtype = torch.promote_types(product_dtype, torch.float32)
        want_hidden = needs_grads and ctx.needs_input_grad[0]
        want_weight = needs_grads and ctx.needs_input_grad[1]
        d_hidden_ND = torch.empty_like(hidden_ND) if want_hidden else None
        d_weight_VD = torch.empty_like(weight_VD, dtype=dtype) if want_weight else None
        total = torch.zeros((), dtype=dtype, device=hidden_ND.device)
        if d_weight_VD is not None and hidden_ND.shape[0] == 0:
            d_weight_VD.zero_()
        with disable_autocast(hidden_ND):
            products = make_head_products(weight_VD, recipe, training=want_hidden)
            chunk_tokens *= products.chunks
            for start in range(0, hidden_ND.shape[0], chunk_tokens):
                part = slice(start, start + chunk_tokens)
                d_hidden_CD = None if d_hidden_ND is None else d_hidden_ND[part]
                gradients = d_hidden_CD, d_weight_VD
                rows = hidden_ND[part], products, labels_N[part]
                total += _compute_chunk_loss_(*rows, *gradients, part, group, compute_loss)
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
        return d_hidden_ND, d_weight_VD, *[None] * 7


def _compute_chunk_loss_(
    hidden_CD: Tensor,
    products: HeadProducts,
    labels_C: Tensor,
    d_hidden_CD: Tensor | None,
    d_weight_VD: Tensor | None,
    part: slice,
    group: dist.ProcessGroup | None,
    compute_loss: ChunkLoss,
) -> Tensor:
    """Return a chunk's summed loss, overwrite d_hidden_CD, and add to d_weight_VD.

    The first chunk overwrites d_weight_VD. None = not computed.
    """
    # All tensors as large as the logits are freed on return, before the next chunk.
    want = d_hidden_CD is not None or d_weight_VD is not None
    logits_CV = products.compute_logits(hidden_CD)
    loss, d_logits = compute_loss(products, logits_CV, labels_C, part, want, group)
    del logits_CV
    if d_hidden_CD is not None:
        products.write_d_hidden(d_logits, d_hidden_CD)
    if d_weight_VD is not None:
        products.add_d_weight(d_logits, d_weight_VD, overwrites=part.start == 0)
    return loss


def _compute_cross_entropy_(
    products: HeadProducts,
    logits_CV: Tensor,
    labels_C: Tensor,
    _part: slice,
    needs_grad: bool,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Any]:
    """Return a chunk's summed cross-entropy and its gradient; overwrites the logits."""
    if group is None:
        return products.compute_cross_entropy(logits_CV, labels_C, needs_grad=needs_grad)
    of_rows = combine_row_statistics(logits_CV, labels_C, group)
    loss = -of_rows.compute_label_log_probs().sum()
    if not needs_grad:
        return loss, None
    return loss, products.compute_softmax_gradient(logits_CV, *of_rows[:3])


class RowStatistics(NamedTuple):
    """Softmax statistics of a chunk's tokens over the full vocabulary, fp32 or fp64."""

    local_labels_C: Tensor  # column on this rank; -1 = other rank, -100 = row without a loss
    highs_C: Tensor  # the maximum
    sums_C: Tensor  # of exp(x - maximum); NaN where the label does not exist
    label_logits_C: Tensor  # x at the label

    def compute_label_log_probs(self) -> Tensor:
        """Return the log-probability of each label, 0 where the label is -100."""
        log_probs_C = self.label_logits_C - self.highs_C - self.sums_C.log()
        return log_probs_C.masked_fill(self.local_labels_C == IGNORE_INDEX, 0)


def combine_row_statistics(
    logits_CV: Tensor, labels_C: Tensor, group: dist.ProcessGroup | None
) -> RowStatistics:
    """Return softmax statistics over the vocabulary, from this rank's logits [C, V]. Collective."""
    V = logits_CV.shape[1]
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    counts_C = labels_C != IGNORE_INDEX
    exists_C = (labels_C >= 0) & (labels_C < V * size)
    local_labels_C = labels_C - V * rank
    is_local_C = (local_labels_C >= 0) & (local_labels_C < V)
    local_labels_C = local_labels_C.where(is_local_C, -1).where(counts_C, IGNORE_INDEX)
    statistics_C3 = softmax_statistics(logits_CV, local_labels_C)
    if group is not None:
        statistics_C3 = all_gather_rows(statistics_C3, group)
    highs_GC, sums_GC, label_logits_GC = statistics_C3.unflatten(0, (size, -1)).unbind(2)
    high_C = highs_GC.amax(0)
    sum_C = (sums_GC * (highs_GC - high_C).exp()).sum(0)
    sum_C = sum_C.masked_fill(counts_C & ~exists_C, torch.nan)
    return RowStatistics(local_labels_C, high_C, sum_C, label_logits_GC.sum(0))
