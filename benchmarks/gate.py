"""Runs the test files of an op; a benchmark reports only if they pass.

All files that a session needs run once, before its first benchmark, in separate processes, so that
a crash does not end a benchmark. Passing files are cached under a key of everything that the
outcome depends on (sources and tests, torch, Triton, GPU); failing ones run again each time.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 570
GPU_PROCESSES = 6  # each may fill 20 GB


class Cache(Protocol):
    """The interface of pytest's cache that the gate uses."""

    def get(self, key: str, default: object) -> object:
        """Return the stored value, or the default."""

    def set(self, key: str, value: object) -> None:
        """Store a JSON value."""


class Gate:
    """Outcomes of test files in this environment.

    Args:
        root: the repository.
        cache: stores passing files between sessions; None = no storage.
        gpu: run only the tests marked `gpu`; else the tests for the CPU.
    """

    def __init__(self, root: Path, cache: Cache | None, *, gpu: bool) -> None:
        self.root, self.cache, self.gpu = root, cache, gpu
        self.key = f"moecore/green-{compute_key(root)}"
        green: Any = cache.get(self.key, []) if cache else []
        self.failures: dict[str, str | None] = dict.fromkeys(green)  # None = green

    def run(self, files: Iterable[str]) -> None:
        """Run the test files whose outcome is unknown."""
        unknown = [f for f in dict.fromkeys(files) if f not in self.failures]
        for file in [f for f in unknown if not (self.root / f).is_file()]:
            self.failures[file] = f"{file} does not exist, and an op without tests has no numbers"
            unknown.remove(file)
        groups = [[file] for file in unknown] if self.gpu else [unknown]
        with ThreadPoolExecutor(GPU_PROCESSES) as pool:
            for found in pool.map(self._run_files, filter(None, groups)):
                self.failures.update(found)
        if self.cache and unknown:
            green = [f for f, failure in self.failures.items() if failure is None]
            self.cache.set(self.key, sorted(green))

    def find_failure(self, files: Sequence[str]) -> str | None:
        """Return why a benchmark of these files must not report, or None if all pass."""
        self.run(files)
        failed = [self.failures[f] for f in files if self.failures[f]]
        return f"no numbers while tests are not green: {failed[0]}" if failed else None

    def _run_files(self, files: Sequence[str]) -> dict[str, str | None]:
        """Run pytest on the files; return the first failure of each file, or None."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "--tb=line",
                *files,
                f"--junitxml={report}",
            ]
            command += ["-m", "gpu" if self.gpu else "not gpu and not slow"]
            command += ["--continue-on-collection-errors"]  # one broken file leaves the others
            command += ["-p", "no:cacheprovider"]  # the session that waits writes its own
            env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
            if not self.gpu:  # on a busy host, threads of tiny tests mostly wait for each other
                env["OMP_NUM_THREADS"] = "1"
            try:
                run = subprocess.run(
                    command,
                    cwd=self.root,
                    env=env,
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_S,
                )
            except subprocess.TimeoutExpired:
                return dict.fromkeys(files, f"the tests took more than {TIMEOUT_S} s")
            if not report.is_file():
                last = (run.stdout + run.stderr).strip().splitlines()[-1:] or ["no output"]
                return dict.fromkeys(files, f"pytest ended with {run.returncode}: {last[0]}")
            return read_report(report.read_text(), files)


def read_report(text: str, files: Sequence[str]) -> dict[str, str | None]:
    """Return the first failure of each file; None if a test passed and none failed.

    Args:
        text: a JUnit report of pytest, which names a file by its module ("tests.moe.test_x").
        files: paths from the root of the repository.
    """
    found: dict[str, str | None] = {f: f"no test in {f} ran here" for f in files}
    failed: set[str] = set()
    by_module = {f.removesuffix(".py").replace("/", "."): f for f in files}
    for case in ElementTree.fromstring(text).iter("testcase"):
        name = ".".join(filter(None, (case.get("classname"), case.get("name"))))
        file = next(
            (f for m, f in by_module.items() if name == m or name.startswith(m + ".")), None
        )
        if file is None or file in failed:
            continue
        problem = next(
            (p for p in (case.find("failure"), case.find("error")) if p is not None), None
        )
        if problem is not None:
            failed.add(file)
            found[file] = f"{file}::{case.get('name')} ({_describe_problem(problem)})"
        elif case.find("skipped") is None:
            found[file] = None
    return found


def _describe_problem(problem: ElementTree.Element) -> str:
    """Return the first line of the message; for a file that cannot be imported, the last line."""
    lines = (problem.get("message") or "").strip().splitlines()
    if lines == ["collection failure"]:
        lines = (problem.text or "").strip().splitlines()[-1:]
    return lines[0].strip() if lines else "no message"


def compute_key(root: Path) -> str:
    """Return a hash of sources, tests, versions and GPU, on which outcomes depend."""
    digest = hashlib.sha256()
    for path in sorted([*(root / "src").rglob("*.py"), *(root / "tests").rglob("*.py")]):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    digest.update(
        f"{torch.__version__} {get_triton_version()} {gpu} {sys.version_info[:2]}".encode()
    )
    return digest.hexdigest()[:16]


def get_triton_version() -> str | None:
    """Return the version of Triton, or None if it is not installed."""
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__
