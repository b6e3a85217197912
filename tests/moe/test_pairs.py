"""Pairs: pairs of a forward and a backward have the bits of one after the other, on 4 ranks.

The oracle is the same step without pairs: each pair is the forward, and then the backward.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moecore import (
    CapacityConfig,
    DispatchOptions,
    FSDPOptions,
    MemoryOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.rank_checks import gather_objects
from moecore.base.torch_private import is_inside_backward
from moecore.models import Decoder
from moecore.moe.pairs import Pairs
from moecore.parallel.fsdp.transport import PackedTransport
from moecore.parallel.model.parallel_state import get_moe_state
from moecore.parallel.pipeline.layout import parse_layout
from tests.helpers.grids import asked_for
from tests.helpers.ranks import run_ranks
from tests.parallel.small_decoder import small_decoder

pytestmark = pytest.mark.slow

WORLD, N = 4, 3
CONFIG = small_decoder(32, 24, num_layers=4)  # even: both sides are in one block at one time
FREED = FSDPOptions(param_dtype=torch.bfloat16)
STAYING = replace(FREED, dense_strategy="optim")
Run = Callable[[Callable[[], Any], Callable[[], None]], Any]
Event = tuple[str, str, tuple[int, ...]]


SHORT = replace(CONFIG, num_layers=2)
FP8 = DispatchOptions(name="alltoall", fp8=True)


def moe(**fields: Any) -> dict[str, Any]:
    assert CONFIG.moe is not None
    return {"config": replace(SHORT, moe=replace(CONFIG.moe, **fields))}


CASES: dict[str, dict[str, Any]] = {
    "staying": {"fsdp": STAYING},
    "freed": {"fsdp": FREED},
    "freed, blocks ahead": {"fsdp": replace(FREED, prefetch_blocks=2)},
    "allgather": {"dispatch": "allgather", "fsdp": STAYING, "config": SHORT},
    "two levels": {"dispatch": "hierarchical", "domain": 2, "fsdp": STAYING, "config": SHORT},
    "tokens as FP8": {"dispatch": FP8, "config": SHORT},
    "two levels, tokens as FP8": {
        "dispatch": DispatchOptions(name="hierarchical", fp8=True),
        "domain": 2,
        "config": SHORT,
    },
    "shared experts": moe(shared_hidden_dim=16, shared_gate=True),
    "capacity": moe(capacity=CapacityConfig(factor=1.0)),
    "static capacity": moe(capacity=CapacityConfig(factor=1.0, pad=True)),
    "moe computed again": {"config": SHORT, "memory": MemoryOptions(recompute=("moe",))},
    "parts computed again": {
        "config": SHORT,
        "memory": MemoryOptions(recompute=("norm", "rope", "qkv_proj")),
    },
    "offloaded": {"memory": MemoryOptions(offload=("norm", "attention", "experts", "rest"))},
    "blocks computed again": {"checkpoint": True, "fsdp": STAYING} | moe(router_jitter=0.2),
    "freed blocks computed again": {"checkpoint": True, "fsdp": FREED},
    "transformers": {"family": "qwen3-moe", "fsdp": STAYING},
    "transformers, computed again": {"family": "qwen2-moe", "checkpoint": True, "fsdp": FREED},
    "no experts": {"config": replace(SHORT, moe=None, mlp_hidden_dim=48)},
    "transformers, tokens as FP8": {"family": "qwen3-moe", "dispatch": FP8, "fsdp": FREED},
    "two chunks": {"layout": "Et|tttL", "fsdp": STAYING},
    "two freed chunks": {"layout": "Ettt|tL", "fsdp": FREED},
}


def make(device, *, config=CONFIG, checkpoint=False, layout="", family="", domain=None, **options):
    options = {"dispatch": "alltoall"} | options
    ep = 1 if config.moe is None else 2 * (domain or 1)
    meshes = build_meshes(ParallelConfig(ep=ep), device.type, ranks_per_domain=domain)
    if family:
        return make_family(family, device, checkpoint=checkpoint, meshes=meshes, **options)
    model = Decoder(config, device="meta")
    parallelize_moe(model, meshes, **options)
    model.to_empty(device=device)
    model.init_weights()
    if checkpoint:
        for block in model.model.layers:
            block.forward = partial(_again, block.forward)  # type: ignore[method-assign]
    return model, TrainStep(model, num_micro_batches=N)


def make_family(family, device, *, checkpoint, **options) -> tuple[Any, TrainStep]:
    from tests.families.transformers.hf_models import enable_checkpointing, random_model

    model = random_model(family).to(device)
    parallelize_moe(model, **options)
    if checkpoint:
        enable_checkpointing(model)
    return model, TrainStep(model, num_micro_batches=N)


def _again(forward: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False)


class MicroBatch:
    """Forwards and backwards of one micro-batch's stages, and its loss after the last forward."""

    def __init__(self, model: nn.Module, number: int, layout: str) -> None:
        g = torch.Generator().manual_seed(10 * number + dist.get_rank())
        self.tokens = torch.randint(0, CONFIG.vocab_size, (2, 9 + number), generator=g)
        self.model, self.loss = model, torch.zeros(())
        num_layers = CONFIG.num_layers
        self.stages: tuple[Any, ...] = (None,)
        if layout:
            self.stages = parse_layout(layout, num_layers=num_layers).stages
        self._edges: list[tuple[Tensor | None, Tensor]] = []
        self._grad: Tensor | None = None

    def forward(self, index: int) -> None:
        before = self._edges[-1][1].detach().requires_grad_() if self._edges else None
        how = {} if len(self.stages) == 1 else {"hidden": before, "stage": self.stages[index]}
        if isinstance(self.model, Decoder):
            out = self.model(self.tokens[:, :-1], self.tokens[:, 1:].contiguous(), **how)
        else:
            out = self.model(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
        if index == len(self.stages) - 1:
            out = out / N
            self.loss = out.detach()
        self._edges.append((before, out))

    def backward(self) -> None:
        before, out = self._edges.pop()
        out.backward(self._grad)
        self._grad = None if before is None else before.grad


def run(model: nn.Module, step: TrainStep, *, beside: bool, layout: str = "") -> dict[str, Tensor]:
    """Return losses, gradients and counts of a step whose forwards come one pair ahead."""
    torch.manual_seed(dist.get_rank())
    micro_batches = [MicroBatch(model, n, layout) for n in range(N)]
    forwards = [partial(b.forward, i) for b in micro_batches for i in range(len(b.stages))]
    backwards = [b.backward for b in micro_batches for _ in b.stages]
    ahead = len(micro_batches[0].stages)
    with step.micro_batches(forwards=len(forwards)):
        pair: Run = step.side_by_side if beside else _one_by_one
        for forward in forwards[:ahead]:
            forward()
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            pair(forward, backward)
        for backward in backwards[-ahead:]:
            backward()
    found = found_in(model) | {f"loss {n}": b.loss for n, b in enumerate(micro_batches)}
    step.drop()
    return found


def found_in(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, layer in get_moe_state(model).layers.items():
        found[f"counts {name}"] = layer.tracker.counts.choices_E.clone()
    return found | {n: p.grad.to_local() for n, p in model.named_parameters()}  # type: ignore[union-attr, operator]


def _one_by_one(forward: Callable[[], Any], backward: Callable[[], None]) -> Any:
    found = forward()
    backward()
    return found


def both(device: torch.device, **case: Any) -> tuple[list[str], dict[bool, list[Event]]]:
    """Return what has other bits with pairs, and the collectives with and without."""
    model, step = make(device, **case)
    found, events = {}, {}
    for beside in (True, False):
        with recorded(model) as events[beside]:
            found[beside] = run(model, step, beside=beside, layout=case.get("layout", ""))
    ours, wanted = found[True], found[False]
    assert ours.keys() == wanted.keys() and len(ours) > 10
    return [name for name, value in wanted.items() if not torch.equal(ours[name], value)], events


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Event]]:
    """Record collectives and starts of attentions' backwards: who, what, and the shape that comes.

    Who is "forward" or "backward".
    """
    events: list[Event] = []
    all_to_all, gather, reduce = (
        dist.all_to_all_single,
        PackedTransport.all_gather,
        PackedTransport.reduce_scatter,
    )

    def note(what: str, out: Tensor) -> None:
        events.append(("backward" if is_inside_backward() else "forward", what, tuple(out.shape)))

    def exchange(out: Tensor, *args: Any, **kwargs: Any) -> Any:
        if out.dtype == torch.int64:  # counts, which the host reads
            note("counts", out)
            return all_to_all(out, *args, **kwargs)
        is_async = kwargs.get("async_op", False)
        note("start" if is_async else "exchange", out)
        work = all_to_all(out, *args, **kwargs)
        return _Work(work, partial(note, "wait", out)) if is_async else work

    def units(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: PackedTransport, outs: list[Tensor], *args: Any) -> Any:
            note(what, outs[0])
            return original(self, outs, *args)

        return call

    def watch(_module: nn.Module, _inputs: Any, out: Any) -> None:
        if isinstance(out, Tensor):  # transformers' are tuples
            out.register_hook(partial(note, "attention"))

    attentions = (m for name, m in model.named_modules() if name.endswith("self_attn"))
    hooks = [module.register_forward_hook(watch) for module in attentions]
    with (
        patch.object(dist, "all_to_all_single", exchange),
        patch.object(PackedTransport, "all_gather", units("gather", gather)),
        patch.object(PackedTransport, "reduce_scatter", units("reduce", reduce)),
    ):
        yield events
    for hook in hooks:
        hook.remove()


