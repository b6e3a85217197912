import json
import math
import time
from dataclasses import asdict, replace
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode, _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from moecore import (
    FSDPOptions,
    ParallelConfig,
    PipelineConfig,
    ShardPlan,
    build_meshes,
    explain,
    plan_sharding,
)
from moecore.base.options.precision import Precision, Recipe
from moecore.models import Decoder, num_params, preset
from moecore.parallel.fsdp.plan import DATA_AXES, ParamPlan, UnitPlan, make_flat_layouts
from moecore.parallel.fsdp.size import compute_rank_bytes
from tests.parallel.small_decoder import small_decoder

pytestmark = pytest.mark.usefixtures("no_group_left")
BF16 = FSDPOptions(param_dtype=torch.bfloat16)
SMALL = small_decoder(
    32,
    32,
    vocab_size=60,
    num_layers=3,
    num_mtp_layers=1,
    mtp_loss_coef=0.1,
    max_seq_len=4096,
    dense=44,
)


def planned(world_size, parallel, model, rank=0, **options) -> ShardPlan:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    _clear_sharding_prop_cache()  # of the meshes of other ranks, which are equal
    try:
        meshes = build_meshes(parallel, "cpu")
        with CommDebugMode() as communicated:
            plan = plan_sharding(model, meshes, **options)
        assert communicated.get_total_counts() == 0
        return plan
    finally:
        dist.destroy_process_group()


def held(param: ParamPlan, world_size: int) -> int:
    """Elements of a parameter on all ranks, each rank's counted."""
    ranks = world_size // math.prod(axis.size for axis in param.placements)
    names = [axis.axis for axis in param.placements]
    places = product(*(range(axis.size) for axis in param.placements))
    shapes = (param.local_shape(dict(zip(names, place, strict=True))) for place in places)
    return ranks * sum(math.prod(shape) for shape in shapes)


def test_2048_ranks_of_deepseek_v3() -> None:
    config, parallel = (
        preset("deepseek-v3"),
        ParallelConfig(dp_shard=256, tp=8, ep=64, edp_shard=32),
    )
    model = Decoder(config, device="meta", dtype=torch.bfloat16)
    before = time.process_time()
    plan = planned(2048, parallel, model, fsdp=BF16)
    assert time.process_time() - before < 10
    assert plan == planned(2048, parallel, model, rank=2047, fsdp=BF16), "equal on every rank"
    assert sum(param.numel for param in plan.params) == num_params(config)
    names = [name for unit in plan.units for name in unit.params]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for param in plan.params:
        copies = 2048 // math.prod(a.size for a in param.placements if a.dim is not None)
        assert held(param, 2048) == copies * param.numel, param.name
    layers = [f"model.layers.{i}" for i in range(61)]
    assert [unit.name for unit in plan.units if unit.role == "block"] == [*layers, "mtp.0"]
    (layer,) = {(layer.num_local, layer.recipes) for layer in plan.layers}
    assert layer == (4, (("experts", None), ("shared_experts", None)))
    (text,) = [line for line in explain(plan).splitlines() if line.startswith("59 MoE layers")]
    assert text == "59 MoE layers of 256 experts, top 8; each rank has 4"
    assert json.loads(json.dumps(asdict(plan)))["units"][1]["name"] == "model.layers.0"


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(dp_replicate=2, dp_shard=3, tp=2, edp_shard=6, ep=2),
        ParallelConfig(dp_shard=6, cp=2, edp_replicate=3, ep=2, etp=2),
    ],
    ids=str,
)
def test_ranks_hold_every_byte_once_for_each_copy(parallel: ParallelConfig) -> None:
    plan = planned(12, parallel, Decoder(SMALL, device="meta"), fsdp=BF16)
    want = {"parameters": 0, "gradients": 0}
    for param in plan.params:
        copies = 12 // math.prod(a.size for a in param.placements if a.dim is not None)
        for kind in want:
            want[kind] += copies * 4 * param.numel
    ranks = [compute_rank_bytes(plan, rank) for rank in range(12)]
    assert want == {kind: sum(getattr(rank, kind) for rank in ranks) for kind in want}
    assert max(rank.parameters for rank in ranks) == compute_rank_bytes(plan).parameters


def test_units_take_turns_in_buffers() -> None:
    """Root, routers and head stay; a block, its experts and those of the next one are used."""
    config = replace(SMALL, num_mtp_layers=0, mtp_loss_coef=0.0, dense_layers=(), mlp_hidden_dim=0)
    plan = planned(2, ParallelConfig(), Decoder(config, device="meta"), fsdp=BF16)
    whole = {unit.name: sum(la.unsharded_numel for la in unit.layouts) for unit in plan.units}
    stay = whole[""] + whole["lm_head"]
    block = whole["model.layers.1"] + whole["model.layers.1.mlp.experts"]
    size = compute_rank_bytes(plan)
    assert size.weights == 4 * whole["model.layers.0.mlp.router"] + 2 * (stay + 2 * block)
    assert size.sums == 4 * 2 * block
    assert size.accumulated == 4 * (stay + whole["model.layers.0.mlp.router"])


