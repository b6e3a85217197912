import gzip
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moecore import ParallelConfig, build_meshes
from moecore.cli import main
from moecore.planning import fake_world
from moecore.planning.option_sets import OPTIONS, Option
from moecore.planning.report import (
    CATEGORIES,
    LIMIT_OF,
    OTHER,
    PARTS,
    Kernel,
    Trace,
    classify_kernel,
    make_report,
    report_trace,
)

DOCS = Path(__file__).parents[2] / "docs"
MAIN, AUTOGRAD = 1, 2  # threads of the host
US = 1e-3  # ms
# Of each part, a kernel; of idle parts none.
KERNELS: dict[str, dict[str, str]] = {
    "experts": {"name": "sm90_bf16_grouped_kernel"},
    "experts by other products": {"name": "cutlass::Kernel", "phase": "experts"},
    "attention": {"name": "flash_fwd"},
    "dense products": {"name": "nvjet_hsh"},
    "quantisation": {"name": "quantise_rows_kernel"},
    "routing": {"name": "route_kernel"},
    "loss": {"name": "cross_entropy_kernel"},
    "optimizer": {"name": "multi_tensor_apply"},
    "pages": {"name": "_store_pages_kernel"},
    "residual streams": {"name": "expand_streams_bwd_kernel"},
    "fsdp copies": {"name": "Memcpy DtoD (Device -> Device)"},
    "compiled": {"name": "triton_poi_fused"},
    "other": {"name": "elementwise"},
    "dispatch by collectives": {"name": "ncclDevKernel_X", "group": "mesh_ep"},
    "nvlink dispatch": {"name": "_spread_kernel"},
    "copies to peers": {"name": "Memcpy PtoP (Device -> Device)"},
    "sharding": {"name": "ncclDevKernel_X", "group": "mesh_dp_shard"},
    "pipeline": {"name": "ncclDevKernel_X", "group": "mesh_pp"},
    "tensor parallelism": {"name": "ncclDevKernel_X", "group": "mesh_tp"},
    "context parallelism": {"name": "ncclDevKernel_X", "group": "mesh_cp"},
    "other collectives": {"name": "ncclDevKernel_X", "group": "mesh_default"},
    "host copies": {"name": "Memcpy DtoH (Device -> Pinned)"},
}


class Events(list[dict[str, Any]]):
    """A trace in the making."""

    def host(self, category: str, name: str, start: float, end: float, thread: int = MAIN) -> None:
        event = dict(ph="X", cat=category, name=name, pid=7, tid=thread, ts=start, dur=end - start)
        self.append(event | {"args": {}})

    def kernel(
        self,
        name: str,
        start: float,
        end: float,
        *,
        launched: float,
        thread: int = MAIN,
        call: str = "cudaLaunchKernel",
        category: str = "kernel",
        **args: Any,
    ) -> None:
        self.host("cuda_runtime", call, launched, launched + 0.5, thread)
        self[-1]["args"] = {"correlation": len(self)}
        event = dict(ph="X", cat=category, name=name, pid=0, tid=9, ts=start, dur=end - start)
        self.append(event | {"args": {"device": 0, "correlation": len(self)} | args})

    def write(self, path: Path) -> Path:
        raw = json.dumps({"schemaVersion": 1, "traceEvents": self}).encode()
        path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
        return path


