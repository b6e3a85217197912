from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore import (
    FSDPOptions,
    ParallelConfig,
    ShardPlan,
    build_meshes,
    parallelize_moe,
    plan_sharding,
)
from moecore.base.rank_checks import gather_objects
from moecore.models import Decoder
from moecore.parallel.model.parallel_state import get_parallel_state
from tests.helpers.ranks import ranks_fixture
from tests.parallel.fsdp.units import units as units_of
from tests.parallel.small_decoder import small_decoder

WORLD = 4
BF16 = FSDPOptions(param_dtype=torch.bfloat16)
DECODER = small_decoder(
    32,
    32,
    vocab_size=60,
    num_layers=3,
    dense_layers=(1,),
    mlp_hidden_dim=44,
    num_mtp_layers=1,
    mtp_loss_coef=0.1,
    max_seq_len=4096,
    shared=8,
)


def decoder() -> nn.Module:
    return Decoder(DECODER)


def transformers() -> nn.Module:
    from tests.families.transformers.hf_models import random_model

    return random_model("qwen3-moe")


def with_lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    return peft.get_peft_model(transformers(), config)


@dataclass(frozen=True, kw_only=True)
class Case:
    make: Callable[[], nn.Module]
    parallel: ParallelConfig
    fsdp: FSDPOptions = FSDPOptions()  # noqa: RUF009


CASES = {
    "tp, sharded experts": Case(make=decoder, parallel=ParallelConfig(tp=2, ep=2)),
    "etp, hybrid": Case(
        make=decoder,
        parallel=ParallelConfig(dp_replicate=2, edp_replicate=2, etp=2),
        fsdp=FSDPOptions(param_dtype=torch.bfloat16, blocks_per_unit=2),
    ),
    "few experts": Case(make=decoder, parallel=ParallelConfig(ep=1), fsdp=BF16),
    "whole experts": Case(make=decoder, parallel=ParallelConfig(ep=4), fsdp=BF16),
    "cp": Case(make=decoder, parallel=ParallelConfig(cp=2, edp_replicate=2, ep=2)),
    "transformers": Case(make=transformers, parallel=ParallelConfig(ep=2), fsdp=BF16),
    "lora": Case(make=with_lora, parallel=ParallelConfig(ep=2)),
}


def differences(case: Case) -> dict[str, tuple[Any, Any]]:
    """What differs between the plan and what was made: planned, made."""
    torch.manual_seed(0)
    model, meshes = case.make(), build_meshes(case.parallel, "cpu")
    before = state_of(model)
    plan = plan_sharding(model, meshes, fsdp=case.fsdp)
    pairs: dict[str, tuple[Any, Any]] = {"model": (before, state_of(model))}
    root = model.get_base_model() if hasattr(model, "get_base_model") else model
    parallelize_moe(model, meshes, fsdp=case.fsdp)
    used = first_uses(root, plan, case)
    pairs |= {
        "plan": (plan, get_parallel_state(root).plan),
        "order": ([u.name for u in plan.units], used),
    }
    rank = torch.distributed.get_rank()
    for param in plan.params:
        made = root.get_parameter(param.name)
        axes = tuple((p.axis, p.size, p.dim) for p in param.placements)
        local = param.local_shape(plan.coordinate(rank))
        pairs[f"of {param.name}"] = (
            (param.shape, local, axes, param.dtype, param.trainable),
            (*parts_of(made), str(made.dtype)[6:], made.requires_grad),
        )
    pairs |= units(root, plan)
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def state_of(model: nn.Module) -> list[Any]:
    """What a plan may not change: modules, their classes and hooks, parameters."""
    modules = [(n, id(m), type(m), len(m._forward_hooks)) for n, m in model.named_modules()]
    return [*modules, *((n, id(p)) for n, p in model.named_parameters())]


def parts_of(param: Tensor) -> tuple[Any, ...]:
    assert isinstance(param, DTensor)
    mesh = param.device_mesh
    dims = [getattr(p, "dim", None) for p in param.placements]
    axes = zip(mesh.mesh_dim_names or (), mesh.shape, dims, strict=True)
    return tuple(param.shape), tuple(param.to_local().shape), tuple(axes)


def units(root: nn.Module, plan: ShardPlan) -> dict[str, tuple[Any, Any]]:
    """Each unit: modules, parameters, what it gathers ahead."""
    names = {module: name for name, module in root.named_modules()}
    name_of = {id(param): name for name, param in root.named_parameters()}
    found: dict[str, Any] = {}
    for unit in units_of(root):
        modules = sorted(names[m] for m in unit.modules)
        params = sorted(name_of[id(param.sharded)] for param in unit.params)
        both = unit.prefetch_forward, unit.prefetch_backward
        ahead = [[names[other.modules[0]] for other in others] for others in both]
        options = unit.options
        how = unit.dtype, options.reduce_dtype, options.cast_inputs is not None
        found[modules[0]] = (modules, params, *ahead, how, options.divisor, options.is_resident)
    want = {
        sorted(unit.modules)[0]: (
            sorted(unit.modules),
            sorted(unit.params),
            list(unit.forward_prefetch),
            list(unit.backward_prefetch),
            (
                dtype(unit.layouts[0].gathers),
                dtype(unit.layouts[0].reduces),
                unit.casts_inputs and unit.gather_dtype is not None,
            ),
            unit.divisor,
            unit.is_resident,
        )
        for unit in plan.units
    }
    return {f"unit {name}": (want.get(name), found.get(name)) for name in want | found}


def dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def first_uses(root: nn.Module, plan: ShardPlan, case: Case) -> list[str]:
    """Units in the order in which a forward comes to their first modules."""
    used: list[str] = []

    def note(name: str, *_: Any) -> None:
        if name not in used:
            used.append(name)

    for unit in plan.units:
        for name in unit.modules:
            hook = partial(note, unit.name)
            root.get_submodule(name).register_forward_pre_hook(hook, prepend=True)
    tokens = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(0))
    if isinstance(root, Decoder):
        root(tokens, tokens).backward()
    else:
        root(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return used


def worker(rank: int, device: torch.device) -> list[dict[str, Any]]:
    mine = {name: differences(case) for name, case in CASES.items()}
    return gather_objects(mine)


found = ranks_fixture(WORLD, worker)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_what_is_made(name: str, found: list[dict[str, Any]]) -> None:
    assert [rank[name] for rank in found] == [{}] * WORLD
