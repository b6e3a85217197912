"""Multi-token prediction: small modules that predict the tokens after the next one, in training.

Legend: B sequences, T tokens of a sequence, D model dim, t_i token i (counted from 0).

The decoder predicts t_(i+1) at position i. Module k = 1, 2, ... predicts t_(i+k+1) there, from what
module k - 1 (the decoder for k = 1) knows at i and from the true token t_(i+k):

    h_(k-1) -> hnorm -+
                      +-> eh_proj -> one block -> norm -> h_k -> the decoder's head -> t_(i+k+1)
    t_(i+k) -> enorm -+   (the decoder's embedding)

Modules exist to shape the decoder's hidden states; they run when labels are given in training mode
and never else. h_k is normed: h_0 is what the decoder's final norm returns, h_k what module k's
norm returns, as in transformers and Megatron-Core. eh_proj reads [embedding, hidden state], the
order of the published weights (the paper writes it the other way round).

Example, k = 1, tokens [a b c d] with labels [b c d e]: positions 0 .. 2 read the embeddings of
b c d and have the targets c d e; position 3 has no next input token. Such positions come last in
their document, so that causal attention hides them from the others; their targets do not count, and
they are padding to the module's experts.

Source: DeepSeek-V3 (arXiv:2412.19437), section 2.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moecore.attention.sequence import Sequence
from moecore.models.block import Block
from moecore.models.config import DecoderConfig
from moecore.models.layers import RMSNorm
from moecore.precision.plain import Linear


class MTPLayer(nn.Module):
    """One module: joins hidden states with the embeddings of later tokens, then one block.

    Its MLP or MoE layer is of the kind of the decoder's last layer.

    Args:
        config: the decoder.
        dtype: dtype of the parameters.
    """

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        D, eps = config.dim, config.norm_eps
        self.enorm = RMSNorm(D, eps, dtype=dtype)
        self.hnorm = RMSNorm(D, eps, dtype=dtype)
        self.eh_proj = Linear(2 * D, D, dtype=dtype)
        self.block = Block(config, config.num_layers - 1, dtype=dtype)
        self.norm = RMSNorm(D, eps, dtype=dtype)

    def forward(self, h_BTD: Tensor, e_BTD: Tensor, sequence: Sequence) -> Tensor:
        """Return the normed hidden states h_k, same shape and dtype.

        Args:
            h_BTD: h_(k-1); under tp this rank's tokens, like the next one.
            e_BTD: embeddings of the tokens k positions later.
            sequence: see `Block.forward`; tokens without a target are padding.
        """
        joined = torch.cat((self.enorm(e_BTD), self.hnorm(h_BTD)), dim=-1)
        return self.norm(self.block(self.eh_proj(joined), sequence))
