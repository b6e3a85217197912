"""Replayed steps train as eager ones do, whatever happens in between; what can not be is refused.

    python -m pytest -m gpu tests/train/graphs

On 1, 2 or 4 GPUs, as many as there are. Eager training is run twice: a replay may differ from it as
much as two eager runs do, which is nothing where all kernels are deterministic.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecore import (
    BalanceConfig,
    ContextOptions,
    DenseOptions,
    DispatchOptions,
    DynamicLossScale,
    FSDPOptions,
    MemoryOptions,
    Meshes,
    NVLinkOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.models import Decoder, preset
from moecore.parallel.model.parallel_state import get_capacity, get_moe_state
from moecore.train import GraphedForwardBackward
from tests.helpers.ranks import ranks_fixture

# One per GPU: gloo's collectives, which ranks that share one have, cannot be captured.
WORLD = next((n for n in (4, 2, 1) if n <= torch.cuda.device_count()), 0)
pytestmark = pytest.mark.gpu

STEPS, WARM_UP, MICRO_BATCHES = 7, 2, 2
BATCH = (MICRO_BATCHES, 4, 128)
QUANTILE = BalanceConfig(bias_update="quantile", bias_update_rate=1.0, bias_per_micro_batch=True)
LOSSES = BalanceConfig(micro_batch_coef=0.02, global_batch_coef=0.02, bias_update_rate=0.01)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to train."""

    ep: int
    cp: int = 1  # with packed documents, which differ from step to step
    preset: str = "tiny"
    balance: BalanceConfig = QUANTILE
    fsdp: dict[str, Any] = field(default_factory=dict)
    nvlink: NVLinkOptions | None = None
    dispatch: dict[str, Any] = field(default_factory=dict)  # beside nvlink
    options: dict[str, Any] = field(default_factory=dict)
    loss_scale: DynamicLossScale | None = None


