"""Selects the tests that a change needs.

    python -m tools.affected tests src/moecore/mesh.py  # test files that import it, however far
    python -m tools.affected leave-out                  # test folders that `make test` leaves out

The imports of a file are read from its source; of a package's `__init__`, only the imported names
count. Benchmarks and examples run as scripts, so a table lists their files.

A change is compared with the commit in MOECORE_BASE, or with the commit at which this branch left
main. If neither is known, no test is left out.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Scripts and other trainers put these together: a step, a parallelized model, checkpoints.
RUNS = (
    r"src/moecore/(.*/)?(step|parallelize)\.py",
    r"src/moecore/cli/.*",
    r"src/moecore/(.*/)?(checkpoint|hf)/.*",
    r"tests/(conftest|helpers/.*)\.py",
    r"pyproject\.toml|constraints\.txt|Makefile|tools/affected\.py",
)
# Compiling for GPUs that are not there takes minutes, and reads kernels alone.
COMPILED = (
    r"src/moecore/(kernels|base)/.*",
    r"tests/kernels/.*",
    r"tests/(conftest|helpers/.*)\.py",
    r"pyproject\.toml|constraints\.txt|Makefile|tools/affected\.py",
)
ONLY_AFTER = {
    "tests/benchmarks": (
        *(r"(tests/)?benchmarks/.*\.py", r"src/moecore/recipes/.*", r"tests/golden/.*\.py"),
        *RUNS,
    ),
    "tests/examples": (r"(tests/)?examples/.*", *RUNS),
    "tests/recipes": (*(r"(src/moecore|tests)/recipes/.*", r"examples/cluster(/.*)?"), *RUNS),
    "tests/integrations": (r"(src/moecore|tests)/(integrations|families)/.*", *RUNS),
    "tests/kernels/test_compile.py": COMPILED,
    "tests/kernels/exchange/test_exchange_compile.py": COMPILED,
}


def leave_out(changed: list[str] | None) -> list[str]:
    """Return folders and files of tests that no change concerns; [] for `changed` None."""
    if changed is None:
        return []
    return [
        folder
        for folder, patterns in ONLY_AFTER.items()
        if not any(re.fullmatch(pattern, path) for pattern in patterns for path in changed)
    ]


def changes() -> list[str] | None:
    """Return the paths that differ from the base commit, or None if the base is unknown."""
    base = _base()
    if base is None or _commit(base) is None:  # a shallow clone may lack it
        return None
    new = _git("ls-files", "--others", "--exclude-standard")
    return _git("diff", "--name-only", "--no-renames", base) + new


def _base() -> str | None:
    if named := os.environ.get("MOECORE_BASE"):
        return named
    head = _git("rev-parse", "HEAD")
    for main in ("origin/main", "main"):
        shared = _git("merge-base", "HEAD", main)
        if shared and shared != head:
            return shared[0]
    return None


def _commit(name: str) -> str | None:
    found = _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    return found[0] if found else None


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def tests_for(path: str) -> list[str]:
    """Return the test files that import a file, and the test folders that the table lists."""
    file = (ROOT / path).resolve()
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [str(test.relative_to(ROOT)) for test in tests if file in closure(test)]
    folders = [folder for folder in ONLY_AFTER if folder not in leave_out([path])]
    return [test for test in found if not test.startswith(tuple(folders))] + folders


def closure(file: Path) -> set[Path]:
    """Return the project's files that a test imports, directly or not, and its conftest files."""
    found: set[Path] = set()
    waiting = [file, *(up / "conftest.py" for up in file.parents if ROOT in (up, *up.parents))]
    while waiting:
        file = waiting.pop()
        if file not in found and file.exists():
            found.add(file)
            waiting += imports(file)
    return found


@cache
def imports(file: Path) -> frozenset[Path]:
    """Return the project's files that a file imports directly."""
    found: set[Path] = set()
    for module, name in _imported(file):
        found |= _defined_in(module, name)
    return frozenset(found)


@cache
def _imported(file: Path) -> frozenset[tuple[str, str]]:
    """Return pairs of an imported module and a name in it, "" for the module itself."""

    def walk() -> Iterator[tuple[str, str]]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield from ((node.module, alias.name) for alias in node.names)

    return frozenset(walk())


def _defined_in(module: str, name: str) -> frozenset[Path]:
    """Return the files that define a name, behind the `__init__` of its package."""
    if name and (submodule := _file(f"{module}.{name}")):
        return frozenset({submodule})
    file = _file(module)
    if file is None:
        return frozenset()
    if name and file.name == "__init__.py":
        behind = [source for source, given in _imported(file) if given == name]
        if behind:
            return frozenset().union(*(_defined_in(source, name) for source in behind))
    return frozenset({file})


@cache
def _file(module: str) -> Path | None:
    path = module.replace(".", "/")
    for folder in (ROOT / "src", ROOT):
        for file in (folder / f"{path}.py", folder / path / "__init__.py"):
            if file.exists():
                return file
    return None


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["leave-out"]:
            print(*leave_out(changes()))
        case ["tests", path] if (ROOT / path).exists():
            print(*tests_for(path))
        case _:
            sys.exit(f"affected: no such file or command: {' '.join(sys.argv[1:])}")
