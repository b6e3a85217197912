"""Distillation: the loss of a head's logits against a teacher's logits, in chunks of tokens.

Legend: N tokens, C tokens of one chunk, B rows, t tokens of a row of this rank, D model dim, V
vocabulary (of one rank of `group`), k teacher logits of a token, X columns: V or k.

With student logits z, teacher logits y, p = softmax(z / T), q = softmax(y / T) and temperature T,

    loss of a token = (1 - kd_ratio) * cross-entropy(z) + kd_ratio * T^2 * KL
    "forward"    KL = sum of q (log q - log p)      d KL / d z = (p - q) / T
    "reverse"    KL = sum of p (log p - log q)      d KL / d z = p (log p - log q - KL) / T

p and q are over the vocabulary, or over the k tokens with the largest teacher logits.
Forward computes the gradients, as in `models/loss.py`. A chunk needs about 8 * C * V * 4 bytes.

Source: arXiv:1503.02531 (the factor T^2). kd_ratio and kl_type are names of NVIDIA NeMo.
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

from moecore.base.fields import Bound, CheckedRecord, Count, FieldErrors, Positive
from moecore.kernels.common import disable_autocast
from moecore.kernels.cross_entropy import IGNORE_INDEX, softmax_gradient_
from moecore.models.loss import combine_row_statistics, sum_head_losses
from moecore.moe.dispatch.collectives import all_gather_rows
from moecore.precision.head import HeadProducts, mm_with_dtype

CHUNK_TOKENS = 512
# Returns ids [C, k] and logits [C, k] of the tokens of a slice, or None and logits [C, V].
ReadTeacher = Callable[[slice], tuple[Tensor | None, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Distillation(CheckedRecord):
    """Learn from labels (cross-entropy) and from a teacher's probabilities (KL divergence).

    Attributes:
        teacher: directory or hub name of the frozen teacher, which is sharded like the student.
        log_probs: directory of a teacher's stored log-probabilities, which replace the teacher.
            With `teacher`, the command writes the directory and trains nothing.
        kl_type: "forward" is KL(teacher || student), and "reverse" is KL(student || teacher).
        temperature: T. The KL divergence is of softmax(logits / T) and is multiplied by T ** 2.
        top_k: the KL divergence uses only the top_k largest teacher logits of each token;
            None = the full vocabulary, or all tokens that `log_probs` has.
        kd_ratio: weight of the KL divergence; the cross-entropy has the weight 1 - kd_ratio.
    """

    teacher: Path | None = None
    log_probs: Path | None = None
    kl_type: Literal["forward", "reverse"] = "forward"
    temperature: Positive = 1.0
    top_k: Count | None = None
    kd_ratio: Annotated[float, Bound(">", 0), Bound("<=", 1)] = 0.5

    def _find_field_errors(self) -> FieldErrors:
        if self.teacher is None and self.log_probs is None:
            yield "teacher", "be set, or log_probs: give the directory of one of them"
        elif self.teacher is not None and self.log_probs is not None and self.top_k is None:
            yield "top_k", "be set with teacher and log_probs, which are written for so many tokens"


def compute_kl(
    logits_CX: Tensor, teacher_CX: Tensor, kl_type: str, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return KL divergences [C], and their gradients by the student's logits [C, X].

    `group` shards the columns X (the vocabulary); None = all columns are local. Collective.
    """
    log_p_CX, log_q_CX = (
        x_CX - _gather_ranks(x_CX.logsumexp(1), group).logsumexp(0)[:, None]
        for x_CX in (logits_CX, teacher_CX)
    )
    p_CX, q_CX = log_p_CX.exp(), log_q_CX.exp()
    is_forward = kl_type == "forward"
    terms_CX = log_q_CX.sub_(log_p_CX) if is_forward else log_p_CX.sub_(log_q_CX)
    terms_CX.mul_(q_CX if is_forward else p_CX)
    kl_C = _gather_ranks(terms_CX.sum(1), group).sum(0)
    if is_forward:
        return kl_C, p_CX.sub_(q_CX)
    return kl_C, terms_CX.sub_(p_CX.mul_(kl_C[:, None]))


