"""DecoderConfig: one frozen record that says what a decoder is.

Every cross-field rule is checked at construction: a wrong value is a one-line `ValueError` with
the field, its value, the relation it breaks and the fix. Meshes and groups are arguments
elsewhere, never fields here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from moecore.config import MoEConfig

QKNorm = Literal["head", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer with dense and MoE layers.

    Attributes:
        vocab_size: number of token ids V.
        dim: model dim D.
        num_layers: number of blocks.
        num_heads: query heads per layer.
        num_kv_heads: key and value heads per layer; each serves num_heads / num_kv_heads queries.
        head_dim: dim of one head; rotary embedding turns all of it.
        moe: the MoE layer of every layer that is not dense; None = all layers are dense.
        dense_layers: indices of the layers with a plain gated MLP, in rising order.
        mlp_hidden_dim: hidden dim of that MLP; 0 when no layer is dense.
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
    qk_norm: QKNorm | None = None
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    max_seq_len: int = 4096
    ce_chunk_tokens: int = 2048

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"DecoderConfig.{name} ({value!r}) must be a whole number >= 1")
        for name in ("rope_theta", "norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"DecoderConfig.{name} ({getattr(self, name)!r}) must be > 0")
        self._check_attention()
        self._check_layers()
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
