import json
import re
import shlex
import sys
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import pytest

from moecore import MemoryOptions, NVLinkOptions, ParallelConfig, PipelineConfig, Precision, Recipe
from moecore.base.options.names import GpuName, PresetName
from moecore.cli import main
from moecore.models import PRESETS, loss, num_params, preset
from moecore.planning import (
    CostTable,
    OptimizerOptions,
    SearchRequest,
    TrainingRun,
    fake_world,
    plan_peak_memory,
    plan_time,
    search,
)
from moecore.planning.commands import MEASURED, _describe_measurement
from moecore.planning.dry_run import MAX_MICRO_BATCHES
from moecore.planning.estimate import Estimator, count_saved_bytes_by_block
from moecore.planning.flags import PlanConfig, parse_run
from moecore.planning.gpus import GPUS
from moecore.planning.layouts import (
    BATCH_SIZES,
    MAX_SEARCH_TOKENS,
    Layout,
    count_data_ranks,
    enumerate_layouts,
    find_refusal,
    list_option_sets,
    list_schedules,
    make_run,
)
from moecore.planning.option_sets import TWICE
from moecore.planning.recipe import format_python_calls, format_run_flags
from moecore.planning.run import MAX_IN_FLIGHT, MAX_LAYERS, MAX_STAGES, list_stages
from moecore.planning.search import (
    MAX_DIVISORS,
    FittingCandidate,
    SearchResult,
    _list_request_changes,
    describe_outcome,
    plan_candidate,
    plan_fitting_layout,
    plan_layout,
)
from moecore.planning.times import balance_stages
from moecore.recipes.parser import parse
from tests.helpers.grids import beside
from tests.io.hf.test_config import TINY_JSON

TINY = preset("tiny-deepseek-v3")
DEEPSEEK = preset("deepseek-v3")
SMALL = SearchRequest(model=TINY, num_gpus=16, seq_len=32)
ROOT = Path(__file__).parents[2]
LARGE = SearchRequest(model=DEEPSEEK, num_gpus=256)


@cache
def found_of_small() -> SearchResult:
    return search(SMALL, max_plans=3)


@pytest.mark.parametrize(
    ("folding", "rule", "text"),
    [
        (Layout(pp=8, ep=6), "degrees divide the GPUs", "expert view (48 ranks)"),
        (Layout(pp=3), "degrees divide the GPUs", "dense view (3 ranks)"),
        (Layout(tp=256), "heads divide", "DecoderConfig.num_heads (128)"),
        (Layout(pp=64), "a layer per stage", "num_layers (61)"),
        (Layout(ep=8, etp=2), "EP before TP for experts", "use etp=1"),
        (Layout(tp=16), "TP within NVLink", "tp (16)"),
        (Layout(cp=2), "CP for long rows", "rows have 4096"),
        (Layout(pp=8, ep=8), "VPP where there is PP", "use chunks"),
    ],
)
def test_a_refusal_names_its_rule(folding: Layout, rule: str, text: str) -> None:
    refusal = find_refusal(LARGE, folding)
    assert refusal is not None and refusal.rule == rule and text in refusal.reason
    assert refusal.reason in describe_outcome(LARGE, folding, refusal)


def test_rules_depend_on_rows_and_nodes() -> None:
    long = replace(LARGE, seq_len=16_384)
    assert find_refusal(long, Layout(cp=4, ep=8)) is None
    assert find_refusal(long, Layout(cp=8, ep=8)) is not None
    few = replace(LARGE, global_batch=96)
    assert find_refusal(few, Layout(ep=8)).rule == "rows for all data ranks"  # type: ignore[union-attr]
    few = replace(LARGE, global_batch=32)
    filled = find_refusal(few, Layout(pp=8, ep=8, chunks=2))
    assert filled is not None and filled.rule == "micro-batches fill the pipeline"
    inside = find_refusal(replace(LARGE, num_gpus=8), Layout(pp=2, ep=4, chunks=2))
    assert inside is not None and inside.rule == "PP across nodes"


