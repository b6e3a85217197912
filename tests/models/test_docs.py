from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_examples_run():
    names: dict = {}
    blocks = [part.split("```")[0] for part in DOCS.read_text().split("```python\n")[1:]]
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 2 and names["loss"] > 0
