from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs" / "rl.md"


def test_the_examples_run() -> None:
    names: dict[str, Any] = {}
    for block in DOCS.read_text().split("```python\n")[1:]:
        exec(block.split("```")[0], names)
    assert names["result"].loss.isfinite() and not names["done"].is_skipped
    assert names["approx_kl"].isfinite()
