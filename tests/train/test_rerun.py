"""A step whose expert rows did not fit runs again: the bits of a step that had room.

Four ranks are spawned once, with an exchange that is emulated on CPUs. Routers draw random numbers,
balance counts over micro-batches and biases move, so whatever a second run does not restore shows.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecore import (
    BalanceConfig,
    DispatchOptions,
    MemoryOptions,
    Meshes,
    MoEConfig,
    NVLinkOptions,
    ParallelConfig,
    StashOptions,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.rank_checks import gather_objects
from moecore.base.streams import HostCopyOfTensor
from moecore.base.torch_private import get_local_tensor
from moecore.models import Decoder
from moecore.moe.shortage import BufferCapacities, BufferOwner, ShortageCounters
from moecore.parallel.model.parallel_state import get_capacity, get_parallel_state
from moecore.rl import RouterReplay
from moecore.train import AdamW, GraphedForwardBackward, rerun
from tests.helpers.ranks import ranks_fixture, run_ranks
from tests.moe.emulated_exchange import emulated
from tests.train import test_step
from tests.train.graphs.graph_fakes import fake_steps

WORLD, TOKENS, EXPERTS = 3, 12, 6
PAGES = MemoryOptions(stash=StashOptions(page_rows=2, factor=0.25))
PAGES_2 = MemoryOptions(stash=StashOptions(page_rows=2, factor=2.0))
OUTGROWN = (3, 4)  # steps of a graph whose routing is skewed and that have had no room yet
ROWS, LENGTH = "NVLinkOptions.row_factor", "NVLinkOptions.max_tokens"
PAGE_ROWS = "StashOptions.factor"
TIGHT: dict[str, dict[str, Any]] = {
    "expert rows": dict(row_factor=0.5),
    "pages": dict(memory=PAGES),
    "both": dict(row_factor=0.5, memory=PAGES),
    "tokens": dict(row_factor=4.0, max_tokens=5),
    "tokens and rows": dict(row_factor=0.5, max_tokens=5),
}
GROWN: dict[str, dict[str, float]] = {  # case -> options that are too small, and their values
    "expert rows": {ROWS: 0.5},
    "pages": {PAGE_ROWS: 0.25},
    "both": {ROWS: 0.5, PAGE_ROWS: 0.25},
    "tokens": {LENGTH: 5},
    "tokens and rows": {ROWS: 0.5, LENGTH: 5},
}
LOOPS = [case for case in TIGHT if "tokens" not in case]
DEFAULTS = (True, 26, 0)  # buffers for 24 tokens, and 5%
BALANCE = BalanceConfig(
    global_batch_coef=0.05, bias_update_rate=0.5, bias_update="quantile", z_loss_coef=0.01
)
MOE = MoEConfig(
    dim=32,
    hidden_dim=32,
    num_experts=EXPERTS,
    top_k=2,
    score_function="sigmoid",
    expert_bias=True,
    router_jitter=0.1,
    balance=BALANCE,
)
CONFIG = replace(test_step.CONFIG, vocab_size=31, moe=MOE)


def build(*, memory=None, is_default=False, **options) -> tuple[Any, TrainStep]:
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.router.expert_bias[:2] = 0.3  # of one rank
    nvlink = NVLinkOptions(**dict(max_tokens=TOKENS, row_factor=None) | options)
    dispatch = DispatchOptions(name="nvlink", nvlink=nvlink)
    how: Any = {} if is_default else dict(dispatch=dispatch, memory=memory)
    device = torch.get_default_device()
    meshes = meshes_on(device.type)
    with emulated() if device.type == "cpu" else nullcontext():
        parallelize_moe(model, meshes, **how)
    step = TrainStep(model, AdamW(model.parameters()), max_norm=1.0, num_micro_batches=2)
    return model, step


@cache
def meshes_on(device_type: str) -> Meshes:
    return build_meshes(ParallelConfig(ep=WORLD), device_type)


def tokens_of_batches() -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, 31, (2, 1, TOKENS + 1), generator=generator, device="cpu")
    return tokens.to(torch.get_default_device())


def batches() -> list[dict[str, Tensor]]:
    return [{"tokens_BT": one[:, :-1], "labels_BT": one[:, 1:]} for one in tokens_of_batches()]


def trained(**options: Any) -> dict[str, Any]:
    """Return what two steps are and leave."""
    model, step = build(**options)
    torch.manual_seed(7 + dist.get_rank())
    found: dict[str, Any] = {}
    for i in range(2):
        found[f"losses/{i}"] = step.forward_backward(batches())
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found |= {f"grad/{i}/{n}": grad.clone() for n, grad in grads.items()}
        done = step.finish()
        found |= {f"loads/{i}/{n}": t for n, t in done.metrics.tokens_per_expert.items()}
        found |= {f"aux/{i}/{n}": t for n, t in done.metrics.aux_losses.items()}
    found |= {f"after/{n}": t.clone() for n, t in model.state_dict().items()}
    holders = get_capacity(model).owners
    factors = {holder.option: holder.capacity_factor for holder in holders if holder is not None}
    return {"values": found, "factors": factors}


def compared(cases: list[str]) -> dict[str, Any]:
    """Return case -> each rank's values that differ from those with room, and its factors."""
    room, found = trained()["values"], {}
    for case in cases:
        tight = trained(**TIGHT[case])
        assert list(room) == list(tight["values"])
        others = [n for n in room if not equal(room[n], tight["values"][n])]
        found[case] = gather_objects((others, tight["factors"]))
    return found | {"number": len(room)}


def equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(get_local_tensor(a), get_local_tensor(b))


def looped(**options: Any) -> dict[str, Any]:
    """Return what steps of a loop of `micro_batch()` are, of the same batches and numbers."""
    model, step = build(**options)
    states, skipped = [{n: t.clone() for n, t in model.state_dict().items()}], []
    for _ in range(4):
        torch.manual_seed(7 + dist.get_rank())
        for batch in batches():
            with step.micro_batch():
                (model(**batch) / 2).backward()
        skipped.append(bool(step.finish().is_skipped))
        states.append({n: t.clone() for n, t in model.state_dict().items()})
        if not skipped[-1]:
            break
    same = [all(equal(a[n], b[n]) for n in a) for a, b in pairwise(states)]
    return {"skipped": skipped, "same": same, "last": states[-1]}


def loops(cases: list[str]) -> dict[str, Any]:
    """Return case -> each rank's skipped steps, those without effect, and if the last is right."""
    want, found = looped(), {}
    for case in (case for case in cases if case in LOOPS):
        got = looped(**TIGHT[case])
        is_right = all(equal(got["last"][n], t) for n, t in want["last"].items())
        found[case] = gather_objects((got["skipped"], got["same"], is_right))
    return found


def replayed(*, tight: bool) -> Any:
    """Return what two steps record and lose, whose second one replays and records at once."""
    model, step = build(**(TIGHT["both"] if tight else {}))
    torch.manual_seed(7 + dist.get_rank())
    replay, found = RouterReplay(model), []
    with replay.record():
        found.append(step.forward_backward(batches()))
    step.finish()
    if tight:  # the first step has enlarged them
        for holder in limited(model):
            holder.set_capacity_factor(0.25)
    with replay.replay(replay.choices()):
        found.append(step.forward_backward(batches()))
    step.finish()
    assert all(holder.capacity_factor > 0.25 for holder in limited(model) if tight)
    return found + [ids for records in replay.choices().values() for ids in records]


def limited(model: Any) -> list[BufferOwner]:
    """Return the holders of rows."""
    found = [holder for holder in get_capacity(model).owners if holder is not None]
    return [holder for holder in found if holder.option != LENGTH]


def defaults() -> list[Any]:
    """Return what steps by default are in which one rank has a longer batch than ever before.

    Whether losses, gradients and draws are those with room; most tokens; loops' exchanges.
    """
    short = batches()
    tokens_BT = torch.cat([one["tokens_BT"] for one in short], dim=1)
    labels_BT = torch.cat([one["labels_BT"] for one in short], dim=1)
    long = [{"tokens_BT": tokens_BT, "labels_BT": labels_BT}, short[1]]
    steps = [short, long if dist.get_rank() == 2 else short, short]
    results = []
    for how in (dict(max_tokens=2 * TOKENS), dict(is_default=True)):
        model, step = build(**how)  # type: ignore[arg-type]
        torch.manual_seed(7 + dist.get_rank())
        found = []
        for one in steps:
            found.append(step.forward_backward(one))
            grads = (p.grad for p in model.parameters() if p.grad is not None)
            found += [get_local_tensor(grad).clone() for grad in grads]
            step.finish()
        results.append([*found, torch.rand(1)])
    (holder,) = (h for h in get_capacity(model).owners if h is not None and h.option == LENGTH)
    looped, step = build(is_default=True)
    for batch in batches():
        with step.micro_batch():
            (looped(**batch) / 2).backward()
    step.finish()
    pool = get_parallel_state(looped).exchanges  # type: ignore[union-attr]
    is_right = len(results[0]) == len(results[1]) and all(map(torch.equal, *results))
    return gather_objects((is_right, holder.capacity_factor, len(pool.all_exchanges)))


