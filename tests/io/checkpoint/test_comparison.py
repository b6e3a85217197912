import json
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moecore import BalanceConfig, CapacityConfig, MoEConfig
from moecore.io import load, read_manifest, save
from moecore.io.checkpoint.manifest import MANIFEST
from moecore.models import Decoder, DecoderConfig
from tests.io.checkpoint.fuzz import same, tensors_of, write_signed

Model = tuple[nn.ModuleDict, torch.optim.Optimizer]


def build(sizes: dict[str, int], *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Model:
    """Square layers by name, with moments that are not zero."""
    torch.manual_seed(seed)
    layers = {name: nn.Linear(n, n, bias=False, dtype=dtype) for name, n in sizes.items()}
    model = nn.ModuleDict(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    return model, optimizer


def test_one_error_lists_every_difference(tmp_path: Path) -> None:
    path = save(tmp_path, 1, *build({"same": 3, "gone": 3, "grown": 3}), {"note": 1})
    model, optimizer = build({"same": 3, "grown": 4, "new": 2}, seed=1)
    before, generator = tensors_of(model, optimizer), torch.get_rng_state()
    with pytest.raises(ValueError, match="6 differ: ") as info:
        load(path, model, optimizer)
    for part in (
        "grown.weight (3, 3) must be (4, 4) as in the model",
        "new.weight of the model is not in the checkpoint",
        "gone.weight of the checkpoint is not in the model",
        "optimizer.param_groups (1) hold other parameters",
        "optimizer state of gone.weight is of no parameter of the optimizer",
        "optimizer state of grown.weight belongs to a tensor that differs",
        "or load what fits with strict=False",
    ):
        assert part in str(info.value), part
    assert same(before, tensors_of(model, optimizer)) and optimizer.param_groups[0]["lr"] == 1.1
    assert torch.equal(generator, torch.get_rng_state())


def test_long_lists_are_cut(tmp_path: Path) -> None:
    path = save(tmp_path, 1, build({f"layer{i:02d}": 2 for i in range(13)})[0], None)
    with pytest.raises(ValueError, match=r"14 differ: .* \(and 4 more\): build them") as info:
        load(path, build({"other": 2})[0])
    assert str(info.value).count("is not in") == 10


def test_not_strict_loads_what_fits(tmp_path: Path) -> None:
    saved, saved_optimizer = build({"same": 3, "gone": 3, "grown": 3})
    path = save(tmp_path, 1, saved, saved_optimizer, {"note": 1})
    model, optimizer = build({"same": 3, "grown": 4, "new": 2}, seed=1)
    wanted = tensors_of(model, optimizer)
    wanted |= {
        name: tensor
        for name, tensor in tensors_of(saved, saved_optimizer).items()
        if "same" in name
    }
    with pytest.warns(UserWarning, match=r"step-000001\): 6 differ: .*left as it was"):
        assert load(path, model, optimizer, strict=False) == {"note": 1}
    assert same(wanted, tensors_of(model, optimizer)) and optimizer.param_groups[0]["lr"] == 1.1
    optimizer.step()


def test_not_strict_is_silent_when_all_fits(tmp_path: Path) -> None:
    saved, saved_optimizer = build({"a": 3})
    path = save(tmp_path, 1, saved, saved_optimizer)
    model, optimizer = build({"a": 3}, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(path, model, optimizer, strict=False)
    assert same(tensors_of(saved, saved_optimizer), tensors_of(model, optimizer))
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("strict", [True, False])
def test_dtypes_are_cast_only_when_asked(tmp_path: Path, strict: bool) -> None:
    saved, saved_optimizer = build({"a": 3})
    path = save(tmp_path, 1, saved, saved_optimizer)
    model, optimizer = build({"a": 3}, dtype=torch.bfloat16, seed=1)
    before = tensors_of(model, optimizer)
    message = r"a.weight torch.float32 must be torch.bfloat16 as in"
    with pytest.raises(ValueError, match=message) as e:
        load(path, model, optimizer, strict=strict)
    assert "use cast=True" in str(e.value) and same(before, tensors_of(model, optimizer))
    load(path, model, optimizer, strict=strict, cast=True)
    wanted = tensors_of(saved, saved_optimizer)
    found = tensors_of(model, optimizer)
    for name, tensor in wanted.items():
        kept = name.startswith("step.")
        assert found[name].dtype == (torch.float32 if kept else torch.bfloat16), name
        assert torch.equal(found[name], tensor if kept else tensor.bfloat16()), name
    optimizer.step()  # its state and its parameters go together


def test_moments_wider_than_the_parameter_stay_so(tmp_path: Path) -> None:
    """A precision-aware optimizer keeps fp32 moments of bf16 parameters, cast or not."""
    model, optimizer = build({"a": 3}, dtype=torch.bfloat16)
    for slots in optimizer.state.values():
        slots["exp_avg"] = torch.randn(3, 3)
    path = save(tmp_path, 1, model, optimizer)
    for cast in (False, True):
        other, other_optimizer = build({"a": 3}, dtype=torch.bfloat16, seed=1)
        load(path, other, other_optimizer, cast=cast)
        assert same(tensors_of(model, optimizer), tensors_of(other, other_optimizer))
        assert other_optimizer.state[other["a"].weight]["exp_avg"].dtype == torch.float32


def test_hyperparameters_keep_their_kind(tmp_path: Path) -> None:
    model, optimizer = build({"a": 3})
    optimizer.param_groups[0]["betas"] = (0.9, 0.95, 0.5)
    path = save(tmp_path, 1, model, optimizer)
    message = r"hyperparameter betas \(\(0.9, 0.999\)\) is \[0.9, 0.95, 0.5\] in the checkpoint"
    with pytest.raises(ValueError, match=message):
        load(path, *build({"a": 3}))
    optimizer.param_groups[0]["betas"] = (0.5, 0.6)
    path = save(tmp_path, 2, model, optimizer)
    other, other_optimizer = build({"a": 3}, seed=1)
    load(path, other, other_optimizer)
    assert other_optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    capturable = torch.optim.AdamW(other.parameters(), lr=torch.tensor(3.0))
    rate = capturable.param_groups[0]["lr"]
    load(path, other, capturable)
    assert rate is capturable.param_groups[0]["lr"] and rate == pytest.approx(0.1)


Options = dict[str, Any]


def build_with(kind: type[torch.optim.Optimizer], **options: Any) -> Model:
    """One layer that has taken a step."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False)})
    optimizer = kind(model.parameters(), lr=0.1, **options)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        ((SGD, {"momentum": 0.9}), (ADAMW, {}), r"optimizer \(AdamW\) is a SGD in the checkpoint"),
        ((ADAMW, {}), (torch.optim.Adam, {}), r"optimizer \(Adam\) is a AdamW in the checkpoint"),
        ((ADAMW, {}), (ADAMW, {"amsgrad": True}), r"amsgrad \(True\) is False in the checkpoint"),
        ((ADAMW, {"amsgrad": True}), (ADAMW, {}), r"amsgrad \(False\) is True in the checkpoint"),
        ((SGD, {}), (SGD, {"momentum": 0.9}), r"momentum \(0.9\) is 0 in the checkpoint"),
    ],
)
def test_optimizer_with_other_state_is_refused(tmp_path, saved, now, message):
    path = save(tmp_path, 1, *build_with(saved[0], **saved[1]))
    model, optimizer = build_with(now[0], **now[1])
    before = tensors_of(model, optimizer)
    with pytest.raises(ValueError, match=f"1 differ: .*{message}"):
        load(path, model, optimizer)
    assert same(before, tensors_of(model, optimizer))
    with pytest.warns(UserWarning, match=message):
        load(path, model, optimizer, strict=False)
    assert optimizer.state_dict()["param_groups"][0].items() >= now[1].items()
    slots = {name: value for name, value in before.items() if name != "a.weight"}
    after = tensors_of(model, optimizer)
    assert same(slots, {name: value for name, value in after.items() if name != "a.weight"})
    step(model, optimizer)


def test_names_of_hyperparameters_must_agree(tmp_path: Path) -> None:
    model, optimizer = build({"a": 3})
    optimizer.param_groups[0]["theirs"] = 1
    path = save(tmp_path, 1, model, optimizer)
    model, optimizer = build({"a": 3})
    optimizer.param_groups[0] |= {"mine": 2, "initial_lr": 1.0}  # the second is a scheduler's
    with pytest.raises(ValueError, match="1 differ: optimizer hyperparameters mine, theirs are on"):
        load(path, model, optimizer)


@pytest.mark.parametrize("saved", [{"fused": True}, {"foreach": True}, {"capturable": True}])
def test_how_a_step_is_computed_is_of_this_run(tmp_path: Path, saved: Options) -> None:
    model, optimizer = build({"a": 3})
    optimizer.param_groups[0] |= saved
    path = save(tmp_path, 1, model, optimizer)
    other, other_optimizer = build({"a": 3}, seed=1)
    load(path, other, other_optimizer)
    assert not any(other_optimizer.param_groups[0][name] for name in saved)
    assert same(tensors_of(model, optimizer), tensors_of(other, other_optimizer))
    step(other, other_optimizer)


def test_optimizer_state_that_does_not_fit_its_parameter(tmp_path: Path) -> None:
    """Only a forged or foreign checkpoint has such state; the shapes come from its manifest."""
    model, optimizer = build({"a": 3})
    extra = {"optimizer.row.a.weight": torch.zeros(5)}
    path = save(tmp_path, 1, model, optimizer, extra)
    values = json.loads((path / MANIFEST).read_text())
    name = "extra.optimizer.row.a.weight"
    values["tensors"]["optimizer.row.a.weight"] = values["tensors"].pop(name)
    write_signed(path, values)
    message = r"optimizer state row.a.weight \(5,\) must be \(3, 3\) or"
    with pytest.raises(ValueError, match=message):
        load(path, model, optimizer)
    load(path, model)


MOE = MoEConfig(dim=16, hidden_dim=8, num_experts=4, top_k=2)
DECODER = DecoderConfig(
    vocab_size=32, dim=16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4, moe=MOE
)


@pytest.mark.parametrize(
    ("change", "moe", "message"),
    [
        (
            {},
            dict(top_k=4),
            r"1 differ: config.moe.top_k \(4\) must be 2 as in the checkpoint: build",
        ),
        ({}, dict(score_function="sigmoid"), r"score_function \('sigmoid'\) must be 'softmax' as"),
        (dict(rope_theta=5e5), {}, r"config.rope_theta \(500000.0\) must be 10000.0 as in"),
        (
            dict(num_heads=2, num_kv_heads=1, head_dim=8),
            {},
            r"3 differ: config.num_heads \(2\) must be 4 .* config.num_kv_heads \(1\) must be 2",
        ),
        (dict(moe=None, mlp_hidden_dim=8), {}, r"config.moe \(None\) must be given as in the che"),
    ],
)
def test_a_decoder_that_computes_something_else(tmp_path, change, moe, message):
    """Its tensors have the same names and shapes; the save took the config from the model."""
    path = save(tmp_path, 1, nn.ModuleDict({"wrapped": Decoder(DECODER)}), None)
    config = replace(DECODER, **{"moe": replace(MOE, **moe), **change})
    model = nn.ModuleDict({"wrapped": Decoder(config)})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message) as info:
        load(path, model)
    assert "\n" not in str(info.value) and same(before, model.state_dict())
    with pytest.warns(UserWarning, match=message.removesuffix(": build")):
        load(path, model, strict=False)


def test_what_only_training_reads_may_change(tmp_path: Path) -> None:
    path = save(tmp_path, 1, Decoder(DECODER), None)
    moe = replace(
        MOE,
        balance=BalanceConfig(micro_batch_coef=0.1, z_loss_coef=1e-3),
        capacity=CapacityConfig(factor=1.25),
        router_jitter=0.01,
        router_dtype="float64",
    )
    load(path, Decoder(replace(DECODER, moe=moe, max_seq_len=64, ce_chunk_tokens=16)))


def test_configs_that_tell_less(tmp_path: Path) -> None:
    """Of an older moecore, with fewer fields or none at all, and those of the caller's own kind."""
    config = asdict(DECODER)
    del config["qk_norm"], config["moe"]["score_order"]
    path = save(tmp_path, 1, Decoder(DECODER), None, config=config)
    load(path, Decoder(DECODER))
    with pytest.raises(ValueError, match=r"config.moe.score_order \('post'\) must be 'pre' as in"):
        load(path, Decoder(replace(DECODER, moe=replace(MOE, score_order="post"))))
    path = save(tmp_path, 2, Decoder(DECODER), None, config={"preset": "mine", "dim": 16})
    assert read_manifest(path).facts.config == {"preset": "mine", "dim": 16}
    with pytest.warns(UserWarning, match="config was not compared.* has no head_dim, "):
        load(path, Decoder(replace(DECODER, rope_theta=5e5)))
    values = json.loads((path / MANIFEST).read_text())
    write_signed(path, values | {"config": None})
    load(path, Decoder(replace(DECODER, rope_theta=5e5)))