@pytest.mark.parametrize("first", beside((0, 15, 30, 45), nightly=[15, 30, 45]))
def test_what_no_rule_refuses_can_be_planned(first: int) -> None:
    request = replace(SMALL, num_gpus=8, gpus_per_node=4)
    open_foldings = [f for f in enumerate_layouts(8) if find_refusal(request, f) is None]
    assert {f.pp for f in open_foldings} == {1, 2} and {f.ep for f in open_foldings} >= {1, 4}
    for folding in open_foldings[first::60]:
        assert plan_candidate(request, folding, list_option_sets(request)[-1]).fits


def test_all_levers_need_less_memory_than_none() -> None:
    request = replace(LARGE, model=replace(DEEPSEEK, num_layers=16))
    first, *_, last = list_option_sets(request)
    runs = (make_run(request, Layout(pp=2, ep=8, chunks=2), rung) for rung in (first, last))
    whole, least = (max(plan_peak_memory(run)) for run in runs)
    # One rung needs more: where weights stay whole, "blockwise" adds FP8 copies of the experts'.
    assert least < 0.5 * whole


def test_what_is_offloaded_is_there() -> None:
    deepseek, qwen = replace(DEEPSEEK, num_layers=4), preset("qwen3-30b-a3b")
    for model, more in ((deepseek, ("mlp",)), (qwen, ())):
        parts = ("attention", "experts", *more)
        request = replace(LARGE, model=model)
        assert make_run(request, Layout(), list_option_sets(request)[-1]).memory.offload == parts


def test_a_stage_without_weights_in_fp8_gathers_none() -> None:
    """The head alone is a stage."""
    request = replace(LARGE, model=replace(DEEPSEEK, num_layers=4), num_gpus=64)
    run = make_run(request, Layout(pp=2, tp=4, ep=8), list_option_sets(request)[-1])
    assert run.fsdp.fp8_param_gather
    assert min(plan_peak_memory(replace(run, pipeline=PipelineConfig(layout="Et*4m|L")))) > 0


def test_the_fastest_order_and_levers_are_found() -> None:
    """Pairs that hide their exchanges win, beside FP8; without such pairs another order does."""
    model = replace(preset("qwen3-235b-a22b"), num_layers=16)
    request, folding = SearchRequest(model=model, num_gpus=32), Layout(pp=2, ep=16, chunks=2)
    names, seconds = [], []
    for share in (1.0, 0.0):
        table = replace(CostTable.of(request.gpu), pairs_hide=share)
        best = plan_layout(request, folding, table)
        assert isinstance(best, FittingCandidate) and best.run.pipeline is not None
        assert best.time == plan_time(best.run, table) and best.peaks == plan_peak_memory(best.run)
        orders = (plan_time(run, table).seconds for run in list_schedules(best.run))
        assert best.run.precision is not None and best.time.seconds <= min(orders)
        names.append(best.run.pipeline.schedule)
        seconds.append(best.time.seconds)
    assert names[0] in ("overlapped", "dualpipe-v") and names[1] not in ("overlapped", "dualpipe-v")
    assert seconds[0] < 0.9 * seconds[1]


def test_levers_that_are_not_needed_are_dropped() -> None:
    """Of 3 layers on one GPU: a wide limit needs none, a tight one takes more time."""
    model = replace(preset("qwen3-30b-a3b"), num_layers=3)
    request = SearchRequest(model=model, num_gpus=1)
    table = CostTable.of(request.gpu)
    (first, *_, last) = list_option_sets(request)
    peaks = [max(plan_candidate(request, Layout(), levers).peaks) for levers in (last, first)]
    memory, found = GPUS[request.gpu].memory, []
    for limit in (0.9 * peaks[0], 1.1 * peaks[0], 1.1 * peaks[1]):
        found.append(plan_layout(replace(request, reserve=1 - limit / memory), Layout(), table))
    assert not isinstance(found[0], FittingCandidate)
    tight, wide = (each for each in found[1:] if isinstance(each, FittingCandidate))
    assert len(wide.options.options) <= len(first.options) < len(tight.options.options)
    assert wide.time.seconds < tight.time.seconds and max(tight.peaks) <= 1.1 * peaks[0]


