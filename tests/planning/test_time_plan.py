import json
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch

from moecore import FSDPOptions, MemoryOptions, NVLinkOptions, ParallelConfig, PipelineConfig
from moecore.base.options.precision import Precision
from moecore.cli import main
from moecore.models import preset
from moecore.parallel import Timeline, make_schedule
from moecore.parallel.pipeline.timeline import compute_spans
from moecore.planning import (
    CostTable,
    OptimizerOptions,
    TrainingRun,
    dry_run,
    next_change,
    plan_peak_memory,
    plan_time,
    time_step,
)
from moecore.planning.segments import Segments, make_segments, place_launches
from moecore.planning.times import simulate_queue
from tests.helpers.grids import beside

TABLE = CostTable.of("h200-141")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NCCL = RESULTS / "pipeline" / "2026-11-23-2-x-nvidia-h200.jsonl"
QWEN = preset("qwen3-30b-a3b")
DEEPSEEK = replace(preset("deepseek-v3"), num_layers=9)  # three dense ones, six with experts
DEEP = TrainingRun(model=replace(QWEN, num_layers=8), num_gpus=8, parallel=ParallelConfig(ep=8))
CASES = {
    "qwen3": DEEP,
    "micro-batches": replace(DEEP, num_micro_batches=4),
    "a dear host": replace(DEEP, seq_len=256, num_micro_batches=2),
    "weights gathered by layer": replace(DEEP, parallel=ParallelConfig(tp=2, ep=4)),
    "over peers' memory": replace(DEEP, nvlink=NVLinkOptions(row_factor=1.5)),
    "offloaded": replace(DEEP, memory=MemoryOptions(offload=("experts",))),
    "half of the state offloaded": replace(
        DEEP, num_micro_batches=4, optimizer=OptimizerOptions(offload_fraction=0.5)
    ),
    "deepseek, two nodes": TrainingRun(
        model=DEEPSEEK, num_gpus=16, parallel=ParallelConfig(ep=16), num_micro_batches=4
    ),
}
STAGED = TrainingRun(
    model=replace(QWEN, num_layers=8),
    num_gpus=32,
    parallel=ParallelConfig(pp=4, ep=8),
    pipeline=PipelineConfig(schedule="1f1b"),
    num_micro_batches=16,
)


def test_the_stages_of_two_ranks_by_hand() -> None:
    # rank 0:  F0 F1 ........ B0      B1          a message takes 0.5
    # rank 1:     F0 B0    F1 B1
    schedule = make_schedule("1f1b", pp=2, chunks=1, num_micro_batches=2)
    spans = compute_spans(schedule, lambda item: {"F": 1.0, "B": 2.0}[str(item.kind)], 0.5)  # type: ignore[union-attr]
    assert [[(s.start, s.end) for s in of_rank] for of_rank in spans] == [
        [(0.0, 1.0), (1.0, 2.0), (5.0, 7.0), (8.0, 10.0)],
        [(1.5, 2.5), (2.5, 4.5), (4.5, 5.5), (5.5, 7.5)],
    ]
    assert Timeline(spans=spans).busy == (6.0, 6.0)


@pytest.mark.parametrize("case", beside(CASES, ["qwen3", "a dear host", "offloaded"]))
def test_few_layers_stand_for_all(case: str) -> None:
    run = CASES[case]
    step = dry_run(run)
    peak_error = 0.01 if run.model is DEEPSEEK else 0.002
    assert plan_peak_memory(run) == pytest.approx((step.peak + step.buffers,), rel=peak_error)
    exact, found = time_step(step, TABLE), plan_time(run, TABLE)
    assert found.seconds == pytest.approx(exact.seconds, rel=0.04)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    for part, seconds in exact.parts.items():
        assert found.parts[part] == pytest.approx(seconds, abs=0.12 * exact.seconds), part


def test_segments_in_their_own_order_are_the_step() -> None:
    step = dry_run(replace(DEEP, model=replace(QWEN, num_layers=4), num_micro_batches=2))
    segments = Segments.from_step(step, {})
    found = sorted(
        (p for ps in segments.passes.values() for p in ps), key=lambda p: p.launches.start
    )
    joined = segments.make_queue([*found, segments.end])
    assert [one.queued.work for one in joined] == [one.work for one in step.queued]
    ours, whole = simulate_queue(joined, TABLE), simulate_queue(place_launches(step.queued), TABLE)
    assert ours.ends == pytest.approx(whole.ends, rel=1e-3)
    levels = list(accumulate((p.net for p in found), initial=segments.resident_bytes))
    tops = (level + p.peak for level, p in zip(levels, [*found, segments.end], strict=True))
    assert max(tops) == step.peak
    assert segments.resident_bytes == pytest.approx(step.resident_bytes, abs=2**16)
    assert segments.num_micro_batches == 2 and len(found) == 2 * 2 * 6


