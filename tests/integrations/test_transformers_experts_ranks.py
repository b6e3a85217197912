"""`experts_implementation="moecore"` on two ranks: FSDP2, DDP, and experts that are DTensors.

The reference is "eager" in one process with the rows of both ranks.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers", minversion="5.17")

from moecore.integrations.transformers import register_experts
from tests.families.transformers.hf_models import assert_equal_numbers, batch, random_model
from tests.helpers.ranks import ranks_fixture

pytestmark = pytest.mark.slow

NAMES = ("qwen3-moe", "gpt-oss")
WAYS = ("FSDP2", "FSDP2 of experts", "DDP")
Numbers = dict[str, Tensor]


def numbers_of(model: nn.Module, rows: list[int]) -> Numbers:
    """Return gradients of the mean of the rows' losses, by the model's names."""
    ids, labels = batch()
    for row in rows:
        part = dict(input_ids=ids[row : row + 1], labels=labels[row : row + 1])
        (model(**part, use_cache=False).loss / len(rows)).backward()
    grads = {}
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        grads[name.removeprefix("module.")] = grad
    return grads


def sharded(name: str, way: str) -> nn.Module:
    model: Any = random_model(name)
    model.set_experts_implementation("moecore")
    if way == "DDP":
        return DistributedDataParallel(model)
    for layer in model.model.layers:
        if way == "FSDP2 of experts":
            fully_shard(layer.mlp.experts)
        fully_shard(layer)
    return fully_shard(model)


def over_experts(name: str, rank: int) -> tuple[Numbers, Numbers]:
    """Output and gradients of experts over two ranks as DTensors, and of "eager" with all."""
    results = []
    for num_ranks in (2, 1):
        experts: Any = random_model(name).model.layers[0].mlp.experts
        experts.config._experts_implementation = "moecore" if num_ranks == 2 else "eager"
        x_TD = torch.linspace(-1, 1, 8 * 32).sin().view(8, 32).requires_grad_()
        weights_TK = torch.linspace(0.1, 1, 16).view(8, 2).requires_grad_()
        ids_TK = torch.arange(16).view(8, 2) % 8
        if num_ranks == 2:
            mesh = init_device_mesh("cpu", (2,))
            for key, param in list(experts.named_parameters()):
                local = distribute_tensor(param.detach(), mesh, [Shard(0)])
                experts.register_parameter(key, nn.Parameter(local))
            experts.num_experts = 4
            ids_TK = ids_TK - 4 * rank
            ids_TK = ids_TK.where((ids_TK >= 0) & (ids_TK < 4), 4)  # as transformers marks them
        y_TD = experts(x_TD, ids_TK, weights_TK)
        y_TD.square().sum().backward() if num_ranks == 1 else None
        if num_ranks == 2:
            total_TD = y_TD.detach().clone()
            dist.all_reduce(total_TD)
            y_TD.backward(2 * total_TD)
            y_TD = total_TD
            for leaf in (x_TD, weights_TK):
                dist.all_reduce(leaf.grad)
        grads = {key: param.grad for key, param in experts.named_parameters()}
        assert all(isinstance(grad, DTensor) for grad in grads.values()) == (num_ranks == 2)
        whole = {k: g.full_tensor() if isinstance(g, DTensor) else g for k, g in grads.items()}
        numbers = {"y": y_TD.detach(), "x": x_TD.grad, "weights": weights_TK.grad}
        results.append(numbers | whole)
    return results[0], results[1]


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    register_experts()
    results: dict[str, Any] = {}
    for name in NAMES:
        for way in WAYS:
            results[f"{name} {way}"] = numbers_of(sharded(name, way), [rank])
        results[f"{name} DTensors"] = over_experts(name, rank)
    return results


results = ranks_fixture(2, worker, over_gloo=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_over_two_ranks(results: dict[str, Any], name: str, way: str) -> None:
    model: Any = random_model(name)
    model.set_experts_implementation("eager")
    assert_equal_numbers(results[f"{name} {way}"], numbers_of(model, [0, 1]))


@pytest.mark.parametrize("name", NAMES)
def test_experts_that_are_dtensors(results: dict[str, Any], name: str) -> None:
    """As in expert parallelism of transformers: local ids, and one more for all others."""
    assert_equal_numbers(*results[f"{name} DTensors"])
