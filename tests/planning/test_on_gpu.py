"""Steps of one rank on a real device, whose other ranks stand in."""

from __future__ import annotations

import gc
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecore import FSDPOptions, MemoryOptions, ParallelConfig, PipelineConfig
from moecore._torch import all_gather_single, reduce_scatter_single
from moecore.cli import main
from moecore.models import preset
from moecore.moe.dispatch import alltoall
from moecore.planning import (
    GpuRun,
    OptimizerOptions,
    TrainingRun,
    commands,
    dry_run,
    fake_world,
    plan_peak,
    run_on_gpu,
)
from moecore.planning.on_gpu import started
from moecore.planning.record import ALIGNMENT
from moecore.planning.stand_ins import repeat_rows, stand_ins

CPU = torch.device("cpu")
TINY = TrainingRun(model=preset("tiny-qwen3"), num_gpus=8, seq_len=64, batch_size=2)
EP = replace(TINY, parallel=ParallelConfig(ep=4))
DEEP = replace(EP.model, num_layers=8)
STAGES = replace(
    EP,
    parallel=ParallelConfig(pp=2, ep=4),
    num_micro_batches=4,
    pipeline=PipelineConfig(layout="Et|tL"),
)
RUNS = {
    "ep 4": EP,
    "ep 8": replace(TINY, parallel=ParallelConfig(ep=8)),
    "tp 2": replace(TINY, parallel=ParallelConfig(ep=4, tp=2)),
    "cp 2": replace(TINY, parallel=ParallelConfig(ep=4, cp=2)),
    "etp 2": replace(TINY, parallel=ParallelConfig(ep=4, tp=2, etp=2)),
    "pp 2": STAGES,
    "weights stay": replace(
        EP,
        fsdp=FSDPOptions(param_dtype=torch.bfloat16, dense_strategy="optim"),
        num_micro_batches=2,
    ),
    "remainders, experts again": replace(
        EP,
        memory=MemoryOptions(recompute=("moe",)),
        optimizer=OptimizerOptions(master_remainder=True, moment_dtype="bfloat16"),
    ),
    "latent": replace(EP, model=preset("tiny-deepseek-v3")),
}


