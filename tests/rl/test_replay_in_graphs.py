"""A graph of a step replays the choices among its inputs, which differ from step to step."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from moecore import FSDPOptions, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.models import Decoder, preset
from moecore.rl import RouterReplay
from moecore.train import GraphedForwardBackward
from tests.helpers.ranks import run_ranks
from tests.train.graphs.graph_fakes import fake_steps

STEPS, ROWS, LENGTH = 6, 2, 32
CONFIG = preset("tiny")


def list_batches(device: str, *, num_choices: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens, and ids [layers, T, K] of which the steps have `num_choices` different."""
    g = torch.Generator().manual_seed(0)
    assert CONFIG.moe is not None
    for step in range(STEPS):
        tokens_BT = torch.randint(0, CONFIG.vocab_size, (ROWS, LENGTH + 1), generator=g)
        choice = torch.Generator().manual_seed(step % num_choices)
        shape = CONFIG.num_layers - len(CONFIG.dense_layers), ROWS * LENGTH, CONFIG.moe.num_experts
        ids_LTK = torch.rand(*shape, generator=choice).topk(CONFIG.moe.top_k).indices
        yield tokens_BT.to(device), ids_LTK.to(device, torch.int32)


def train(device: str, *, graphed: bool, num_choices: int = STEPS) -> Tensor:
    """Return the losses of steps that replay their choices."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Decoder(CONFIG, device="meta")
    meshes = build_meshes(ParallelConfig(), device)
    parallelize_moe(model, meshes, fsdp=FSDPOptions(param_dtype=dtype))
    model.to_empty(device=device)
    model.init_weights(0)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.5), max_norm=1.0)
    replay = RouterReplay(model)

    def forward_backward(tokens_BT: Tensor, ids_LTK: Tensor) -> Tensor:
        choices = {name: [ids] for name, ids in zip(replay.layer_names, ids_LTK, strict=True)}
        with replay.replay(choices, check=False), step.micro_batch():
            loss = model(tokens_BT[:, :-1], tokens_BT[:, 1:])
            loss.backward()
        return loss.detach()

    forward_backward.model = model  # type: ignore[attr-defined]
    run = GraphedForwardBackward(forward_backward, model) if graphed else forward_backward
    losses = []
    for batch in list_batches(device, num_choices=num_choices):
        losses.append(run(*batch).clone())
        step.finish()
    if isinstance(run, GraphedForwardBackward):
        run.close()
    return torch.stack(losses).cpu()


def test_every_step_has_its_own_choices() -> None:
    """A fake graph runs the function again, with the inputs that were copied."""
    with fake_steps():
        graphed = train("cpu", graphed=True)
    assert torch.equal(graphed, train("cpu", graphed=False))
    assert not torch.equal(graphed, train("cpu", graphed=False, num_choices=1))


def worker(rank: int, device: torch.device) -> list[Tensor]:
    losses = [train("cuda", graphed=graphed) for graphed in (False, False, True)]
    return [*losses, train("cuda", graphed=False, num_choices=1)]


@pytest.mark.gpu
def test_a_graph_reads_the_choices_of_each_step() -> None:
    eager, again, graphed, other = run_ranks(1, worker, device_type="cuda")
    noise = (eager - again).abs().cummax(0).values
    assert ((eager - graphed).abs() <= 2 * noise).all()
    assert (eager - other).abs()[-3:].min() > 10 * noise.max()


@pytest.mark.parametrize("check", [True, False])
def test_without_a_check_no_value_is_read(check: bool) -> None:
    """Tensors on meta have no values that a host could wait for."""
    assert CONFIG.moe is not None
    replay = RouterReplay(Decoder(CONFIG, device="meta"))
    ids_TK = torch.zeros(8, CONFIG.moe.top_k, dtype=torch.int32, device="meta")
    choices = {name: [ids_TK] for name in replay.layer_names}
    refused = pytest.raises((RuntimeError, NotImplementedError), match="meta")
    with refused if check else nullcontext(), replay.replay(choices, strict=False, check=check):
        pass
