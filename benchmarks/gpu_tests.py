"""Runs the GPU tests of folders or files, and records the outcome of each file.

    python -m benchmarks.gpu_tests --results benchmarks/results/tests tests/train tests/moe

At most four files run at a time, because a file may fill 30 GB of GPU memory. A row counts the
tests of a file that passed, failed and were skipped. It also names the tests that failed.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.gate import ROOT
from benchmarks.records import append_rows, results_path

WORKERS = 4
Row = dict[str, Any]


def main() -> int:
    """Run the tests, print and record a row per file, and return pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tests", nargs="+", help="folders, files or tests of pytest")
    parser.add_argument("--results", type=results_path, help="folder of the record")
    parser.add_argument("--seconds", type=int, help="end the run after this time, with its record")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
        command += ["-n", str(WORKERS), "--dist", "loadfile", f"--junitxml={report}", *args.tests]
        code = _run(command, args.seconds)
        rows = count_outcomes(report.read_text())
    for row in rows:
        print(row["file"], *(f"{row[name]} {name}" for name in ("passed", "failed", "skipped")))
    if args.results is not None:
        append_rows(args.results, "benchmarks.gpu_tests", rows)
    return code


def _run(command: list[str], seconds: int | None) -> int:
    """Run pytest; return its exit status. An interrupted run reports the tests that have ended."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest then writes its report
        return process.wait()


def count_outcomes(report: str) -> list[Row]:
    """Return a row for each file in a JUnit report of pytest."""
    files: dict[str, Row] = defaultdict(
        lambda: {
            "op": "tests",
            "passed": 0,
            "failed": 0,
            "skipped": 0,
            "failures": [],
            "seconds": 0,
        }
    )
    for case in ElementTree.fromstring(report).iter("testcase"):
        if not case.get("classname"):  # a test that an interrupted run had begun
            continue
        row = files[case.get("classname", "").replace(".", "/") + ".py"]
        row["seconds"] = round(row["seconds"] + float(case.get("time", 0)), 1)
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            row["failed"] += 1
            row["failures"].append(case.get("name"))
        else:
            row["skipped" if "skipped" in kinds else "passed"] += 1
    return [{"file": file, **row} for file, row in sorted(files.items())]


if __name__ == "__main__":
    sys.exit(main())
