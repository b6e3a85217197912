from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore import (
    MoEConfig,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.rank_checks import gather_objects
from moecore.base.torch_private import get_local_tensor
from moecore.io import Saver, latest, load, save, stream_weights
from moecore.models import Decoder, DecoderConfig
from moecore.train import AdamW, TrainingOffload
from tests.helpers.errors import error_of
from tests.helpers.ranks import run_ranks

SIZES = dict(vocab_size=32, dim=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8)
MOE = MoEConfig(dim=16, hidden_dim=8, num_experts=4, top_k=2)
CONFIG = DecoderConfig(**SIZES, tie_embeddings=True, moe=MOE)


class Run:
    """A tiny decoder and its steps."""

    def __init__(self, **degrees: int) -> None:
        self.model = Decoder(CONFIG)
        self.model.init_weights(seed=3)
        meshes = build_meshes(ParallelConfig(**degrees), "cpu")
        parallelize_moe(self.model, meshes, pipeline=PipelineConfig() if "pp" in degrees else None)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2)
        self.step = TrainStep(self.model, self.optimizer, max_norm=1.0)
        self.offload = TrainingOffload(self.model, self.optimizer)

    def train(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 32, (2, 7), generator=generator)
        with self.step.micro_batch():
            loss = self.model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        self.step.finish()
        return loss.detach()

    def tensors(self) -> list[Tensor]:
        of_params = [self.optimizer.state[param] for param in self.model.parameters()]
        states = [state[key] for state in of_params for key in sorted(state)]
        return [
            get_local_tensor(x) for x in (*self.model.parameters(), *self.model.buffers(), *states)
        ]

    def memory(self) -> list[torch.UntypedStorage]:
        units = vars(self.model)["_moecore_parallel_state"].engine.units
        flats = (buffer._flat for unit in units for buffer in unit.list_buffers())
        sizes = (flat.untyped_storage().nbytes() for flat in flats if flat is not None)
        self.buffer_bytes = sum(sizes)
        return [x.untyped_storage() for x in self.tensors()]


