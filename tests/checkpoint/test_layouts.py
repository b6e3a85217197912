"""What one layout saves, every other loads bit for bit: parameters, moments, buffers, generators.

The oracle reads local shards through `global_indices` and puts them together itself, so it shares
nothing with torch.distributed.checkpoint or with DTensor's own redistribution.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moecore import BalanceConfig, MoEConfig, ParallelConfig, build_meshes, parallelize_moe
from moecore._compat import HAS_SEPARATE_PIECES
from moecore.checkpoint import load, save
from moecore.models import Decoder, DecoderConfig
from moecore.moe.experts import ExpertLayout
from moecore.moe.layer import LayerLayout, MoELayer
from moecore.moe.params import global_indices
from moecore.moe.state import MoEState
from moecore.parallelize import moe_state
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow
WORLD = 4
LAYOUTS = {
    "ep2-etp2": ParallelConfig(ep=2, etp=2),
    "ep4": ParallelConfig(ep=4),
    "dp": ParallelConfig(),
    "etp4": ParallelConfig(etp=4),
    "ep2-edp2": ParallelConfig(ep=2, edp_shard=2),
    "edp2-etp2": ParallelConfig(edp_shard=2, etp=2),
    "tp2-ep2-replicate2": ParallelConfig(tp=2, ep=2, edp_replicate=2, edp_shard=1),
}
CONFIG = DecoderConfig(
    vocab_size=64,
    dim=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_embeddings=True,
    dense_layers=(0,),
    mlp_hidden_dim=48,
    moe=MoEConfig(
        dim=32,
        hidden_dim=16,
        num_experts=4,
        top_k=2,
        fc1_bias=True,
        fc2_bias=True,
        expert_bias=True,
        shared_hidden_dim=16,
        balance=BalanceConfig(bias_update_rate=1e-3),
    ),
)


# Gate above up in one dim, as Hugging Face models keep them: strided under etp, stored as a view.
CONCATENATED = LayerLayout(expert_layout=ExpertLayout(gate_up="concatenated"))
CONCATENATED_CONFIG = replace(CONFIG, moe=replace(CONFIG.moe, fc1_bias=False))
RUNS = [("native", name) for name in LAYOUTS]
STRIDED = ("ep2-etp2", "etp4", "edp2-etp2") if HAS_SEPARATE_PIECES else ()
RUNS += [("concatenated", name) for name in ("dp", "ep4", *STRIDED)]
PAIRS = [(kind, a, b) for kind, a in RUNS for other, b in RUNS if kind == other]


def make_model(kind: str, device: str) -> Decoder:
    if kind == "native":
        return Decoder(CONFIG, device=device)
    model = Decoder(CONCATENATED_CONFIG, device="meta")
    for layer in model.layers:
        if isinstance(layer.mlp, MoELayer):
            layer.mlp = MoELayer(CONCATENATED_CONFIG.moe, layout=CONCATENATED, device="meta")
    return model if device == "meta" else model.to_empty(device=device)


def build(kind: str, parallel: ParallelConfig, seed: int) -> tuple[Decoder, torch.optim.AdamW]:
    model = make_model(kind, "meta")
    parallelize_moe(model, build_meshes(parallel, "cpu"))
    model.to_empty(device="cpu")
    model.init_weights(seed)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))


def train(model: Decoder, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    state: MoEState = moe_state(model)
    for _ in range(steps):
        tokens_BT = torch.randint(0, 64, (2, 17), generator=generator)
        model(tokens_BT[:, :-1], tokens_BT[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        state.finish_step()


def snapshot(model: Decoder, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Put every global tensor together from all ranks' shards, in one exchange."""
    mine: dict[str, tuple[torch.Size, list[Tensor], Tensor]] = {}
    for name, param in model.named_parameters():
        tensors = {name: param, **{f"{k}/{name}": v for k, v in optimizer.state[param].items()}}
        for key, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            mine[key] = (tensor.shape, global_indices(tensor), local.detach())
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    found = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for key, (shape, _, local) in mine.items():
        found[key] = torch.full(shape, float("nan"), dtype=local.dtype)
        for _, indices, part in (rank_parts[key] for rank_parts in parts):
            found[key][torch.meshgrid(*indices, indexing="ij") if indices else ...] = part
    return found


