from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import bench_dispatch
from benchmarks.dispatch_sweep import list_divisions

from moecore import MoEConfig, MoELayer, ParallelConfig, build_meshes
from moecore.kernels.exchange.buffer import ExchangeLayout
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.placement import ExpertPlacement
from tests.helpers.ranks import run_ranks


@pytest.mark.parametrize("programs", [24, 132])
def test_a_sweep_tries_each_division_once_and_the_usual_one_first(programs: int) -> None:
    usual = ExchangeLayout(
        num_ranks=8,
        max_tokens=4096,
        row_bytes=7168 * 2,
        top_k=8,
        num_push=programs // 2,
        num_receive=programs // 2,
    )
    tried = list_divisions(usual)
    assert tried[0] == usual and {t.num_push + t.num_receive for t in tried} == {programs}
    assert {t.num_push * 12 // programs for t in tried} == {4, 5, 6}
    assert {t.num_warps for t in tried} == {16}
    assert len({(t.num_push, t.chunk, t.num_warps) for t in tried}) == len(tried) <= 9
    assert len({t.chunk for t in tried}) >= 2


def test_the_recorded_command_names_no_folder(monkeypatch: Any) -> None:
    for out in (["--out", "/tmp/x"], ["--out=/tmp/x"]):
        monkeypatch.setattr("sys.argv", ["bench_dispatch.py", "--ep", "8", *out, "--no-layer"])
        found = bench_dispatch._format_command(Path("/tmp/x"), 8)
        expected = "torchrun --nproc-per-node 8 -m benchmarks.bench_dispatch --ep 8 --no-layer"
        assert found == expected


def test_experts_alone_get_gradients_of_what_came_in_fp8() -> None:
    run_ranks(2, experts_of_fp8_rows)


def experts_of_fp8_rows(rank: int, device: torch.device) -> None:
    meshes = build_meshes(ParallelConfig(ep=2), device.type)
    layer = MoELayer(MoEConfig(dim=128, hidden_dim=32, num_experts=4, top_k=2))
    layer.get_part("experts").shard_parameters(meshes.expert["ep", "etp"])
    assert meshes.dispatch_group is not None
    place = ExpertPlacement(group=meshes.dispatch_group, num_experts=4, ep=2, etp=1)
    dispatcher = AllToAllDispatcher(place, fp8=True)
    bench_dispatch.make_experts_call(layer, dispatcher, torch.randn(16, 128))()
    assert all(p.grad is not None for p in layer.get_part("experts").parameters())
