"""The head is a unit of its own: gathered late, reduced first, and nobody sees a difference.

Every run is compared with one process that trains the same decoder on all ranks' batches. That
gradients are right on every folding is part of tests/test_parity.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from moecore import FSDPOptions, MoELayer, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.models import Decoder, DecoderConfig
from moecore.parallel.fsdp.units import find_blocks, find_heads
from tests.helpers.parts import on_parts
from tests.helpers.ranks import ranks_fixture
from tests.parallel.fsdp.units import recorded, unit_names
from tests.parallel.small_decoder import parallel_decoder, small_decoder

WORLD, STEPS, FP32_BOUND = 2, 3, 1e-5
EP, DEFAULTS = ParallelConfig(ep=2), FSDPOptions()
PLAIN = small_decoder(32, 24, num_layers=3, dense_layers=(1,), mlp_hidden_dim=48, ce_chunk_tokens=7)
MTP = replace(PLAIN, num_mtp_layers=2, mtp_loss_coef=0.4)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way to train.

    Attributes:
        own_loss: of the logits, which the model returns without labels; MTP modules do not run.
        accumulate: micro-batches of a step, of which the last one reduces the head.
    """

    config: DecoderConfig = PLAIN
    fsdp: FSDPOptions = DEFAULTS
    parallel: ParallelConfig = EP
    own_loss: bool = False
    accumulate: int = 1


RUNS = {
    "plain": Run(),
    "far ahead": Run(config=MTP, fsdp=FSDPOptions(prefetch_blocks=3), parallel=ParallelConfig()),
    "gathered once": Run(config=MTP, fsdp=FSDPOptions(dense_strategy="optim")),
    "tied": Run(config=replace(MTP, tie_embeddings=True)),
    "mtp": Run(config=MTP),
    "mtp, accumulated": Run(config=MTP, accumulate=2, parallel=ParallelConfig()),
    "mtp, own loss": Run(config=MTP, own_loss=True),
}