def test_stages_are_balanced_where_ends_take_longer() -> None:
    """Of layers that are tiny beside the head, the last stage has fewer than the others."""
    request = replace(SMALL, model=replace(TINY, num_layers=12, vocab_size=50_000))
    table = CostTable.of(request.gpu)
    even = make_run(request, Layout(pp=2, chunks=2), list_option_sets(request)[0])
    *_, balanced = balance_stages(even, table)
    stages = list_stages(balanced)
    assert sum(len(stage.layers) for stage in stages) == 12 and len(stages) == 4
    assert len(stages[-1].layers) < min(len(stage.layers) for stage in stages[:-1])


def test_a_gpu_of_ones_own_and_its_host_memory() -> None:
    """A record with a name's numbers plans as the name; what a server cannot pin is refused."""
    own = GPUS["h100-80"]
    named, same = (replace(SMALL, num_gpus=8, gpu=gpu) for gpu in ("h100-80", own))
    folding, away = Layout(ep=4), OptimizerOptions(offload_fraction=1.0)
    results = [plan_layout(each, folding, each.cost_table) for each in (named, same)]
    assert all(isinstance(found, FittingCandidate) for found in results)
    assert len({one.time.seconds for one in results if isinstance(one, FittingCandidate)}) == 1
    request = replace(same, optimizer=away)
    found = plan_layout(request, folding, request.cost_table)
    assert isinstance(found, FittingCandidate)
    assert found.host == pytest.approx(8 * num_params(TINY), rel=0.02)  # two moments in fp32
    tray = replace(request, gpu="gb200-186")  # of 4 GPUs
    half = plan_layout(tray, folding, tray.cost_table)
    assert isinstance(half, FittingCandidate) and half.host == found.host / 2
    estimates = [(each, Estimator(each, each.cost_table)) for each in (request, tray)]
    of_8, of_4 = (
        one.estimate_host_bytes(folding, list_option_sets(each)[0]) for each, one in estimates
    )
    assert of_4 == of_8 / 2 > 0
    small = replace(own, host_memory=found.host)  # a tenth of which no plan may pin
    tight = replace(request, gpu=small)
    refused = plan_layout(tight, folding, tight.cost_table)
    assert not isinstance(refused, FittingCandidate)
    text = describe_outcome(tight, folding, refused)
    assert "the ranks of a server pin" in text and text.startswith("ep=4: too large")
    with pytest.raises(ValueError, match=r"Gpu\.memory"):
        replace(own, memory=-1)


def test_fp8_moments_and_remainders_fit_what_needed_another_gpu() -> None:
    """6.9e9 parameters of one GPU: 8.02 bytes of each and no fp32 copies are 56 GB."""
    request = SearchRequest(model=preset("olmoe-1b-7b"), num_gpus=1)
    names = [option.name for option in list_option_sets(request)[-1].options]
    assert "moecore.train.AdamW(moment_dtype=torch.float8_e4m3fn)" in names
    assert "moecore.train.AdamW(master_remainder=True)" in names
    run = make_run(request, Layout(), list_option_sets(request)[-1])
    assert run.optimizer.master_remainder and max(plan_peak_memory(run)) <= request.max_gpu_bytes


