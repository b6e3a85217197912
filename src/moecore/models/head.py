"""Head: the output matrix of a decoder, and the loss on top of it."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.attention.sequence import Sequence
from moecore.base.options.precision import Recipe
from moecore.base.params import get_local_param
from moecore.models.config import DecoderConfig
from moecore.models.log_probs import LogProbLoss
from moecore.models.loss import linear_cross_entropy
from moecore.models.tensor_parallel import TensorParallel, all_reduce_replicated


class Head(nn.Module):
    """A decoder's output matrix and loss. A tied head uses the embedding table as its matrix."""

    is_fsdp_head = True
    tp_shard_dim = 0
    loss_recipe: Recipe | None = None  # of the loss's products; None = as they are

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        self.tp: TensorParallel | None = None
        self.weight: nn.Parameter | None = None
        if not config.tie_embeddings:
            self.weight = nn.Parameter(torch.empty(config.vocab_size, config.dim, dtype=dtype))

    def forward(
        self,
        x_BTD: Tensor,  # normed; under cp and tp this rank's tokens
        labels_BT: Tensor | None,
        num_tokens: Tensor | int | None,
        tied_weight: Tensor | None,  # the embedding table
        sequence: Sequence,
        log_prob_loss: LogProbLoss | None = None,
        *,
        is_detached: bool = False,
    ) -> Tensor:
        """Return the fp32 loss, divided by `num_tokens`, or without labels the logits [B, T, V].

        Labels are not sliced over cp or tp. If `is_detached`, the weight gets no gradient. Results
        are equal on all cp and tp ranks.
        """
        weight = tied_weight if self.weight is None else self.weight
        assert weight is not None, "a tied head is called with the embedding table"
        weight_VD = get_local_param(weight).detach() if is_detached else get_local_param(weight)
        if self.tp is not None:
            x_BTD = self.tp.gather_tokens(x_BTD)
        group = None if self.tp is None else self.tp.group
        chunk_tokens = self.config.ce_chunk_tokens
        if log_prob_loss is not None:
            local_labels_BT = sequence.slice_local(log_prob_loss.labels_BT)
            args = x_BTD, weight_VD, local_labels_BT, partial(_gather_over_cp, sequence=sequence)
            return log_prob_loss.compute_from_hidden(*args, chunk_tokens=chunk_tokens, group=group)
        if labels_BT is None:
            logits_BTV = F.linear(x_BTD, weight_VD)
            if self.tp is not None:
                logits_BVT = self.tp.gather_replicated(logits_BTV.transpose(1, 2))
                logits_BTV = logits_BVT.transpose(1, 2).contiguous()
            return _gather_over_cp(logits_BTV, sequence)
        local_labels_N = sequence.slice_local(labels_BT).flatten()
        loss = linear_cross_entropy(
            x_BTD.flatten(0, 1),
            weight_VD,
            local_labels_N,
            chunk_tokens=chunk_tokens,
            group=group,
            num_tokens=num_tokens,
            recipe=self.loss_recipe,
        )
        local_tokens = sequence.local_tokens
        return loss if local_tokens is None else all_reduce_replicated(loss, local_tokens.cp.group)


def _gather_over_cp(x_BTX: Tensor, sequence: Sequence) -> Tensor:
    """All-gather tokens over cp to full rows, replicated over cp; without cp return x."""
    local_tokens = sequence.local_tokens
    return x_BTX if local_tokens is None else local_tokens.gather_replicated(x_BTX)
