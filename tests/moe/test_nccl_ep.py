"""Dispatcher "nccl_ep" over a stand-in of NCCL EP: layers beside all-to-all, and its calls."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor

from moecore import (
    CapacityConfig,
    CloneOptions,
    DispatchOptions,
    MemoryOptions,
    MoEConfig,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.saved_tensors import packing
from moecore.models import Decoder, preset
from moecore.moe.dispatch import nccl_ep
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.nccl_ep import EPGroups, NCCLEPDispatcher
from moecore.moe.forced import force_even_load
from moecore.moe.layer import MoELayer
from moecore.moe.placement import ExpertPlacement
from moecore.moe.records import Dispatcher, Routing
from moecore.train import AdamW
from moecore.train.memory.saved_bytes import count_saved_bytes
from tests.helpers.ranks import run_ranks
from tests.moe import fake_nccl_ep as fake
from tests.moe import test_dispatch_ranks as ranks
from tests.train.memory.test_saved_bytes import Saved

pytestmark = pytest.mark.slow

EP, E, K, D = 3, 12, 3, 32  # of 6 ranks, so two groups
NO_BIAS: dict[str, Any] = dict(fc1_bias=False, fc2_bias=False)
CONFIG = replace(ranks.CONFIG, num_experts=E, top_k=K, **NO_BIAS)


@cache
def placement() -> tuple[Any, ExpertPlacement]:
    meshes = build_meshes(ParallelConfig(ep=EP), "cpu")
    assert meshes.dispatch_group is not None
    return meshes, ExpertPlacement(group=meshes.dispatch_group, num_experts=E, ep=EP, etp=1)


def layer_of(config: MoEConfig, dispatcher: Dispatcher) -> MoELayer:
    layer = ranks.make_layer(config)
    layer.part("experts").shard(placement()[0].expert["ep", "etp"])
    layer.dispatcher = dispatcher
    return layer


def tokens_of(num_tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(num_tokens, D, generator=generator).requires_grad_()


def gradients(layer: MoELayer, xs: list[Tensor]) -> list[Tensor]:
    """Return outputs and gradients; all forwards come before all backwards."""
    ys = [layer(x) for x in xs]
    for y in ys:
        (y * torch.linspace(-1, 1, D)).sum().backward()
    params = [p.grad for p in layer.parameters()]
    local = [g.to_local() if hasattr(g, "to_local") else g for g in params]
    return [*(y.detach() for y in ys), *(x.grad for x in xs), *local]  # type: ignore[misc]


def beside_alltoall(groups: EPGroups) -> dict[str, float]:
    """Return the worst difference from all-to-all over all ranks, by how tokens are routed."""
    _, place = placement()
    rank, errors = dist.get_rank(), {}
    one = replace(CONFIG, top_k=1, expert_bias=True, normalize_weights=False)
    cases = {
        "uneven": (CONFIG, [3 + 2 * rank]),
        "none on a rank": (CONFIG, [7 * (rank != 1)]),
        "none anywhere": (CONFIG, [0]),
        "one expert": (one, [6]),
        "all experts": (replace(CONFIG, top_k=E), [5]),
        "dropped": (replace(CONFIG, capacity=CapacityConfig(factor=0.7)), [16]),
        "in flight": (CONFIG, [9, 4 + rank, 6]),
        "chunks": (CONFIG, [60 + 30 * rank]),  # of 64
    }
    for name, (config, numbers) in cases.items():
        found, expected = (
            gradients(layer_of(config, d), [tokens_of(n, i) for i, n in enumerate(numbers)])
            for d in (NCCLEPDispatcher(place, groups), AllToAllDispatcher(place))
        )
        worst = [
            float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3) if b.numel() else 0.0
            for a, b in zip(found, expected, strict=True)
        ]
        errors[name] = max(worst)
    return worst_of(errors)


def worst_of(errors: dict[str, float]) -> dict[str, float]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, errors)
    return {name: max(one[name] for one in found) for name in errors}


def calls(groups: EPGroups) -> dict[str, Any]:
    """Return what is called, and how many handles there are, after forwards of all kinds."""
    layer = layer_of(CONFIG, NCCLEPDispatcher(placement()[1], groups))
    found: dict[str, Any] = {}

    def run(name: str, num_backwards: int, num_forwards: int = 1) -> None:
        fake.Group.calls.clear()
        for i in range(num_forwards):
            y = layer(tokens_of(8, i))
            if i < num_backwards:
                y.sum().backward()
            del y
        gc.collect()
        found[name] = Counter(fake.Group.calls)

    run("training", 1)
    with torch.no_grad():
        run("evaluation", 0)
    run("dropped", 2, 5)
    (group,) = groups._groups.values()
    found["handles"] = len(group._handles), sum(map(len, group._idle.values()))
    return found


def kept(groups: EPGroups) -> tuple[int, int]:
    """Return the bytes that a forward on meta predicts for backward, and those of one that ran."""
    layer = MoELayer(MoEConfig(dim=128, hidden_dim=64, num_experts=E, top_k=E))
    force_even_load(layer)
    layer.part("experts").shard(placement()[0].expert["ep", "etp"])
    layer.dispatcher = NCCLEPDispatcher(placement()[1], groups)
    x = torch.randn(48, 128, requires_grad=True)
    given = x.detach().to("meta").requires_grad_()
    how: dict[str, Any] = dict(options=MemoryOptions(), device_type="cpu")
    (predicted,) = count_saved_bytes(layer, [layer], lambda copy: copy(given), **how).blocks
    saved = Saved(layer)
    with packing(saved):
        y = layer(x)
    found = predicted.num_bytes, saved.num_bytes
    y.sum().backward()
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": dict(memory=MemoryOptions(recompute=("moe",))),
    "clones": dict(clones=CloneOptions(per_rank=4)),
}


def trained(
    dispatcher: Any, meshes: Any, *, clones: CloneOptions | None = None, **options: Any
) -> list[float]:
    """Return losses and norms of two steps of a decoder."""
    config = preset("tiny")
    moe = replace(config.moe, num_experts=E)
    model = Decoder(replace(config, num_layers=3, moe=moe))  # two of MoE
    model.init_weights(0)
    dispatch = DispatchOptions(name=dispatcher, clones=clones)
    parallelize_moe(model, meshes, dispatch=dispatch, **options)
    step = TrainStep(model, AdamW(model.parameters(), lr=1e-2), max_norm=1.0)
    found = []
    for i in range(2):
        generator = torch.Generator().manual_seed(100 * i + dist.get_rank())
        tokens = torch.randint(0, 256, (2, 17), generator=generator).to(meshes.device)
        losses = step.forward_backward([dict(tokens_BT=tokens[:, :-1], labels_BT=tokens[:, 1:])])
        done = step.finish()
        assert done.norm is not None
        found += [float(losses.mean()), float(done.norm.total)]
    step.close()
    return found


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    with fake.installed():
        group = placement()[1].group
        with patch.object(nccl_ep, "MOST_TOKENS", 64):
            chunked = EPGroups(group, 6)
            found: dict[str, Any] = {"beside": beside_alltoall(chunked)}
            found["groups"] = sorted(chunked._groups)
            chunked.close()
        groups = EPGroups(group, 6)
        found["calls"], found["kept"] = calls(groups), kept(groups)
        groups.close()
        found["refused"] = refusals(groups)
        with patch.object(nccl_ep, "find_problem", lambda *_: None):
            for option, how in OPTIONS.items():
                both = (trained(name, placement()[0], **how) for name in ("nccl_ep", "alltoall"))
                found[option] = tuple(both)
    return found


def refusals(groups: EPGroups) -> dict[str, str]:
    """Return what is raised before any exchange."""
    place, found = placement()[1], {}
    pads = replace(CONFIG, capacity=CapacityConfig(factor=1.0, pad=True))
    cases = {
        "columns": (place, CONFIG, torch.zeros(4, 6)),
        "float64": (place, CONFIG, torch.zeros(4, 8, dtype=torch.float64)),
        "experts": (replace(place, num_experts=3), CONFIG, torch.zeros(4, 8)),
        "pad": (place, pads, torch.zeros(4, 8)),
    }
    fake.Group.calls.clear()
    for name, (where, config, x) in cases.items():
        ids = torch.zeros(4, K, dtype=torch.int32)
        pad = config.capacity is not None
        routing = Routing(
            expert_ids_TK=ids, weights_TK=torch.ones(4, K), chosen_ids_TK=ids, pad=pad
        )
        own = groups if name != "experts" else EPGroups(groups.group, 1)
        with pytest.raises(ValueError) as error:
            NCCLEPDispatcher(where, own).dispatch(x, routing)
        found[name] = str(error.value)
    assert not fake.Group.calls
    return found


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_ranks(6, worker)


def test_equals_alltoall(results: dict[str, Any]) -> None:
    """But for the order in which a rank adds a token's experts."""
    assert len(results["beside"]) == 8 and max(results["beside"].values()) < 2e-6, results["beside"]
    assert [key[2] for key in results["groups"]] == [64], "at most 8 tokens are one size"


