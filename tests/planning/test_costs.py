import gzip
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from benchmarks.make_cost_table import TABLE, make_table
from benchmarks.records import RESULTS
from torch import Tensor
from torch.nn.functional import grouped_mm

from moecore.cli import main
from moecore.models import preset
from moecore.planning import CostTable, TrainingRun, dry_run, fake_world, measure
from moecore.planning.costs import KINDS, Point
from moecore.planning.gpus import GPUS
from moecore.planning.record import Work

H200 = CostTable.of("h200-141")
TINY = measure.Sizes(
    products=((8, 16, 32),),
    grouped=((2, 32, 16, 16),),
    attention=((1, 2, 16, 8, 8),),
    num_bytes=1 << 16,
)
CPU = torch.device("cpu")


def product(M: int, N: int, K: int, dtype: str = "bfloat16") -> Work:
    moved = 2 * (M * K + K * N + M * N)
    return Work("aten.mm", "product", 2 * M * N * K, moved, (M, N, K), dtype)


def grouped(E: int, R: int, N: int, K: int, name: str = "sm90_bf16_grouped_kernel") -> Work:
    shape, moved = (E, R, N, K), 2 * (R * (N + K) + E * N * K)
    return Work(name, "grouped product", 2 * R * N * K, moved, shape, "bfloat16")


def attention(T: int, name: str = "aten._scaled_dot_product_cudnn_attention", B: int = 1) -> Work:
    H, d = 32, 128
    flops = 2 * B * H * T * T * d * (2.5 if "backward" in name else 1)
    return Work(name, "attention", int(flops), 8 * B * T * H * d, (B, H, T, d, d), "bfloat16")


def rows(num_bytes: int, name: str = "aten.add") -> Work:
    return Work(name, "rows", 0, num_bytes, (), "bfloat16")


def collective(ranks: int, num_bytes: int, name: str = "c10d._allgather_base_") -> Work:
    return Work(name, "collective", 0, num_bytes, (ranks,), "bfloat16")


SIZES: dict[str, tuple[Callable[[int], Work], int]] = {
    "products, rows": (lambda i: product(2**i, 4096, 2048), 19),
    "products, columns": (lambda i: product(4096, 2**i, 2048), 19),
    "products, sums": (lambda i: product(4096, 4096, 2**i), 16),
    "grouped, rows": (lambda i: grouped(64, 2**i, 3072, 4096), 20),
    "grouped, fp8": (
        lambda i: replace(grouped(16, 2**i, 2048, 768, "sm90_fp8_x"), dtype="float8_e4m3fn"), 20),
    "grouped, columns": (lambda i: grouped(64, 65536, 2**i, 2048), 15),
    "attention": (lambda i: attention(2**i), 20),
    "attention, backward": (
        lambda i: attention(2**i, "aten._scaled_dot_product_cudnn_attention_backward"), 20),
    "attention, rows": (lambda i: attention(2048, "attention", 2**i), 10),
    "rows": (lambda i: rows(2**i), 36),
    "all-gathers": (lambda i: collective(4, 2**i), 36),
    "all-to-alls": (lambda i: collective(8, 2**i, "c10d.alltoall_base_"), 36),
    "between nodes": (lambda i: collective(64, 2**i, "c10d.alltoall_base_"), 36),
    "host": (lambda i: Work("copy to device", "copy", 0, 2**i, (), "bfloat16"), 36),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "gpu"),
    [(name, gpu) for name in SIZES for gpu in GPUS if GPUS[gpu].fp8_flops or "fp8" not in name],
)
def test_more_takes_longer(name: str, gpu: str) -> None:
    make, most = SIZES[name]
    seconds = [CostTable.of(gpu).seconds(make(i)) for i in range(most)]
    assert seconds == sorted(seconds) and 0 < seconds[0] < seconds[-1] < 1000


def test_what_was_measured_takes_what_it_took() -> None:
    assert len(H200.points) > 150 and {p.work.kind for p in H200.points} == set(KINDS)
    for point in H200.points:
        assert H200.seconds(point.work) == pytest.approx(point.seconds, rel=1e-6), point
        assert point.commit and point.date.startswith("2026-11-2")


