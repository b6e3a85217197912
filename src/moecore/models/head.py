"""The head of a decoder: normed hidden states -> logits, or the loss on top of them.

Legend: B sequences, T tokens of a sequence, D model dim, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.attention.sequence import Sequence
from moecore.models.config import DecoderConfig
from moecore.models.loss import count_labels, linear_cross_entropy
from moecore.models.tensor_parallel import TensorParallel, sum_value
from moecore.moe.params import local_param


class Head(nn.Module):
    """The output matrix, and the loss on top of it. Without a weight of its own when tied.

    Attributes:
        is_fsdp_head: nothing but its own forward reads its weight: see `find_heads`.
    """

    is_fsdp_head = True

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        self.tp: TensorParallel | None = None
        own = (
            None
            if config.tie_embeddings
            else torch.empty(config.vocab_size, config.dim, dtype=dtype)
        )
        self.weight = None if own is None else nn.Parameter(own)

    def forward(
        self,
        x_BTD: Tensor,
        labels_BT: Tensor | None,
        num_tokens: Tensor | int | None,
        tied_weight: Tensor | None,
        sequence: Sequence,
    ) -> Tensor:
        """Return the loss, or the logits when there are no labels; see `Decoder.forward`.

        Args:
            x_BTD: normed hidden states; under cp and tp this rank's tokens.
            num_tokens: what the summed loss is divided by.
            tied_weight: the embedding table, when tied.
        """
        weight = tied_weight if self.weight is None else self.weight
        assert weight is not None, "a tied head is called with the embedding table"
        weight_VD = local_param(weight)
        if labels_BT is None:
            logits_BTV = F.linear(x_BTD, weight_VD)
            logits_BTV = logits_BTV if self.tp is None else self.tp.gather_whole(logits_BTV)
            return logits_BTV if sequence.held is None else sequence.held.gather_whole(logits_BTV)
        if num_tokens is None:
            num_tokens = count_labels(labels_BT).clamp(min=1)
        labels_BT = sequence.own(labels_BT)
        if self.tp is not None:
            labels_BT = self.tp.own(labels_BT)
        loss = linear_cross_entropy(
            x_BTD.flatten(0, 1),
            weight_VD,
            labels_BT.flatten(),
            num_tokens=num_tokens,
            chunk_tokens=self.config.ce_chunk_tokens,
        )
        loss = loss if self.tp is None else self.tp.sum_value(loss)
        return loss if sequence.held is None else sum_value(loss, sequence.held.cp.group)
