"""Two configs of one model in different spellings are the same; any field that counts is not."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from moecore.io.hf.config import config_problems
from tests.families.transformers.hf_models import transformers
from tests.io.hf.test_config import PUBLISHED

GPT_OSS_20B: dict[str, Any] = dict(
    model_type="gpt_oss",
    attention_bias=True,
    head_dim=64,
    hidden_act="silu",
    hidden_size=2880,
    intermediate_size=2880,
    layer_types=["sliding_attention", "full_attention"] * 12,
    max_position_embeddings=131072,
    num_attention_heads=64,
    num_experts_per_tok=4,
    num_hidden_layers=24,
    num_key_value_heads=8,
    num_local_experts=32,
    quantization_config=dict(quant_method="mxfp4"),
    rms_norm_eps=1e-5,
    rope_scaling=dict(
        beta_fast=32.0,
        beta_slow=1.0,
        factor=32.0,
        original_max_position_embeddings=4096,
        rope_type="yarn",
        truncate=False,
    ),
    rope_theta=150000,
    router_aux_loss_coef=0.9,
    sliding_window=128,
    swiglu_limit=7.0,
    tie_word_embeddings=False,
    vocab_size=201088,
)
CONFIGS = PUBLISHED | {"gpt-oss-20b": GPT_OSS_20B}
del CONFIGS["kimi-k2"]  # transformers has no class of this model_type


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_makes_of_a_published_config_is_the_same(name):
    values = CONFIGS[name]
    config_class = transformers.CONFIG_MAPPING[values["model_type"]]
    own = config_class.from_dict(deepcopy(values)).to_dict()  # it changes what it is given
    assert config_problems(values, own) == config_problems(own, values) == []
    for change in (
        dict(num_experts_per_tok=3),
        dict(rms_norm_eps=0.1),
        dict(rope_theta=77.0),
        dict(model_type="llama"),
    ):
        assert len(config_problems(values | change, own)) == 1, change
    free = dict(router_aux_loss_coef=0.5, max_position_embeddings=2048, use_cache=False)
    assert config_problems(values | free, own) == []


def test_what_is_switched_off_counts():
    own = transformers.GptOssConfig.from_dict(deepcopy(GPT_OSS_20B)).to_dict()
    for change in (dict(sliding_window=None), dict(swiglu_alpha=1.0), dict(attention_bias=False)):
        assert len(config_problems(GPT_OSS_20B | change, own)) == 1, change


def test_nothing_is_said_of_what_is_not_known():
    assert config_problems(GPT_OSS_20B, None) == []
    assert config_problems(GPT_OSS_20B, {"dim": 8}) == []
    nested = dict(model_type="other", rope_parameters={"full_attention": {"rope_theta": 1.0}})
    assert config_problems(nested, nested | dict(num_experts=3)) == []
