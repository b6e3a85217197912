"""Dispatcher "nccl_ep" over a stand-in of NCCL EP: its calls, and decoders beside all-to-all."""

import gc
import os
import sys
from collections import Counter
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from moecore import (
    CapacityConfig,
    CloneOptions,
    DispatchOptions,
    MemoryOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.models import Decoder, preset
from moecore.moe.dispatch import nccl_ep
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.nccl_ep import EPGroups, NCCLEPDispatcher
from moecore.moe.records import Routing
from moecore.train import AdamW
from tests.helpers.ranks import ranks_fixture, run_ranks
from tests.moe import fake_nccl_ep as fake
from tests.moe.dispatchers import PLAIN, E, gradients, local_tokens, placed, sharded_layer

pytestmark = pytest.mark.slow

EP, LAYOUT, K = 3, "ep3-edp2", 3  # of 6 ranks, so two groups


def in_chunks() -> tuple[list[tuple[int, int, int]], float]:
    """Return the groups that forwards of several calls make, and the worst difference."""
    _, place = placed(EP, 1)
    xs = local_tokens((60, 90, 120, 150, 180, 210))
    groups = EPGroups(place.group, 6)
    found, expected = (
        gradients(sharded_layer(PLAIN, d, LAYOUT), xs)
        for d in (NCCLEPDispatcher(place, groups), AllToAllDispatcher(place))
    )
    worst = max(
        float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3)
        for a, b in zip(found, expected, strict=True)
    )
    made = sorted(groups._groups)
    groups.close()
    return made, worst


def calls(groups: EPGroups) -> dict[str, Any]:
    """Return what is called, and how many handles there are, after forwards of all kinds."""
    layer = sharded_layer(PLAIN, NCCLEPDispatcher(placed(EP, 1)[1], groups), LAYOUT)
    found: dict[str, Any] = {}

    def run(name: str, num_backwards: int, num_forwards: int = 1) -> None:
        fake.Group.calls.clear()
        for i in range(num_forwards):
            y = layer(local_tokens((8,) * 6)[0].requires_grad_())
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


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": dict(memory=MemoryOptions(recompute=("moe",))),
    "clones": dict(clones=CloneOptions(per_rank=4)),
}


def trained(dispatcher, meshes, *, clones=None, **options) -> list[float]:
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
        found += [float(losses.mean()), float(done.norm.total)]
    step.close()
    return found


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    with fake.installed():
        meshes, place = placed(EP, 1)
        with patch.object(nccl_ep, "MAX_TOKENS", 64):
            found: dict[str, Any] = {"chunks": in_chunks()}
        groups = EPGroups(place.group, 6)
        found["calls"] = calls(groups)
        groups.close()
        found["refused"] = refusals(groups)
        with patch.object(nccl_ep, "find_nccl_ep_problem", lambda *_: None):
            for option, how in OPTIONS.items():
                both = (trained(name, meshes, **how) for name in ("nccl_ep", "alltoall"))
                found[option] = tuple(both)
    return found


def refusals(groups: EPGroups) -> dict[str, str]:
    """Return what is raised before any exchange."""
    place, found = placed(EP, 1)[1], {}
    pads = replace(PLAIN, capacity=CapacityConfig(factor=1.0, pad=True))
    cases = {
        "columns": (place, PLAIN, torch.zeros(4, 6)),
        "float64": (place, PLAIN, torch.zeros(4, 8, dtype=torch.float64)),
        "experts": (replace(place, num_experts=3), PLAIN, torch.zeros(4, 8)),
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


results = ranks_fixture(6, worker)


def test_chunks_equal_alltoall(results: dict[str, Any]) -> None:
    """Except for the order in which a rank adds a token's experts."""
    groups, worst = results["chunks"]
    assert [num_tokens for *_, num_tokens in groups] == [64] and worst < 2e-6


def test_one_call_of_each_kind(results: dict[str, Any]) -> None:
    found, forward = results["calls"], {"update": 1, "dispatch": 1, "combine": 1}
    backward = {"backward dispatch": 1, "backward combine": 1}
    assert found["training"] == {"create": 1} | forward | backward
    assert found["evaluation"] == forward
    times = {name: 5 * n for name, n in forward.items()}
    assert found["dropped"] == times | dict.fromkeys(backward, 2)


def test_handles_are_used_again(results: dict[str, Any]) -> None:
    assert results["calls"]["handles"] == (1, 1)


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
def test_refusals_name_what_is_missing(monkeypatch, capability, version, nvcc, problem) -> None:
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
    found = nccl_ep._find_local_nccl_ep_problem("cuda")
    assert (found or "").startswith(problem or "") and bool(found) == bool(problem)
    assert (
        nccl_ep._find_local_nccl_ep_problem("cpu")
        == "must go with device_type ('cpu') = 'cuda': use 'alltoall'"
    )
    assert os.environ["PATH"] == ""