ORDERS = [FSDPOptions(), BF16, replace(BF16, prefetch_blocks=2), replace(BF16, blocks_per_unit=2)]


@pytest.mark.parametrize("options", ORDERS, ids=str)
def test_prefetch_follows_the_order_of_use(options: FSDPOptions) -> None:
    """In forward within a list of blocks; in backward all the way, heads where they run again."""
    plan = planned(2, ParallelConfig(), Decoder(SMALL, device="meta"), fsdp=options)
    order = [unit.name for unit in plan.units]
    assert order[0] == "" and plan.units[0].forward_prefetch == ()
    for i, unit in enumerate(plan.units[1:], start=1):
        ahead = unit.forward_prefetch
        assert ahead == tuple(order[i + 1 :][: len(ahead)]), unit.name
    last = [unit.name for unit in plan.units if unit.name.startswith("mtp")][-1]
    ends = {"lm_head", last}
    assert {unit.name for unit in plan.units[1:] if not unit.forward_prefetch} == ends
    blocks = [unit for unit in plan.units if unit.role == "block" and "layers" in unit.name]
    for before, unit in pairwise(blocks):
        assert before.name in unit.backward_prefetch, unit.name
    none = planned(
        2, ParallelConfig(), Decoder(SMALL, device="meta"), fsdp=replace(BF16, prefetch_blocks=0)
    )
    assert not any(unit.forward_prefetch or unit.backward_prefetch for unit in none.units)


def unit_named(plan: ShardPlan, name: str) -> UnitPlan:
    return next(unit for unit in plan.units if unit.name == name)


