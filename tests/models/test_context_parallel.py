"""Decoders over cp ranks against one process: packed documents, latents, prediction ahead.

Four ranks are spawned once. Every case compares the losses of each data rank, those of the
modules ahead, every gradient, the experts' counts and the weights after a step of SGD. In some
`QKClip` clips, and they take two steps.
`tests/test_parity.py` has compositions of degrees with AdamW, clipping and other routers.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecore import (
    CapacityConfig,
    ContextOptions,
    IndexerConfig,
    MemoryOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.rank_checks import gather_objects
from moecore.families.family import ProtocolFamily
from moecore.models import Decoder, DecoderConfig, SparseKeysConfig
from moecore.moe.aux_loss import list_aux_losses
from moecore.moe.layer import MoELayer
from moecore.train import QKClip
from moecore.train.memory.offload import Offload
from tests.helpers.parts import on_parts
from tests.helpers.ranks import ranks_fixture
from tests.helpers.whole import gather_whole
from tests.models.test_mtp import CONFIGS, HYBRID, make

pytestmark = pytest.mark.slow

LATENT, GROUPED = CONFIGS["latent, 1"], CONFIGS["grouped, tied, dense, 1"]
WINDOWED, LINEAR = CONFIGS["windows, sinks, biases, 1"], CONFIGS["linear, gates, 1"]
LATENT = replace(LATENT, num_heads=8, num_kv_heads=8)
SPARSE_KEYS = SparseKeysConfig(num_heads=16, head_dim=12, top_k=6)
SPARSE = replace(LATENT, mla=replace(LATENT.mla, sparse=SPARSE_KEYS))  # type: ignore[type-var]
DROPS = CapacityConfig(factor=1.1, drop="position")
STEPS, WORLD = 2, 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """Degrees of four ranks, a model, and how attention communicates."""

    parallel: dict[str, int]
    config: DecoderConfig = LATENT
    way: str = "auto"
    a2a_ranks: int | None = None
    packed: bool = True
    loss: str = "mean"
    tau: float | None = None  # of a QKClip
    memory: MemoryOptions | None = None
    indexer: IndexerConfig | None = None

    @property
    def steps(self) -> int:
        """Two where something outlives a step: clipped weights, buffers on the host."""
        return STEPS if self.tau is not None or self.memory is not None else 1


def dropping(config: DecoderConfig) -> DecoderConfig:
    assert config.moe is not None
    return replace(config, moe=replace(config.moe, capacity=DROPS))


PLAIN = replace(GROUPED, qk_norm=None)
OFFLOADED = MemoryOptions(recompute="gemm_last", offload=("attention", "experts", "rest"))
QUERIES = MemoryOptions(recompute=("norm", "rope", "qkv_proj"))
CASES = {
    "latents gathered": Case(
        parallel=dict(cp=4, ep=2),
        packed=False,
        memory=MemoryOptions(recompute=("norm", "mla_up_proj")),
    ),
    "latents gathered, packed": Case(parallel=dict(cp=2, ep=2, etp=2), tau=4.0),
    "latents gathered over tp": Case(
        parallel=dict(cp=2, tp=2, ep=4), config=replace(LATENT, hash_layers=1), loss="sum"
    ),
    "latents, ring": Case(parallel=dict(cp=2, ep=2, etp=2), way="p2p", loss="sum"),
    "latents, heads": Case(
        parallel=dict(cp=2, tp=2, ep=2, etp=2), way="a2a", config=dropping(LATENT)
    ),
    "latents, both": Case(parallel=dict(cp=4, ep=4), way="a2a+p2p", a2a_ranks=2),
    "grouped, gathered": Case(
        parallel=dict(dp_replicate=2, cp=2, ep=2), config=GROUPED, way="allgather"
    ),
    "grouped, auto": Case(parallel=dict(cp=4, ep=2, etp=2), config=dropping(GROUPED)),
    "grouped, heads": Case(parallel=dict(cp=2, ep=4), config=PLAIN, way="a2a", tau=3.0),
    "grouped, both": Case(
        parallel=dict(cp=4, ep=4), config=GROUPED, way="a2a+p2p", packed=False, loss="sum"
    ),
    "grouped, ring": Case(
        parallel=dict(cp=2, tp=2, ep=4), config=dropping(GROUPED), way="p2p", memory=QUERIES
    ),
    "grouped, ring, clipped": Case(
        parallel=dict(cp=2, tp=2, etp=2), config=PLAIN, way="p2p", tau=3.0, memory=OFFLOADED
    ),
    "window, gathered": Case(parallel=dict(cp=2, tp=2, ep=2), config=WINDOWED, way="allgather"),
    "window, heads": Case(parallel=dict(cp=2, ep=4), config=WINDOWED, way="a2a"),
    "window, ring": Case(parallel=dict(cp=4, ep=4), config=WINDOWED, way="p2p", packed=False),
    "window, both": Case(parallel=dict(cp=4, ep=2), config=WINDOWED, way="a2a+p2p"),
    "sparse": Case(parallel=dict(cp=2, ep=2, etp=2), config=SPARSE, indexer=IndexerConfig()),
    "sparse over tp": Case(parallel=dict(cp=2, tp=2, ep=2), config=SPARSE, loss="sum"),
    "linear": Case(parallel=dict(cp=2, ep=2, etp=2), config=LINEAR, packed=False),
    "linear over tp": Case(parallel=dict(cp=2, tp=2, ep=2), config=LINEAR, loss="sum"),
    "hybrid over tp": Case(parallel=dict(cp=2, tp=2, ep=4), config=HYBRID, loss="sum"),
}


def batch_of(case: Case, data_rank: int, step: int) -> dict[str, Any]:
    """Return the arguments of a forward, of another length for each data rank."""
    g = torch.Generator().manual_seed(100 * step + data_rank)
    T = 32 + 16 * data_rank
    text = torch.randint(0, case.config.vocab_size, (2, T + 1), generator=g)
    labels = text[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=g) < 0.2] = -100
    mask = torch.zeros(2, T, dtype=torch.bool)
    mask[1, -5:] = True
    labels[mask] = -100
    options: dict[str, Any] = dict(padding_mask_BT=mask)
    if case.packed:  # the third crosses the rows
        ends = [8, 24, T + 8, T + 8, 2 * T]
        options["cu_seqlens"] = torch.tensor([0, *ends])
    return dict(tokens_BT=text[:, :-1], labels_BT=labels, **options)


def counts_of(model: Decoder) -> dict[str, Tensor]:
    layers = {n: m for n, m in model.named_modules() if isinstance(m, MoELayer)}
    return {n: m.tracker.counts.choices_E.clone() for n, m in layers.items()}


def data_ranks_of(case: Case) -> int:
    return WORLD // (case.parallel["cp"] * case.parallel.get("tp", 1))


def alone(case: Case) -> Case:
    """Return the case with what decides the results of one process alone."""
    return Case(
        parallel=dict(cp=WORLD // data_ranks_of(case)),
        config=case.config,
        packed=case.packed,
        loss=case.loss,
        tau=case.tau,
        indexer=case.indexer,
    )


def all_expected(chosen: list[Case]) -> list[tuple[Case, dict[str, Tensor]]]:
    """Return what one process gives for every case; each rank computes some."""
    every = [(alone(case), case.steps) for case in chosen]
    cases = [case for i, (case, _) in enumerate(every) if case not in [c for c, _ in every[:i]]]
    own = [
        (case, expected(case, max(steps for other, steps in every if other == case)))
        for case in cases[dist.get_rank() :: WORLD]
    ]
    return [one for found in gather_objects(own) for one in found]


def expected(case: Case, num_steps: int) -> dict[str, Tensor]:
    """Return what one process gives, data rank after data rank."""
    model, found, data_ranks = make(case.config), {}, data_ranks_of(case)
    clip = None if case.tau is None else QKClip(model, case.tau)
    if case.indexer is not None:
        ProtocolFamily().add_indexer_losses(model, case.indexer)
    for step in range(num_steps):
        batches = [batch_of(case, r, step) for r in range(data_ranks)]
        counts: dict[str, Any] = defaultdict(int)
        for rank, batch in enumerate(batches):
            loss = model(**batch, num_tokens=num_tokens(case, batches))
            scale = 1 / data_ranks
            for layer in model.modules():
                if isinstance(layer, MoELayer):
                    layer.tracker.reset()
                    layer.tracker.gradient_scale = scale
            for aux_loss in list_aux_losses(model).values():
                aux_loss.gradient_scale = scale
            (loss * (scale if case.loss == "mean" else 1.0)).backward()
            for name, count in counts_of(model).items():
                counts[name] = counts[name] + count
            found[f"{step}: loss of {rank}"] = loss.detach()
            if model.mtp_losses is not None:
                found[f"{step}: ahead of {rank}"] = model.mtp_losses
        update(model, found, step, clip)
        found |= {f"{step}: counts of {n}": c.double() for n, c in counts.items()}
    return found


def num_tokens(case: Case, batches: list[dict[str, Any]]) -> int | None:
    return sum(int((b["labels_BT"] != -100).sum()) for b in batches) if case.loss == "sum" else None


def update(model: Decoder, found: dict[str, Tensor], step: int, clip: QKClip | None = None) -> None:
    """Step by SGD and clip; note gradients before and weights after, on ranks each its part."""
    for name, param in model.named_parameters():
        if param.grad is None:
            assert ".indexer." in name
            continue
        found[f"{step}: gradient of {name}"] = param.grad.detach().clone()
    on_parts(torch.optim.SGD)(model.parameters(), lr=0.05).step()
    model.zero_grad()
    if clip is not None:
        clip.step()
        found |= {f"{step}: largest of {n}": x for n, x in clip.max_scores.items()}
    for name, param in model.named_parameters():
        found[f"{step}: {name}"] = param.detach().clone()


def run(case: Case, wanted: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative error of every quantity on rank 0."""
    meshes, found = build_meshes(ParallelConfig(**case.parallel), "cpu"), dict[str, Tensor]()
    assert meshes.data_ranks == data_ranks_of(case)
    context = ContextOptions(way=case.way, a2a_ranks=case.a2a_ranks)  # type: ignore[arg-type]
    model = make(case.config)
    made: list[Offload] = []

    def offload(*args: Any, **kwargs: Any) -> Offload:
        made.append(Offload(*args, **kwargs, min_bytes=1))
        return made[0]

    with patch("moecore.train.memory.apply.Offload", offload):
        parallelize_moe(
            model, meshes, loss=case.loss, context=context, memory=case.memory, indexer=case.indexer
        )
    clip = None if case.tau is None else QKClip(model, case.tau)
    owner = TrainStep(model)
    for step in range(case.steps):
        batches = [batch_of(case, r, step) for r in range(meshes.data_ranks)]
        with owner.micro_batch():
            loss = model(**batches[meshes.data_rank], num_tokens=num_tokens(case, batches))
            loss.backward()
        metrics = owner.finish().metrics
        for what, value in (("loss", loss.detach()), ("ahead", model.mtp_losses)):
            if value is None:
                continue
            every = [torch.empty_like(value) for _ in range(WORLD)]
            dist.all_gather(every, value)
            share = WORLD // meshes.data_ranks
            for i, one in enumerate(every):
                assert torch.equal(one, every[i // share * share])
                found[f"{step}: {what} of {i // share}"] = one
        update(model, found, step, clip)
        counts = metrics.tokens_per_expert.items()
        found |= {f"{step}: counts of {n}": c.double() for n, c in counts}
    assert len(made) == bool(case.memory and case.memory.offload)
    assert all(one.back_bytes == one.out_bytes > 0 for one in made)
    found = gather_whole(found)
    assert not found or found.keys() == {n for n in wanted if int(n.split(":")[0]) < case.steps}
    return {name: relative(tensor, wanted[name]) for name, tensor in found.items()}


def relative(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max().clamp(min=1e-6)).item()


def logits() -> list[float]:
    """Logits, and what greedy decoding gives, of a model over cp and tp."""
    model, plain = make(LATENT), make(LATENT)
    parallelize_moe(model, build_meshes(ParallelConfig(cp=2, tp=2, ep=4), "cpu"))
    batch = batch_of(CASES["latents gathered"], 0, 0)
    tokens = batch["tokens_BT"]
    same = [m.generate(tokens[:, :7], 3, temperature=0) for m in (model, plain)]
    got, want = (m(tokens) for m in (model, plain))
    return [relative(got, want), float((same[0] != same[1]).sum())]


def refusals() -> list[str]:
    """Return what rows, documents and options that cannot be cut raise."""
    meshes = build_meshes(ParallelConfig(cp=4, ep=2), "cpu")
    tokens = torch.zeros(1, 24, dtype=torch.int64)
    model = parallelize_moe(make(GROUPED), meshes)
    messages = []
    for call in (
        lambda: model(tokens[:, :12]),
        lambda: model(tokens, cu_seqlens=torch.tensor([0, 10, 24])),
        lambda: parallelize_moe(make(GROUPED), meshes, context=ContextOptions(way="a2a")),
    ):
        with pytest.raises((ValueError, NotImplementedError)) as info:
            call()
        messages.append(str(info.value))
    return messages


def worker(rank: int, device: torch.device, names: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {"logits": logits(), "refusals": refusals()}
    cases = {name: CASES[name] for name in names}
    wanted = all_expected([*cases.values()])
    for name, case in cases.items():
        results[name] = run(case, next(want for one, want in wanted if one == alone(case)))
    return results


results = ranks_fixture(WORLD, worker, "name")


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(results: dict[str, Any], name: str) -> None:
    wrong = {what: error for what, error in results[name].items() if not error <= 1e-5}
    assert not wrong, (len(wrong), len(results[name]), wrong)


def test_logits_and_generation(results: dict[str, Any]) -> None:
    error, different = results["logits"]
    assert error <= 1e-5 and different == 0


def test_refusals_are_one_line(results: dict[str, Any]) -> None:
    rows, documents, heads = results["refusals"]
    assert rows == "sequence length (12) must be a multiple of 2 * cp (8): pad the rows"
    assert documents.startswith("cu_seqlens (document 0 of 10 tokens) must have documents of")
    assert heads.startswith("ContextOptions.way ('a2a') must go with key/value heads of a tp rank")
