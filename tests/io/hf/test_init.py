import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore import ParallelConfig, build_meshes, parallelize_moe
from tests.families.transformers.hf_models import ARCHITECTURES, MODELS
from tests.helpers.ranks import run_ranks

pytest.importorskip("safetensors")

STD = 0.02


def values(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, whole."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {n: t.full_tensor() if isinstance(t, DTensor) else t.detach() for n, t in named}


def filled(name: str, seed: int = 0) -> dict[str, Tensor]:
    """Of a plain model, all of it NaN before."""
    from moecore.io import init_hf

    model = MODELS[name]()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.fill_(torch.nan)
    init_hf(model, seed)
    return values(model)


def sharded(rank: int, device: torch.device, names: list[str]) -> dict[str, dict[str, Tensor]]:
    from moecore.io import init_hf

    found = {}
    for name in names:
        with torch.device("meta"):
            model = MODELS[name]()
        parallelize_moe(model, build_meshes(ParallelConfig(ep=2, edp_shard=1), "cpu"))
        model.to_empty(device="cpu")
        init_hf(model)
        found[name] = values(model)
    return found


@pytest.fixture(scope="module")
def on_ranks() -> dict[str, dict[str, Tensor]]:
    return run_ranks(2, sharded, ARCHITECTURES)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_are_those_of_the_rule(name: str) -> None:
    built, found = dict(copy.deepcopy(MODELS[name]()).named_buffers()), filled(name)
    for key, value in found.items():
        if key.endswith("bias"):
            assert not value.any(), key
        elif key in built:
            assert torch.equal(value, built[key]), "rotary frequencies"
        elif "norm" in key:
            assert torch.equal(value, torch.ones_like(value)), key
        else:
            spread = STD / value.numel() ** 0.5
            assert value.mean().abs() < 5 * spread and (value.std() - STD).abs() < 5 * spread, key


def test_seeds_and_names_give_independent_values() -> None:
    found, other = filled("qwen3-moe"), filled("qwen3-moe", seed=1)
    first, second = (f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2))
    for one, two in ((found[first], other[first]), (found[first], found[second])):
        assert torch.corrcoef(torch.stack([one.flatten(), two.flatten()]))[0, 1].abs() < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sharded_models_get_the_values_of_a_plain_one(name, on_ranks):
    want, got = filled(name), on_ranks[name]
    assert want.keys() == got.keys()
    for key, value in want.items():
        assert torch.equal(got[key], value), key