def test_the_shipped_table_is_made_of_the_records() -> None:
    assert make_table().text() == TABLE.read_text()


TRACED = {  # part of a kernel's name: our name, N and K of its products; None = attention
    "cooperative_kernel": ("sm90_bf16_grouped_kernel", ((1536, 2048), (2048, 768), (2048, 1536))),
    "pingpong_kernel": ("sm90_bf16_grouped_nn_act_bwd_kernel", ((768, 2048),)),
    "grouped_wgrad_kernel": ("sm90_bf16_grouped_wgrad_kernel", ((1536, 2048), (2048, 768))),
    "flash_fprop": ("aten._scaled_dot_product_cudnn_attention", None),
    "flash_bprop": ("aten._scaled_dot_product_cudnn_attention_backward", None),
}


def test_kernels_of_a_traced_step() -> None:
    """A step of Qwen3-30B on 4 GPUs, of another kernel size than any that the table is made of."""
    lines = (RESULTS / "train" / "2026-11-21-nvidia-h200.jsonl").read_text().splitlines()
    steps = [r for r in map(json.loads, lines) if r["num_gpus"] == 4 and r["grad_accum"] == 1]
    traced = [r for r in steps if "cooperative_kernel" in str(r.get("longest"))]
    (step,) = (r for r in traced if not r["overlap"])
    R = step["batch_size"] * step["seq_len"] * 8
    for part, (name, products) in TRACED.items():
        (ms,) = (ms for kernel, ms, _ in step["longest"] if part in kernel)
        works = [attention(step["seq_len"], name, step["batch_size"])]
        if products:
            works = [grouped(128 // step["ep"], R, N, K, name) for N, K in products]
        expected = step["layers"] * sum(map(H200.seconds, works)) * 1e3
        assert expected == pytest.approx(ms, rel=0.07), part
    head = H200.seconds(product(2048, 151936, 2048))  # of such a step
    assert head == pytest.approx(1.78e-3, rel=0.05)
    assert H200.seconds(rows(0)) == H200.launch_seconds < 10e-6


def test_names() -> None:
    def of(name: str, num_bytes: int = 2**30) -> float:
        return H200.seconds(rows(num_bytes, name))

    assert of("_sum_rows_fwd_kernel") == of("moecore.sum_rows") < of("aten.copy_") == of("unknown")
    assert of("moecore::router_logits_bwd") > of("_router_logits_fwd") > of("_sum_rows_fwd_kernel")
    backward = H200.seconds(attention(4096, "my_attention_backward"))
    assert backward > 2.5 * H200.seconds(attention(4096, "my_attention"))
    flash = H200.seconds(attention(4096, "aten._flash_attention_forward"))
    assert flash > 1.5 * H200.seconds(attention(4096))
    unknown, plain = (grouped(8, 4096, 2048, 2048, n) for n in ("unknown", "aten._grouped_mm"))
    assert H200.seconds(unknown) == H200.seconds(plain)


def test_a_kind_without_points_has_its_share_of_the_roofline() -> None:
    bare, work = replace(H200, points=()), product(16384, 4096, 4096)
    peak = GPUS["h200-141"].bf16_flops
    expected = H200.launch_seconds + work.flops / peak / H200.efficiency["product"]
    assert bare.seconds(work) == pytest.approx(expected)


def test_other_gpus_have_their_makers_rates() -> None:
    work, copied = product(8192, 8192, 8192), rows(2**32)
    for gpu, made in GPUS.items():
        table, own = CostTable.of(gpu), GPUS["h200-141"]
        compute, memory = (table.seconds(w) - table.launch_seconds for w in (work, copied))
        here, moved = (H200.seconds(w) - H200.launch_seconds for w in (work, copied))
        assert compute / here == pytest.approx(own.bf16_flops / made.bf16_flops)
        assert memory / moved == pytest.approx(own.memory_bandwidth / made.memory_bandwidth)
        scaled = gpu != "h200-141"
        assert (f"with the maker's rates of {gpu}" in table.source) == scaled
        assert table.with_gpu("h200-141") == H200
    with pytest.raises(ValueError, match=r"^dtype \(float8_e4m3fn\) must be of 16 bits on a100-80"):
        CostTable.of("a100-80").seconds(product(8, 8, 8, "float8_e4m3fn"))


def test_collectives_between_nodes() -> None:
    def seconds(*args: Any, node_ranks: int = 0) -> float:
        return H200.seconds(collective(*args), node_ranks)

    size, name = 2**33, "c10d.alltoall_base_"
    share = GPUS["h200-141"].network * H200.efficiency["network"]
    fixed = H200.launch_seconds + H200.network_seconds
    # Of what 16 ranks send to 15 others 8 / 15 leave the node; a rank per node sends all of it.
    assert seconds(16, size, name) == pytest.approx(fixed + size * 8 / 15 / share)
    assert seconds(4, size, name, node_ranks=1) == pytest.approx(fixed + size / share)
    # What all get, a node takes in and passes on; two cards do it for two ranks.
    assert seconds(4, size, node_ranks=1) == pytest.approx(fixed + size / share)
    assert seconds(64, size, node_ranks=2) == pytest.approx(fixed + size * 62 / 63 / 2 / share)
    assert seconds(8, size) < seconds(16, size) <= seconds(64, size)
    assert seconds(64, size) < seconds(64, size, node_ranks=2)
    assert seconds(2, size, "send", node_ranks=1) == pytest.approx(fixed + size / share)
    assert H200.find_limiting_rate(collective(8, size)) == "nvlink"
    assert H200.find_limiting_rate(collective(64, size, name)) == "network"
    for ranks, most in ((4, 5), (64, 9)):
        with pytest.raises(ValueError, match=rf"^node_ranks \({most}\) must be <= the collective"):
            seconds(ranks, size, node_ranks=most)


def test_walls() -> None:
    works = (product(8192, 8192, 8192), product(4, 65536, 8192), rows(64), rows(2**30))
    assert set(map(H200.find_limiting_rate, works)) == {"compute", "memory", "launch"}
    assert H200.find_limiting_rate(Work("x", "copy", 0, 2**30, (), "bfloat16")) == "pcie"


def test_json_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    for gpu in GPUS:
        table = CostTable.of(gpu)
        table.write(path)
        assert CostTable.read(path) == table
    for text in (b"[]", gzip.compress(b"{}"), b"[" * 100_000):
        path.write_bytes(text)
        message = r"table \(.*table.json'\) must be one of `moecore measure`"
        with pytest.raises(ValueError, match=message):
            CostTable.read(path)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match="must be a file"):
            CostTable.read(other)
    fields = json.loads(TABLE.read_text())
    fields["efficiency"]["rows"] = 2.0
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="efficiency"):
        CostTable.read(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpu": "h201"}, r"CostTable.gpu \('h201'\) must be one of 'a100-80', .* or a Gpu: cho"),
        ({"launch_seconds": 0.0}, r"launch_seconds \(0.0\) must be a finite number > 0"),
        ({"efficiency": {}}, r"efficiency \({}\) must have 'product', .*'network': add a share"),
        (
            {"points": (Point(work=rows(64), seconds=1e-7),)},
            r"points .* must take longer than a launch and move bytes",
        ),
    ],
)
def test_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(H200, **fields)


