"""Muon and NorMuon on six ranks equal one process, copies to the bit; a nan changes nothing."""

import hashlib
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore import (
    ExpertLayout,
    LayerLayout,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.params import compute_global_indices
from moecore.base.torch_private import HAS_SEPARATE_PIECES, get_local_tensor
from moecore.io import latest, load, save
from moecore.models import Decoder, DecoderConfig
from moecore.train import AdamW, MatrixCut, Muon, QKClip, assign_matrices
from tests.helpers.grids import asked_for, beside
from tests.helpers.ranks import run_ranks

WORLD = 6
LAYOUTS = {
    "tp-model-dim": dict(dp_shard=3, tp=2, ep=2, edp_shard=3),
    "replicate-etp": dict(dp_replicate=2, dp_shard=3, ep=2, etp=3),
    "replicate3": dict(dp_replicate=3, dp_shard=2, edp_replicate=3, edp_shard=1, ep=2),
    "etp-strided": dict(dp_shard=6, edp_shard=3, etp=2),
}
BETA2 = {"tp-model-dim": 0.6, "replicate-etp": 0.6, "replicate3": None, "etp-strided": 0.6}
NIGHTLY = ["replicate-etp"]  # others have replicas, and etp
STORED = [
    ExpertLayout(),
    ExpertLayout(gate_up="concatenated"),
    ExpertLayout(gate_up="interleaved", transposed=True),
    ExpertLayout(gate_up="separate"),
]
MOE = MoEConfig(
    dim=36, hidden_dim=24, num_experts=4, top_k=2, shared_hidden_dim=10, num_shared_experts=1
)
SIZES = dict(vocab_size=60, dim=36, num_heads=4, num_kv_heads=2, head_dim=6, mlp_hidden_dim=30)
CONFIG = DecoderConfig(**SIZES, num_layers=1 + len(STORED), dense_layers=(0,), moe=MOE)
BY_GROUPS = MatrixCut(sizes=(4, 8), repeats=2)  # rows of a matrix that are no slice
STEPS = 2  # before a save, and after its load
TAU = 6.0


def make_model(device: str) -> Decoder:
    model = Decoder(CONFIG, device="meta")
    for layer, stored in zip(model.layers[1:], STORED, strict=True):
        config = MOE
        if stored == STORED[0]:
            config = replace(MOE, latent_dim=12)
        if stored.transposed:  # so many that FSDP2 leaves them whole
            config = replace(MOE, num_experts=12)
        layer.mlp = MoELayer(config, layout=LayerLayout(expert_layout=stored), device="meta")
    if device != "meta":
        model.to_empty(device=device)
        model.init_weights(3)
    return model


def make_sharded(name: str) -> tuple[Decoder, Any]:
    model, meshes = make_model("meta"), build_meshes(ParallelConfig(**LAYOUTS[name]), "cpu")
    parallelize_moe(model, meshes)
    model.to_empty(device="cpu")
    model.init_weights(3)
    return model, meshes


def optimizers_of(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    assignment = assign_matrices(model, (("model.layers.0.self_attn.q_proj.weight", BY_GROUPS),))
    muon = Muon(assignment, **{"lr": 2e-2, "ns_dtype": torch.float32, **options})
    return [muon, AdamW(assignment.adamw_params, lr=1e-2)]


def set_gradients(model: nn.Module, step: int) -> None:
    """The same gradient on every layout, whatever a forward would give."""
    for name, param in model.named_parameters():
        seed = int.from_bytes(hashlib.sha256(f"{step}{name}".encode()).digest()[:4], "little")
        grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
        if isinstance(param, DTensor):
            for dim, index in enumerate(compute_global_indices(param)):
                grad = grad.index_select(dim, index)
            place = (param.device_mesh, param.placements)
            sizes = dict(shape=param.shape, stride=param.stride())
            grad = DTensor.from_local(grad, *place, run_check=False, **sizes)
        param.grad = grad


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        for optimizer in optimizers:
            optimizer.step()


def whole(model: nn.Module) -> dict[str, Tensor]:
    params = {name: param.detach() for name, param in model.named_parameters()}
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in params.items()}


def local(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """This rank's weights and state."""
    names = {param: name for name, param in model.named_parameters()}
    found = dict(model.named_parameters())
    for optimizer in optimizers:
        for param, state in optimizer.state.items():
            found |= {f"{slot}/{names[param]}": value for slot, value in state.items()}
    return {name: get_local_tensor(t).detach().clone() for name, t in found.items()}


def copies_differ(model: nn.Module, muon: torch.optim.Optimizer) -> list[str]:
    """Parameters of which, or of whose states, two ranks hold different copies."""
    found = []
    for name, param in model.named_parameters():
        for tensor in (param, *muon.state.get(param, {}).values()):
            mesh = tensor.device_mesh
            for i, placement in enumerate(tensor.placements):
                if placement.is_replicate() and mesh.size(i) > 1:
                    mine = tensor.to_local().contiguous()
                    every = [torch.empty_like(mine) for _ in range(mesh.size(i))]
                    dist.all_gather(every, mine, group=mesh.get_group(i))
                    if not all(torch.equal(one, mine) for one in every):
                        found.append(name)
    return found


def run_skip(model: Decoder, meshes: Any) -> dict[str, Any]:
    """A nan gradient on one rank, then a good step that is clipped."""
    optimizers = optimizers_of(model, ns_dtype=torch.bfloat16, beta2=0.6)
    step = TrainStep(model, optimizers, max_norm=0.5)
    tokens = batch_of(meshes.data_rank)
    found: dict[str, Any] = {}
    for name, factor in (("good", 1.0), ("bad", 1.0), ("next", 1.0)):
        if name == "bad" and meshes.data_rank == 1:
            factor = float("nan")
        before = local(model, optimizers)
        with step.micro_batch():
            (factor * model(tokens[:, :-1], tokens[:, 1:])).backward()
        done, after = step.finish(), local(model, optimizers)
        same = before.keys() == after.keys() and all(
            torch.equal(before[key], after[key]) for key in before
        )
        flags = torch.tensor([same, bool(done.is_skipped)])
        every = [torch.empty_like(flags) for _ in range(WORLD)]
        dist.all_gather(every, flags)
        found[name] = torch.stack(every)
    return found


def run_qk_clip(model: Decoder, batches: list[Tensor]) -> dict[str, Tensor]:
    """Clip after one forward of the batches; return largest logits and all weights."""
    with torch.no_grad():  # heads differ
        for layer in model.layers:
            for param in (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight):
                rows = compute_global_indices(param)[0] // CONFIG.head_dim
                get_local_tensor(param).mul_(8.0 * (1 + rows)[:, None])
    clip = QKClip(model, tau=TAU)
    for tokens in batches:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    clip.step()
    return {**clip.max_scores, **whole(model)}


def facts_of(model: Decoder, muon: Muon) -> dict[str, Any]:
    """What a step sends and computes: exchanges of one step, and the cost of each rank's own."""
    (plan,) = muon._plans.values()
    set_gradients(model, STEPS)
    with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sent:
        muon.step()
    costs = [[cost_of(shape[1:])] * shape[0] for _, one in plan.rounds for shape in one.owned]
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, [cost for some in costs for cost in some])
    return {"alone": len(plan.local_blocks), "exchanges": sent.call_count, "costs": every}


def cost_of(shape: tuple[int, ...]) -> int:
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def batch_of(data_rank: int) -> Tensor:
    return torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(data_rank))


