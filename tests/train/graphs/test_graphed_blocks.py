"""Blocks whose parts are graphs train as eager ones do, on two ranks that exchange tokens.

Fakes replay here; test_graphed_blocks_gpu.py does the same with real graphs.
"""

import re
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from moecore import (
    CapacityConfig,
    ContextOptions,
    DenseOptions,
    FSDPOptions,
    MemoryOptions,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.dense import GRAPH_SCOPES
from moecore.base.options.precision import Recipe
from moecore.base.torch_private import is_gloo
from moecore.models import Decoder, preset
from moecore.parallel.model import request as requests
from moecore.parallel.model.parallel_state import get_moe_state
from moecore.parallel.model.request import Request
from moecore.train.graphs.graphed_part import WARM_UP, GraphedPart
from tests.helpers.parts import on_parts
from tests.helpers.ranks import ranks_fixture, run_ranks
from tests.helpers.te_definition import te_defined
from tests.train.graphs.graph_fakes import fake_graphs

WORLD, STEPS, MICRO_BATCHES, LAYERS = 2, 3, 2, 3
TINY = preset("tiny")
PARTS = LAYERS + 2 * (LAYERS - 1)  # attention or a dense block, routers, what is sent


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to train.

    Attributes:
        parts: that are graphs.
        pairs: of each of them.
    """

    parts: int = PARTS
    pairs: int = 1
    preset: str = "tiny"
    dim: int = 64
    moe: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    dense: DenseOptions = field(default_factory=DenseOptions)  # beside graphs
    in_flight: bool = False
    pp: int = 1
    tp: int = 1
    cp: int = 1
    scopes: Any = ()
    schedule: PipelineConfig | None = None  # "overlapped" pairs have no stages


SHARED = dict(preset="tiny-deepseek-v3", parts=PARTS + LAYERS - 1 + 4)  # one more block
CASES = {
    "plain": Case(),
    "shared experts, latent attention, a token ahead": Case(**SHARED),
    "computed again": Case(
        **SHARED, options=dict(memory=MemoryOptions(recompute=("norm", "rope", "activation")))
    ),
    "MoE layers computed again": Case(
        parts=LAYERS, options=dict(memory=MemoryOptions(recompute=("moe",)))
    ),
    "experts offloaded": Case(options=dict(memory=MemoryOptions(offload=("experts",)))),
    "FP8": Case(**SHARED, dim=128, options=dict(precision="blockwise")),
    "MXFP8": Case(**SHARED, options=dict(precision="mxfp8")),
    "NVFP4": Case(**SHARED, options=dict(precision="nvfp4")),
    "gathered for each pass": Case(
        options=dict(fsdp=FSDPOptions(dense_strategy="optim_grads_params"))
    ),
    "micro-batches in flight": Case(in_flight=True, pairs=MICRO_BATCHES),
    "stages": Case(parts=3, pp=2, schedule=PipelineConfig(schedule="1f1b"), pairs=2),
    "pairs": Case(schedule=PipelineConfig(schedule="overlapped"), pairs=2),
    "tp": Case(tp=2),
    "tp, shared experts, latent attention, a token ahead": Case(**SHARED, tp=2),
    "tp, pairs": Case(tp=2, schedule=PipelineConfig(schedule="overlapped"), pairs=2),
    "tp, micro-batches in flight": Case(tp=2, in_flight=True, pairs=MICRO_BATCHES),
    "cp by a ring": Case(cp=2, options=dict(context=ContextOptions(way="p2p"))),
    "cp by all-to-alls": Case(cp=2, options=dict(context=ContextOptions(way="a2a"))),
    "cp by all-gathers": Case(cp=2, options=dict(context=ContextOptions(way="allgather"))),
    "cp, shared experts, latent attention": Case(**SHARED, cp=2),
    "attention offloaded, over cp": Case(
        parts=2 * (LAYERS - 1),
        cp=2,
        scopes=("router", "dispatch"),
        options=dict(memory=MemoryOptions(offload=("attention",))),
    ),
    "scopes": Case(
        parts=2 * (LAYERS - 1),
        scopes=("router", "dispatch"),
        options=dict(memory=MemoryOptions(offload=("attention", "rest"))),
    ),
    "rules that compare tokens": Case(
        parts=LAYERS, moe=dict(capacity=CapacityConfig(factor=1.0, pad=True))
    ),
}
ON_CPUS = CASES | {  # by its definition
    "Transformer Engine": Case(
        **SHARED, options=dict(precision=Recipe(scaling="mxfp8", backend="te"))
    )
}

# Cases whose options change no bit of another one's.
SAME_BITS = dict.fromkeys(
    (
        "MoE layers computed again",
        "experts offloaded",
        "scopes",
        "gathered for each pass",
        "micro-batches in flight",
    ),
    "plain",
) | {"computed again": "shared experts, latent attention, a token ahead"}


def train(case, device, *, graphed, between=lambda: None) -> tuple[list[Any], Decoder]:
    """Return losses and norms of each step, then parameters; and the model."""
    config = replace(preset(case.preset), num_layers=LAYERS)
    moe = replace(config.moe, dim=case.dim, hidden_dim=case.dim, **case.moe)
    config = replace(config, dim=case.dim, moe=moe)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Decoder(config, device="meta", dtype=dtype)
    parallel = ParallelConfig(
        pp=case.pp, tp=case.tp, cp=case.cp, ep=dist.get_world_size() // case.pp
    )
    meshes = build_meshes(parallel, device.type)
    group, scopes = meshes.micro_batch_group, case.scopes
    if group is not None and (device.type == "cpu" or not is_gloo(group, device.type)):
        scopes = scopes or GRAPH_SCOPES
    parallelize_moe(
        model,
        meshes,
        dispatch="alltoall" if parallel.ep > 1 else "auto",
        dense=replace(case.dense, graph=graphed, graph_scopes=scopes if graphed else ()),
        pipeline=case.schedule,
        **case.options,
    )
    model.to_empty(device=device)
    model.init_weights(0)
    optimizer = on_parts(torch.optim.SGD)(model.parameters(), lr=0.1)
    step = TrainStep(model, optimizer, num_micro_batches=MICRO_BATCHES, max_norm=1.0)
    g = torch.Generator().manual_seed(meshes.data_rank)
    found: list[Any] = []
    for _ in range(STEPS):
        tokens = torch.randint(0, config.vocab_size, (MICRO_BATCHES, 2, 16), generator=g)
        tokens = tokens.to(device)
        if case.in_flight:
            with step.micro_batches():
                losses = [model(x, x.roll(-1, 1)) for x in tokens]
                for loss in losses:
                    loss.backward()
        elif case.schedule is not None:
            batches = [dict(tokens_BT=x, labels_BT=x.roll(-1, 1)) for x in tokens]
            losses = list(step.forward_backward(batches))
        else:
            losses = []
            for x in tokens:
                with step.micro_batch():
                    losses.append(model(x, x.roll(-1, 1)))
                    losses[-1].backward()
        found += [loss.item() for loss in losses]
        found.append(step.finish().to_dict()["grad_norm"])
        between()
    found += [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return found, model


def parts_of(model: Decoder) -> list[GraphedPart]:
    """Return the parts of a model that have captured graphs."""
    dispatchers = (layer.dispatcher for layer in get_moe_state(model).layers.values())
    owners = [*model.modules(), *dispatchers]
    found = [part for m in owners for part in vars(m).values() if isinstance(part, GraphedPart)]
    return [part for part in found if part._pairs]


def worker(rank: int, device: torch.device, names: list[str]) -> dict[str, Any]:
    trained_eagerly = cache(lambda name: train(ON_CPUS[name], device, graphed=False)[0])
    with te_defined():
        return {
            name: compared(ON_CPUS[name], device, trained_eagerly(SAME_BITS.get(name, name)))
            for name in names
        }


def compared(case: Case, device: torch.device, eager: list[Any]) -> tuple[bool, int, set[int], int]:
    """Whether eager and graphed training are the same, the graphs, their pairs, and replays."""
    with fake_graphs() as fake:
        graphed, model = train(case, device, graphed=True)
    parts = parts_of(model)
    pairs = zip(map(torch.as_tensor, eager), map(torch.as_tensor, graphed), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    return same, len(parts), {len(part._pairs) for part in parts}, fake.replays


results = ranks_fixture(WORLD, worker, "name")


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CPUS)
def test_replays_train_as_eager_calls_do(name: str, results: dict[str, Any]) -> None:
    case, (same, parts, pairs, replays) = ON_CPUS[name], results[name]
    assert same, "losses, norms and weights have equal bits"
    assert parts == case.parts and max(pairs) == case.pairs
    assert replays >= parts * (STEPS * MICRO_BATCHES - WARM_UP)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "offload": (
        dict(memory=MemoryOptions(offload=("experts", "attention"))),
        r"MemoryOptions.offload \('attention'\)",
    ),
    "offload of a scope": (
        dict(scopes=("shared_experts",), memory=MemoryOptions(offload=("shared_experts",))),
        r"graph \(True\) must go with MemoryOptions.offload \('shared_experts'\)",
    ),
    "collectives": (
        dict(tp=2, scopes=("attention",)),
        r"graph \(True\) must go with NCCL, or leave 'attention' out of graph_scopes",
    ),
    "history": (
        dict(precision=Recipe(scaling="tensorwise", amax_history=4)),
        "Recipe.amax_history 0",
    ),
    "dynamic cp": (dict(context=ContextOptions(dynamic=True)), r"dynamic \(True\) = False"),
    "zero bubbles": (dict(pp=2, pipeline=PipelineConfig(schedule="zbv")), "DenseOptions.graph"),
    "repeated": (
        dict(config=dict(num_mtp_layers=1, mtp_repeats=2, mtp_loss_coef=0.1)),
        "mtp.0 runs",
    ),
}


def refusals(rank: int, device: torch.device) -> dict[str, str]:
    said = {}
    for name, (options, _) in REFUSED.items():
        degrees = {k: options[k] for k in ("tp", "cp", "pp") if k in options}
        more = {k: v for k, v in options.items() if k not in degrees}
        config = replace(preset("tiny"), **more.pop("config", {}))
        meshes = build_meshes(ParallelConfig(**degrees), "cpu")
        dense = DenseOptions(graph=True, graph_scopes=more.pop("scopes", ()))
        problem = "NCCL" if name == "collectives" else None
        try:
            with patch.object(Request, "find_capture_problem", lambda self: problem):  # noqa: B023
                parallelize_moe(Decoder(config, device="meta"), meshes, dense=dense, **more)
        except ValueError as error:
            said[name] = str(error)
    return said


SEGMENTS = "PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True"
OVER_RANKS: dict[str, tuple[str, str, list[tuple[str, str]], str]] = {
    "one rank": ("cuda", "", [SEGMENTS], ""),
    "CPUs": ("cpu", "gloo", [], ""),
    "NCCL": ("cuda", "nccl", [], ""),
    "gloo": ("cuda", "gloo", [], "collectives of gloo"),
    "segments": ("cuda", "nccl", [SEGMENTS], "NCCL_GRAPH_REGISTER=0"),
    "not registered": ("cuda", "nccl", [SEGMENTS, ("NCCL_GRAPH_REGISTER", "0")], ""),
}


@pytest.mark.parametrize("setting", OVER_RANKS)
def test_attention_over_ranks_is_captured_with_nccl(setting: str, monkeypatch) -> None:
    device_type, backend, variables, problem = OVER_RANKS[setting]
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_GRAPH_REGISTER"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables:
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(requests, "is_gloo", lambda group, device_type: group == "gloo")
    meshes = SimpleNamespace(micro_batch_group=backend or None, device_type=device_type)
    options = {field.name: None for field in fields(Request)}
    found = Request(**options | dict(meshes=meshes)).find_capture_problem()
    assert bool(found) == bool(problem) and problem in (found or "")


def test_scopes_need_graphs() -> None:
    with pytest.raises(ValueError, match=r"graph_scopes \(\('router',\)\) must be \(\) without"):
        DenseOptions(graph_scopes=("router",))


def test_what_graphs_can_not_hold_is_refused() -> None:
    said = run_ranks(WORLD, refusals)
    for name, (_, pattern) in REFUSED.items():
        assert re.search(pattern, said[name]), said[name]
