import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import moecore
from moecore import (
    ContextOptions,
    FSDPOptions,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    build_meshes,
    explain,
    models,
    parallelize_moe,
)
from moecore.base.options.memory import MemoryOptions
from moecore.base.options.precision import Precision, Recipe
from moecore.models import Decoder, preset
from moecore.planning import fake_world
from moecore.planning.explain import list_parameter_rows, make_current_plan
from moecore.train.memory.offload import Offload

PAGE = Path(__file__).parents[2] / "docs" / "parallelize.md"
MEMORY_PAGE = PAGE.with_name("memory.md")
COLLECTIVES = ("all_gather_into_tensor", "all_to_all_single", "all_reduce")
FOLDED = ParallelConfig(dp_shard=4, tp=2, edp_shard=2, ep=4)
KINDS = {"embeddings", "norms", "attention", "MLP", "router", "experts", "head"}
SHARED_IN_FP8 = Precision(recipe=Recipe(), roles=("shared_experts",))

pytestmark = pytest.mark.usefixtures("no_group_left")


def parallelized(parallel: ParallelConfig, **options: Any) -> nn.Module:
    model = Decoder(preset("tiny"), device="meta")
    return parallelize_moe(model, build_meshes(parallel, "cpu"), **options)


def test_the_page_shows_what_it_prints() -> None:
    with fake_world(8, 3):
        lines = explain(parallelized(FOLDED)).splitlines()
    page = PAGE.read_text()
    text = re.search(r"```text\n(Decoder: .*?)\n```", page, flags=re.DOTALL)
    shown = text[1].splitlines()
    assert shown.count("...") == 1 and len(shown) >= 14
    assert [line for line in lines if line in shown] == [s for s in shown if s != "..."]
    assert 18 <= len(lines) <= 24 and max(map(len, lines)) <= 150


@pytest.mark.parametrize(
    "parallel", [FOLDED, ParallelConfig(dp_replicate=2, dp_shard=4, ep=2, etp=4)], ids=str
)
def test_every_byte_of_every_rank_is_in_one_row(parallel: ParallelConfig) -> None:
    """Over ranks, each row has every element as often as its parameters are replicated."""
    held: dict[str, int] = {}
    experts = set()
    for rank in range(8):
        with fake_world(8, rank):
            model = parallelized(parallel)
            with CommDebugMode() as communicated:
                text = explain(model)
            assert communicated.get_total_counts() == 0
            rows = list_parameter_rows(*make_current_plan(model))
            assert {row.kind for row in rows} == KINDS
            local = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
            assert sum(row.num_bytes for row in rows) == sum(part.nbytes for part in local)
            assert sum(row.number for row in rows) == len(list(model.parameters()))
            for row in rows:
                name = f"{row.kind} {row.names} {row.shapes[0]}"
                held[name] = held.get(name, 0) + row.num_bytes
            p = parallel.resolve(8)
            assert f"rank {rank} of 8\n  dense  dp_" in text
            assert (f", 1/{p.etp} of each" in text) == (p.etp > 1)
            first, last = re.search(r"this rank has (\d) to (\d)", text).groups()  # type: ignore[union-attr]
            experts |= set(range(int(first), int(last) + 1))
    assert experts == set(range(8))
    for row in rows:
        whole = 4 * torch.Size(row.shapes[0]).numel() * row.number
        copies = 1 if row.kind == "experts" else p.dp_replicate
        is_over_tp = "tp: replicated" in row.placement
        copies *= p.tp if is_over_tp else 1
        assert held[f"{row.kind} {row.names} {row.shapes[0]}"] == copies * whole, row


def test_the_page_shows_what_a_plan_prints() -> None:
    """The program that the page shows, its first three lines and its last line."""
    program_text = r"```python\n(import torch.distributed.*?)```"
    (program,) = re.findall(program_text, PAGE.read_text(), re.DOTALL)
    names = {name: getattr(moecore, name) for name in moecore.__all__} | vars(models)
    printed: list[str] = []
    exec(program, names | {"torch": torch, "print": printed.append})
    lines = printed[0].splitlines()
    shown = "\n".join([*lines[:3], lines[-1]])
    assert f"```text\n{shown}\n```" in PAGE.read_text(), shown
    (plain,) = (row for row in lines if row.startswith("router"))
    assert plain.split()[2:5] == ["59", "x", "256x7168"] and plain.endswith("846 kB")


