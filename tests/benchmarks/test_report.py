import argparse
import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from benchmarks import records, report
from benchmarks.gate import ROOT
from benchmarks.harness import Timing
from benchmarks.records import Environment, Row

HERE = Environment(
    gpu="NVIDIA H200",
    torch="2.11.0",
    triton="3.6.0",
    cuda="13.0",
    driver="580",
    python="3.12",
    commit="abcdef0",
    tree="0" * 40,
    date="2026-01-01T00:00:00Z",
    command="pytest benchmarks",
)
TIMING = Timing(ms=12.0, p20=11.5, p80=13.25, repeats=20, host_ms=1.0)


def layer_row(routing: str = "learned", backend: str = "triton", **fields: Any) -> dict[str, Any]:
    """A record of `layer_fwd_bwd` at qwen3-30b."""
    date = fields.pop("date", HERE.date)
    timing = records.make_timing_fields(TIMING, baseline="six grouped_mm", ms=10.0)
    timing |= dict(op="layer_fwd_bwd", shape="qwen3-30b", tflops=800.0, saved_bytes=2**30)
    row = Row(routing=routing, backend=backend, **(timing | fields))
    return json.loads(records.to_json(HERE, row)) | {"date": date}


def test_the_committed_page_is_that_of_the_committed_records() -> None:
    found = records.load(records.RESULTS)
    message = "benchmarks/results/README.md is stale: run make bench-docs"
    assert report.PAGE.read_text() == report.make_page(found), message
    if any(r["op"] == "layer_fwd_bwd" and r["routing"] == "learned" for r in found):
        assert report.compute_plot_digest(found).encode() in report.PLOT.read_bytes(), message
    else:
        assert not report.PLOT.exists()


def test_a_hand_made_record_gives_the_right_row() -> None:
    forward = layer_row(op="layer_fwd", ms=4.0, ratio=1.1, launches=9)
    page = report.make_page([forward, layer_row(peak_bytes=3 * 2**29, syncs=0, saved_ratio=1.02)])
    cells = "| qwen3-30b | learned | triton | 4.00 | 1.100 | 12.00 (11.50-13.25) | 1.200 | 10.00 "
    assert cells + "| 800 | 1.00 | 1.020 | 1.50 | 9 | 0 |\n" in page
    assert "- 2026-01-01T00:00:00Z, commit abcdef0, torch 2.11.0, triton 3.6.0" in page


def test_the_last_record_wins_and_the_forward_must_be_of_its_run() -> None:
    old = [layer_row(op="layer_fwd", ms=4.0), layer_row(ms=12.0)]
    page = report.make_page([*old, layer_row(ms=9.0, date="2026-01-02T00:00:00Z")])
    assert "| triton | - | - | 9.00 (" in page and "12.00" not in page
    page = report.make_page([*old, layer_row(ms=9.0, backend="torch")])
    assert "12.00" in page and "9.00" in page


def test_skew_compares_rows_of_one_run() -> None:
    even, skewed = layer_row("even", ms=10.0), layer_row("skewed", ms=11.0, hottest=4.98)
    assert "| qwen3-30b | triton | - | 4.98 | - | 1.100 | 1.000 |" in report.make_page(
        [even, skewed]
    )
    later = skewed | {"date": "2026-01-02T00:00:00Z"}
    assert "| qwen3-30b | triton | - | - | - | - | - |" in report.make_page([even, later])


def test_fp8_stands_beside_bf16_of_its_rounds() -> None:
    fields = dict(ms=10.0, bf16_ms=14.0, speedup=1.4, saved_over_bf16=0.93, syncs=0)
    rows = [layer_row(), layer_row(backend="blockwise", **fields)]
    rows.append(layer_row(backend="te-blockwise", ms=25.0))
    page = report.make_page(rows)
    cells = "| qwen3-30b | learned | blockwise | 10.00 (11.50-13.25) | 14.00 | 1.400 | 1.000 | 800 "
    assert cells + "| 1.00 | 0.930 | - | - | 0 |\n" in page
    assert "| te-blockwise | 25.00 (11.50-13.25) | - | - | 2.500 |" in page
    whole = page.partition("### Whole layer in FP8")[0]
    assert "| triton |" in whole and "blockwise |" not in whole
    assert report.compute_plot_digest(rows) == report.compute_plot_digest(rows[:1]), (
        "the plot is of bf16"
    )


def test_kernels_show_bandwidth_and_speedup() -> None:
    row = layer_row(op="gather_rows", ms=0.5, baseline_ms=1.0, gbps=3900.0, fraction=0.91)
    page = report.make_page([row | {"tflops": None, "launches": 1}])
    assert "| gather_rows | qwen3-30b | 500 | 3900 | - | 91% | 1000 | 2.000 | 1 |" in page


