import ast
from collections import Counter
from pathlib import Path

import moecore

SRC = Path(moecore.__file__).parent
# torchtitan finds a nested class of this name, and has a model twice, once per release.
OF_TORCHTITAN = {"Config", "MoETrainer", "TitanMoE"}
# Files of 401 to 500 lines. The list may only get shorter.
LONG = {
    "base/torch_private.py",
    "families/transformers/rows.py",
    "families/transformers/tensor_parallel.py",
    "io/hf/config.py",
    "kernels/adamw.py",
    "kernels/cross_entropy.py",
    "kernels/grouped/pingpong.py",
    "kernels/grouped/scaled_rows.py",
    "kernels/routing/router_logits.py",
    "models/config.py",
    "models/decoder.py",
    "models/presets.py",
    "moe/balance.py",
    "moe/experts.py",
    "parallel/doctor.py",
    "parallel/fsdp/engine.py",
    "parallel/mesh.py",
    "parallel/model/checks.py",
    "parallel/model/plan.py",
    "planning/explain.py",
    "planning/record.py",
    "planning/times.py",
    "precision/linear.py",
    "rl/engine.py",
    "train/graphs/forward_backward.py",
    "train/graphs/graphed_part.py",
    "train/memory/recompute.py",
    "train/optim/muon.py",
    "train/step.py",
}


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
    long = {str(file.relative_to(SRC)) for file, n in lengths.items() if n > 400}
    assert long <= LONG and max(lengths.values()) <= 500
