"""Records of measurements: one JSON line per row, with the environment.

`benchmarks/results/<day>-<gpu>.jsonl` is appended to and committed, and `report.py` writes the
tables of `benchmarks/results/README.md` from it. All rows of one session have the same date, which
identifies the rows of a run.

A record names the measured commit. A tree with uncommitted changes, or an unknown commit, has no
records: its rows go to the folder in MOECORE_TRIALS instead, which is not committed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gate import ROOT, get_triton_version
from benchmarks.harness import Timing

RESULTS = ROOT / "benchmarks" / "results"
TRIALS = "MOECORE_TRIALS"  # variable: the folder of rows that no commit stands behind


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Place and time of a session; None = absent.

    Attributes:
        gpu: name of the device, "cpu" without one.
        torch, triton, cuda, driver, python: versions.
        commit: of the repository, or MOECORE_COMMIT if it is set, for a host without the
            history. It ends in "-dirty" if files differ; it is "unknown" without git.
        tree: git's object id of `src` on the disk, equal to `git rev-parse COMMIT:src` if the
            record is correct.
        date: UTC, start of the session.
        command: the command line.
    """

    gpu: str
    torch: str
    triton: str | None
    cuda: str | None
    driver: str | None
    python: str
    commit: str
    tree: str
    date: str
    command: str

    @classmethod
    def here(cls) -> Environment:
        """Return the environment of this process."""
        has_gpu = torch.cuda.is_available()
        return cls(
            gpu=torch.cuda.get_device_name() if has_gpu else "cpu",
            torch=torch.__version__,
            triton=get_triton_version(),
            cuda=torch.version.cuda,
            driver=_driver() if has_gpu else None,
            python=platform.python_version(),
            commit=_commit(),
            tree=compute_tree_id(ROOT / "src").hex(),
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            command=shlex.join(["pytest", *sys.argv[1:]]),
        )

    @property
    def file_name(self) -> str:
        """The name of the session's file of records: <day>-<gpu>.jsonl."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        return f"{self.date[:10]}-{slug}.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A measurement; None = not measured.

    Attributes:
        op: "layer_fwd", "layer_fwd_bwd", a kernel's public name, or a ceiling of the machine.
        shape, routing, backend: names.
        ms, p20, p80: median and percentiles.
        repeats: number of timed calls.
        baseline: name of the baseline, measured in the same rounds.
        baseline_ms: median of the baseline.
        ratio: ms / baseline_ms.
        tflops: TFLOP/s.
        gbps: GB/s of the fewest bytes that the op must move.
        fraction: tflops or gbps over the ceiling measured in this session.
        saved_bytes: saved for backward, without parameters (`harness.measure_saved`).
        saved_allocated_bytes: the same by the allocator.
        saved_ratio: saved_bytes over X and FC1's output.
        peak_bytes: most bytes allocated by the call, including weight gradients.
        launches: number of kernels launched by the op.
        syncs: number of times that the host waited.
        host_ms: host time of the op with an idle GPU.
        hottest: load of the hottest expert over the mean.
        bf16_ms: for a row in FP8, median of moecore's bf16 in the same rounds.
        speedup: bf16_ms / ms.
        saved_over_bf16: saved_bytes over those of bf16.
    """

    op: str
    shape: str
    routing: str
    backend: str
    ms: float
    p20: float
    p80: float
    repeats: int
    baseline: str | None = None
    baseline_ms: float | None = None
    ratio: float | None = None
    tflops: float | None = None
    gbps: float | None = None
    fraction: float | None = None
    saved_bytes: int | None = None
    saved_allocated_bytes: int | None = None
    saved_ratio: float | None = None
    peak_bytes: int | None = None
    launches: int | None = None
    syncs: int | None = None
    host_ms: float | None = None
    hottest: float | None = None
    bf16_ms: float | None = None
    speedup: float | None = None
    saved_over_bf16: float | None = None


def make_timing_fields(
    timing: Timing, *, baseline: str | None = None, ms: float | None = None
) -> dict[str, Any]:
    """Return the fields of a row that a timing determines.

    Args:
        timing: of the op.
        baseline: name of the baseline.
        ms: median of the baseline.
    """
    fields = dataclasses.asdict(timing)
    if baseline is not None and ms is not None:
        fields |= {"baseline": baseline, "baseline_ms": ms, "ratio": timing.ms / ms}
    return fields


def describe(row: Row) -> str:
    """Return the row as a line, without fields that were not measured."""
    parts = [
        f"{row.op:<24} {row.shape:<10} {row.routing:<7} {row.backend:<12}",
        f"{row.ms:.4g} ms ({row.p20:.4g}-{row.p80:.4g})",
        row.tflops and f"{row.tflops:.4g} TFLOP/s",
        row.gbps and f"{row.gbps:.4g} GB/s",
        row.fraction and f"{row.fraction:.0%} of ceiling",
        row.ratio and f"x{row.ratio:.3f} of {row.baseline} {row.baseline_ms:.4g} ms",
        row.speedup and f"bf16 {row.bf16_ms:.4g} ms: {row.speedup:.3f} times as fast",
        row.saved_bytes is not None and f"saved {format_bytes(row.saved_bytes)}",
        row.saved_ratio and f"(x{row.saved_ratio:.3f})",
        row.saved_over_bf16 and f"(x{row.saved_over_bf16:.3f} of bf16)",
        _disagrees(row) and f"(allocator: {format_bytes(row.saved_allocated_bytes)})",
        row.peak_bytes is not None and f"peak {format_bytes(row.peak_bytes)}",
        row.launches is not None and f"{row.launches} launches",
        row.syncs is not None and f"{row.syncs} syncs",
        _is_host_bound(row) and f"host {row.host_ms:.3g} ms",
        row.hottest and f"hottest x{row.hottest:.2f}",
    ]
    return " ".join(part for part in parts if part)