def test_a_plain_model_is_whole() -> None:
    model = Decoder(preset("tiny"))
    model.get_parameter("model.norm.weight").requires_grad_(False)
    text = explain(model)
    total = sum(p.numel() for p in model.parameters())
    assert text.startswith(f"Decoder: {total / 1e6:.3g} M parameters, ")
    assert "not parallelized" in text and "this rank has all 8\n" in text
    assert "\ndispatcher local: " in text and "\nparameters float32; no FP8" in text
    assert re.search(r"norms \(frozen\) +norm +128 +128 +whole +512 B", text)
    assert "units: " not in text


@pytest.mark.parametrize(("top_k", "zero_experts"), [(1, 0), (6, 4)])
def test_active_parameters_count_top_k(top_k: int, zero_experts: int) -> None:
    """With even loads; of zero experts none is a parameter."""
    sizes = dict(dim=8, hidden_dim=64, num_experts=4, shared_hidden_dim=8)
    config = MoEConfig(**sizes, top_k=top_k, zero_experts=zero_experts)
    layer = MoELayer(config, device="meta")
    experts = sum(p.numel() for p in layer.experts.parameters())
    idle = experts * (1 - top_k / (4 + zero_experts))
    active = sum(p.numel() for p in layer.parameters()) - idle
    assert f"{active / 1e3:.3g} k active" in explain(layer) and "shared experts" in explain(layer)


def test_choices_are_shown() -> None:
    dtypes = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fsdp = FSDPOptions(**dtypes, dense_strategy="optim")
    with fake_world(4):
        parallel = ParallelConfig(ep=2)
        text = explain(parallelized(parallel, dispatch="allgather", fsdp=fsdp))
        again = explain(parallelized(parallel, memory=MemoryOptions(recompute=("expert_fc1",))))
        slow = explain(parallelized(parallel, expert_backend="sequential"))
    assert "\ndispatcher allgather: asked for\n" in text and "auto (torch)" in text
    # X, 2 x 128 in bf16, and H, 2 x 2 x 128; row ids and weights of 2 rows, ends of 4 experts
    assert "saved for backward 2.3 kB per token and layer: routing 728 B, experts 1.57 kB\n" in text
    assert "units: 10: 4 of blocks, 3 of experts, 1 of routers, 1 of heads" in text
    assert "the root; all resident\n" in text
    gathered = "float32, all-gathered in bfloat16, gradients reduced in bfloat16 or float32 and div"
    assert gathered in text
    assert "experts 834 B; FC1 is recomputed" in again and "blocks and experts resharded" in again
    assert "expert_backend sequential; saved for backward 6.9 kB" in slow
    with fake_world(4):
        for way in ("allgather", "a2a", "p2p", "a2a+p2p"):
            cp, context = 4 if way == "a2a+p2p" else 2, ContextOptions(way=way)  # type: ignore[arg-type]
            lines = explain(parallelized(ParallelConfig(cp=cp), context=context), batch=(2, 32))
            assert f"\nattention over cp: {way}" in lines
            assert "saved for backward per token" in lines
    assert "\nattention over cp: a2a+p2p, heads among 2 ranks\n" in lines
    with fake_world(4):
        context = ContextOptions(way="p2p", dynamic=True)
        lines = explain(parallelized(ParallelConfig(), context=context, loss="sum"), batch=(2, 32))
    assert "\nattention over cp 2 of a forward: p2p\nattention over cp 4 of a forward: p2p" in lines


def test_the_page_shows_what_layers_save() -> None:
    config = replace(preset("qwen3-30b-a3b"), num_layers=4)
    model = Decoder(config, device="meta", dtype=torch.bfloat16)
    before = dict(vars(model.model.layers[0]))
    lines = explain(model, batch=(2, 4096)).splitlines()[-4:]
    assert f"```text\n{chr(10).join(lines)}\n```" in MEMORY_PAGE.read_text(), "\n".join(lines)
    assert vars(model.model.layers[0]) == before and all(p.is_meta for p in model.parameters())
    with pytest.raises(ValueError, match=r"batch \(\(2, 0\)\) must"):
        explain(model, batch=(2, 0))


def test_what_layers_save_by_kind() -> None:
    """A dense layer, MoE layers, and the last of them, which stays on the device."""
    memory = MemoryOptions(recompute="gemm_last", offload=("experts",))
    any_size = patch("moecore.train.memory.apply.Offload", partial(Offload, min_bytes=1))
    with fake_world(8, 3), any_size:
        model = parallelized(FOLDED, memory=memory)
        with patch.multiple(dist, **dict.fromkeys(COLLECTIVES)):  # no function to call
            head, header, *rows, total = explain(model, batch=(2, 32)).splitlines()[-6:]
    assert head == "saved for backward per token, of 2 x 32 tokens"
    columns = re.split(r"  +", header)
    assert columns[1:4] == ["norm", "attention", "mlp"]
    assert columns[4:] == ["experts", "routing", "all", "recomputed", "in host memory"]
    cells = [dict(zip(columns, re.split(r"  +", row), strict=True)) for row in rows]
    assert [row["layers"] for row in cells] == ["0", "1 to 2", "3"]
    dense, away, last = cells
    assert dense["mlp"] != "-" == away["mlp"] and dense["experts"] == "-"
    assert away["in host memory"] != "-" == last["in host memory"] and last["experts"] != "-"
    assert total.endswith("in host memory") and "recomputed" in header