class _Work:
    def __init__(self, work: Any, waited: Callable[[], None]) -> None:
        self._work, self._waited = work, waited

    def wait(self) -> None:
        self._waited()
        self._work.wait()


ORDERED = ("staying", "freed", "blocks computed again", "freed blocks computed again")


def order(by: dict[bool, list[Event]]) -> dict[Any, Any]:
    """Return the order of this rank, and what each side does, with pairs and without."""
    found: dict[Any, Any] = {}
    for beside, events in by.items():
        # Ranks send other numbers of rows; what units communicate is the same.
        found[beside] = [(who, what) for who, what, _ in events]
        for who in ("forward", "backward"):
            found[who, beside] = [
                (what.replace("start", "exchange"), shape)
                for side, what, shape in events
                if side == who and what not in ("wait", "gather")
            ]
    return found


def hidden(kinds: list[tuple[str, str]], who: str) -> list[bool]:
    """Return, for each exchange that one side starts and waits for, if the other one ran."""
    found, open_at = [], list[int]()
    for at, (side, what) in enumerate(kinds):
        if side == who and what == "start":
            open_at.append(at)
        elif side == who and what == "wait":
            first = open_at.pop(0)
            found.append(any(other != who for other, _ in kinds[first:at]))
    return found


class _Planned(Exception):
    """What a test raises."""