def a_step() -> Events:
    """100 us: the host is ahead until 40, waits until 60 and is late at 80."""
    events = Events()
    events.append({"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}})
    events.host("user_annotation", "moecore::dispatch", 0, 6)
    events.host("user_annotation", "moecore::experts", 7, 10)
    events.host("cpu_op", "autograd::engine::evaluate_function: X", 10, 90, AUTOGRAD)
    events.host("user_annotation", "moecore::finish", 90, 99)
    events.host("user_annotation", "moecore::optimizer", 91, 95)
    exchange = {"Collective name": "all_to_allv", "Process Group Description": "mesh_ep"}
    events.kernel("nvjet_hsh", 10, 20, launched=-5)
    events.kernel("ncclDevKernel_SendRecv(args)", 15, 30, launched=5, **exchange)
    events.kernel("sm90_bf16_grouped_kernel", 30, 50, launched=8)
    gather = {"Collective name": "_allgather_base", "Process Group Description": "mesh_dp_shard"}
    events.kernel("ncclDevKernel_AllGather_RING_LL", 40, 54, launched=12, thread=AUTOGRAD, **gather)
    events.host("cuda_runtime", "cudaStreamSynchronize", 40, 56, AUTOGRAD)
    events.kernel("sm90_bf16_grouped_wgrad_kernel", 60, 70, launched=58, thread=AUTOGRAD)
    events.kernel("route_bwd_kernel", 72, 80, launched=60, thread=AUTOGRAD)
    events.kernel("_adamw_kernel", 95, 105, launched=92)
    copy = {"call": "cudaMemcpyAsync", "category": "gpu_memcpy"}
    events.kernel("Memcpy DtoH (Device -> Pinned)", 105, 110, launched=97, **copy)
    return events


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_step_by_hand(name: str, tmp_path: Path) -> None:
    found = report_trace(a_step().write(tmp_path / name))
    assert found.wall == pytest.approx(100 * US)
    assert found.parts == pytest.approx(
        {
            "experts": 30 * US,
            "late launches": 15 * US,
            "dense products": 10 * US,
            "dispatch by collectives": 10 * US,  # 5 of 15 are beside a product
            "optimizer": 10 * US,
            "routing": 8 * US,
            "waits of the host": 6 * US,
            "host copies": 5 * US,
            "sharding": 4 * US,
            "gaps between kernels": 2 * US,
        }
    )
    assert next(iter(found.parts)) == "experts"
    assert next(iter(found.ms_by_limit.items())) == ("compute", pytest.approx(40 * US))
    assert found.limit_text == "compute, most of it experts"
    # Half of 40, 15 + 6 with SendRecv in the way of a whole graph, 15.
    assert [gain.share for gain in found.gains] == pytest.approx([0.21, 0.20, 0.15])
    assert "DenseOptions(graph" in found.gains[0].option and "precision" in found.gains[1].option


def test_the_allocator_explains_a_gap(tmp_path: Path) -> None:
    events = a_step()
    events.host("cuda_runtime", "cudaFree", 79, 88)
    found = report_trace(events.write(tmp_path / "trace.json"))
    assert found.parts["allocator"] == pytest.approx(15 * US) and "late launches" not in found.parts
    assert "expandable_segments" in found.gains[1].option


def test_steps_are_those_that_the_profiler_has_marked(tmp_path: Path) -> None:
    events = a_step()
    for i in range(2):
        events.host("user_annotation", f"ProfilerStep#{i + 3}", i * 50, i * 50 + 50)
    path = events.write(tmp_path / "trace.json")
    found = report_trace(path)
    assert found.num_steps == 2 and found.wall == pytest.approx(50 * US)
    assert sum(found.parts.values()) == pytest.approx(50 * US)
    assert report_trace(path, num_steps=4).wall == pytest.approx(25 * US)


def test_a_collective_is_of_the_innermost_mark_around_its_launch(tmp_path: Path) -> None:
    events = Events()
    events.host("user_annotation", "moecore::F stage 0 micro-batch 1", 0, 10)
    events.host("user_annotation", "moecore::combine", 2, 5)
    for at in (3, 6, 12):
        events.kernel("ncclDevKernel_X", 100 + at, 101 + at, launched=at)
    found = report_trace(events.write(tmp_path / "trace.json"))
    assert found.parts["dispatch by collectives"] == pytest.approx(1 * US)
    assert found.parts["other collectives"] == pytest.approx(2 * US)


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ({"group": "mesh_ep_etp", "collective": "_allgather_base"}, "dispatch by collectives"),
        ({"group": "mesh_default", "phase": "combine"}, "dispatch by collectives"),
        ({"group": "mesh_cp_inner", "collective": "all_to_all"}, "context parallelism"),
        ({"group": "mesh_edp_shard"}, "sharding"),
        ({"group": "mesh_dp_shard_cp"}, "sharding"),
        ({"collective": "all_to_allv"}, "dispatch by collectives"),
        ({"collective": "_reduce_scatter_base"}, "sharding"),
        ({"collective": "recv"}, "pipeline"),
        ({"name": "ncclDevKernel_AllReduce_Sum_f32"}, "sharding"),
        ({"name": "ncclDevKernel_SendRecv"}, "other collectives"),
    ],
)
def test_whose_a_collective_is(kernel: dict[str, str], part: str) -> None:
    assert classify_kernel(Kernel(**{"name": "ncclKernel", "start": 0, "end": 1} | kernel)) == part