def test_advice_does_not_lead_in_circles() -> None:
    """More of the GPUs that were asked for, then GPUs that have more memory."""
    for gpu in GPUS:
        changes = [r for _, r in _list_request_changes(replace(SMALL, gpu=gpu))]
        sizes = [(r.gpu == gpu, GPUS[r.gpu].memory, r.num_gpus) for r in changes]
        own = [size for size in sizes if size[0]]
        assert sizes[: len(own)] == own and own == sorted(own) and own[0][2] == 32
        assert all(memory > GPUS[gpu].memory for _, memory, _ in sizes[len(own) :])
    most = _list_request_changes(replace(SMALL, num_gpus=2**15))
    assert max(changed.num_gpus for _, changed in most) == 2**16


def test_a_search_ranks_what_fits() -> None:
    found = found_of_small()
    assert len(found.fitting) == 3 and found.change is None and not found.too_large
    assert [c.options.options for c in found.fitting] == [()] * 3
    seconds = [c.time.seconds for c in found.fitting]
    assert seconds == sorted(seconds) and len(set(seconds)) > 1
    every = len(list(enumerate_layouts(16)))
    assert sum(found.refused.values()) + found.num_unplanned + 3 == every
    given = MemoryOptions(recompute="gemm_last")
    given_all = replace(SMALL, memory=given, precision=None, optimizer=OptimizerOptions())
    slowest = search(given_all, num_results=2, max_plans=2, rank_by=lambda c: -c.time.seconds)
    assert {c.run.memory for c in slowest.fitting} == {given}
    assert slowest.fitting[0].time.seconds > slowest.fitting[1].time.seconds


def test_tokens_travel_by_stores_where_a_node_has_the_experts() -> None:
    """Unless somebody wants another room, or none."""
    (none, *_) = list_option_sets(SMALL)
    rooms = {ep: make_run(SMALL, Layout(ep=ep), none).nvlink for ep in (1, 2, 8, 16)}
    assert rooms == {1: None, 2: TWICE, 8: TWICE, 16: None}
    for given in (NVLinkOptions(row_factor=3.0), None):
        assert make_run(replace(SMALL, nvlink=given), Layout(ep=8), none).nvlink == given
    smaller = replace(SMALL, gpus_per_node=4)
    assert make_run(smaller, Layout(ep=8), none).nvlink is None
    found = found_of_small()
    assert "--row-factor 2" in found.table()
    assert "DispatchOptions(name='nvlink'" in format_python_calls(found.fitting[1].run)


def test_what_is_estimated_to_be_fast_is_planned_first() -> None:
    """Of runs that differ, the order of estimates is that of plans; bytes are about the plan's."""
    model = replace(preset("qwen3-30b-a3b"), num_layers=6)
    request = SearchRequest(model=model, num_gpus=32, gpu="a100-80", nvlink=None)
    table = CostTable.of("a100-80")
    estimate = Estimator(request, table)
    legal = (f for f in enumerate_layouts(32) if find_refusal(request, f) is None)
    some = sorted((f for f in legal if max(f.tp, f.ep) >= 4), key=estimate.compute_sort_key)[::14]
    plans = [plan_fitting_layout(request, f, estimate) for f in some]
    seconds = {f: plan_time(p.run, table).seconds for f, p in zip(some, plans, strict=True)}
    pairs = [(a, b) for a, b in combinations(some, 2) if seconds[b] > 1.2 * seconds[a]]
    right = [estimate.compute_sort_key(a) < estimate.compute_sort_key(b) for a, b in pairs]
    assert len(right) >= 8 and sum(right) >= 0.8 * len(right)


def test_micro_batches_have_the_rows_that_are_fastest() -> None:
    """Tiny ones wait for the host, so the most; whatever a rung makes needless is left out."""
    found = search(SMALL, num_results=1, max_plans=1).fitting[0]
    assert found.run.batch_size == found.layout.batch_size == BATCH_SIZES[-1]
    rows = found.run.num_micro_batches * BATCH_SIZES[-1]
    assert rows * count_data_ranks(SMALL, found.layout) == SMALL.rows
    one = plan_candidate(SMALL, found.layout._replace(batch_size=1), found.options)
    assert found.time.seconds < 0.5 * plan_time(one.run, CostTable.of(SMALL.gpu)).seconds