def format_bytes(num_bytes: int | None) -> str:
    """Return a number of bytes in GiB, or in MiB below 0.1 GiB."""
    if num_bytes is None:
        return "-"
    unit, power = ("GiB", 30) if num_bytes > 2**30 / 10 else ("MiB", 20)
    return f"{num_bytes / 2**power:.3f} {unit}"


def _is_host_bound(row: Row) -> bool:
    """Return whether the host time of the op is close to its GPU time."""
    return row.host_ms is not None and row.host_ms > 0.8 * row.ms


def _disagrees(row: Row) -> bool:
    """Return whether autograd's and the allocator's saved bytes differ by more than 3%."""
    if row.saved_bytes is None or row.saved_allocated_bytes is None:
        return False
    return abs(row.saved_allocated_bytes - row.saved_bytes) > 0.03 * row.saved_bytes


def to_json(environment: Environment, row: Row) -> str:
    """Return the row as JSON, with floats of six digits, which exceed a clock's precision."""
    fields = dataclasses.asdict(environment) | dataclasses.asdict(row)
    short = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in fields.items()}
    return json.dumps(short)


def is_clean(commit: str) -> bool:
    """Return whether the text names a commit without uncommitted changes."""
    return re.fullmatch(r"[0-9a-f]{7,40}", commit) is not None


def results_path(text: str) -> Path:
    """Return the folder or .jsonl file of an option: the `type` of `--results`.

    Raises:
        argparse.ArgumentTypeError: if a record could not be written after the measurement.
    """
    try:
        return find_destination(Path(text), _commit())
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def find_destination(results: Path, commit: str) -> Path:
    """Return the path for rows of a commit: `results`, or a path in the folder of trials.

    Raises:
        ValueError: if the commit is not clean and no folder of trials is set.
    """
    trials = os.environ.get(TRIALS)
    if is_clean(commit):
        return results
    if trials is None:
        raise ValueError(
            f"commit ({commit}) of a record must be a commit without changes in src and benchmarks:"
            f" commit them first, or set {TRIALS} to a folder for rows of a trial"
        )
    return Path(trials) / results.name if results.suffix else Path(trials)


def find_file(results: Path, environment: Environment) -> Path:
    """Return the file of the session's records, after creating its folder.

    Args:
        results: a .jsonl file, or the folder of the file.
        environment: of the session.

    Raises:
        ValueError: if the commit is not clean and no folder of trials is set.
    """
    results = find_destination(results, environment.commit)
    path = results if results.suffix == ".jsonl" else results / environment.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def append(results: Path, environment: Environment, row: Row) -> None:
    """Append the row to the session's file."""
    with find_file(results, environment).open("a") as file:
        file.write(to_json(environment, row) + "\n")


def append_rows(
    results: Path, module: str, rows: list[dict[str, Any]], *, num_gpus: int = 1
) -> None:
    """Append rows with arbitrary columns, measured by a module with command-line arguments."""
    command = shlex.join(["-m", module, *sys.argv[1:]])
    environment = dataclasses.replace(Environment.here(), command=command)
    if num_gpus > 1:
        environment = dataclasses.replace(environment, gpu=f"{num_gpus} x {environment.gpu}")
    for row in rows:
        append_row(results, environment, row)


def append_row(results: Path, environment: Environment, row: dict[str, Any]) -> None:
    """Append a row with arbitrary columns to the session's file."""
    with find_file(results, environment).open("a") as file:
        file.write(json.dumps(dataclasses.asdict(environment) | row) + "\n")


def load(folder: Path) -> list[dict[str, object]]:
    """Return all records of a folder, oldest first.

    Raises:
        ValueError: for a line that is not a record, which the message names.
    """
    records = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            try:
                record = json.loads(line)
                missing = {"gpu", "date", "op", "shape", "routing", "backend", "ms"} - set(record)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path.name}:{number} must be a JSON record: {error}") from error
            if missing:
                raise ValueError(f"{path.name}:{number} must have the fields {sorted(missing)}")
            records.append(record)
    return sorted(records, key=lambda r: r["date"])


def find_latest(records: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the last record of each (gpu, op, shape, routing, backend), in order of appearance."""
    keys = ("gpu", "op", "shape", "routing", "backend")
    return list({tuple(r[k] for k in keys): r for r in records}.values())


def _commit() -> str:
    """Return the measured commit, with "-dirty" if src or benchmarks have changes."""
    head = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    if head is None or "MOECORE_COMMIT" in os.environ:
        return os.environ.get("MOECORE_COMMIT", "unknown")
    measured = ("src", "benchmarks", ":(exclude)benchmarks/results")
    status = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", *measured)
    return f"{head}-dirty" if status else head


def compute_tree_id(folder: Path) -> bytes:
    """Return git's object id of a folder on the disk, without caches of Python."""

    def object_id(kind: str, content: bytes) -> bytes:
        return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content).digest()

    entries = []
    for path in folder.iterdir():
        if path.is_dir() and path.name != "__pycache__":
            entries.append(
                (path.name + "/", "40000", compute_tree_id(path))
            )  # git sorts folders by "name/"
        elif path.is_file():
            mode = "100755" if os.access(path, os.X_OK) else "100644"
            entries.append((path.name, mode, object_id("blob", path.read_bytes())))
    lines = (f"{mode} {name.rstrip('/')}\0".encode() + sha for name, mode, sha in sorted(entries))
    return object_id("tree", b"".join(lines))


def _driver() -> str | None:
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0] if found else None


def _output(*command: str) -> str | None:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None
