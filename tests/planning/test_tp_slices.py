"""Exchanges of tp ranks in plans: beside products by a measured share, where a run slices them."""

import json
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.bench_tp import DENSE
from benchmarks.records import RESULTS
from torch.distributed import _symmetric_memory

from moecore import ParallelConfig, PipelineConfig
from moecore.base.options.precision import Precision
from moecore.cli import main
from moecore.kernels.meta import record_launches_on_meta
from moecore.models import tp_products
from moecore.models.tp_products import compute_workspace_bytes
from moecore.planning import (
    CostTable,
    SearchRequest,
    TrainingRun,
    dry_run,
    fake_world,
    plan_memory,
    plan_peak_memory,
    time_step,
)
from moecore.planning.commands import _describe_exposed_tp_share, _sum_launches_by_kind
from moecore.planning.dry_run import DryRun
from moecore.planning.estimate import Estimator
from moecore.planning.gpus import count_peers
from moecore.planning.layouts import Layout, list_option_sets
from moecore.planning.record import PASSES, SLICES
from moecore.planning.segments import SampledRun
from moecore.planning.times import has_tp_slices, plan_time

H200 = CostTable.of("h200-141")
LAYERS = 4
LONG = TrainingRun(
    model=replace(DENSE, num_layers=LAYERS),
    num_gpus=2,
    parallel=ParallelConfig(tp=2),
    seq_len=8192,
    batch_size=2,
)
SHORT = replace(LONG, seq_len=2048)  # slices of 16 MiB
# Of attention and MLP each a gather and a sum, and in backward a sum and a gather.
OF_LAYER = 8
# The embedding's sum and the head's gather, and in backward the other way round.
AT_ENDS = 4
IN_TURN = ("allgather_base_", "alltoall_base_")
LEAST = 1 << 20  # bytes: less is not of hidden states
RECORD = RESULTS / "tp" / "2026-11-26-2-x-nvidia-h200.jsonl"
MS = {
    (r["batch_size"], r["seq_len"], r["provider"]): r["step_ms"]
    for r in map(json.loads, RECORD.read_text().splitlines())
    if r["layer"] == "dense 8192"
}

known = cache(dry_run)


def with_share(share: float, table: CostTable = H200) -> CostTable:
    assert table.slices is not None
    return replace(table, slices=replace(table.slices, share=share))


def sent(step: DryRun) -> Counter[tuple[str, int]]:
    """Return how often what collectives of tp ranks move so many bytes."""
    works = [one.work for one in step.queued if one.work.kind == "collective"]
    large = [work for work in works if work.num_bytes > LEAST]
    return Counter((work.name, work.num_bytes) for work in large)


# Without points all collectives reach half of 900 GB/s.
PLAIN = replace(H200, points=(), efficiency={**H200.efficiency, "collective": 0.5})


def in_turn(num_bytes: int) -> float:
    return PLAIN.launch_seconds + num_bytes / (0.5 * 900e9)


@pytest.mark.parametrize("share", [None, 0.5, 1.0])
def test_long_slices_count_by_their_share(share: float | None) -> None:
    """A step takes as much more than one whose exchanges are hidden as their share in turn.

    The shipped share is that of the record, by hand: exposed ms of sliced over those in turn.
    """
    shipped = (0.929 + 1.037 + 1.032 + 2.229) / (1.741 + 4.026 + 3.397 + 8.676)
    table = PLAIN if share is None else with_share(share, PLAIN)
    moved = 2 * 2 * 8192 // 2 * 8192  # a rank sends its slice of a sequence and gets the other one
    number = LAYERS * OF_LAYER // 2 * LONG.batch_size
    found = sent(known(LONG))
    assert [found[name, moved] for name in SLICES] == [number, number]
    whole = 2 * number * in_turn(moved)
    hidden = time_step(known(LONG), with_share(0.0, PLAIN)).seconds
    took = time_step(known(LONG), table).seconds
    assert took == pytest.approx(hidden + (share or shipped) * whole, rel=1e-4)
    assert 0.01 * whole > 3e-4 * hidden, "a share that is off by 0.01 is seen"


