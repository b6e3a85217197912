from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moecore import FSDPOptions, ParallelConfig, TrainStep
from moecore.models import Decoder
from moecore.parallel.fsdp.size import compute_rank_bytes
from moecore.parallel.model.clip import clip_grad_norm_
from moecore.parallel.model.parallel_state import get_moe_state, get_parallel_state
from moecore.train.rerun import drop_step
from tests.helpers.grids import asked_for
from tests.helpers.parts import on_parts
from tests.helpers.ranks import run_ranks
from tests.helpers.whole import gather_whole
from tests.parallel.fsdp.units import recorded, units
from tests.parallel.small_decoder import parallel_decoder, small_decoder

pytestmark = pytest.mark.slow

WORLD, STEPS, MICRO_BATCHES, MAX_NORM = 4, 2, 3, 0.1
FP32_BOUND = 1e-5
CONFIG = small_decoder(32, 24)
UNSHARDED, SHARDED = ParallelConfig(ep=4), ParallelConfig(ep=2)
ONCE = FSDPOptions(dense_strategy="optim", experts_strategy="optim_grads_params")
EACH = FSDPOptions(dense_strategy="optim_grads", embedding_strategy="optim_grads")
NO_SHARD = FSDPOptions(dense_strategy="no_shard", embedding_strategy="no_shard")
LAYOUTS: dict[str, tuple[ParallelConfig, FSDPOptions]] = {
    "whole experts, gathered once": (UNSHARDED, ONCE),
    "sharded experts, gathered once": (SHARDED, ONCE),
    "all gathered once": (SHARDED, FSDPOptions(dense_strategy="optim")),
    "gathered again": (SHARDED, FSDPOptions()),
    "gathered again, recomputed": (SHARDED, FSDPOptions()),
    "two blocks together": (SHARDED, replace(ONCE, blocks_per_unit=2)),
    "gathered once, reduced each time": (SHARDED, EACH),
    "embeddings gathered again": (SHARDED, replace(ONCE, embedding_strategy="optim_grads_params")),
    "replicated": (SHARDED, NO_SHARD),
    "bf16": (UNSHARDED, replace(ONCE, param_dtype=torch.bfloat16)),
}
# What reduces every time, for layouts that differ from it in when they gather and reduce alone.
EVERY = dict.fromkeys(
    (
        "sharded experts, gathered once",
        "gathered again",
        "gathered again, recomputed",
        "gathered once, reduced each time",
        "embeddings gathered again",
    ),
    "all gathered once",
)
# Steps that are not announced share nothing: one layout of each kind of unit.
UNANNOUNCED = ("whole experts, gathered once", "all gathered once", "two blocks together")
DROPPED = [*((layout, "once") for layout in LAYOUTS), *((each, "every") for each in UNANNOUNCED)]


def make(layout: str) -> Decoder:
    parallel, options = LAYOUTS[layout]
    model = parallel_decoder(CONFIG, parallel, fsdp=options)
    if layout.endswith("recomputed"):
        for layer in model.model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def owner_of(model: Decoder) -> TrainStep:
    return TrainStep(model, max_norm=MAX_NORM, num_micro_batches=MICRO_BATCHES)


def tokens_of(step: int, n: int, rank: int) -> Tensor:
    g = torch.Generator().manual_seed(100 * step + 10 * n + rank)
    return torch.randint(0, CONFIG.vocab_size, (2, 13), generator=g)


def loss_of(model: Decoder, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens[:, :-1], tokens[:, 1:].contiguous()) / MICRO_BATCHES
    return loss


def run_step(model: Decoder, owner: TrainStep | None, step: int, rank: int) -> None:
    """Run the micro-batches of a step, of which without an owner each gathers and reduces."""
    for n in range(MICRO_BATCHES):
        with owner.micro_batch() if owner else nullcontext():
            loss_of(model, tokens_of(step, n, rank)).backward()


