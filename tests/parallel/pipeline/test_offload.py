import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moecore import (
    MemoryOptions,
    Meshes,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.rank_checks import gather_objects
from moecore.models import Decoder
from moecore.parallel import Costs, make_schedule, offload_fractions
from moecore.parallel.model.parallel_state import get_parallel_state
from moecore.parallel.pipeline.orders import Action
from moecore.parallel.pipeline.run import _ScheduleRun
from moecore.train.memory.groups import OffloadChunk
from moecore.train.memory.offload import Offload
from tests.helpers.errors import error_of
from tests.helpers.ranks import ranks_fixture
from tests.parallel.small_decoder import small_decoder
from tests.train.memory.blocks import LateStreams

NUMBER = 4  # micro-batches
# Copied back at the same time: a block in backward, the block before, the next backward's last one.
MOST_BLOCKS = 3
PARTS = ("attention", "experts", "rest")
DECODER = small_decoder(16, 24, num_layers=6, head_dim=4, max_seq_len=64, shared=8)


def planned() -> tuple[float, ...]:
    """Return the fractions of 1F1B whose copies last twice as long as a forward."""
    schedule = make_schedule("1f1b", pp=2, chunks=1, num_micro_batches=NUMBER)
    costs = Costs.from_forward((1.0, 1.0))
    return offload_fractions(schedule, costs, [10**6] * 2, bytes_per_second=0.5e6)


PLANNED = planned()
LAYOUT = "Et|tt|tt|tL"
ONE = PipelineConfig(schedule="1f1b")
# Schedule, fraction of each stage, what is computed again.
CASES: dict[str, tuple[PipelineConfig, Any, Any]] = {
    "interleaved": (
        PipelineConfig(schedule="interleaved", layout=LAYOUT),
        (1.0, 0.5, 0.3, 0.0),
        (),
    ),
    "pairs": (PipelineConfig(schedule="overlapped", layout=LAYOUT), 1.0, ()),
    "weights apart": (
        PipelineConfig(schedule="zbv", layout=LAYOUT),
        (0.7, 1.0, 1.0, 0.5),
        "gemm_last",
    ),
    "1f1b": (ONE, PLANNED, ()),
    "gpipe": (PipelineConfig(schedule="gpipe"), 1.0, ()),
}
REFUSED = {
    "other stages": r"MemoryOptions.offload_fraction \(\(0.5,\)\) must have a number per .*\(2\):",
    "no stages": r"MemoryOptions.offload_fraction \(\(0.5, 0.5\)\) must be one number where",
}


def batch(number: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * number + rank)
    tokens = torch.randint(0, 61, (2, 9 + 2 * number), generator=generator)
    return {"tokens_BT": tokens[:, :-1], "labels_BT": tokens[:, 1:].contiguous()}


class Watch:
    """What forwards of each stage copy, and whether it lies where it should."""

    def __init__(self) -> None:
        self.out: Counter[int] = Counter()
        self.kept: Counter[int] = Counter()
        self.whole: Counter[int] = Counter()  # forwards whose last block leaves
        self.largest = 0  # copy
        self.held = 0  # inputs of stages that are copied, although they are held
        self.freed = 0  # chunks that left whole
        self.misplaced = 0  # bytes that are on the device behind `free`, or not before backward
        self.most_blocks = 0  # that are on the device after a copy back, at the same time

    @contextmanager
    def on(self, offload: Offload) -> Iterator[None]:
        forward, backward, free, fetch = (
            _ScheduleRun._run_forward,
            _ScheduleRun._run_backward,
            offload.free_last_block,
            offload._fetch_storage,
        )

        chunks = list[OffloadChunk]()

        def run_forward(run: _ScheduleRun, action: Action) -> Tensor | None:
            before = offload.out_bytes, offload.candidate_bytes
            result = forward(run, action)
            chunks.append(run._forward_chunk)
            self.out[action.stage] += offload.out_bytes - before[0]
            self.kept[action.stage] += offload.candidate_bytes - before[1]
            self.whole[action.stage] += run._forward_chunk.offloads_last_block
            hidden = run._forwards[action.stage, action.micro_batch].hidden
            if hidden is not None:
                held = StorageWeakRef(hidden.untyped_storage()).cdata
                self.held += sum(c.ref.cdata == held for c in copies(run._forward_chunk) if c.piece)
            self.largest = max([self.largest, *(c.size for c in copies(run._forward_chunk))])
            return result

        def run_backward(run: _ScheduleRun, action: Action) -> Tensor | None:
            chunk = run._forwards[action.stage, action.micro_batch].chunk
            if chunk.offloads_last_block:
                last = replace(chunk, layers=chunk.layers[-1:])
                self.misplaced += sum(c.size for c in copies(last) if c.data is None)
            return backward(run, action)

        def run_fetch(use: Any, shape: torch.Size) -> Tensor:
            data = fetch(use, shape)
            blocks = [replace(c, layers=[layer]) for c in chunks for layer in c.layers]
            back = [any(x.is_back and x.data is not None for x in copies(b)) for b in blocks]
            self.most_blocks = max(self.most_blocks, sum(back))
            return data

        def run_free(chunk: OffloadChunk) -> None:
            free(chunk)
            if chunk.offloads_last_block:
                self.freed += 1
                gone = [c for c in copies(chunk) if c.piece is not None]
                self.misplaced += sum(c.size for c in gone if c.data is not None)

        with (
            patch.object(_ScheduleRun, "_run_forward", run_forward),
            patch.object(_ScheduleRun, "_run_backward", run_backward),
            patch.object(offload, "free_last_block", run_free),
            patch.object(offload, "_fetch_storage", run_fetch),
        ):
            yield


def copies(chunk: OffloadChunk) -> list[Any]:
    return [
        c for layer in chunk.layers for group in layer.groups.values() for c in group.new_copies
    ]


def trained(meshes, config, memory, watch=None) -> tuple[dict[str, Tensor], Offload | None]:
    """Return losses and gradients of a step on this rank, and what offloads."""
    model = Decoder(DECODER, device="meta")
    with patch("moecore.train.memory.apply.Offload", partial(Offload, min_bytes=1)):
        parallelize_moe(model, meshes, pipeline=config, memory=memory, dispatch="alltoall")
    model.to_empty(device="cpu")
    model.init_weights(1)
    step = TrainStep(model, num_micro_batches=NUMBER)
    offload = get_parallel_state(model).pipeline.offload  # type: ignore[union-attr]
    batches = [batch(number, meshes.data_rank) for number in range(NUMBER)]
    with nullcontext() if watch is None else watch.on(offload):
        losses = step.forward_backward(batches)
    found = {n: p.grad.to_local().clone() for n, p in model.named_parameters()}  # type: ignore[union-attr]
    step.drop()
    return found | {"losses": losses}, offload


def compared(meshes, config, fractions, recompute) -> dict[str, Any]:
    """Return where a step with offload differs from one without, and what it copies."""
    plain = MemoryOptions(recompute=recompute)
    want, nothing = trained(meshes, config, plain)
    assert nothing is None
    options = replace(plain, offload=PARTS, offload_fraction=fractions)
    watch = Watch()
    with patch("moecore.train.memory.storages.CopyStreams", LateStreams):
        found, offload = trained(meshes, config, options, watch)
    assert found.keys() == want.keys() and offload is not None
    return {
        "bits": [name for name in want if not torch.equal(found[name], want[name])],
        "gradients": len(want),
        "watch": watch,
        "out": offload.out_bytes,
        "back": offload.back_bytes,
        "late": offload.late_bytes,
        "on host": offload._pool.used_bytes,
    }


def refusals(meshes: Meshes) -> dict[str, str]:
    """What a rank is told; nothing communicates before."""
    calls = {
        "other stages": (meshes, (0.5,), ONE),
        "no stages": (build_meshes(ParallelConfig(ep=4), "cpu"), (0.5, 0.5), None),
    }
    errors = {}
    for name, (its_meshes, fractions, config) in calls.items():
        memory = MemoryOptions(offload=PARTS, offload_fraction=fractions)
        model = Decoder(DECODER, device="meta")
        how = dict(memory=memory, pipeline=config)
        errors[name] = error_of(partial(parallelize_moe, model, its_meshes, **how))
    return errors


def worker(rank: int, device: torch.device) -> list[dict[str, Any]]:
    meshes = build_meshes(ParallelConfig(pp=2, ep=2), "cpu")
    found = {name: compared(meshes, *case) for name, case in CASES.items()}
    found["refused"] = refusals(meshes)
    return gather_objects(found)


results = ranks_fixture(4, worker)


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_without(name: str, results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert of_rank[name]["bits"] == [] and of_rank[name]["gradients"] > 20


@pytest.mark.parametrize("name", CASES)
def test_stages_copy_their_fractions(name: str, results: list[dict[str, Any]]) -> None:
    fractions = CASES[name][1]
    largest = max(of_rank[name]["watch"].largest for of_rank in results)
    for of_rank in results:
        watch = of_rank[name]["watch"]
        for stage, kept in watch.kept.items():
            fraction = fractions[stage] if isinstance(fractions, tuple) else fractions
            assert 0 <= fraction * kept - watch.out[stage] < NUMBER * largest
            assert kept > 0 or not watch.whole[stage]
            assert (watch.out[stage] > 0) == (fraction * kept > 0)
        assert of_rank[name]["out"] == of_rank[name]["back"] == sum(watch.out.values())


@pytest.mark.parametrize("name", CASES)
def test_what_has_gone_is_freed_and_back_in_time(name: str, results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        found = of_rank[name]
        assert found["watch"].misplaced == found["late"] == found["on host"] == 0
        assert found["watch"].held == 0 and found["watch"].most_blocks <= MOST_BLOCKS
        assert found["watch"].freed == sum(found["watch"].whole.values())


def test_a_last_block_leaves_where_an_item_runs_while_it_is_away(results) -> None:
    def whole(name: str) -> dict[int, int]:
        return dict(sum((of_rank[name]["watch"].whole for of_rank in results[::2]), Counter()))

    assert whole("interleaved") == {0: 4, 1: 4, 2: 2}  # the first of each round comes back at once
    assert whole("pairs") == {0: 4, 1: 4} and whole("1f1b") == {}


def test_the_last_stage_of_1f1b_copies_nothing(results: list[dict[str, Any]]) -> None:
    assert PLANNED == (0.5, 0.0) and results[0]["1f1b"]["out"] > 0
    last = results[2]["1f1b"]
    assert last["out"] == last["back"] == 0 < last["watch"].kept[1]


@pytest.mark.parametrize("name", REFUSED)
def test_fractions_of_other_stages_are_one_line(name: str, results: list[dict[str, Any]]) -> None:
    error = results[0]["refused"][name]
    assert re.match(REFUSED[name], error) and "\n" not in error, error
