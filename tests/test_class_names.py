"""A class name has one meaning in all of src."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import moecore

SRC = Path(moecore.__file__).parent
# torchtitan finds a nested class of this name, and has a model twice, once per release.
OF_TORCHTITAN = {"Config", "MoETrainer", "TitanDecoder", "TitanHF", "TitanMoE"}


def test_a_class_name_has_one_meaning() -> None:
    names = [
        node.name.lstrip("_")
        for file in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert {name for name, n in Counter(names).items() if n > 1} <= OF_TORCHTITAN
