"""One layer of a decoder: attention, then a dense MLP or an MoE layer.

Legend: B sequences, T tokens of a sequence, D model dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moecore.attention.sequence import Sequence
from moecore.models.config import DecoderConfig
from moecore.models.layers import MLP, Attention, RMSNorm
from moecore.models.mla import LatentAttention
from moecore.moe.layer import MoELayer


class Block(nn.Module):
    """One layer: attention, then a dense MLP or an MoE layer, each on a normed residual.

    Args:
        config: the decoder.
        layer_idx: which layer.
        dtype: dtype of the parameters.
    """

    def __init__(
        self, config: DecoderConfig, layer_idx: int, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        attention = Attention if config.mla is None else LatentAttention
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps, dtype=dtype)
        self.self_attn: nn.Module = attention(config, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps, dtype=dtype)
        self.is_dense = config.moe is None or config.is_dense(layer_idx)
        if self.is_dense:
            self.mlp: nn.Module = MLP(config, dtype=dtype)
        else:
            assert config.moe is not None
            self.mlp = MoELayer(config.moe, dtype=dtype)

    def forward(self, x_BTD: Tensor, sequence: Sequence) -> Tensor:
        """Return the residual stream after this layer, same shape and dtype.

        Args:
            x_BTD: residual stream; under tp this rank's tokens.
            sequence: where the tokens stand. No expert sees its padding; attention and a dense MLP
                do.
        """
        x_BTD = self.attend(x_BTD, sequence)
        y_BTD = self.post_attention_layernorm(x_BTD)
        if self.is_dense:
            return x_BTD + self.mlp(y_BTD)
        return x_BTD + self.mlp(
            y_BTD,
            padding_mask=sequence.padding_mask_BT,
            cu_seqlens=sequence.cu_seqlens,
            cp=None if sequence.held is None else sequence.held.cp.size,
        )

    def attend(self, x_BTD: Tensor, sequence: Sequence) -> Tensor:
        """Return the residual stream after attention."""
        attended: Tensor = x_BTD + self.self_attn(self.input_layernorm(x_BTD), sequence)
        return attended

    @property
    def compile_regions(self) -> tuple[str, ...]:
        """Methods without an MoE layer inside: see `train/graphs/regions.py`.

        The norm before an MoE layer stays outside: its output is what `MemoryOptions` drops.
        """
        return ("forward",) if self.is_dense else ("attend",)

    @property
    def eager_parts(self) -> tuple[str, ...]:
        """Modules that no compile region calls."""
        return () if self.is_dense else ("post_attention_layernorm", "mlp")
