from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from moecore import (
    FSDPOptions,
    MemoryOptions,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.precision import Precision
from moecore.cli import main
from moecore.models import Decoder, SparseKeysConfig, preset
from moecore.planning import (
    CostTable,
    OptimizerOptions,
    TrainingRun,
    dry_run,
    fake_world,
    memory,
    plan_memory,
    plan_peak_memory,
    plan_time,
)
from moecore.planning.gpus import GPUS
from moecore.planning.run import _compute_rank_bytes, list_rank_bytes
from moecore.train import AdamW
from tests.helpers.ranks import ranks_fixture

WORLD, SHORT = 4, 32
CONFIG = replace(preset("tiny-deepseek-v3"), num_layers=3)
BASE = TrainingRun(model=CONFIG, num_gpus=WORLD, seq_len=SHORT)
BF16 = FSDPOptions(param_dtype=torch.bfloat16)
SPARSE = SparseKeysConfig(num_heads=2, head_dim=16, top_k=8)
RUNS = {
    "sharded": replace(BASE, parallel=ParallelConfig(ep=2)),
    "replicas": replace(BASE, parallel=ParallelConfig(ep=2, dp_replicate=2, edp_replicate=2)),
    "bf16 moments, weights whole": replace(
        BASE,
        parallel=ParallelConfig(tp=2, ep=4),
        fsdp=replace(BF16, dense_strategy="optim"),
        optimizer=OptimizerOptions(moment_dtype="bfloat16", master_remainder=True),
    ),
    "stages": replace(
        BASE,
        parallel=ParallelConfig(pp=2, ep=2),
        num_micro_batches=2,
        pipeline=PipelineConfig(layout="Ett|tmL"),
    ),
    "linear attention in stages": replace(
        BASE,
        model=preset("tiny-qwen3-next"),
        parallel=ParallelConfig(pp=2, ep=2),
        num_micro_batches=2,
        pipeline=PipelineConfig(layout="Ett|ttL"),
    ),
    "sparse attention": replace(
        BASE,
        model=replace(CONFIG, num_layers=2, mla=replace(CONFIG.mla, sparse=SPARSE)),  # type: ignore[type-var]
        parallel=ParallelConfig(ep=2),
    ),
}


def held(run: TrainingRun) -> dict[str, int]:
    """Train one step of a run; return what this rank holds."""
    model = Decoder(run.model, device="meta", dtype=run.dtype)
    meshes = build_meshes(run.parallel, "cpu")
    how: dict[str, Any] = dict(fsdp=run.fsdp, pipeline=run.pipeline, dispatch="alltoall")
    parallelize_moe(model, meshes, **how)
    model.to_empty(device="cpu")
    model.init_weights(0)
    options = run.optimizer
    moments = dict(moment_dtype=getattr(torch, options.moment_dtype))
    optimizer = AdamW(model.parameters(), **moments, master_remainder=options.master_remainder)
    step = TrainStep(model, optimizer, num_micro_batches=run.num_micro_batches)
    g = torch.Generator().manual_seed(meshes.data_rank)
    sizes = (run.num_micro_batches, run.batch_size, run.seq_len)
    tokens = torch.randint(0, run.model.vocab_size, sizes, generator=g)
    step.forward_backward([dict(tokens_BT=x, labels_BT=x.roll(-1, 1)) for x in tokens])
    found = {"gradients": bytes_of(p.grad for p in model.parameters() if p.grad is not None)}
    step.finish()
    found["parameters"] = bytes_of(model.parameters())
    states = (item for p in model.parameters() for item in optimizer.state[p].items())
    found["optimizer state"] = bytes_of(t for name, t in states if name != "step")
    return found


def bytes_of(tensors: Any) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def worker(rank: int, device: torch.device) -> dict[str, list[dict[str, int]]]:
    results = {}
    for name, run in RUNS.items():
        of_ranks: list[Any] = [None] * WORLD
        dist.all_gather_object(of_ranks, held(run))
        results[name] = of_ranks
    return results


found = ranks_fixture(WORLD, worker)


@pytest.mark.parametrize("name", RUNS)
def test_ranks_hold_what_is_planned(name: str, found: dict[str, Any]) -> None:
    run = RUNS[name]
    plan, pp = plan_memory(run), run.resolved.pp
    for rank in plan.ranks:
        real = found[name][rank.pp_rank * WORLD // pp]
        assert list_rank_bytes(run)[rank.pp_rank].gradients == real["gradients"]
        assert rank.device["optimizer state"] == real["optimizer state"]
        kinds = [kind for kind in rank.device if kind.startswith("parameters")]
        assert sum(rank.device[kind] for kind in kinds) == real["parameters"]


def test_forwards_in_flight_are_those_of_the_schedule() -> None:
    deep = replace(BASE, model=replace(preset("tiny-qwen3"), num_layers=8), num_micro_batches=8)
    of = replace(deep, num_gpus=8, parallel=ParallelConfig(pp=4, ep=2), pipeline=PipelineConfig())
    in_flight = [rank.in_flight for rank in plan_memory(of).ranks]
    assert in_flight == [(4,), (3,), (2,), (1,)]
    gpipe = plan_memory(replace(of, pipeline=PipelineConfig(schedule="gpipe")))
    assert [rank.in_flight for rank in gpipe.ranks] == 4 * [(8,)]


@pytest.mark.parametrize(
    ("model", "layout", "schedule", "strategy"),
    [
        # Its first layer frees a tensor of the whole step, and stands for three dense layers.
        ("deepseek-v3", "Et*4|t*2|t|tmL", "interleaved", "optim"),
        ("tiny-deepseek-v3", "Et*5|t*3mL", "1f1b", "optim_grads_params"),
        ("tiny-deepseek-v3", "Et*5|t*3mL", "gpipe", "optim"),
        ("tiny-deepseek-v3", "Et*6|t|t|mL", "overlapped", "optim"),
    ],
)
def test_kinds_are_positive_and_add_up(model, layout, schedule, strategy) -> None:
    run = TrainingRun(
        model=replace(preset(model), num_layers=8),
        num_gpus=8,
        seq_len=4096 if model == "deepseek-v3" else 64,
        parallel=ParallelConfig(pp=2, ep=4),
        pipeline=PipelineConfig(schedule=schedule, layout=layout),
        num_micro_batches=8,
        fsdp=FSDPOptions(param_dtype=torch.bfloat16, dense_strategy=strategy),
    )
    ranks = plan_memory(run).ranks
    assert all(n > 0 for rank in ranks for n in (*rank.device.values(), *rank.host.values()))
    # Only a few small tensors have no kind: counters, tables of positions.
    assert all(rank.device.get("other", 0) < 2**24 for rank in ranks)
    assert tuple(sum(rank.device.values()) for rank in ranks) == plan_peak_memory(run)


@pytest.mark.parametrize(
    ("schedule", "numbers"),
    [
        (None, range(1, 9)),
        ("1f1b", (9, 10, 11)),
        ("zero-bubble", (9, 10, 11)),
        ("interleaved", (10, 12)),
        ("overlapped", (10, 12)),
        ("zbv", (9, 10, 11)),
        ("dualpipe-v", (9, 10, 11)),
    ],
)
def test_many_micro_batches_hold_what_a_few_do(schedule, numbers, monkeypatch) -> None:
    """The levels of all passes are those of the first rounds."""
    chunks = None if schedule in (None, "1f1b", "zero-bubble") else 2
    run = TrainingRun(
        model=replace(preset("tiny-deepseek-v3"), num_layers=5),
        num_gpus=2,
        seq_len=64,
        parallel=ParallelConfig(pp=1 if schedule is None else 2),
        pipeline=None if schedule is None else PipelineConfig(schedule=schedule, chunks=chunks),
    )
    few = [plan_memory(replace(run, num_micro_batches=n)).ranks for n in numbers]
    many = plan_memory(replace(run, num_micro_batches=2**31 - 2)).ranks
    assert many == few[list(numbers).index(10 if schedule else 8)]
    monkeypatch.setattr(memory, "count_steady_micro_batches", lambda run: run.num_micro_batches)
    assert few == [plan_memory(replace(run, num_micro_batches=n)).ranks for n in numbers]


def test_what_is_offloaded_is_in_host_memory() -> None:
    run = replace(RUNS["stages"], batch_size=128)  # small storages stay
    memory, optimizer = MemoryOptions(offload=("experts",)), OptimizerOptions(offload_fraction=0.5)
    away = plan_memory(replace(run, memory=memory, optimizer=optimizer))
    for rank, before in zip(away.ranks, plan_memory(run).ranks, strict=True):
        assert rank.host["optimizer state"] * 2 == before.device["optimizer state"]
        assert rank.device["optimizer state"] >= rank.host["optimizer state"]
    deep = replace(RUNS["sharded"], model=replace(CONFIG, num_layers=8), batch_size=128)
    gone = plan_memory(replace(deep, memory=memory)).largest
    kept = plan_memory(deep).largest
    assert gone.host["activations"] > 0 and not kept.host
    assert gone.activations < kept.activations and gone.num_bytes < kept.num_bytes


WIDE_EXPERTS = replace(CONFIG, num_layers=4, moe=replace(CONFIG.moe, hidden_dim=1024))  # type: ignore[type-var]
QWEN = replace(preset("qwen3-30b-a3b"), num_layers=5)


@pytest.mark.parametrize(
    ("model", "schedule", "layout", "rows", "bound"),
    [
        (WIDE_EXPERTS, "gpipe", "Ett|ttmL", (32, 128), 0.02),
        (WIDE_EXPERTS, "interleaved", "Et|t|t|tmL", (32, 128), 0.02),
        # Between D and W, gradients of outputs are not counted.
        (QWEN, "zbv", "Ett|t|t|tL", (1, 16384), 0.04),
    ],
)
def test_offload_in_stages_is_that_of_a_dry_run(model, schedule, layout, rows, bound) -> None:
    """The schedule decides when the last block of each stage is in host memory."""
    run = TrainingRun(
        model=model,
        num_gpus=2,
        parallel=ParallelConfig(pp=2),
        batch_size=rows[0],
        seq_len=rows[1],
        num_micro_batches=5,
        pipeline=PipelineConfig(schedule=schedule, layout=layout),
        memory=MemoryOptions(offload=("norm", "attention", "mlp", "experts", "rest")),
    )
    peaks = [dry_run(run, rank).peak for rank in range(2)]
    assert plan_peak_memory(run) == pytest.approx(peaks, rel=bound)


def test_weights_in_host_memory_are_counted_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = preset("tiny")
    sizes = {n: x.numel() for n, x in Decoder(tiny, device="meta").named_parameters()}
    run = TrainingRun(model=tiny, num_gpus=2, seq_len=64, parallel=ParallelConfig(ep=2))
    away = replace(run, memory=MemoryOptions(offload_params=True))
    rank, shard = plan_memory(away).largest, 4 * sum(sizes.values()) // 2  # fp32, over two ranks
    assert rank.host == {"parameters": shard, "gradients": shard, "optimizer state": 2 * shard}
    assert not any("parameters" in kind or kind == "optimizer state" for kind in rank.device)
    # Forward and backward copy all shards to the GPU, except that the backward reads routers and
    # tensors outside of blocks of the forward. All gradients are copied to the host.
    copies = Counter[str]()
    for launch in dry_run(away).queued:
        copies[launch.work.name] += launch.work.num_bytes
    once = 4 * sum(n for k, n in sizes.items() if "layers" not in k or "router" in k) // 2
    assert copies["copy to device"] == 2 * shard - once and copies["copy to host"] == shard
    assert plan_time(away, CostTable.of("h100-80")).parts["pcie"] > 0
    words = "plan --preset tiny --gpus 2 --ep 2 --seq-len 64 --offload-params"
    assert main(words.split()) == 0
    assert "host: parameters" in capsys.readouterr().out
    assert main(["plan", "--preset", "tiny", "--gpus", "2", "--offload-params"]) != 0
    assert "have no offload_params in a search" in capsys.readouterr().err
    assert main([*words.split(), "--call"]) == 0
    assert "materialize(model, device=meshes.device_type)" in capsys.readouterr().out


def test_replicas_are_counted_by_hand() -> None:
    """Replicas divide no state, and add their gradients by an all-reduce of each shard."""
    sizes = {n: x.numel() for n, x in Decoder(preset("tiny"), device="meta").named_parameters()}
    experts = sum(n for name, n in sizes.items() if ".experts." in name)
    others = sum(sizes.values()) - experts

    def count(dp_replicate: int, edp_replicate: int) -> tuple[list[int], Counter[str]]:
        """Return a rank's bytes of parameters, state and gradients, and sent bytes by sum."""
        degrees = ParallelConfig(ep=2, dp_replicate=dp_replicate, edp_replicate=edp_replicate)
        run = TrainingRun(model=preset("tiny"), num_gpus=8, seq_len=64, parallel=degrees)
        device, sums = plan_memory(run).largest.device, Counter[str]()
        for launch in dry_run(run).queued:
            if "reduce" in launch.work.name and launch.work.shape != (8,):  # of all ranks: the loss
                sums[launch.work.name] += launch.work.num_bytes
        state = sum(n for kind, n in device.items() if kind.startswith("parameters"))
        (rank,) = list_rank_bytes(run)
        return [state, device["optimizer state"], rank.gradients], sums

    # 8 ranks: dense parameters over 8 / dp_replicate, experts over ep * (4 / edp_replicate).
    for dp, edp in ((1, 1), (2, 1), (2, 2), (4, 4)):
        shards = {"dense": 4 * others * dp // 8, "experts": 4 * experts * edp // 8}
        shard = sum(shards.values())
        sizes_of_rank, sums = count(dp, edp)
        assert sizes_of_rank == [shard, 2 * shard, shard]
        # A sum of n bytes over R replicas sends and receives n (R - 1) / R twice.
        replicas = {"dense": dp, "experts": edp}
        sent = sum(4 * n * (replicas[k] - 1) // replicas[k] for k, n in shards.items())
        assert sent <= sums["allreduce_"] <= 1.02 * sent  # with padding between tensors


def test_pinned_memory_is_that_of_the_gpus_of_a_server() -> None:
    """16 ranks are 2 servers of H100 and 4 of GB200, which has half of the host memory."""
    optimizer = OptimizerOptions(offload_fraction=1.0)
    plan = plan_memory(replace(RUNS["sharded"], num_gpus=16, optimizer=optimizer))
    (own,) = {sum(rank.host.values()) for rank in plan.ranks}
    h100, gb200 = GPUS["h100-80"], GPUS["gb200-186"]
    assert own > 0 and plan.count_pinned_bytes(h100) == 8 * own
    assert plan.count_pinned_bytes(gb200) == 4 * own
    assert gb200.host_memory == 2 * 480 * 10**9  # of a tray: two Graces, four GPUs


def test_a_world_is_fake_alone() -> None:
    with fake_world(8, rank=5):
        assert (dist.get_rank(), dist.get_world_size()) == (5, 8)
        with pytest.raises(ValueError, match=r"process group \(8 ranks\) must not be there"):
            plan_memory(RUNS["sharded"])
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"rank \(8\) must be < world_size"), fake_world(8, 8):
        pass


def test_a_run_is_refused_as_it_would_be() -> None:
    with pytest.raises(ValueError, match=r"TrainingRun.pipeline \(None\) must be there when pp"):
        TrainingRun(model=CONFIG, num_gpus=4, parallel=ParallelConfig(pp=2))
    with pytest.raises(ValueError, match=r"seq_len \(.*\) must be <= DecoderConfig.max_seq_len"):
        TrainingRun(model=CONFIG, num_gpus=4, seq_len=1 << 20)
    with pytest.raises(ValueError, match=r"num_experts \(8\) must be divisible by"):
        plan_memory(replace(BASE, num_gpus=16, parallel=ParallelConfig(ep=16)))


DEEP = replace(preset("tiny-deepseek-v3"), num_layers=7, dense_layers=(0, 1))
TIED = replace(preset("tiny-shared"), num_layers=6)
WIDE = TrainingRun(model=DEEP, num_gpus=16, seq_len=64, batch_size=32, num_micro_batches=4)
INTERLEAVED = PipelineConfig(schedule="interleaved", chunks=2)
TENSORWISE = Precision.of("tensorwise")
STAGED_RUNS: dict[str, TrainingRun] = {
    "stages": replace(WIDE, parallel=ParallelConfig(pp=2, tp=2, ep=4), pipeline=INTERLEAVED),
    "linear attention": replace(
        WIDE,
        model=replace(preset("tiny-qwen3-next"), num_layers=8, linear_layers=(0, 1, 2, 4, 5, 6)),
        parallel=ParallelConfig(pp=4, ep=4),
        pipeline=PipelineConfig(),
    ),
    "a V, tied": replace(
        WIDE,
        model=TIED,
        parallel=ParallelConfig(pp=2, cp=2),
        pipeline=PipelineConfig(schedule="zbv"),
    ),
    "predictions alone": replace(
        WIDE, parallel=ParallelConfig(pp=4, ep=4), pipeline=PipelineConfig(layout="Ettt|tttt|m|L")
    ),
    "layers by name": replace(
        WIDE,
        parallel=ParallelConfig(pp=4, ep=4),
        pipeline=PipelineConfig(layout="Ettt|tt|tt|mL"),
        precision=replace(TENSORWISE, overrides=(("*.3.*", None),)),
    ),
}


@pytest.mark.parametrize("name", STAGED_RUNS)
def test_each_rank_stores_what_its_own_plan_has(name: str) -> None:
    run = STAGED_RUNS[name]
    own = [_compute_rank_bytes(run, rank) for rank in range(run.resolved.pp)]
    assert list(list_rank_bytes(run)) == own
