"""Ranks whose part communicates capture it at the same call, and fail together.

Fakes replay here; what graphs of collectives compute is proved in test_graphed_blocks_gpu.py.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.moe.dispatch.collectives import all_gather_rows
from moecore.train.graphs import graphed_part as gp
from tests.helpers.ranks import ranks_fixture
from tests.train.graphs.graph_fakes import FakeRecorder, fake_graphs

WORLD, CALLS = 2, 9


class Gathered(nn.Module):
    """A product of all ranks' rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = 0  # a fact of each call
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.linear(all_gather_rows(x, dist.group.WORLD))
        return rows.tanh()


def graphed() -> Gathered:
    model, group = Gathered(), dist.group.WORLD
    modules, memory = [model, model.linear], gp.GraphMemory()
    model.forward = gp.GraphedPart("gathered", model.forward, modules, memory, group=group)  # type: ignore[method-assign]
    return model


def list_captures(change: Callable[[Gathered, int], None]) -> list[int]:
    """Return the calls that capture; gradients of all calls equal those without graphs."""
    model, plain, calls = graphed(), Gathered(), []
    with fake_graphs() as fake:
        for call in range(CALLS):
            change(model, call)
            before, grads = fake.captures, []
            for m in (model, plain):
                m.zero_grad()
                x = torch.full((2, 4), call / 10 + dist.get_rank(), requires_grad=True)
                m(x).square().sum().backward()
                grads.append([x.grad, *(p.grad for p in m.parameters())])
            torch.testing.assert_close(*grads, rtol=0, atol=0)
            calls += [call] * (fake.captures > before)
    return calls


def differ_once(model: Gathered, call: int) -> None:
    model.config = int(dist.get_rank() == 1 and call == 2)


def move_on_all_ranks(model: Gathered, call: int) -> None:
    if call == 5:
        weights = {name: value.clone() for name, value in model.linear.state_dict().items()}
        model.linear.load_state_dict(weights, assign=True)


def fail_on_rank_1(self: FakeRecorder, function: Any, *args: Any) -> Any:
    """Fail after the last collective: those of a fake run during the capture."""
    result = RECORD(self, function, *args)
    if dist.get_rank() == 1 and function.func is not gp._run_forward:
        raise ValueError("operation not permitted")
    return result


RECORD = FakeRecorder.record
CHANGES = {"none": lambda model, call: None, "once": differ_once, "moved": move_on_all_ranks}


def worker(rank: int, device: torch.device) -> dict[str, list[Any]]:
    found: dict[str, Any] = {name: list_captures(change) for name, change in CHANGES.items()}
    with patch.object(FakeRecorder, "record", fail_on_rank_1):
        try:
            list_captures(CHANGES["none"])
        except RuntimeError as error:
            found["failed"] = str(error)
    return {name: gathered(value) for name, value in found.items()}


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * WORLD
    dist.all_gather_object(values, value)
    return values


found = ranks_fixture(WORLD, worker)


@pytest.mark.parametrize(
    ("change", "calls"),
    [("none", [gp.WARM_UP]), ("once", [7]), ("moved", [gp.WARM_UP, 5 + gp.WARM_UP])],
)
def test_all_ranks_capture_at_the_same_call(change: str, calls: list[int], found) -> None:
    """Call 2 of one rank differs, so the ranks compare again in the eighth call."""
    assert found[change] == [calls] * WORLD


def test_a_capture_that_fails_on_one_rank_fails_on_all(found) -> None:
    for text in found["failed"]:
        assert "gathered could not be captured" in text and "(rank 1: operation not" in text
