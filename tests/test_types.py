import ast
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import moecore

SRC = Path(moecore.__file__).parents[1]
USER = """
from torch import nn
from moecore import MemoryOptions, ParallelConfig, build_meshes, parallelize_moe
from moecore.io import save

meshes = build_meshes(ParallelConfig(ep=1), "cpu")
memory = MemoryOptions(recompute="gemm_last")
model: nn.Linear = parallelize_moe(nn.Linear(2, 2), meshes, memory=memory, loss="mean")
save("run", 1, model, None, keep=2)
parallelize_moe(model, meshes, memry=memory)  # planted
ParallelConfig(ep="all")  # planted
"""


@pytest.mark.parametrize("package", ["moecore", "moecore.io", "moecore.integrations.transformers"])
def test_type_checkers_see_the_names_that_are_imported_on_first_use(package: str) -> None:
    module = import_module(package)
    homes = {f"{package}.{home}": names.split() for home, names in module._NAMES.items()}
    table = [(home, name) for home, names in homes.items() for name in names]
    shown = re.findall(r"    from ([\w.]+) import (\w+) as \2\n", Path(module.__file__).read_text())
    assert sorted(shown) == sorted(table)


def is_compiled(function: ast.FunctionDef) -> bool:
    """Whether Triton compiles a function: it reads the annotations of parameters."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def is_annotated(function: ast.FunctionDef) -> bool:
    """Whether the result and all arguments but `self` and `cls` have types."""
    arguments = [node for node in ast.walk(function.args) if isinstance(node, ast.arg)]
    untyped = {node.arg for node in arguments if node.annotation is None}
    return function.returns is not None and untyped <= {"self", "cls"}


def test_host_functions_of_kernels_are_annotated() -> None:
    """mypy asks all other packages."""
    missing = [
        f"{path.name}:{node.lineno} {node.name}"
        for path in (SRC / "moecore" / "kernels").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and not is_compiled(node) and not is_annotated(node)
    ]
    assert missing == []


@pytest.mark.slow
def test_mypy_finds_the_errors_of_a_user(tmp_path: Path) -> None:
    """With the options and the cache of `make lint`, which has checked the package before."""
    (tmp_path / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", str(tmp_path / "user.py")]
    env = {**os.environ, "MYPYPATH": "src"}
    run = subprocess.run(command, cwd=SRC.parent, env=env, capture_output=True, text=True)
    errors = dict(re.findall(r"user.py:(\d+): error: .*\[([\w-]+)\]", run.stdout))
    planted = [n for n, line in enumerate(USER.splitlines(), 1) if line.endswith("# planted")]
    assert errors == dict(zip(map(str, planted), ("call-arg", "arg-type"), strict=True)), run.stdout


def test_other_programs_find_the_types() -> None:
    assert (SRC / "moecore" / "py.typed").exists()