def test_what_was_measured_goes_before_what_is_shipped() -> None:
    point = Point(work=replace(product(64, 64, 64), name="aten.mm"), seconds=1e-3)
    for gpu in GPUS:
        base = CostTable.of(gpu)
        table = base.extend([point], "here")
        assert table.measured_on == gpu and table.source.startswith("here; what it does not")
        assert table.seconds(point.work) == pytest.approx(1e-3)
        fast = replace(point, seconds=1e-6)  # than a launch of the shipped table
        assert base.extend([fast], "").seconds(fast.work) == pytest.approx(1e-6)
        large = product(8192, 8192, 8192)
        assert table.seconds(large) > 2 * base.seconds(large)
        for work in (rows(2**30), attention(16384), collective(8, 2**28)):
            assert table.seconds(work) == pytest.approx(base.seconds(work))


def test_measures() -> None:
    points = list(measure.measure_calls(measure.list_gpu_calls(CPU, TINY), CPU))
    kinds = [point.work.kind for point in points]
    assert Counter(kinds) == {
        "product": 1, "grouped product": 4, "attention": 2, "rows": 9, "copy": 2,
    }  # fmt: skip
    assert all(point.seconds > 0 and point.date for point in points)
    names = Counter(point.work.name for point in points)
    assert names["aten._grouped_mm"] == 4 and max(names.values()) == 4