def equal(one: Run, other: Run) -> bool:
    pairs = zip(one.tensors(), other.tensors(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("number", [20, pytest.param(200, marks=pytest.mark.nightly)])
def test_cycles_change_no_bit_and_grow_nothing(no_group_left: None, number: int) -> None:
    run, other = Run(), Run()
    sizes = set()
    for i in range(number):
        assert torch.equal(run.train(i), other.train(i))
        before = run.memory()
        run.offload.offload()
        assert all(storage.nbytes() == 0 for storage in before)
        run.offload.onload()
        sizes.add((run.offload.host_bytes, len(before)))
    assert equal(run, other) and len(sizes) == 1 and not run.offload.offloaded_parts


def cycles(rank: int, device: torch.device, folder: str) -> dict[str, list[Any]]:
    run, other = Run(ep=2), Run(ep=2)
    stream = stream_weights(run.model, bucket_bytes=100_000)
    found: dict[str, Any] = {"freed": [], "losses": []}
    for number, parts in enumerate(
        (["weights"], ["optimizer"], ["buffers"], ["all"], ["weights", "all", "weights"])
    ):
        losses = [run.train(number), other.train(number)]
        found["losses"].append(torch.equal(*losses))
        before, sent = run.memory(), {n: t.clone() for n, t in stream}
        held = run.buffer_bytes
        for part in parts:
            run.offload.offload(part)
        found["freed"].append(sum(storage.nbytes() == 0 for storage in before))
        now = run.memory()
        found.setdefault("buffers", []).append((held > 0, run.buffer_bytes))
        same = all(torch.equal(t, sent[n]) for n, t in stream)  # of weights that are away
        found.setdefault("streamed", []).append(same)
        if parts == ["all"]:
            save(folder, number, run.model, run.optimizer)
            with torch.no_grad():
                run.model.get_parameter("model.norm.weight").zero_()
            load(latest(folder), run.model, run.optimizer)
        for part in parts[1:2] or ["all"]:
            run.offload.onload(part)
        found.setdefault("back", []).append(len(now))
    found["equal"] = equal(run, other)
    return {name: gather_objects(value) for name, value in found.items()}


@pytest.mark.slow
def test_every_part_on_two_ranks(tmp_path: Path) -> None:
    found = run_ranks(2, cycles, str(tmp_path))
    assert found["equal"] == [True] * 2
    for rank in range(2):
        assert all(found["losses"][rank]) and all(found["streamed"][rank])
        weights, optimizer, buffers, everything, twice = found["freed"][rank]
        assert weights > 10 and optimizer > 2 * weights and buffers == 0
        assert everything == twice == weights + optimizer
        gone = [size == 0 for _, size in found["buffers"][rank]]
        assert gone == [False, False, True, True, True]
        assert all(had for had, _ in found["buffers"][rank])


def test_what_would_read_memory_that_is_away_raises_one_line(no_group_left: None) -> None:
    run = Run()
    run.train(0)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    run.offload.offload("optimizer")
    run.model(tokens)  # reads no state
    with pytest.raises(ValueError, match=r"optimizer.step\(\) must not run while optimizer of the"):
        run.optimizer.step()
    run.offload.offload("weights")
    with pytest.raises(ValueError, match=r"forward must not run while weights of the training are"):
        run.model(tokens)
    run.offload.onload("weights")
    run.model(tokens)
    run.offload.onload()
    run.train(1)
    with run.step.micro_batch():
        run.model(tokens, tokens).backward()
        with pytest.raises(ValueError, match=r"offload\(\) must not be within a micro_batch"):
            run.offload.offload()
    with pytest.raises(ValueError, match=r"offload\(\) must be between steps, but 1 micro-batches"):
        run.offload.offload()
    run.step.finish()
    with pytest.raises(ValueError, match=r"selection \('moments'\) must be"):
        run.offload.offload("moments")  # type: ignore[arg-type]


def run_stages(rank: int, device: torch.device) -> list[list[Any]]:
    run, tokens = Run(pp=2), torch.arange(14).view(2, 7)
    inputs = [{"tokens_BT": tokens[:, :-1], "labels_BT": tokens[:, 1:]}]
    run.offload.offload("weights")
    found: list[Any] = [error_of(lambda: run.step.compute_losses(inputs))]
    found.append(error_of(lambda: run.step.forward_backward(inputs)))
    run.step.drop()
    run.offload.onload()
    losses = run.step.compute_losses(inputs), run.step.forward_backward(inputs)
    return gather_objects([*found, *map(float, losses)])


def test_every_stage_raises_before_it_waits_for_another() -> None:
    for compute, train, *losses in run_ranks(4, run_stages, over_gloo=True):
        assert compute == train
        assert compute.startswith("forward must not run while weights of the training are off")
        assert losses[0] == losses[1] > 0


def test_gradients_and_shared_memory_come_back(no_group_left: None) -> None:
    model, flat = torch.nn.Linear(4, 3), torch.arange(15.0)
    model.weight.data, model.bias.data = flat[:12].view(3, 4), flat[12:]
    model(torch.ones(2, 4)).sum().backward()
    want = [x.clone() for x in (model.weight, model.bias, model.weight.grad, model.bias.grad)]
    offload = TrainingOffload(model)
    offload.offload()
    assert flat.untyped_storage().nbytes() == 0
    with torch.no_grad():
        assert torch.equal(model.weight, want[0])  # as any tensor of the host
        model.bias.add_(1)
        want[1] += 1
    assert model.weight.untyped_storage()._cdata == model.bias.untyped_storage()._cdata
    want[0] = torch.full((3, 4), 5.0)
    model.weight.data = want[0].clone()  # other memory, whose values come back too
    offload.onload()
    found = [model.weight, model.bias, model.weight.grad, model.bias.grad]
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert model.weight.untyped_storage()._cdata == model.bias.untyped_storage()._cdata
    assert model.bias.storage_offset() == 12 and torch.equal(flat[12:], want[1])


def test_a_checkpoint_leaves_memory_that_can_be_freed(tmp_path: Path, no_group_left: None) -> None:
    run, other = Run(), Run()
    with Saver(tmp_path, run.model, run.optimizer) as saver:
        for number in range(2):
            assert torch.equal(run.train(number), other.train(number))
            saver.save(number, wait=number > 0)
            run.offload.offload()
            run.offload.onload()
    load(latest(tmp_path), run.model, run.optimizer)
    run.offload.offload()
    run.offload.onload()
    assert equal(run, other)


def test_memory_of_others_is_refused() -> None:
    model = torch.nn.Linear(4, 3)
    model.weight.data = torch.frombuffer(bytearray(48), dtype=torch.float32).view(3, 4)
    with pytest.raises(ValueError, match=r"memory of weights \(of a tensor \(3, 4\)\) must be"):
        TrainingOffload(model).offload()
    assert torch.equal(model.weight, torch.zeros(3, 4))


def test_a_captured_graph_is_refused(no_group_left: None) -> None:
    from moecore.moe.shortage import SkippedSteps
    from moecore.parallel.model.parallel_state import get_capacity

    run = Run()
    get_capacity(run.model).graph_steps = SkippedSteps()  # as a capture does
    with pytest.raises(ValueError, match=r"GraphedForwardBackward \(captured\) must not rely on"):
        run.offload.offload()
    run.offload.offload("optimizer")
