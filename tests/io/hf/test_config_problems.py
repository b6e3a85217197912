"""Two configs of one model in different spellings are the same; any field that counts is not."""

from __future__ import annotations

from copy import deepcopy

import pytest

from moecore.io.hf.config import config_problems
from tests.families.transformers.hf_models import transformers
from tests.io.hf.test_config import GPT_OSS_20B, PUBLISHED

CONFIGS = dict(PUBLISHED)
del CONFIGS["kimi-k2"]  # transformers has no class of this model_type


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_makes_of_a_published_config_is_the_same(name):
    values = CONFIGS[name]
    config_class = transformers.CONFIG_MAPPING[values["model_type"]]
    own = config_class.from_dict(deepcopy(values)).to_dict()  # it changes what it is given
    assert config_problems(values, own) == config_problems(own, values) == []
    has_rope = name != "nemotron-3-nano-30b-a3b"
    own_names = ("rms_norm_eps", "rope_theta") if has_rope else ("layer_norm_epsilon", "n_groups")
    for change in (
        dict(num_experts_per_tok=3),
        {own_names[0]: 0.1},
        {own_names[1]: 4},
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
