"""Tiny Hugging Face jobs for torchtitan 0.3, on seeded random tokens.

torchtitan imports this module by `--module tests.integrations.titan_v03_hf_specs`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from moecore import BalanceConfig
from moecore.integrations.torchtitan.v03.jobs import hf_job
from tests.families.transformers.hf_models import ARCHITECTURES, MODELS
from tests.integrations.titan_v03_specs import VOCAB, tiny

BALANCE = BalanceConfig(micro_batch_coef=0.01, bias_update_rate=0.01)


def config(name: str, **options: Any) -> Any:
    """A tiny config whose initial weights are large enough that experts are seen in the loss."""
    return MODELS[name](vocab_size=VOCAB, initializer_range=0.2, **options).config


CONFIGS = {name.replace("-", "_"): config(name) for name in ARCHITECTURES}
CONFIGS |= {
    "tied": config("qwen3-moe", tie_word_embeddings=True),
    "own_loss": config("qwen3-moe", output_router_logits=True),
    "kind": {"model_type": "qwen3_moe"},
    "assets": None,
}


def job(name: str, **options: Any) -> Any:
    return tiny(hf_job(CONFIGS[name], **options))


def balanced() -> Any:
    return job("deepseek_v3", balance=BALANCE)


# torchtitan finds a job by the name of a function of this module.
globals().update({name: partial(job, name) for name in CONFIGS})