def test_a_pipeline_of_equal_stages() -> None:
    found = plan_time(STAGED, TABLE)
    assert found.timeline is not None and sum(found.parts.values()) == pytest.approx(found.seconds)
    # Of 2 layers on every rank, the last one has the head too and is never idle in between.
    last = found.timeline.spans[3]
    steady = last[8:16]
    assert max(b.start - a.end for a, b in pairwise(steady)) < 1e-4
    each = steady[-1].end - steady[1].end  # of three micro-batches
    more = plan_time(replace(STAGED, num_micro_batches=32), TABLE)
    assert more.seconds - found.seconds == pytest.approx(16 * each / 3, rel=0.05)
    assert found.parts["bubble"] > 0 and more.tokens_per_gpu_second > found.tokens_per_gpu_second


def test_micro_batches_beyond_those_that_are_simulated() -> None:
    """Rounds of a pipeline are alike, and so are micro-batches without one."""
    for run, number in ((STAGED, 20), (DEEP, 7)):
        runs = (replace(run, num_micro_batches=number + more) for more in (0, 4, 8))
        times = [plan_time(one, TABLE).seconds for one in runs]
        assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=0.02)


def test_a_pair_takes_as_long_as_its_actions_in_turn() -> None:
    """No pair over NCCL was faster: what it would hide is not counted."""
    rows = map(json.loads, NCCL.read_text().splitlines())
    steps = [r for r in rows if r["op"] == "lanes_step" and r["gpu"].startswith("2 x")]
    for turns, pairs in zip(steps[::2], steps[1::2], strict=True):
        assert (turns["provider"], pairs["provider"]) == ("in turn", "lanes")
        assert pairs["step_ms"] >= turns["step_ms"]
    busy = {}
    for schedule in ("interleaved", "overlapped"):
        pipeline = PipelineConfig(schedule=schedule, chunks=2)  # type: ignore[arg-type]
        found = plan_time(replace(STAGED, pipeline=pipeline), TABLE)
        busy[schedule] = {part: s for part, s in found.parts.items() if part != "bubble"}
    assert busy["overlapped"] == pytest.approx(busy["interleaved"], rel=0.01)


def test_the_network_carries_one_collective_at_a_time() -> None:
    """Tokens and experts' weights are on streams of their own, and share the network."""
    run = replace(DEEP, num_gpus=32, parallel=ParallelConfig(ep=16), num_micro_batches=8)
    split = dict(dense_strategy="optim", experts_strategy="optim_grads_params")
    run = replace(run, fsdp=replace(run.fsdp, **split))  # NVLink is what limits the blocks'
    run, table = replace(run, seq_len=512), replace(TABLE, host_seconds=1e-12)
    step = dry_run(run)
    works = [(one.work, one.node_ranks) for one in step.queued]
    limited = (work for work in works if TABLE.find_limiting_rate(*work) == "network")
    network = sum(TABLE.seconds(*work) for work in limited)
    found, exact = plan_time(run, table), time_step(step, table)
    assert exact.seconds == pytest.approx(network, rel=0.02)
    assert found.seconds == pytest.approx(exact.seconds, rel=0.04)
    pipeline = PipelineConfig(schedule="overlapped", chunks=2)
    pairs = replace(run, num_gpus=64, parallel=ParallelConfig(pp=2, ep=16), pipeline=pipeline)
    staged = plan_time(pairs, table)
    assert 0.5 * found.seconds < staged.seconds < 0.75 * found.seconds  # half, and a bubble


def test_which_layer_is_like_which() -> None:
    segments = make_segments(STAGED)
    assert segments.num_micro_batches == 3
    assert segments.sampled_layers == {"F": (0, 1, 1, 1, 1, 1, 2, 3), "B": (0, 1, 2, 2, 2, 2, 2, 3)}
    dense = make_segments(replace(STAGED, model=replace(DEEPSEEK, num_layers=8)))
    assert dense.sampled_layers == {"F": (0, 0, 0, 1, 2, 2, 3, 4), "B": (0, 0, 0, 1, 2, 3, 3, 4)}


