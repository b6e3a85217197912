"""One layer of a decoder, and multi-token prediction: a layer that predicts later tokens.

Legend: B sequences, T tokens of a sequence, D model dim, t_i token i (counted from 0).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moecore.attention.sequence import Sequence
from moecore.models.config import DecoderConfig, GatedDeltaConfig, Mamba2Config
from moecore.models.layers import MLP, Attention, RMSNorm
from moecore.models.linear_attention import GatedDeltaNet, LinearAttention, Mamba2
from moecore.models.mla import LatentAttention
from moecore.moe.layer import MoELayer
from moecore.precision.plain import Linear

LINEAR: dict[type, Callable[..., LinearAttention]] = {
    GatedDeltaConfig: GatedDeltaNet,
    Mamba2Config: Mamba2,
}


class Block(nn.Module):
    """One layer: attention or linear attention, then an MLP or MoE layer, each with a norm.

    With `DecoderConfig.pattern` a layer has either (linear) attention or an MLP or MoE layer.
    `runs` is the number of times that the layer runs in one forward of its decoder.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer_idx: int,
        *,
        dtype: torch.dtype | None = None,
        runs: int = 1,
    ) -> None:
        super().__init__()
        self.mixer = config.get_mixer(layer_idx)
        self.feedforward = config.get_feedforward(layer_idx)
        if self.mixer is not None:
            self.input_layernorm = RMSNorm.from_config(config, dtype=dtype)
        if self.mixer == "linear":
            self.linear_attn = LINEAR[type(config.linear_attention)](config, dtype=dtype)
        elif self.mixer == "attention" and config.mla is None:
            self.self_attn: nn.Module = Attention(config, config.get_window(layer_idx), dtype=dtype)
        elif self.mixer == "attention":
            self.self_attn = LatentAttention(config, dtype=dtype)
        if self.feedforward is not None:
            self.post_attention_layernorm = RMSNorm.from_config(config, dtype=dtype)
        if self.feedforward == "dense":
            self.mlp: nn.Module = MLP(config, dtype=dtype)
        elif self.feedforward == "moe":
            assert config.moe is not None
            moe = config.moe
            moe_idx = sum(config.get_feedforward(i) == "moe" for i in range(layer_idx))
            if moe_idx < config.hash_layers:  # the first MoE layers route by token id
                moe = moe.by_token_id(config.vocab_size)
            self.mlp = MoELayer(moe, dtype=dtype, runs=runs)

    def forward(self, x_BTD: Tensor, sequence: Sequence) -> Tensor:
        """Return x plus the attention and feed-forward outputs, for this rank's tokens."""
        if self.mixer is not None:
            x_BTD = self.attend(x_BTD, sequence)
        if self.feedforward is None:
            return x_BTD
        y_BTD = self.post_attention_layernorm(x_BTD)
        if self.feedforward == "dense":
            out_BTD: Tensor = self.mlp(y_BTD)
            return x_BTD + out_BTD
        out_BTD = self.mlp(
            y_BTD,
            padding_mask=sequence.padding_mask_BT,
            cu_seqlens=sequence.cu_seqlens,
            cp=None if sequence.local_tokens is None else sequence.local_tokens.cp.size,
            token_ids=sequence.token_ids_BT,
            depth=sequence.depth,
        )
        return x_BTD + out_BTD

    def attend(self, x_BTD: Tensor, sequence: Sequence) -> Tensor:
        """Return x_BTD plus the attention (or linear attention) output of the normed x_BTD."""
        attention = self.linear_attn if self.mixer == "linear" else self.self_attn
        attended: Tensor = x_BTD + attention(self.input_layernorm(x_BTD), sequence)
        return attended

    @property
    def compile_regions(self) -> tuple[str, ...]:
        """Names of the methods that torch.compile compiles; they call no MoE layer."""
        # The norm before an MoE layer stays outside: its output is what `MemoryOptions` drops.
        if self.feedforward != "moe":
            return ("forward",)
        return () if self.mixer is None else ("attend",)

    @property
    def eager_parts(self) -> tuple[str, ...]:
        """Names of the submodules that run eagerly, outside of the compiled methods."""
        return ("post_attention_layernorm", "mlp") if self.feedforward == "moe" else ()


class MTPLayer(nn.Module):
    """Multi-token prediction: one block over hidden states and embeddings of later tokens.

    The decoder predicts token t_(i+1) at position i. Module k = 1, 2, ... predicts t_(i+k+1) there.
    Module k reads the output of module k - 1 (of the decoder for k = 1) and the true token t_(i+k):

        h_(k-1) -> hnorm -+
                          +-> eh_proj -> one block -> norm -> h_k -> decoder's head -> t_(i+k+1)
        t_(i+k) -> enorm -+   (the decoder's embedding)

    With `mtp_repeats` > 1 one module runs for every k, each time on the output of its last run.

    The modules run only in training mode with labels. The states h_0 and h_k are outputs of the
    final norm and of module k's norm, as in transformers and Megatron-Core. The projection eh_proj
    reads [embedding, hidden state], as the published weights need; the paper has the reverse order.
    The feed-forward part of the block is of the kind (MLP or MoE) of the decoder's last layer.

    Example, k = 1, tokens [a b c d] with labels [b c d e]: positions 0 .. 2 read the embeddings of
    b c d and have the targets c d e; position 3 has no next input token. Such positions are the
    last of their document, so causal attention hides them from the other positions. Their labels
    are ignored, and the module's experts treat them as padding.

    Source: DeepSeek-V3 (arXiv:2412.19437), section 2.2.
    """

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.runs = config.mtp_repeats  # in one forward of the decoder
        D = config.dim
        self.enorm = RMSNorm.from_config(config, dtype=dtype)
        self.hnorm = RMSNorm.from_config(config, dtype=dtype)
        self.eh_proj = Linear(2 * D, D, dtype=dtype)
        self.block = Block(config, config.num_layers - 1, dtype=dtype, runs=self.runs)
        self.norm = RMSNorm.from_config(config, dtype=dtype)

    def forward(self, h_BTD: Tensor, e_BTD: Tensor, sequence: Sequence) -> Tensor:
        """Return h_k, the normed output of module k, for this rank's tokens [B, t, D].

        `e_BTD` has the embeddings of the tokens k positions later. The padding mask of `sequence`
        must be True also for positions without a target.
        """
        eh_BTD = torch.cat((self.enorm(e_BTD), self.hnorm(h_BTD)), dim=-1)
        h_BTD = self.block(self.eh_proj(eh_BTD), sequence)
        normed_BTD: Tensor = self.norm(h_BTD)
        return normed_BTD