def tensors() -> dict[int, Tensor]:
    """Return storage -> a tensor, of all that have memory."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (Tensor, torch.nn.Parameter)]
    dense = (x for x in found if x.device == CPU and x.layout == torch.strided and x.numel())
    return {x.untyped_storage().data_ptr(): x for x in dense}


@pytest.mark.parametrize(("name", "rank"), [*((name, 5) for name in RUNS), ("pp 2", 0)])
def test_a_step_runs_with_even_loads_and_holds_what_a_dry_run_does(
    name: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, counts, exchange = RUNS[name], [], alltoall._exchange_counts

    def seen(*args: Any) -> Any:
        counts.append(exchange(*args))
        return counts[-1]

    used: list[tuple[int, int]] = []
    build = alltoall.build_index

    def built(*args: Any, length: int, **how: Any) -> Any:
        index = build(*args, length=length, **how)
        used.append((int(index.offsets_e[-1]), length))
        return index

    monkeypatch.setattr(alltoall, "_exchange_counts", seen)
    monkeypatch.setattr(alltoall, "build_index", built)
    before = tensors()
    with started(run, rank, CPU) as (step, inputs):
        for _ in range(2):
            losses = step.forward_backward(inputs)
            result = step.finish()
        assert losses.isfinite().all() and math.isfinite(result.norm) and not result.skipped
        del losses, result
        sizes = [x.untyped_storage().nbytes() for k, x in tensors().items() if k not in before]
    p, moe = run.resolved, run.model.moe
    assert moe is not None
    even = run.batch_size * run.seq_len * moe.top_k // (p.tp * p.cp) * p.etp
    for sent, received, num_rows in counts:
        assert len(sent) == len(received) == p.ep * p.etp and len(set(received)) == 1
        assert num_rows == pytest.approx(even, rel=0.05)
    assert used and all(num_used == length for num_used, length in used), "rows of other experts"
    # What is small on a GPU's host lies here, too: tokens, labels, counters of AdamW.
    rounded = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
    assert 0 <= rounded - dry_run(run, rank).held <= 10 * ALIGNMENT


@pytest.mark.parametrize("schedule", ["overlapped", "dualpipe-v"])
def test_lanes_take_turns(schedule: Any) -> None:
    stages = PipelineConfig(schedule=schedule, layout="Ett|tt|tt|ttL")
    with started(replace(STAGES, model=DEEP, pipeline=stages), 0, CPU) as (step, inputs):
        assert step.forward_backward(inputs).isfinite().all()
        assert math.isfinite(step.finish().norm)


def test_other_ranks_have_what_this_one_has() -> None:
    with fake_world(3, rank=1):
        with stand_ins():
            brought = {
                "gather": collect(9, all_gather_single, 3),
                "scatter": collect(1, reduce_scatter_single, 3),
                "all-to-all": collect(3, dist.all_to_all_single, 3),
                # To rank 1 go the 1 and the 2, and as much comes from each.
                "uneven": collect(6, dist.all_to_all_single, 4, [2, 2, 2], [1, 2, 1]),
                # A combine: what comes back differs by rank.
                "back": collect(5, dist.all_to_all_single, 6, [1, 2, 2], [2, 2, 2]),
                "nothing": collect(2, dist.all_to_all_single, 1, [1, 0, 1], [1, 0, 0]),
            }
            parts = [torch.zeros(2, dtype=torch.int64) for _ in range(3)]
            dist.all_gather(parts, torch.arange(2))
            objects: list[Any] = [None] * 3
            dist.all_gather_object(objects, {"rank": 1})
            hidden = torch.full((64,), torch.nan)
            dist.recv(hidden, 0)
        work = dist.all_to_all_single(torch.zeros(3), torch.zeros(3), async_op=True)
    assert brought == {
        "gather": [0, 1, 2] * 3,
        "scatter": [1],
        "all-to-all": [1, 1, 1],
        "uneven": [1, 2, 1, 2, 1, 2],
        "back": [2, 3, 2, 3, 2],
        "nothing": [0, 0],
    }
    assert [part.tolist() for part in parts] == [[0, 1]] * 3 and objects == [{"rank": 1}] * 3
    assert hidden.isfinite().all() and hidden.std() > 0.5
    assert work is not None


def collect(length: int, collective: Any, given: int, *splits: list[int]) -> list[int]:
    out = torch.full((length,), -1)
    collective(out, torch.arange(given), *splits)
    found: list[int] = out.tolist()
    return found


def test_gathers_in_place_keep_this_ranks_part() -> None:
    with fake_world(3, rank=1), stand_ins():
        out = torch.tensor([0.0, 0.0, 1.0, 2.0, 0.0, 0.0])
        all_gather_single(out, out[2:4])
    assert out.tolist() == [1, 2] * 3


def test_rows_repeat_and_autograd_sees_no_change() -> None:
    out = torch.zeros(5, 2)
    repeat_rows(out, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert out.tolist() == [[1, 2], [3, 4], [1, 2], [3, 4], [1, 2]] and out._version == 0


def test_what_was_replaced_is_back() -> None:
    with fake_world(2):
        with stand_ins():
            pass
        hidden = torch.full((4,), 7.0)
        dist.recv(hidden, 1)
        assert hidden.tolist() == [7.0] * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"^torch.cuda.is_available\(\) \(False\) must be True: "):
        run_on_gpu(TINY)
    assert main(["dry-run", "--preset", "tiny", "--gpus", "2", "--seq-len", "64", "--on-gpu"]) != 0
    assert "must be True" in capsys.readouterr().err


def test_the_command_prints_both(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = GpuRun(rank=3, held=10**9, peak=2 * 10**9, seconds=0.25)
    monkeypatch.setattr(commands, "run_on_gpu", lambda run, rank: real)
    command = ["dry-run", "--preset", "tiny-qwen3", "--gpus", "4", "--pp", "2", "--seq-len", "64"]
    command += ["--layout", "Ett|L", "--rank", "3", "--on-gpu"]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[3] == (
        "on this GPU: 1 GB between steps, 2 GB at most, 250.0 ms a step without communication"
    )
    assert main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["on_gpu"] == {"rank": 3, "held": 10**9, "peak": 2 * 10**9, "seconds": 0.25}
    run = TrainingRun(
        model=TINY.model,
        num_gpus=4,
        seq_len=64,
        parallel=ParallelConfig(pp=2),
        pipeline=PipelineConfig(layout="Ett|L"),
    )
    first, last = plan_peak(run)
    assert printed["plan"] == last != first


GPU_RUN = TrainingRun(
    model=replace(preset("qwen3-30b-a3b"), num_layers=3),
    num_gpus=8,
    parallel=ParallelConfig(ep=8),
    batch_size=2,
)
ON_GPU = {
    "ep 8": GPU_RUN,
    "tp 2": replace(GPU_RUN, parallel=ParallelConfig(ep=8, tp=2)),
    "pp 2": replace(
        GPU_RUN,
        parallel=ParallelConfig(pp=2, ep=4),
        num_micro_batches=4,
        pipeline=PipelineConfig(layout="Ett|tL"),
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("name", ON_GPU)
def test_a_gpu_holds_what_a_dry_run_does(name: str, rank: int) -> None:
    run = ON_GPU[name]
    real, found = run_on_gpu(run, rank), dry_run(run, rank)
    assert real.held == pytest.approx(found.held, rel=0.03)
    assert real.peak == pytest.approx(found.peak, rel=0.03)
    assert real.seconds > 0
