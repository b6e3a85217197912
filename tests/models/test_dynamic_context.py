"""Decoders whose micro-batches have a cp each, over a plan of rounds, against one process.

Eight ranks are spawned once. Every case compares the losses, every gradient, the weights after
a step of SGD, and what the MoE layers counted. The plans have groups of 4, 2, 1 and 1 ranks side by
side. One case compares with documents one by one.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecore import (
    BalanceConfig,
    ContextOptions,
    MemoryOptions,
    Meshes,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.models import Decoder, DecoderConfig
from moecore.moe.layer import MoELayer
from moecore.packing import PackedCollator, schedule_documents
from moecore.packing.schedule import DocumentGroup, DocumentSchedule
from moecore.rl import RouterReplay
from moecore.train import QKClip
from tests.helpers.ranks import ranks_fixture
from tests.helpers.whole import gather_whole
from tests.models.test_context_parallel import GROUPED, LATENT, dropping, relative, update
from tests.models.test_mtp import make

pytestmark = pytest.mark.slow

MAX_TOKENS = 32
LENGTHS = {
    8: [120, 56, 30, 28, 9, 7, 14, 12, 11, 10, 8, 6, 5, 4, 3],
    4: [100, 50, 20, 20, 18, 16, 12, 9, 8, 7, 5, 4, 3, 2],
}


def routed(config: DecoderConfig, **changes: Any) -> DecoderConfig:
    assert config.moe is not None
    return replace(config, moe=replace(config.moe, **changes))


@dataclass(frozen=True, kw_only=True)
class Case:
    """Degrees of eight ranks, a model, and how it is computed."""

    parallel: dict[str, int]
    config: DecoderConfig
    memory: MemoryOptions | None = None
    way: str = "auto"
    by_document: bool = False


EIGHT = routed(GROUPED, num_experts=8)
PLAIN = routed(EIGHT, balance=BalanceConfig())
GLOBAL = routed(EIGHT, balance=BalanceConfig(global_batch_coef=0.3, micro_batch_coef=0.1))
EVEN = routed(EIGHT, balance=BalanceConfig(z_loss_coef=0.1))
CASES = {
    "documents one by one": Case(parallel=dict(ep=8), config=PLAIN, by_document=True),
    "grouped over tp, ring": Case(
        parallel=dict(tp=2, ep=8),
        config=dropping(EIGHT),
        way="p2p",
        memory=MemoryOptions(recompute=("norm", "rope", "qkv_proj")),
    ),
    "global batch": Case(parallel=dict(dp_replicate=2, ep=4, etp=2), config=GLOBAL),
    "latent": Case(
        parallel=dict(ep=8),
        config=dropping(LATENT),
        memory=MemoryOptions(recompute=("moe", "mla_up_proj")),
    ),
    "sinkhorn": Case(
        parallel=dict(tp=2, ep=8), config=routed(dropping(EVEN), assignment="sinkhorn")
    ),
    "expert choice": Case(parallel=dict(ep=8), config=routed(EVEN, assignment="expert_choice")),
}


def plan_of(data_ranks: int) -> DocumentSchedule:
    """Return the plan; on four data ranks with a group without documents, as six would have."""
    plan = schedule_documents(LENGTHS[data_ranks], ranks=data_ranks, max_tokens=MAX_TOKENS)
    if data_ranks != 4:
        return plan
    again, labels = 10, LENGTHS[4][10] - 1
    last = DocumentGroup(0, 2, (again,), 4, 0.0, labels), DocumentGroup(2, 2, (), 0, 0.0, 0)
    return replace(plan, rounds=(*plan.rounds, last), num_labels=plan.num_labels + labels)


def document(config: DecoderConfig, number: int, length: int) -> Tensor:
    g = torch.Generator().manual_seed(number)
    return torch.randint(0, config.vocab_size, (length,), generator=g)


def batch_of(config: DecoderConfig, group: DocumentGroup, data_ranks: int) -> dict[str, Any]:
    """Return the arguments of the forward of a group."""
    lengths = LENGTHS[data_ranks]
    multiple = 2 * group.cp if group.cp > 1 else 1
    collator = PackedCollator(row_tokens=MAX_TOKENS * group.cp, multiple=multiple)
    batch = collator([document(config, i, lengths[i]) for i in group.documents])
    return dict(
        tokens_BT=batch["input_ids"],
        labels_BT=batch["labels"],
        padding_mask_BT=batch["padding_mask"],
        cu_seqlens=batch["cu_seqlens"],
        max_seqlen=batch["max_seqlen"],
    )


def clip_of(model: Decoder) -> QKClip | None:
    """Return what clips heads whose logits no norm bounds."""
    return None if model.config.qk_norm else QKClip(model, tau=4.0)


def trackers_of(model: Decoder) -> dict[str, Any]:
    return {n: m.tracker for n, m in model.named_modules() if isinstance(m, MoELayer)}


@cache
def expected(config: DecoderConfig, one_by_one: bool, data_ranks: int) -> dict[str, Tensor]:
    """Return what one process gives, group after group; their losses count once per rank."""
    model, plan = make(config), plan_of(data_ranks)
    clip = clip_of(model)
    counts: dict[str, Any] = defaultdict(int)
    aux: dict[str, Any] = defaultdict(float)
    found: dict[str, Tensor] = {}
    total: Any = 0.0
    trackers = trackers_of(model)
    for groups in plan.rounds:
        batches = [batch_of(config, group, data_ranks) for group in groups]
        chosen = [counts_of(model, batch) for batch in batches]  # a layer counts as it goes
        for name in trackers:
            counts[name] = counts[name] + sum(one[name] for one in chosen)
        busy = sum(group.cp for group in groups if group.documents)
        for group, batch, own in zip(groups, batches, chosen, strict=True):
            share = group.cp / (busy * len(plan.rounds))
            for name, tracker in trackers.items():  # as if the others had counted before
                tracker.reset()
                tracker.gradient_scale = share
                tracker.counts.choices_E.copy_(counts[name] - own[name])
            loss = model(**batch, num_tokens=plan.num_labels)
            loss.backward()
            total = total + loss.detach()
            for name, tracker in trackers.items():
                aux[name] = aux[name] + share * tracker.counts.losses
    if one_by_one:
        total = by_document(config, model, plan.num_labels, data_ranks)
    found["loss"] = total
    update(model, found, 0, clip)
    found |= {f"counts of {n}": c.double() for n, c in counts.items()}
    found |= {f"losses of {n}": x for n, x in aux.items()}
    return found


def counts_of(model: Decoder, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Return what each layer chose, and leave no gradient."""
    before = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    trackers = trackers_of(model)
    for tracker in trackers.values():
        tracker.reset()
    model(**batch, num_tokens=1).backward()
    for name, param in model.named_parameters():
        param.grad = before[name]
    return {n: t.counts.choices_E.clone() for n, t in trackers.items()}


