"""DecoderConfig: one frozen record that describes a decoder.

Types, ranges and cross-field rules are checked at construction (`base/fields.py`). The record
contains no device meshes or process groups.
"""

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
    FieldErrors,
    Positive,
    PositiveOrZero,
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
    """YaRN: scaled rotary frequencies for sequences longer than in pretraining.

    Attributes:
        factor: ratio of the new length to the length of pretraining; divides slow frequencies.
        original_max_seq_len: longest sequence of pretraining, in tokens.
        beta_fast: frequencies with more turns than this over original_max_seq_len are unchanged.
        beta_slow: frequencies with fewer turns than this are divided by factor. Frequencies
            between beta_slow and beta_fast are interpolated.
        mscale: cos and sin are multiplied by (0.1 * mscale * ln(factor) + 1).
        mscale_all_dim: cos and sin are divided by m = (0.1 * mscale_all_dim * ln(factor) + 1).
            The scores of latent attention are multiplied by m ** 2.
        truncate: whether the interpolated range is rounded to integer indices (gpt-oss: False).

    Source: arXiv:2309.00071; the two mscales are DeepSeek-V2's (arXiv:2405.04434).
    """

    factor: Annotated[float, Bound(">=", 1), "use yarn=None for sequences as in pretraining"]
    original_max_seq_len: Count
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: PositiveOrZero = 1.0
    mscale_all_dim: PositiveOrZero = 0.0
    truncate: bool = True

    def _find_field_errors(self) -> FieldErrors:
        if self.beta_slow > self.beta_fast:
            yield "beta_slow", f"be <= beta_fast ({self.beta_fast!r}): keep 1 and 32 if unsure"

    @property
    def table_scale(self) -> float:
        """Factor by which the rotary table's cos and sin are multiplied."""
        return self._compute_mscale(self.mscale) / self._compute_mscale(self.mscale_all_dim)

    @property
    def score_scale(self) -> float:
        """Factor by which attention scores are multiplied."""
        return self._compute_mscale(self.mscale_all_dim) ** 2

    def _compute_mscale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseKeysConfig(CheckedRecord):
    """Sparse attention: a query reads the keys to which an indexer gives the largest scores.

    Attributes:
        num_heads: heads of the indexer.
        head_dim: dim of an indexer head. Rotary embedding rotates its first `qk_rope_head_dim`
            dims, dim i with dim i + qk_rope_head_dim / 2.
        top_k: maximum number of keys per query, the query's own position included.

    Source: DeepSeek-V3.2-Exp (arXiv:2512.02556).
    """

    num_heads: Count
    head_dim: Count
    top_k: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class MLAConfig(CheckedRecord):
    """Multi-head latent attention: keys and values of all heads are projected from one latent.

    Attributes:
        kv_lora_rank: dim of the latent of keys and values.
        qk_nope_head_dim: dims of a query or key head without rotary embedding.
        qk_rope_head_dim: dims with rotary embedding, rotated in neighbouring pairs. All heads
            share these dims of the key.
        v_head_dim: dim of a value head.
        q_lora_rank: dim of the latent of the queries; 0 = queries are projected directly.
        norm_eps: epsilon of the latents' norms, independent of the decoder's norm_eps.
        yarn: rotary scaling for sequences longer than in pretraining; None = off.
        sparse: selection of the keys that a query reads; None = all keys under the causal mask.

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

    def _find_field_errors(self) -> FieldErrors:
        if self.qk_rope_head_dim % 2:
            yield "qk_rope_head_dim", "be even, because rotary embedding turns pairs: use even dims"
        if self.sparse is not None and not self.q_lora_rank:
            yield "q_lora_rank", "be > 0 with sparse, whose indexer reads that latent: set it"
        if self.sparse is not None and self.sparse.head_dim < self.qk_rope_head_dim:
            minimum = f"qk_rope_head_dim ({self.qk_rope_head_dim})"
            yield "sparse.head_dim", f"be >= {minimum}, whose angles it has: raise it"

    @property
    def qk_head_dim(self) -> int:
        """Dim of a query or key head, with and without rotary embedding together."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def score_scale(self) -> float:
        """Factor by which q . k is multiplied before the softmax."""
        scale: float = self.qk_head_dim**-0.5
        return scale * (1.0 if self.yarn is None else self.yarn.score_scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearAttentionConfig(CheckedRecord):
    """Linear attention, whose state is one matrix per value head.

    Attributes:
        num_k_heads: query and key heads; num_v_heads / num_k_heads value heads share each.
        num_v_heads: value heads.
        head_k_dim: dim of a query or key head.
        head_v_dim: dim of a value head.
        conv_size: kernel size in tokens of the causal convolution before linear attention.
    """

    state_passes: ClassVar[int]  # products of a token with a state

    num_k_heads: Count
    num_v_heads: Count
    head_k_dim: Count
    head_v_dim: Count
    conv_size: Count = 4

    def _find_field_errors(self) -> FieldErrors:
        if self.num_v_heads % self.num_k_heads:
            yield "num_k_heads", f"divide num_v_heads ({self.num_v_heads}): choose a divisor"
        for name in ("head_k_dim", "head_v_dim"):
            if getattr(self, name) % 8:
                yield name, "be a multiple of 8, 16 bytes in bf16, for products of states: raise it"

    @property
    def state_flops(self) -> int:
        """Forward FLOPs per token of the matrix products with the states of all heads."""
        return 2 * self.state_passes * self.num_v_heads * self.head_k_dim * self.head_v_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaConfig(LinearAttentionConfig):
    """A gated delta net: each token corrects the value that the state returns for its key.

    Source: Gated Delta Networks (arXiv:2412.06464).
    """

    state_passes = 3  # read for the key, written, read for the query


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Config(LinearAttentionConfig):
    """A Mamba-2 layer with `num_v_heads` heads, in `num_k_heads` groups that share B and C.

    Attributes:
        min_step: lower bound to which time steps are clamped.

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
        num_kv_heads: key and value heads per layer; num_heads / num_kv_heads query heads share
            each.
        head_dim: dim of one head.
        moe: config of every MoE layer; None = all layers are dense.
        hash_layers: the first `hash_layers` MoE layers select experts by a table of token ids
            (DeepSeek-V4: 3), see `MoEConfig.by_token_id`.
        dense_layers: indices of the layers with a plain MLP, in rising order.
        mlp_hidden_dim: hidden dim of the dense layers' MLP; 0 when no layer is dense.
        mlp_activation: activation of the dense layers' MLP: "swiglu" or "situ_glu" with a gate, or
            "relu2" (relu squared) without a gate. See `MoEConfig` for "situ_glu".
        mlp_activation_limit, mlp_activation_up_limit: limits of gate and up in "situ_glu".
        mla: multi-head latent attention; None = grouped-query attention. With mla, num_kv_heads
            equals num_heads, and head_dim is the dim of a query or key head.
        num_mtp_layers: number of modules that predict further tokens in training (multi-token
            prediction, `MTPLayer`); 0 = off.
        mtp_loss_coef: weight of the mean of the modules' losses; must be 0 without modules.
        mtp_repeats: number of runs of a single MTP module, each on the output of its last run. Each
            run predicts one token further (Megatron-Core's mtp_use_repeated_layer).
        mtp_detached: the modules' losses train only the modules. No gradient reaches the decoder's
            layers, the embedding or the head (Megatron-Core's mtp_detach_heads).
        linear_attention: attention of `linear_layers` (Qwen3-Next), or of "M" in a pattern;
            None = no layer has linear attention.
        linear_layers: indices of the layers with linear attention, in rising order.
        pattern: one letter per layer: "M" linear attention, "*" attention, "E" an MoE layer, "-" a
            plain MLP (Nemotron-H). Such a layer has no other part. "" = every layer has attention
            and a feed-forward, whose kinds linear_layers and dense_layers select.
        attention_bias: learned biases: "qkv" for queries, keys and values (Qwen2, GLM-4.5), "all"
            for the output too (Llama's option), None = off.
        windows: sliding window of each layer in keys, the token's own key included; 0 = full causal
            attention. Layer i has windows[i % len(windows)]: (128, 0) for gpt-oss. () = no windows.
        attention_sinks: each head's softmax has one extra learned score, without a value (gpt-oss).
        attention_gate: each head's output is multiplied by the sigmoid of a gate. `q_proj` returns
            the gate after the head's query (Qwen3-Next).
        qk_norm: RMSNorm on queries and keys: "head" over each head (Qwen3), "full" over all heads
            (OLMoE), None = off.
        rope_theta: base of the rotary frequencies; None = attention without position embedding.
        rotary_dim: number of first dims of a head that rotary embedding rotates (GLM-4.5: half);
            0 = all dims. With mla see `MLAConfig`.
        yarn: rotary scaling for sequences longer than in pretraining; None = off. With mla, set
            `mla.yarn` instead.
        norm_eps: added to the mean square in every RMSNorm.
        zero_centered_norms: every RMSNorm multiplies by 1 + its weight, except in linear attention
            (Qwen3-Next).
        tie_embeddings: the output head uses the embedding table as its weight.
        max_seq_len: longest sequence in tokens.
        ce_chunk_tokens: tokens per chunk of the loss; logits of one chunk exist at a time.
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

    def _find_field_errors(self) -> FieldErrors:
        if self.pattern:
            yield from self._find_pattern_errors()
        yield from self._find_attention_errors()
        if self.mla is not None:
            yield from self._find_mla_errors(self.mla)
        yield from self._find_layer_errors()
        modules = f"num_mtp_layers ({self.num_mtp_layers})"
        if bool(self.mtp_loss_coef) != bool(self.num_mtp_layers):
            yield "mtp_loss_coef", f"be > 0 with {modules} > 0 and 0 without: set it to 0.3 or 0"
        if self.mtp_detached and not self.num_mtp_layers:
            yield "mtp_detached", "be False with num_mtp_layers (0), which has no losses: drop it"
        if self.mtp_repeats > 1 and self.num_mtp_layers != 1:
            yield "mtp_repeats", f"be 1 with {modules}, because it repeats one module: use 1 module"
        if self.num_predictions >= self.max_seq_len:
            name = "num_mtp_layers" if self.mtp_repeats == 1 else "mtp_repeats"
            yield name, f"be < max_seq_len ({self.max_seq_len}), or there is no target: lower it"
        if self.moe is not None and self.moe.dim != self.dim:
            yield "moe.dim", f"equal dim ({self.dim}): build MoEConfig with the decoder's dim"
        if self.moe is not None and self.moe.assignment == "hash":
            yield "moe.assignment", "not be 'hash' in a decoder: set hash_layers"
        if self.hash_layers and self.hash_layers >= self.num_moe_layers:
            yield "hash_layers", f"be < the number of MoE layers ({self.num_moe_layers}): lower it"

    # Each of these yields the field and the error text of its broken rules.
    def _find_pattern_errors(self) -> FieldErrors:
        letters = "".join((*MIXERS, *FEEDFORWARDS))
        if set(self.pattern) - set(letters) or len(self.pattern) != self.num_layers:
            number = f"each of num_layers ({self.num_layers})"
            yield "pattern", f"have one of {letters!r} for {number}: correct it"
        for name in ("linear_layers", "dense_layers"):
            if value := getattr(self, name):
                yield name, f"be {type(value)()} with pattern, which names them: drop it"
        if ("E" in self.pattern) != (self.moe is not None):
            yield "pattern", "name MoE layers ('E') with moe and none without: give both or none"
        if self.num_mtp_layers:
            yield "num_mtp_layers", "be 0 with pattern, whose last layer is half a block: drop it"

    def _find_attention_errors(self) -> FieldErrors:
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
            yield from self._find_yarn_errors("yarn", self.yarn)

    def _find_yarn_errors(self, name: str, yarn: YarnConfig) -> FieldErrors:
        """Yield (field, error text) of each broken rule of `yarn`, the value of field `name`."""
        if self.rope_theta is None or self.rope_theta <= 1:
            yield "rope_theta", f"be > 1 with {name}, which scales frequencies: keep 10000.0"
        if self.max_seq_len > yarn.factor * yarn.original_max_seq_len:
            limit = f"{name}.factor * {name}.original_max_seq_len"
            value = f"({yarn.factor} * {yarn.original_max_seq_len})"
            yield "max_seq_len", f"be <= {limit} {value}: raise the factor or lower it"

    def _find_mla_errors(self, mla: MLAConfig) -> FieldErrors:
        if self.num_kv_heads != self.num_heads:
            yield "num_kv_heads", f"equal num_heads ({self.num_heads}) with mla: set it so"
        if self.head_dim != mla.qk_head_dim:
            total = f"mla.qk_nope_head_dim + mla.qk_rope_head_dim ({mla.qk_head_dim})"
            yield "head_dim", f"equal {total}: set it so"
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
            yield from self._find_yarn_errors("mla.yarn", mla.yarn)

    def _find_layer_errors(self) -> FieldErrors:
        if self.moe is None and self.dense_layers:
            yield "dense_layers", "be () with moe (None), where all layers are dense: drop it"
        yield from self._find_index_errors("dense_layers", self.dense_layers)
        if self.moe is not None and not self.num_moe_layers:
            layers = f"num_layers ({self.num_layers})"
            yield "dense_layers", f"leave a layer of {layers} to moe: shorten it or set moe=None"
        if self.num_dense_layers and not self.mlp_hidden_dim:
            yield (
                "mlp_hidden_dim",
                f"be >= 1 with {self.num_dense_layers} dense layers (dense_layers, or all with moe "
                "None): set it",
            )
        if not self.num_dense_layers and self.mlp_hidden_dim:
            yield "mlp_hidden_dim", "be 0 with dense_layers (()), where no layer reads it: drop it"
        yield from self._find_index_errors("linear_layers", self.linear_layers)
        mixers = [self.get_mixer(i) for i in range(self.num_layers)]
        name = "pattern" if self.pattern else "linear_layers"
        if "attention" not in mixers:
            yield name, f"leave a layer of num_layers ({self.num_layers}) to attention: change it"
        if ("linear" in mixers) != (self.linear_attention is not None):
            layers = "layers ('M')" if self.pattern else "layers"
            yield name, f"name {layers} with linear_attention and none without: give both or none"

    def _find_index_errors(self, name: str, indices: tuple[int, ...]) -> FieldErrors:
        """Yield (field, error text) if layer `indices`, the value of field `name`, are wrong."""
        if list(indices) != sorted(set(indices)):
            yield name, "rise without repeats: sort it"
        if indices and indices[-1] >= self.num_layers:
            yield name, f"lie in [0, num_layers ({self.num_layers})): drop the others"

    @property
    def num_predictions(self) -> int:
        """Number of further tokens that the multi-token prediction modules predict."""
        return self.num_mtp_layers * self.mtp_repeats

    @property
    def num_dense_layers(self) -> int:
        """Number of layers with a plain MLP."""
        return sum(self.is_dense(i) for i in range(self.num_layers))

    @property
    def num_moe_layers(self) -> int:
        """Number of layers with an MoE layer."""
        return sum(self.get_feedforward(i) == "moe" for i in range(self.num_layers))

    def get_window(self, layer_idx: int) -> int | None:
        """Return a layer's sliding window in keys, its own key included; None = full causal."""
        return self.windows[layer_idx % len(self.windows)] or None if self.windows else None

    def get_mixer(self, layer_idx: int) -> Mixer | None:
        """Return "attention" or "linear" for a layer; None = the layer has no attention."""
        if self.pattern:
            return MIXERS.get(self.pattern[layer_idx])
        return "linear" if layer_idx in self.linear_layers else "attention"

    def get_feedforward(self, layer_idx: int) -> Feedforward | None:
        """Return "dense" or "moe" for a layer; None = the layer has no feed-forward."""
        if self.pattern:
            return FEEDFORWARDS.get(self.pattern[layer_idx])
        return "dense" if self.moe is None or layer_idx in self.dense_layers else "moe"

    def is_dense(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx` has a plain MLP."""
        return self.get_feedforward(layer_idx) == "dense"