@pytest.mark.nightly  # a search of every change; their order is tested above
def test_what_cannot_fit_names_the_smallest_change() -> None:
    model = replace(preset("qwen3-30b-a3b"), num_layers=24)
    found = search(SearchRequest(model=model, num_gpus=1), max_plans=1)
    assert not found.fitting and found.change is not None and "h100-80, with " in found.change


def test_rows_that_no_folding_divides_name_other_rows() -> None:
    given = replace(SMALL, num_gpus=8, global_batch=13)
    assert all(find_refusal(given, f) is not None for f in enumerate_layouts(8))
    text = search(given).change
    assert text is not None and text.startswith("8 rows of a step")


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_the_call_runs(fraction: float) -> None:
    optimizer = OptimizerOptions(offload_fraction=fraction)
    request = replace(SMALL, num_gpus=8, nvlink=None, optimizer=optimizer)
    planned = make_run(request, Layout(ep=4), list_option_sets(request)[0])
    overrides = (("model.layers.0.*", None),)
    unnamed = Precision(recipe=Recipe(), roles=("attention",), overrides=overrides)
    run, names = replace(planned, precision=unnamed if fraction else None), dict[str, Any]()
    with fake_world(8):
        exec(format_python_calls(run), names)
    assert names["meshes"].parallel == run.resolved
    assert names["step"].num_micro_batches == run.num_micro_batches