def batches(run: Run, step: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of a rank."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    found = []
    for _ in range(run.accumulate):
        text = torch.randint(0, run.config.vocab_size, (2, 13), generator=g)
        found.append((text[:, :-1], text[:, 1:].contiguous()))
    return found


def loss_of(model: nn.Module, run: Run, tokens: Tensor, labels: Tensor) -> Tensor:
    if run.own_loss:
        return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    return model(tokens, labels)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # An eps of the size of the gradients: AdamW's division then does not magnify rounding.
    return on_parts(torch.optim.AdamW)(model.parameters(), lr=0.05, eps=1e-2)


def train(run: Run, rank: int) -> dict[str, Tensor]:
    """Steps on the ranks, with generation and a look at the logits between them."""
    model = parallel_decoder(run.config, run.parallel, fsdp=run.fsdp)
    optimizer = make_optimizer(model)
    owner = TrainStep(model, max_norm=0.1, num_micro_batches=run.accumulate)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        for n, (tokens, labels) in enumerate(batches(run, step, rank), start=1):
            with owner.micro_batch():
                loss = loss_of(model, run, tokens, labels) / run.accumulate
                loss.backward()
            found[f"loss/{step}/{n}"] = loss.detach()
        grads = {name: p.grad for name, p in model.named_parameters()}
        used = {n: g.full_tensor() for n, g in grads.items() if g is not None}
        found |= {f"grad/{step}/{n}": g.clone() for n, g in used.items()}
        found[f"norm/{step}"] = torch.tensor(owner.clip().total)
        optimizer.step()
        optimizer.zero_grad()
        owner.finish()
        prompt = batches(run, step, 0)[0][0][:, :3]
        found[f"generated/{step}"] = model.generate(prompt, 2, temperature=0)
    found |= {f"after/{n}": t.full_tensor() for n, t in model.state_dict().items()}
    return found


def train_alone(run: Run) -> dict[str, Tensor]:
    """The same in one process; losses are those of rank 0."""
    model = Decoder(run.config)
    optimizer = make_optimizer(model)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        for rank in range(WORLD):
            for n, (tokens, labels) in enumerate(batches(run, step, rank), start=1):
                loss = loss_of(model, run, tokens, labels) / run.accumulate
                (loss / WORLD).backward()
                found.setdefault(f"loss/{step}/{n}", loss.detach())
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found |= {f"grad/{step}/{n}": g.clone() for n, g in grads.items()}
        found[f"norm/{step}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        prompt = batches(run, step, 0)[0][0][:, :3]
        found[f"generated/{step}"] = model.generate(prompt, 2, temperature=0)
    return found | {f"after/{n}": t.clone() for n, t in model.state_dict().items()}


def events_of_a_step(config: DecoderConfig, rank: int) -> list[str]:
    """What units do in the second step, in order."""
    run = Run(config=config)
    model = parallel_decoder(run.config, run.parallel, fsdp=run.fsdp)
    for step in range(2):
        tokens, labels = batches(run, step, rank)[0]
        with recorded(model) as events:
            model(tokens, labels).backward()
    return events


def worker(rank: int, device: torch.device, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {name: train(RUNS[name], rank) for name in names}
    found["events"] = events_of_a_step(PLAIN, rank)
    found["mtp events"] = events_of_a_step(MTP, rank)
    return found


found = ranks_fixture(WORLD, worker, "name")


@pytest.mark.parametrize("name", RUNS)
def test_equals_one_process(name: str, found: dict[str, Any]) -> None:
    mine, expected = found[name], train_alone(RUNS[name])
    assert mine.keys() == expected.keys()
    outside = {}
    for key, want in expected.items():
        error = (mine[key] - want).abs().max() / want.abs().max()
        if not error <= FP32_BOUND:
            outside[key] = float(error)
    assert not outside


def test_it_is_gathered_while_the_last_block_runs(found: dict[str, Any]) -> None:
    events = found["events"]
    last, head = (events.index(f"forward {n}") for n in ("model.layers.2", "lm_head"))
    assert last < events.index("gather lm_head") < head
    assert events.count("gather lm_head") == 1, "backward finds it gathered"


def test_it_is_reduced_first_and_the_embedding_last(found: dict[str, Any]) -> None:
    reduced = [e for e in found["events"] if e.startswith("reduce ")]
    assert reduced[0] == "reduce lm_head" and reduced[1] == "reduce model.layers.2"
    assert reduced[-1] == "reduce the model" and len(reduced) == 2 + PLAIN.num_layers


def test_its_backward_gathers_the_last_block(found: dict[str, Any]) -> None:
    events = found["events"]
    gathers = [i for i, e in enumerate(events) if e == "gather model.layers.2"]
    assert len(gathers) == 2 and gathers[1] < events.index("backward model.layers.2")


def test_with_mtp_it_is_gathered_and_reduced_once(found: dict[str, Any]) -> None:
    events = found["mtp events"]
    assert events.count("backward lm_head") == 3
    assert events.count("gather lm_head") == 1, "backward finds it gathered"
    assert events.count("reduce lm_head") == 1


def test_with_mtp_its_backward_gathers_what_ran_before_it(found: dict[str, Any]) -> None:
    events = found["mtp events"]
    uses = [i for i, e in enumerate(events) if e == "backward lm_head"]
    for use, block in zip(uses, ("mtp.1", "mtp.0", "model.layers.2"), strict=True):
        gathers = [i for i, e in enumerate(events) if e == f"gather {block}"]
        assert gathers[-1] < events.index(f"backward {block}"), block
        assert not any(e.startswith("backward ") for e in events[use + 1 : gathers[-1]])


@pytest.fixture
def two_ranks(no_group_left: None) -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield build_meshes(ParallelConfig(), "cpu")


def test_names_and_shapes_stay(two_ranks: Any) -> None:
    model = Decoder(MTP, device="meta")
    shapes = {n: (p.shape, p.dtype) for n, p in model.named_parameters()}
    parallelize_moe(model, two_ranks, fsdp=FSDPOptions(param_dtype=torch.bfloat16))
    assert "lm_head" in unit_names(model)
    assert not {"model", "model.embed_tokens", "model.norm"} & set(unit_names(model))
    assert {n: (p.shape, p.dtype) for n, p in model.named_parameters()} == shapes
    assert list(model.state_dict()) == list(Decoder(MTP, device="meta").state_dict())
    assert isinstance(model.lm_head.weight, DTensor)


def test_a_tied_head_stays_with_the_root(two_ranks: Any) -> None:
    config = Decoder(replace(PLAIN, tie_embeddings=True), device="meta")
    by_hand = Decoder(PLAIN, device="meta")
    by_hand.lm_head.weight = by_hand.model.embed_tokens.weight
    for model in (config, by_hand):
        parallelize_moe(model, two_ranks)
        assert "lm_head" not in unit_names(model)
    assert by_hand.lm_head.weight is by_hand.model.embed_tokens.weight


def test_heads_of_other_models_stay_with_the_root(two_ranks: Any) -> None:
    """Who wrote them may read their weight without calling them."""
    model = nn.Module()
    model.layers = nn.ModuleList([MoELayer(PLAIN.moe, device="meta")])
    model.lm_head = nn.Linear(32, 61, device="meta")
    assert find_heads(model, find_blocks(model)) == []
    parallelize_moe(model, two_ranks)
    assert "lm_head" not in unit_names(model) and isinstance(model.lm_head.weight, DTensor)


def test_a_head_inside_a_block_stays_with_it(two_ranks: Any) -> None:
    """Two whole decoders in a container are its blocks."""
    model = nn.Module()
    model.both = nn.ModuleDict({n: Decoder(PLAIN, device="meta") for n in ("actor", "critic")})
    parallelize_moe(model, two_ranks)
    assert {"both.actor", "both.critic"} <= set(unit_names(model))
    assert not {"both.actor.lm_head", "both.critic.lm_head"} & set(unit_names(model))