def begin_again(model: Decoder) -> None:
    model.zero_grad()
    model.init_weights(3)


def worker(rank: int, device: torch.device, folder: str, asked: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    names = [n for n in asked if HAS_SEPARATE_PIECES or "etp" not in n]
    made = {name: make_sharded(name) for name in names}
    for name in names:
        model, _ = made[name]
        optimizers = optimizers_of(model, beta2=BETA2[name])
        train(model, optimizers, range(STEPS))
        save(f"{folder}/{name}", 1, model, optimizers)
        found[name] = {"whole": whole(model), "differ": copies_differ(model, optimizers[0])}
        found[name] |= facts_of(model, optimizers[0])
    for i, name in enumerate(names):  # goes on in another layout
        other, _ = made[names[i - 1]]
        others = optimizers_of(other, beta2=BETA2[name])
        load(latest(f"{folder}/{name}"), other, others)
        train(other, others, range(STEPS, 2 * STEPS))
        found[name]["resumed"] = whole(other)
    model, meshes = made["tp-model-dim"]
    begin_again(model)
    found["skip"] = run_skip(model, meshes)
    begin_again(model)
    found["qk_clip"] = run_qk_clip(model, [batch_of(meshes.data_rank)])
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    names = dict.fromkeys([*asked_for(request, "name"), "tp-model-dim", "replicate3"])
    return run_ranks(WORLD, worker, str(tmp_path_factory.mktemp("saved")), [*names])


@pytest.fixture(scope="module")
def expected() -> dict[tuple[float | None, str], dict[str, Tensor]]:
    """Weights of one process after as many steps, and after twice as many."""
    found = {}
    for beta2 in set(BETA2.values()):
        model = make_model("cpu")
        optimizers = optimizers_of(model, beta2=beta2)
        for i, when in enumerate(("whole", "resumed")):
            train(model, optimizers, range(i * STEPS, (i + 1) * STEPS))
            found[beta2, when] = {name: tensor.clone() for name, tensor in whole(model).items()}
    return found


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("when", ["whole", "resumed"])
def test_ranks_equal_one_process(name, when, results, expected) -> None:
    if name not in results:
        pytest.skip("strided shards need torch 2.13")
    assert results[name]["differ"] == [], "copies have equal bits"
    want = expected[BETA2[name], when]
    assert results[name][when].keys() == want.keys()
    for key, tensor in results[name][when].items():
        torch.testing.assert_close(tensor, want[key], rtol=1e-5, atol=1e-5, msg=key)


def test_whole_experts_stay_where_they_are(results: Any) -> None:
    assert results["tp-model-dim"]["alone"] == 2  # FC1 and FC2 of twelve experts
    assert results["replicate3"]["alone"] == 0  # copies get what one of them computes


@pytest.mark.parametrize("name", beside(LAYOUTS, NIGHTLY))
def test_a_step_has_so_many_exchanges_and_ranks_compute_alike(name: str, results: Any) -> None:
    if name not in results:
        pytest.skip("strided shards need torch 2.13")
    assert results[name]["exchanges"] == (2 if BETA2[name] is None else 4)
    costs = results[name]["costs"]
    loads, largest = [sum(one) for one in costs], max(map(max, costs))
    assert max(loads) <= sum(loads) / WORLD + largest


def test_a_nan_leaves_everything_as_it_was(results: Any) -> None:
    is_same, is_skipped = results["skip"]["bad"].T
    assert is_same.all() and is_skipped.all()
    for name in ("good", "next"):
        is_same, is_skipped = results["skip"][name].T
        assert not is_same.any() and not is_skipped.any()


def test_qk_clip_equals_one_process(results: Any) -> None:
    want = run_qk_clip(make_model("cpu"), [batch_of(i) for i in range(3)])
    got = results["qk_clip"]
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        torch.testing.assert_close(got[key], tensor, rtol=1e-5, atol=1e-5, msg=key)
    clipped = torch.cat([value for name, value in want.items() if name.endswith("self_attn")]) > TAU
    assert clipped.any() and not clipped.all()
