"""Imports point down: which rooms of src may import which, and that no two import each other."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import FrameType

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
    *("planning", "integrations", "cli", "__main__"),
)
FILES = {
    ".".join(("moecore", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(SRC.rglob("*.py"))
}


def arrows() -> set[tuple[str, str]]:
    """Return importer and imported of all of src, by module; imports inside of functions count."""
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


def place(module: str, level: int) -> str:
    """Return the package of a module: a room, or at level 2 the package inside of it."""
    parts = module.split(".")[1:]
    inside = len(parts) - (FILES[module].name != "__init__.py")
    return ".".join(parts[: max(1, min(level, inside))])


def test_rooms_are_those_of_the_table() -> None:
    found = {path.stem for path in SRC.iterdir() if path.name not in ("__init__.py", "__pycache__")}
    assert found == set(ROOMS) and len(found) < 18


def test_imports_point_down() -> None:
    floors = {room: floor for floor, room in enumerate(ROOMS)}
    upward = [
        (importer, imported)
        for importer, imported in arrows()
        if importer != "moecore"
        and (imported == "moecore" or floors[place(imported, 1)] > floors[place(importer, 1)])
    ]
    assert upward == []


def test_no_packages_import_each_other() -> None:
    for level in (1, 2):
        pairs = {(place(a, level), place(b, level)) for a, b in arrows() if a != "moecore"}
        apart = {
            (a, b)
            for a, b in pairs
            if a != b and not f"{a}.".startswith(f"{b}.") and not f"{b}.".startswith(f"{a}.")
        }
        assert [(a, b) for a, b in apart if a < b and (b, a) in apart] == []


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
