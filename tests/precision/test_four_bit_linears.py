"""Adapters over linears in 4 bits train as over linears that have the dequantised values."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from moecore import (
    DenseOptions,
    FSDPOptions,
    ParallelConfig,
    Precision,
    Recipe,
    build_meshes,
    parallelize_moe,
)
from moecore.base.torch_private import get_local_tensor
from moecore.families.transformers.stock import enable_activation_checkpointing
from moecore.io import export_hf, init_adapters, latest, load, load_hf, merge_adapters, save
from moecore.kernels.rows.four_bit import dequantise, quantise
from moecore.moe.stored_weights import get_four_bit_blocks
from moecore.parallelize import plan_sharding
from moecore.precision.apply import list_quantised_linears, list_storable_linears
from tests.families.transformers.hf_models import random_model
from tests.families.transformers.lora_cases import adapted_model, batches, peft
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import list_saved
from tests.precision.test_four_bit import adapted_on_meta, watch_dequantised
from tests.precision.test_stored import results
from tests.train.memory.blocks import counting_bytes

SIZES = dict(
    **dict(num_hidden_layers=2, hidden_size=128, num_attention_heads=4, num_key_value_heads=2),
    **dict(moe_intermediate_size=64, shared_expert_intermediate_size=128, intermediate_size=96),
)
DENSE = dict(mlp_only_layers=[0])  # its down_proj has 96 inputs, and keeps its dtype
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYERS = (6, 7)  # linears in 4 bits of the dense layer, and of the layer with experts
NF4 = Precision(frozen="nf4", frozen_dense=True)


def parallelized(precision: Precision | None, **options: Any) -> nn.Module:
    model = adapted_model("qwen2-moe", SIZES | DENSE)
    if options.pop("recomputes", False):
        enable_activation_checkpointing(model)
    meshes = build_meshes(ParallelConfig(**options.pop("folding", {})), "cpu")
    return parallelize_moe(model, meshes, precision=precision, **options)


def stored_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights in 4 bits by name."""
    named = model.named_parameters()
    return {n: p for n, p in named if get_four_bit_blocks(p) is not None}


def compare(rank: int, device: torch.device, options: dict[str, Any]) -> tuple[int, bool]:
    """Number of linears in 4 bits, and whether all bits are those of a plain base."""
    kind, fp8 = options.pop("kind", "nf4"), options.pop("fp8", {})
    stored = parallelized(Precision(frozen=kind, frozen_dense=True, **fp8), **options)
    linears = {n: p for n, p in stored_params(stored).items() if "experts.gate_up" not in n}
    linears = {n: p for n, p in linears.items() if "experts.down" not in n}
    assert all(
        n.removesuffix(".weight").removesuffix(".base_layer").endswith(NAMES) for n in linears
    )
    found = results(stored)
    plain_base = adapted_model("qwen2-moe", SIZES | DENSE)  # before sharding: full values
    for name, param in plain_base.named_parameters():
        if name in linears or (name.endswith("_proj") and ".experts." in name):
            param.data = dequantise(quantise(param.data, kind), param.dtype)
    if options.pop("recomputes", False):
        enable_activation_checkpointing(plain_base)
    meshes = build_meshes(ParallelConfig(**options.pop("folding", {})), "cpu")
    precision = Precision(**fp8) if fp8 else None
    expected = results(parallelize_moe(plain_base, meshes, precision=precision, **options))
    again = results(stored)  # units have been resharded
    for key, value in expected.items():
        assert torch.equal(found[key], value) and torch.equal(again[key], value), key
    assert all(get_local_tensor(p).untyped_storage().nbytes() == 4 for p in linears.values())
    for param in linears.values():
        blocks = get_four_bit_blocks(param)
        assert blocks is not None and blocks.values.shape[1] == param.shape[1] // 2
    return len(linears), all(not p.requires_grad for p in linears.values())