def graphed(*, room: bool) -> dict[str, Any]:
    """Return what steps of a graph are whose rows stop to fit, and the model behind them.

    With room, those steps that are skipped without are left out.
    """
    model, step = build() if room else build(row_factor=2.0, memory=PAGES_2)
    biases = [block.mlp.router.selection_bias for block in model.model.layers]

    def forward_backward(*tokens: Tensor) -> Tensor:
        losses = []
        for one in tokens:
            with step.micro_batch():
                loss = model(one[:, :-1], one[:, 1:])
                (loss / 2).backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    forward_backward.model = model  # type: ignore[attr-defined]
    skipped, same, captures = [], [], []
    with fake_steps():
        run = GraphedForwardBackward(forward_backward, model)
        for i in range(9):
            if room and i in OUTGROWN:
                continue
            for bias_E in biases:
                experts = torch.arange(EXPERTS)
                bias_E.copy_(experts % 2 * 0.01 + (i >= 3) * 5.0 * (experts < 2))
            torch.manual_seed(7 + dist.get_rank())
            before = [p.detach().clone() for p in model.parameters()]
            run(*tokens_of_batches())
            skipped.append(bool(step.finish().is_skipped))
            same.append(all(map(torch.equal, before, model.parameters())))
            captures.append(run._captured is not None)
        step.check()
        run.close()
    last = {n: t.clone() for n, t in model.state_dict().items() if "bias" not in n}
    return {"skipped": skipped, "same": same, "captured": captures, "last": last}


def graphs() -> list[Any]:
    """Return each rank's steps of a graph, and whether what they leave is that of one with room."""
    want, got = graphed(room=True), graphed(room=False)
    is_right = all(equal(got["last"][n], t) for n, t in want["last"].items())
    return gather_objects((got["skipped"], got["same"], got["captured"], is_right))


def evaluated(**options: Any) -> tuple[list[Tensor], Any, TrainStep]:
    """Return losses outside of a step, without gradients and with them; and who ends steps."""
    model, step = build(**options)
    model.eval()
    found = [step.compute_losses(batches())]
    with torch.no_grad():
        found += [model(**batch) for batch in batches()]
    longer = torch.cat([tokens_of_batches()[0], tokens_of_batches()[1]])  # than any step's
    found.append(step.compute_losses([{"tokens_BT": longer[:, :-1], "labels_BT": longer[:, 1:]}]))
    found += [model(**batch).detach() for batch in batches()]
    return found, model.train(), step


def evaluations() -> list[Any]:
    """Return what each rank's evaluations with too little capacity are, and what they leave."""
    want, *_ = evaluated(max_tokens=2 * TOKENS)
    got, model, step = evaluated(row_factor=0.5)
    (holder,) = limited(model)
    left = (float(holder.compute_min_capacity_factor(torch.device("cpu"))), holder.capacity_factor)
    step.check()
    return gather_objects((list(map(torch.equal, want, got)), left))


def turns(**options: Any) -> list[str]:
    """Return in which order a step computes, asks what it needed and reads the answer."""
    model, step = build(**options)
    found: list[str] = []

    class Answer(HostCopyOfTensor):
        def __init__(self, numbers: Tensor) -> None:
            found.append("ask")
            super().__init__(numbers)

        def read(self) -> Tensor:
            found.append("read")
            return super().read()

    def note(module: Any, args: Any, loss: Tensor) -> None:
        found.append("forward")
        loss.register_hook(lambda grad: found.append("backward"))

    model.register_forward_hook(note)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rerun, "HostCopyOfTensor", Answer)
        step.forward_backward(batches())
    return found


class RowLimit(BufferOwner):
    """Buffers with room for `factor` rows."""

    option = "rows"

    def __init__(self, factor: float) -> None:
        self.limit = factor
        words, report = (torch.zeros(n, dtype=torch.int32) for n in (2, 1))
        self.shortage = ShortageCounters(words=words, report=report, even=1.0)

    @property
    def capacity_factor(self) -> float:
        return self.limit

    @property
    def shortages(self) -> Sequence[ShortageCounters]:
        return [self.shortage]

    def set_capacity_factor(self, factor: float) -> None:
        self.limit = factor

    def make_error(self, shortage: ShortageCounters) -> RuntimeError:
        return RuntimeError(self.option)

    def wait_for_reports(self) -> None:
        pass

    def hold(self, rows: int) -> None:
        self.shortage.words.copy_(torch.tensor([rows, rows > self.limit]))