def train(layout: str, rank: int, *, once: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return gradients and norms of all steps on rank 0, and what communicates in the last one."""
    model = make(layout)
    optimizer = on_parts(torch.optim.AdamW)(model.parameters(), lr=0.05, eps=1e-2)
    owner = owner_of(model) if once else None
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        with recorded(model) as events:
            run_step(model, owner, step, rank)
        for name, p in model.named_parameters():
            found[f"{name}/{step}"] = p.grad.detach().clone()
        norm = owner.clip() if owner else clip_grad_norm_(model, MAX_NORM)
        found[f"norm/{step}"] = torch.tensor(norm.total)
        optimizer.step()
        optimizer.zero_grad()
        owner.finish() if owner else drop_step(model)
    plan = get_parallel_state(model).plan
    assert plan is not None
    by = communication(model, events) | buffers(model) | {"planned": compute_rank_bytes(plan)}
    return gather_whole(found), by


def after_a_dropped_step(layout: str, rank: int, *, once: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of the first step on rank 0, and what it counted, after one that broke off."""
    model = make(layout)
    owner = owner_of(model)
    for n, factor in enumerate((1.0, float("nan"))):
        with owner.micro_batch():
            (loss_of(model, tokens_of(9, n, rank)) * factor).backward()
    with owner.micro_batch():
        model(tokens_of(9, 2, rank)[:, :-1])
    owner.drop()
    if not once:
        owner = None
        get_moe_state(model).set_num_micro_batches(MICRO_BATCHES)
    run_step(model, owner, 0, rank)
    found = gather_whole({f"{n}/0": p.grad for n, p in model.named_parameters()})
    counts = get_moe_state(model).finish_step().tokens_per_expert
    return found, torch.stack(list(counts.values())).sum(1)


def buffers(model: Decoder) -> dict[str, int]:
    """Count the bytes of all buffers."""
    of_units = units(model)
    weights = {unit.buffer for unit in of_units if unit.buffer is not None}
    sums = {unit.gradients.buffer for unit in of_units if unit.gradients.buffer is not None}
    device = torch.device("cpu")
    return {
        "weights": sum(buffer.get_flat(device).nbytes for buffer in weights),
        "sums": sum(buffer.get_flat(device).nbytes for buffer in sums),
    }


def communication(model: Decoder, events: list[str]) -> dict[str, int]:
    """Count the units that are sharded, and the collectives of a recorded step."""
    return dict(
        units=sum(unit.is_sharded for unit in units(model)),
        gathers=sum(event.startswith("gather ") for event in events),
        reductions=sum(event.startswith("reduce ") for event in events),
    )


def worker(rank, device, layouts, drops) -> dict[str, Any]:
    found: dict[str, Any] = {}
    of: dict[str, dict[str, Tensor]] = {}
    plain = {
        layout: train(layout, rank, once=False)[0] for layout in layouts if layout not in EVERY
    }
    for layout in layouts:
        every, (once, by) = plain[EVERY.get(layout, layout)], train(layout, rank, once=True)
        found[layout], of[layout] = errors(once, every), once
        for told, clean in (("once", once), ("every", every)):
            if (layout, told) not in drops:
                continue
            dropped, tokens = after_a_dropped_step(layout, rank, once=told == "once")
            found[f"{layout}, dropped, {told}"] = (
                tokens.tolist(),
                len(dropped),
                [name for name, grad in dropped.items() if not torch.equal(grad, clean[name])],
            )
        found[f"{layout}, by"] = by
    found["replicated, sharded"] = errors(of["replicated"], of["all gathered once"])
    return found


def errors(found: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((found[name] - t).abs().max() / t.abs().max()) for name, t in want.items()}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    needed = dict.fromkeys([*asked_for(request, "layout"), "all gathered once", "replicated"])
    drops = asked_for(request, "layout", "told")
    return run_ranks(WORLD, worker, [layout for layout in LAYOUTS if layout in needed], drops)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_reducing_every_time(layout: str, found: dict[str, Any]) -> None:
    """With bf16 each reduction would round; sums over micro-batches are in fp32 in both."""
    bound = 2e-2 if layout == "bf16" else FP32_BOUND
    assert len(found[layout]) > 20
    assert not {name: error for name, error in found[layout].items() if not error <= bound}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_stays_gathered_is_gathered_and_reduced_once(layout, found) -> None:
    """All else twice per micro-batch, forward and backward, and reduced by each."""
    by = found[f"{layout}, by"]
    experts, others = CONFIG.num_layers, 2  # the root and the head
    freed = {
        "sharded experts, gathered once": experts,
        "two blocks together": experts,
        "gathered again": by["units"] - others,
        "gathered again, recomputed": by["units"] - others,
        "embeddings gathered again": experts + others,
    }.get(layout, 0)
    kept = by["units"] - freed
    assert (kept == 0) == (layout == "replicated")
    assert by["gathers"] == kept + 2 * MICRO_BATCHES * freed
    each = kept if layout == "gathered once, reduced each time" else 0
    assert by["reductions"] == kept - each + MICRO_BATCHES * (freed + each)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffers_are_those_of_the_plan(layout: str, found: dict[str, Any]) -> None:
    by = found[f"{layout}, by"]
    planned = by["planned"]
    assert (by["weights"], by["sums"]) == (planned.weights, planned.sums)


def test_replicas_have_the_gradients_of_shards(found: dict[str, Any]) -> None:
    assert max(found["replicated, sharded"].values()) <= FP32_BOUND


@pytest.mark.parametrize(("layout", "told"), DROPPED)
def test_a_dropped_step_leaves_nothing(layout: str, told: str, found: dict[str, Any]) -> None:
    """The next step is that of a new model to the bit, announced or not."""
    tokens, compared, wrong = found[f"{layout}, dropped, {told}"]
    assert tokens == [WORLD * MICRO_BATCHES * 2 * 12 * CONFIG.moe.top_k] * CONFIG.num_layers
    assert compared > 10 and wrong == []
