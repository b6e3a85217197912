"""Attention of a native decoder, and its sizes, from the fields of a config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moecore.io.hf.config_fields import Fields
from moecore.models.config import AttentionBias, MLAConfig, YarnConfig

PLAIN = ("default", None)

# The field of biases in attention, its default (None = there is none), and where they are.
BIASES: dict[str, tuple[str, bool | None, AttentionBias]] = {
    **dict.fromkeys(
        ("qwen3_moe", "qwen3_next", "olmoe", "qwen3", "llama"), ("attention_bias", False, "all")
    ),
    "glm4_moe": ("attention_bias", False, "qkv"),
    "qwen2_moe": ("qkv_bias", True, "qkv"),
    "qwen2": ("", None, "qkv"),
    "gpt_oss": ("attention_bias", True, "all"),
}


def grouped_attention(fields: Fields) -> dict[str, Any]:
    """Arguments of DecoderConfig that families share, with grouped-query attention and rotary."""
    heads, rope = sizes_and_heads(fields), fields.rope()
    return heads | dict(
        rope_theta=float(rope["rope_theta"]),
        rotary_dim=_rotary_dim(fields, heads["head_dim"], rope["partial_rotary_factor"]),
        yarn=_yarn(fields),
        norm_eps=fields.need("rms_norm_eps"),
    )


def sizes_and_heads(fields: Fields) -> dict[str, Any]:
    """Arguments of DecoderConfig that all families share."""
    heads = fields.need("num_attention_heads")
    return dict(
        vocab_size=fields.need("vocab_size"),
        dim=fields.need("hidden_size"),
        num_layers=fields.need("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads", heads),
        head_dim=fields.get("head_dim", fields.need("hidden_size") // heads),
        attention_bias=_attention_bias(fields),
        tie_embeddings=fields.get("tie_word_embeddings", False),
        max_seq_len=fields.need("max_position_embeddings"),
    )


def latent_attention(fields: Fields) -> dict[str, Any]:
    """What `grouped_attention` returns, of latent attention."""
    mla = MLAConfig(
        q_lora_rank=fields.get("q_lora_rank", 0),
        kv_lora_rank=fields.need("kv_lora_rank"),
        qk_nope_head_dim=fields.need("qk_nope_head_dim"),
        qk_rope_head_dim=fields.need("qk_rope_head_dim"),
        v_head_dim=fields.need("v_head_dim"),
        yarn=_yarn(fields),
    )
    common = grouped_attention(fields)
    heads = dict(head_dim=mla.qk_head_dim, num_kv_heads=common["num_heads"])
    return common | heads | dict(mla=mla, yarn=None)


def windows_of(fields: Fields, pattern: Sequence[bool]) -> tuple[int, ...]:
    """The windows of layers, as short as they repeat; () where none hides a token of a row."""
    window, length = fields.get("sliding_window", None), fields.need("max_position_embeddings")
    if window is None or window >= length or not any(pattern):
        return ()
    if not window:
        raise ValueError("config.json sliding_window (0) must be >= 1 or null: correct it")
    n, layers = len(pattern), range(len(pattern))
    period = next(p for p in range(1, n + 1) if all(pattern[i] == pattern[i % p] for i in layers))
    return tuple(window if is_windowed else 0 for is_windowed in pattern[:period])


def _attention_bias(fields: Fields) -> AttentionBias | None:
    name, default, kind = BIASES.get(fields.model_type, ("", False, "all"))
    if name != "attention_bias":
        fields.refuse("attention_bias", fields.get("attention_bias", False))
    is_on = default is None or (bool(name) and fields.get(name, default))
    return kind if is_on else None


def _rotary_dim(fields: Fields, head_dim: int, part: float) -> int:
    """Dims of a head that are turned, 0 = all; other classes turn all whatever the field."""
    turns_part = fields.model_type in ("glm4_moe", "qwen3_next")
    fields.refuse("partial_rotary_factor", part != 1 and not turns_part, part)
    turned = int(head_dim * part)
    if not 0 < turned <= head_dim:
        raise ValueError(
            f"config.json partial_rotary_factor ({part}) must leave 1 to head_dim ({head_dim}) "
            "dims to turn: correct it"
        )
    return 0 if turned == head_dim else turned


def _yarn(fields: Fields) -> YarnConfig | None:
    """YaRN; without both scales transformers takes 1 and 0."""
    rope = fields.rope()
    kind = rope["rope_type"]
    fields.refuse("rope_type", kind not in (*PLAIN, "yarn"), kind)
    if kind in PLAIN:
        return None
    factor = rope.get("attention_factor")
    fields.refuse("attention_factor", factor is not None, factor)
    if rope.get("original_max_position_embeddings") is None:
        fields.need("rope_scaling.original_max_position_embeddings")
    original = rope["original_max_position_embeddings"]
    mscale, all_dim = rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0
    # transformers then scales the attention scores, but not cos and sin by the same
    fields.refuse("mscale_all_dim", bool(all_dim and not mscale), all_dim)
    return YarnConfig(
        factor=float(rope.get("factor") or fields.need("max_position_embeddings") / original),
        original_max_seq_len=original,
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        mscale=float(mscale) if all_dim else 1.0,
        mscale_all_dim=float(all_dim),
        truncate=rope.get("truncate") is not False,
    )
