"""peft models on four ranks equal stock peft in one process, through the whole life of adapters.

pytest -m gpu tests/families/transformers/test_lora_ranks.py     training on 4 GPUs, by nvlink
"""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from moecore import FSDPOptions, ParallelConfig, build_meshes, parallelize_moe
from moecore.base.options.memory import MemoryOptions
from moecore.base.torch_private import HAS_SEPARATE_PIECES
from moecore.io import (
    export_hf,
    init_adapters,
    load,
    load_adapters,
    load_hf,
    merge_adapters,
    save,
    save_adapters,
)
from tests.families.transformers.hf_models import transformers, worst
from tests.families.transformers.lora_cases import (
    RANKS,
    STEPS,
    adapted_model,
    batches,
    in_peft_form,
    logits,
    lora_config,
    peft,
    train,
)
from tests.families.transformers.test_tensor_parallel import phi3, with_gradients
from tests.helpers.grids import asked_for
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.slow

FOLDINGS: dict[str, dict[str, int]] = {
    "ep2-edp2": dict(ep=2, edp_shard=2),
    "ep4": dict(ep=4),
    "edp4": dict(edp_shard=4),
    "ep2-etp2": dict(ep=2, etp=2),
    "tp2-ep2": dict(tp=2, ep=2),
    "tp2-edp4": dict(tp=2, edp_shard=4),
    "etp2-replicate2": dict(dp_replicate=2, dp_shard=2, edp_replicate=2, edp_shard=1, etp=2),
}
# name -> model, its sizes, folding, LoraConfig, options of parallelize_moe
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], dict[str, Any]]] = {
    "all": ("qwen3-moe", {}, "ep2-edp2", dict(modules_to_save=["lm_head"]), {}),
    "whole-experts": ("qwen3-moe", {}, "ep4", dict(use_rslora=True, r=3), {}),
    "allgather": ("mixtral", {}, "ep2-edp2", dict(r=1), dict(dispatch="allgather")),
    "uneven": ("mixtral", dict(num_local_experts=6), "edp4", dict(lora_alpha=9), {}),
    "etp": ("qwen3-moe", {}, "ep2-etp2", {}, {}),
    "replicated etp": ("mixtral", {}, "etp2-replicate2", {}, dict(expert_backend="sequential")),
    "tp": ("qwen3-moe", {}, "tp2-ep2", {}, {}),
    "tp-mlps": (
        "qwen2-moe",
        dict(mlp_only_layers=[0], num_key_value_heads=1),
        "tp2-edp4",
        dict(target_modules=r".*\.(self_attn|layers\.0\.mlp)\.\w+_proj", r=3),
        {},
    ),
    "gpt-oss": ("gpt-oss", {}, "ep2-edp2", {}, {}),
    "dora": ("qwen3-moe", {}, "ep2-edp2", dict(target_parameters=[], use_dora=True), {}),
    "attention-alone": ("qwen3-moe", {}, "ep2-edp2", dict(target_parameters=[]), {}),
    "down-alone": (
        "qwen3-moe",
        {},
        "ep2-edp2",
        dict(target_parameters=["down_proj"]),
        dict(memory=MemoryOptions(recompute=("expert_fc1",))),
    ),
    "kept-experts": (
        "qwen3-moe",
        {},
        "ep2-edp2",
        {},
        dict(fsdp=FSDPOptions(experts_strategy="optim", blocks_per_unit=2)),
    ),
}
if not HAS_SEPARATE_PIECES:  # etp of gate above up
    CASES = {name: case for name, case in CASES.items() if "etp" not in name}


def run_case(name: str, folder: Path, device: torch.device) -> tuple[float, str] | None:
    """Return the worst error on rank 0, of training, files and merged weights."""
    model_name, sizes, folding, lora, options = CASES[name]
    model = adapted_model(model_name, sizes, **lora).to(device)
    plain = copy.deepcopy(model)
    meshes = build_meshes(ParallelConfig(**FOLDINGS[folding]), device.type)
    if device.type == "cuda" and meshes.dispatch_group is not None:
        options = dict(dispatch="nvlink") | options
    parallelize_moe(model, meshes, **options)
    found = train(model, meshes.data_rank)
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, {n: t.cpu() for n, t in found.items() if n.startswith("loss/")})
    for losses in every:
        found |= {name: loss.to(device) for name, loss in losses.items()}
    trained = logits(model.eval())
    save_adapters(model, folder / name)
    init_adapters(model)
    load_adapters(model, folder / name)
    assert torch.equal(logits(model), trained)
    merge_adapters(model)
    found["merged"] = logits(model)
    tokens = generated(model) if meshes.parallel.tp > 1 else None
    if dist.get_rank():
        return None
    expected = train(plain, None, meshes.data_ranks)
    # Stock peft with the files' adapters: steps of its own would magnify rounding.
    peft.set_peft_model_state_dict(plain, load_file(folder / name / "adapter_model.safetensors"))
    expected["merged"] = logits(plain.eval())
    assert tokens is None or torch.equal(tokens, generated(plain))
    return worst(found, expected)