def test_moves_between_ranks_have_a_table_of_their_own() -> None:
    fields = dict(shape="dsv3-ep8", ms=0.8, p20=0.75, p80=0.85, baseline="nccl", baseline_ms=1.6)
    fields |= dict(ratio=0.5, gbps=340.0, tflops=None, saved_bytes=None, syncs=0)
    page = report.make_page([layer_row("even", "nvlink", op="dispatch", **fields)])
    row = "| dsv3-ep8 | even | dispatch | nvlink | 0.800 (0.750-0.850) | 340 | - | nccl | 1.600 "
    assert row + "| 0.500 | - | - | 0 |\n" in page
    assert "### Kernels" not in page and "### Whole layer" not in page
    page = report.make_page([layer_row(backend="nvlink", op="ep_layer_fwd_bwd", shape="dsv3-ep8")])
    assert "| dsv3-ep8 | learned | ep_layer_fwd_bwd | nvlink | 12.000 (" in page
    assert "### Kernels" not in page and "### Whole layer" not in page


def test_plot_and_its_digest(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    rows = [layer_row(), layer_row(backend="torch", ratio=2.0)]
    report.draw(rows, path)
    assert report.compute_plot_digest(rows).encode() in path.read_bytes()
    assert report.compute_plot_digest(rows) != report.compute_plot_digest(rows[:1])
    report.draw([layer_row("even")], path)
    assert not path.exists(), "nothing to draw leaves no stale plot"


def test_lines_are_appended_and_read_back_oldest_first(tmp_path: Path) -> None:
    fields = dataclasses.asdict(TIMING) | {"ms": 1.23456789}
    row = Row(op="route", shape="tiny", routing="learned", backend="triton", **fields)
    for _ in range(2):
        records.append(tmp_path, HERE, row)
    (path,) = tmp_path.iterdir()
    assert path.name == "2026-01-01-nvidia-h200.jsonl"
    (tmp_path / "a.jsonl").write_text(json.dumps(layer_row(date="2027-01-01T00:00:00Z")) + "\n")
    found = records.load(tmp_path)
    assert [r["op"] for r in found] == ["route", "route", "layer_fwd_bwd"]
    assert found[0]["ms"] == 1.23457
    issue = "gpu torch commit date op shape routing ms baseline_ms ratio saved_bytes peak_bytes"
    assert set(issue.split()) <= set(found[0])


def test_a_tree_with_changes_has_no_records(tmp_path: Path, monkeypatch: Any) -> None:
    row = Row(op="route", shape="tiny", routing="even", backend="x", **dataclasses.asdict(TIMING))
    for commit in ("abcdef0-dirty", "unknown"):
        here = dataclasses.replace(HERE, commit=commit)
        monkeypatch.setenv("MOECORE_COMMIT", commit)
        with pytest.raises(argparse.ArgumentTypeError, match=f"commit .{commit}. of a record"):
            records.results_path(str(tmp_path))
        with pytest.raises(ValueError, match=f"commit .{commit}. of a record must be"):
            records.append(tmp_path / "results", here, row)
    assert not any(tmp_path.iterdir())
    monkeypatch.setenv("MOECORE_TRIALS", str(tmp_path / "trials"))
    records.append(tmp_path / "results", here, row)
    assert [p.name for p in tmp_path.iterdir()] == ["trials"]


def test_a_record_names_the_tree_that_was_measured(tmp_path: Path) -> None:
    for name in ("a.py", "a/b.py", "a.b/c.sh", "a/__pycache__/d.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a.b/c.sh").chmod(0o755)
    found = records.compute_tree_id(tmp_path).hex()
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "a.py", "a/b.py", "a.b/c.sh")
    assert found == _git(tmp_path, "write-tree")


def test_committed_records_are_of_clean_commits() -> None:
    """Records before this rule had "-dirty" commits, and no tree."""
    for path in records.RESULTS.rglob("*.jsonl"):
        for row in map(json.loads, path.read_text().splitlines()):
            if "tree" in row:
                assert records.is_clean(row["commit"]), (path, row["date"])
                committed = _git(ROOT, "rev-parse", "--verify", "-q", row["commit"] + ":src")
                assert committed in ("", row["tree"]), (path, row["date"])
            else:
                assert row["date"] < "2026-11-29", path


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", folder, *words], capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.parametrize(("line", "message"), [("{", "must be a JSON"), ("{}", "must have the f")])
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps(layer_row()) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=f"x.jsonl:2 {message}"):
        records.load(tmp_path)


def test_a_terminal_line_says_where_hooks_and_allocator_disagree() -> None:
    fields = dict(op="layer_fwd", shape="tiny", routing="even", backend="torch", syncs=0)
    timing = records.make_timing_fields(TIMING, baseline="two grouped_mm", ms=10.0)
    row = Row(**fields, **timing, saved_bytes=2**30, saved_allocated_bytes=2**30 + 2**22)
    line = records.describe(row)
    assert "12 ms (11.5-13.25) x1.200 of two grouped_mm 10 ms saved 1.000 GiB 0 syncs" in line
    row = Row(**fields, **timing, saved_bytes=2**30, saved_allocated_bytes=2**31)
    assert "saved 1.000 GiB (allocator: 2.000 GiB)" in records.describe(row)
