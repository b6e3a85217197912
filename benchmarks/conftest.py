"""Selection of benchmarks, destination of rows, and the check that tests pass.

On a GPU: all shapes, rows appended to benchmarks/results. Without one: the tiny shape, as a smoke
test whose rows go to a temporary folder; the tests of its ops are left to `make test`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import harness, records
from benchmarks.gate import ROOT, Gate
from benchmarks.records import Environment, Row
from benchmarks.session import Ceilings, Session
from benchmarks.shapes import CPU_SHAPES, GPU_SHAPES, ROUTINGS, SHAPES

CEILING_BYTES = {"cuda": 2 << 30, "cpu": 8 << 20}
CEILING_SIDE = {"cuda": 8192, "cpu": 256}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `pytest benchmarks`."""
    group = parser.getgroup("benchmarks")
    add = group.addoption
    add("--shape", action="append", default=[], help="only this shape (may be repeated)")
    add("--routing", action="append", default=[], help="only this routing (may be repeated)")
    add("--backend", action="append", default=[], help="only this backend (may be repeated)")
    add("--quick", action="store_true", help="fewer repeats")
    add("--results", help="folder or .jsonl file of records (or the variable MOECORE_RESULTS)")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `proven_by`."""
    config.addinivalue_line("markers", "proven_by(*files): tests that must be green to report")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise by shape and routing, shapes outermost; a file may set its own ROUTINGS."""
    default = GPU_SHAPES if torch.cuda.is_available() else CPU_SHAPES
    if "shape" in metafunc.fixturenames:
        names = _chosen(metafunc.config, "shape", SHAPES) or [shape.name for shape in default]
        metafunc.parametrize("shape", [SHAPES[name] for name in names], ids=names)
    if "routing" in metafunc.fixturenames:
        chosen = _chosen(metafunc.config, "routing", ROUTINGS)
        here = getattr(metafunc.module, "ROUTINGS", ROUTINGS)
        metafunc.parametrize("routing", [r for r in here if not chosen or r in chosen])


def _chosen(config: pytest.Config, option: str, known: Iterable[str]) -> list[str]:
    """Return the values of an option; raise UsageError for an unknown value."""
    chosen = config.getoption(f"--{option}")
    for name in set(chosen) - set(known):
        raise pytest.UsageError(f"--{option} ({name}) must be one of {', '.join(known)}")
    return chosen


@pytest.fixture(scope="session")
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """Return the session that all benchmarks share."""
    config = request.config
    has_gpu = torch.cuda.is_available()
    folder = config.getoption("--results") or os.environ.get("MOECORE_RESULTS")
    default = records.RESULTS if has_gpu else tmp_path_factory.mktemp("results")
    measured = harness.QUICK if config.getoption("--quick") else harness.FULL
    made = Session(
        device=torch.device("cuda" if has_gpu else "cpu"),
        effort=measured if has_gpu else harness.SMOKE,
        environment=Environment.here(),
        folder=Path(folder) if folder else default,
        saves_rows=has_gpu or bool(folder),
        backends=tuple(config.getoption("--backend")),
        config=config,
    )
    if not made.saves_rows:
        os.environ.setdefault(records.TRIALS, str(made.folder))
    if not has_gpu:  # a smoke test: on a busy host, threads mostly wait for each other
        torch.set_num_threads(1)
    made.print(f"records: {records.find_file(made.folder, made.environment)}")
    return made


@pytest.fixture(scope="session")
def gate(request: pytest.FixtureRequest, session: Session) -> Gate | None:
    """Return the gate, after running the tests of all selected benchmarks.

    None for a smoke test, whose rows are not kept.
    """
    if not session.saves_rows:
        return None
    made = Gate(ROOT, getattr(request.config, "cache", None), gpu=session.device.type == "cuda")
    marks = [item.get_closest_marker("proven_by") for item in request.session.items]
    files = {file for mark in marks if mark for file in mark.args}
    unknown = sorted(files - set(made.failures))
    if unknown:
        session.print(f"running their tests first: {', '.join(unknown)}")
    made.run(unknown)
    return made


@pytest.fixture(autouse=True)
def only_with_green_tests(request: pytest.FixtureRequest, gate: Gate | None) -> None:
    """Fail the benchmark if the tests of its op fail, or if it names none."""
    mark = request.node.get_closest_marker("proven_by")
    if mark is None:
        pytest.fail("a benchmark must say what proves its op: mark it proven_by(test file)")
    missing = [file for file in mark.args if not (ROOT / file).is_file()]
    failure = f"{missing[0]} does not exist" if missing else gate and gate.find_failure(mark.args)
    if failure:
        pytest.fail(failure, pytrace=False)


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """Free the GPU's memory for the next shape."""
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def ceilings(session: Session, gate: Gate | None) -> Ceilings:
    """Measure a large copy (read + written bytes) and a large square bf16 product."""
    device = session.device
    source = torch.randn(CEILING_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    n = CEILING_SIDE[device.type]
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    timings = harness.time_variants(
        {"copy": lambda: target.copy_(source), "dense": lambda: a @ b},
        device=device,
        effort=session.effort,
    )
    gbps = 2 * source.nbytes / timings["copy"].ms / 1e6
    tflops = 2 * n**3 / timings["dense"].ms / 1e9
    for op, shape, rate in (
        ("ceiling_copy", f"{source.nbytes >> 20} MiB", {"gbps": gbps}),
        ("ceiling_dense", f"{n}^3", {"tflops": tflops}),
    ):
        fields = records.make_timing_fields(timings[op.removeprefix("ceiling_")])
        session.add(Row(op=op, shape=shape, routing="-", backend="torch", **fields, **rate))
    return Ceilings(gbps, tflops)