def mixed_dtypes(folding: str) -> float:
    """The relative error of a loss with adapters in fp32 on a model in bf16, as peft makes them."""
    model = adapted_model("qwen3-moe", {}).bfloat16()
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = param.data.float()
    meshes = build_meshes(ParallelConfig(**FOLDINGS[folding]), "cpu")
    parallelize_moe(model, meshes, fsdp=FSDPOptions(param_dtype=torch.bfloat16))
    found = train(model, meshes.data_rank)
    expected = train(adapted_model("qwen3-moe", {}), None)
    key = f"loss/{STEPS - 1}/{meshes.data_rank}"
    return float((found[key] - expected[key]).abs() / expected[key])


def life(folder: Path) -> dict[str, Any]:
    """From a base model on disk to a merged one: what each stage computes, or its error."""
    found: dict[str, Any] = {}
    base = transformers.Qwen3MoeForCausalLM.from_pretrained(folder / "base")
    config, models = lora_config(modules_to_save=["lm_head"]), {}
    for folding in ("ep2-edp2", "tp2-ep2"):
        with torch.device("meta"):
            empty = transformers.Qwen3MoeForCausalLM(base.config)
        model = peft.get_peft_model(empty, copy.deepcopy(config))
        meshes = build_meshes(ParallelConfig(**FOLDINGS[folding]), "cpu")
        parallelize_moe(model, meshes)
        model.to_empty(device="cpu")
        load_hf(folder / "base", model)
        init_adapters(model, seed=3)
        found[f"init/{folding}"] = in_peft_form(model)
        found[f"start/{folding}"] = logits(model.eval())
        models[folding] = model
    other, model = models.values()
    with model.disable_adapter():  # as for the reference of a preference loss
        found["reference"] = logits(model)
    model.train()
    train(model, meshes.data_rank)
    save_adapters(model, folder / "adapters")
    found["trained"] = logits(model.eval())
    found["generated"] = generated(model)
    with model.disable_adapter():
        found["disabled"] = logits(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    path = save(folder / "steps", 3, model, optimizer)
    load_adapters(other, folder / "adapters")
    found["loaded"] = logits(other)
    init_adapters(other, seed=4)
    found["replaced"] = logits(other)
    load(path, other)
    found["resumed"] = logits(other)
    for attempt, call in {
        "unmerged": lambda: export_hf(model, folder / "early"),
        "missing": lambda: save_adapters(model, folder / "other", adapter="other"),
        "method": lambda: model.merge_and_unload(),
        "again": lambda: [merge_adapters(model), merge_adapters(model)],
        "disable": lambda: model.disable_adapter(),
    }.items():
        with pytest.raises((ValueError, NotImplementedError)) as error:
            call()
        found[f"error/{attempt}"] = str(error.value)
    found["merged"] = logits(model)
    export_hf(model, folder / "merged")
    return found


def generated(model: Any) -> Tensor:
    ids = batches(9)[0]["input_ids"]
    found: Tensor = model.generate(
        input_ids=ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return found


def adapted_phi3() -> Any:
    """Adapters on queries, keys and values in one linear, whose weight tp ranks have whole."""
    config = peft.LoraConfig(r=3, target_modules=["qkv_proj", "o_proj"])
    model = peft.get_peft_model(phi3(2), config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.2)
            elif "lora_A" in name:
                param.copy_(torch.randn(param.shape, generator=generator))
    return model


def worker(rank, device, folder, names=CASES) -> dict[str, Any]:
    results: dict[str, Any] = {name: run_case(name, folder, device) for name in names}
    if device.type == "cuda":
        return results
    mixed = [mixed_dtypes(folding) for folding in ("ep2-edp2", "ep4")]
    stacked = with_gradients(adapted_phi3, tp=2)[1]
    return results | {"mixed dtypes": max(mixed), "stacked": stacked, "life": life(folder)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora")
    adapted_model("qwen3-moe", {}).unload().save_pretrained(path / "base")
    return path


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    return run_ranks(RANKS, worker, folder, asked_for(request, "name"))


@pytest.mark.gpu
def test_training_on_gpus_equals_stock_peft(folder: Path) -> None:
    if not HAS_SEPARATE_PIECES:
        pytest.skip("etp cuts concatenated weights with torch >= 2.13")
    found = run_ranks(RANKS, worker, folder, device_type="cuda")
    assert max(error for error, _ in found.values()) <= 1e-5, found


@pytest.mark.parametrize("name", CASES)
def test_training_equals_stock_peft(results: dict[str, Any], name: str) -> None:
    error, where = results[name]
    assert error <= 1e-5, f"{where}: {error}"


def test_adapters_in_fp32_train_a_model_in_bf16(results: dict[str, Any]) -> None:
    assert results["mixed dtypes"] < 0.05


def test_adapters_on_queries_keys_and_values_in_one_linear(results: dict[str, Any]) -> None:
    assert results["stacked"]


def test_adapters_start_alike_on_every_layout(results: dict[str, Any]) -> None:
    life = results["life"]
    one, other = life["init/ep2-edp2"], life["init/tp2-ep2"]
    assert worst(one, other)[0] == 0
    for name, tensor in one.items():
        bound = tensor.shape[1] ** -0.5
        if "lora_A" in name:  # uniform
            assert 0.9 * bound < tensor.abs().max() <= bound
            assert abs(float(tensor.std()) - bound / 3**0.5) < 0.1 * bound
        elif "lora_B" in name:
            assert not tensor.any()


def test_the_life_of_adapters(results: dict[str, Any], folder: Path) -> None:
    life: dict[str, Any] = results["life"]

    def base() -> Any:
        return transformers.Qwen3MoeForCausalLM.from_pretrained(folder / "base").eval()

    def assert_close(found: Tensor, expected: Tensor) -> None:
        assert worst({"": found}, {"": expected})[0] < 1e-5

    start = logits(base())
    for stage in ("start/ep2-edp2", "start/tp2-ep2", "reference", "disabled"):
        assert_close(life[stage], start)
    stock = peft.PeftModel.from_pretrained(base(), folder / "adapters").eval()
    trained = logits(stock)
    assert torch.equal(life["generated"], generated(stock)) and (trained - start).abs().max() > 0.05
    for stage in ("trained", "loaded", "resumed", "merged"):
        assert_close(life[stage], trained)
    assert (life["replaced"] - trained).abs().max() > 0.05
    merged = transformers.Qwen3MoeForCausalLM.from_pretrained(folder / "merged").eval()
    assert_close(logits(merged), trained)
    assert_close(logits(stock.merge_and_unload()), trained)
    own, theirs = merged.state_dict(), stock.get_base_model().state_dict()
    assert worst(own, {n: theirs[n] for n in own})[0] < 1e-5
    stock = peft.PeftModel.from_pretrained(base(), folder / "adapters")
    stock.save_pretrained(folder / "theirs")
    written = [peft.LoraConfig.from_pretrained(folder / n) for n in ("adapters", "theirs")]
    left, right = (c.to_dict() | {"base_model_name_or_path": ""} for c in written)
    different = [k for k in left if left[k] != right[k] and sorted(left[k]) != sorted(right[k])]
    assert not different  # peft keeps sets, whose order is any
    assert not (folder / "early").exists() and not (folder / "other").exists()


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("unmerged", r"must be merged .* call moecore.io.merge_adapters\(model\) first"),
        ("missing", r"adapter \('other'\) must be one of \['default'\]: choose one"),
        ("method", r"merge_and_unload of peft must not .* use moecore.io.merge_adapters\(model\)"),
        ("disable", r"disable_adapter of peft must not be called after merge_adapters: use the"),
        ("again", r"model \(\w+\) must have active adapters that are not merged"),
    ],
)
def test_what_is_refused_on_every_rank(results: dict[str, Any], attempt: str, message: str) -> None:
    found = results["life"][f"error/{attempt}"]
    assert re.search(message, found) and "\n" not in found
