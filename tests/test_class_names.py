"""A class name has one meaning in all of src, and a file at most 500 lines."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import moecore

SRC = Path(moecore.__file__).parent
# torchtitan finds a nested class of this name, and has a model twice, once per release.
OF_TORCHTITAN = {"Config", "MoETrainer", "TitanMoE"}


def test_a_class_name_has_one_meaning() -> None:
    names = [
        node.name.lstrip("_")
        for file in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert {name for name, n in Counter(names).items() if n > 1} <= OF_TORCHTITAN


def test_a_file_is_read_in_one_sitting() -> None:
    lengths = {file: len(file.read_text().splitlines()) for file in SRC.rglob("*.py")}
    assert [str(file.relative_to(SRC)) for file, n in lengths.items() if n > 500] == []