def _fail(*_: Any) -> None:
    raise _Planned


def _fail_in_backward(*args: Any) -> None:
    args[-1].register_hook(_fail)


def fail(device: torch.device, where: str) -> dict[str, Any]:
    """Return what a pair raises one side of which fails, and what the next forward does."""
    found: dict[str, Any] = {}
    model, step = make(device, **CASES["staying"])
    layers, threads = model.model.layers, threading.active_count()
    first, second = (MicroBatch(model, n, "") for n in range(2))
    hooks = []
    if where == "backward":
        hooks.append(layers[1].register_forward_hook(_fail_in_backward))
    try:
        with step.micro_batches():
            first.forward(0)
            while hooks:
                hooks.pop().remove()
            if where != "backward":
                layer = layers[2 if where == "late forward" else 0]
                hooks.append(layer.register_forward_pre_hook(_fail))
            step.side_by_side(partial(second.forward, 0), first.backward)
    except Exception as error:
        found["raised"] = type(error).__name__
    found["threads"] = threading.active_count() - threads
    for hook in hooks:
        hook.remove()
    step.drop()
    try:
        with step.micro_batches():
            first.forward(0)
        found["next"] = "runs"
    except RuntimeError as error:
        found["next"] = str(error)
    return found


def refused(device: torch.device) -> list[str]:
    """Return the errors of pairs where there can be none."""
    _, step = make(device, **CASES["staying"])
    found = []

    def nested() -> None:
        step.side_by_side(lambda: None, lambda: None)

    for within in (False, True):
        try:
            if within:
                with step.micro_batches():
                    step.side_by_side(nested, lambda: None)
            else:
                with step.micro_batch():
                    nested()
        except (RuntimeError, ValueError) as error:
            found.append(str(error))
        step.drop()
    return found