def test_the_next_change() -> None:
    small = plan_time(CASES["a dear host"], TABLE)
    assert small.limit == "host"
    change = next_change(small, TABLE)
    assert change.text.startswith('DispatchOptions(name="nvlink", nvlink=NVLinkOp')
    near = plan_time(replace(small.run, nvlink=NVLinkOptions(row_factor=2.0)), TABLE)
    gain = near.tokens_per_gpu_second / small.tokens_per_gpu_second - 1
    assert change.gain == pytest.approx(gain)
    change = next_change(near, TABLE)  # a graph holds it, because nothing waits for sizes
    assert change is not None and change.text.startswith("CUDA graphs") and change.gain > 0.5
    large = replace(DEEP, num_gpus=1, parallel=ParallelConfig(), batch_size=2, seq_len=8192)
    large = replace(large, model=replace(QWEN, num_layers=2))
    found = plan_time(large, TABLE)
    assert found.limit == "compute"
    change = next_change(found, TABLE)
    assert change is not None and change.text == 'precision="blockwise"'
    faster = plan_time(replace(large, precision=Precision.of("blockwise")), TABLE)
    gain = faster.tokens_per_gpu_second / found.tokens_per_gpu_second - 1
    assert change.gain == pytest.approx(gain) and next_change(found, TABLE, limit=10**9) is None


def test_what_pairs_are_taken_to_hide_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["plan", "--preset", "tiny-deepseek-v3", "--gpus", "32", "--pp", "2", "--ep", "8"]
    call += ["--etp", "2", "--chunks", "2", "--micro-batches", "8", "--seq-len", "64", "--schedule"]
    told = [("overlapped", "0.5", "pairs hide 50%"), ("overlapped", "0", "")]
    told += [("interleaved", "1", "")]
    for schedule, share, text in told:
        assert main([*call, schedule, "--pairs-hide", share]) == 0
        out = capsys.readouterr().out
        assert text in out and ("assumed, no run has shown it" in out) == bool(text)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    call = ["plan", "--preset", "tiny", "--gpus", "4", "--pp", "2", "--micro-batches", "8"]
    call += ["--seq-len", "64"]
    picture, table = tmp_path / "timeline.png", tmp_path / "table.json"
    TABLE.write(table)
    assert main([*call, "--timeline", str(picture), "--table", str(table)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tokens/s of a GPU; bottleneck " in lines[-2] and lines[-1].startswith("next: ")
    assert picture.read_bytes().startswith(b"\x89PNG") and main([*call, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])
    assert found["wall"] in found["parts"] and set(found["next"]) == {"text", "gain"}
    assert main([*call[:5], "--seq-len", "64", "--ep", "2", "--timeline", str(picture)]) == 1
    assert "must be left out without stages" in capsys.readouterr().err


WHOLE = FSDPOptions(param_dtype=torch.bfloat16, dense_strategy="optim")
SHORT = TrainingRun(
    model=DEEP.model, num_gpus=8, parallel=ParallelConfig(ep=8), seq_len=2048, num_micro_batches=4
)
PEAK_CASES = {
    "weights whole": (replace(SHORT, fsdp=WHOLE), 0.002),
    "MoE layers again": (replace(SHORT, memory=MemoryOptions(recompute=("moe",))), 0.002),
    "deepseek, offloaded": (
        replace(
            SHORT,
            model=DEEPSEEK,
            num_gpus=16,
            parallel=ParallelConfig(ep=16),
            memory=MemoryOptions(offload=("attention", "experts")),
        ),
        0.04,
    ),
}
STAGES = dict(parallel=ParallelConfig(pp=2, ep=4), num_micro_batches=6)
SCHEDULES = {
    "1f1b": (PipelineConfig(schedule="1f1b"), 0.002),
    "interleaved": (PipelineConfig(schedule="interleaved", chunks=2), 0.002),
    "overlapped": (PipelineConfig(schedule="overlapped", chunks=2), 0.002),
    # A gradient of the input frees all in a plan that the weights' products have not read.
    "zero-bubble": (PipelineConfig(schedule="zero-bubble"), 0.061),
}


@pytest.mark.parametrize("case", PEAK_CASES)
def test_peaks_of_few_layers_stand_for_all(case: str) -> None:
    run, error = PEAK_CASES[case]
    (found,) = plan_peak_memory(run)
    assert found == pytest.approx(dry_run(run).peak, rel=error)


@pytest.mark.parametrize("name", beside(SCHEDULES, ["interleaved", "zero-bubble"]))
def test_ranks_of_a_pipeline(name: str) -> None:
    pipeline, error = SCHEDULES[name]
    run = replace(SHORT, **STAGES, pipeline=pipeline)
    exact = [dry_run(run, rank).peak for rank in (0, 4)]
    assert plan_peak_memory(run) == pytest.approx(exact, rel=error)
    assert plan_peak_memory(replace(run, num_micro_batches=16)) == plan_peak_memory(run)
    more = dry_run(replace(run, num_micro_batches=8)).peak
    assert more == exact[0], "what has been sent is freed within a step"
