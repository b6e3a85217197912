from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecore import MoEConfig, MoELayer, ParallelConfig, build_meshes, parallelize_moe
from moecore.base.options.precision import Precision, Recipe
from moecore.base.torch_private import HAS_SEPARATE_PIECES, get_local_tensor
from moecore.io import export_hf, merge_adapters, save, save_adapters
from moecore.parallel.pipeline.stages import AbsentModule
from moecore.precision import store_experts_in_fp8
from tests.families.transformers.lora_cases import adapted_model, batches, in_peft_form, lora_config
from tests.helpers.ranks import run_ranks

SIZES = dict(num_hidden_layers=1, hidden_size=128, moe_intermediate_size=256)
PRECISION = Precision(recipe=Recipe(), roles=("experts",))


def parallelized(folding: dict[str, int], **options: Any) -> nn.Module:
    model = adapted_model("qwen3-moe", SIZES)
    options = dict(precision=PRECISION) | options
    return parallelize_moe(model, build_meshes(ParallelConfig(**folding), "cpu"), **options)


def results(model: nn.Module) -> dict[str, Tensor]:
    """A loss, and the gradients of all adapters."""
    loss = model(**batches(0)[0], use_cache=False).loss
    loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    found = {"loss": loss.detach()} | in_peft_form(model, grads=True)
    model.zero_grad()
    return found


def expert_bytes(model: nn.Module) -> int:
    """Bytes of memory of the experts' matrices."""
    storages = [
        get_local_tensor(p).untyped_storage()
        for n, p in model.named_parameters()
        if n.endswith(("gate_up_proj", "down_proj"))
    ]
    return sum(storage.nbytes() for storage in storages)


def compare(rank: int, device: torch.device, folding: dict[str, int]) -> tuple[bool, int, int]:
    """Whether all bits are the same, also where units have had the weights, and bytes before."""
    model = parallelized(folding)
    before, size = results(model), expert_bytes(model)
    memory = [
        get_local_tensor(p).untyped_storage() for p in model.parameters() if not p.requires_grad
    ]
    store_experts_in_fp8(model)
    store_experts_in_fp8(model)
    freed = sum(storage.nbytes() == 0 for storage in memory)
    assert freed == 2
    after = results(model)
    equal = all(torch.equal(before[name], after[name]) for name in before)
    return equal, size, expert_bytes(model)


FOLDINGS = [dict(ep=4), dict(ep=2, etp=2)][: 1 + HAS_SEPARATE_PIECES]


@pytest.mark.parametrize("folding", FOLDINGS, ids=str)
@pytest.mark.slow
def test_ranks_compute_the_same_bits(folding: dict[str, int]) -> None:
    equal, before, after = run_ranks(4, compare, folding)
    assert equal and before > 1 << 16 and after == 8


def test_what_reads_values_is_refused(no_group_left: None, tmp_path: Path) -> None:
    model = parallelized({})
    store_experts_in_fp8(model)
    save_adapters(model, tmp_path / "adapters")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for call in (
        lambda: merge_adapters(model),
        lambda: save(tmp_path / "steps", 1, model, optimizer),
    ):
        with pytest.raises(ValueError, match=r"_proj \(FP8 alone\) must have values to be") as e:
            call()
        assert "\n" not in str(e.value)


def test_export_writes_the_values_that_products_read(no_group_left: None, tmp_path: Path) -> None:
    import peft
    from safetensors.torch import load_file

    from tests.families.transformers.hf_models import random_model

    model = peft.get_peft_model(
        random_model("qwen3-moe", **SIZES), lora_config(target_parameters=[])
    )
    parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), precision=PRECISION)
    merge_adapters(model)
    export_hf(model, tmp_path / "plain")
    store_experts_in_fp8(model)
    export_hf(model, tmp_path / "stored")
    files = (tmp_path / name / "model.safetensors" for name in ("plain", "stored"))
    plain, stored = map(load_file, files)
    assert plain.keys() == stored.keys()
    for name, weight in plain.items():
        wanted = weight
        if ".experts." in name:
            blocks = weight.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
            mantissa, power = torch.frexp(blocks.abs().amax((1, 3), keepdim=True) / 448)
            scales = torch.exp2(power - (mantissa == 0.5).float())  # rounded up
            wanted = ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).flatten(2)
            wanted = wanted.flatten(0, 1)
            assert 0 < (wanted - weight).abs().max() <= weight.abs().max() / 16
        assert torch.equal(stored[name], wanted), name


@pytest.mark.parametrize("scaling", [None, "rowwise", "mxfp8"])
def test_recipes_that_do_not_store(no_group_left: None, scaling: Any) -> None:
    recipe = Precision(recipe=Recipe(scaling=scaling or "blockwise"), roles=("experts",))
    message = rf"recipe of \S+gate_up_proj \({scaling}\) must be 'blockwise'"
    with pytest.raises(ValueError, match=message):
        store_experts_in_fp8(parallelized({}, precision=recipe if scaling else None))


def test_trained_and_missing_experts_are_refused() -> None:
    config = MoEConfig(dim=128, hidden_dim=128, num_experts=2, top_k=1)
    layer = MoELayer(config)
    layer.get_part("experts").set_backend("auto", recipe=Recipe())
    with pytest.raises(ValueError, match=r"experts.w1 \(trained\) must be frozen"):
        store_experts_in_fp8(layer)
    with pytest.raises(ValueError, match=r"model \(Linear\) must have routed experts"):
        store_experts_in_fp8(nn.Linear(2, 2))
    store_experts_in_fp8(AbsentModule(layer))  # of a pipeline stage without experts
    x = torch.randn(5, 128)
    expected = layer.requires_grad_(False)(x)
    store_experts_in_fp8(layer)
    assert torch.equal(layer(x), expected)
    experts = layer.get_part("experts").bfloat16().float()  # the blocks keep their dtype
    assert experts.w1.untyped_storage().nbytes() == 4
    assert torch.equal(layer(x), expected)


def shared(rank: int, device: torch.device) -> str:
    with pytest.raises(ValueError) as error:
        store_experts_in_fp8(parallelized(dict(edp_shard=2)))
    return str(error.value)


@pytest.mark.slow
def test_experts_of_several_ranks_are_refused() -> None:
    message = run_ranks(2, shared)
    assert "must be of one rank alone to be stored in FP8: give ParallelConfig.ep" in message