def test_measures_the_host() -> None:
    """A step of 5 ms takes 5 ms over what it queues for each piece of work."""
    run = TrainingRun(model=preset("tiny-qwen3"), num_gpus=1, seq_len=32)
    clock = SimpleNamespace(perf_counter=count(0.0, 0.005).__next__)
    with patch.object(measure, "time", clock):
        seconds = measure.measure_host_seconds_per_launch(run, CPU)
    assert seconds == pytest.approx(0.005 / len(dry_run(run).queued), rel=1e-5)


def test_measures_kernels_of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they run nothing is measured here: what they are given, and its shape."""
    seen = []

    def gemm(a_RK: Tensor, b_eKN: Tensor, tiles: object) -> Tensor:
        seen.append((b_eKN.shape[2], b_eKN.shape[1]))
        return grouped_mm(a_RK, b_eKN, offs=tiles)  # type: ignore[arg-type]

    def activation(x: Tensor, w1: Tensor, tiles: object, weights: Tensor, _: object) -> None:
        assert weights.shape == x.shape[:1] and weights.dtype == torch.float32
        gemm(x, w1.transpose(1, 2), tiles)

    def activation_bwd(dy: Tensor, w2: Tensor, tiles: object, h: Tensor, *_: object) -> None:
        da = gemm(dy, w2, tiles)
        assert h.shape == (da.shape[0], 2 * da.shape[1])

    fakes = dict(
        has_hopper_kernels=lambda device: True,
        cooperative=SimpleNamespace(cooperative_gemm=gemm, cooperative_activation=activation),
        pingpong=SimpleNamespace(pingpong_activation_bwd=activation_bwd),
        row_tiles=SimpleNamespace(map_row_tiles=lambda ends, R: ends),
    )
    for name, fake in fakes.items():
        monkeypatch.setattr(measure, name, fake)
    ran = {}
    for work, call in measure.list_gpu_calls(CPU, TINY._replace(grouped=((2, 32, 16, 24),))):
        seen.clear()
        result = call()
        if work.kind == "grouped product":
            assert work.num_bytes and work.flops == 2 * math.prod(work.shape[1:])
            shape = seen[0] if seen else tuple(result.shape[-2:])
            ran[work.name, work.shape[2:]] = shape
    assert len(ran) == 12
    for (name, sizes), shape in ran.items():
        if name != "aten._grouped_mm":
            assert shape == sizes, name


def test_measures_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(4, rank=1):
        points = {}
        for work, call in measure.list_collective_calls(CPU, 1 << 20):
            call()
            points.setdefault(work.name, []).append(work)
        with pytest.raises(ValueError, match=r"^ranks \(4\) must be 2 to 8 of one node"):
            monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
            next(measure.list_collective_calls(CPU, 1 << 20))
    assert list(points) == ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
    assert [w.num_bytes for w in points["all_gather"]] == [
        2 * 3 * (2**20 >> shift) // 4 for shift in (10, 6, 2, 0)
    ]
    assert points["all_reduce"][-1].num_bytes == 2 * points["all_gather"][-1].num_bytes
    assert points["send"][-1].num_bytes == 2 * 2**20


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["measure", "--out", str(tmp_path / "t.json")]) == 1
    assert capsys.readouterr().err == (
        "moecore: device (cpu) must be a GPU: run `moecore measure` where torch sees one\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    assert main(["measure", "--out", str(path)]) == 0
    table = CostTable.read(path)
    for point in table.points:
        assert table.seconds(point.work) == pytest.approx(point.seconds, rel=1e-6)
    own = CostTable.of(table.gpu)
    for work in (product(16384, 4096, 4096), attention(16384), rows(2**30)):
        assert 0.5 < table.seconds(work) / own.seconds(work) < 2