def test_many_shapes_of_a_kind_are_folded_into_one_row() -> None:
    model = nn.ModuleDict({f"mlp{n}": nn.Linear(n, 2, bias=False) for n in range(3, 12)})
    rows = [line for line in explain(model).splitlines() if line.startswith("other")]
    assert len(rows) == 4 and "6 more shapes" in rows[-1]
    assert [row.split()[1] for row in rows[:3]] == ["mlp9", "mlp10", "mlp11"]
    left = 2 * sum(range(3, 9))
    assert rows[-1].split()[-4:] == [str(left), str(left), str(4 * left), "B"]


def transformers_model() -> nn.Module:
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    experts |= dict(shared_expert_intermediate_size=16, mlp_only_layers=[0])
    config = transformers.Qwen2MoeConfig(**sizes, **heads, **experts)
    with torch.device("meta"):
        found: nn.Module = transformers.Qwen2MoeForCausalLM(config)
    return found


def test_kinds_of_a_transformers_model() -> None:
    """Parts have other names and no declared roles; the head is the embedding."""
    model = transformers_model()
    with fake_world(2, 1):
        parallelize_moe(model, build_meshes(ParallelConfig(ep=2), "cpu"))
        kinds = {row.kind: row.names for row in list_parameter_rows(*make_current_plan(model))}
        text = explain(model)
    assert kinds.keys() == KINDS - {"head"} | {"shared experts"}
    assert kinds["router"] == ["gate"] and kinds["shared experts"] == ["shared_expert_gate"]
    assert "1 MoE layer of 4 experts, top 2; this rank has 2 to 3" in text


def test_a_part_of_a_sharded_model_has_no_meshes_and_what_is_frozen_later_is_shown() -> None:
    with fake_world(2):
        model = parallelized(ParallelConfig(ep=2))
        part = model.get_submodule("model.layers.1")
        assert any(isinstance(p, DTensor) for p in part.parameters())
        assert "sharded, but not what parallelize_moe returned" in explain(part)
        model.get_parameter("lm_head.weight").requires_grad_(False)
        assert re.search(r"\nhead \(frozen\) +lm_head ", explain(model))


def test_shared_experts_in_fp8_are_shown() -> None:
    config = preset("tiny")
    assert config.moe is not None
    shared = replace(config, moe=replace(config.moe, shared_hidden_dim=128))
    with fake_world(2):
        model = Decoder(shared, device="meta", dtype=torch.bfloat16)
        parallelize_moe(model, build_meshes(ParallelConfig(), "cpu"), precision=SHARED_IN_FP8)
        assert "3 shared experts, blockwise FP8" in explain(model)


def test_a_wrapper_of_peft_is_what_it_wraps() -> None:
    """With a dtype of its own: routers are found by the names of the wrapped model."""
    peft = pytest.importorskip("peft")
    with torch.device("meta"):
        wrapper = peft.PeftModel(transformers_model(), peft.LoraConfig(target_modules=["q_proj"]))
    fsdp = FSDPOptions(param_dtype=torch.bfloat16)
    with fake_world(2):
        parallelize_moe(wrapper, build_meshes(ParallelConfig(ep=2), "cpu"), fsdp=fsdp)
        text = explain(wrapper, batch=(2, 8))
        assert text == explain(wrapper.base_model.model, batch=(2, 8))
    assert "LoRA" in text and "parameters float32, all-gathered in bfloat16" in text


def test_a_compiled_model_saves_what_its_original_does() -> None:
    with fake_world(2):
        model = parallelize_moe(transformers_model(), build_meshes(ParallelConfig(ep=2), "cpu"))
        text = explain(model, batch=(2, 8))
        assert explain(torch.compile(model), batch=(2, 8)) == text


def test_axes_without_names_are_numbered() -> None:
    """The mesh that `fully_shard` makes by itself has no names."""
    with fake_world(4, 1):
        model = nn.Sequential(nn.Linear(8, 6, bias=False))
        fully_shard(model)
        (row,) = (line for line in explain(model).splitlines() if line.startswith("other"))
    assert re.split(r"  +", row)[2:] == ["6x8", "2x8", "axis 0: dim 0", "64 B"]
