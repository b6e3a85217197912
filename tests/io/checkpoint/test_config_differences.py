import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore.io import load, read_manifest, save
from moecore.io.checkpoint import config_differences
from moecore.io.checkpoint.config_differences import (
    Difference,
    find_decoder_differences,
    find_hf_differences,
    find_model_config,
)
from moecore.io.checkpoint.manifest import MANIFEST
from moecore.models import Decoder, preset
from tests.families.transformers.hf_models import ARCHITECTURES, random_model
from tests.io.checkpoint.fuzz import write_signed

YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
# Of one family each, or of all: what fits its tensors, and what the model and the file have.
CHANGES: list[tuple[str, dict[str, Any], str, str, str]] = [
    *(
        (name, change, field, new, old)
        for name in ARCHITECTURES
        for change, field, new, old in (
            (dict(rms_norm_eps=0.5), "rms_norm_eps", "0.5", r"1e-0\d"),
            (dict(hidden_act="gelu"), "hidden_act", "'gelu'", "'silu'"),
            (dict(num_experts_per_tok=1), "num_experts_per_tok", "1", "[23]"),
            (
                dict(rope_parameters=dict(rope_type="default", rope_theta=77.0)),
                "rope_parameters.rope_theta",
                "77.0",
                r"1\d+.0",
            ),
        )
        if not (name == "gpt-oss" and "rope_parameters" in change)
    ),
    ("gpt-oss", dict(rope_parameters=YARN), "rope_parameters.factor", "4.0", "32.0"),
    ("gpt-oss", dict(swiglu_limit=7.0), "swiglu_limit", "7.0", "0.5"),
    ("gpt-oss", dict(sliding_window=8), "sliding_window", "8", "4"),
    ("gpt-oss", dict(layer_types=["full_attention"] * 2), "layer_types", r"\['full", r"\['sliding"),
    ("mixtral", dict(sliding_window=8), "sliding_window", "8", "None"),
    ("olmoe", dict(rope_parameters=YARN), "rope_parameters.rope_type", "'yarn'", "'default'"),
    ("qwen2-moe", dict(norm_topk_prob=True), "norm_topk_prob", "True", "False"),
    ("qwen3-moe", dict(norm_topk_prob=False), "norm_topk_prob", "False", "True"),
    (
        "qwen3-moe",
        dict(use_sliding_window=True, sliding_window=4),
        "use_sliding_window",
        "True",
        "False",
    ),
    ("olmoe", dict(clip_qkv=0.1), "clip_qkv", "0.1", "None"),
    ("deepseek-v3", dict(routed_scaling_factor=1.0), "routed_scaling_factor", "1.0", "2.5"),
    ("deepseek-v3", dict(n_group=2), "n_group", "2", "4"),
    ("deepseek-v3", dict(topk_group=1), "topk_group", "1", "2"),
    ("deepseek-v3", dict(scoring_func="softmax"), "scoring_func", "'softmax'", "'sigmoid'"),
    ("deepseek-v3", dict(rope_interleave=False), "rope_interleave", "False", "True"),
]
PUBLISHED_FIELDS = dict(scoring_func="sigmoid")  # that transformers' own class does not know
TRAINING = dict(
    router_aux_loss_coef=0.5,
    attention_dropout=0.1,
    initializer_range=0.5,
    use_cache=False,
    output_router_logits=True,
    max_position_embeddings=128,
    pad_token_id=7,
    architectures=["Mine"],
    name_or_path="elsewhere",
    dtype="float32",
)


