"""What one layout saves, every other loads bit for bit, on more or fewer ranks, and trains on.

The oracle cuts each rank's shards out of whole tensors through `global_indices`, so it shares
nothing with torch.distributed.checkpoint or with DTensor's own redistribution. Every layout is put
into the same state that way, saves it, and takes one step from it. What it loads from another
layout's checkpoint must then be that state, and the next step from there must be that step.
"""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moecore import BalanceConfig, MoEConfig, ParallelConfig, build_meshes, parallelize_moe
from moecore.base.rank_checks import gather_objects
from moecore.base.torch_private import HAS_SEPARATE_PIECES
from moecore.io import load, read_manifest, save
from moecore.models import Decoder, DecoderConfig
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.layer import LayerLayout, MoELayer
from moecore.parallel.model.parallel_state import get_moe_state, get_request
from tests.helpers.grids import asked_for
from tests.helpers.ranks import run_ranks
from tests.parallel.pipeline.stages import local, shard_of

pytestmark = pytest.mark.slow
# Name -> number of ranks and degrees; None = a plain model without any mesh.
LAYOUTS: dict[str, tuple[int, ParallelConfig | None]] = {
    "plain": (1, None),
    "one": (1, ParallelConfig()),
    "two-dp": (2, ParallelConfig()),
    "two-ep2": (2, ParallelConfig(ep=2)),
    "two-tp2-etp2": (2, ParallelConfig(tp=2, etp=2)),
    "ep2-etp2": (4, ParallelConfig(ep=2, etp=2)),
    "ep4": (4, ParallelConfig(ep=4)),
    "dp": (4, ParallelConfig()),
    "etp4": (4, ParallelConfig(etp=4)),
    "ep2-edp2": (4, ParallelConfig(ep=2, edp_shard=2)),
    "edp2-etp2": (4, ParallelConfig(edp_shard=2, etp=2)),
    "tp2-ep2-replicate2": (4, ParallelConfig(tp=2, ep=2, edp_replicate=2, edp_shard=1)),
    "replicate2-ep2": (4, ParallelConfig(dp_replicate=2, ep=2)),
}
CONFIG = DecoderConfig(
    vocab_size=64,
    dim=32,
    num_layers=2,
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
STRIDED = ("ep2-etp2", "etp4", "edp2-etp2") if HAS_SEPARATE_PIECES else ()
RUNS = {"native": tuple(LAYOUTS), "concatenated": ("one", "dp", "ep4", *STRIDED)}


def pairs_of(kind: str) -> list[tuple[str, str, str]]:
    """(kind, from, to): each layout loads from two others, at distances 1 and 5 in a ring.

    Those at distance 5 are for `make nightly`: each layout is loaded, and loads, at distance 1.
    """
    names = RUNS[kind]
    shifts = dict.fromkeys((1, 5 % len(names)))
    return [(kind, names[(i + s) % len(names)], to) for s in shifts for i, to in enumerate(names)]


PAIRS = [pair for kind in RUNS for pair in pairs_of(kind)]
State = dict[str, Tensor]
WORLDS = (1, 2, 4)


def make_model(kind: str, device: str) -> Decoder:
    if kind == "native":
        return Decoder(CONFIG, device=device)
    model = Decoder(CONCATENATED_CONFIG, device="meta")
    for layer in model.layers:
        if isinstance(layer.mlp, MoELayer):
            layer.mlp = MoELayer(CONCATENATED_CONFIG.moe, layout=CONCATENATED, device="meta")
    return model if device == "meta" else model.to_empty(device=device)


def build(kind: str, name: str) -> tuple[Decoder, torch.optim.AdamW]:
    parallel, model = LAYOUTS[name][1], make_model(kind, "meta")
    if parallel is not None:
        parallelize_moe(model, build_meshes(parallel, "cpu"))
    model.to_empty(device="cpu")
    model.init_weights(7)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), fused=True)


