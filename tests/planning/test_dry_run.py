import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from moecore import (
    FSDPOptions,
    MemoryOptions,
    NVLinkOptions,
    ParallelConfig,
    PipelineConfig,
    StashOptions,
)
from moecore.base.options.precision import Precision, Recipe
from moecore.base.text import format_bytes
from moecore.cli import main
from moecore.models import flops_per_token, preset
from moecore.moe.dispatch.exchange import COPY, REDUCE, SPREAD
from moecore.moe.placement import compute_choice_probability
from moecore.planning import (
    CostTable,
    OptimizerOptions,
    TrainingRun,
    dry_run,
    plan_memory,
    plan_peak_memory,
    plan_time,
    time_step,
)
from moecore.planning.dry_run import DryRun

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GIB = 2**30
TINY = TrainingRun(model=preset("tiny-deepseek-v3"), num_gpus=4, seq_len=64)
BIG = TrainingRun(model=replace(preset("qwen3-30b-a3b"), num_layers=4), num_gpus=8, batch_size=8)
NEAR = TrainingRun(
    model=replace(preset("qwen3-30b-a3b"), num_layers=4), num_gpus=4, parallel=ParallelConfig(ep=4)
)
TABLE = CostTable.of("h200-141")
BF16 = FSDPOptions(param_dtype=torch.bfloat16)
SEQUENCES = "sequences/2026-11-23-nvidia-h200.jsonl"
SHARDING = "sharding/2026-11-23-2-x-nvidia-h200.jsonl"


def records() -> Iterator[Any]:
    """Yield what GPUs held, and of which run."""
    for line in (RESULTS / SHARDING).read_text().splitlines():
        row = json.loads(line)
        if row["provider"] == "moecore" and row["model"] == "qwen3-30b-a3b":
            config = replace(preset(row["model"]), num_layers=row["layers"])
            sizes: dict[str, Any] = dict(batch_size=row["batch_size"], seq_len=row["seq_len"])
            run = TrainingRun(model=config, num_gpus=row["ranks"], **sizes)
            yield pytest.param(run, row, id=f"{row['ranks']} GPUs, {row['batch_size']} rows")
    for line in (RESULTS / SEQUENCES).read_text().splitlines():
        row = json.loads(line)
        if row["op"] == "context_parallel_step":
            config = preset(row["preset"])
            config = replace(config, num_layers=row["layers"], max_seq_len=row["tokens"])
            fsdp = replace(BF16, dense_strategy="optim")
            run = TrainingRun(model=config, num_gpus=1, seq_len=row["tokens"], fsdp=fsdp)
            yield pytest.param(run, row, id=f"{row['tokens']} tokens")


@pytest.mark.parametrize("run, row", list(records()))
def test_gpus_held_and_took_as_much(run: TrainingRun, row: dict[str, Any]) -> None:
    found = dry_run(run)
    assert found.peak / GIB == pytest.approx(row["peak_gib"], rel=0.015)
    if (run.num_gpus, run.batch_size) != (2, 1):  # 10.05%: the table's sums pass beside products
        seconds = time_step(found, CostTable.of("h200-141")).seconds
        assert seconds * 1e3 == pytest.approx(row["step_ms"], rel=0.1)
    if "held_gib" in row:
        assert found.resident_bytes / GIB == pytest.approx(row["held_gib"], rel=0.001)


known = cache(dry_run)


def found(run: TrainingRun, rank: int = 0) -> DryRun:
    return known(run, rank)  # always of two arguments, which are the cache's key


DELAYED = Recipe(scaling="tensorwise", grad_format="e5m2", amax_history=2)


@pytest.mark.parametrize("precision", [None, "blockwise", "rowwise", DELAYED, "mxfp8", "nvfp4"])
def test_products_are_those_of_the_model(precision: Any) -> None:
    config = replace(preset("qwen3-30b-a3b"), num_layers=3)
    own = Precision.of(precision)
    run = TrainingRun(model=config, num_gpus=1, seq_len=8192, precision=own)
    in_fp8 = [w for w in found(run).forward_backward if w.dtype.startswith("float8") and w.flops]
    assert bool(in_fp8) == (precision in ("blockwise", "rowwise", DELAYED))  # others are emulated
    flops = sum(work.flops for work in found(run).forward_backward)
    # Routers' products are of three parts, and FP8 has room for rows that are padded by expert.
    assert flops == pytest.approx(8192 * flops_per_token(config, 8192), rel=0.05)