def test_short_slices_exchange_in_turn() -> None:
    assert has_tp_slices(LONG) and not has_tp_slices(SHORT)
    moved = 2 * 2 * 2048 // 2 * 8192 * SHORT.batch_size  # all sequences at one time
    number = (LAYERS * OF_LAYER + AT_ENDS) // 2
    assert sent(known(SHORT)) == {(name, moved): number for name in IN_TURN}
    found, other = (time_step(known(SHORT), with_share(share, PLAIN)) for share in (0.0, 1.0))
    assert found == other
    small = [w for w in known(SHORT).forward_backward if w.kind == "collective"]
    rest = sum(in_turn(w.num_bytes) for w in small if w.num_bytes <= LEAST)
    assert found.parts["nvlink"] == pytest.approx(2 * number * in_turn(moved), abs=2 * rest)
    assert rest < 0.02 * found.parts["nvlink"]


def test_what_an_exchange_takes_alone_is_all_of_it() -> None:
    """`moecore dry-run` has it under "ms alone"; a step has the share that is exposed."""
    rows = [_sum_launches_by_kind(known(LONG), with_share(share, PLAIN)) for share in (0.1, 1.0)]
    assert rows[0] == rows[1]
    large = sum(n * in_turn(num_bytes) for (_, num_bytes), n in sent(known(LONG)).items())
    assert rows[0]["collective"][3] == pytest.approx(large, rel=0.01)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_workspace_is_what_torch_asks_for(num_ranks, monkeypatch) -> None:
    """Of a group once: a slice of a sequence for a gather, two for a sum, the most of them."""
    asked: list[int] = []

    def asks(group: str, min_size: int) -> None:
        asked.append(min_size)
        raise InterruptedError

    monkeypatch.setattr(_symmetric_memory, "get_symm_mem_workspace", asks)
    x_tD = torch.empty(6, 5, dtype=torch.bfloat16)
    x_TD = torch.empty(6 * num_ranks, 5, dtype=torch.bfloat16)
    with fake_world(num_ranks), suppress(InterruptedError):
        tp_products.SYMMETRIC_MEMORY.all_gather(x_tD, print, x_TD, dist.group.WORLD)
    with fake_world(num_ranks), suppress(InterruptedError):
        tp_products.SYMMETRIC_MEMORY.all_to_all(print, x_TD, dist.group.WORLD)
    assert asked == [60, 120]
    recorded: list[Any] = []
    with fake_world(num_ranks), record_launches_on_meta(lambda *launch: recorded.append(launch)):
        group = dist.group.WORLD
        tp_products.ON_META.all_gather(x_tD.to("meta"), lambda *_: None, x_TD.to("meta"), group)
        tp_products.ON_META.all_to_all(lambda *_: None, x_TD.to("meta"), group)
    assert [compute_workspace_bytes(name, *sizes) for name, sizes, *_ in recorded] == asked


def test_the_workspace_is_in_the_plan() -> None:
    """Two slices of 64 MiB; none where exchanges run in turn."""
    assert known(LONG).buffers == 2 * 2 * 8192 // 2 * 8192 and known(SHORT).buffers == 0
    (rank,) = plan_memory(LONG).ranks
    assert rank.device["exchange buffers"] == known(LONG).buffers
    assert plan_peak_memory(LONG) == pytest.approx(
        (known(LONG).peak + known(LONG).buffers,), rel=0.002
    )