@pytest.mark.usefixtures("no_group_left")
def test_groups_of_meshes_have_the_names_that_are_looked_for() -> None:
    with fake_world(64):
        meshes = build_meshes(ParallelConfig(pp=2, dp_replicate=2, tp=2, cp=2, ep=4), "cpu")
        found = {
            "dispatch by collectives": [meshes.dispatch_group],
            "pipeline": meshes.pipeline_groups,
            "tensor parallelism": [meshes.dense.get_group("tp")],
            "context parallelism": [meshes.dense.get_group("cp")],
            "sharding": meshes.dense_fsdp.get_all_groups() + meshes.expert_fsdp.get_all_groups(),
        }
        for part, groups in found.items():
            for group in groups:
                kernel = Kernel(name="ncclKernel", start=0, end=1, group=group.group_desc)
                assert classify_kernel(kernel) == part


def test_every_category_has_a_part() -> None:
    for part, kernel in KERNELS.items():
        assert classify_kernel(Kernel(start=0, end=1, **kernel)) == part
    idle = {"allocator", *PARTS["host"]}
    assert {*KERNELS} | idle == {*LIMIT_OF} and {*CATEGORIES, OTHER} - {"nccl"} <= {*LIMIT_OF}


def trace_of(part: str, *, with_graph: bool = False) -> Trace:
    """Half of the time is of a part, and half of attention, for which there is no option."""
    first = Kernel(start=0, end=50, **KERNELS["attention"])
    last = Kernel(start=50, end=100, **KERNELS.get(part, {"name": ""}))
    if part not in KERNELS:  # nothing runs from 50 to 100
        launched = 10.0 if part == "gaps between kernels" else 90.0
        last = Kernel(start=100, end=150, launched=launched, **KERNELS["attention"])
    return Trace(
        kernels=(first, last),
        launches={"cudaGraphLaunch" if with_graph else "cudaLaunchKernel": 2},
        waits=((20.0, 52.0),) if part == "waits of the host" else (),
        allocations=((60.0, 70.0),) if part == "allocator" else (),
        num_steps=1,
    )


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name[:30])
def test_each_option_is_reached_by_its_parts(option: Option) -> None:
    for part in option.shortens:
        report = make_report(trace_of(part))
        (gain,) = (gain for gain in report.gains if gain.option == option.name)
        share = option.max_share * report.parts[part] / report.wall
        assert gain.share == pytest.approx(share) and gain.limit == LIMIT_OF[option.shortens[0]]
    page, _, anchor = option.page.partition("#")
    lines = (DOCS / page).read_text().lower().splitlines()
    titles = (line.lstrip("# ") for line in lines if line[:1] == "#")
    assert not anchor or anchor in {title.replace(" ", "-").replace("'", "") for title in titles}


def test_each_option_stands_once_and_names_parts() -> None:
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)
    assert {part for option in OPTIONS for part in option.shortens} <= {*LIMIT_OF}


def test_an_option_in_use_is_not_named() -> None:
    assert "GraphedForwardBackward" in make_report(trace_of("late launches")).gains[0].option
    after = make_report(trace_of("late launches", with_graph=True)).gains
    assert [gain.option[:14] for gain in after] == ["fewer launches"]


def test_nothing_is_advised_for_parts_that_no_option_shortens() -> None:
    found = make_report(trace_of("routing"))
    assert found.gains == () and found.table().endswith("next: no known option saves 1%")


