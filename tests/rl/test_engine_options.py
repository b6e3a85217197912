"""Router replay, fp16 with a loss scale and offload, in every combination, in one engine.

Two optimizer steps on four ranks. A combination must give the losses and the weights of the engine
without it: to 1e-5 in fp32, and of the engine's own run in fp16. Some combinations also have
dynamic context parallelism, whose rows round otherwise in fp16.
"""

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore import (
    ContextOptions,
    FSDPOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.rl import GRPO, Engine
from moecore.train import AdamW
from moecore.train.loss_scale import DynamicLossScale
from tests.helpers.ranks import ranks_fixture
from tests.helpers.whole import gather_whole
from tests.rl import engine_cases as ec

OPTIONS = ("replay", "fp16", "offload")
CASES = ["+".join(names) for n in (1, 2, 3) for names in combinations(OPTIONS, n)]
CASES += ["dynamic", "dynamic+replay+offload", "dynamic+replay+fp16+offload"]
BASES = {"plain": "", "plain-fp16": "fp16"}


def train(options: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of two steps and, on rank 0, the weights after them."""
    meshes = build_meshes(ParallelConfig(dp_shard=4, ep=2), "cpu")
    is_fp16 = "fp16" in options
    fsdp = FSDPOptions(param_dtype=torch.float16 if is_fp16 else None)
    dynamic: Any = dict(loss="sum", context=ContextOptions(dynamic=True))
    dynamic = dynamic if "dynamic" in options else {}
    model, reference = (
        parallelize_moe(ec.decoder(), meshes, fsdp=fsdp, **dynamic) for _ in range(2)
    )
    scale = DynamicLossScale(initial=2.0**10) if is_fp16 else None
    optimizer = AdamW(model.parameters(), lr=1e-3, eps=1e-4)  # else rounding decides the smallest
    step = TrainStep(model, optimizer, max_norm=1.0, loss_scale=scale)
    max_tokens = 4 if dynamic else 24  # of a data rank: groups of 2 and 4 ranks share sequences
    engine = Engine(model, step, max_tokens=max_tokens, reference=reference)
    rollouts, losses = ec.rollouts_of(meshes.data_rank), []
    initial_N = engine.log_probs(rollouts).log_probs_N
    for _ in range(2):
        scores = engine.log_probs(rollouts, routes=True)
        batch = ec.near(rollouts, scores.log_probs_N)
        if "replay" in options:
            assert scores.routes_NLK is not None
            batch = batch.replace(routes_NLK=ec.forced(scores.routes_NLK, 8))
            assert not torch.equal(engine.log_probs(batch).log_probs_N, scores.log_probs_N)
            batch = batch.replace(routes_NLK=scores.routes_NLK)
        if "offload" in options:
            engine.offload("all")
            engine.onload("all")
        losses.append(float(engine.forward_backward(batch, GRPO()).loss))
        assert not bool(step.finish().is_skipped)
    assert torch.equal(engine.reference_log_probs(rollouts).log_probs_N, initial_N)
    return losses, gather_whole(dict(model.named_parameters()))


def worker(rank: int, device: torch.device, names: list[str]) -> Any:
    return {name: train(BASES.get(name, name)) for name in [*BASES, *names]}


results = ranks_fixture(4, worker, "name")


@pytest.mark.parametrize("name", CASES)
def test_a_combination_trains_as_without_it(name: str, results: Any) -> None:
    base = "plain-fp16" if "fp16" in name else "plain"
    (losses, weights), (base_losses, base_weights) = results[name], results[base]
    if name == "fp16" or ("dynamic" in name and "fp16" in name):
        if name == "fp16":  # is another run than fp32's
            base_losses = results["plain"][0]
        assert losses != base_losses
        torch.testing.assert_close(losses, base_losses, rtol=2e-2, atol=2e-2)
        return
    torch.testing.assert_close(losses, base_losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights, base_weights, rtol=1e-5, atol=1e-5)
