"""What users do with an `nn.Module` besides training it works on a parallelized model, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from moecore import FSDPOptions, ParallelConfig, build_meshes, parallelize_moe
from tests.helpers.ranks import run_ranks
from tests.moe.moe_cases import BASE, make_layer

WORLD = 2
LAYOUTS = {
    "ep": (ParallelConfig(ep=2), "optim_grads_params"),
    "cut": (ParallelConfig(ep=1), "optim_grads_params"),
    "optim": (ParallelConfig(ep=1), "optim"),
    "copies": (ParallelConfig(dp_replicate=2, edp_replicate=2), "no_shard"),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, BASE.dim)
        self.layers = nn.ModuleList([make_layer(BASE), nn.Linear(BASE.dim, BASE.dim)])

    def forward(self, ids: Tensor) -> Tensor:
        return self.encode(ids).square().mean()

    def encode(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


def make(layout: str | None) -> Any:
    """Return a plain model (None), or the same parallelized."""
    if layout is None:
        return Model()
    parallel, strategy = LAYOUTS[layout]
    fsdp = FSDPOptions(dense_strategy=strategy, embedding_strategy=strategy)
    return parallelize_moe(Model(), build_meshes(parallel, "cpu"), fsdp=fsdp)


def batch(seed: int = 0) -> Tensor:
    return torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(seed))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def hooked(layout: str | None) -> dict[str, Any]:
    """Gradients of two backwards where hooks mask an expert, double and look on."""
    model, seen = make(layout), []
    w1, norm = model.layers[0].experts.w1, model.layers[1].bias
    mask = torch.ones(BASE.num_experts, 1, 1, 1)
    mask[1] = 0
    if isinstance(w1, DTensor):
        mask = distribute_tensor(mask.expand(w1.shape), w1.device_mesh, w1.placements)
    w1.register_hook(lambda grad: grad * mask)
    w1.register_hook(lambda grad: grad * 2)
    norm.register_hook(lambda grad: seen.append(whole(grad)))
    removed = model.embed.weight.register_hook(torch.zeros_like)
    removed.remove()
    for seed in range(2):
        model(batch(seed)).backward()
    return gradients(model) | {f"seen {i}": grad for i, grad in enumerate(seen)}


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    return {f"hooked {layout}": hooked(layout) for layout in LAYOUTS}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    result: dict[str, Any] = run_ranks(WORLD, worker)
    return result


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(found[name], tensor, atol=1e-5 * scale, rtol=0, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hooks_of_a_parameter_get_its_gradient_and_change_it(
    layout: str, found: dict[str, Any]
) -> None:
    expected = hooked(None)
    assert expected["layers.0.experts.w1"][1].abs().max() == 0
    assert {"seen 0", "seen 1"} < expected.keys()
    assert_close(found[f"hooked {layout}"], expected)
