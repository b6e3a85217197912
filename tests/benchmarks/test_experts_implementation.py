import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.17")

from benchmarks import experts_implementation

ARGUMENTS = (
    "--preset tiny-qwen3 --layers 1 --seq-len 16 --batch-sizes 1 2 --warm-up 1 --timed 2 "
    "--implementations grouped_mm batched_mm sonicmoe eager moecore"
)


@pytest.mark.slow
def test_implementations_take_turns(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    words = [*ARGUMENTS.split(), "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["experts_implementation", *words])
    assert experts_implementation.main() == 0
    (file,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    names = ["grouped_mm", "batched_mm", "eager", "moecore"]
    found = [(row["batch_size"], row["variant"]) for row in rows]
    assert found == [(size, name) for size in (1, 2) for name in names]
    for row in rows:
        rate = row["batch_size"] * 16 / row["step_ms"] * 1e3
        assert row["tokens_per_second"] == pytest.approx(rate, rel=1e-4)
    said = capsys.readouterr().out
    assert said.count("error of gradients") == len(names)
    assert "sonicmoe    left out: ImportError" in said