@pytest.mark.parametrize("kind", ["nf4", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["saved", "checkpointing"])
def test_bits_are_of_the_dequantised_values(
    no_group_left: None, kind: str, recomputes: bool
) -> None:
    case = dict(kind=kind, recomputes=recomputes)
    num_linears = sum(LAYERS) + (kind != "nf4")  # of 96 inputs, no multiple of 64
    assert compare(0, torch.device("cpu"), case) == (num_linears, True)


def test_a_compiled_step_has_the_bits_of_an_eager_step(
    no_group_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the MoE layer breaks a graph, and autograd saves no weight."""
    expected = results(parallelized(NF4))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    counters.clear()
    model = parallelized(NF4, dense=DenseOptions(compile=True))
    found: dict[str, Tensor] = {}
    saved = list_saved(lambda: found.update(results(model)))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    shapes = {tuple(tensor.shape) for tensor in saved if tensor.is_floating_point()}
    assert not {(128, 128), (64, 128)} & shapes  # of queries, keys, values and the output
    graphs = 3  # the dense layer, and the layer with experts before and after them
    assert counters["stats"]["unique_graphs"] == graphs
    (reason,) = counters["graph_break"]
    assert "MoELayer.forward" in reason


def test_weights_that_other_modules_read_keep_their_dtype() -> None:
    """A fused scan and multi-head attention of torch read the weight of `out_proj`."""
    scan = nn.ModuleDict({"in_proj": nn.Linear(64, 64), "out_proj": nn.Linear(64, 64)})
    model = nn.ModuleDict({"mixer": scan, "self_attn": nn.MultiheadAttention(64, 1)})
    assert list(list_storable_linears(model, NF4)) == ["mixer.out_proj"]
    scan.ssm_state_size = 16
    assert not list_storable_linears(model, NF4)


SHARDED: list[dict[str, Any]] = [
    dict(folding=dict(ep=4)),
    dict(folding=dict(ep=4), fsdp=FSDPOptions(dense_strategy="no_shard")),
    dict(folding=dict(ep=4, dp_shard=2, dp_replicate=2), fsdp=FSDPOptions(blocks_per_unit=2)),
    # A rank's shard of k_proj has 16 rows, of which MXFP8 would not be possible.
    dict(folding=dict(ep=4), fp8=dict(recipe=Recipe(scaling="mxfp8"), roles=("attention",))),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARDED, ids=["sharded", "no_shard", "hybrid", "fp8 attention"])
def test_data_ranks_have_all_linears(case: dict[str, Any]) -> None:
    assert run_ranks(4, compare, case) == (sum(LAYERS) - 8 * ("fp8" in case), True)


def test_a_linear_dequantises_in_backward(
    no_group_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No weight waits for backward, and the plan counts its 4 bits."""
    alive = watch_dequantised(monkeypatch)
    model = parallelized(NF4)
    loss = model(**batches(0)[0], use_cache=False).loss
    num_matrices = sum(LAYERS) + 2
    assert len(alive) == num_matrices and not any(ref() is not None for ref in alive)
    loss.backward()  # also q, k and v of the first layer, whose input needs no gradient
    skipped = 3
    assert len(alive) == 2 * num_matrices - skipped
    assert not any(ref() is not None for ref in alive)


def test_plan_counts_bytes_on_every_rank() -> None:
    model = adapted_model("qwen2-moe", SIZES | DENSE)
    from moecore.planning.run import fake_world

    with fake_world(4):
        meshes = build_meshes(ParallelConfig(ep=4), "cpu")
        plan = plan_sharding(model, meshes, precision=NF4)
    linears = [p for p in plan.params if p.frozen and p.mesh == "dense"]
    assert len(linears) == sum(LAYERS)
    for param in linears:
        assert param.num_bytes() == param.numel * 4.5 / 8
    a = next(p for p in plan.params if "lora_A" in p.name and p.mesh == "dense")
    assert a.num_bytes() == 4 * a.numel / 4  # sharded


def test_from_files_to_a_merged_export(no_group_left: None, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = random_model("qwen2-moe", **SIZES | DENSE).bfloat16()
    base.save_pretrained(tmp_path / "base")
    model = adapted_on_meta(base, NF4)
    model.to_empty(device="cpu")
    load_hf(tmp_path / "base", model)
    init_adapters(model)
    originals = base.state_dict()
    stored = stored_params(model)
    assert len(stored) == sum(LAYERS) + 2
    for name, param in stored.items():
        original = originals[name.removeprefix("base_model.model.").replace(".base_layer", "")]
        blocks, expected = get_four_bit_blocks(param), quantise(original, "nf4")
        assert blocks is not None and torch.equal(blocks.values, expected.values), name
        assert torch.equal(blocks.scales, expected.scales), name
    with torch.no_grad():
        for key, param in model.named_parameters():
            if "lora_" in key:
                get_local_tensor(param).normal_(std=0.1)
    ids = batches(0)[0]["input_ids"]
    with torch.no_grad():
        adapted = model(input_ids=ids, use_cache=False).logits
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    save(tmp_path / "saved", 1, model, optimizer)
    load(latest(tmp_path / "saved"), model, optimizer)
    merge_adapters(model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, adapted)
    export_hf(model, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    exported = merged.state_dict()
    report = export_hf(model, tmp_path / "nf4", quantization="bitsandbytes")
    sums = {
        name: dequantise(quantise(originals[name], "nf4"), torch.float32)
        for name in (n.removeprefix("base_model.model.").replace(".base_layer", "") for n in stored)
        if ".experts." not in name
    }
    for module_name, module in model.named_modules():
        if isinstance(module, peft.tuners.lora.Linear):
            name = module_name.removeprefix("base_model.model.") + ".weight"
            a, b = (m["default"].weight.to_local().float() for m in (module.lora_A, module.lora_B))
            sums[name] += (b @ a) * module.scaling["default"]
            assert torch.equal(exported[name], sums[name].bfloat16()), name
    errors = [dequantise(quantise(x, "nf4"), torch.float32) - x for x in sums.values()]
    norms = [torch.cat([x.flatten() for x in xs]).norm() for xs in (errors, sums.values())]
    assert report.nf4_error == pytest.approx(float(norms[0] / norms[1]), rel=1e-4)


def test_linears_with_a_recipe_keep_their_dtype(no_group_left: None) -> None:
    """With adapters, too: peft's names of their linears end in `base_layer`."""
    base = adapted_model("qwen2-moe", SIZES | DENSE, target_modules=["q_proj", "gate_proj"])
    pairs = (("*.0.self_attn.q_proj", None),)
    how: Any = dict(recipe=Recipe(), roles=("attention",), frozen="nf4", frozen_dense=True)
    precision = Precision(overrides=pairs, **how)
    parallelize_moe(base, build_meshes(ParallelConfig(), "cpu"), precision=precision)
    found = [n.replace(".base_layer", "").split(".")[-2] for n in stored_params(base)]
    assert set(found) == {"q_proj", *NAMES[4:], "experts"} and found.count("q_proj") == 1
    caches = {id(products.inputs) for _, products in list_quantised_linears(base)}
    assert len(caches) == 2  # one per layer: all inputs have 128 columns


REFUSED = {
    r"q_proj.base_layer.weight \(trained\) must be frozen with Precision.frozen_dense": dict(
        trained=True
    ),
    r"DenseOptions.graph \(True\) must be False with Precision.frozen_dense": dict(
        dense=DenseOptions(graph=True)
    ),
}


@pytest.mark.parametrize(("message", "case"), REFUSED.items(), ids=range(len(REFUSED)))
def test_refusals(no_group_left: None, message: str, case: Any) -> None:
    case = dict(case)
    model = adapted_model("qwen2-moe", SIZES | DENSE)
    if case.pop("trained", False):
        model.requires_grad_(True)
    with pytest.raises(ValueError, match=message) as error:
        parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), **dict(precision=NF4) | case)
    assert "\n" not in str(error.value)


def test_tensor_parallelism_is_refused() -> None:
    from moecore.planning.run import fake_world

    with fake_world(2), pytest.raises(ValueError, match=r"ParallelConfig.tp \(2\) must be 1 with"):
        model = adapted_model("qwen2-moe", SIZES | DENSE)
        plan_sharding(model, build_meshes(ParallelConfig(tp=2), "cpu"), precision=NF4)
    with pytest.raises(ValueError, match=r"Precision.frozen_dense \(True\) must be False with"):
        Precision(recipe=Recipe(), frozen_dense=True)


def test_files_are_loaded_within_a_tensor_of_the_final_size(
    no_group_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 4 bits from meta, with adapters: one expert's matrix or one linear exists beside them."""
    base = random_model("qwen2-moe", **SIZES | dict(num_experts=32)).bfloat16()
    base.save_pretrained(tmp_path)
    model = adapted_on_meta(base, NF4)
    for module in ("load", "files"):
        monkeypatch.setattr(f"moecore.io.hf.{module}.CHUNK_BYTES", 4096)
    with counting_bytes() as storages:
        model.to_empty(device="cpu")
        load_hf(tmp_path, model)
        init_adapters(model)
        final_bytes = sum(storages.list_live())
    params = dict(base.named_parameters())
    stacked = {n: p for n, p in params.items() if p.ndim == 3}
    assert len(stacked) == 4 and len(stored_params(model)) > len(stacked)
    assert final_bytes < sum(p.nbytes for p in params.values()) / 2
    parts = [p[0].nbytes if n in stacked else p.nbytes for n, p in params.items()]
    most = 5 * max(parts)  # the tensor in bf16, scaled in fp32, and what the codes need
    assert most < min(p.nbytes for p in stacked.values())
    assert storages.peak <= final_bytes + most
