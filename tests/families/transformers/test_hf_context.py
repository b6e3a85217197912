"""transformers models over context parallel ranks, against one process of the stock model.

Four ranks are spawned once. Every case compares losses and all gradients of a step or two; packed
documents are compared with documents one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from moecore import (
    BalanceConfig,
    ContextOptions,
    IndexerConfig,
    Meshes,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.memory import MemoryOptions
from moecore.base.torch_private import HAS_SEPARATE_PIECES
from moecore.families import use_causal_attention
from moecore.families.family import swap_blocks
from tests.families.transformers.family_models import freeze_indexers, freeze_towers, tiny_model
from tests.families.transformers.hf_models import (
    enable_checkpointing,
    random_model,
    whole_gradients,
    worst,
)
from tests.families.transformers.indexer_cases import recorded
from tests.helpers.grids import asked_for, beside
from tests.helpers.parts import on_parts
from tests.helpers.ranks import run_ranks

ROWS, TOKENS = 2, 32
CUTS, PADDING = [0, 8, 32, 48, 64], 8
TINY = (  # of `tiny_model`: linear or sparse attention, and experts behind a router
    *("qwen3_next", "qwen3_5_moe", "kimi_linear", "granitemoehybrid", "nemotron_h"),
    *("minimax_m2", "deepseek_v32", "glm_moe_dsa"),
    *("axk2", "dots3_note", "hy_v4", "lfm2_moe", "llama4"),
    *("qwen3_vl_moe", "glm4v_moe", "qwen3_omni_moe", "ernie4_5_vl_moe"),
    *("deepseek_ocr2", "step3p7", "unlimited_ocr", "minimax"),
)
CALM = 0.005  # a rate at whose second step stock transformers is near fp64, too
BALANCED = BalanceConfig(sequence_coef=0.3)
DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
# Rows of 32 tokens are long, but of four cp ranks only the first has positions beyond 27.
SHORT_OR_LONG = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0] * 4,
    long_factor=[2.0, 3.0, 4.0, 5.0],
    factor=4.0,
    original_max_position_embeddings=28,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Degrees of four ranks, a family, and how attention communicates."""

    family: str
    parallel: dict[str, int]
    way: str = "auto"
    packed: bool = False
    padded: bool = False  # the last tokens of the last document
    loss: str = "mean"
    balance: BalanceConfig | None = None
    indexer: IndexerConfig | None = None
    checkpointing: bool = False
    recompute: str = ""
    rate: float = 0.05
    options: dict[str, Any] = field(default_factory=dict)
    tamper: str = ""
    cps: tuple[int, ...] = ()  # of the groups of a micro-batch, with dynamic context parallelism

    @property
    def steps(self) -> int:
        """Two where something but weights outlives a step: what is computed again, groups."""
        return 2 if self.checkpointing or self.recompute or self.cps else 1

    @property
    def sharing(self) -> list[int]:
        """The group of each data rank, with `cps`."""
        return [group for group, cp in enumerate(self.cps) for _ in range(cp)]