def of_a_cpu_run(path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        torch.ones(2) + 1
    prof.export_chrome_trace(str(path))


def of_two_gpus(path: Path) -> None:
    events = a_step()
    events.kernel("gemm", 0, 1, launched=0, device=1)
    events.write(path)


# Of a step's last event.
DAMAGES = [{"ts": None}, {"ts": math.nan}, {"dur": math.inf}, {"dur": 10**400}]
DAMAGES += [{"name": 5}, {"name": {"a": 1}}]
# Durations that are lost where they are added to the time.
NO_TIME = [dict(ts=1e17, dur=1e-5), dict(ts=-1e17, dur=1e-300), dict(ts=0.0, dur=1e-320)]


def with_last(make: Callable[[], Events], fields: dict[str, Any]) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        events = make()
        events[-1] |= fields
        return events.write(path)

    return write


def one_kernel() -> Events:
    events = Events()
    events.kernel("gemm", 0, 1, launched=0)
    return events


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "must be a file: it is not there"),
        (lambda path: path.write_text('{"traceEvents": ['), "must be a Chrome trace: it is no who"),
        (lambda path: path.write_bytes(b"\x1f\x8b no"), "must be a Chrome trace: it is no whole"),
        (lambda path: path.write_text("[]"), "must be a Chrome trace: it has no traceEvents; expo"),
        (of_a_cpu_run, "must hold kernels of a GPU that take time, but it has none: run on a GPU"),
        (of_two_gpus, "must hold one GPU, not 2: export a trace on each rank"),
        *((with_last(a_step, damage), "must have a name, finite ts and dur") for damage in DAMAGES),
        (with_last(a_step, {"args": None}), "must be a trace of torch.profiler: an event lacks ts"),
        (lambda path: path.write_text("[" * 100_000), "must be a Chrome trace: it is no whole"),
        (lambda path: path.mkdir(), "must be a trace's file, not a directory: pass the .json or"),
        (os.mkfifo, "must be a file that can be read; export one"),
        *((with_last(one_kernel, time), "must hold kernels of a GPU that") for time in NO_TIME),
    ],
)
def test_what_is_no_trace_is_one_line(write, message, tmp_path, capsys) -> None:
    path = tmp_path / "trace.json"
    write(path)
    assert main(["report", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"moecore: path ({path}) {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_is_unpacked_up_to_a_bound(name, tmp_path, capsys, monkeypatch) -> None:
    path = a_step().write(tmp_path / name)
    monkeypatch.setattr("moecore.planning.report.MAX_BYTES", 1000)
    assert main(["report", str(path)]) == 2
    assert "must have at most 1000 bytes unpacked: trace fewer steps" in capsys.readouterr().err


def test_a_trace_has_a_bound_of_lists(tmp_path, capsys, monkeypatch) -> None:
    """Each takes 25 times its bytes in memory."""
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b'{"x": [' + b"[]," * 200 + b'[]], "traceEvents": []}'))
    monkeypatch.setattr("moecore.planning.report.MAX_CONTAINERS", 200)
    assert main(["report", str(path)]) == 2
    assert "must have at most 200 lists and objects: trace" in capsys.readouterr().err


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    path = a_step().write(tmp_path / "trace.json.gz")
    assert main(["report", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["0.10 ms a step", "bound by compute, most of it experts"]
    assert any(line.split() == ["compute", "0.04", "40.0%"] for line in lines)
    assert lines[-3].startswith("  at most 21.0%: parallelize_moe(dense=DenseOptions(graph=True))")
    assert main(["report", str(path), "--steps", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_steps"] == 2 and found["wall"] == pytest.approx(50 * US)
    assert found["gains"][0]["page"] == "memory.md#graphs-of-parts"
    assert main(["report", str(path), "--steps", "0"]) == 2
    assert "num_steps (0) must be" in capsys.readouterr().err
    assert main(["report", "a" * 5000]) == 2  # which is shown cut
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and len(error) < 500