FAILURES = ("late forward", "early forward", "backward")


def worker(rank: int, device: torch.device, names: list[str]) -> dict[str, Any]:
    differences, orders = {}, {}
    for name in names:
        differences[name], by = both(device, **CASES[name])
        if name in ORDERED:
            orders[name] = order(by)
    every = gather_objects((differences, orders))
    return {
        "differences": [one for one, _ in every],
        "order": {case: [one[case] for _, one in every] for case in ORDERED},
        "failures": {where: fail(device, where) for where in FAILURES},
        "refused": refused(device),
    }


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    ran = dict.fromkeys([*asked_for(request, "case"), *ORDERED])
    result: dict[str, Any] = run_ranks(WORLD, worker, [*ran])
    return result


@pytest.mark.parametrize("case", CASES)
def test_pairs_have_the_bits_of_one_after_the_other(case: str, found: dict[str, Any]) -> None:
    assert [one[case] for one in found["differences"]] == [[]] * WORLD


@pytest.mark.parametrize("case", ORDERED)
def test_the_order_of_collectives_is_that_of_all_ranks(case: str, found: dict[str, Any]) -> None:
    first, *others = (one[True] for one in found["order"][case])
    assert others == [first] * (WORLD - 1)


@pytest.mark.parametrize("case", ORDERED)
def test_each_side_communicates_as_without_lanes(case: str, found: dict[str, Any]) -> None:
    """But for gathers, of which pairs of freed units need more."""
    for ordered in found["order"][case]:
        for who in ("forward", "backward"):
            assert ordered[who, True] == ordered[who, False] != []
        assert {"start", "wait"}.isdisjoint(what for _, what in ordered[False])


def test_exchanges_run_beside_the_other_side(found: dict[str, Any]) -> None:
    kinds = found["order"]["staying"][0][True]
    for side in ("forward", "backward"):
        beside = hidden(kinds, side)
        # Of each layer and pair those of rows, of choices and of sums.
        assert beside == [True] * 3 * CONFIG.num_layers * (N - 1)


def test_what_was_counted_starts_before_the_other_side_exchanges(found: dict[str, Any]) -> None:
    """Nor has the other side launched the backward of an attention, which hides the rows."""
    kinds = [event for event in found["order"]["staying"][0][True] if event[1] != "wait"]
    after = [now for before, now in itertools.pairwise(kinds) if before == ("forward", "counts")]
    assert after.count(("forward", "start")) == CONFIG.num_layers * (N - 1)
    assert set(after) == {("forward", "start"), ("forward", "exchange")}
    assert kinds.count(("backward", "attention")) == CONFIG.num_layers * N


def test_without_exchanges_the_backward_follows_the_forward() -> None:
    """Both in the caller's thread: there is nothing to take turns at."""
    pairs, order = Pairs([]), []
    for pairs.can_alternate in (False, True):
        found = pairs.run_pair(
            lambda: order.append(threading.get_ident()), lambda: order.append(threading.get_ident())
        )
        assert found is None
    forward, backward, *_, other = order
    assert forward == backward == threading.get_ident() != other


def test_an_exception_ends_both(found: dict[str, Any]) -> None:
    """A forward that fails before the backward began can be dropped, as without pairs."""
    failures = found["failures"]
    assert {where: one["raised"] for where, one in failures.items()} == dict.fromkeys(
        FAILURES, "_Planned"
    )
    assert all(one["threads"] == 0 for one in failures.values())
    assert failures["early forward"]["next"] == "runs"
    for where in ("late forward", "backward"):
        assert "the last backward ended in an exception" in failures[where]["next"]


def test_where_pairs_are_refused(found: dict[str, Any]) -> None:
    outside, within = found["refused"]
    assert "side_by_side() must be within micro_batches()" in outside
    assert "must not run within another one" in within


def gpu_worker(rank: int, device: torch.device, names: list[str]) -> dict[str, list[str]]:
    return {name: both(device, **CASES[name])[0] for name in names}


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_pairs_on_gpus(num_ranks: int) -> None:
    names = [name for name, case in CASES.items() if num_ranks == 2 * case.get("domain", 1)]
    wanted: dict[str, list[str]] = {name: [] for name in names}
    assert run_ranks(num_ranks, gpu_worker, names, device_type="cuda") == wanted
