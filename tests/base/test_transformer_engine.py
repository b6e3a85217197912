import re
import sys
from pathlib import Path

import pytest
import torch

import moecore
from moecore.base import transformer_engine as te
from moecore.base.options.precision import Recipe
from tests.helpers.te_definition import te_defined

CPU = torch.device("cpu")


def test_one_file_names_it() -> None:
    src = Path(moecore.__file__).parent
    package = re.compile(r"(?<!base\.)transformer_engine[._](?!import)")
    found = {p.name for p in src.rglob("*.py") if package.search(p.read_text())}
    assert found == {"transformer_engine.py"}


def test_where_it_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    te.import_transformer_engine.cache_clear()
    problem = te.find_recipe_problem(None, None)
    assert problem is not None and "\n" not in problem
    assert problem.startswith("Transformer Engine must be installed for 'te' (")
    assert problem.endswith("pip install --no-build-isolation '.[te]' in a clone of moecore")
    assert te.find_recipe_problem(Recipe(backend="te"), torch.device("meta")) is None


def test_an_older_version() -> None:
    with te_defined(version="2.9.0+cu12"):
        problem = te.find_recipe_problem(None, CPU)
    assert problem.startswith("Transformer Engine (2.9.0+cu12) must be >= 2.12: pip install")


def test_what_a_gpu_lacks() -> None:
    class Hopper:
        @staticmethod
        def is_mxfp8_available(return_reason: bool = False) -> tuple[bool, str]:
            return False, "Device compute capability 10.0 or higher required"

    mxfp8 = Recipe(backend="te", scaling="mxfp8")
    with te_defined(pytorch=Hopper):
        problem = te.find_recipe_problem(mxfp8, CPU)
        assert te.find_recipe_problem(None, CPU) is None
        wrong_device = te.find_recipe_problem(mxfp8, torch.device("cuda"))
    assert problem == (
        "device (cpu) must have what Transformer Engine's 'mxfp8' needs (Device compute capability "
        "10.0 or higher required): use another recipe, or backend='moecore'"
    )
    assert wrong_device == "device (cuda) must be cpu for Transformer Engine: move the model"
