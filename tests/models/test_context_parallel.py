"""Decoders over cp ranks against one process: packed documents, latents, prediction ahead.

Four gloo ranks are spawned once. Every case compares the losses of each data rank, those of the
modules ahead, every gradient, the experts' counts and the weights after two steps of SGD.
`tests/test_parity.py` has compositions of degrees for rows.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecore import (
    CapacityConfig,
    ContextOptions,
    MemoryOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.models import Decoder, DecoderConfig
from moecore.moe.layer import MoELayer
from moecore.moe.micro_batch import MicroBatch
from tests.models.test_mtp import CONFIGS, make
from tests.ranks import run_ranks

LATENT, GROUPED = CONFIGS["latent, 1"], CONFIGS["grouped, tied, dense, 1"]
LATENT = replace(LATENT, num_heads=8, num_kv_heads=8)
DROPS = CapacityConfig(factor=1.1, drop="position")
STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """Degrees of four ranks, a model, and how attention communicates."""

    parallel: dict[str, int]
    config: DecoderConfig = LATENT
    way: str = "auto"
    a2a_ranks: int | None = None
    packed: bool = False
    loss: str = "mean"
    memory: MemoryOptions | None = None
    tamper: str = ""


def dropping(config: DecoderConfig) -> DecoderConfig:
    assert config.moe is not None
    return replace(config, moe=replace(config.moe, capacity=DROPS))


CASES = {
    "latents gathered": Case(
        parallel=dict(cp=2, ep=2), memory=MemoryOptions(recompute=("norm", "mla_up_proj"))
    ),
    "latents gathered, packed": Case(parallel=dict(cp=4, ep=2), packed=True),
    "latents gathered over tp": Case(parallel=dict(cp=2, tp=2, ep=4), packed=True, loss="sum"),
    "latents, ring": Case(parallel=dict(cp=2, ep=4), way="p2p", packed=True, loss="sum"),
    "latents, heads": Case(
        parallel=dict(cp=2, tp=2, ep=2, etp=2), way="a2a", packed=True, config=dropping(LATENT)
    ),
    "latents, both": Case(parallel=dict(cp=4, ep=4), way="a2a+p2p", a2a_ranks=2, packed=True),
    "grouped, gathered": Case(
        parallel=dict(dp_replicate=2, cp=2, ep=2), config=GROUPED, way="allgather", packed=True
    ),
    "grouped, auto": Case(parallel=dict(cp=4, ep=2, etp=2), config=dropping(GROUPED), packed=True),
    "grouped, ring": Case(
        parallel=dict(cp=2, tp=2, ep=4),
        config=dropping(GROUPED),
        way="p2p",
        packed=True,
        memory=MemoryOptions(recompute=("norm", "rope", "attention_scores")),
    ),
}
TAMPERED = {
    "order of tokens": Case(
        parallel=dict(cp=4, ep=2), config=dropping(GROUPED), packed=True, tamper="order"
    ),
    "positions": Case(parallel=dict(cp=4, ep=2), config=GROUPED, tamper="positions"),
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
    return {n: m.tracker.counts.chosen_E.clone() for n, m in layers.items()}


def expected(case: Case, data_ranks: int) -> dict[str, Tensor]:
    """Return what one process gives, data rank after data rank."""
    model, found = make(case.config), {}
    for step in range(STEPS):
        batches = [batch_of(case, r, step) for r in range(data_ranks)]
        counts: dict[str, Any] = defaultdict(int)
        for rank, batch in enumerate(batches):
            loss, scale = model(**batch, num_tokens=num_tokens(case, batches)), 1 / data_ranks
            for layer in model.modules():
                if isinstance(layer, MoELayer):
                    layer.tracker.reset()
                    layer.tracker.gradient_scale = scale
            (loss * (scale if case.loss == "mean" else 1.0)).backward()
            for name, count in counts_of(model).items():
                counts[name] = counts[name] + count
            found[f"{step}: loss of {rank}"] = loss.detach()
            found[f"{step}: ahead of {rank}"] = model.mtp_losses
        update(model, found, step)
        found |= {f"{step}: counts of {n}": c.double() for n, c in counts.items()}
    return found


def num_tokens(case: Case, batches: list[dict[str, Any]]) -> int | None:
    return sum(int((b["labels_BT"] != -100).sum()) for b in batches) if case.loss == "sum" else None


def update(model: Decoder, found: dict[str, Tensor], step: int) -> None:
    """Step by SGD; note gradients before and weights after."""
    for name, param in model.named_parameters():
        grad = param.grad
        found[f"{step}: gradient of {name}"] = getattr(grad, "full_tensor", lambda g=grad: g)()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    model.zero_grad()
    for name, param in model.named_parameters():
        found[f"{step}: {name}"] = getattr(param, "full_tensor", param.clone)().detach().clone()


def run(case: Case) -> dict[str, float]:
    """Return the relative error of every quantity."""
    meshes = build_meshes(ParallelConfig(**case.parallel), "cpu")
    wanted, found = expected(case, meshes.data_ranks), {}
    context = ContextOptions(way=case.way, a2a_ranks=case.a2a_ranks)  # type: ignore[arg-type]
    model = make(case.config)
    parallelize_moe(model, meshes, loss=case.loss, context=context, memory=case.memory)
    if case.tamper == "positions":
        cut = model.model.sequence_of
        model.model.sequence_of = lambda *a: replace(cut(*a), rotary=plain_rotary(model, a[0]))
    owner = TrainStep(model)
    for step in range(STEPS):
        batches = [batch_of(case, r, step) for r in range(meshes.data_ranks)]
        with owner.micro_batch():
            loss = model(**batches[meshes.data_rank], num_tokens=num_tokens(case, batches))
            loss.backward()
        metrics = owner.finish().metrics
        for what, value in (("loss", loss.detach()), ("ahead", model.mtp_losses)):
            every = [torch.empty_like(value) for _ in range(dist.get_world_size())]
            dist.all_gather(every, value)
            share = dist.get_world_size() // meshes.data_ranks
            for i, one in enumerate(every):
                assert torch.equal(one, every[i // share * share])
                found[f"{step}: {what} of {i // share}"] = one
        update(model, found, step)
        counts = metrics.tokens_per_expert.items()
        found |= {f"{step}: counts of {n}": c.double() for n, c in counts}
    assert found.keys() == wanted.keys()
    return {name: relative(found[name], wanted[name]) for name in wanted}


def plain_rotary(model: Decoder, tokens_BT: Tensor) -> Any:
    """Return the table of a rank that counts its tokens from 0."""
    whole = Decoder(model.config, device="meta").model
    return whole.sequence_of(tokens_BT[:, : tokens_BT.shape[1] // model.model.cp.size]).rotary


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
        lambda: parallelize_moe(make(GROUPED), meshes, compile_dense=True),
    ):
        with pytest.raises((ValueError, NotImplementedError)) as info:
            call()
        messages.append(str(info.value))
    return messages


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    results: dict[str, Any] = {"logits": logits(), "refusals": refusals()}
    for name, case in (CASES | TAMPERED).items():
        tokens_of = MicroBatch._tokens
        if case.tamper == "order":
            MicroBatch._tokens = consecutive
        errors = run(case)
        MicroBatch._tokens = tokens_of
        values = torch.tensor(list(errors.values()), dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        results[name] = dict(zip(errors, values.tolist(), strict=True))
    return results


def consecutive(self: MicroBatch, num_tokens: int, device: torch.device) -> Tensor:
    """Return the tokens of ranks that hold slices of rows."""
    return torch.arange(num_tokens).view(self.num_ranks, -1)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_ranks(4, worker)


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(results: dict[str, Any], name: str) -> None:
    wrong = {what: error for what, error in results[name].items() if not error <= 1e-5}
    assert not wrong, (len(wrong), len(results[name]), wrong)


@pytest.mark.parametrize("name", TAMPERED)
def test_notices_tampering(results: dict[str, Any], name: str) -> None:
    assert sum(error > 1e-4 for error in results[name].values()) > 10


def test_logits_and_generation(results: dict[str, Any]) -> None:
    error, different = results["logits"]
    assert error <= 1e-5 and different == 0


def test_refusals_are_one_line(results: dict[str, Any]) -> None:
    rows, documents, heads, compiled = results["refusals"]
    assert rows == "sequence length (12) must be a multiple of 2 * cp (8): pad the rows"
    assert documents.startswith("cu_seqlens (document 0 of 10 tokens) must have documents of")
    assert heads.startswith("ContextOptions.way ('a2a') must go with key/value heads of a tp rank")
    assert compiled.startswith("compile_dense (True) must go with ParallelConfig.cp (4) = 1")
