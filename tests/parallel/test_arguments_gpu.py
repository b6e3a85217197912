from typing import Any

import pytest
import torch

from moecore import ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.base.rank_checks import gather_objects
from moecore.models import Decoder
from moecore.train import AdamW
from tests.helpers.ranks import run_ranks
from tests.helpers.waits import launched
from tests.parallel.small_decoder import small_decoder

pytestmark = pytest.mark.gpu

CONFIG = small_decoder(256, 384, vocab_size=128, head_dim=64, max_seq_len=128, experts=8)
MOST = 20  # forwards after which the host has seen the difference


def make(device: torch.device) -> tuple[Any, TrainStep]:
    torch.manual_seed(0)
    model = Decoder(CONFIG).to(device)
    parallelize_moe(model, build_meshes(ParallelConfig(tp=2)), dispatch="local")
    return model, TrainStep(model, AdamW(model.parameters(), lr=1e-3), max_norm=1.0)


def inputs(device: torch.device, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, 128, (2, 2, 64), generator=generator).to(device)
    return dict(tokens_BT=tokens, labels_BT=labels)


def differing(rank: int, device: torch.device) -> list[Any]:
    """Return of each rank: whether the step was skipped, weights are equal, and the error."""
    model, step = make(device)
    for _ in range(2):
        step.forward_backward([inputs(device)])
        step.finish()
    before = [param.to_local().clone() for param in model.parameters()]
    step.forward_backward([inputs(device, seed=rank)])
    skipped = bool(step.finish().is_skipped)
    is_equal = all(map(torch.equal, before, (p.to_local() for p in model.parameters())))
    error = ""
    try:
        for _ in range(MOST):
            step.forward_backward([inputs(device)])
            step.finish()
    except ValueError as raised:
        error = str(raised)
    return gather_objects((skipped, is_equal, error))


def comparing(rank: int, device: torch.device) -> None:
    model, _ = make(device)
    arguments = model._moecore_parallel_state.arguments
    for _ in range(4):  # the first has a wait, and later ones allocate
        arguments.compare_arguments(inputs(device), None)
    given = inputs(device)
    with launched("a comparison of rows"):
        arguments.compare_arguments(given, None)
    arguments.raise_pending_errors()


def test_contents_that_differ_skip_the_step_and_raise() -> None:
    for skipped, is_equal, error in run_ranks(2, differing, device_type="cuda"):
        assert skipped and is_equal
        assert "contents of labels_BT and 1 more" in error and "ranks that share rows" in error


@pytest.mark.gpus(2)
def test_a_comparison_waits_for_no_gpu() -> None:
    run_ranks(2, comparing, device_type="cuda")