CASES = {
    "qwen3, ring, packed": Case(
        family="qwen3-moe", parallel=dict(cp=2, ep=4), way="p2p", packed=True, loss="sum"
    ),
    "qwen3, gathered, rows": Case(
        family="qwen3-moe", parallel=dict(cp=4, ep=2, etp=1 + HAS_SEPARATE_PIECES), way="allgather"
    ),
    "qwen3, dynamic frequencies, rows": Case(
        family="qwen3-moe",
        parallel=dict(cp=2, ep=2),
        options=dict(max_position_embeddings=8, rope_parameters=DYNAMIC),
    ),
    "qwen3, long or short frequencies, rows": Case(
        family="qwen3-moe",
        parallel=dict(cp=4, ep=2),
        way="allgather",
        options=dict(rope_parameters=SHORT_OR_LONG),
    ),
    "qwen3, dynamic frequencies, a cp for each group": Case(
        family="qwen3-moe",
        parallel=dict(ep=4),
        loss="sum",
        cps=(2, 2),
        options=dict(max_position_embeddings=8, rope_parameters=DYNAMIC),
    ),
    "qwen3, documents balanced": Case(
        family="qwen3-moe",
        parallel=dict(cp=2, ep=2),
        packed=True,
        balance=BALANCED,
        checkpointing=True,
    ),
    "mixtral, both, packed": Case(
        family="mixtral", parallel=dict(cp=4, ep=4), way="a2a+p2p", packed=True
    ),
    "mixtral, window, rows": Case(
        family="mixtral", parallel=dict(cp=2, ep=4), options=dict(sliding_window=6)
    ),
    "deepseek, heads, rows": Case(family="deepseek-v3", parallel=dict(cp=4, ep=2)),
    "deepseek, ring, packed": Case(
        family="deepseek-v3", parallel=dict(cp=2, ep=4), way="p2p", packed=True
    ),
    "gpt-oss, heads, packed": Case(family="gpt-oss", parallel=dict(cp=2, ep=4), packed=True),
    "qwen3, tp, packed": Case(
        family="qwen3-moe",
        parallel=dict(cp=2, tp=2, ep=4),
        packed=True,
        balance=BALANCED,
        checkpointing=True,
    ),
    "deepseek, tp, padded": Case(
        family="deepseek-v3", parallel=dict(cp=2, tp=2, ep=2), packed=True, padded=True, loss="sum"
    ),
    "gpt-oss, tp, rows": Case(family="gpt-oss", parallel=dict(cp=2, tp=2, ep=4)),
    "gpt-oss, gathered, rows": Case(family="gpt-oss", parallel=dict(cp=4, ep=4)),
    "gated delta, packed": Case(
        family="qwen3_5_moe",
        parallel=dict(cp=2, ep=2),
        packed=True,
        recompute="gemm_last",
        rate=CALM,
    ),
    "gated delta, rows": Case(
        family="qwen3_5_moe", parallel=dict(cp=4, ep=2), checkpointing=True, rate=CALM
    ),
    "gated delta, short documents": Case(
        family="qwen3_next", parallel=dict(cp=4, ep=4), packed=True, loss="sum", rate=CALM
    ),
    "kimi delta, tp, packed": Case(
        family="kimi_linear", parallel=dict(cp=2, tp=2, ep=4), packed=True, loss="sum", rate=CALM
    ),
    "state space, tp, packed": Case(
        family="nemotron_h",
        parallel=dict(cp=2, tp=2, ep=2),
        packed=True,
        checkpointing=True,
        rate=CALM,
    ),
    "state space, packed": Case(
        family="granitemoehybrid", parallel=dict(cp=4, ep=2), packed=True, rate=CALM
    ),
    "sparse, packed": Case(
        family="deepseek_v32",
        parallel=dict(cp=2, ep=4),
        packed=True,
        indexer=IndexerConfig(loss_coef=0.5),
        recompute="gemm_last",
        rate=CALM,
    ),
    "sparse, shared indexer, rows": Case(
        family="glm_moe_dsa",
        parallel=dict(cp=4, ep=2),
        loss="sum",
        indexer=IndexerConfig(stage="warm_up"),
        checkpointing=True,
        rate=0.004,  # at CALM a product before relu is 1e-7, so rounding decides its derivative
    ),
    "sparse, shared indexer, tp, packed": Case(
        family="glm_moe_dsa", parallel=dict(cp=2, tp=2, ep=4), packed=True, loss="sum", rate=CALM
    ),
    "sparse, gates, packed": Case(
        family="axk2",
        parallel=dict(cp=2, ep=4),
        packed=True,
        indexer=IndexerConfig(loss_coef=0.5),
        rate=CALM,
    ),
    "sparse and windows, tp, packed": Case(
        family="dots3_note", parallel=dict(cp=2, tp=2, ep=4), packed=True, rate=CALM
    ),
    # At a second step, and of rows of one data rank, gradients of stock's hyper-connections in fp32
    # are 1e-5 and 4e-4 away from fp64.
    "sparse, sinks, tp, packed": Case(
        family="hy_v4", parallel=dict(cp=2, tp=2, ep=4), packed=True, loss="sum", rate=CALM
    ),
    "sparse, sinks, rows": Case(family="hy_v4", parallel=dict(cp=2, ep=2), rate=CALM),
    "gated delta, tp, rows": Case(family="qwen3_next", parallel=dict(cp=2, tp=2, ep=4), rate=CALM),
    "qwen3, a cp for each group": Case(
        family="qwen3-moe",
        parallel=dict(ep=4),
        packed=True,
        balance=BALANCED,
        loss="sum",
        checkpointing=True,
        cps=(2, 1, 1),
    ),
    "gpt-oss, a cp for each group": Case(
        family="gpt-oss", parallel=dict(ep=2), packed=True, loss="sum", cps=(1, 1, 2)
    ),
    "gated delta, a cp for each group": Case(
        family="qwen3_next", parallel=dict(ep=4), packed=True, loss="sum", rate=CALM, cps=(2, 1, 1)
    ),
    "sparse, a cp for each group": Case(
        family="deepseek_v32",
        parallel=dict(ep=4),
        packed=True,
        loss="sum",
        rate=CALM,
        cps=(2, 1, 1),
    ),
    "short convolution, packed": Case(
        family="lfm2_moe", parallel=dict(cp=4, ep=4), packed=True, checkpointing=True, rate=CALM
    ),
    "short convolution, tp, rows": Case(
        family="lfm2_moe", parallel=dict(cp=2, tp=2, ep=4), loss="sum", rate=CALM
    ),
    "chunks and temperatures, packed": Case(
        family="llama4", parallel=dict(cp=2, ep=4), packed=True, checkpointing=True, rate=CALM
    ),
    "chunks and temperatures, rows": Case(
        family="llama4", parallel=dict(cp=2, ep=2), loss="sum", rate=CALM
    ),
    "lightning, tp, packed": Case(
        family="minimax",
        parallel=dict(cp=2, tp=2, ep=4),
        packed=True,
        checkpointing=True,
        rate=CALM,
    ),
    "lightning, rows": Case(
        family="minimax", parallel=dict(cp=4, ep=4), loss="sum", recompute="gemm_last", rate=CALM
    ),
    "text of unlimited_ocr, packed": Case(
        family="unlimited_ocr", parallel=dict(cp=2, ep=4), packed=True, rate=CALM
    ),
    "text of qwen3_vl_moe, packed": Case(
        family="qwen3_vl_moe", parallel=dict(cp=2, ep=4), packed=True, loss="sum", rate=CALM
    ),
    "text of glm4v_moe, packed": Case(
        family="glm4v_moe", parallel=dict(cp=2, tp=2, ep=4), packed=True, rate=CALM
    ),
    "text of qwen3_omni_moe, rows": Case(
        family="qwen3_omni_moe", parallel=dict(cp=4, ep=4), rate=CALM
    ),
    "text of ernie4_5_vl_moe, packed": Case(
        family="ernie4_5_vl_moe",
        parallel=dict(cp=2, ep=4),
        packed=True,
        loss="sum",
        rate=CALM,
    ),
    "text of deepseek_ocr2, packed": Case(
        family="deepseek_ocr2", parallel=dict(cp=2, ep=4), packed=True, rate=CALM
    ),
    "text of step3p7, packed": Case(
        family="step3p7", parallel=dict(cp=2, ep=4), packed=True, loss="sum", rate=CALM
    ),
    "own routers, tp, padded": Case(
        family="minimax_m2",
        parallel=dict(cp=2, tp=2, ep=4),
        packed=True,
        padded=True,
        loss="sum",
        rate=CALM,
    ),
    "own routers, a cp for each group, tp, padded": Case(
        family="minimax_m2",
        parallel=dict(tp=2, ep=4),
        packed=True,
        padded=True,
        loss="sum",
        rate=CALM,
        cps=(1, 1),
    ),
}
# A way of attention, tp, or a cp for each group, which other models here have.
NIGHTLY = (
    "qwen3, documents balanced",
    "mixtral, both, packed",
    "deepseek, heads, rows",
    "deepseek, ring, packed",
    "gpt-oss, tp, rows",
    "gpt-oss, gathered, rows",
    "gated delta, rows",
    "state space, packed",
    "sparse, shared indexer, tp, packed",
    "gated delta, tp, rows",
    "gpt-oss, a cp for each group",
    "gated delta, a cp for each group",
    "sparse, a cp for each group",
    "sparse, gates, packed",
    "sparse, sinks, rows",
    "short convolution, tp, rows",
    "chunks and temperatures, rows",
    "lightning, rows",
    "text of unlimited_ocr, packed",
    "text of qwen3_omni_moe, rows",
    "text of ernie4_5_vl_moe, packed",
    "text of deepseek_ocr2, packed",
    "text of step3p7, packed",
)
TAMPERED = {
    f"tampered {name}": Case(
        family="qwen3-moe", parallel=dict(cp=2, ep=4), packed=True, tamper=name
    )
    for name in ("positions", "labels", "documents")
}