def test_slots_of_a_unit_lie_one_after_the_other_on_lines() -> None:
    parallel = ParallelConfig(dp_shard=6, tp=2, edp_shard=3, ep=4)
    plan = planned(12, parallel, Decoder(SMALL, device="meta"), fsdp=BF16)
    params = {param.name: param for param in plan.params}
    for unit in plan.units:
        (layout,), end = unit.layouts, 0
        assert tuple(slot.param for slot in layout.slots) == unit.params
        for slot in layout.slots:
            assert slot.shard_offset == end and end % 128 == 0
            assert slot.unsharded_offset == slot.shard_offset * layout.ranks
            local = params[slot.param].local_shape()
            assert math.prod(local) == slot.shard_numel, "the first rank's is full"
            end += -(-slot.shard_numel // 128) * 128
        assert layout.shard_numel * layout.ranks == layout.unsharded_numel
        assert layout.shard_numel == end


def test_the_example_of_the_layout() -> None:
    a, b, c = (
        ParamPlan(
            name=name,
            kind="",
            shape=shape,
            dtype="bfloat16" if name == "c" else "float32",
            itemsize=2 if name == "c" else 4,
            trainable=True,
            mesh="dense",
            placements=(),
        )
        for name, shape in (("a", (600, 2)), ("b", (3,)), ("c", (4,)))
    )
    layout, other = make_flat_layouts([a, c, b], num_ranks=4)
    assert [slot.rows for slot in layout.slots] == [150, 1]
    assert [slot.shard_numel for slot in layout.slots] == [300, 1]
    assert [slot.shard_offset for slot in layout.slots] == [0, 384]
    assert [slot.unsharded_offset for slot in layout.slots] == [0, 1536]
    assert (layout.shard_numel, layout.unsharded_numel) == (512, 2048)
    assert (other.dtype, [slot.param for slot in other.slots]) == ("bfloat16", ["c"])
    found = make_flat_layouts([a, c, b], num_ranks=4, gather_dtype="bfloat16", fp32_names={"b"})
    gathered = {slot.param: layout.gathers for layout in found for slot in layout.slots}
    assert gathered == {"a": "bfloat16", "b": "float32", "c": "bfloat16"}
    wide = replace(a, name="d", dtype="float64")
    reduced = [layout.reduces for layout in make_flat_layouts([a, wide], num_ranks=4)]
    assert reduced == ["float32", "float64"]
    (narrow,) = make_flat_layouts([wide], num_ranks=4, gather_dtype="bfloat16")
    assert narrow.reduces == "float32"


def test_what_units_are_told() -> None:
    options = replace(BF16, reduce_dtype=torch.bfloat16, experts_strategy="optim")
    plan = planned(4, ParallelConfig(ep=2), Decoder(SMALL, device="meta"), fsdp=options)
    block, experts = (unit_named(plan, n) for n in ("model.layers.1", "model.layers.1.mlp.experts"))
    routers = unit_named(plan, "model.layers.1.mlp.router")
    dtypes = {unit.role: (unit.gather_dtype, unit.layouts[0].reduces) for unit in plan.units}
    assert dtypes.pop("routers") == (None, "float32")
    assert set(dtypes.values()) == {("bfloat16", "bfloat16")}
    assert {unit.divisor for unit in plan.units} == {4.0}
    casts = {unit.role for unit in plan.units if unit.casts_inputs}
    assert casts == {"root", "block"}
    assert not block.is_resident and experts.is_resident and routers.is_resident
    assert (experts.mesh, experts.layouts[0].ranks) == ("expert", 2)
    assert routers.modules == tuple(f"model.layers.{i}.mlp.router" for i in (1, 2))
    summed = planned(4, ParallelConfig(ep=4), Decoder(SMALL, device="meta"), loss="sum")
    assert {unit.divisor for unit in summed.units} == {1.0}
    whole = [unit for unit in summed.units if unit.role == "experts"]
    assert {unit.layouts[0].ranks for unit in whole} == {1}
    axes = {p.axis for unit in whole for name in unit.params for p in summed.param(name).placements}
    assert axes.isdisjoint(DATA_AXES)
    for plan_ in (plan, summed):
        (dispatcher,) = {(plan_.dispatcher, plan_.dispatcher_reason)}
        assert dispatcher == ("alltoall", "'nvlink' must go with device_type ('cpu') = 'cuda'")
    message = r"DispatchOptions.name \('nvlink'\) must go with device_type"
    with pytest.raises(ValueError, match=message):
        planned(4, ParallelConfig(ep=4), Decoder(SMALL, device="meta"), dispatch="nvlink")


def test_what_is_in_fp8() -> None:
    config = replace(SMALL, mlp_hidden_dim=64, moe=replace(SMALL.moe, shared_hidden_dim=16))
    precision = Precision(recipe=Recipe(), overrides=(("*.experts", None),))
    for tp, found in ((1, ["q", "k", "v", "o"]), (2, ["q", "o"])):
        model, parallel = Decoder(config, device="meta"), ParallelConfig(tp=tp)
        if tp == 2:  # 8 rows of k and v are no multiple of 16
            named = replace(precision, overrides=(("*.k_proj", Recipe()),), roles=())
            with pytest.raises(ValueError, match=r"Precision.overrides \('\*.k_proj'\) must match"):
                planned(4, parallel, model, precision=named)
        plan = planned(4, parallel, model, precision=precision)
        linears = [name for name, _ in plan.linears if "layers.1.self_attn" in name]
        assert linears == [f"model.layers.1.self_attn.{n}_proj" for n in found]
        recipes = dict(plan.layers[0].recipes)
        assert recipes == {"experts": None, "shared_experts": Recipe()}
        assert "3 shared experts, blockwise FP8" in explain(plan)
        assert json.loads(json.dumps(asdict(plan)))["layers"][0]["recipes"][0] == ["experts", None]


def test_a_plan_has_no_batch() -> None:
    plan = planned(1, ParallelConfig(), Decoder(SMALL, device="meta"))
    with pytest.raises(ValueError, match=r"batch \(\(2, 8\)\) must be None for a plan"):
        explain(plan, batch=(2, 8))
    with pytest.raises(ValueError, match=r"name \('no such'\) must be a parameter's"):
        plan.param("no such")
    with pytest.raises(ValueError, match=r"rank \(1\) must be >= 0 and < the plan's world size"):
        compute_rank_bytes(plan, 1)
    assert plan.param("model.norm.weight").kind == "norms"


@pytest.mark.parametrize(
    ("pp", "schedule", "layout", "idle"),
    [
        (3, "1f1b", "Etttm||L", 1),
        (2, "zbv", "Etttm|||L", 1),  # stages in a V: 0 and 3 are of rank 0
        (2, "interleaved", "Etttm|||L", None),
        (6, "1f1b", None, 3),  # dealt evenly
    ],
)
def test_a_rank_without_any_part_is_refused(pp, schedule, layout, idle) -> None:
    pipeline = PipelineConfig(layout=layout, schedule=schedule)
    model = Decoder(SMALL, device="meta")
    if idle is None:
        planned(pp, ParallelConfig(pp=pp), model, pipeline=pipeline)
        return
    with pytest.raises(ValueError, match=f"^layout .* but rank {idle} has only empty stages, and"):
        planned(pp, ParallelConfig(pp=pp), model, pipeline=pipeline)