def test_the_command_searches(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = ["plan", "--preset", "tiny-deepseek-v3", "--gpus", "16", "--seq-len", "32"]
    call, file = [*plan, "--top", "1"], tmp_path / "memory.png"
    assert main([*call, "--png", str(file), "--call"]) == 0
    assert "parallelize_moe(" in capsys.readouterr().out
    assert file.read_bytes().startswith(b"\x89PNG") and main([*call, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["fitting"]) == 1
    assert main([*plan, "--explain", "tp=16"]) == 1
    assert "must be a multiple of tp (16)" in capsys.readouterr().out
    assert main([*plan, "--explain", "ep=8"]) == 0 and "fits, " in capsys.readouterr().out
    assert main([*plan, "--explain", "pp"]) == 1
    assert "must be NAME=NUMBER" in capsys.readouterr().err


def test_what_is_printed_is_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    """Each row's flags plan the row's run again, and the last line is the first one's command."""

    def planned(words: list[str], run: TrainingRun) -> TrainingRun:
        words = [*words, *format_run_flags(run)][1:]
        return parse_run(parse(PlanConfig, words, prog="moecore plan"))

    same = ["plan", "--preset", "tiny-deepseek-v3", "--gpus", "16"]
    for found in found_of_small().fitting:
        assert planned(same, found.run) == found.run
    rung = list_option_sets(LARGE)[-1]
    run = make_run(LARGE, Layout(pp=8, tp=2, ep=32, chunks=2), rung)
    large = ["plan", "--preset", "deepseek-v3", "--gpus", "256"]
    assert planned(large, run) == run
    run = replace(run, fp8_dispatch=True)
    assert planned(large, run) == run and "fp8=True)" in format_python_calls(run)
    small = [*same, "--seq-len", "32"]
    assert main([*small, "--top", "1"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("moecore: planning ") and "host memory" in out
    assert out.splitlines()[1].startswith("1") and "layouts are invalid" in out
    command = shlex.split(out.splitlines()[-1].partition(": ")[2])
    assert command[0] == "moecore" and main(command[1:]) == 0
    assert "tokens/s of a GPU" in capsys.readouterr().out
    assert main([*small, "--explain", "ep=8", "--json"]) == 0
    found_json = json.loads(capsys.readouterr().out)
    assert found_json["fits"] and found_json["ep"] == 8 and found_json["tokens_per_second"] > 0
    assert main([*small, "--explain", "ep=3", "--json"]) == 1
    assert "refused" in json.loads(capsys.readouterr().out)["text"]


def test_a_config_is_planned_as_its_preset(capsys, tmp_path) -> None:
    options = ["--gpus", "4", "--ep", "2", "--seq-len", "32", "--json"]
    file = tmp_path / "config.json"
    for of, code in ((TINY_JSON, 0), ({"model_type": "gpt-none"}, 1)):
        file.write_text(json.dumps(of))
        assert main(["plan", "--config", str(file), *options]) == code
    out, err = capsys.readouterr()
    assert err.startswith("moecore: config.json model_type ('gpt-none') must be")
    assert err.count("\n") == 1 and main(["plan", "--preset", "tiny-deepseek-v3", *options]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out)


def test_names_that_help_lists_are_those_of_the_records() -> None:
    assert get_args(PresetName) == tuple(PRESETS) and get_args(GpuName) == tuple(GPUS)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--batch-size", "2"], "--batch-size (2)"),
        (["--micro-batches", "2"], "--micro-batches (2)"),
        (["--chunks", "2"], "--chunks (2)"),
        (["--schedule", "1f1b"], "--schedule (1f1b)"),
        (["--layout", "EL"], "--layout (EL)"),
        (["--dense-strategy", "optim"], "--dense-strategy (optim)"),
        (["--experts-strategy", "optim"], "--experts-strategy (optim)"),
        (["--ep", "2", "--global-batch", "8"], "--global-batch (8)"),
        (["--ep", "2", "--gpus-per-node", "4"], "--gpus-per-node (4)"),
        (["--ep", "2", "--top", "1"], "--top (1)"),
        # 0 is a number that is given.
        (["--batch-size", "0"], "--batch-size (0)"),
        (["--ep", "2", "--top", "0"], "--top (0)"),
        (["--ep", "2", "--layout", "E" * 10**5], f"--layout ({'E' * 80})"),
        (["--explain", "ep=2", "--ep", "2"], "--ep (2)"),
        (["--explain", "ep=2", "--png", "x"], "--png (x)"),
    ],
)
def test_an_option_that_is_not_read_is_refused(more, named, capsys) -> None:
    assert main(["plan", "--preset", "tiny", "--gpus", "4", *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"moecore: {named} must be left out: ") and error.count("\n") == 1


def test_a_dry_run_refuses_what_it_does_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["dry-run", "--preset", "tiny", "--gpus", "2"]
    assert main([*call, "--chunks", "2"]) == 2
    error = capsys.readouterr().err
    assert error == "moecore: --chunks (2) must be left out: there are no stages without --pp\n"
    assert main([*call, "--micro-batches", "257"]) == 1
    assert "num_micro_batches (257) must be <= 256 for a dry run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (dict(seq_len=2**24 + 1), r"TrainingRun.seq_len \(16777217\) must be a whole number"),
        (dict(pp=257), r"TrainingRun.parallel.pp \(257\) must be <= 256: plan"),
        (dict(num_layers=1025), r"planned_model.num_layers \(1025\) must be <= 1024: plan"),
        (dict(schedule="gpipe"), r"num_micro_batches \(1025\) must be <= 1024 with schedule 'gpi"),
    ],
)
def test_a_run_that_no_plan_ends_with_is_refused(changes: dict[str, Any], error: str) -> None:
    model = replace(preset("tiny"), num_layers=changes.get("num_layers", 4), max_seq_len=2**24)
    with pytest.raises(ValueError, match=error):
        TrainingRun(
            model=model,
            num_gpus=257,
            parallel=ParallelConfig(pp=changes.get("pp", 2)),
            pipeline=PipelineConfig(schedule=changes.get("schedule", "1f1b")),
            seq_len=changes.get("seq_len", 64),
            num_micro_batches=1025,
        )


def test_an_estimate_takes_no_longer_for_more_chunks_of_the_loss(monkeypatch) -> None:
    """And counts equal bytes."""
    chunks: list[int] = []
    add_chunk = loss._compute_chunk_loss_

    def counted(hidden_CD: Any, *args: Any) -> Any:
        chunks.append(len(hidden_CD))
        return add_chunk(hidden_CD, *args)

    monkeypatch.setattr(loss, "_compute_chunk_loss_", counted)
    model = replace(preset("tiny"), ce_chunk_tokens=8)
    run = TrainingRun(model=model, num_gpus=2, parallel=ParallelConfig(ep=2), seq_len=64)
    merged = count_saved_bytes_by_block.__wrapped__(run)
    assert chunks == [64]
    monkeypatch.setattr(type(run.planned_model), "merge_loss_chunks", lambda *_: None)
    assert count_saved_bytes_by_block.__wrapped__(run) == merged and chunks == [64, *[8] * 8]


def test_the_page_has_the_bounds() -> None:
    """The numbers that the tests here and in test_gpus.py refuse beyond, in the table's order."""
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    section = page.partition("\n## Bounds\n")[2].partition("\n## ")[0]
    numbers = [int(n.replace(",", "")) for n in re.findall(r"\| ([\d,]+) \|", section)]
    bounds = [2**16, MAX_DIVISORS, MAX_LAYERS, MAX_STAGES, 2**24, MAX_SEARCH_TOKENS, 2**16]
    assert numbers == [*bounds, MAX_IN_FLIGHT, MAX_MICRO_BATCHES]


def test_large_numbers_end_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["plan", "--preset", "tiny", "--gpus"]
    for name, numbers in (
        ("TrainingRun.num_gpus (1048576) must be", ["1048576", "--ep", "2"]),
        ("SearchRequest.num_gpus (2147483647) must be", ["2147483647"]),
        ("num_gpus (55440) must have at most 64 divisors", ["55440"]),
        ("SearchRequest.seq_len (1048577) must be", ["4", "--seq-len", "1048577"]),
        ("TrainingRun.seq_len (16777217) must be", ["4", "--ep", "2", "--seq-len", "16777217"]),
        ("SearchRequest.gpus_per_node (65537) must be", ["4", "--gpus-per-node", "65537"]),
    ):
        assert main([*call, *numbers]) == 1
        assert name in (error := capsys.readouterr().err) and error.count("\n") == 1
    assert main([*call, "9" * 5000]) == 2
    assert max(map(len, capsys.readouterr().err.splitlines())) < 500
    # No tokens are made: these would be of 70 TB.
    assert main([*call, "4", "--ep", "2", "--batch-size", str(2**31 - 1)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "batch_size (2147483647) must give fewer than" in error


def test_what_records_have_is_named() -> None:
    """The figure is a record's, of bf16 with dispatcher nvlink; other foldings have none."""
    args = PlanConfig(preset="qwen3-30b-a3b", gpu="h200-141", gpus=8)
    for (_, _, num_gpus), (layout, tokens_per_second, record) in MEASURED.items():
        lines = (ROOT / "benchmarks" / "results" / record).read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if row.get("num_gpus") == num_gpus]
        same = [r for r in rows if (r["ep"], r["batch_size"]) == (layout.ep, 4)]
        assert tokens_per_second in [round(row["tokens_per_second_per_gpu"]) for row in same]
        assert _describe_measurement(args, layout).startswith("measured: ep=8 batch_size=4 in bf16")
    other = _describe_measurement(args, Layout(batch_size=4))
    line = "no benchmark has measured the first layout"
    assert other.startswith(f"{line}: ep=8") and "16,159" in other
    alone = _describe_measurement(PlanConfig(preset="tiny", gpus=8), Layout())
    assert alone == line


def test_without_matplotlib(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    call = ["plan", "--preset", "tiny-deepseek-v3", "--gpus", "4", "--ep", "2", "--seq-len", "32"]
    assert main([*call, "--png", str(tmp_path / "memory.png")]) == 1
    assert "needs matplotlib" in capsys.readouterr().err