def model_of(name: str, **change: Any) -> nn.Module:
    fields = PUBLISHED_FIELDS if name == "deepseek-v3" else {}
    return random_model(name, **fields | change)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint of each family; the save took the config from the model."""
    root = tmp_path_factory.mktemp("saved")
    return {name: save(root / name, 1, model_of(name), None) for name in ARCHITECTURES}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return found | {f"{n}.grad": p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("name", "change", "field", "new", "old"), CHANGES)
def test_a_model_that_computes_something_else(saved, name, change, field, new, old):
    model = model_of(name, **change)
    for param in model.parameters():
        param.data.zero_()
        param.grad = torch.ones_like(param)
    before = state_of(model)
    message = rf"config.{field} \({new}.*\) must be {old}.* as in the checkpoint"
    with pytest.raises(ValueError, match=message) as info:
        load(saved[name], model)
    assert "\n" not in str(info.value)
    assert "build them as when it was saved, or load what fits with strict=False" in str(info.value)
    after = state_of(model)
    assert all(torch.equal(before[key], after[key]) for key in before)
    with pytest.warns(UserWarning, match=message):
        load(saved[name], model, strict=False)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_only_training_or_bookkeeping_reads_may_change(saved, name):
    implementation = "eager" if name == "gpt-oss" else "sdpa"
    model = model_of(name, **TRAINING, attn_implementation=implementation)
    load(saved[name], model)
    truth = model_of(name).state_dict()
    assert all(torch.equal(tensor, truth[n]) for n, tensor in model.state_dict().items())


class WithLoss(nn.Module):
    """A module of the caller's own around a model, which has no config."""

    def __init__(self, hf: nn.Module) -> None:
        super().__init__()
        self.hf = hf


def test_wrapped_models(tmp_path: Path) -> None:
    """By a module of the caller's, by torch.compile, by one more transformers model: its base."""

    def wrap(hf: nn.Module) -> nn.Module:
        return WithLoss(torch.compile(hf))  # type: ignore[arg-type]

    path = save(tmp_path / "wrapped", 1, wrap(random_model("mixtral")), None)
    config = read_manifest(path).facts.config
    assert config is not None and config["model_type"] == "mixtral"
    load(path, wrap(random_model("mixtral")))
    load(path, WithLoss(random_model("mixtral")))
    other = random_model("mixtral", rms_norm_eps=0.5)
    with pytest.raises(ValueError, match=r"1 differ: config.rms_norm_eps \(0.5\) must be 1e-05 as"):
        load(path, wrap(other))
    path = save(tmp_path / "base", 1, random_model("mixtral").model, None)
    with pytest.raises(ValueError, match=r"1 differ: config.rms_norm_eps \(0.5\) must be 1e-05 as"):
        load(path, other.model)


def test_several_models_in_one_have_no_config() -> None:
    hf, decoder = random_model("mixtral"), Decoder(preset("tiny"))
    assert find_model_config(nn.ModuleDict({"a": hf, "b": random_model("mixtral")})) is None
    assert find_model_config(nn.ModuleDict({"a": hf, "b": decoder})) is None
    assert find_model_config(
        nn.ModuleDict({"a": hf, "again": nn.Sequential(hf)})
    ) == find_model_config(hf)
    assert find_model_config(nn.Linear(2, 2)) is None


def test_configs_that_tell_less(tmp_path: Path) -> None:
    """Those of before, those that are no description of the model, and what JSON cannot hold."""
    model, other = random_model("mixtral"), random_model("mixtral", rms_norm_eps=0.5)
    model.config.mine = object()
    path = save(tmp_path, 1, model, None)
    config = read_manifest(path).facts.config
    assert config is not None and "mine" not in config
    with pytest.raises(ValueError, match=r"config\.rms_norm_eps"):
        load(path, other)
    values = json.loads((path / MANIFEST).read_text())
    del values["config"]["rms_norm_eps"]
    write_signed(path, values)
    load(path, other)
    write_signed(path, values | {"config": None})
    load(path, other)
    load(save(tmp_path, 2, model, None, config={"preset": "mine", "rms_norm_eps": 1.0}), other)
    path = save(tmp_path, 3, other, None, config=other.config.to_dict())  # as it had to be given
    with pytest.raises(ValueError, match=r"rms_norm_eps \(1e-05\) must be 0.5 as in the checkp"):
        load(path, random_model("mixtral"))


V4 = dict(model_type="x", rope_theta=10.0, max_position_embeddings=64)
V5 = dict(model_type="x", rope_parameters=dict(rope_type="default", rope_theta=10.0))
LONG, DYNAMIC = dict(max_position_embeddings=128), dict(rope_type="dynamic", factor=2.0)
SLIDING = dict(full_attention=dict(rope_theta=1.0), sliding_attention=dict(rope_theta=2.0))
NEAR = dict(rope_parameters=SLIDING | dict(full_attention=dict(rope_theta=9.0)))
LINEAR, YARN_2 = dict(type="linear", factor=2.0), dict(rope_type="yarn", factor=2.0)
DEFAULTS = YARN_2 | dict(beta_fast=32.0, truncate=True, attention_factor=None)


