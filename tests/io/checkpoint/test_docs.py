from pathlib import Path
from typing import Any

from moecore.io import latest, read_manifest

DOCS = Path(__file__).parents[3] / "docs" / "checkpointing.md"


def test_the_examples_run(tmp_path, monkeypatch, no_group_left):
    monkeypatch.chdir(tmp_path)
    blocks = [part.split("```")[0] for part in DOCS.read_text().split("```python\n")[1:]]
    blocks[0] = blocks[0].replace('"runs/mine", 200', '"runs/mine", 4').replace("% 100", "% 2")
    for run in range(2):  # the second one goes on from the first
        names: dict[str, Any] = {}
        for block in blocks[: 1 if run else None]:
            exec(block, names)
    assert names["extra"] == {"step": 4} and latest("runs/mine") == Path("runs/mine/step-000004")
    assert len(blocks) == 2
    assert read_manifest(Path("runs/muon/step-000001")).facts.optimizer_class == "Muon, AdamW"
