"""transformers models on four ranks equal one process: logits, loss and every gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore import ParallelConfig, build_meshes, parallelize_moe
from moecore._compat import HAS_SEPARATE_PIECES
from tests.adapters.test_hf import ARCHITECTURES, random_model
from tests.ranks import run_ranks

FOLDINGS = {
    "ep4": dict(ep=4),
    "ep2-edp2": dict(ep=2, edp_shard=2),
    "ep2-etp2": dict(ep=2, etp=2),
    "etp2-replicate2": dict(dp_replicate=2, dp_shard=2, edp_replicate=2, edp_shard=1, etp=2),
}
CASES = [
    (name, folding)
    for name in ARCHITECTURES
    for folding in FOLDINGS
    if HAS_SEPARATE_PIECES or "etp" not in folding or name == "gpt-oss"
]


def batches() -> list[Tensor]:
    """A different number of tokens on each data rank."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 61, (1, 5 + 2 * r), generator=generator) for r in range(4)]


def run_sharded(model: nn.Module, folding: str) -> dict[str, Tensor]:
    meshes = build_meshes(ParallelConfig(**FOLDINGS[folding]), "cpu")
    parallelize_moe(model, meshes)
    ids = batches()[meshes.data_rank]
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, (out.logits.detach(), out.loss.detach()))
    found = {f"logits/{r}": logits for r, (logits, _) in enumerate(every)}
    found["loss"] = torch.stack([loss for _, loss in every])
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        found[f"grad/{name}"] = parameter.grad.full_tensor()
    return found


def run_plain(model: nn.Module) -> dict[str, Tensor]:
    outputs = [model(input_ids=ids, labels=ids, use_cache=False) for ids in batches()]
    losses = torch.stack([out.loss for out in outputs])
    losses.mean().backward()
    found = {f"logits/{r}": out.logits.detach() for r, out in enumerate(outputs)}
    found["loss"] = losses.detach()
    return found | {f"grad/{n}": p.grad for n, p in model.named_parameters()}  # type: ignore[misc]


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest element error relative to its tensor's largest element."""
    assert found.keys() == expected.keys()
    errors = [
        (found[n] - expected[n]).abs().max() / expected[n].abs().max().clamp(min=1e-8)
        for n in expected
    ]
    return float(torch.stack(errors).max())


def worker(rank: int, device: torch.device) -> dict[str, float]:
    errors: dict[str, float] = {}
    for name, folding in CASES:
        model = random_model(name)
        plain = copy.deepcopy(model)
        found = run_sharded(model, folding)
        errors[f"{name}/{folding}"] = worst(found, run_plain(plain)) if rank == 0 else 0.0
    return errors


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    return run_ranks(4, worker)


@pytest.mark.parametrize(("name", "folding"), CASES)
def test_equals_one_process(name: str, folding: str, errors: dict[str, float]) -> None:
    assert errors[f"{name}/{folding}"] <= 1e-5