def scaled(values: dict[str, Any], **more: Any) -> dict[str, Any]:
    return V4 | dict(rope_scaling=values | more)


@pytest.mark.parametrize(
    ("ours", "theirs", "wanted"),
    [
        (V4, V5, []),
        (V4 | dict(rope_theta=5.0), V5, [("rope_parameters.rope_theta", "5.0", "10.0")]),
        (scaled(LINEAR), V5, [("rope_parameters.rope_type", "'linear'", "'default'")]),
        (
            scaled(LINEAR),
            scaled(dict(rope_type="linear", factor=3.0)),
            [("rope_parameters.factor", "2.0", "3.0")],
        ),
        # Defaults that one release writes out, and another does not.
        (
            scaled(YARN_2),
            V4 | dict(rope_parameters=DEFAULTS | dict(original_max_position_embeddings=64)),
            [],
        ),
        (scaled(YARN_2), scaled(YARN_2, mscale=0.7), [("rope_parameters.mscale", "None", "0.7")]),
        # The length is read by some types.
        (V4, V4 | LONG, []),
        (
            scaled(DYNAMIC) | dict(rope_theta=10.0),
            scaled(DYNAMIC) | LONG,
            [
                (name, "64", "128")
                for name in (
                    "max_position_embeddings",
                    "rope_parameters.original_max_position_embeddings",
                )
            ],
        ),
        (
            dict(rope_parameters=SLIDING),
            NEAR,
            [("rope_parameters.full_attention.rope_theta", "1.0", "9.0")],
        ),
        # What one side does not name, one thing under two names, parts with a config of their own.
        (dict(top_k=2), dict(num_groups=3), []),
        (dict(num_experts=8), dict(num_experts=None, num_local_experts=8), []),
        (dict(head_dim=None), dict(head_dim=64), []),
        (
            dict(text_config=V4 | dict(eps=1)),
            dict(text_config=V5 | dict(eps=2)),
            [("text_config.eps", "1", "2")],
        ),
        (dict(scale=[1, 2]), dict(scale=(1, 2)), []),
        (
            dict(use_sliding_window=False, sliding_window=4096),
            dict(use_sliding_window=False, sliding_window=None),
            [],
        ),
        (
            dict(model_type="x", top_k=2),
            dict(model_type="y", top_k=3),
            [("model_type", "'x'", "'y'")],
        ),
        # Nonsense that somebody has signed.
        (V5, dict(model_type="x", rope_parameters=3, rope_scaling="no"), []),
    ],
)
def test_fields_that_differ(ours, theirs, wanted):
    assert find_hf_differences(ours, theirs) == [Difference(name, a, b) for name, a, b in wanted]
    assert find_hf_differences(theirs, ours) == [Difference(name, b, a) for name, a, b in wanted]


@pytest.mark.parametrize("name", ["tiny-deepseek-v3", "tiny-qwen3-next", "tiny-nemotron-h"])
def test_every_field_of_a_native_config_counts_unless_it_is_named(name):
    """Exports and conversions to Hugging Face's files compare by this."""
    config = preset(name)
    skipped = config_differences.TRAINING | config_differences.READ_WITH.keys()

    def check(values: dict[str, Any], prefix: str) -> None:
        for field, value in [*values.items()]:
            path = prefix + field
            if isinstance(value, dict) and path not in skipped:
                check(value, f"{path}.")
                continue
            values[field] = "another value"
            found = [one.name for one in find_decoder_differences(config, whole)]
            assert found == ([] if path in skipped else [path])
            values[field] = value

    whole = asdict(config)
    check(whole, "")
    assert whole == asdict(config)


def test_a_limit_counts_where_an_activation_reads_it() -> None:
    config = preset("tiny-qwen3")
    assert config.moe is not None
    for activation, read in (
        ("swiglu", []),
        ("limited_swiglu", ["moe.activation_limit"]),
        ("clamped_swiglu", ["moe.activation_limit", "moe.activation_alpha"]),
    ):
        moe = replace(config.moe, activation=activation)
        ours, theirs = (
            replace(config, moe=replace(moe, activation_limit=limit, activation_alpha=alpha))
            for limit, alpha in ((7.0, 1.702), (6.0, 1.5))
        )
        assert [one.name for one in find_decoder_differences(ours, theirs)] == read
