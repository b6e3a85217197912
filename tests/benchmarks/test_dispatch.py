"""The benchmark of dispatchers without GPUs: which divisions its sweep tries, what records say."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import bench_dispatch
from benchmarks.dispatch_sweep import divisions

from moecore.kernels.exchange.buffer import ExchangeLayout


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
    tried = divisions(usual)
    assert tried[0] == usual
    assert {t.num_push + t.num_receive for t in tried} == {programs}
    assert {t.num_push * 12 // programs for t in tried} == {4, 5, 6}
    assert {t.num_warps for t in tried} == {16}
    assert len({(t.num_push, t.chunk, t.num_warps) for t in tried}) == len(tried) <= 9
    assert len({t.chunk for t in tried}) >= 2


def test_the_recorded_command_names_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for out in (["--out", "/tmp/x"], ["--out=/tmp/x"]):
        monkeypatch.setattr("sys.argv", ["bench_dispatch.py", "--ep", "8", *out, "--no-layer"])
        found = bench_dispatch._command(Path("/tmp/x"), 8)
        expected = "torchrun --nproc-per-node 8 -m benchmarks.bench_dispatch --ep 8 --no-layer"
        assert found == expected
