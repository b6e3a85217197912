"""What a CUDA graph of forward and backward refuses before there is a GPU, and what it remembers.

That replays train as eager steps do is proved on GPUs, in test_forward_backward_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from moecore import (
    BalanceConfig,
    CapacityConfig,
    MoEConfig,
    ParallelConfig,
    build_meshes,
    moe_state,
    parallelize_moe,
)
from moecore.graphs import GraphedForwardBackward
from moecore.graphs import forward_backward as module
from moecore.graphs.forward_backward import _check_facts, _map_tensors, facts_of
from tests.moe.moe_cases import make_layer
from tests.ranks import run_ranks

CONFIG = MoEConfig(dim=16, hidden_dim=16, num_experts=4, top_k=2)
PADDED = replace(CONFIG, capacity=CapacityConfig(factor=1.0, pad=True))


def make(config: MoEConfig = CONFIG, *, ep: int = 2, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), make_layer(config))
    model.register_buffer("scale", torch.ones(1))
    meshes = build_meshes(ParallelConfig(ep=ep, edp_shard=2 // ep), "cpu")
    return parallelize_moe(model, meshes, **options)


def run(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()
    model.zero_grad()
    moe_state(model).finish_step()


def moved(model: nn.Module) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def moved_buffer(model: nn.Module) -> None:
    model.scale = model.scale.clone()


def froze(model: nn.Module) -> None:
    model[0].weight.requires_grad_(False)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "the memory of 0.weight": moved,
    "the memory of scale": moved_buffer,
    "requires_grad of 0.weight": froze,
    "training of the model": nn.Module.eval,
    "training of 1": lambda model: model[1].eval(),
    "the number of micro-batches of a step": lambda m: moe_state(m).set_num_micro_batches(2),
    "the balance config of 1": lambda m: m[1].set_balance(BalanceConfig(micro_batch_coef=0.1)),
}


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "none"


class FakeGraph:
    """Runs what was captured again, and writes where the first run's results lie, as a graph does.

    Python of the model runs again, too, which a graph's replay does not.
    """

    def __init__(self, function: Callable[..., Any], model: nn.Module) -> None:
        self.function, self.model = function, model

    def capture(self, inputs: tuple[Tensor, ...]) -> Any:
        self.inputs, self.outputs = inputs, self.function(*inputs)
        self.grads = [p.grad for p in self.model.parameters()]
        return self.outputs

    def replay(self) -> None:
        self.model.zero_grad()
        self.outputs.copy_(self.function(*self.inputs))
        for param, grad in zip(self.model.parameters(), self.grads, strict=True):
            grad.to_local().copy_(param.grad.to_local())


def train(x: Tensor, *, graphed: bool) -> tuple[list[float], list[str], int]:
    """Return losses of some steps, errors on the way, and how often forward and backward ran."""
    model, calls = make(PADDED), []
    exchanges = SimpleNamespace(made=(object(),), poll=lambda: polls.append(1), check=lambda: None)
    polls: list[int] = []

    def forward_backward(x: Tensor) -> Tensor:
        calls.append(1)
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    optimizer, run, errors = torch.optim.SGD(model.parameters(), lr=0.1), forward_backward, []
    if graphed:
        moe_state(model).exchanges = exchanges
        run = GraphedForwardBackward(forward_backward, model)
    losses = []
    for n in range(6):
        losses.append(run(x + n))
        if n == 4 and graphed:
            errors.append(error_of(lambda: run(x)))
        optimizer.step()
        optimizer.zero_grad()
        moe_state(model).finish_step()
    if graphed:
        errors.append(error_of(lambda: run(x[:2])))
        exchanges.made = (*exchanges.made, object())  # one of an evaluation
        run(x)
        model.zero_grad()
        exchanges.made = (object(),)
        errors.append(error_of(lambda: run(x)))
        assert len(polls) == 2 * 6 + 4, "before each call and in each step's end"
    return [loss.item() for loss in losses], errors, len(calls)


def train_with_a_fake_graph(x: Tensor) -> tuple[list[float], list[str], int]:
    def capture(
        function: Callable[..., Any], model: nn.Module, state: Any, inputs: tuple[Tensor, ...]
    ) -> Any:
        graph = FakeGraph(function, model)
        outputs = graph.capture(inputs)
        facts, held = facts_of(model, state)
        model.zero_grad()
        moe_state(model).finish_step()
        return module._Captured(
            graph=graph,
            model=model,
            state=state,
            inputs=inputs,
            outputs=outputs,
            grads=list(zip(model.parameters(), graph.grads, strict=True)),
            facts=facts,
            held=held,
            exchanges=state.exchanges.made,
        )

    on_a_cpu = dict(_gpu_of=lambda model: x.device, _watched=lambda function, x: function(*x))
    with patch.multiple(module, _capture=capture, **on_a_cpu):
        return train(x, graphed=True)


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(rank))
    found = {
        "alltoall": error_of(lambda: GraphedForwardBackward(print, make())),
        "allgather": error_of(lambda: GraphedForwardBackward(print, make(dispatcher="allgather"))),
        "padded": error_of(lambda: GraphedForwardBackward(print, make(PADDED))),
        "local": error_of(lambda: GraphedForwardBackward(print, make(ep=1))),
    }
    found["eager"] = train(x, graphed=False)
    found["fake"] = train_with_a_fake_graph(x)
    for change in ("", *CHANGES):
        model = make()
        run(model, x)
        facts, held = facts_of(model, moe_state(model))
        run(model, x)  # a step as any other
        if change:
            CHANGES[change](model)
        now = facts_of(model, moe_state(model))[0]
        found[change] = error_of(lambda now=now, facts=facts: _check_facts(now, facts))
        del held
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_ranks(2, worker)


def test_dispatchers_that_wait_for_sizes_are_refused_and_so_is_a_cpu(found: dict[str, Any]) -> None:
    for name in ("alltoall", "allgather"):
        assert "must be 'nvlink' or pad to a capacity" in found[name]
    for name in ("padded", "local"):
        assert found[name].startswith("device of the model (cpu) must be a GPU")


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_graph_holds_must_not_change(change: str, found: dict[str, Any]) -> None:
    assert found[""] == "none"
    assert found[change].startswith(f"{change} must be what it was when the graph was captured")


def test_calls_are_warm_ups_then_a_capture_then_replays(found: dict[str, Any]) -> None:
    losses, _, _ = found["eager"]
    replayed, errors, num_calls = found["fake"]
    assert len(set(losses)) == 6
    assert replayed == losses, "each a tensor of its own, and of its own inputs and weights"
    assert errors[0].startswith("gradient of 0.weight must be None")
    assert errors[1].startswith("inputs ([((2, 16), torch.float32)]) must be as captured")
    assert errors[2].startswith("the buffers of dispatcher ('nvlink') must be those of")
    assert num_calls == 2 + 1 + 5, "two warm-ups, the capture, five replays"


def test_a_model_must_be_parallelized_and_a_warm_up_be_there() -> None:
    with pytest.raises(ValueError, match="must be parallelized"):
        GraphedForwardBackward(print, nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"warm_up \(1\) must be >= 2"):
        GraphedForwardBackward(print, nn.Linear(2, 2), warm_up=1)


def test_outputs_are_copied_and_numbers_are_refused() -> None:
    x = torch.ones(2)
    copied = _map_tensors(torch.clone, {"a": [x, None], "b": (x,)})
    assert isinstance(copied["a"], list) and copied["a"][1] is None
    assert isinstance(copied["b"], tuple)
    x.zero_()
    assert copied["a"][0].tolist() == copied["b"][0].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"outputs of forward_backward \(float\)"):
        _map_tensors(torch.clone, (x, 1.0))
