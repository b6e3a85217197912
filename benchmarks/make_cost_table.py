r"""Writes the table of costs that `moecore.planning` ships, from the committed records.

    python -m benchmarks.make_cost_table

The newest record of an operation counts. Of the machine's ceilings, which every session measures
at another temperature, it is the median one.

Legend: T tokens, D model dim, F expert hidden dim, E experts, K experts per token, R = T K rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from statistics import median_low
from typing import Any

from benchmarks.bench_plan import CASES
from benchmarks.dispatch_cases import SHAPES as EP_SHAPES
from benchmarks.gate import ROOT
from benchmarks.records import RESULTS, find_latest, load
from benchmarks.shapes import SHAPES
from moecore import NVLinkOptions, ParallelConfig
from moecore.base.options.precision import Precision
from moecore.models import preset
from moecore.planning import OptimizerOptions, TrainingRun, dry_run
from moecore.planning.costs import CostTable, ExposedShare, Point
from moecore.planning.record import Work

TABLE = ROOT / "src" / "moecore" / "planning" / "tables" / "h200.json"
ATTENTION_PAGE = "printed/2026-11-22-attention.txt"  # forward and backward apart
ATTENTION = re.compile(r"\((.*)\) (cudnn|flash) dense: fwd (\S+) ms .* bwd (\S+) ms")
LINEARS_PAGE = "printed/2026-11-22-fp8.txt"
LINEARS = re.compile(r" T=(\d+) K=(\d+) N=(\d+) bf16 (\S+) ")
ATTENTION_NAMES = {
    "cudnn": "aten._scaled_dot_product_cudnn_attention",
    "flash": "aten._flash_attention",
}
# The median over cases of printed/2026-11-24-plan.txt: the host's time over what it queues.
HOST_SECONDS = 87e-6
GROUPED, WGRAD = "sm90_bf16_grouped_kernel", "sm90_bf16_grouped_wgrad_kernel"
PRODUCTS: dict[str, tuple[str, Callable[[int, int], tuple[int, int]]]] = {  # kernel, N and K
    "fc1": (GROUPED, lambda D, F: (2 * F, D)),
    "fc2": (GROUPED, lambda D, F: (D, F)),
    "fc1_dgrad": (GROUPED, lambda D, F: (D, 2 * F)),
    "fc2_dgrad": ("sm90_bf16_grouped_nn_act_bwd_kernel", lambda D, F: (F, D)),
    "fc1_wgrad": (WGRAD, lambda D, F: (2 * F, D)),
    "fc2_wgrad": (WGRAD, lambda D, F: (D, F)),
}
FP8_PRODUCTS = {  # op: kernel, the products of its time
    "fp8_four_products": ("sm90_fp8_grouped_nt_kernel", ("fc1", "fc2", "fc2_dgrad", "fc1_dgrad")),
    "fp8_two_wgrads": ("sm90_fp8_grouped_wgrad_kernel", ("fc1_wgrad", "fc2_wgrad")),
}
ROWS = {  # op: part of the kernel's name, dtype
    "router_logits": ("router_logits", "float32"),
    "router_logits_bwd": ("router_logits_bwd", "float32"),
    "route": ("route", "float32"),
    "route_bwd": ("route_bwd", "float32"),
    "build_index": ("build_index", "int32"),
    "gather_rows": ("gather_rows", "bfloat16"),
    "sum_rows": ("sum_rows", "bfloat16"),
    "weighted_activation": ("weighted_activation", "bfloat16"),
    "weighted_activation_bwd": ("weighted_activation_bwd", "bfloat16"),
    "count_experts": ("expert_counts", "int32"),
    "balance_statistics": ("balance_statistics", "float32"),
    "balance_statistics_bwd": ("balance_statistics_bwd", "float32"),
    "adamw": ("adamw", "float32"),
    "adamw_bf16_moments": ("adamw", "bfloat16"),
}
MOVES = {"dispatch": "_spread_kernel", "combine": "_reduce_kernel"}
WAYS = {"p2p": "send", "allgather": "all_gather", "a2a": "all_to_all"}
ASSUMED = (
    "the three products of a linear were timed together: each has their rate",
    "products in FP8 of a layer were timed together: each has their rate",
    "bytes of NCCL's all-to-all are those of even choices",
    "reduce_scatter is that of fp32 gradients in traced steps, beside products",
    "FP8's products and what quantises for them are those of traced steps: all calls of a kernel "
    "have one rate",
    "collectives without records (all_reduce, broadcast) have all_gather's efficiency",
    "rows of operations without records, such as torch's own, have the efficiency of a copy",
    "kernels of linear attention reach the share "
    "of the roofline of their FLOP and bytes that attention of as many heads and tokens reaches",
    "sparse attention's gathered products and index scores have the rate of products of their "
    "sizes, its other work a copy's; the host queues a chunk's work ahead of the device",
    "copies to the device are as fast as copies to the host",
    "exchanges beside products of tp ranks are exposed by one share, that of a layer of D 8192 on "
    "two GPUs, which had 0.26 with two rows and 0.30 to 0.53 with one",
    "between nodes: the maker's 400 Gb/s of a ConnectX-7 per GPU, from the maker and not "
    "measured; the share of it that is reached (0.9; all-to-all in Megatron-Core's report reaches "
    "0.81 to 0.94), and the latency of a collective, are assumed",
    "between nodes: pairs of a forward and a backward hide 0.93 of the network's time where their "
    "computation lasts, which Megatron-Core's report has measured with DeepEP",
)
IN_STEPS = {  # of traced whole steps: operation of a plan, part of its kernels' names
    "sm90_fp8_grouped_nt_kernel_fp32": "sm90_fp8_grouped_nt_kernel",
    "sm90_fp8_grouped_wgrad_kernel_fp32": "sm90_fp8_grouped_wgrad_kernel",
    "scaled_mm_v2": "nvjet_sm90_qqtst",
    "quantised_activation_fwd_kernel": "quantised_activation_fwd_kernel",
    "quantised_activation_bwd_kernel": "quantised_activation_bwd_kernel",
    "tile_tokens_kernel": "tile_tokens_kernel",
    "gather_row_blocks_kernel": "gather_row_blocks_kernel",
}
FEW = 2  # layers of a dry run; of one more all others are counted
Record = dict[str, Any]


def make_table(results: Path = RESULTS) -> CostTable:
    """Return the table of the records in a folder."""
    records: list[Record] = load(results)  # type: ignore[assignment]
    newest: list[Record] = find_latest(records)  # type: ignore[arg-type]
    alone = [r for r in newest if r["gpu"] == "NVIDIA H200"]
    points = [
        *_read_ceilings(records),
        *_read_grouped_products(alone),
        *_read_fp8_products(alone),
        *_read_linears(results / LINEARS_PAGE),
        *_read_attention(results / ATTENTION_PAGE),
        *_read_row_moves(alone),
        *_read_host_copies(results / "checkpoint"),
        *_read_dispatch(newest),
        *_read_cp_transfers(results / "sequences"),
        *_read_reductions(results / "train"),
        *_read_plan_traces(results / "planning"),
        *_read_step_traces(results / "train"),
    ]
    return CostTable(
        gpu="h200-141",
        measured_on="h200-141",
        points_from="records under benchmarks/results, of NVIDIA H200",
        launch_seconds=min(r["ms"] / r["launches"] for r in alone if r.get("launches")) / 1e3,
        host_seconds=HOST_SECONDS,
        points=tuple(points),
        stands_for={
            "product": "aten.mm",
            "grouped product": "aten._grouped_mm",
            "attention": ATTENTION_NAMES["cudnn"],
            "rows": "aten.copy_",
            "collective": "all_gather",
            "copy": "copy to host",
        },
        efficiency={
            "product": 0.7,
            "grouped product": 0.7,
            "attention": 0.5,
            "rows": 0.8,
            "collective": 0.6,
            "copy": 0.8,
            "network": 0.9,
        },
        network_seconds=20e-6,
        slices=_read_slices(max((results / "tp").glob("*-2-x-nvidia-h200.jsonl"))),
        assumed=ASSUMED,
    )


def _read_plan_traces(folder: Path) -> Iterator[Point]:
    """Yield the kernels of traced steps of `bench_plan`.

    A kernel counts as the mean of its calls; the time of products is divided by FLOP.
    """
    traced = json.loads(max(folder.glob("traced-*.json")).read_text())
    ran = [queued.work for queued in dry_run(CASES[traced["case"]]).queued]
    for name, ms in traced["ms"].items():
        works = [work for work in ran if work.name == name]
        flops, moved = sum(w.flops for w in works), sum(w.num_bytes for w in works)
        yield from _split_time(traced, works, ms, flops, moved, len(works))


def _read_step_traces(folder: Path) -> Iterator[Point]:
    """Yield kernels of traced steps of whole models as CUDA graphs with even loads."""
    for r in _read_lines(folder):
        if "longest" not in r or r["layers"] or not r.get("cuda_graph"):
            continue
        if r["routing"] != "balanced":
            continue
        few, more = ([q.work for q in dry_run(_make_run(r, n)).queued] for n in (FEW, FEW + 1))
        left = preset(r["preset"]).num_layers - FEW
        for name, part in IN_STEPS.items():
            ms = sum(ms for kernel, ms, _ in r["longest"] if part in kernel)
            of_few, of_more = ([w for w in works if w.name == name] for works in (few, more))
            if not (ms and of_more):
                continue
            flops, moved, calls = (
                sum(map(size, of_few)) * (1 - left) + sum(map(size, of_more)) * left
                for size in (attrgetter("flops"), attrgetter("num_bytes"), lambda _: 1)
            )
            yield from _split_time(r, of_more, ms, flops, moved, calls)


def _split_time(
    record: Record, works: list[Work], ms: float, flops: int, moved: int, calls: int
) -> Iterator[Point]:
    """Yield calls that took `ms` together: products by their FLOP, other calls as their mean."""
    for work in dict.fromkeys(works) if flops else [replace(works[0], num_bytes=moved // calls)]:
        yield _make_work_point(record, work, ms * (work.flops / flops if flops else 1 / calls))


def _make_run(r: Record, num_layers: int) -> TrainingRun:
    """Return the run of a record of `bench_train`, with `num_layers` layers."""
    has_head = bool(r.get("fp8_head"))
    precision = r["precision"] and replace(Precision.of(r["precision"]), fp8_head=has_head)
    return TrainingRun(
        model=replace(preset(r["preset"]), num_layers=num_layers),
        num_gpus=r["num_gpus"],
        parallel=ParallelConfig(ep=r["ep"]),
        seq_len=r["seq_len"],
        batch_size=r["batch_size"],
        precision=precision,
        fp8_dispatch=r["fp8_dispatch"],
        nvlink=NVLinkOptions(),
        optimizer=OptimizerOptions(moment_dtype=r["moment_dtype"]),
    )


def make_point(
    record: Record, name: str, kind: Any, ms: float, shape: Iterable[int], dtype: str, **sizes: int
) -> Point:
    """Return a measured operation."""
    work = Work(
        name,
        kind,
        flops=sizes.get("flops", 0),
        num_bytes=sizes["num_bytes"],
        shape=tuple(shape),
        dtype=dtype,
    )
    return _make_work_point(record, work, ms)


def _make_work_point(record: Record, work: Work, ms: float) -> Point:
    """Return a measured operation with seconds of six digits, like records."""
    seconds = float(f"{ms / 1e3:.6g}")
    return Point(work=work, seconds=seconds, commit=record["commit"], date=record["date"][:10])


def _read_ceilings(records: list[Record]) -> Iterator[Point]:
    """Yield a dense product of n^3 and a copy."""
    for op in ("ceiling_dense", "ceiling_copy"):
        found = [r for r in records if r["op"] == op and r["gpu"] == "NVIDIA H200"]
        ms = median_low(r["ms"] for r in found)
        record = next(r for r in found if r["ms"] == ms)
        number = int(re.split(r"\D", record["shape"])[0])
        if op == "ceiling_dense":
            sizes = dict(flops=2 * number**3, num_bytes=6 * number**2)
            yield make_point(record, "aten.mm", "product", ms, [number] * 3, "bfloat16", **sizes)
        else:
            num_bytes = 2 * number << 20  # read and written
            yield make_point(record, "aten.copy_", "rows", ms, (), "bfloat16", num_bytes=num_bytes)


def _read_grouped_products(records: list[Record]) -> Iterator[Point]:
    """Yield moecore's products in bf16, and torch's products of the same gathered rows."""
    for r in records:
        if r["op"] in PRODUCTS and r["backend"] == "triton":
            kernel = PRODUCTS[r["op"]][0]
            yield _make_product(r, r["op"], kernel, r["ms"])
            if kernel != WGRAD:
                yield _make_product(r, r["op"], "aten._grouped_mm", r["baseline_ms"])


def _read_fp8_products(records: list[Record]) -> Iterator[Point]:
    """Yield products in FP8, which share the time of several by FLOP."""
    for r in records:
        if r["op"] in FP8_PRODUCTS:
            kernel, ops = FP8_PRODUCTS[r["op"]]
            flops = [
                _make_product(r, op, kernel, r["ms"], "float8_e4m3fn").work.flops for op in ops
            ]
            for op, share in zip(ops, flops, strict=True):
                ms = r["ms"] * share / sum(flops)
                yield _make_product(r, op, kernel, ms, "float8_e4m3fn")


def _make_product(r: Record, op: str, kernel: str, ms: float, dtype: str = "bfloat16") -> Point:
    """Return a measured grouped product with its FLOP and its fewest bytes."""
    s = SHAPES[r["shape"]]
    N, K = PRODUCTS[op][1](s.dim, s.hidden_dim)
    size = 1 if dtype.startswith("float8") else 2
    E, R = s.num_experts, s.rows
    if "wgrad" in op:
        num_bytes = size * R * (N + K) + 2 * E * N * K
    else:
        num_bytes = size * (R * K + E * N * K) + 2 * R * N
    sizes = dict(flops=2 * R * N * K, num_bytes=num_bytes)
    return make_point(r, kernel, "grouped product", ms, (E, R, N, K), dtype, **sizes)


def _read_linears(path: Path) -> Iterator[Point]:
    """Yield forward and weight gradient of linears, measured as three products of one size."""
    record = dict(commit="unknown", date=path.name[:10])
    for line in path.read_text().splitlines():
        if found := LINEARS.search(line):
            T, K, N = map(int, found.groups()[:3])
            ms = float(found[4]) / 3
            sizes = dict(flops=2 * T * K * N, num_bytes=2 * (T * K + K * N + T * N))
            yield make_point(record, "aten.mm", "product", ms, (T, N, K), "bfloat16", **sizes)
            yield make_point(record, "aten.mm", "product", ms, (N, K, T), "bfloat16", **sizes)


def _read_attention(path: Path) -> Iterator[Point]:
    """Yield causal attention: 2 (d + v) FLOP per head and pair of tokens that attend."""
    text = path.read_text()
    record = dict(commit=re.findall(r"commit (\w+)", text)[0], date=path.name[:10])
    for line in text.splitlines():
        if not (found := ATTENTION.match(line)):
            continue
        T, B, H, G, d, v = map(int, found[1].split(","))
        flops, num_bytes = B * H * T * T * (d + v), 2 * B * T * (H + G) * (d + v)
        name, shape = ATTENTION_NAMES[found[2]], (B, H, T, d, v)
        sizes = dict(flops=flops, num_bytes=num_bytes)
        yield make_point(record, name, "attention", float(found[3]), shape, "bfloat16", **sizes)
        sizes = dict(flops=flops * 5 // 2, num_bytes=2 * num_bytes)
        backward, ms = f"{name}_backward", float(found[4])
        yield make_point(record, backward, "attention", ms, shape, "bfloat16", **sizes)


def _read_row_moves(records: list[Record]) -> Iterator[Point]:
    """Yield operations that move rows, with the fewest bytes that each must move."""
    for r in records:
        if r["op"] in ROWS:
            name, dtype = ROWS[r["op"]]
            num_bytes = round(r["gbps"] * r["ms"] * 1e6)
            yield make_point(r, name, "rows", r["ms"], (), dtype, num_bytes=num_bytes)


def _read_host_copies(folder: Path) -> Iterator[Point]:
    """Yield the last copy to pinned host memory."""
    found = [r for r in _read_lines(folder) if r["op"] == "device_to_host_copy"]
    r = found[-1]
    yield make_point(r, "copy to host", "copy", r["ms"], (), "bfloat16", num_bytes=r["bytes"])


def _read_dispatch(records: list[Record]) -> Iterator[Point]:
    """Yield the kernels of dispatcher nvlink, and NCCL's all-to-all of one row per choice."""
    for r in records:
        found = re.fullmatch(r"(.+)-ep(\d+)", r["shape"])
        if r["op"] in MOVES and r["backend"] == "nvlink" and r["routing"] == "even" and found:
            ranks = int(found[2])
            yield _make_collective(
                r, MOVES[r["op"]], r["ms"], ranks, round(r["gbps"] * r["ms"] * 1e6)
            )
            if r["op"] == "dispatch":
                s = EP_SHAPES[found[1]]
                rows = s.tokens * s.top_k * (ranks - 1) // ranks
                yield _make_collective(r, "all_to_all", r["baseline_ms"], ranks, 2 * rows * s.dim)