def test_one_call_of_each_kind(results: dict[str, Any]) -> None:
    found, forward = results["calls"], {"update": 1, "dispatch": 1, "combine": 1}
    backward = {"backward dispatch": 1, "backward combine": 1}
    assert found["training"] == {"create": 1} | forward | backward
    assert found["evaluation"] == forward
    times = {name: 5 * n for name, n in forward.items()}
    assert found["dropped"] == times | dict.fromkeys(backward, 2)


def test_handles_are_used_again(results: dict[str, Any]) -> None:
    assert results["calls"]["handles"] == (1, 1)


def test_saves_what_meta_predicts(results: dict[str, Any]) -> None:
    predicted, saved = results["kept"]
    assert predicted == saved


@pytest.mark.parametrize("option", OPTIONS)
def test_trains_as_alltoall(results: dict[str, Any], option: str) -> None:
    found, expected = results[option]
    assert found == pytest.approx(expected, rel=2e-6)


def test_what_nccl_ep_would_assert_is_one_line(results: dict[str, Any]) -> None:
    ends = " with dispatcher ('nccl_ep'): use 'alltoall'"
    rows = "must be fp32, bf16 or fp16 and multiples of 16 bytes" + ends
    assert results["refused"] == {
        "columns": "rows (6 x torch.float32) " + rows,
        "float64": "rows (8 x torch.float64) " + rows,
        "experts": "experts of a domain (1, clones too) must be a multiple of 4" + ends,
        "pad": "CapacityConfig.pad (True) must be False" + ends,
    }