RECOMPUTE = ("norm", "activation", "rope", "mla_up_proj", "shared_experts", "expert_fc1")
ROOM = NVLinkOptions(row_factor=4.0)
CASES = {
    "all ranks": Case(ep=WORLD, nvlink=ROOM),
    "gathered once, casts kept": Case(
        ep=WORLD,
        nvlink=ROOM,
        balance=LOSSES,
        fsdp=dict(dense_strategy="optim", experts_strategy="optim"),
    ),
    "gradients home late, compiled": Case(
        ep=WORLD,
        nvlink=replace(ROOM, overlap_weight_grads=False),
        options=dict(dense=DenseOptions(compile=True)),
    ),
    "shared experts beside, latent attention, two tokens ahead": Case(
        ep=WORLD,
        nvlink=ROOM,
        preset="tiny-deepseek-v3",
        balance=LOSSES,
        options=dict(dense=DenseOptions(overlap_shared=True)),
    ),
    "in FP8, tokens as FP8 rows, quantised weights kept": Case(
        ep=WORLD,
        nvlink=ROOM,
        fsdp=dict(dense_strategy="optim", experts_strategy="optim"),
        dispatch=dict(fp8=True),
        options=dict(precision="blockwise"),
    ),
    "in FP8, weights quantised for every use": Case(
        ep=WORLD, nvlink=ROOM, balance=LOSSES, options=dict(precision="blockwise")
    ),
    "in fp16, with a scale that grows between replays": Case(
        ep=WORLD,
        nvlink=ROOM,
        balance=LOSSES,
        fsdp=dict(param_dtype=torch.float16),
        loss_scale=DynamicLossScale(initial=2.0**10, growth_interval=2),
    ),
    "what is between products computed again": Case(
        ep=WORLD,
        nvlink=ROOM,
        preset="tiny-deepseek-v3",
        balance=LOSSES,
        options=dict(memory=MemoryOptions(recompute=RECOMPUTE)),
    ),
    "MoE layers computed again": Case(
        ep=WORLD, nvlink=ROOM, options=dict(memory=MemoryOptions(recompute=("norm", "moe")))
    ),
    "half the ranks": Case(
        ep=max(1, WORLD // 2), nvlink=ROOM if WORLD > 2 else None, fsdp=dict(blocks_per_unit=2)
    ),
}
CASES |= {
    f"over cp, {what}": Case(
        ep=WORLD, cp=2, nvlink=ROOM, preset=name, balance=LOSSES, options=dict(context=way)
    )
    for what, name, way in (
        ("a ring", "tiny", ContextOptions(way="p2p")),
        ("all heads' tokens", "tiny", ContextOptions(way="a2a")),
        ("latents gathered", "tiny-deepseek-v3", ContextOptions(way="allgather")),
    )
    if WORLD > 1
}


@cache
def meshes_of(ep: int, cp: int) -> Meshes:
    """Return the meshes of all jobs with these degrees: their communicators are made once."""
    return build_meshes(ParallelConfig(ep=ep, cp=cp), "cuda")


class Job:
    """A model in training, eagerly or by replays."""

    def __init__(self, case: Case, *, graphed: bool) -> None:
        config = preset(case.preset)
        moe = replace(config.moe, expert_bias=True, score_function="sigmoid", balance=case.balance)
        nvlink = case.nvlink if case.ep > 1 else None
        self.case, self.config = case, replace(config, moe=moe)
        self.model = Decoder(self.config, device="meta")
        self.meshes = meshes_of(case.ep, case.cp)
        parallelize_moe(
            self.model,
            self.meshes,
            dispatch=DispatchOptions(
                name="nvlink" if nvlink else "local", nvlink=nvlink, **case.dispatch
            ),
            **case.options,
            fsdp=FSDPOptions(**{"param_dtype": torch.bfloat16} | case.fsdp),
        )
        self.model.to_empty(device="cuda")
        self.model.init_weights(0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, fused=True)
        self.owner = TrainStep(
            self.model,
            self.optimizer,
            max_norm=0.5,
            num_micro_batches=MICRO_BATCHES,
            loss_scale=case.loss_scale,
        )
        self.run: Callable[..., Any] = self.forward_backward
        if graphed:
            self.run = GraphedForwardBackward(self.forward_backward, self.model, warm_up=WARM_UP)

    def forward_backward(self, tokens_ABT: Tensor, *documents_An: Tensor) -> dict[str, Tensor]:
        losses = []
        for tokens_BT, *packed in zip(tokens_ABT, *documents_An, strict=True):
            how = dict(cu_seqlens=packed[0], max_seqlen=BATCH[-1]) if packed else {}
            with self.owner.micro_batch():
                loss = self.model(tokens_BT, tokens_BT.roll(-1, 1), **how) / MICRO_BATCHES
                self.owner.scale_loss(loss).backward()
            losses.append(loss.detach())
        return {"losses": torch.stack(losses)}

    def step(self, step: int, *, disturbed: bool = False) -> dict[str, float]:
        """Train a step; return its losses, norm and counts."""
        for group in self.optimizer.param_groups:
            group["lr"] = 3e-3 * (1 + step % 3)
        losses = self.run(self.batch(step), *self.documents(step))["losses"].tolist()
        found = {f"loss {n}": loss for n, loss in enumerate(losses)}
        if disturbed:
            scribble()
            with torch.no_grad():  # other shapes, eagerly
                logits = self.model(self.batch(90 + step).cuda()[0, :1, :64])
                found["evaluation"] = logits.sum().item()
        done = self.owner.finish()
        norm, routed = done.norm, done.metrics
        self.owner.check()
        if disturbed:
            self.drop_a_step()
        counts = torch.stack(list(routed.tokens_per_expert.values()))
        return found | {
            "norm": norm.total,
            "counts": counts.square().sum().item(),
            "aux loss": routed.compute_total_aux_loss(),
            "loss scale": 1.0 if done.loss_scale is None else done.loss_scale.item(),
        }

    def drop_a_step(self) -> None:
        """Run forward and backward of other shapes, eagerly, and use nothing of it."""
        for tokens_BT in self.batch(7).cuda()[:, :1, :64]:
            with self.owner.micro_batch():
                self.owner.scale_loss(self.model(tokens_BT, tokens_BT)).backward()
        self.owner.drop()

    def batch(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 100 + self.meshes.data_rank)
        # Skewed, so that routing changes from step to step.
        tokens = torch.rand(BATCH, generator=generator) ** (1 + seed % 4) * self.config.vocab_size
        return tokens.long().pin_memory()

    def documents(self, seed: int) -> tuple[Tensor, ...]:
        """Return cu_seqlens of every micro-batch, two documents in each row, over cp; else none."""
        if self.case.cp == 1:
            return ()
        A, B, T = BATCH
        unit, generator = 2 * self.case.cp, torch.Generator().manual_seed(seed)
        cuts = torch.randint(1, T // unit, (A, B, 1), generator=generator) * unit
        rows = torch.arange(B)[:, None] * T
        ends = torch.cat((cuts, torch.full_like(cuts, T)), dim=2) + rows
        borders = torch.cat((torch.zeros(A, 1), ends.flatten(1)), dim=1)
        return (borders.int().pin_memory(),)


def scribble() -> None:
    """Write over memory that was used once: what a graph still reads must not lie there."""
    for size in (64, 1024, 16_384, 1 << 20):
        pinned = [torch.full((size,), -1, dtype=torch.int8).pin_memory() for _ in range(64)]
        del pinned
    junk = [torch.full((1 << 26,), torch.nan, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    del junk


def train(case: Case, *, graphed: bool) -> list[dict[str, float]]:
    """Return what all steps gave, then sums of the parameters."""
    began, job = time.perf_counter(), Job(case, graphed=graphed)
    found = [job.step(n, disturbed=n in (1, 4, 5)) for n in range(STEPS)]
    sums = {
        name: p.full_tensor().double().abs().sum().item()
        for name, p in job.model.named_parameters()
    }
    if dist.get_rank() == 0:  # slow or hung?
        seconds = time.perf_counter() - began
        print(f"graphed={graphed}, {seconds:.1f} s: {case}", file=sys.stderr, flush=True)
    return [*found, sums]


def refusals() -> dict[str, str]:
    """Run what can not be captured or replayed; all on the last case, whose steps go on."""
    case, found = CASES["all ranks"], {}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)

    job = Job(case, graphed=True)
    for n in range(WARM_UP + 1):  # weights stay, so that all fits
        job.run(job.batch(n))
        job.owner.drop()
    attempt("shapes", lambda: job.run(job.batch(0)[:1]))
    job.run(job.batch(0))
    attempt("gradients", lambda: job.run(job.batch(0)))
    job.owner.drop()
    job.owner.num_micro_batches = 1
    attempt("micro-batches", lambda: job.run(job.batch(0)))
    job.owner.num_micro_batches = MICRO_BATCHES
    job.step(4)
    waiting = Job(case, graphed=False)
    waiting.run = GraphedForwardBackward(
        lambda x: waiting.forward_backward(x) | {"one": torch.ones(1).cuda()}, waiting.model
    )
    waiting.step(0)
    attempt("waits", lambda: waiting.run(waiting.batch(0)))
    return found


def failed_capture() -> str:
    """Return what is said when a call waits for the GPU that did not before; ends all training."""
    job, calls = Job(CASES["all ranks"], graphed=False), []

    def forward_backward(tokens_ABT: Tensor) -> Tensor:
        calls.append(1)
        losses = job.forward_backward(tokens_ABT)["losses"]
        return losses * losses[0].item() if len(calls) > WARM_UP else losses

    graphed = GraphedForwardBackward(forward_backward, job.model, warm_up=WARM_UP)
    with pytest.raises(RuntimeError) as error:
        for n in range(WARM_UP + 1):
            graphed(job.batch(n))
            job.owner.drop()
    return str(error.value)


def outgrown() -> list[Any]:
    """Return which steps each rank skipped when all tokens choose the first rank's experts."""
    room = NVLinkOptions(row_factor=0.9 * WORLD)
    job = Job(replace(CASES["all ranks"], nvlink=room, balance=LOSSES), graphed=True)
    for n in range(WARM_UP + 1):  # weights stay, so that all fits
        job.run(job.batch(n))
        job.owner.drop()
    for layer in get_moe_state(job.model).layers.values():
        bias_E = layer.get_part("router").selection_bias
        bias_E.copy_(torch.arange(len(bias_E), 0, -1))
    skipped = []
    for n in range(WARM_UP + 4):
        job.run(job.batch(n))
        skipped.append(bool(job.owner.finish().is_skipped))
    job.owner.check()
    of_ranks: list[Any] = [None] * WORLD
    dist.all_gather_object(of_ranks, (skipped, get_capacity(job.model).graph_steps is not None))
    return of_ranks


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: [train(case, graphed=graphed) for graphed in (False, False, True)]
        for name, case in CASES.items()
    }
    found["refusals"] = refusals()
    if WORLD > 1:
        found["outgrown"] = outgrown()
    found["failed"] = failed_capture()
    return found


found = ranks_fixture(WORLD, worker, device_type="cuda")


@pytest.mark.parametrize("name", CASES)
def test_replays_train_as_eager_steps_do(name: str, found: dict[str, Any]) -> None:
    eager, again, graphed = found[name]
    losses = {row["loss 0"] for row in eager[:-1]}
    assert len(losses) == STEPS, "every step learns from its own batch"
    noise: dict[str, float] = {}  # the largest so far: it grows, but two runs may meet by chance
    for step, (want, other, got) in enumerate(zip(eager, again, graphed, strict=True)):
        for name, value in want.items():
            noise[name] = max(noise.get(name, 0.0), abs(value - other[name]))
            error = abs(value - got[name])
            assert error <= 2 * noise[name], (step, name, error, noise[name])


def test_what_can_not_be_replayed_is_refused(found: dict[str, Any]) -> None:
    said = found["refusals"]
    assert "must be as in the calls before" in said["shapes"]
    assert said["gradients"].startswith("gradient of ")
    assert said["micro-batches"].startswith("the number of micro-batches")
    assert "must not wait for the GPU" in said["waits"] and __file__ in said["waits"]
    assert found["failed"].startswith("forward_backward could not be captured (")
    assert "capturing" in found["failed"], "the line that broke it is what is said"


@pytest.mark.skipif(WORLD < 2, reason="needs two GPUs")
def test_rows_that_outgrow_a_graph_skip_two_steps_until_it_has_room(found: dict[str, Any]) -> None:
    assert found["outgrown"] == [([True] * 2 + [False] * (WARM_UP + 2), True)] * WORLD