def _read_cp_transfers(folder: Path) -> Iterator[Point]:
    """Yield the transfers of context parallel ranks alone; each sends as much as it receives."""
    for r in _read_lines(folder):
        if r["op"] == "context_parallel" and r["way"] in WAYS:
            yield _make_collective(r, WAYS[r["way"]], r["travel_ms"], r["cp"], r["sent_bytes"])


def _read_reductions(folder: Path) -> Iterator[Point]:
    """Yield NCCL's reduce-scatter of gradients, the mean of its calls, by the number of ranks.

    Of the traced steps with one owner per expert the shortest counts, because it waits least.
    """
    found = dict[int, Point]()
    for r in _read_lines(folder):
        for name, ms, calls in r.get("longest", ()):
            if "ReduceScatter_Sum_f32" in name and r["ep"] == r["num_gpus"]:
                config, ranks = preset(r["preset"]), r["ep"]
                assert config.moe is not None
                matrix = config.dim * config.moe.hidden_dim * config.moe.num_experts
                numel = r["parameters"] - 3 * (r["layers"] or config.num_layers) * matrix
                sent = 4 * numel * (ranks - 1) // ranks // calls
                one = _make_collective(r, "reduce_scatter", ms / calls, ranks, sent)
                one = replace(one, work=replace(one.work, dtype="float32"))
                found[ranks] = min(found.get(ranks, one), one, key=attrgetter("seconds"))
    yield from found.values()


def _read_slices(path: Path) -> ExposedShare:
    """Return the exposed time of sliced exchanges over that of exchanges in turn."""
    rows = map(json.loads, path.read_text().splitlines())
    newest = {(r["layer"], r["batch_size"], r["seq_len"], r["provider"]): r for r in rows}
    sliced = [case for case, r in newest.items() if r["chosen"] and r["provider"] == "sliced"]
    ours, in_turn = (
        sum(newest[*size, provider]["exposed_ms"] for *size, _ in sliced)
        for provider in ("sliced", "in turn")
    )
    share = float(f"{ours / in_turn:.3g}")
    return ExposedShare(share=share, gpu="h200-141", record=f"{path.parent.name}/{path.name}")


def _make_collective(r: Record, name: str, ms: float, ranks: int, sent: int) -> Point:
    """Return a collective in which each rank receives as many bytes as it sends."""
    return make_point(r, name, "collective", ms, [ranks], "bfloat16", num_bytes=2 * sent)


def _read_lines(folder: Path) -> Iterator[Record]:
    for path in sorted(folder.glob("*h200.jsonl")):
        yield from map(json.loads, path.read_text().splitlines())


if __name__ == "__main__":
    make_table().write(TABLE)