def by_document(config: DecoderConfig, model: Decoder, num_labels: int, data_ranks: int) -> Tensor:
    """Return the loss of documents that are no rows of others, and leave its gradient."""
    model.zero_grad()
    total = torch.zeros(())
    for number, length in enumerate(LENGTHS[data_ranks]):
        ids = document(config, number, length)[None]
        labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], dim=1)
        loss = model(ids, labels, num_tokens=num_labels)
        loss.backward()
        total += loss.detach()
    return total


def run(case: Case) -> dict[str, float]:
    """Return the relative error of every quantity, on rank 0."""
    meshes, found = build_meshes(ParallelConfig(**case.parallel), "cpu"), dict[str, Tensor]()
    context = ContextOptions(way=case.way, dynamic=True)  # type: ignore[arg-type]
    model = make(case.config)
    parallelize_moe(model, meshes, loss="sum", context=context, memory=case.memory)
    clip = clip_of(model)
    total, metrics = train(case, model, meshes)
    found["loss"] = total
    update(model, found, 0, clip)
    found |= {f"counts of {n}": c.double() for n, c in metrics.tokens_per_expert.items()}
    found |= {f"losses of {n}": x for n, x in metrics.aux_losses.items()}
    found = gather_whole(found)
    if dist.get_rank():
        return {}
    wanted = expected(case.config, case.by_document, meshes.data_ranks)
    assert found.keys() == wanted.keys()
    return {name: relative(found[name], wanted[name]) for name in wanted}


