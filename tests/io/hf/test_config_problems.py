import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from moecore.io import load_hf
from moecore.io.hf.config import compare_config, decoder_config_from_hf
from moecore.io.hf.convert import hf_to_native
from moecore.io.hf.verify import verify_hf
from moecore.models import Decoder, preset
from tests.families.transformers.hf_models import transformers
from tests.io.hf.dirs import write_directory
from tests.io.hf.test_config import GPT_OSS_20B, PUBLISHED

CONFIGS = dict(PUBLISHED)
del CONFIGS["kimi-k2"]  # transformers has no class of this model_type


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_makes_of_a_published_config_is_the_same(name):
    values = CONFIGS[name]
    config_class = transformers.CONFIG_MAPPING[values["model_type"]]
    own = config_class.from_dict(deepcopy(values)).to_dict()  # it changes what it is given
    assert compare_config(values, own) == compare_config(own, values) == []
    has_rope = name != "nemotron-3-nano-30b-a3b"
    own_names = ("rms_norm_eps", "rope_theta") if has_rope else ("layer_norm_epsilon", "n_groups")
    for change in (
        dict(num_experts_per_tok=3),
        {own_names[0]: 0.1},
        {own_names[1]: 4},
        dict(model_type="llama"),
    ):
        assert len(compare_config(values | change, own)) == 1, change
    free = dict(router_aux_loss_coef=0.5, max_position_embeddings=2048, use_cache=False)
    assert compare_config(values | free, own) == []


def test_what_is_switched_off_counts():
    own = transformers.GptOssConfig.from_dict(deepcopy(GPT_OSS_20B)).to_dict()
    for change in (dict(sliding_window=None), dict(swiglu_alpha=1.0), dict(attention_bias=False)):
        assert len(compare_config(GPT_OSS_20B | change, own)) == 1, change


def test_nothing_is_said_of_what_is_not_known():
    assert compare_config(GPT_OSS_20B, None) == [] and compare_config(GPT_OSS_20B, {"dim": 8}) == []
    nested = dict(model_type="other", rope_parameters={"full_attention": {"rope_theta": 1.0}})
    assert compare_config(nested, nested | dict(num_experts=3)) == []


WRONG: list[Any] = [[], {}, [[]], {"a": []}, "x", "x" * 10**5, -1, 0.5, 10**400, True, [None, "a"]]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_field_of_another_type_is_one_line_or_read(name):
    """Of each field that the file has, in the native decoder's reader and beside a model."""
    values = CONFIGS[name]
    own = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(deepcopy(values)).to_dict()
    own["model_type"] = values["model_type"]
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    cases = [{field: wrong} for field in values for wrong in WRONG]
    cases += [{"rope_scaling": rope | {name: wrong}} for name in rope for wrong in WRONG]
    for change in cases:
        changed = deepcopy(values) | change
        found = [""]
        try:
            decoder_config_from_hf(changed)
        except (ValueError, NotImplementedError) as error:
            found = [str(error)]
        found += compare_config(changed, own) + compare_config(changed, preset("tiny"))
        assert all("\n" not in text and len(text) < 500 for text in found), change
        if "model_type" in change:
            assert found[0] and found[1]


@pytest.mark.parametrize("field", ["model_type", "quantization_config"])
@pytest.mark.parametrize("wrong", [[], {}, [1], 3, True], ids=repr)
def test_directories_with_a_field_of_another_type(tmp_path: Path, field: str, wrong: Any) -> None:
    if field == "quantization_config" and wrong == {}:
        return  # an object
    path = write_directory(tmp_path / "hf", {"x": torch.ones(2)}, {"model_type": "qwen3"})
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3"} | {field: wrong}))
    message = rf"config\.json {field} \(.*\) must be (a string|an object): correct it"
    for action in (
        lambda: load_hf(path, Decoder(preset("tiny"))),
        lambda: hf_to_native(path, tmp_path / "run"),
        lambda: decoder_config_from_hf(path),
    ):
        with pytest.raises(ValueError, match=message):
            action()
    (problem,) = verify_hf(path)
    assert problem.startswith(f"config.json {field} (") and "\n" not in problem