def limited_on_one_rank() -> list[Any]:
    """Return how often each rank runs and drops a step that is too large for the last rank.

    The other ranks have no limit, like a pipeline stage without MoE layers.
    """
    limit = RowLimit(1.0) if dist.get_rank() == WORLD - 1 else None
    cpu = torch.device("cpu")
    reruns = rerun.Reruns([BufferCapacities(limit, device=cpu)], cpu)
    asks = gather_objects(reruns.has_shortage() is not None)
    runs, drops = [], []

    def run() -> None:
        runs.append("run")
        if limit is not None:
            limit.hold(3)

    if all(asks):  # else the last rank would wait for the others
        reruns.run_until_rows_fit(run, lambda: drops.append("drop"), [])
    return gather_objects((len(runs), len(drops), None if limit is None else limit.capacity_factor))


def worker(rank: int, device: torch.device, cases: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = compared(cases)
    pairs = zip(replayed(tight=False), replayed(tight=True), strict=True)
    everyone = gather_objects(all(torch.equal(a, b) for a, b in pairs))
    return (
        found
        | {"replayed": everyone, "loops": loops(cases), "graphs": graphs()}
        | {"evaluations": evaluations(), "defaults": defaults(), "one": limited_on_one_rank()}
        | {"turns": [turns(row_factor=4.0), turns(row_factor=0.5), turns(memory=PAGES_2)]}
    )


def default_worker(rank: int, device: torch.device) -> list[Any]:
    with device:
        return defaults()


results = ranks_fixture(WORLD, worker, "case")


@pytest.mark.parametrize("case", TIGHT)
def test_a_step_that_runs_again_has_the_bits_of_one_with_room(case, results) -> None:
    assert results["number"] > 40
    others, factors = zip(*results[case], strict=True)
    assert list(others) == [[]] * WORLD and all(found == factors[0] for found in factors)
    assert all(factors[0][option] > was for option, was in GROWN[case].items())


def test_a_step_too_large_for_the_only_limited_rank_runs_again(results: dict[str, Any]) -> None:
    runs_and_drops = [found[:2] for found in results["one"]]
    assert runs_and_drops == [(2, 1)] * WORLD
    assert results["one"][-1][2] >= 3.0  # the rows that the step needed


def test_a_longer_batch_of_one_rank_enlarges_the_buffers(results: dict[str, Any]) -> None:
    """Without options steps that can run again send by stores, and loops by all-to-all."""
    assert results["defaults"] == [DEFAULTS] * WORLD


@pytest.mark.gpu
def test_a_longer_batch_of_one_rank_enlarges_the_buffers_on_gpus() -> None:
    assert run_ranks(WORLD, default_worker, device_type="cuda") == [DEFAULTS] * WORLD


@pytest.mark.parametrize("case", LOOPS)
def test_a_loop_skips_what_did_not_fit_on_every_rank_and_goes_on(case, results) -> None:
    found = results["loops"][case]
    (skipped,) = {tuple(skipped) for skipped, _, _ in found}
    assert skipped[0] and not skipped[-1]
    assert all(tuple(same) == skipped and is_right for _, same, is_right in found)


def test_routes_are_recorded_as_if_a_step_had_run_once(results: dict[str, Any]) -> None:
    assert results["replayed"] == [True] * WORLD


def test_steps_of_a_graph_that_rows_outgrow_are_skipped(results: dict[str, Any]) -> None:
    """Until it is captured with room: the host sees a skipped step while the next one runs."""
    for skipped, same, captured, is_right in results["graphs"]:
        assert skipped == same == [i in OUTGROWN for i in range(9)]
        assert captured == [False, False, True, True, True, False, False, True, True] and is_right


def test_the_host_waits_for_the_last_forward_or_backward(results: dict[str, Any]) -> None:
    """For the backward where there are pages."""
    first, second = ["forward", "backward"], ["forward", "ask", "backward", "read"]
    once, late = [*first, *second], [*first, *first, "ask", "read"]
    assert results["turns"] == [once, [*once, *once], late]


def test_rows_outside_of_a_step_all_fit(results: dict[str, Any]) -> None:
    """Without gradients or with them, and of more tokens than a step's: nothing is short."""
    for is_equal, left in results["evaluations"]:
        assert is_equal == [True] * 6 and left == (0.0, 0.5)