def batch_of(case: Case, data_rank: int, step: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(10 * step + data_rank)
    ids = torch.randint(0, 61, (ROWS, TOKENS), generator=g)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -100)
    if not case.packed:
        return dict(input_ids=ids, labels=labels)
    labels.view(-1)[CUTS[:-1]] = -100
    if case.padded:
        labels.view(-1)[-PADDING:] = -100
    return dict(input_ids=ids, labels=labels, cu_seqlens=torch.tensor(CUTS), max_seqlen=24)


def count(batches: list[dict[str, Any]]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def make(case: Case) -> nn.Module:
    if case.family in TINY:
        model: nn.Module = tiny_model(case.family)
        if case.indexer is None:
            freeze_indexers(model)
        freeze_towers(model)
    else:
        model = random_model(case.family, **case.options)
    if case.checkpointing:
        enable_checkpointing(model)
    return model


def loss_of_documents(model: nn.Module, batch: dict[str, Any], num_items: int | None) -> Tensor:
    """Return the loss of the stock model, each document in a row of its own."""
    ids, labels = batch["input_ids"], batch["labels"]
    if "cu_seqlens" not in batch:
        given: dict[str, Any] = {} if num_items is None else {"num_items_in_batch": num_items}
        return model(input_ids=ids, labels=labels, use_cache=False, **given).loss
    num_items = count([batch]) if num_items is None else num_items
    rows = [
        (ids.view(-1)[None, a:b], labels.view(-1)[None, a:b])
        for a, b in pairwise(batch["cu_seqlens"].tolist())
    ]
    losses = [
        model(input_ids=i, labels=x, use_cache=False, num_items_in_batch=num_items).loss
        for i, x in rows
    ]
    return torch.stack(losses).sum()


def expected(case: Case, batches_of_step: int) -> dict[str, Tensor]:
    """Return what one process gives: of stock models, or with moecore's layers to be balanced."""
    # Hooks that record divergences save more in a first forward than in its second run.
    model, found = make(case if case.indexer is None else replace(case, checkpointing=False)), {}
    layers = swap_blocks(model, {}) if case.balance else {}
    if case.indexer is not None and case.indexer.stage == "warm_up":
        for module in model.modules():
            if hasattr(module, "index_topk"):
                module.index_topk = TOKENS
    if case.balance:
        use_causal_attention(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.rate)
    for step in range(case.steps):
        batches = [batch_of(case, rank, step) for rank in range(batches_of_step)]
        num_items = count(batches) if case.loss == "sum" else None
        weights = [cp / sum(case.cps) for cp in case.cps] or [1 / len(batches)] * len(batches)
        for rank, batch in enumerate(batches):
            for layer in layers.values():
                layer.set_balance(case.balance)
                layer.tracker.gradient_scale = weights[rank]
            if case.balance:
                given = {} if num_items is None else {"num_items_in_batch": num_items}
                loss = model(**batch, use_cache=False, **given).loss
            else:
                with recorded(model) if case.indexer else nullcontext({}) as divergences:
                    loss = loss_of_documents(model, batch, num_items)
            total = loss / (len(batches) if case.loss == "mean" else 1)
            for name, parts in divergences.items() if case.indexer else ():
                kl = case.indexer.loss_coef * sum(x.sum() for x in parts) / (ROWS * TOKENS)
                name, total = f"{step}: indexer loss of {name}", total + kl / len(batches)
                found[name] = found.get(name, 0) + kl.detach() / len(batches)
            total.backward()
            found[f"{step}: loss of {rank}"] = loss.detach()
        found |= {f"{step}: {n}": g.clone() for n, g in whole_gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    return found


def found_on(case: Case, meshes: Meshes) -> dict[str, Tensor]:
    model = make(case)
    parallelize_moe(
        model,
        meshes,
        context=ContextOptions(way=case.way, dynamic=bool(case.cps)),  # type: ignore[arg-type]
        loss=case.loss,  # type: ignore[arg-type]
        moe={"balance": case.balance} if case.balance else None,
        indexer=case.indexer,
        memory=MemoryOptions(recompute=case.recompute) if case.recompute else None,
    )
    optimizer, found = on_parts(torch.optim.SGD)(model.parameters(), lr=case.rate), {}
    owner = TrainStep(model, optimizer, max_norm=math.inf)
    sharing = case.sharing or range(meshes.data_ranks)
    own = sharing[meshes.data_rank]
    for step in range(case.steps):
        batches = [batch_of(case, rank, step) for rank in range(max(sharing) + 1)]
        batch = tampered(case, batches[own])
        if case.cps:
            batch["cp"] = case.cps[own]
        if case.loss == "sum":
            batch["num_items_in_batch"] = count(batches)
        if case.padded:
            places = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)
            batch["padding_mask"] = places >= ROWS * TOKENS - PADDING
        with owner.micro_batch(), TAMPERS.get(case.tamper, nullcontext)():
            loss = model(**batch, use_cache=False).loss
            loss.backward()
        found[f"{step}: loss of {own}"] = loss.detach()
        found |= {f"{step}: {n}": g.clone() for n, g in whole_gradients(model).items()}
        metrics = owner.finish().metrics
        learned = metrics.indexer_losses
        found |= {f"{step}: indexer loss of {n}": x[0] for n, x in learned.items()}
        if case.padded:
            routed = {int(counts.sum()) for counts in metrics.tokens_per_expert.values()}
            real = len(batches) * (ROWS * TOKENS - PADDING)
            assert routed == {real * model.config.num_experts_per_tok}
    return found


def tampered(case: Case, batch: dict[str, Any]) -> dict[str, Any]:
    if case.tamper == "positions":
        batch["position_ids"] = torch.arange(TOKENS).flip(0).expand(ROWS, -1)
    if case.tamper == "documents":
        batch["cu_seqlens"] = torch.tensor([0, 32, 64])
        batch["max_seqlen"] = 32
    return batch


def far_shift() -> Any:
    """Labels are those of the token after the next."""

    def shifted(x_BT: Tensor, steps: int, fill: int) -> Tensor:
        return x_BT.roll(-2, 1)

    return patch("moecore.families.transformers.rows.shift_rows", shifted)


TAMPERS: dict[str, Callable[[], Any]] = {"labels": far_shift}


def refused(family: str, kind: type[Exception], message: str, **given: Any) -> None:
    options = given.pop("options", {})
    meshes = build_meshes(ParallelConfig(cp=4, ep=4), "cpu")
    made = tiny_model if family == "jamba" else lambda f: make(Case(family=f, parallel={}))
    model = made(family)
    with pytest.raises(kind, match=message):
        parallelize_moe(model, meshes, **options)
        model(**batch_of(Case(family=family, parallel={}), 0, 0), **given)


def refuse() -> None:
    """Raise unless what cp ranks cannot compute is refused, in words."""
    mixes = r"layer_types\[0\] \('linear_attention', JambaMambaMixer\) needs whole rows on a rank"
    refused("jamba", NotImplementedError, mixes)
    ring = {"context": ContextOptions(way="p2p")}
    refused("gpt-oss", ValueError, r"way \('p2p'\) must be 'a2a' or 'allgather'", options=ring)
    refused("deepseek_v32", ValueError, r"way \('p2p'\) must be 'allgather' or", options=ring)
    pixels = r"pixel_values must be None for Qwen3VLMoeModel with packed documents or context"
    refused("qwen3_vl_moe", ValueError, pixels, pixel_values=torch.ones(4, 8))
    refused("llama4", ValueError, r"way \('p2p'\) must be 'a2a' or 'auto' for", options=ring)
    learns = {"indexer": IndexerConfig()}
    refused("hy_v4", ValueError, r"must be None for HYV4ForCausalLM", options=learns)
    refused("qwen3-moe", ValueError, r"must be None for Qwen3MoeForCausalLM", options=learns)
    heads = {"context": ContextOptions(way="a2a")}
    refused("qwen3-moe", ValueError, r"key/value heads .* divide by cp \(4\)", options=heads)
    refused("qwen3-moe", ValueError, "output_router_logits", output_router_logits=True)
    refused("qwen3-moe", ValueError, "logits_to_keep must be left out", logits_to_keep=1)
    refused(
        "qwen3-moe", ValueError, "attention_mask must be None", attention_mask=torch.ones(2, 32)
    )
    refused(
        "qwen3-moe",
        ValueError,
        r"token_type_ids \(2, 32\) must be left out under context parallelism",
        token_type_ids=torch.ones(2, 32),
    )


def without_labels() -> None:
    """Raise unless the loss of rows in which no label counts is 0, and so are its gradients."""
    case = Case(family="qwen3-moe", parallel={})
    model = parallelize_moe(make(case), build_meshes(ParallelConfig(cp=4, ep=4), "cpu"))
    ids = batch_of(case, 0, 0)["input_ids"]
    loss = model(input_ids=ids, labels=torch.full_like(ids, -100), use_cache=False).loss
    loss.backward()
    assert loss == 0 and not any(g.any() for g in whole_gradients(model).values())


def worker(rank: int, device: torch.device, names: list[str]) -> dict[str, float]:
    refuse()
    without_labels()
    errors = {}
    for name in names:
        case = (CASES | TAMPERED)[name]
        meshes = build_meshes(ParallelConfig(**case.parallel), "cpu")
        got = found_on(case, meshes)
        want = expected(case, len(case.cps) or meshes.data_ranks)
        kept = {n: want[n] for n in got}
        error = torch.tensor(worst(got, kept)[0])
        torch.distributed.all_reduce(error, op=torch.distributed.ReduceOp.MAX)
        errors[name] = float(error)
    return errors


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, float]:
    found: dict[str, float] = run_ranks(4, worker, asked_for(request, "name"))
    return found


@pytest.mark.parametrize("name", beside(CASES, NIGHTLY))
def test_losses_gradients_and_steps_are_those_of_one_process(
    name: str, errors: dict[str, float]
) -> None:
    assert errors[name] <= 1e-5


@pytest.mark.parametrize("name", beside(TAMPERED, [*TAMPERED][1:]))
def test_what_is_wrong_shows(name: str, errors: dict[str, float]) -> None:
    assert errors[name] > 1e-3
