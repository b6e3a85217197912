from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "sequences.md"
SECTIONS = ("A DataLoader", "Bins", "What a rank holds", "Dynamic context parallelism")


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    sections = {s.splitlines()[0]: s for s in DOCS.read_text().split("\n## ")[1:]}
    names: dict[str, Any] = {}
    for title in SECTIONS:
        for block in sections[title].split("```python\n")[1:]:
            exec(block.split("```")[0], names)
    assert names["loss"].isfinite() and names["state"]["epoch"] == 1
    assert capsys.readouterr().out.startswith("[[1, 3], [0, 4], [2]]\n")
    assert names["own"]["input_ids"].shape == (1, 64)
    assert not names["done"].is_skipped and names["loss"] > 4