CASES = {
    "GPUs without peer access": (replace(LONG, num_peers=1), False),
    "linears in FP8": (replace(LONG, precision=Precision.of("blockwise")), False),
    "four ranks, slices of 32 MiB": (
        replace(LONG, num_gpus=4, parallel=ParallelConfig(tp=4)),
        True,
    ),
    "four ranks of two servers": (
        replace(LONG, num_gpus=4, parallel=ParallelConfig(tp=4), num_peers=2),
        False,
    ),
    "stages": (
        replace(LONG, num_gpus=4, parallel=ParallelConfig(tp=2, pp=2), pipeline=PipelineConfig()),
        True,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_code_of_the_run_decides(case: str) -> None:
    run, is_sliced = CASES[case]
    assert has_tp_slices(run) == is_sliced
    seconds = [plan_time(run, with_share(share)).seconds for share in (0.0, 1.0)]
    assert (seconds[0] < 0.97 * seconds[1]) == is_sliced and (seconds[0] == seconds[1]) != is_sliced


def test_who_reaches_whose_memory() -> None:
    sizes = {gpu: count_peers(gpu, domain) for gpu, domain in (("h200-141", 8), ("gb200-186", 64))}
    assert sizes == {"h200-141": 8, "gb200-186": 4}
    assert count_peers("h200-141", 2) == 2 and count_peers("rtx4090-24", 8) == 1


@pytest.mark.parametrize("batch_size, seq_len", [(1, 4096), (2, 4096), (1, 8192), (2, 8192)])
def test_a_layer_takes_what_two_gpus_took(batch_size: int, seq_len: int) -> None:
    """Within 7%, and what slices gain within 0.025 of a layer in turn."""
    run = replace(LONG, batch_size=batch_size, seq_len=seq_len)
    sliced, plain = (layer_ms(one) for one in (run, replace(run, num_peers=1)))
    ours, theirs = (MS[batch_size, seq_len, provider] for provider in ("sliced", "in turn"))
    assert sliced == pytest.approx(ours, rel=0.07) and plain == pytest.approx(theirs, rel=0.07)
    assert sliced / plain == pytest.approx(ours / theirs, abs=0.025)


def layer_ms(run: TrainingRun) -> float:
    """Return the planned forward and backward of a layer, all of it on one stream."""
    segments = SampledRun.from_run(run).segments
    own = [segments.list_part_segments("layer 1", of, 0) for of in PASSES]
    works = [segments.queued[i] for found in own for segment in found for i in segment.launches]
    return 1e3 * sum(H200.seconds(one.work, one.node_ranks) for one in works)


def test_estimates_of_a_search_count_them_alike() -> None:
    """By the share where a folding has long slices, on GPUs that reach each other, in bf16."""

    def grows(folding: Layout, gpu: Any = "h200-141", precision: Any = None) -> bool:
        how: Any = dict(num_gpus=8, seq_len=8192, gpu=gpu, precision=precision)
        request = SearchRequest(model=LONG.model, **how)
        tables = (with_share(share).with_gpu(gpu) for share in (0.0, 1.0))
        rung = list_option_sets(request)[0]
        few, many = (Estimator(request, table).seconds(folding, rung) for table in tables)
        assert few <= many
        return few < many

    assert grows(Layout(tp=2)) and grows(Layout(tp=4)) and not grows(Layout())
    assert not grows(Layout(tp=8)) and not grows(Layout(tp=4, cp=2)), "slices of 16 MiB"
    assert not grows(Layout(tp=2), gpu="rtx4090-24")
    assert not grows(Layout(tp=2), precision=Precision.of("blockwise"))


def test_the_share_and_its_source_are_printed(capsys, monkeypatch) -> None:
    call = ["plan", "--preset", "tiny", "--gpus", "2", "--gpu", "h200-141", "--tp", "2"]
    line = f"count 29% of their time, as measured on h200-141 (tp/{RECORD.name})"
    for seq_len, least in ((72, tp_products.MIN_SLICE_BYTES), (80, 0)):
        monkeypatch.setattr(tp_products, "MIN_SLICE_BYTES", least)
        assert main([*call, "--seq-len", str(seq_len)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert (f"sliced collectives of tp {line}" in lines) == (least == 0)
    on_b200 = _describe_exposed_tp_share(H200.with_gpu("b200-180"), "b200-180")
    assert on_b200.endswith(f"{line}; no run on b200-180 has shown it")
    assert "count in full" in _describe_exposed_tp_share(replace(H200, slices=None), "h200-141")
