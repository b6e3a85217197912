from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from moecore import Meshes, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.base.torch_private import get_local_tensor
from moecore.io.checkpoint.snapshot import collect_rank_state, load_rank_state
from moecore.models import Decoder, preset
from moecore.train import AdamW
from tests.helpers.ranks import run_ranks

CONFIG = preset("tiny-shared")
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "own": lambda params: AdamW(params, lr=1e-3),
    "own, bf16 moments": lambda params: AdamW(params, lr=1e-3, moment_dtype=torch.bfloat16),
    "torch's": lambda params: torch.optim.AdamW(params, lr=1e-3),
}


def train(rank: int, run: Any, first: int, last: int) -> list[float]:
    model, _, schedule, step = run
    losses = []
    for number in range(first, last):
        generator = torch.Generator().manual_seed(10 * number + rank)
        tokens_BT = torch.randint(CONFIG.vocab_size, (2, 17), generator=generator)
        inputs = {"tokens_BT": tokens_BT[:, :-1], "labels_BT": tokens_BT[:, 1:]}
        losses += step.forward_backward([inputs]).tolist()
        step.finish()
        schedule.step()
    local_tensors = map(get_local_tensor, model.state_dict().values())
    return [*losses, *(float(p.detach().float().sum()) for p in local_tensors)]


def worker(rank: int, device: torch.device) -> dict[str, tuple[Any, ...]]:
    meshes = build_meshes(ParallelConfig(ep=2, edp_shard=-1), "cpu")
    return {name: run_case(rank, meshes, name) for name in OPTIMIZERS}


def run_case(rank: int, meshes: Meshes, name: str) -> tuple[Any, ...]:
    def fresh(seed: int) -> Any:
        model = Decoder(CONFIG)
        model.init_weights(seed)
        parallelize_moe(model, meshes)
        optimizer = OPTIMIZERS[name](model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return model, optimizer, schedule, TrainStep(model, optimizer, max_norm=1.0)

    first, other = fresh(0), fresh(1)
    train(rank, first, 0, 2)
    train(rank, other, 7, 8)  # what it has is replaced
    extra = {"number": torch.tensor(7)}
    state = collect_rank_state(*first[:2], extra, scheduler=first[2])
    state = {**state, "tensors": {k: v.clone() for k, v in state["tensors"].items()}}
    ahead, draw = train(rank, first, 2, 4), torch.rand(())
    torch.rand(3)
    found = load_rank_state(state, *other[:2], scheduler=other[2])
    return ahead, train(rank, other, 2, 4), int(found["number"]), bool(torch.rand(()) == draw)


def test_a_fresh_model_goes_on_with_the_same_bits() -> None:
    for name, (ahead, other, number, has_generators) in run_ranks(2, worker).items():
        assert ahead == other and number == 7 and has_generators, name
