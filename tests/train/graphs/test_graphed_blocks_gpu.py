"""Blocks whose parts are graphs train as eager ones do, on GPUs.

    python -m pytest -m gpu tests/train/graphs/test_graphed_blocks_gpu.py

Ranks that share a GPU have collectives of gloo, which no graph contains: attention over tp or cp
runs eagerly. They have no stages, because gloo's messages do not send GPU memory. Eager training is
run twice: replays may differ from it as much as two eager runs do. Between steps memory that was
freed is written over.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moecore import DenseOptions, MemoryOptions
from moecore.train.graphs.regions import drop_graphs
from tests.helpers.ranks import ranks_fixture
from tests.train.graphs.test_forward_backward_gpu import scribble
from tests.train.graphs.test_graphed_blocks import CASES, LAYERS, SHARED, Case, parts_of, train

WORLD = 2
pytestmark = pytest.mark.gpu

CASES = CASES | {
    "compiled": Case(dense=DenseOptions(compile=True)),
    "compiled, computed again": Case(
        **SHARED,
        dense=DenseOptions(compile=True),
        options=dict(memory=MemoryOptions(recompute="gemm_last")),
    ),
    "shared experts on a stream of their own": Case(
        **SHARED, dense=DenseOptions(overlap_shared=True)
    ),
}


def without_attention(case: Case) -> Case:
    """Return the case with the parts that are captured if attention communicates over gloo."""
    has_mtp_block = case.preset != "tiny"
    is_eager = case.tp * case.cp > 1 and not case.scopes
    return replace(case, parts=case.parts - is_eager * (LAYERS + has_mtp_block))


if torch.cuda.device_count() < WORLD:
    CASES = {name: without_attention(case) for name, case in CASES.items() if case.pp == 1}


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        runs = [
            train(case, device, graphed=graphed, between=scribble)
            for graphed in (False, False, True)
        ]
        numbers = [
            torch.stack([torch.as_tensor(x).double().cpu().norm() for x in run]) for run, _ in runs
        ]
        parts = parts_of(runs[-1][1])
        found[name] = *numbers, len(parts), max(len(part._pairs) for part in parts)
        drop_graphs(runs[-1][1])  # before the groups of their collectives
        del runs
        torch.cuda.empty_cache()
        dist.barrier()
    return found


found = ranks_fixture(WORLD, worker, device_type="cuda")


@pytest.mark.parametrize("name", CASES)
def test_replays_train_as_eager_calls_do(name: str, found: dict[str, Any]) -> None:
    case, (eager, again, graphed, parts, pairs) = CASES[name], found[name]
    noise = (eager - again).abs().cummax(0).values
    assert ((eager - graphed).abs() <= 2 * noise).all() and pairs == case.pairs
    assert parts == case.parts