def worker(rank: int, device: torch.device, root: str) -> dict[Any, Any]:
    results: dict[Any, Any] = {"continued": continued(root, rank)}
    paths, draws, models = {}, {}, {}
    for run in RUNS:
        model, optimizer = models[run] = build(run[0], LAYOUTS[run[1]], seed=1)
        train(model, optimizer, steps=2, seed=rank)
        results[run] = snapshot(model, optimizer)
        torch.manual_seed(100 + rank)
        extra = {"step": 2, "note": [1, "two"], "numbers": torch.arange(5.0)}
        paths[run] = save(Path(root, *run), 2, model, optimizer, extra)
        draws[run] = torch.rand(3)
    for kind, saver, loader in PAIRS:
        model, optimizer = models[kind, loader]
        model.init_weights(2)
        optimizer.state.clear()
        optimizer.param_groups[0]["lr"] = 7.0
        torch.manual_seed(0)
        extra = load(paths[kind, saver], model, optimizer)
        before, after = results[kind, saver], snapshot(model, optimizer)
        group = optimizer.param_groups[0]
        results[kind, saver, loader] = {
            "missing": sorted(before.keys() ^ after.keys()),
            "wrong": [n for n in before if not torch.equal(before[n], after[n])],
            "rng": all_ranks(torch.equal(draws[kind, saver], torch.rand(3))),
            "extra": extra,
            "group": (group["lr"], group["betas"]),
        }
    return results


def all_ranks(value: bool) -> bool:
    values = [False] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(values)


def continued(root: str, rank: int) -> list[str]:
    """Return what differs after two steps from a checkpoint, against never having stopped."""
    model, optimizer = build("native", LAYOUTS["ep2-etp2"], seed=1)
    train(model, optimizer, steps=2, seed=rank)
    with torch.no_grad():  # leaves the root unit's parameters gathered
        model(torch.zeros(1, 16, dtype=torch.int64))
    path = save(Path(root) / "continued", 2, model, optimizer, {})
    train(model, optimizer, steps=2, seed=10 + rank)
    straight = snapshot(model, optimizer)
    model, optimizer = build("native", LAYOUTS["ep2-etp2"], seed=5)
    load(path, model, optimizer)
    train(model, optimizer, steps=2, seed=10 + rank)
    resumed = snapshot(model, optimizer)
    return [n for n in straight if not torch.equal(straight[n], resumed[n])]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def results(root: Path) -> dict[Any, Any]:
    return run_ranks(WORLD, worker, str(root))


@pytest.mark.parametrize("pair", PAIRS, ids="-to-".join)
def test_every_layout_loads_what_another_saved(
    results: dict[Any, Any], pair: tuple[str, str, str]
) -> None:
    result = results[pair]
    assert result["missing"] == [] and result["wrong"] == []
    assert result["rng"], "generator states"
    assert result["group"] == (1e-2, (0.9, 0.95))
    assert result["extra"]["step"] == 2 and result["extra"]["note"] == [1, "two"]
    assert torch.equal(result["extra"]["numbers"], torch.arange(5.0))


def test_resumed_steps_equal_uninterrupted_ones(results: dict[Any, Any]) -> None:
    assert results["continued"] == []


def test_expert_bias_is_kept(results: dict[Any, Any]) -> None:
    name = "model.layers.1.mlp.router.expert_bias"
    assert results["native", "ep4"][name].abs().sum() > 0


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_plain_model_in_one_process_loads_it(
    results: dict[Any, Any], root: Path, run: tuple[str, str]
) -> None:
    model = make_model(run[0], "cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    load(root.joinpath(*run, "step-000002"), model, optimizer)
    for name, param in model.named_parameters():
        assert torch.equal(param, results[run][name]), name
        assert torch.equal(optimizer.state[param]["exp_avg"], results[run][f"exp_avg/{name}"]), name
