"""Replay on four ranks: the same bits as recorded, and the numbers of one process.

Each rank has its own tokens, or under tp its slice of every sequence. The live routers are changed
after recording, and blocks are checkpointed with several forwards in flight, so that a wrong slice,
rank or forward shows. Rank 0 alone is the one process.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from moecore import Meshes, ParallelConfig, build_meshes, parallelize_moe
from moecore.base.torch_private import get_local_tensor
from moecore.rl import RouterReplay
from moecore.rl.choices import Choices
from tests.helpers.ranks import ranks_fixture
from tests.helpers.whole import gather_whole
from tests.rl import replay_cases

pytestmark = pytest.mark.slow

FOLDINGS: dict[str, dict[str, int]] = {
    "tp2-ep4": dict(dp_shard=2, tp=2, ep=4),
    "ep2-etp2": dict(dp_shard=4, ep=2, etp=2),
}
NAMES = ("shared", "capacity", "expert-choice")
CASES = [(name, folding) for name in NAMES for folding in FOLDINGS]
FORWARDS = 2


def inputs_of(data_rank: int) -> list[Tensor]:
    """Two micro-batches of two sequences, another pair on every data rank."""
    return replay_cases.batches(8)[FORWARDS * data_rank :][:FORWARDS]


def changed_router(model: nn.Module) -> None:
    """The same new router weights on every layout."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("router.weight"):
                values = torch.randn(parameter.shape, generator=generator) * 0.2
                if isinstance(parameter, DTensor):
                    values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
                parameter.copy_(values)


def one_process(name: str, data_ranks: int) -> tuple[list[Choices], dict[str, Tensor]]:
    """Per data rank its choices as recorded; losses and gradients of a replay by new routers."""
    model = replay_cases.make_model(replay_cases.CONFIGS[name])
    replay, every = RouterReplay(model), []
    for data_rank in range(data_ranks):
        with replay.record(), torch.no_grad():
            for x in inputs_of(data_rank):
                model(x)
        every.append(replay.choices())
    changed_router(model)
    total: dict[str, Tensor] = {}
    for data_rank in range(data_ranks):
        with replay.replay(every[data_rank]):
            found = replay_cases.train(model, inputs_of(data_rank), replay_cases.fifo)
        for key, value in found.items():
            if key.startswith("loss"):
                total[f"{key.replace('/', ' ')}/{data_rank}"] = value
            elif key.startswith("grad"):
                total[key] = total.get(key, torch.zeros(())) + value / data_ranks
    return every, total


def run_case(name: str, meshes: Meshes) -> dict[str, float | bool]:
    model = replay_cases.make_model(replay_cases.CONFIGS[name], "non-reentrant")
    parallelize_moe(model, meshes)
    inputs, replay = inputs_of(meshes.data_rank), RouterReplay(model)
    with replay.record():
        expected = replay_cases.train(model, inputs, replay_cases.fifo)
    choices = replay.choices()
    with replay.replay(choices):
        found = replay_cases.train(model, inputs, replay_cases.fifo)
    result: dict[str, float | bool] = {
        "same bits": replay_cases.equal(local(found), local(expected))
    }
    first = dist.get_rank() == 0
    every, total = one_process(name, meshes.data_ranks) if first else (None, {})
    whole = sent(every)[meshes.data_rank]
    as_engine = [  # [batch 2, sequence, layers, K] per forward
        torch.stack([ids_TK.unflatten(0, (2, -1)) for ids_TK in layers], dim=2)
        for layers in zip(*whole.values(), strict=True)
    ]
    result["from engine"] = replay_cases.same_choices(replay.from_engine(as_engine), choices)
    changed_router(model)
    with torch.no_grad(), replay.record():
        model(inputs[0])
    live = replay.choices()
    result["live choice differs"] = any(
        not torch.equal(live[layer][0], choices[layer][0]) for layer in live
    )
    with replay.replay(replay.from_engine(as_engine)):
        found = replay_cases.train(model, inputs, replay_cases.fifo)
    ours = {key: value for key, value in found.items() if key.startswith("grad")}
    for i in range(FORWARDS):  # of a tp group all ranks have the loss
        ours[f"loss {i}/{meshes.data_rank}"] = found[f"loss/{i}"]
    ours = gather_whole(ours)
    result["error"] = replay_cases.worst(ours, total) if first else 0.0
    return result


def local(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: get_local_tensor(tensor) for name, tensor in found.items()}


def sent(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def worker(rank: int, device: torch.device, cases: list[tuple[str, str]]) -> dict[str, list[Any]]:
    results: dict[str, list[Any]] = {}
    for folding, degrees in FOLDINGS.items():
        meshes = build_meshes(ParallelConfig(**degrees), "cpu")
        for name in (name for name, where in cases if where == folding):
            every: list[Any] = [None] * 4
            dist.all_gather_object(every, run_case(name, meshes))
            results[f"{name}/{folding}"] = every
    return results


results = ranks_fixture(4, worker, "name", "folding")


@pytest.mark.parametrize(("name", "folding"), CASES)
def test_replay_on_ranks(name: str, folding: str, results: dict[str, list[Any]]) -> None:
    ranks = results[f"{name}/{folding}"]
    for rank, result in enumerate(ranks):
        for check in ("same bits", "from engine"):
            assert result[check], f"{check}, rank {rank}"
        assert result["error"] <= 1e-5, f"rank {rank}"
    assert any(result["live choice differs"] for result in ranks)
