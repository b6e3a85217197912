"""Distillation: the loss of a head's logits against a teacher's logits, in chunks of tokens.

Legend: N tokens, C tokens of one chunk, B rows, t tokens of a row of this rank, D model dim of the
teacher, V vocabulary (of one rank of `group`), k logits of the teacher per token.

With student logits z, teacher logits y, p = softmax(z / T), q = softmax(y / T) and temperature T,

    loss of a token = (1 - kd_ratio) * cross-entropy(z) + kd_ratio * T^2 * KL
    "forward"    KL = sum of q (log q - log p)      d KL / d z = (p - q) / T
    "reverse"    KL = sum of p (log p - log q)      d KL / d z = p (log p - log q - KL) / T

p and q are over the vocabulary, or over the k tokens of largest teacher logits.
`models/loss.py` runs the chunks: forward computes the gradients, and the logits of one chunk exist
at a time. Memory of a chunk: about 8 * C * V * 4 bytes over the vocabulary, 2 * C * V * 4 with
`top_k`.

Source: arXiv:1503.02531 has the factor T^2; kd_ratio, kl_type and temperature are named as in NeMo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.fields import Bound, CheckedRecord, Count, Positive
from moecore.kernels.common import disable_autocast
from moecore.kernels.cross_entropy import IGNORE_INDEX, softmax_gradient_
from moecore.models.loss import combine_row_statistics, sum_head_losses
from moecore.moe.dispatch.collectives import all_gather_rows
from moecore.precision.head import HeadProducts, mm_with_dtype

CHUNK_TOKENS = 512
# Returns, for a slice of a rank's tokens, the ids of k tokens [C, k] with their logits or
# log-probabilities [C, k]; or None with the logits of the rank's vocabulary [C, V].
Teacher = Callable[[slice], tuple[Tensor | None, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Distillation(CheckedRecord):
    """The loss of distillation: cross-entropy of labels, and KL divergence from a teacher.

    Attributes:
        teacher: the directory of the teacher, or its name of the hub; frozen and sharded as the
            trained model, whose vocabulary it must have.
        kl_type: "forward" is KL(teacher || student), and "reverse" is KL(student || teacher).
        temperature: divisor of both models' logits in the KL divergence, which is multiplied by
            the square of the temperature.
        top_k: the KL divergence is over this number of tokens with the largest teacher logits;
            None = over the vocabulary.
        kd_ratio: weight of the KL divergence; the cross-entropy has the weight 1 - kd_ratio.
    """

    teacher: Path
    kl_type: Literal["forward", "reverse"] = "forward"
    temperature: Positive = 1.0
    top_k: Count | None = None
    kd_ratio: Annotated[float, Bound(">", 0), Bound("<=", 1)] = 0.5


def compute_kl(
    logits_CX: Tensor, teacher_CX: Tensor, kl_type: str, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return the KL divergence [C] of softmaxes over X, and its gradient of `logits_CX` [C, X].

    `group` has ranks with other columns of X. A token with a teacher logit of -inf is left out.
    """
    logits_CX = logits_CX.masked_fill(teacher_CX.isneginf(), -torch.inf)
    log_p_CX, log_q_CX = (_log_softmax(x_CX, group) for x_CX in (logits_CX, teacher_CX))
    p_CX, q_CX = log_p_CX.exp(), log_q_CX.exp()
    ratio_CX = (log_p_CX - log_q_CX).masked_fill_(teacher_CX.isneginf(), 0)
    terms_CX = ratio_CX.mul_(-q_CX if kl_type == "forward" else p_CX)
    kl_C = terms_CX.sum(1)
    if group is not None:
        kl_C = all_gather_rows(kl_C, group).unflatten(0, (group.size(), -1)).sum(0)
    if kl_type == "forward":
        return kl_C, p_CX.sub_(q_CX)
    return kl_C, terms_CX.sub_(p_CX.mul_(kl_C[:, None]))


