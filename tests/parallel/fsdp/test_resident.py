"""Second derivatives, evaluations and failed backwards: what ranks refuse, and what stays.

That forwards without a backward change nothing, in any order, is part of `test_unit.py`.
"""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore import (
    FSDPOptions,
    MoEConfig,
    ParallelConfig,
    build_meshes,
    clip_grad_norm_,
    parallelize_moe,
)
from moecore.train.rerun import drop_step
from tests.helpers.ranks import ranks_fixture
from tests.moe.moe_cases import make_layer

CONFIG = MoEConfig(dim=16, hidden_dim=16, num_experts=4, top_k=2)
PARALLEL = {"sharded": ParallelConfig(ep=1, edp_shard=2), "ep": ParallelConfig(ep=2, edp_shard=1)}


class Block(nn.Module):
    """Attention's place is a matrix'."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(16, 16)
        self.moe = make_layer(CONFIG)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x + self.dense(x))


class Model(nn.Module):
    """The root holds an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 32)

    def logits(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().flatten(0, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.logits(ids), ids.roll(1, -1).flatten())


class Logits(Model):
    """Leaves the loss to others."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(ids)


def make(layout: str, **options: Any) -> nn.Module:
    meshes = build_meshes(PARALLEL[layout], "cpu")
    # In bf16 routers are units of their own.
    return parallelize_moe(Model(), meshes, fsdp=FSDPOptions(param_dtype=torch.bfloat16, **options))


def tokens_of(rank: int) -> Tensor:
    return torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(rank))


def error_after_a_failed_backward(ids: Tensor) -> str:
    def fail(grad: Tensor) -> Tensor:
        raise FloatingPointError

    model = make("ep")
    model(ids).backward()
    hook = model.layers[1].register_forward_hook(lambda m, a, y: y.register_hook(fail) and None)
    with pytest.raises(FloatingPointError):
        model(ids).backward()
    hook.remove()
    drop_step(model)  # is no way around it
    with pytest.raises(RuntimeError) as error:
        model(ids)
    return str(error.value)


def norms_around_inference_mode(ids: Tensor) -> list[float]:
    """Of a model whose first forward is under inference_mode, and of one that has none."""
    norms = []
    for evaluated in (True, False):
        model = make("ep")
        for _ in range(2):
            if evaluated:
                with torch.inference_mode():
                    model(ids)
            model(ids).backward()
        norms.append(clip_grad_norm_(model, math.inf).total)
    return norms


def second_derivative(layout: str, ids: Tensor, **options: Any) -> tuple[str, float, float]:
    """The error, and norms of the next step: after the error, and of another model."""
    refused, other = make(layout, **options), make(layout, **options)
    with pytest.raises(NotImplementedError) as error:
        refused(ids).backward(create_graph=True)
    norms = []
    for model in (refused, other):
        model(ids).backward()
        norms.append(clip_grad_norm_(model, math.inf).total)
    return str(error.value), *norms


def gradients_of_a_penalty(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Of a penalty on the gradient of the logits, which needs no weight."""
    logits = model(ids)
    loss = nn.functional.cross_entropy(logits, ids.flatten())
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    (loss + 100 * grad.square().sum()).backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    ids = tokens_of(rank)
    found: dict[Any, Any] = {}
    for layout in PARALLEL:
        for gathered in (True, False):
            options = {"dense_strategy": "optim"} if gathered else {}
            found[layout, gathered] = second_derivative(layout, ids, **options)
    meshes = build_meshes(PARALLEL["ep"], "cpu")
    found["penalty"] = gradients_of_a_penalty(parallelize_moe(Logits(), meshes), ids)
    found["inference mode"] = norms_around_inference_mode(ids)
    found["failed"] = error_after_a_failed_backward(ids)
    return copy.deepcopy(found)


found = ranks_fixture(2, worker)


@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "resharded"])
@pytest.mark.parametrize("layout", PARALLEL)
def test_a_second_derivative_is_refused(layout: str, gathered: bool, found: dict[str, Any]) -> None:
    """It would read weights that the first one has freed. What is refused leaves nothing behind."""
    error, after, expected = found[layout, gathered]
    assert error.startswith("create_graph (True) must be False for a model of parallelize_moe")
    assert after == expected > 0


def test_a_penalty_on_logits_works(found: dict[str, Any]) -> None:
    of_ranks = [gradients_of_a_penalty(Logits(), tokens_of(rank)) for rank in range(2)]
    for name, grad in found["penalty"].items():
        torch.testing.assert_close(grad, (of_ranks[0][name] + of_ranks[1][name]) / 2, msg=name)


def test_a_first_forward_may_be_in_inference_mode(found: dict[str, Any]) -> None:
    evaluated, plain = found["inference mode"]
    assert evaluated == plain > 0


def test_a_failed_backward_is_no_base_for_another_step(found: dict[str, Any]) -> None:
    assert "the last backward ended in an exception" in found["failed"]
