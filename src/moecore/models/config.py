"""DecoderConfig: one frozen record that says what a decoder is.

Every cross-field rule is checked at construction: a wrong value is a one-line `ValueError` with
the field, its value, the relation it breaks and the fix. Meshes and groups are arguments
elsewhere, never fields here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from moecore.config import MoEConfig

QKNorm = Literal["head", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnConfig:
    """YaRN: rotary frequencies for sequences longer than those of pretraining.

    Attributes:
        factor: how many times longer; slow frequencies are divided by it.
        original_max_seq_len: longest sequence of pretraining, in tokens.
        beta_fast: frequencies with more turns than this over that length stay as they are.
        beta_slow: frequencies with fewer turns than this are divided by factor; between the two
            they are mixed.
        mscale: cos and sin are multiplied by (0.1 * mscale * ln(factor) + 1), ...
        mscale_all_dim: ... divided by (0.1 * mscale_all_dim * ln(factor) + 1); attention scores are
            multiplied by the square of this.

    Raises:
        ValueError: when a field or a combination of fields is not possible.

    Source: arXiv:2309.00071; the two mscales are DeepSeek-V2's (arXiv:2405.04434).
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        _check_count("YarnConfig", "original_max_seq_len", self.original_max_seq_len, 1)
        if not 1 <= self.factor < math.inf:
            raise ValueError(
                f"YarnConfig.factor ({self.factor!r}) must be a finite number >= 1: use yarn=None "
                "for sequences as long as those of pretraining"
            )
        if not 0 < self.beta_slow < self.beta_fast < math.inf:
            raise ValueError(
                f"YarnConfig.beta_slow ({self.beta_slow!r}) must be > 0 and < beta_fast "
                f"({self.beta_fast!r}): keep 1 and 32 if unsure"
            )
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"YarnConfig.{name} ({value!r}) must be a finite number >= 0")

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
class MLAConfig:
    """Multi-head latent attention: keys and values of all heads come from one small latent.

    Attributes:
        kv_lora_rank: dim of the latent of keys and values.
        qk_nope_head_dim: part of a query or key head that rotary embedding leaves alone.
        qk_rope_head_dim: part that it turns, in neighbouring pairs; all heads share the key's.
        v_head_dim: dim of a value head.
        q_lora_rank: dim of the latent of the queries; 0 = queries are projected directly.
        norm_eps: of the norms of the latents, whatever the decoder's own.
        yarn: longer sequences than in pretraining; None = off.

    Raises:
        ValueError: when a field or a combination of fields is not possible.

    Source: DeepSeek-V2 (arXiv:2405.04434).
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0
    norm_eps: float = 1e-6
    yarn: YarnConfig | None = None

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            _check_count("MLAConfig", name, getattr(self, name), 1)
        _check_count("MLAConfig", "q_lora_rank", self.q_lora_rank, 0)
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"MLAConfig.qk_rope_head_dim ({self.qk_rope_head_dim}) must be even, because "
                "rotary embedding turns pairs: use an even qk_rope_head_dim"
            )
        if not self.norm_eps > 0:
            raise ValueError(f"MLAConfig.norm_eps ({self.norm_eps!r}) must be > 0")

    @property
    def qk_head_dim(self) -> int:
        """Dim of a whole query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def score_scale(self) -> float:
        """Factor on q . k before softmax."""
        return self.qk_head_dim**-0.5 * (1.0 if self.yarn is None else self.yarn.score_scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer with dense and MoE layers.

    Attributes:
        vocab_size: number of token ids V.
        dim: model dim D.
        num_layers: number of blocks.
        num_heads: query heads per layer.
        num_kv_heads: key and value heads per layer; each serves num_heads / num_kv_heads queries.
        head_dim: dim of one head; rotary embedding turns all of it (not with mla).
        moe: the MoE layer of every layer that is not dense; None = all layers are dense.
        dense_layers: indices of the layers with a plain gated MLP, in rising order.
        mlp_hidden_dim: hidden dim of that MLP; 0 when no layer is dense.
        mla: multi-head latent attention; None = grouped-query attention. With it num_kv_heads is
            num_heads, and head_dim is that of queries and keys.
        num_mtp_layers: modules that predict further tokens in training (multi-token prediction,
            `models/mtp.py`); 0 = none. Their MLP or MoE is that of the last layer.
        mtp_loss_coef: weight of the mean of their losses; 0 without them.
        qk_norm: RMSNorm on queries and keys: "head" over each head (Qwen3), "full" over the whole
            projection (OLMoE), None = off.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in every RMSNorm.
        tie_embeddings: the output head reads the embedding table.
        max_seq_len: longest sequence in tokens.
        ce_chunk_tokens: tokens whose logits exist at once in the loss.

    Raises:
        ValueError: when a field or a combination of fields is not possible.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    moe: MoEConfig | None = None
    dense_layers: tuple[int, ...] = ()
    mlp_hidden_dim: int = 0
    mla: MLAConfig | None = None
    num_mtp_layers: int = 0
    mtp_loss_coef: float = 0.0
    qk_norm: QKNorm | None = None
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    max_seq_len: int = 4096
    ce_chunk_tokens: int = 2048

    def __post_init__(self) -> None:
        for name in _COUNTS:
            _check_count("DecoderConfig", name, getattr(self, name), 1)
        _check_count("DecoderConfig", "num_mtp_layers", self.num_mtp_layers, 0)
        for name in ("rope_theta", "norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"DecoderConfig.{name} ({getattr(self, name)!r}) must be > 0")
        self._check_attention()
        if self.mla is not None:
            self._check_mla(self.mla)
        self._check_layers()
        self._check_mtp()
        if self.moe is not None and self.moe.dim != self.dim:
            raise ValueError(
                f"DecoderConfig.moe.dim ({self.moe.dim}) must equal dim ({self.dim}): "
                "build MoEConfig with the decoder's dim"
            )

    def _check_attention(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"DecoderConfig.num_kv_heads ({self.num_kv_heads}) must divide num_heads "
                f"({self.num_heads}): choose a divisor"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"DecoderConfig.head_dim ({self.head_dim}) must be even, because rotary embedding "
                "turns pairs: use an even head_dim"
            )
        if self.qk_norm is not None and self.qk_norm not in get_args(QKNorm):
            choices = ", ".join(repr(c) for c in get_args(QKNorm))
            raise ValueError(
                f"DecoderConfig.qk_norm ({self.qk_norm!r}) must be one of {choices} or None"
            )

    def _check_mla(self, mla: MLAConfig) -> None:
        if self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"DecoderConfig.num_kv_heads ({self.num_kv_heads}) must equal num_heads "
                f"({self.num_heads}) with mla, where every head has keys of its own: set it so"
            )
        if self.head_dim != mla.qk_head_dim:
            raise ValueError(
                f"DecoderConfig.head_dim ({self.head_dim}) must equal mla.qk_nope_head_dim + "
                f"mla.qk_rope_head_dim ({mla.qk_head_dim}): set it so"
            )
        if self.qk_norm is not None:
            raise ValueError(
                f"DecoderConfig.qk_norm ({self.qk_norm!r}) must be None with mla, which norms the "
                "latents: drop qk_norm"
            )
        yarn = mla.yarn
        if yarn is not None and self.rope_theta <= 1:
            raise ValueError(
                f"DecoderConfig.rope_theta ({self.rope_theta!r}) must be > 1 with mla.yarn, which "
                "tells fast frequencies from slow ones: keep 10000.0 if unsure"
            )
        if yarn is not None and self.max_seq_len > yarn.factor * yarn.original_max_seq_len:
            raise ValueError(
                f"DecoderConfig.max_seq_len ({self.max_seq_len}) must be <= mla.yarn.factor * "
                f"mla.yarn.original_max_seq_len ({yarn.factor} * {yarn.original_max_seq_len}): "
                "raise the factor or lower max_seq_len"
            )

    def _check_mtp(self) -> None:
        coef = self.mtp_loss_coef
        if not 0 <= coef < math.inf:
            raise ValueError(f"DecoderConfig.mtp_loss_coef ({coef!r}) must be a finite number >= 0")
        if bool(coef) != bool(self.num_mtp_layers):
            raise ValueError(
                f"DecoderConfig.mtp_loss_coef ({coef!r}) must be > 0 with num_mtp_layers "
                f"({self.num_mtp_layers}) > 0 and 0 without: DeepSeek-V3 uses 0.3, later 0.1"
            )
        if self.num_mtp_layers >= self.max_seq_len:
            raise ValueError(
                f"DecoderConfig.num_mtp_layers ({self.num_mtp_layers}) must be < max_seq_len "
                f"({self.max_seq_len}): nothing so far ahead can be a target"
            )

    def _check_layers(self) -> None:
        dense = self.dense_layers
        if self.moe is None and dense:
            raise ValueError(
                f"DecoderConfig.dense_layers ({dense}) must be () with moe (None), where every "
                "layer is dense: drop it or give moe"
            )
        if list(dense) != sorted(set(dense)):
            raise ValueError(
                f"DecoderConfig.dense_layers ({dense}) must rise without repeats: sort it"
            )
        if dense and not 0 <= dense[0] <= dense[-1] < self.num_layers:
            raise ValueError(
                f"DecoderConfig.dense_layers ({dense}) must lie in [0, num_layers "
                f"({self.num_layers})): drop what lies outside"
            )
        if self.moe is not None and len(dense) == self.num_layers:
            raise ValueError(
                f"DecoderConfig.dense_layers ({dense}) must leave a layer of num_layers "
                f"({self.num_layers}) to moe: shorten it or set moe=None"
            )
        if self.num_dense_layers and self.mlp_hidden_dim < 1:
            raise ValueError(
                f"DecoderConfig.mlp_hidden_dim ({self.mlp_hidden_dim}) must be >= 1 with "
                f"{self.num_dense_layers} dense layers: set it"
            )
        if not self.num_dense_layers and self.mlp_hidden_dim:
            raise ValueError(
                f"DecoderConfig.mlp_hidden_dim ({self.mlp_hidden_dim}) must be 0 with "
                "dense_layers (()), where nothing reads it: drop it or name dense layers"
            )

    @property
    def num_dense_layers(self) -> int:
        """Number of layers with a plain MLP."""
        return self.num_layers if self.moe is None else len(self.dense_layers)

    @property
    def num_moe_layers(self) -> int:
        """Number of layers with an MoE layer."""
        return self.num_layers - self.num_dense_layers

    def is_dense(self, layer_idx: int) -> bool:
        """Whether this layer has a plain MLP."""
        return self.moe is None or layer_idx in self.dense_layers


def _check_count(record: str, name: str, value: int, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{record}.{name} ({value!r}) must be a whole number >= {minimum}")


_COUNTS = (
    "vocab_size",
    "dim",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_seq_len",
    "ce_chunk_tokens",
)