def train(case: Case, model: Decoder, meshes: Meshes) -> tuple[Tensor, Any]:
    """Return the loss of the global batch and what a step counted."""
    plan, total = plan_of(meshes.data_ranks), torch.zeros(())
    owner = TrainStep(model, num_micro_batches=len(plan.rounds))
    for group in plan.select_rank_groups(meshes.data_rank):
        with owner.micro_batch():
            batch = batch_of(case.config, group, meshes.data_ranks)
            loss = model(**batch, num_tokens=plan.num_labels, cp=group.cp)
            loss.backward()
        total += loss.detach() / group.cp
    dist.all_reduce(total)
    return total / meshes.parallel.tp, owner.finish().metrics


def refusals() -> list[str]:
    """Return what raises before any rank waits for another."""
    meshes = build_meshes(ParallelConfig(ep=8), "cpu")
    static = build_meshes(ParallelConfig(cp=2, ep=8), "cpu")
    dynamic, tokens = ContextOptions(dynamic=True), torch.zeros(1, 12, dtype=torch.int64)
    model = parallelize_moe(make(EIGHT), meshes, loss="sum", context=dynamic)
    heads = ContextOptions(dynamic=True, way="a2a")
    messages = []
    for call in (
        lambda: model(tokens, cp=3),
        lambda: model(tokens, cp=16),
        lambda: model(tokens, cu_seqlens=torch.tensor([0, 6, 12]), cp=2),
        lambda: parallelize_moe(make(EIGHT), meshes, context=dynamic),
        lambda: parallelize_moe(make(EIGHT), static, loss="sum", context=dynamic),
        lambda: parallelize_moe(make(EIGHT), meshes, loss="sum", context=heads),
        lambda: RouterReplay(model).from_engine(torch.zeros(1, 8, 1, 2, dtype=torch.int32)),
    ):
        with pytest.raises((ValueError, NotImplementedError)) as info:
            call()
        messages.append(str(info.value))
    return messages


def worker(rank: int, device: torch.device, names: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {"refusals": refusals()}
    return results | {name: run(CASES[name]) for name in names}


results = ranks_fixture(8, worker, "name")


def test_plans_have_groups_of_different_sizes() -> None:
    sizes = [{group.cp for group in groups} for groups in plan_of(8).rounds]
    assert {1, 2, 4} in sizes and {1} in sizes
    assert [{group.cp for group in groups} for groups in plan_of(4).rounds].count({1, 2}) == 1


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(results: dict[str, Any], name: str) -> None:
    wrong = {what: error for what, error in results[name].items() if not error <= 1e-5}
    assert not wrong, (len(wrong), len(results[name]), wrong)


def test_refusals_are_one_line(results: dict[str, Any]) -> None:
    three, sixteen, documents, mean, static, heads, engine = results["refusals"]
    assert three.startswith("cp (3) must be one of [1, 2, 4, 8], which have groups of ranks")
    assert sixteen.startswith("cp (16) must be one of [1, 2, 4, 8]")
    assert documents.startswith("cu_seqlens (document 0 of 6 tokens) must have documents of")
    assert mean.startswith("ContextOptions.dynamic (True) must go with loss ('mean') = 'sum'")
    assert static.startswith("ContextOptions.dynamic (True) must go with ParallelConfig.cp (2) = 1")
    assert heads.startswith("ContextOptions.way ('a2a') must go with key/value heads of a tp rank")
    assert engine.startswith("ContextOptions.dynamic (True) must be False for the choices of an")
    assert all("\n" not in message for message in results["refusals"])
