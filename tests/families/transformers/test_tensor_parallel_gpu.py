"""Tensor parallelism of transformers models over NCCL, against one process with the stock class.

python -m pytest -m gpu tests/families/transformers/test_tensor_parallel_gpu.py     on 2 GPUs
"""

from typing import Any

import pytest
import torch
from torch import nn

from moecore import ParallelConfig, build_meshes, parallelize_moe
from tests.families.transformers.family_models import batch, loss_of, tiny_model
from tests.families.transformers.test_families import VOCABULARY, Found, gradients, worst
from tests.helpers.ranks import ranks_fixture
from tests.helpers.whole import gather_whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed"),
]
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_next")


def worker(rank: int, device: torch.device) -> dict[str, tuple[float, str]]:
    """Return the worst error of loss and gradients of each family, on rank 0."""
    meshes = build_meshes(ParallelConfig(tp=2, ep=2), device.type)
    errors = {}
    for family in FAMILIES:
        stock = tiny_model(family, vocab_size=VOCABULARY)
        inputs = {name: value.to(device) for name, value in batch(stock, 0).items()}
        expected = run_model(stock.to(device), inputs)
        model = tiny_model(family, vocab_size=VOCABULARY).to(device)
        found = run_model(parallelize_moe(model, meshes, dispatch="alltoall"), inputs)
        if rank == 0:
            errors[family] = worst(found, {name: value.cpu() for name, value in expected.items()})
    return errors


def run_model(model: nn.Module, inputs: Found) -> Found:
    """Return loss and full gradients of one forward and backward, on rank 0."""
    loss = loss_of(model, inputs)
    loss.backward()
    return gather_whole(
        {"loss": loss.detach()} | {f"grad/{n}": g for n, g in gradients(model).items()}
    )


errors = ranks_fixture(2, worker, device_type="cuda")


@pytest.mark.parametrize("family", FAMILIES)
def test_two_gpus_equal_one(family: str, errors: dict[str, Any]) -> None:
    error, name = errors[family]
    assert error <= 1e-5, f"{name}: {error}"
