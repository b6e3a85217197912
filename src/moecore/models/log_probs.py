"""Token log-probabilities and entropies of a linear head, whose logits are computed in chunks.

Legend: B rows, T tokens of a row, t tokens of a row of this rank, N tokens, C tokens of one chunk,
D model dim, V vocabulary.

A chunk's fp32 logits are reduced to one or two numbers per token and freed. A loss needs the
numbers of all tokens, so backward recomputes the logits: four matmuls per chunk, where `loss.py`
has three. With x the logits divided by the temperature, p = softmax(x) and entropy H = -sum of
p log p,

    d log p[label] / d x[v] = (v == label) - p[v]         d H / d x[v] = -p[v] (log p[v] + H)

Without H, `kernels/cross_entropy.py` computes the gradient of -log p[label]; the incoming gradient
scales its product with the weight, which has D columns instead of V. The vocabulary may be sharded
over ranks, as in `loss.py`.

Memory: C * V * 4 bytes (C * V * 6 for 16-bit inputs, in backward), C * V * 4 more with entropies,
and in backward D * V * 4 for the fp32 d_weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.fields import CheckedRecord, Count, Positive, check_arguments
from moecore.kernels.common import disable_autocast
from moecore.kernels.cross_entropy import IGNORE_INDEX, softmax_gradient_
from moecore.models.loss import combine_row_statistics, find_matmul_dtype
from moecore.moe.dispatch.collectives import all_gather_rows
from moecore.precision.head import add_product_, mm_with_dtype

Scalar = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LogProbLoss(CheckedRecord):
    """A loss of token log-probabilities that a forward returns instead of the cross-entropy.

    Attributes:
        labels_BT: int64 on the model's device, not sliced over cp or tp: the token that follows
            each position (already shifted), or -100 for positions without a log-probability.
        function: maps log-probabilities and entropies, fp32 [B, T], to an fp32 scalar loss. The
            log-probability is 0 where the label is -100. Entropies are None without `entropy`.
            Every cp and tp rank calls the function with identical values. A repeated step calls
            the function again, so the function may overwrite a result, but not add to it.
        temperature: divisor of the logits.
        entropy: whether entropies are computed.
    """

    labels_BT: Annotated[Tensor, "pass int64 [B, T]"]
    function: Scalar
    temperature: Positive = 1.0
    entropy: bool = False

    def compute_from_hidden(
        self,
        hidden_BtD: Tensor,
        weight_VD: Tensor,
        labels_Bt: Tensor,
        gather_full_rows: Callable[[Tensor], Tensor],
        *,
        chunk_tokens: int = 2048,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """Return the loss of this rank's hidden states [B, t, D], t = T / (cp * tp).

        The head `weight_VD` is sharded over `group`; None = the full head. `gather_full_rows`
        all-gathers local tokens [B, t, X] to [B, T, X].
        """
        options: Any = dict(temperature=self.temperature, entropy=self.entropy, group=group)
        args = hidden_BtD.flatten(0, 1), weight_VD, labels_Bt.flatten()
        numbers = linear_log_probs(*args, chunk_tokens=chunk_tokens, **options)
        return self._call_function(numbers, labels_Bt, gather_full_rows)

    def compute_from_logits(
        self, logits_BtV: Tensor, labels_Bt: Tensor, gather_full_rows: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the loss of full-vocabulary logits, for models that change the head's logits."""
        x_NV = logits_BtV.flatten(0, 1)
        x_NV = x_NV.to(torch.promote_types(x_NV.dtype, torch.float32)) / self.temperature
        labels_N = labels_Bt.flatten()
        all_NV = x_NV.log_softmax(1)
        counts_N = labels_N != IGNORE_INDEX
        label_log_probs_N1 = all_NV.gather(1, labels_N.where(counts_N, 0)[:, None])
        log_probs_N = label_log_probs_N1[:, 0].where(counts_N, 0)
        entropy_N = None
        if self.entropy:
            # A logit of -inf, which excludes a token, has p log p = 0 and not 0 * -inf.
            finite_NV = all_NV.clamp(min=torch.finfo(all_NV.dtype).min)
            entropy_N = -(all_NV.exp() * finite_NV).sum(1).where(counts_N, 0)
        return self._call_function((log_probs_N, entropy_N), labels_Bt, gather_full_rows)

    def _call_function(
        self,
        log_probs_and_entropies: tuple[Tensor, Tensor | None],
        labels_Bt: Tensor,
        gather_full_rows: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """All-gather log-probabilities and entropies, [N] to [B, T]; return `function` of both."""
        numbers = [x_N.view_as(labels_Bt) for x_N in log_probs_and_entropies if x_N is not None]
        rows_BTX = gather_full_rows(torch.stack(numbers, dim=-1))
        if rows_BTX.shape[:2] != self.labels_BT.shape:
            raise ValueError(
                f"log-probabilities {tuple(rows_BTX.shape[:2])} must have the shape of "
                f"LogProbLoss.labels_BT {tuple(self.labels_BT.shape)}: let the model's head see "
                "all tokens of its rows"
            )
        return self.function(rows_BTX[..., 0], rows_BTX[..., 1] if self.entropy else None)


def make_adapter_loss(
    labels_BT: Tensor,
    adapter_ids_B: Tensor,
    num_labels_N: Tensor,
    losses_N: Tensor | None = None,
) -> LogProbLoss:
    """Return a cross-entropy whose gradient in each LoRA adapter is the mean over its rows' labels.

    The loss of a row is its sum over labels, divided by the number of labels of its adapter. The
    forward also needs the ids, as `adapter_ids`.

    Args:
        labels_BT: int64, not sliced over cp or tp, already shifted; -100 = no label.
        adapter_ids_B: int32 or int64, the adapter of each row.
        num_labels_N: number of labels of each of N adapters. With `parallelize_moe(loss="sum")`,
            count the labels of all data ranks and micro-batches of the step.
        losses_N: fp32, which the forward sets to the loss of each adapter, without a gradient.
    """
    check_arguments(make_adapter_loss, locals())
    ids_B = adapter_ids_B.to(labels_BT.device)
    divisors_B = num_labels_N.clamp(min=1).to(labels_BT.device)[ids_B]

    def loss(log_probs_BT: Tensor, _entropy: Tensor | None) -> Tensor:
        losses_B = -log_probs_BT.sum(1) / divisors_B
        if losses_N is not None:
            losses_N.zero_().index_add_(0, ids_B, losses_B.detach().to(losses_N.dtype))
        return losses_B.sum()

    return LogProbLoss(labels_BT=labels_BT, function=loss)


def linear_log_probs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    temperature: Positive = 1.0,
    entropy: bool = False,
    chunk_tokens: Count = 2048,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log softmax(hidden @ weight^T / temperature) at the labels, and the entropy.

    Under autocast the matmuls run in the autocast dtype, as `F.linear` does. Nothing else is
    rounded.

    Args:
        hidden_ND: any float dtype; N may be 0.
        weight_VD: the head, same dtype (under autocast any) and device.
        labels_N: int64 in [0, V), or -100 for tokens to skip. Any other label has a
            log-probability of NaN.
        temperature: divisor of the logits.
        entropy: whether entropies are computed.
        chunk_tokens: tokens per chunk C.
        group: ranks over which the head is sharded, see `linear_cross_entropy`.

    Returns:
        Log-probabilities and entropies in nats (None without `entropy`), fp32 [N] (fp64 for fp64
        inputs). Both are 0 where the label is -100, and differentiable once in hidden states and
        weight. No host sync.

    Raises:
        ValueError: as `linear_cross_entropy`.
        NotImplementedError: in backward with create_graph=True.
    """
    check_arguments(linear_log_probs, locals())
    dtype = find_matmul_dtype(hidden_ND, weight_VD, labels_N)
    numbers: tuple[Tensor, Tensor | None] = _LinearLogProbs.apply(
        hidden_ND, weight_VD, labels_N, temperature, entropy, chunk_tokens, dtype, group
    )
    return numbers


class _LinearLogProbs(torch.autograd.Function):
    """Autograd function of `linear_log_probs`; the module docstring has the formulas."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        temperature: float,
        entropy: bool,
        chunk_tokens: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.temperature, ctx.chunk, ctx.dtype = temperature, chunk_tokens, dtype
        hidden_MD, weight_WD = hidden_ND.to(dtype), weight_VD.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        log_probs_N, highs_N, sums_N = hidden_ND.new_zeros(3, len(hidden_ND), dtype=wide)
        entropy_N = torch.zeros_like(log_probs_N) if entropy else None
        local_labels_N = torch.empty_like(labels_N)
        with disable_autocast(hidden_ND):
            for start in range(0, len(hidden_ND), chunk_tokens):
                part = slice(start, start + chunk_tokens)
                x_CV = _compute_logits(hidden_MD[part], weight_WD, temperature)
                rows = combine_row_statistics(x_CV, labels_N[part], group)
                log_probs_N[part] = rows.compute_label_log_probs()
                local_labels_N[part], highs_N[part], sums_N[part], _ = rows
                if entropy_N is not None:
                    x_CV.sub_(rows.highs_C[:, None])
                    weighted_C = x_CV.exp().mul_(x_CV).sum(1)
                    if group is not None:
                        weighted_GC = all_gather_rows(weighted_C, group)
                        weighted_C = weighted_GC.unflatten(0, (group.size(), -1)).sum(0)
                    entropy_C = rows.sums_C.log() - weighted_C / rows.sums_C
                    is_skipped_C = rows.local_labels_C == IGNORE_INDEX
                    entropy_N[part] = entropy_C.masked_fill(is_skipped_C, 0)
                del x_CV  # before the next chunk's are made
        ctx.save_for_backward(hidden_ND, weight_VD, local_labels_N, highs_N, sums_N, entropy_N)
        return log_probs_N, None if entropy_N is None else entropy_N.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "create_graph (True) must be False for linear_log_probs, which makes logits anew "
                "in backward: compute log-probabilities from logits"
            )
        hidden_ND, weight_VD, *of_rows = ctx.saved_tensors
        hidden_MD, weight_WD = hidden_ND.to(ctx.dtype), weight_VD.to(ctx.dtype)
        counts_N = of_rows[0] != IGNORE_INDEX
        d_N = [(g / ctx.temperature).where(counts_N, 0) for g in grads if g is not None]
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        d_hidden_ND = torch.empty_like(hidden_MD) if wants_hidden else None
        d_weight_VD = torch.zeros_like(weight_VD, dtype=d_N[0].dtype) if wants_weight else None
        with disable_autocast(hidden_ND):
            for start in range(0, len(hidden_ND), ctx.chunk):
                part = slice(start, start + ctx.chunk)
                x_CV = _compute_logits(hidden_MD[part], weight_WD, ctx.temperature)
                row_numbers = (x_N[part] for x_N in (*of_rows, *d_N) if x_N is not None)
                d_CV, scale_C1 = _compute_logits_grad_(x_CV, ctx.dtype, *row_numbers)
                del x_CV
                if d_hidden_ND is not None:
                    torch.mm(d_CV, weight_WD, out=d_hidden_ND[part])
                    d_hidden_ND[part].mul_(scale_C1)
                if d_weight_VD is not None:
                    weighted_hidden_CD = (hidden_MD[part] * scale_C1).to(ctx.dtype)
                    add_product_(d_weight_VD, d_CV.t(), weighted_hidden_CD, beta=1)
                del d_CV
        d_hidden = None if d_hidden_ND is None else d_hidden_ND.to(hidden_ND.dtype)
        d_weight = None if d_weight_VD is None else d_weight_VD.to(weight_VD.dtype)
        return d_hidden, d_weight, *[None] * 6


