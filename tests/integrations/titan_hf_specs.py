"""Tiny Hugging Face models for torchtitan's registry, on seeded random tokens.

torchtitan imports this module by `--experimental.custom_import tests.integrations.titan_hf_specs`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

from moecore import BalanceConfig
from moecore.integrations.torchtitan.v02.decoder import with_labels
from moecore.integrations.torchtitan.v02.specs import decoder_spec, hf_spec
from moecore.models import DecoderConfig
from tests.families.transformers.hf_models import ARCHITECTURES, MODELS
from tests.integrations.titan_specs import VOCAB, build_random_tokens

BALANCE = BalanceConfig(micro_batch_coef=0.01, bias_update_rate=0.01)


def config(name: str, **options: Any) -> Any:
    """A tiny config whose initial weights are large enough that experts are seen in the loss."""
    return MODELS[name](vocab_size=VOCAB, initializer_range=0.2, **options).config


CONFIGS = {name: config(name) for name in ARCHITECTURES}
CONFIGS |= {
    "tiny": config("qwen3-moe", attn_implementation="sdpa"),
    "own loss": config("qwen3-moe", output_router_logits=True),
    "tied": config("qwen3-moe", tie_word_embeddings=True),
    "assets": None,
    "kind": {"model_type": "qwen3_moe"},
}


def local(spec: TrainSpec) -> TrainSpec:
    return replace(
        spec, build_dataloader_fn=with_labels(build_random_tokens), build_tokenizer_fn=None
    )


def register_decoder(decoder: DecoderConfig) -> None:
    """Register `tiny_same_decoder`: the decoder without the balance loss of its config."""
    assert decoder.moe is not None
    decoder = replace(decoder, moe=replace(decoder.moe, balance=BalanceConfig()))
    register_train_spec("tiny_same_decoder", local(decoder_spec({"tiny": decoder})))


register_train_spec("tiny_hf", local(hf_spec(CONFIGS)))
register_train_spec("tiny_hf_balanced", local(hf_spec(CONFIGS, balance=BALANCE)))
