"""DecoderConfig: one frozen record that describes a decoder.

Types, ranges and cross-field rules are checked at construction (`fields.py`). Meshes and groups
are arguments elsewhere, never fields here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from moecore.base.fields import (
    Bound,
    CheckedRecord,
    Count,
    CountOrZero,
    Positive,
    PositiveOrZero,
    Rules,
)
from moecore.base.options.layer import MoEConfig

QKNorm = Literal["head", "full"]
MLPActivation = Literal["swiglu", "situ_glu", "relu2"]
Mixer = Literal["attention", "linear"]
Feedforward = Literal["dense", "moe"]
MIXERS: Mapping[str, Mixer] = MappingProxyType({"M": "linear", "*": "attention"})
FEEDFORWARDS: Mapping[str, Feedforward] = MappingProxyType({"E": "moe", "-": "dense"})
AttentionBias = Literal["qkv", "all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnConfig(CheckedRecord):
    """YaRN: rotary frequencies for sequences longer than those of pretraining.

    Attributes:
        factor: how many times longer; slow frequencies are divided by it.
        original_max_seq_len: longest sequence of pretraining, in tokens.
        beta_fast: frequencies with more turns than this over that length stay as they are.
        beta_slow: frequencies with fewer turns than this are divided by factor; between the two
            they are mixed.
        mscale: cos and sin are multiplied by (0.1 * mscale * ln(factor) + 1), ...
        mscale_all_dim: ... divided by (0.1 * mscale_all_dim * ln(factor) + 1); scores of latent
            attention are multiplied by the square of this.
        truncate: the mix begins and ends at whole frequencies (gpt-oss: False).

    Source: arXiv:2309.00071; the two mscales are DeepSeek-V2's (arXiv:2405.04434).
    """

    factor: Annotated[float, Bound(">=", 1), "use yarn=None for sequences as in pretraining"]
    original_max_seq_len: Count
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: PositiveOrZero = 1.0
    mscale_all_dim: PositiveOrZero = 0.0
    truncate: bool = True

    def _rules(self) -> Rules:
        if self.beta_slow > self.beta_fast:
            yield "beta_slow", f"be <= beta_fast ({self.beta_fast!r}): keep 1 and 32 if unsure"

    @property
    def table_scale(self) -> float:
        """Factor on cos and sin."""
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    @property
    def score_scale(self) -> float:
        """Factor on attention scores."""
        return self._magnitude(self.mscale_all_dim) ** 2

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseKeysConfig(CheckedRecord):
    """Sparse attention: a query reads the keys to which an indexer gives the largest scores.

    Attributes:
        num_heads: heads of the indexer.
        head_dim: dim of one; rotary embedding turns the first `qk_rope_head_dim`, in halves.
        top_k: keys that a query reads at most, its own included.

    Source: DeepSeek-V3.2-Exp (arXiv:2512.02556).
    """

    num_heads: Count
    head_dim: Count
    top_k: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class MLAConfig(CheckedRecord):
    """Multi-head latent attention: keys and values of all heads come from one small latent.

    Attributes:
        kv_lora_rank: dim of the latent of keys and values.
        qk_nope_head_dim: part of a query or key head that rotary embedding leaves alone.
        qk_rope_head_dim: part that it turns, in neighbouring pairs; all heads share the key's.
        v_head_dim: dim of a value head.
        q_lora_rank: dim of the latent of the queries; 0 = queries are projected directly.
        norm_eps: of the norms of the latents, whatever the decoder's own.
        yarn: longer sequences than in pretraining; None = off.
        sparse: the keys that a query reads; None = all that it sees.

    Source: DeepSeek-V2 (arXiv:2405.04434).
    """

    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count
    q_lora_rank: CountOrZero = 0
    norm_eps: Positive = 1e-6
    yarn: YarnConfig | None = None
    sparse: SparseKeysConfig | None = None

    def _rules(self) -> Rules:
        if self.qk_rope_head_dim % 2:
            yield "qk_rope_head_dim", "be even, because rotary embedding turns pairs: use even dims"
        if self.sparse is not None and not self.q_lora_rank:
            yield "q_lora_rank", "be > 0 with sparse, whose indexer reads that latent: set it"
        if self.sparse is not None and self.sparse.head_dim < self.qk_rope_head_dim:
            minimum = f"qk_rope_head_dim ({self.qk_rope_head_dim})"
            yield "sparse.head_dim", f"be >= {minimum}, whose angles it has: raise it"

    @property
    def qk_head_dim(self) -> int:
        """Dim of a whole query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def score_scale(self) -> float:
        """Factor on q . k before softmax."""
        scale: float = self.qk_head_dim**-0.5
        return scale * (1.0 if self.yarn is None else self.yarn.score_scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearAttentionConfig(CheckedRecord):
    """Linear attention, whose state is one matrix a value head.

    Attributes:
        num_k_heads: query and key heads; each serves num_v_heads / num_k_heads value heads.
        num_v_heads: value heads.
        head_k_dim: dim of a query or key head.
        head_v_dim: dim of a value head.
        conv_size: tokens that the convolution before it weights, the token itself included.
    """

    state_passes: ClassVar[int]  # products of a token with a state

    num_k_heads: Count
    num_v_heads: Count
    head_k_dim: Count
    head_v_dim: Count
    conv_size: Count = 4

    def _rules(self) -> Rules:
        if self.num_v_heads % self.num_k_heads:
            yield "num_k_heads", f"divide num_v_heads ({self.num_v_heads}): choose a divisor"
        for name in ("head_k_dim", "head_v_dim"):
            if getattr(self, name) % 8:
                yield name, "be a multiple of 8, 16 bytes in bf16, for products of states: raise it"

    @property
    def state_flops(self) -> int:
        """FLOPs of a token's products with the states of all heads, in forward."""
        return 2 * self.state_passes * self.num_v_heads * self.head_k_dim * self.head_v_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaConfig(LinearAttentionConfig):
    """A gated delta net: a token corrects what the state returns for its key.

    Source: Gated Delta Networks (arXiv:2412.06464).
    """

    state_passes = 3  # read for the key, written, read for the query


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Config(LinearAttentionConfig):
    """A Mamba-2 layer: value heads are its heads, keys and queries its B and C of each group.

    Attributes:
        min_step: time steps are raised to it.

    Source: Mamba-2 (arXiv:2405.21060).
    """

    state_passes = 2  # written, read for the query

    min_step: PositiveOrZero = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig(CheckedRecord):
    """A decoder-only transformer with dense and MoE layers.

    Attributes:
        vocab_size: number of token ids V.
        dim: model dim D.
        num_layers: number of blocks.
        num_heads: query heads per layer.
        num_kv_heads: key and value heads per layer; each serves num_heads / num_kv_heads queries.
        head_dim: dim of one head.
        moe: the MoE layer of every layer that is not dense; None = all layers are dense.
        hash_layers: so many first MoE layers have a table of experts by token id (DeepSeek-V4: 3),
            else they are `moe`: see `MoEConfig.by_token_id`.
        dense_layers: indices of the layers with a plain MLP, in rising order.
        mlp_hidden_dim: hidden dim of that MLP; 0 when no layer is dense.
        mlp_activation: of that MLP: "swiglu" or "situ_glu" (as of `MoEConfig`) with a gate,
            "relu2", relu squared, without.
        mlp_activation_limit, mlp_activation_up_limit: of gate and up of "situ_glu".
        mla: multi-head latent attention; None = grouped-query attention. With it num_kv_heads is
            num_heads, and head_dim is that of queries and keys.
        num_mtp_layers: modules that predict further tokens in training (multi-token prediction,
            `MTPLayer`); 0 = none. Their MLP or MoE is that of the last layer.
        mtp_loss_coef: weight of the mean of their losses; 0 without them.
        mtp_repeats: how often the one module is applied, each time to its own output and with the
            same weights; it predicts so many further tokens (Megatron-Core's
            mtp_use_repeated_layer).
        mtp_detached: their losses train these modules alone: no gradient reaches the layers before
            them, the embedding or the head (Megatron-Core's mtp_detach_heads).
        linear_attention: attention of `linear_layers` (Qwen3-Next), or of "M" in a pattern; None
            without them.
        linear_layers: indices of the layers with linear attention, in rising order.
        pattern: a letter for each layer that has one half of a block with one norm: "M" linear
            attention, "*" attention, "E" an MoE layer, "-" a plain MLP (Nemotron-H). "" = layers
            have both, of the kinds that linear_layers and dense_layers name.
        attention_bias: learned biases of attention: "qkv" of queries, keys and values (Qwen2,
            GLM-4.5), "all" of the output too (Llama's option), None = off.
        windows: keys that a token sees at most, its own included, 0 = all: of the first layers,
            and then again of those behind them. (128, 0) is gpt-oss's, (4096,) Mistral's.
        attention_sinks: each head has a learned score of one more key without a value (gpt-oss).
        attention_gate: each head's output is multiplied by the sigmoid of a gate, which `q_proj`
            returns behind its query (Qwen3-Next).
        qk_norm: RMSNorm on queries and keys: "head" over each head (Qwen3), "full" over the whole
            projection (OLMoE), None = off.
        rope_theta: base of the rotary frequencies; None = attention knows no positions.
        rotary_dim: dims of a head that rotary embedding turns, the first ones (GLM-4.5: half); 0 =
            all. With mla see `MLAConfig`.
        yarn: longer sequences than in pretraining; None = off. With mla it is `mla.yarn`.
        norm_eps: added to the mean square in every RMSNorm.
        zero_centered_norms: every RMSNorm but that of linear attention multiplies by 1 + its weight
            (Qwen3-Next).
        tie_embeddings: the output head reads the embedding table.
        max_seq_len: longest sequence in tokens.
        ce_chunk_tokens: tokens whose logits exist at once in the loss.
    """

    vocab_size: Count
    dim: Count
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    moe: MoEConfig | None = None
    hash_layers: CountOrZero = 0
    dense_layers: tuple[CountOrZero, ...] = ()
    mlp_hidden_dim: CountOrZero = 0
    mlp_activation: MLPActivation = "swiglu"
    mlp_activation_limit: Positive = 4.0
    mlp_activation_up_limit: Positive = 25.0
    mla: MLAConfig | None = None
    num_mtp_layers: CountOrZero = 0
    mtp_repeats: Count = 1
    mtp_loss_coef: PositiveOrZero = 0.0
    mtp_detached: bool = False
    linear_attention: GatedDeltaConfig | Mamba2Config | None = None
    linear_layers: tuple[CountOrZero, ...] = ()
    pattern: str = ""
    attention_bias: AttentionBias | None = None
    windows: tuple[CountOrZero, ...] = ()
    attention_sinks: bool = False
    attention_gate: bool = False
    qk_norm: QKNorm | None = None
    rope_theta: Positive | None = 10_000.0
    rotary_dim: CountOrZero = 0
    yarn: YarnConfig | None = None
    norm_eps: Positive = 1e-6
    zero_centered_norms: bool = False
    tie_embeddings: bool = False
    max_seq_len: Count = 4096
    ce_chunk_tokens: Count = 2048

    def _rules(self) -> Rules:
        if self.pattern:
            yield from self._pattern_rules()
        yield from self._attention_rules()
        if self.mla is not None:
            yield from self._mla_rules(self.mla)
        yield from self._layer_rules()
        yield from self._linear_rules()
        yield from self._mtp_rules()
        if self.moe is not None and self.moe.dim != self.dim:
            yield "moe.dim", f"equal dim ({self.dim}): build MoEConfig with the decoder's dim"
        if self.moe is not None and self.moe.assignment == "hash":
            yield "moe.assignment", "not be 'hash' in a decoder: set hash_layers"
        if self.hash_layers and self.hash_layers >= self.num_moe_layers:
            yield "hash_layers", f"be < the number of MoE layers ({self.num_moe_layers}): lower it"

    def _pattern_rules(self) -> Rules:
        letters = "".join((*MIXERS, *FEEDFORWARDS))
        if set(self.pattern) - set(letters) or len(self.pattern) != self.num_layers:
            yield (
                "pattern",
                f"have one of {letters!r} for each of num_layers ({self.num_layers}): correct it",
            )
        for name in ("linear_layers", "dense_layers"):
            if value := getattr(self, name):
                yield name, f"be {type(value)()} with pattern, which names them: drop it"
        if ("E" in self.pattern) != (self.moe is not None):
            yield "pattern", "name MoE layers ('E') with moe and none without: give both or none"
        if self.num_mtp_layers:
            yield "num_mtp_layers", "be 0 with pattern, whose last layer is half a block: drop it"

    def _attention_rules(self) -> Rules:
        if self.num_heads % self.num_kv_heads:
            yield "num_kv_heads", f"divide num_heads ({self.num_heads}): choose a divisor"
        if self.head_dim % 2:
            yield "head_dim", "be even, because rotary embedding turns pairs: use an even head_dim"
        if self.rope_theta is None and self.rotary_dim:
            yield "rotary_dim", "be 0 with rope_theta (None), where nothing is turned: drop it"
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            yield "rotary_dim", f"be even and <= head_dim ({self.head_dim}): lower it, or use 0"
        if len(self.windows) > self.num_layers:
            yield "windows", f"be num_layers ({self.num_layers}) at most: drop the others"
        if self.yarn is not None:
            yield from self._yarn_rules("yarn", self.yarn)

    def _yarn_rules(self, name: str, yarn: YarnConfig) -> Rules:
        if self.rope_theta is None or self.rope_theta <= 1:
            yield (
                "rope_theta",
                f"be > 1 with {name}, which tells fast frequencies from slow ones: keep 10000.0 "
                "if unsure",
            )
        if self.max_seq_len > yarn.factor * yarn.original_max_seq_len:
            yield (
                "max_seq_len",
                f"be <= {name}.factor * {name}.original_max_seq_len "
                f"({yarn.factor} * {yarn.original_max_seq_len}): raise the factor or lower it",
            )

    def _mla_rules(self, mla: MLAConfig) -> Rules:
        if self.num_kv_heads != self.num_heads:
            yield (
                "num_kv_heads",
                f"equal num_heads ({self.num_heads}) with mla, where every head has keys of its "
                "own: set it so",
            )
        if self.head_dim != mla.qk_head_dim:
            yield (
                "head_dim",
                f"equal mla.qk_nope_head_dim + mla.qk_rope_head_dim ({mla.qk_head_dim}): set it so",
            )
        if self.qk_norm is not None:
            yield "qk_norm", "be None with mla, which norms the latents: drop qk_norm"
        if self.attention_bias is not None:
            yield "attention_bias", "be None with mla, whose projections have none: drop it"
        if self.windows:
            yield "windows", "be () with mla, which sees all keys: drop it"
        if self.rope_theta is None:
            yield "rope_theta", "be given with mla, which turns mla.qk_rope_head_dim: set it"
        names = ("attention_sinks", "attention_gate", "zero_centered_norms", "linear_layers")
        for name in (*names, "pattern"):
            if value := getattr(self, name):
                yield name, f"be {type(value)()} with mla, which has none: drop it"
        if self.rotary_dim:
            yield "rotary_dim", "be 0 with mla, which turns mla.qk_rope_head_dim: drop it"
        if self.yarn is not None:
            yield "yarn", "be None with mla: give mla.yarn"
        if mla.yarn is not None:
            yield from self._yarn_rules("mla.yarn", mla.yarn)

    def _mtp_rules(self) -> Rules:
        if bool(self.mtp_loss_coef) != bool(self.num_mtp_layers):
            yield (
                "mtp_loss_coef",
                f"be > 0 with num_mtp_layers ({self.num_mtp_layers}) > 0 and 0 without: "
                "DeepSeek-V3 uses 0.3, later 0.1",
            )
        if self.mtp_detached and not self.num_mtp_layers:
            yield "mtp_detached", "be False with num_mtp_layers (0), which has no losses: drop it"
        if self.mtp_repeats > 1 and self.num_mtp_layers != 1:
            modules = f"num_mtp_layers ({self.num_mtp_layers})"
            yield (
                "mtp_repeats",
                f"be 1 with {modules}, because it repeats one module: set that to 1",
            )
        if self.num_predictions >= self.max_seq_len:
            yield (
                "num_mtp_layers" if self.mtp_repeats == 1 else "mtp_repeats",
                f"be < max_seq_len ({self.max_seq_len}), or no token so far ahead is a target: "
                "lower it",
            )

    def _layer_rules(self) -> Rules:
        dense = self.dense_layers
        if self.moe is None and dense:
            yield (
                "dense_layers",
                "be () with moe (None), where every layer is dense: drop it or give moe",
            )
        if list(dense) != sorted(set(dense)):
            yield "dense_layers", "rise without repeats: sort it"
        if dense and dense[-1] >= self.num_layers:
            yield "dense_layers", f"lie in [0, num_layers ({self.num_layers})): drop the others"
        if self.moe is not None and not self.num_moe_layers:
            yield (
                "dense_layers",
                f"leave a layer of num_layers ({self.num_layers}) to moe: shorten it or set "
                "moe=None",
            )
        if self.num_dense_layers and not self.mlp_hidden_dim:
            yield (
                "mlp_hidden_dim",
                f"be >= 1 with {self.num_dense_layers} dense layers (dense_layers, or all with moe "
                "None): set it",
            )
        if not self.num_dense_layers and self.mlp_hidden_dim:
            yield (
                "mlp_hidden_dim",
                "be 0 with dense_layers (()), where no layer reads it: drop it or name dense "
                "layers",
            )

    def _linear_rules(self) -> Rules:
        linear = self.linear_layers
        if list(linear) != sorted(set(linear)):
            yield "linear_layers", "rise without repeats: sort it"
        if linear and linear[-1] >= self.num_layers:
            yield "linear_layers", f"lie in [0, num_layers ({self.num_layers})): drop the others"
        mixers = [self.mixer_of(i) for i in range(self.num_layers)]
        name = "pattern" if self.pattern else "linear_layers"
        if "attention" not in mixers:
            yield name, f"leave a layer of num_layers ({self.num_layers}) to attention: change it"
        if ("linear" in mixers) != (self.linear_attention is not None):
            letters = " ('M')" if self.pattern else ""
            yield (
                name,
                f"name layers{letters} with linear_attention and none without: give both or none",
            )

    @property
    def num_predictions(self) -> int:
        """Further tokens that multi-token prediction modules predict: runs of such modules."""
        return self.num_mtp_layers * self.mtp_repeats

    @property
    def num_dense_layers(self) -> int:
        """Number of layers with a plain MLP."""
        return sum(self.is_dense(i) for i in range(self.num_layers))

    @property
    def num_moe_layers(self) -> int:
        """Number of layers with an MoE layer."""
        return sum(self.feedforward_of(i) == "moe" for i in range(self.num_layers))

    def window_of(self, layer_idx: int) -> int | None:
        """Return how many keys a token of a layer sees at most; None = all."""
        return self.windows[layer_idx % len(self.windows)] or None if self.windows else None

    def mixer_of(self, layer_idx: int) -> Mixer | None:
        """Return what mixes tokens in a layer; None = nothing does."""
        if self.pattern:
            return MIXERS.get(self.pattern[layer_idx])
        return "linear" if layer_idx in self.linear_layers else "attention"

    def feedforward_of(self, layer_idx: int) -> Feedforward | None:
        """Return what computes each token alone in a layer; None = nothing does."""
        if self.pattern:
            return FEEDFORWARDS.get(self.pattern[layer_idx])
        return "dense" if self.moe is None or layer_idx in self.dense_layers else "moe"

    def is_dense(self, layer_idx: int) -> bool:
        """Whether this layer has a plain MLP."""
        return self.feedforward_of(layer_idx) == "dense"
