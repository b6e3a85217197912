"""Golden records: one JSON file per platform, and how a result is compared with it.

A platform is torch's version and what torch's CPU kernels, oneDNN and MKL choose their code by: the
vector width, the CPU's vendor, family and model, and its vector and matrix instructions. On the
platform of a record, results equal it bit for bit (with the same versions of `Path.packages`).

Elsewhere products add in another order. `Path.bound` then applies to every loss, and four times as
much to every gradient norm; parameters are compared by what they do to the next losses. Measured
with AVX2 in place of AVX512: fp32 losses differ by at most 2.3e-6 and norms by 1.0e-5 (bounds 1e-5
and 4e-5). In half precision by 3e-3 and 2e-2 (bounds 1e-2 and 4e-2), in FP8 by 1.3e-2 and 7e-2
(bounds 4e-2 and 1.6e-1): scores that tie within a rounding of the hidden state send a token to
another expert.

Interpreted kernels multiply in numpy, whose library adds in an order that no key names: two
machines of one key differed by 2.1e-5 in a loss, from the seventh step on. Of transformers' model
two machines of one key, with one version of it, differed by 1.0e-7 in the first loss; which product
adds in another order is not known. `Path.bound` applies to both (`Path.varies`) everywhere.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path as File
from typing import Any

import torch

from tests.golden.paths import PATHS, Path
from tests.golden.runs import Result, worker
from tests.helpers.ranks import run_ranks

FOLDER = File(__file__).parent / "records"
ROOT = FOLDER.parents[2]
PACKAGES = ("torch", "numpy", "transformers", "torchtitan", "triton")
VECTORS = ("avx", "amx", "fma", "f16c", "sve", "asimd", "bf16", "i8mm")
Record = dict[str, Any]


def platform_key() -> str:
    """Name this platform, as the file of its record is named."""
    release = torch.__version__.partition("+")[0]
    build = "cuda" if torch.version.cuda else "cpu"
    width = torch.backends.cpu.get_cpu_capability().replace(" ", "").lower()
    return f"cpu-{platform.machine()}-torch{release}-{build}-{width}-{_cpu()}"


def _cpu() -> str:
    """Vendor, family and model of the CPU, and a digest of its vector instructions."""
    try:
        lines = File("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or "unknown"
    found = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    names = ("vendor_id", "CPU implementer", "cpu family", "CPU part", "model")
    flags = (found.get("flags") or found.get("Features") or "").split()
    vectors = sorted(f for f in flags if f.startswith(VECTORS))
    digest = hashlib.sha256(" ".join(vectors).encode()).hexdigest()[:6]
    return "-".join([found[n].lower() for n in names if n in found] + [digest])


def versions() -> dict[str, str]:
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def why_not(path: Path) -> str:
    """Return why a path cannot run here, or nothing."""
    missing = [name for name in path.packages if not _version(name)]
    if missing:
        return f"{missing[0]} is not installed"
    if path.kind == "torchtitan" and not _version("torchtitan").startswith("0.2"):
        return f"torchtitan {_version('torchtitan')} has another interface than 0.2"
    if path.interpreted and not _version("triton").startswith("3.6"):
        return f"the interpreter of triton {_version('triton')} refuses what 3.6's runs"
    return ""


def run_all(names: Iterable[str], most_steps: int = 20) -> dict[str, Result]:
    """Run these paths: ranks start once per number of them, the interpreted ones beside them."""
    chosen = {name: PATHS[name] for name in names}
    alone = {name: _start_interpreted(name) for name, p in chosen.items() if p.interpreted}
    together = {
        name: replace(p, steps=min(p.steps, most_steps))
        for name, p in chosen.items()
        if not p.interpreted
    }
    found: dict[str, Result] = {}
    try:
        for world in sorted({p.world for p in together.values()}):
            found |= run_ranks(
                world,
                worker,
                {n: p for n, p in together.items() if p.world == world},
                over_gloo=True,  # records have the order in which it sums
            )
        for name, process in alone.items():
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            found[name] = json.loads(out.splitlines()[-1])
    finally:
        for process in alone.values():
            process.kill()
    return {name: found[name] for name in chosen}


def _start_interpreted(name: str) -> subprocess.Popen[str]:
    environ = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "tests.golden.runs", name]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=pipe, stderr=pipe, text=True)


def read(key: str) -> Record | None:
    file = FOLDER / f"{key}.json"
    return json.loads(file.read_text()) if file.exists() else None


def nearest(key: str, name: str) -> tuple[str, Record]:
    """Return a path's record of the platform that has most in common with this one, and its key."""

    def alike(other: str) -> tuple[int, str]:
        pairs = zip(key.split("-"), other.split("-"), strict=False)
        return sum(a == b for a, b in pairs), other

    found = {file.stem: json.loads(file.read_text())["paths"] for file in FOLDER.glob("*.json")}
    best = max((stem for stem, paths in found.items() if name in paths), key=alike)
    return best, found[best][name]


def write(results: dict[str, Result]) -> File:
    """Put results into this platform's record; paths that are not among them stay."""
    key = platform_key()
    paths = (read(key) or {"paths": {}})["paths"]
    for name, result in results.items():
        paths[name] = {"versions": _packages(PATHS[name]), **result}
    file = FOLDER / f"{key}.json"
    ordered = {name: paths[name] for name in PATHS if name in paths}
    file.write_text(json.dumps({"platform": key, "paths": ordered}, indent=1) + "\n")
    return file


def _packages(path: Path) -> dict[str, str]:
    return {name: _version(name) for name in ("torch", *path.packages)}


def differences(name: str, found: Result) -> list[str]:
    """Return what differs from the record of this platform, or is out of bounds of the nearest."""
    key = platform_key()
    best, golden = nearest(key, name)
    path = PATHS[name]
    exact = best == key and golden["versions"] == _packages(path) and not path.varies
    bound = 0.0 if exact else path.bound
    is_whole = len(found["losses"]) >= path.steps
    wrong = []
    for quantity, factor in (("losses", 1), ("norms", 4)):
        pairs = zip(found[quantity], golden[quantity], strict=is_whole)
        for step, (ours, theirs) in enumerate(pairs):
            error = relative_error(ours, theirs)
            if not error <= bound * factor:
                wrong.append(f"{quantity}[{step}] is {ours}, not {theirs}: {error:.1e}")
    if exact and is_whole and found["parameters"] != golden["parameters"]:
        wrong.append(f"parameters are {found['parameters']}, not {golden['parameters']}")
    return wrong


def relative_error(found: str, golden: str) -> float:
    """Return 0 for the same bits only."""
    if found == golden:
        return 0.0
    ours, theirs = float.fromhex(found), float.fromhex(golden)
    return abs(ours - theirs) / abs(theirs)
