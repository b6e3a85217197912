"""transformers models over context parallel ranks, against one process of the stock model.

Four ranks are spawned once. Every case compares losses and all gradients of a step or two; packed
documents are compared with documents one by one.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from moecore import (
    ContextOptions,
    IndexerConfig,
    Meshes,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.memory import MemoryOptions
from moecore.families import use_causal_attention
from moecore.families.family import swap_blocks
from tests.families.transformers import context_cases as cc
from tests.families.transformers import hf_models
from tests.families.transformers.family_models import (
    BOUNDS,
    IS_BEFORE_5_23,
    freeze_indexers,
    freeze_towers,
    tiny_model,
)
from tests.families.transformers.indexer_cases import recorded
from tests.helpers.parts import on_parts
from tests.helpers.ranks import ranks_fixture


def batch_of(case: cc.Case, data_rank: int, step: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(10 * step + data_rank)
    ids = torch.randint(0, 61, (cc.ROWS, cc.TOKENS), generator=g)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -100)
    if not case.packed:
        return dict(input_ids=ids, labels=labels)
    labels.view(-1)[cc.CUTS[:-1]] = -100
    if case.padded:
        labels.view(-1)[-cc.PADDING :] = -100
    return dict(input_ids=ids, labels=labels, cu_seqlens=torch.tensor(cc.CUTS), max_seqlen=24)


def count(batches: list[dict[str, Any]]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def make(case: cc.Case) -> nn.Module:
    if case.family in cc.TINY:
        model: nn.Module = tiny_model(case.family, **case.options)
        if case.indexer is None:
            freeze_indexers(model)
        freeze_towers(model)
    else:
        model = hf_models.random_model(case.family, **case.options)
    if case.checkpointing:
        hf_models.enable_checkpointing(model)
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


def expected(case: cc.Case, batches_of_step: int) -> dict[str, Tensor]:
    """Return what one process gives: of stock models, or with moecore's layers to be balanced."""
    # Hooks that record divergences save more in a first forward than in its second run.
    model, found = make(case if case.indexer is None else replace(case, checkpointing=False)), {}
    layers = swap_blocks(model, {}) if case.balance else {}
    if case.indexer is not None and case.indexer.stage == "warm_up":
        for module in model.modules():
            if hasattr(module, "index_topk"):
                module.index_topk = cc.TOKENS
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
                kl = case.indexer.loss_coef * sum(x.sum() for x in parts) / (cc.ROWS * cc.TOKENS)
                name, total = f"{step}: indexer loss of {name}", total + kl / len(batches)
                found[name] = found.get(name, 0) + kl.detach() / len(batches)
            total.backward()
            found[f"{step}: loss of {rank}"] = loss.detach()
        found |= {f"{step}: {n}": g.clone() for n, g in hf_models.whole_gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    return found


def found_on(case: cc.Case, meshes: Meshes) -> dict[str, Tensor]:
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
            places = torch.arange(cc.ROWS * cc.TOKENS).view(cc.ROWS, cc.TOKENS)
            batch["padding_mask"] = places >= cc.ROWS * cc.TOKENS - cc.PADDING
        with owner.micro_batch(), TAMPERS.get(case.tamper, nullcontext)():
            loss = model(**batch, use_cache=False).loss
            loss.backward()
        found[f"{step}: loss of {own}"] = loss.detach()
        found |= {f"{step}: {n}": g.clone() for n, g in hf_models.whole_gradients(model).items()}
        metrics = owner.finish().metrics
        learned = metrics.indexer_losses
        found |= {f"{step}: indexer loss of {n}": x[0] for n, x in learned.items()}
        if case.padded:
            routed = {int(counts.sum()) for counts in metrics.tokens_per_expert.values()}
            real = len(batches) * (cc.ROWS * cc.TOKENS - cc.PADDING)
            assert routed == {real * model.config.num_experts_per_tok}
    return found


def tampered(case: cc.Case, batch: dict[str, Any]) -> dict[str, Any]:
    if case.tamper == "positions":
        batch["position_ids"] = torch.arange(cc.TOKENS).flip(0).expand(cc.ROWS, -1)
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
    made = tiny_model if family == "jamba" else lambda f: make(cc.Case(family=f, parallel={}))
    model = made(family)
    with pytest.raises(kind, match=message):
        parallelize_moe(model, meshes, **options)
        model(**batch_of(cc.Case(family=family, parallel={}), 0, 0), **given)


def refuse() -> None:
    """Raise unless what cp ranks cannot compute is refused, in words."""
    if not IS_BEFORE_5_23:  # which has another router in jamba
        mixes = r"layer_types\[0\] \('linear_attention', JambaMambaMixer\) needs whole rows on a"
        refused("jamba", NotImplementedError, mixes)
    ring = {"context": ContextOptions(way="p2p")}
    refused("gpt-oss", ValueError, r"way \('p2p'\) must be 'a2a' or 'allgather'", options=ring)
    refused("deepseek_v32", ValueError, r"way \('p2p'\) must be 'allgather' or", options=ring)
    pixels = r"pixel_values must be None for Qwen3VLMoeModel with packed documents"
    refused("qwen3_vl_moe", ValueError, pixels, pixel_values=torch.ones(4, 8))
    refused("llama4", ValueError, r"way \('p2p'\) must be 'a2a' or 'auto' for", options=ring)
    refused(
        "llama4", ValueError, r"and cp \(4\) must divide the key/value heads of a tp rank \(2\)"
    )
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
    case = cc.Case(family="qwen3-moe", parallel={})
    model = parallelize_moe(make(case), build_meshes(ParallelConfig(cp=4, ep=4), "cpu"))
    ids = batch_of(case, 0, 0)["input_ids"]
    loss = model(input_ids=ids, labels=torch.full_like(ids, -100), use_cache=False).loss
    loss.backward()
    assert loss == 0 and not any(g.any() for g in hf_models.whole_gradients(model).values())


def worker(rank: int, device: torch.device, names: list[str]) -> dict[str, float]:
    refuse()
    without_labels()
    errors = {}
    for name in names:
        case = (cc.CASES | cc.TAMPERED)[name]
        meshes = build_meshes(ParallelConfig(**case.parallel), "cpu")
        got = found_on(case, meshes)
        want = expected(case, len(case.cps) or meshes.data_ranks)
        kept = {n: want[n] for n in got}
        error = torch.tensor(hf_models.worst(got, kept)[0])
        torch.distributed.all_reduce(error, op=torch.distributed.ReduceOp.MAX)
        errors[name] = float(error)
    return errors


errors = ranks_fixture(4, worker, "name")


@pytest.mark.parametrize("name", cc.CASES)
def test_losses_gradients_and_steps_are_those_of_one_process(name, errors) -> None:
    assert errors[name] <= BOUNDS.get(cc.CASES[name].family, 1e-5)


@pytest.mark.parametrize("name", cc.TAMPERED)
def test_what_is_wrong_shows(name: str, errors: dict[str, float]) -> None:
    assert errors[name] > 1e-3
