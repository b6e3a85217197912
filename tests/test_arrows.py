import ast
import sys
from functools import cache
from pathlib import Path
from types import FrameType

import pytest
from torch import nn

import moecore
from moecore import MemoryOptions, ParallelConfig, build_meshes
from moecore.planning import fake_world
from tests.families.transformers.hf_models import random_model

SRC = Path(moecore.__file__).parent
# From the ground up. A room imports itself and what stands before it.
ROOMS = (
    *("base", "kernels", "moe", "attention", "packing", "precision"),
    *("parallel", "models", "train", "families", "parallelize", "io", "rl"),
    *("planning", "integrations", "recipes", "cli", "__main__"),
)
# The packages and files of `parallel`, likewise.
PARALLEL = ("rendezvous", "mesh", "arguments choice doctor", "fsdp", "pipeline", "model")
FILES = {
    ".".join(("moecore", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(SRC.rglob("*.py"))
}

PACKAGES = [name for name, path in FILES.items() if path.name == "__init__.py"]


@cache
def arrows() -> set[tuple[str, str]]:
    """Return importer and imported of all of src, by module.

    Imports inside of functions and for types alone count.
    """
    found = set()
    for importer, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{importer} imports by dots"
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in FILES else str(node.module) for name in whole]
            else:
                continue
            found |= {(importer, name) for name in names if name in FILES}
    return found


def entry(module: str, package: str) -> str:
    """Return the file or package directly in `package` that a module belongs to."""
    return module.removeprefix(f"{package}.").partition(".")[0]


def cycles(edges: set[tuple[str, str]]) -> list[str]:
    """Return the nodes that reach themselves: those left when nodes without imports are removed."""
    while True:
        importers = {a for a, _ in edges}
        kept = {(a, b) for a, b in edges if b in importers}
        if len(kept) == len(edges):
            return sorted(importers & {b for _, b in edges})
        edges = kept


def closure(module: str) -> set[str]:
    """Return all modules that an import of `module` brings in, itself included."""
    edges, reached, pending = arrows(), set[str](), [module]
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending += [b for a, b in edges if a == node]
    return reached


def test_rooms_are_those_of_the_table() -> None:
    no_rooms = ("__init__.py", "__pycache__", "py.typed")
    found = {path.stem for path in SRC.iterdir() if path.name not in no_rooms}
    assert found == set(ROOMS) and len(found) < 19


def test_imports_point_down() -> None:
    floors = {room: floor for floor, room in enumerate(ROOMS)}
    upward = [
        (importer, imported)
        for importer, imported in arrows()
        if importer != "moecore"
        and (
            imported == "moecore"
            or floors[entry(imported, "moecore")] > floors[entry(importer, "moecore")]
        )
    ]
    assert upward == []


def test_no_file_imports_itself_over_others() -> None:
    assert cycles({("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")}) == ["b", "c"]
    assert cycles(arrows()) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_entries_of_a_package_have_an_order(package: str) -> None:
    """Its files and packages can be stacked so that each one imports those below it alone."""
    inside = {
        (entry(a, package), entry(b, package))
        for a, b in arrows()
        if a.startswith(f"{package}.") and b.startswith(f"{package}.")
    }
    assert cycles({(a, b) for a, b in inside if a != b}) == []


def test_floors_of_parallel() -> None:
    floors = {name: floor for floor, names in enumerate(PARALLEL) for name in names.split()}
    inside = [
        (entry(a, "moecore.parallel"), entry(b, "moecore.parallel"))
        for a, b in arrows()
        if a.startswith("moecore.parallel.") and b.startswith("moecore.parallel.")
    ]
    assert [(a, b) for a, b in inside if floors[b] > floors[a]] == []


def test_the_sharding_engine_needs_few_files() -> None:
    assert len(closure("moecore.parallel.fsdp.engine")) < 60


def test_parallelize_is_a_list_of_phases() -> None:
    """Each room brings its phase: the function that calls all of them knows few modules."""
    lines = FILES["moecore.parallelize"].read_text().splitlines()
    imported = {name for importer, name in arrows() if importer == "moecore.parallelize"}
    assert len(lines) < 300 and len(imported) < 30


def test_a_model_passes_few_files() -> None:
    """Files with a function that gets the model or a module of it, from the call to its return."""
    passed = set[str]()

    def visit(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SRC)):
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if any(isinstance(frame.f_locals.get(name), nn.Module) for name in names):
                passed.add(code.co_filename)

    model = random_model("qwen3-moe")
    with fake_world(8):
        meshes = build_meshes(ParallelConfig(ep=4), "cpu")
        sys.setprofile(visit)
        try:
            moecore.parallelize_moe(model, meshes, memory=MemoryOptions(recompute="gemm_last"))
        finally:
            sys.setprofile(None)
    assert 20 < len(passed) < 40