def test_a_window_hides_keys_from_the_work_of_attention() -> None:
    config = replace(preset("qwen3-30b-a3b"), num_layers=2, windows=(512, 0))
    run = TrainingRun(model=config, num_gpus=1, seq_len=8192)
    flops = sum(work.flops for work in found(run).forward_backward)
    assert flops == pytest.approx(8192 * flops_per_token(config, 8192), rel=0.05)
    attention = sum(w.flops for w in found(run).forward_backward if w.kind == "attention")
    keys = 512 - 512 * 512 / (2 * 8192) + 8192 / 2  # of a token, in both layers
    # One of seven products is the scores of the backward, which a formula leaves out.
    assert attention == pytest.approx(7 * 2 * 32 * 128 * keys * 8192, rel=1e-3)


def names(run: TrainingRun, rank: int = 0) -> Counter[str]:
    return Counter(work.name for work in found(run, rank).forward_backward)


def test_experts_run_on_kernels_and_tokens_travel() -> None:
    config = replace(preset("qwen3-30b-a3b"), num_layers=2)
    run = TrainingRun(model=config, num_gpus=4, parallel=ParallelConfig(ep=2), seq_len=256)
    ran = names(run)
    assert ran["sm90_bf16_grouped_wgrad_kernel_fp32"] == 2 * config.num_layers
    assert ran["sm90_bf16_grouped_nn_act_bwd_kernel"] == config.num_layers
    travels = [w for w in found(run).forward_backward if w.name == "alltoall_base_"]
    assert {work.shape for work in travels} == {(2,)}
    # Rows and sums, in backward both again, of nearly each token to the other rank; sent and
    # received.
    rows = sum(work.num_bytes for work in travels if work.dtype == "bfloat16")
    once = 2 * 256 * config.dim * torch.bfloat16.itemsize
    assert rows == pytest.approx(4 * config.num_layers * once, rel=0.01)


