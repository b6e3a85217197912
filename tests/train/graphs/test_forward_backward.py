"""CUDA graphs of forward and backward without a GPU: the order of calls, and what is refused.

A fake graph runs the captured function again. That real replays train as eager steps do is proved
on GPUs, in test_forward_backward_gpu.py.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore import (
    BalanceConfig,
    CapacityConfig,
    CloneOptions,
    DispatchOptions,
    ExchangeError,
    FSDPOptions,
    MoEConfig,
    NVLinkOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.rank_checks import gather_first_problem
from moecore.parallel.model.parallel_state import get_capacity, get_moe_state, get_parallel_state
from moecore.train import GraphedForwardBackward
from moecore.train.graphs import forward_backward as module
from moecore.train.graphs.forward_backward import collect_facts
from tests.helpers.errors import error_of
from tests.helpers.ranks import ranks_fixture
from tests.moe.emulated_exchange import emulated
from tests.moe.moe_cases import make_layer
from tests.train.graphs.graph_fakes import fake_steps

CLONES = DispatchOptions(clones=CloneOptions())
CONFIG = MoEConfig(dim=16, hidden_dim=16, num_experts=4, top_k=2)
PADDED = replace(
    CONFIG, capacity=CapacityConfig(factor=1.0, pad=True), balance=BalanceConfig(z_loss_coef=0.01)
)


def make(config: MoEConfig = CONFIG, *, ep: int = 2, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), make_layer(config))
    model.register_buffer("scale", torch.ones(1))
    meshes = build_meshes(ParallelConfig(ep=ep, edp_shard=2 // ep), "cpu")
    return parallelize_moe(model, meshes, **options)


def moved(model: nn.Module) -> None:
    moved = {"0.weight": model.state_dict()["0.weight"].clone()}
    model.load_state_dict(moved, assign=True, strict=False)


def moved_buffer(model: nn.Module) -> None:
    model.scale = model.scale.clone()


def hooked(model: nn.Module) -> None:
    model[0].weight.register_post_accumulate_grad_hook(print)


SCALE = torch.ones(())  # a model holds it weakly
CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "the memory of 0.weight": moved,
    "the memory of scale": moved_buffer,
    "requires_grad of 0.weight": lambda model: model[0].weight.requires_grad_(False),
    "train or eval mode of the model": nn.Module.eval,
    "train or eval mode of 1": lambda model: model[1].eval(),
    "the number of micro-batches of a step": lambda m: get_moe_state(m).set_num_micro_batches(2),
    "the loss scale": lambda model: get_moe_state(model).set_loss_scale(SCALE),
    "the config of 1": lambda m: m[1].set_balance(BalanceConfig(micro_batch_coef=0.1)),
    "the number of hooks of 0.weight": hooked,
    "the number of hooks of 1": lambda model: model[1].register_forward_hook(print),
}


def error_after(change: str, x: Tensor) -> str:
    """What the facts of a model say after some change, or after a step and an evaluation."""
    model = make()

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()
        get_moe_state(model).finish_step()
        with torch.no_grad():
            model.eval()(x)
        model.train()

    step()
    facts = collect_facts(model, get_moe_state(model))
    step()
    model.load_state_dict(model.state_dict())
    CHANGES.get(change, nn.Module.train)(model)
    return error_of(lambda: facts.check_unchanged(model, get_moe_state(model)))


def make_forward_backward(fails: str = "") -> Any:
    """Return a function with its `model`, the `owner` of its steps and how often it ran."""
    model = make(PADDED, fsdp=FSDPOptions(dense_strategy="optim"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    owner = TrainStep(model, optimizer)

    def forward_backward(x: Tensor) -> Tensor:
        forward_backward.calls += 1
        with owner.micro_batch():
            loss = model(x).square().mean()
            loss.backward()
        if fails == f"rank {dist.get_rank()}, call {forward_backward.calls}":
            raise FloatingPointError("broken")
        return loss.detach()

    forward_backward.model, forward_backward.owner, forward_backward.calls = model, owner, 0
    return forward_backward


def train(owner, run, x, steps) -> list[float]:
    """Return the losses of some steps."""
    losses = []
    for n in steps:
        losses.append(run(x + n))
        owner.finish()
    return [loss.item() for loss in losses]


def train_graphed(x: Tensor) -> dict[str, Any]:
    """Losses, how often Python ran, and what was refused on the way."""
    function, found = make_forward_backward(), {}
    model, owner = function.model, function.owner
    buffers, record = object(), get_parallel_state(model)
    record.exchanges = exchanges = SimpleNamespace(all_exchanges=(buffers,))
    run = GraphedForwardBackward(function, model)
    losses = train(owner, run, x, range(2))
    found["another shape at capture"] = error_of(lambda: run(x[:2]))
    found["losses"] = losses + train(owner, run, x, range(2, 6))
    found["calls"] = function.calls
    run(x)
    found["gradients"] = error_of(lambda: run(x))
    model.zero_grad()
    found["another shape"] = error_of(lambda: run(x[:2]))
    run(x)
    found["two in a step"] = error_of(owner.finish)
    owner.drop()
    model[1].get_part("router").tape = object()
    with pytest.raises(NotImplementedError, match="must not be recorded or replayed around a CUDA"):
        run(x)
    model[1].get_part("router").tape = None
    exchanges.all_exchanges = (buffers, object())  # one of an evaluation
    run(x)
    owner.drop()
    exchanges.all_exchanges = (object(),)
    found["buffers"] = error_of(lambda: run(x))
    exchanges.all_exchanges = (buffers,)

    def overflow() -> None:
        raise ExchangeError("too many rows")

    with (
        patch.object(get_capacity(model), "raise_reported_errors", overflow),
        pytest.raises(ExchangeError),
    ):
        run(x)
    model(x)  # leaves units gathered
    found["after a forward"] = error_of(lambda: run(x))
    owner.drop()
    run.close()
    function.calls = 0
    train(owner, run, x, range(4))
    found["calls after close"] = function.calls
    return found


def error_of_a_capture(x: Tensor) -> str:
    """What all ranks say when one can not capture."""
    function = make_forward_backward(fails="rank 1, call 3")
    run = GraphedForwardBackward(function, function.model)
    for _ in range(2):
        run(x)
        function.owner.drop()
    return error_of(lambda: run(x))


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(rank))
    found = {
        "alltoall": error_of(lambda: GraphedForwardBackward(print, make())),
        "allgather": error_of(lambda: GraphedForwardBackward(print, make(dispatch="allgather"))),
        "clones": error_of(lambda: GraphedForwardBackward(print, make(PADDED, dispatch=CLONES))),
        "padded": error_of(lambda: GraphedForwardBackward(print, make(PADDED))),
        "local": error_of(lambda: GraphedForwardBackward(print, make(ep=1))),
        "changes": {change: error_after(change, x) for change in ("", *CHANGES)},
        "said": gather_first_problem("broken" if rank == 1 else ""),
    }
    with emulated():
        model = make(dispatch=replace(CLONES, name="nvlink", nvlink=NVLinkOptions(max_tokens=6)))
    found["clones, nvlink"] = error_of(lambda: GraphedForwardBackward(print, model))
    eager = make_forward_backward()
    found["eager"] = train(eager.owner, eager, x, range(6))
    with fake_steps():
        found["graphed"] = train_graphed(x)
        found["capture"] = error_of_a_capture(x)
    return found


found = ranks_fixture(2, worker)


def test_dispatchers_that_wait_for_sizes_are_refused_and_so_is_a_cpu(found: dict[str, Any]) -> None:
    for name in ("alltoall", "allgather"):
        assert "must be 'nvlink' or pad to a capacity" in found[name]
    for name in ("clones", "clones, nvlink"):
        assert re.match(r"DispatchOptions.clones \(.*\) must be None for a CUDA graph", found[name])
    for name in ("padded", "local"):
        assert found[name].startswith("device of the model (cpu) must be a GPU")


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_graph_takes_for_granted_must_not_change(change: str, found: dict[str, Any]) -> None:
    said = found["changes"]
    assert said[""] == "no error", "a step, an evaluation and a loaded state change nothing"
    assert said[change].startswith(f"{change} must be what it was when the graph was captured")


def test_calls_are_warm_ups_then_a_capture_then_replays(found: dict[str, Any]) -> None:
    graphed = found["graphed"]
    assert len(set(found["eager"])) == 6
    assert graphed["losses"] == found["eager"], "each of its own inputs and weights"
    assert graphed["calls"] == 2 + 1 + 4, "two warm-ups, the capture, four replays"
    assert graphed["calls after close"] == 2 + 1 + 2


def test_what_can_not_be_replayed_is_refused(found: dict[str, Any]) -> None:
    graphed = found["graphed"]
    for name in ("another shape at capture", "another shape"):
        assert graphed[name].startswith("inputs ([((2, 16), torch.float32)]) must be as in")
    assert graphed["gradients"].startswith("gradient of 0.weight must be None")
    assert "(1) micro-batches, but 2 are done" in graphed["two in a step"], "replays are counted"
    assert graphed["buffers"].startswith("the buffers of dispatcher ('nvlink') must be those of")
    assert graphed["after a forward"] == "no error", "what it has left unsharded is freed"


def test_all_ranks_raise_when_one_gives_up(found: dict[str, Any]) -> None:
    assert found["said"] == "rank 1: broken"
    reason = "rank 1: FloatingPointError: broken"
    assert found["capture"].startswith(f"forward_backward could not be captured ({reason})")


def test_a_model_must_be_parallelized_and_a_warm_up_be_there() -> None:
    with pytest.raises(ValueError, match="must be parallelized"):
        GraphedForwardBackward(print, nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"warm_up \(1\) must be a whole number >= 2"):
        GraphedForwardBackward(print, nn.Linear(2, 2), warm_up=1)


def test_lines_that_wait_for_the_gpu_are_named(monkeypatch, recwarn) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits(x: Tensor) -> Tensor:
        warnings.warn("deprecated", stacklevel=1)
        warnings.warn(module.SYNC_WARNING, stacklevel=1)
        return x

    with pytest.raises(ValueError, match=rf"in 1 places, first at {__file__}:\d+: change"):
        module._call_without_syncs(waits, (torch.ones(1),))
    assert modes == ["warn", 0]
    assert [str(w.message) for w in recwarn] == ["deprecated"], "others are passed on"


def test_outputs_that_a_replay_cannot_copy_are_refused() -> None:
    x = torch.ones(2)
    assert not module._find_capture_problem([], {"a": [x, None], "b": (x, x.max(0))})
    for other in (1.0, object()):
        said = module._find_capture_problem([], (x, other))
        assert said.startswith(f"outputs of forward_backward ({type(other).__name__}) must be")
    assert "detach" in module._find_capture_problem([], torch.ones(2, requires_grad=True) * 2)