def _gather_ranks(x_C: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-gather x_C over the G ranks of `group`; return [G, C, ...]. None = 1 rank."""
    if group is None:
        return x_C[None]
    x_GC: Tensor = all_gather_rows(x_C, group).unflatten(0, (group.size(), -1))
    return x_GC


class _LinearHeadLoss:
    """Base of objects that a forward receives as `log_prob_loss`; see `LogProbLoss`."""

    def compute_from_logits(self, *_: Any) -> Tensor:
        """Raise NotImplementedError: the model changes its logits after its head."""
        raise NotImplementedError(
            "distillation must be of models whose logits are those of a linear head without a bias"
            ", neither scaled, capped nor compiled: choose another model"
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DistillationLoss(_LinearHeadLoss):
    """The student's loss: sum over labels other than -100, divided by `num_tokens`."""

    labels_BT: Tensor  # int64, of full rows, already shifted
    num_tokens: Tensor
    teacher: TeacherForward | StoredLogProbs
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
        """Return the loss from this rank's hidden states, equal on all cp ranks. Collective."""
        labels_N, read = self.teacher.select_local(labels_Bt.flatten())
        args = hidden_BtD.flatten(0, 1), weight_VD, labels_N, partial(self._compute_loss_, read)
        total = sum_head_losses(*args, chunk_tokens=min(chunk_tokens, CHUNK_TOKENS), group=group)
        shares_Bt1 = (total / labels_Bt.numel()).expand(*labels_Bt.shape, 1)
        return gather_full_rows(shares_Bt1).sum() / self.num_tokens.clamp(min=1)

    def _compute_loss_(
        self,
        read: ReadTeacher,
        products: HeadProducts,
        logits_CV: Tensor,
        labels_C: Tensor,
        part: slice,
        needs_grad: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss of a chunk as a `ChunkLoss`."""
        V, T, ratio = logits_CV.shape[1], self.options.temperature, self.options.kd_ratio
        is_ignored_C1 = (labels_C == IGNORE_INDEX)[:, None]
        logits_CV.masked_fill_(is_ignored_C1, 0)
        ids_Ck, teacher_CX = read(part)
        teacher_CX = teacher_CX.to(logits_CV.dtype).masked_fill(is_ignored_C1, 0) / T
        if ids_Ck is None:
            kl_C, d_kl_CX = compute_kl(logits_CV / T, teacher_CX, self.options.kl_type, group)
        else:
            ids_Ck = ids_Ck - (0 if group is None else V * group.rank())
            is_local_Ck = (ids_Ck >= 0) & (ids_Ck < V)
            ids_Ck = ids_Ck.where(is_local_Ck, 0)
            x_Ck = logits_CV.gather(1, ids_Ck).where(is_local_Ck, 0)
            x_Ck = _gather_ranks(x_Ck, group).sum(0)
            kl_C, d_kl_CX = compute_kl(x_Ck / T, teacher_CX, self.options.kl_type, None)
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


class TeacherForward(_LinearHeadLoss):
    """A `log_prob_loss` for a teacher's forward: stores the teacher's logits and returns 0.

    If `top_k` is None, hidden states are stored instead, and the first forward appends a copy of
    the frozen head to the list `heads`. The class is not a dataclass: ranks would compare its
    fields, but cp ranks have different tokens.
    """

    def __init__(self, labels_BT: Tensor, *, top_k: int | None, heads: list[Tensor]) -> None:
        self.labels_BT, self._top_k, self._heads = labels_BT, top_k, heads

    def compute_from_hidden(
        self,
        hidden_BtD: Tensor,
        weight_VD: Tensor,
        *_: Any,
        chunk_tokens: int = CHUNK_TOKENS,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """Store the teacher's logits or hidden states; return 0. Collective if `top_k` is set."""
        hidden_ND = hidden_BtD.flatten(0, 1).to(weight_VD.dtype)
        if self._top_k is None:
            if not self._heads:
                self._heads.append(weight_VD.detach().clone())
            self._hidden_ND = hidden_ND
        else:
            chunks = [
                _select_top_k(_compute_logits(hidden_CD, weight_VD), self._top_k, group)
                for hidden_CD in hidden_ND.split(chunk_tokens)
            ]
            self._ids_Nk, self._logits_Nk = map(torch.cat, zip(*chunks, strict=True))
        return hidden_ND.new_zeros((), dtype=torch.float32)

    def select_local(self, labels_N: Tensor) -> tuple[Tensor, ReadTeacher]:
        """Return the labels of this rank's tokens, and the function `read`."""
        return labels_N, self.read

    def read(self, part: slice) -> tuple[Tensor | None, Tensor]:
        """Return ids and logits [C, k] of the tokens in `part`; (None, [C, V]) without `top_k`."""
        if self._top_k is None:
            return None, _compute_logits(self._hidden_ND[part], self._heads[0])
        return self._ids_Nk[part], self._logits_Nk[part]


class TopLogProbs(TeacherForward):
    """A `TeacherForward` that also gathers the results of full rows, to be stored in files."""

    rows: tuple[Tensor, ...] = ()  # ids and log-probabilities [B, T, k]; () before a forward

    def compute_from_hidden(
        self,
        hidden_BtD: Tensor,
        weight_VD: Tensor,
        *labels_and_gather: Any,
        **options: Any,
    ) -> Tensor:
        """Store the teacher's top-k log-probabilities of full rows and return 0. Collective."""
        labels_Bt, gather_full_rows = labels_and_gather
        loss = super().compute_from_hidden(hidden_BtD, weight_VD, **options)
        values = (x.unflatten(0, labels_Bt.shape) for x in (self._ids_Nk, self._logits_Nk))
        self.rows = tuple(map(gather_full_rows, values))
        return loss


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredLogProbs:
    """Stored log-probabilities of a teacher for the M labels of a micro-batch, in their order.

    A forward receives indices in place of labels, and passes each cp rank those of its tokens.
    """

    full_labels_BT: Tensor  # int64, already shifted
    ids_Mk: Tensor  # int32 or int64, in [0, V); further rows are ignored
    log_probs_Mk: Tensor

    @property
    def labels_BT(self) -> Tensor:
        """The index of each label in the flattened rows; -100 = no label."""
        labels_N = self.full_labels_BT.flatten()
        indices_N = torch.arange(len(labels_N), device=labels_N.device)
        indices_N = indices_N.where(labels_N != IGNORE_INDEX, IGNORE_INDEX)
        return indices_N.view_as(self.full_labels_BT)

    def select_local(self, indices_N: Tensor) -> tuple[Tensor, ReadTeacher]:
        """Return the labels of this rank's tokens, and a function that reads their slices."""
        full_labels_N, has_label_N = self.full_labels_BT.flatten(), indices_N != IGNORE_INDEX
        idx_N = indices_N.where(has_label_N, 0)
        rows_N = ((full_labels_N != IGNORE_INDEX).cumsum(0) - 1)[idx_N].clamp(min=0)
        labels_N = full_labels_N[idx_N].where(has_label_N, IGNORE_INDEX)

        def read(part: slice) -> tuple[Tensor, Tensor]:
            return self.ids_Mk[rows_N[part]].long(), self.log_probs_Mk[rows_N[part]]

        return labels_N, read


def _compute_logits(hidden_CD: Tensor, weight_VD: Tensor) -> Tensor:
    """Return logits [C, V], fp32 or fp64."""
    with disable_autocast(hidden_CD):
        dtype = torch.promote_types(hidden_CD.dtype, torch.float32)
        return mm_with_dtype(hidden_CD, weight_VD.t(), dtype)


def _select_top_k(
    logits_CV: Tensor, k: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return the ids, int64, and log-probabilities of the k largest logits over `group`'s ranks."""
    log_sum_C = _gather_ranks(logits_CV.logsumexp(1), group).logsumexp(0)
    logits_CX, ids_CX = logits_CV.topk(min(k, logits_CV.shape[1]))
    if group is not None:
        pair = logits_CX, ids_CX + logits_CV.shape[1] * group.rank()
        logits_CX, ids_CX = (_gather_ranks(x, group).transpose(0, 1).flatten(1) for x in pair)
        logits_CX, columns_Ck = logits_CX.topk(min(k, logits_CX.shape[1]))
        ids_CX = ids_CX.gather(1, columns_Ck)
    return ids_CX, logits_CX - log_sum_C[:, None]