def test_tokens_travel_by_stores_into_peers_memory() -> None:
    """Memory is that of the room, work that of the rows of even loads."""
    tight, wide = (
        found(replace(NEAR, nvlink=NVLinkOptions(row_factor=factor))) for factor in (1.0, 3.0)
    )
    assert tight.queued == wide.queued and tight.resident_bytes == wide.resident_bytes
    moe, T = NEAR.model.moe, NEAR.seq_len
    rows = 2 * T * moe.top_k  # more per layer, which keeps FC1's output
    more = NEAR.model.num_layers * rows * 2 * moe.hidden_dim * torch.bfloat16.itemsize
    kept = [next(s.level for s in of.starts if s.part == "head") for of in (tight, wide)]
    assert more < kept[1] - kept[0] < 1.01 * more  # and their ids and weights
    travels = [w for w in tight.forward_backward if w.kind == "collective" and w.shape == (4,)]
    names = Counter(work.name for work in travels)
    layers = NEAR.model.num_layers
    assert names[SPREAD] == 2 * layers and names[REDUCE] == layers == names[COPY]
    sent = round(T * compute_choice_probability(moe.top_k, moe.num_experts, moe.num_experts // 4))
    once = 2 * 3 * sent * NEAR.model.dim * torch.bfloat16.itemsize  # to three others, and back
    assert {w.num_bytes for w in travels if w.name in (SPREAD, REDUCE)} == {once}
    # Two slots of rows, and a third of copied sums.
    assert wide.buffers == tight.buffers > 3 * 4 * T * NEAR.model.dim * torch.bfloat16.itemsize
    run = replace(NEAR, nvlink=NVLinkOptions(row_factor=3.0))
    assert plan_memory(run).largest.device["exchange buffers"] == wide.buffers
    assert max(plan_peak_memory(run)) == pytest.approx(wide.peak + wide.buffers, rel=0.01)
    waits = [sum(len(one.host_dependencies) for one in of.queued) for of in (tight, found(NEAR))]
    assert waits[0] < waits[1], "sizes are waited for"


def test_pages_of_rows_are_planned_for_all_layers() -> None:
    deep = replace(NEAR, model=replace(NEAR.model, num_layers=6))
    deep = replace(deep, nvlink=NVLinkOptions(row_factor=None))
    paged = replace(deep, memory=MemoryOptions(stash=StashOptions(factor=1.5)))
    room, pages = found(deep), found(paged)
    more = pages.resident_bytes - room.resident_bytes  # and their tables
    assert pages.pages == pytest.approx(more, rel=0.01)
    moe, T = deep.model.moe, deep.seq_len
    reach = compute_choice_probability(moe.top_k, moe.num_experts, moe.num_experts // 4)
    sources = 4 * round(T * reach)
    widths = T * moe.top_k * 2 * moe.hidden_dim + sources * moe.expert_dim  # of H and of X
    assert pages.pages == pytest.approx(1.5 * 6 * widths * 2, rel=0.01)
    heads = (next(s.level for s in of.starts if s.part == "head") for of in (room, pages))
    kept = [head - of.resident_bytes for head, of in zip(heads, (room, pages), strict=True)]
    assert kept[1] < kept[0] / 2
    assert max(plan_peak_memory(paged)) == pytest.approx(pages.peak + pages.buffers, rel=0.001)


def test_a_module_of_prediction_counts_as_often_as_it_runs() -> None:
    """Its products and pages for each run, its parameters once; the plan of few layers is equal."""
    model = replace(TINY.model, num_layers=8, dense_layers=(), mlp_hidden_dim=0, vocab_size=8192)
    models = [replace(model, mtp_repeats=n) for n in (1, 3)]
    runs = [replace(TINY, model=of, num_gpus=8, seq_len=128, batch_size=16) for of in models]
    steps = [dry_run(run) for run in runs]
    flops = [sum(work.flops for work in step.forward_backward) for step in steps]
    each = [16 * 128 * flops_per_token(of, 128) for of in models]
    assert flops[1] - flops[0] == pytest.approx(each[1] - each[0], rel=0.03)
    last, step = runs[1], steps[1]
    assert step.resident_bytes == pytest.approx(steps[0].resident_bytes, rel=1e-3)
    assert (
        last.planned_model.count_parameters().params
        == runs[0].planned_model.count_parameters().params
    )
    assert max(plan_peak_memory(last)) == pytest.approx(step.peak, rel=0.01)
    assert plan_time(last, TABLE).seconds == pytest.approx(time_step(step, TABLE).seconds, rel=0.02)
    stages: Any = dict(parallel=ParallelConfig(pp=2, ep=4), pipeline=PipelineConfig())
    stash = MemoryOptions(stash=StashOptions())
    paged = replace(last, **stages, memory=stash, nvlink=NVLinkOptions(row_factor=None))
    pages = plan_memory(paged).ranks[1].device["pages"]
    assert pages == pytest.approx(dry_run(paged, 4).pages, rel=1e-3)


def test_a_choice_that_no_expert_gets_is_memory_alone() -> None:
    tiny = preset("tiny-qwen3")
    moe = replace(tiny.moe, dim=256, hidden_dim=128, top_k=4, zero_experts=tiny.moe.num_experts)
    model = replace(tiny, dim=256, max_seq_len=256, moe=moe)
    run = TrainingRun(model=model, num_gpus=1, seq_len=256, batch_size=2)
    step = dry_run(run)
    flops = sum(work.flops for work in step.forward_backward)
    assert flops == pytest.approx(512 * flops_per_token(model, 256), rel=0.01)
    other = dry_run(replace(run, model=replace(model, moe=replace(moe, zero_experts=0))))
    assert step.peak >= other.peak
    assert [work.name for work in step.optimizer] == [work.name for work in other.optimizer]
    assert plan_time(run, TABLE).seconds == pytest.approx(time_step(step, TABLE).seconds, rel=0.01)


def test_a_step_of_more_micro_batches_works_more_and_holds_sums() -> None:
    both = replace(TINY, num_micro_batches=2)
    once, twice = names(TINY), names(both)
    products = ("mm", "attention_fwd", "attention_bwd", "rms_norm_bwd")
    assert {name: twice[name] for name in products} == {n: 2 * once[n] for n in products}
    assert found(both).peak > found(TINY).peak
    assert found(both).resident_bytes == pytest.approx(found(TINY).resident_bytes, rel=0.01)
    assert found(both).optimizer == found(TINY).optimizer


def test_levers_take_memory_and_cost_work() -> None:
    run = replace(TINY, num_gpus=1, seq_len=128, batch_size=8)
    levers = replace(run, memory=MemoryOptions(recompute=("norm", "mla_up_proj", "moe")))
    assert found(levers).peak < 0.8 * found(run).peak
    assert found(levers).resident_bytes == found(run).resident_bytes
    assert names(levers)["rms_norm_fwd"] > names(run)["rms_norm_fwd"]
    large = replace(BIG, memory=MemoryOptions(offload=("experts", "attention")))
    assert found(large).peak < 0.9 * found(BIG).peak
    assert found(large).resident_bytes == found(BIG).resident_bytes
    small = replace(run, optimizer=OptimizerOptions(moment_dtype="bfloat16"))
    assert found(small).resident_bytes < 0.8 * found(run).resident_bytes
    away = replace(BIG, optimizer=OptimizerOptions(offload_fraction=0.5))
    copies = [work for work in found(away).forward_backward if work.kind == "copy"]
    host = plan_memory(away).largest.host["optimizer state"]
    assert sum(work.num_bytes for work in copies) == pytest.approx(2 * host, rel=0.02)
    assert found(BIG).peak - found(away).peak == pytest.approx(host, rel=0.05)


def test_stages_run_their_order_and_every_rank_has_its_own() -> None:
    pipeline = PipelineConfig(layout="Et|tmL")
    stages: Any = dict(parallel=ParallelConfig(pp=2, ep=2), pipeline=pipeline)
    run = replace(TINY, **stages, num_micro_batches=4, model=replace(TINY.model, num_layers=2))
    first, last = names(run), names(run, 3)
    assert first["send"] == last["send"] == first["recv_"] == last["recv_"] == 4
    assert last["_cross_entropy_kernel"] and not first["_cross_entropy_kernel"]
    assert found(run).peak != found(run, 3).peak


def test_the_host_reads_nothing_where_no_tokens_travel() -> None:
    alone = found(replace(TINY, num_gpus=1, parallel=ParallelConfig()))
    assert not any(one.host_dependencies for one in alone.queued)
    counts = found(replace(TINY, parallel=ParallelConfig(ep=2)))
    assert sum(map(bool, (one.host_dependencies for one in counts.queued))) == 3, "of each layer"


def test_worlds_of_the_same_meshes_one_after_the_other() -> None:
    one, other = (
        replace(TINY, num_gpus=8, parallel=ParallelConfig(tp=2, etp=etp, ep=2)) for etp in (1, 2)
    )
    first = dry_run(one)
    assert dry_run(other).resident_bytes != first.resident_bytes == dry_run(one).resident_bytes


def test_pairs_multiply_what_turns_do() -> None:
    def steps(schedule: Any) -> DryRun:
        config = replace(preset("tiny-qwen3"), num_layers=8)
        run = replace(TINY, model=config, num_gpus=8, num_micro_batches=4)
        pipeline = PipelineConfig(schedule=schedule, layout="Ett|tt|tt|ttL")
        return dry_run(replace(run, parallel=ParallelConfig(pp=2, ep=4), pipeline=pipeline))

    turns, pairs = both = steps("interleaved"), steps("overlapped")
    products = [Counter(w for w in step.forward_backward if w.flops) for step in both]
    assert products[0] == products[1]
    assert pairs.resident_bytes == turns.resident_bytes and pairs.peak >= turns.peak


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["dry-run", "--preset", "tiny", "--gpus", "2", "--seq-len", "64", "--gpu"]
    assert main([*command, "h200-141"]) == 0
    first, second, third, time, header, *rows = capsys.readouterr().out.splitlines()
    assert " ms a step, of which ms by what limits: " in time
    assert first.startswith("rank 0 of 2 holds ") and "of 149 GB (h200-141)" in second
    run = TrainingRun(model=preset("tiny"), num_gpus=2, seq_len=64, fsdp=BF16)
    plan = max(plan_peak_memory(run))
    assert third == f"{format_bytes(plan)} by the plan, from few layers"
    assert header.split()[0] == "what" and {row.split("  ")[0] for row in rows} >= {"optimizer"}
    assert main([*command, "h100-80", "--json", "--rank", "1"]) == 0
    printed = json.loads(capsys.readouterr().out)
    step = dry_run(run, 1)
    found = [printed[name] for name in ("held", "peak", "plan")]
    assert found == [step.resident_bytes, step.peak, plan]
    num_works = len(step.forward_backward) + len(step.optimizer)
    assert sum(row[0] for row in printed["works"].values()) == num_works
    command = ["dry-run", "--preset", "tiny-qwen3", "--gpus", "4", "--pp", "2", "--seq-len", "64"]
    assert main([*command, "--layout", "Ett|L", "--rank", "3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    stages = PipelineConfig(layout="Ett|L")
    run = replace(TINY, model=preset("tiny-qwen3"), parallel=ParallelConfig(pp=2), pipeline=stages)
    first, last = plan_peak_memory(run)
    assert printed["plan"] == last != first


@pytest.mark.parametrize("nvlink", [None, NVLinkOptions(row_factor=1.0)])
@pytest.mark.parametrize("precision", [None, "blockwise"])
def test_tokens_as_fp8_send_half_the_bytes(nvlink: NVLinkOptions | None, precision: Any) -> None:
    """Tokens of each layer, and gradients of outputs where the experts are in FP8."""
    wide = replace(NEAR, nvlink=nvlink, precision=Precision.of(precision))
    names = ("alltoall_base_",) if nvlink is None else (SPREAD,)
    works = (found(run).forward_backward for run in (wide, replace(wide, fp8_dispatch=True)))
    sent, packed = (Counter(w.num_bytes for w in of_run if w.name in names) for of_run in works)
    row = max(sent)
    as_fp8 = row * (2048 + 2048 // 128 * 4) // (2 * 2048)
    layers = NEAR.model.num_layers * (1 if precision is None else 2)
    assert packed - sent == {as_fp8: layers} and sent - packed == {row: layers}