def _log_softmax(x_CX: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the log-softmax over the columns of all ranks of `group`."""
    total_C = x_CX.logsumexp(1)
    if group is not None:
        total_C = all_gather_rows(total_C, group).unflatten(0, (group.size(), -1)).logsumexp(0)
    return x_CX - total_C[:, None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DistillationLoss:
    """A loss that a forward returns in place of the cross-entropy, as `LogProbLoss`.

    Attributes:
        labels_BT: int64 on the model's device, of full rows: the token that follows each position,
            or -100 for positions without a loss.
        num_tokens: divisor of the sum over tokens.
        teacher: reads the teacher's logits of this rank's tokens.
    """

    labels_BT: Tensor
    num_tokens: Tensor
    teacher: Teacher
    options: Distillation

    def compute_from_hidden(
        self,
        hidden_BtD: Tensor,
        weight_VD: Tensor,
        labels_Bt: Tensor,
        gather_full_rows: Callable[[Tensor], Tensor],
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """Return the loss of this rank's hidden states, see `LogProbLoss`."""
        args = hidden_BtD.flatten(0, 1), weight_VD, labels_Bt.flatten(), self._compute_loss_
        total = sum_head_losses(*args, chunk_tokens=min(chunk_tokens, CHUNK_TOKENS), group=group)
        # The sum over cp ranks: each has a share of the tokens.
        shares_Bt1 = (total / labels_Bt.numel()).expand(*labels_Bt.shape, 1)
        return gather_full_rows(shares_Bt1).sum() / self.num_tokens.clamp(min=1)

    def compute_from_logits(self, *_: Any) -> Tensor:
        """Raise NotImplementedError: the model changes its logits after its head."""
        raise NotImplementedError(
            "distillation must be of a model whose logits are those of its linear head without a "
            "bias: this model, or its options, scale, cap or gather them, so distill another model"
        )

    def _compute_loss_(
        self,
        products: HeadProducts,
        logits_CV: Tensor,
        labels_C: Tensor,
        part: slice,
        needs_grad: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        """Return a chunk's summed loss and its gradient of logits; see `loss.ChunkLoss`."""
        options, is_ignored_C1 = self.options, (labels_C == IGNORE_INDEX)[:, None]
        V, T, ratio = logits_CV.shape[1], options.temperature, options.kd_ratio
        logits_CV.masked_fill_(is_ignored_C1, 0)
        ids_Ck, teacher_CX = self.teacher(part)
        teacher_CX = teacher_CX.to(logits_CV.dtype).masked_fill(is_ignored_C1, 0) / T
        if ids_Ck is None:
            if teacher_CX.shape[1] != V:
                raise ValueError(
                    f"the teacher's vocabulary ({teacher_CX.shape[1]}) must be the student's ({V}) "
                    "on each rank: use a teacher of the same tokenizer and head"
                )
            kl_C, d_kl_CX = compute_kl(logits_CV / T, teacher_CX, options.kl_type, group)
        else:
            ids_Ck = ids_Ck.long() - (0 if group is None else V * group.rank())
            is_local_Ck = (ids_Ck >= 0) & (ids_Ck < V)
            ids_Ck = ids_Ck.where(is_local_Ck, 0)
            x_Ck = logits_CV.gather(1, ids_Ck).where(is_local_Ck, 0)
            if group is not None:
                x_Ck = all_gather_rows(x_Ck, group).unflatten(0, (group.size(), -1)).sum(0)
            kl_C, d_kl_CX = compute_kl(x_Ck / T, teacher_CX, options.kl_type, None)
            d_kl_CX = d_kl_CX.where(is_local_Ck, 0)
        of_rows = combine_row_statistics(logits_CV, labels_C, group)
        loss_C = (1 - ratio) * -of_rows.compute_label_log_probs() + ratio * T**2 * kl_C
        if needs_grad:
            logits_CV = softmax_gradient_(logits_CV, *of_rows[:3], logits_CV.dtype)
            logits_CV.mul_(1 - ratio)
            d_kl_CX.mul_(ratio * T).masked_fill_(is_ignored_C1, 0)
            if ids_Ck is None:
                logits_CV.add_(d_kl_CX)
            else:
                logits_CV.scatter_add_(1, ids_Ck, d_kl_CX)
        return loss_C.sum(), logits_CV.to(products.hidden_CD.dtype)


class TeacherForward:
    """A `log_prob_loss` of a teacher's forward, which stores the teacher's logits. Returns 0.

    Without `top_k` it stores hidden states, and a copy of the unsharded head in `heads`, which the
    frozen teacher's forwards share. It is no dataclass, because cp ranks store different tokens.
    """

    def __init__(self, labels_BT: Tensor, *, top_k: int | None, heads: list[Tensor]) -> None:
        self.labels_BT, self.top_k, self._heads = labels_BT, top_k, heads
        self._read: Teacher

    def __call__(self, part: slice) -> tuple[Tensor | None, Tensor]:
        """Return the ids and logits of a slice of this rank's tokens; see `Teacher`."""
        return self._read(part)

    def compute_from_hidden(
        self,
        hidden_BtD: Tensor,
        weight_VD: Tensor,
        labels_Bt: Tensor,
        _gather_full_rows: Callable[[Tensor], Tensor],
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """Store the teacher's logits of this rank's tokens; return 0."""
        hidden_ND = hidden_BtD.detach().flatten(0, 1).to(weight_VD.dtype)
        k = self.top_k
        if k is None and not self._heads:
            self._heads.append(weight_VD.detach().clone())
        weight_VD = self._heads[0] if k is None else weight_VD.detach()
        self._read = partial(_compute_logits, hidden_ND, weight_VD)
        if k is not None:
            starts = range(0, len(hidden_ND), chunk_tokens)
            chunks = [self._select_top_k(slice(i, i + chunk_tokens), k, group) for i in starts]
            ids_Nk, logits_Nk = (torch.cat(x) for x in zip(*chunks, strict=True))
            self._read = partial(_read_top_k, ids_Nk, logits_Nk)
        return hidden_ND.new_zeros((), dtype=torch.float32)

    compute_from_logits = DistillationLoss.compute_from_logits

    def _select_top_k(
        self, part: slice, k: int, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        """Return ids, int32, and logits [C, k] of the k largest logits over the vocabulary."""
        _, logits_CV = self(part)
        V, rank = logits_CV.shape[1], 0 if group is None else group.rank()
        logits_CX, ids_CX = logits_CV.topk(min(k, V))
        ids_CX += V * rank
        if group is not None:
            gathered = (all_gather_rows(x_CX, group) for x_CX in (logits_CX, ids_CX))
            logits_CX, ids_CX = (
                x_GX.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1) for x_GX in gathered
            )
            logits_CX, columns_Ck = logits_CX.topk(min(k, logits_CX.shape[1]))
            ids_CX = ids_CX.gather(1, columns_Ck)
        return ids_CX.int(), logits_CX


def _compute_logits(hidden_ND: Tensor, weight_VD: Tensor, part: slice) -> tuple[None, Tensor]:
    """Return None and the logits of a slice of tokens, fp32 or fp64 [C, V]."""
    dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
    with disable_autocast(hidden_ND):
        return None, mm_with_dtype(hidden_ND[part], weight_VD.t(), dtype)


def _read_top_k(ids_Nk: Tensor, logits_Nk: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Return ids and logits of a slice of tokens, [C, k]."""
    return ids_Nk[part], logits_Nk[part]