def train(model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    request = get_request(model)  # None = plain
    generator = torch.Generator().manual_seed(50 + (request.meshes.data_rank if request else 0))
    tokens_BT = torch.randint(0, 64, (2, 17), generator=generator)
    model(tokens_BT[:, :-1], tokens_BT[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()
    if isinstance(next(model.parameters()), DTensor):
        get_moe_state(model).finish_step()


def whole_state(kind: str) -> State:
    """A state like that of a model in training, as whole tensors."""
    generator = torch.Generator().manual_seed(3)
    model = make_model(kind, "cpu")
    state: State = {}
    for name, param in model.named_parameters():
        state[name] = torch.randn(param.shape, generator=generator) * 0.1
        state[f"exp_avg/{name}"] = torch.randn(param.shape, generator=generator) * 0.01
        state[f"exp_avg_sq/{name}"] = torch.rand(param.shape, generator=generator) * 0.01
        state[f"step/{name}"] = torch.tensor(2.0)
    for name, buffer in model.named_buffers():
        if name in model.state_dict():
            state[name] = torch.rand(buffer.shape, generator=generator) * 0.01
    return state


def mine_of(model: Decoder, optimizer: torch.optim.Optimizer) -> State:
    """This rank's tensors under the names of `whole_state`, with moments made if there are none."""
    found: State = dict(model.named_parameters())
    for name, param in model.named_parameters():
        slots = optimizer.state[param]
        if not slots:
            slots["step"] = torch.tensor(0.0)
            slots |= {slot: torch.zeros_like(param) for slot in ("exp_avg", "exp_avg_sq")}
        found |= {f"{slot}/{name}": value for slot, value in slots.items()}
    kept = model.state_dict()
    return found | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def put(state: State, model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    for name, tensor in mine_of(model, optimizer).items():
        local(tensor).copy_(shard_of(state[name], tensor))


def locals_of(model: Decoder, optimizer: torch.optim.Optimizer) -> State:
    return {name: local(t).clone() for name, t in mine_of(model, optimizer).items()}


def differing(found: State, wanted: State) -> list[str]:
    names = found.keys() ^ wanted.keys()
    names |= {n for n in found.keys() & wanted.keys() if not torch.equal(found[n], wanted[n])}
    return sorted(names)


def save_all(root: Path, rank: int, world: int) -> dict[Any, Any]:
    """Put every layout of this world size into the state, save it, and take a step from it."""
    kept = {}
    for kind, names in RUNS.items():
        whole = whole_state(kind)
        for name in names:
            if LAYOUTS[name][0] != world:
                continue
            model, optimizer = build(kind, name)
            put(whole, model, optimizer)
            before = locals_of(model, optimizer)
            if name == "ep2-etp2":
                with torch.no_grad():  # leaves the root unit's parameters gathered
                    model(torch.zeros(1, 16, dtype=torch.int64))
            torch.manual_seed(100 + rank)
            extra = {"step": 2, "note": [1, "two"], "numbers": torch.arange(5.0)}
            save(root / kind / name, 2, model, optimizer, extra)
            train(model, optimizer)
            kept[kind, name] = (model, optimizer, before, locals_of(model, optimizer))
    return kept


def load_all(root, rank, world, kept, pairs):
    results = {}
    for kind, source, target in pairs:
        if LAYOUTS[target][0] != world:
            continue
        model, optimizer, before, after = kept[kind, target]
        for param in model.parameters():
            local(param).fill_(float("nan"))
        for buffer in model.buffers():
            buffer.fill_(7)
        optimizer.state.clear()
        optimizer.param_groups[0]["lr"] = 7.0
        torch.manual_seed(0)
        extra = load(root / kind / source / "step-000002", model, optimizer, verify="sizes")
        draw = torch.rand(3)
        torch.manual_seed(100 + rank if rank < LAYOUTS[source][0] else 0)
        wrong = differing(locals_of(model, optimizer), before)
        rng = torch.equal(draw, torch.rand(3))
        train(model, optimizer)
        stepped = differing(locals_of(model, optimizer), after)
        group = optimizer.param_groups[0]
        results[kind, source, target] = {
            "wrong": all_ranks(wrong),
            "stepped": all_ranks(stepped),
            "rng": all_ranks([] if rng else ["rng"]),
            "extra": extra,
            "group": (group["lr"], group["betas"]),
        }
    return results


def all_ranks(names: list[str]) -> list[str]:
    return [name for part in gather_objects(names) for name in part]


def worker(rank, device, folder, pairs):
    """Save all layouts of this world size, wait for the other worlds, load what they saved."""
    root, world = Path(folder), dist.get_world_size()
    kept = save_all(root, rank, world)
    dist.barrier()
    (root / f"saved-{world}").touch()
    deadline = time.monotonic() + 300
    while not all((root / f"saved-{size}").exists() for size in WORLDS):
        assert time.monotonic() < deadline, "another world has failed"
        time.sleep(0.05)
    return load_all(root, rank, world, kept, pairs)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def results(root: Path, request: pytest.FixtureRequest) -> dict[Any, Any]:
    pairs = asked_for(request, "pair")
    with ThreadPoolExecutor(len(WORLDS)) as pool:
        parts = pool.map(lambda world: run_ranks(world, worker, str(root), pairs), WORLDS)
        return {pair: result for part in parts for pair, result in part.items()}


@pytest.mark.parametrize("pair", PAIRS, ids="-to-".join)
def test_every_layout_loads_what_another_saved(results, pair):
    result = results[pair]
    assert result["wrong"] == []
    assert result["stepped"] == [], "the next training step"
    assert result["rng"] == [], "generator states"
    assert result["group"] == (1e-2, (0.9, 0.95))
    assert result["extra"]["step"] == 2 and result["extra"]["note"] == [1, "two"]
    assert torch.equal(result["extra"]["numbers"], torch.arange(5.0))


def test_manifest_knows_the_layout(results: dict[Any, Any], root: Path) -> None:
    facts = read_manifest(root / "native" / "ep2-etp2" / "step-000002").facts
    assert facts.world_size == 4 and {"dp_shard": 4} in facts.meshes
    assert any(mesh.get("ep") == 2 and mesh.get("etp") == 2 for mesh in facts.meshes)
    assert read_manifest(root / "native" / "plain" / "step-000002").facts.meshes == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_is_written_twice(results: dict[Any, Any], root: Path, name: str) -> None:
    path = root / "native" / name / "step-000002"
    manifest = read_manifest(path)
    kept = {n: t for n, t in manifest.tensors.items() if n.startswith(("model.", "optimizer."))}
    assert sum(math.prod(t.shape) * t.dtype.itemsize for t in kept.values()) == sum(
        tensor.nbytes for tensor in whole_state("native").values()
    )
    files = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    headers = 16_384 * len(manifest.files)
    assert files == manifest.num_bytes
    assert files < sum(t.nbytes for t in whole_state("native").values()) + headers