def _compute_logits(hidden_CD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    """Return a chunk's logits hidden @ weight^T / temperature [C, V], fp32 or fp64."""
    dtype = torch.promote_types(hidden_CD.dtype, torch.float32)
    x_CV = mm_with_dtype(hidden_CD, weight_VD.t(), dtype)
    return x_CV if temperature == 1.0 else x_CV.div_(temperature)


def _compute_logits_grad_(
    logits_CV: Tensor,  # used up
    dtype: torch.dtype,
    local_labels_C: Tensor,
    maxima_C: Tensor,
    sums_C: Tensor,
    *token_grads: Tensor,  # [C]: gradients of log p; or H, and gradients of log p and H
) -> tuple[Tensor, Tensor]:
    """Return a chunk's unscaled gradient of logits [C, V], and its factor per token [C, 1].

    The logits are overwritten. `maxima_C` and `sums_C` are the softmax's maximum and sum per token.
    """
    if len(token_grads) == 1:
        d_logits_CV = softmax_gradient_(logits_CV, local_labels_C, maxima_C, sums_C, dtype)
        return d_logits_CV, -token_grads[0][:, None]
    entropy_C1, d_log_probs_C1, d_entropy_C1 = (x_C[:, None] for x_C in token_grads)
    # What a row that does not count holds, NaN or inf, must not get past a gradient of 0.
    log_p_CV = logits_CV.sub_((maxima_C + sums_C.log())[:, None])
    log_p_CV.masked_fill_((local_labels_C == IGNORE_INDEX)[:, None], 0)
    p_CV = log_p_CV.exp()
    d_CV = log_p_CV.add_(entropy_C1).mul_(d_entropy_C1)
    d_CV = d_CV.add_(d_log_probs_C1).mul_(p_CV).neg_()
    labels_C1 = local_labels_C[:, None]
    d_CV.scatter_add_(1, labels_C1.clamp(min=0), d_log_probs_C1.where(labels_C1 >= 0, 0))
    return d_CV.to(dtype), torch.ones_like(d_log_probs_C1)