def gpu_worker(rank: int, device: torch.device) -> list[list[float]]:
    meshes = build_meshes(ParallelConfig(ep=2, edp_shard=1), "cuda")
    return [trained(name, meshes) for name in ("nccl_ep", "alltoall")]


@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_trains_as_alltoall_over_gpus() -> None:
    pytest.importorskip("nccl.ep", reason="it is in extra `nccl-ep`")
    found, expected = run_ranks(2, gpu_worker, device_type="cuda")
    assert found == pytest.approx(expected, rel=2e-5)


CORE = SimpleNamespace(get_version=lambda: SimpleNamespace(libnccl=SimpleNamespace(version=V[0])))
V = [Version("2.30.7")]


@pytest.mark.parametrize(
    ("capability", "version", "nvcc", "problem"),
    [
        ((9, 0), "2.30.7", "/nvcc", None),
        ((8, 0), "2.30.7", "/nvcc", "must have GPUs of capability 9.0 or later (here 8.0): use"),
        ((9, 0), "2.28.9", "/nvcc", "must have NCCL 2.30.7 or later loaded (here 2.28.9): pip"),
        ((9, 0), "2.30.7", "", "must find nvcc, which compiles its kernels at first use: set"),
        ((9, 0), None, "/nvcc", "must have nccl.ep (No module named 'nccl"),
    ],
)
def test_refusals_name_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    version: str | None,
    nvcc: str,
    problem: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setenv("NCCL_EP_JIT_NVCC", nvcc)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "nccl.ep", ModuleType("nccl.ep"))
    if version is not None:
        V[0] = Version(version)
        package = ModuleType("nccl")
        package.core = CORE  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "nccl", package)
        monkeypatch.setitem(sys.modules, "nccl.core", CORE)
    found = nccl_ep._local_problem("cuda")
    assert (found or "").startswith(problem or "") and bool(found) == bool(problem)
    assert (
        nccl_ep._local_problem("cpu") == "must go with device_type ('cpu') = 'cuda': use 'alltoall'"
    )
    assert os.environ["PATH"] == ""
