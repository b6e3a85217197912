from pathlib import Path
from typing import Any

import torch

from moecore.models import preset
from tests.helpers.ranks import run_ranks

DOCS = Path(__file__).parents[3] / "docs" / "optimizers.md"


def worker(rank: int, device: torch.device) -> Any:
    names: dict[str, Any] = {}
    for block in DOCS.read_text().split("```python\n")[1:]:
        exec(block.split("```")[0], names)
    return float(names["done"].norm), len(names["clip"].max_scores)


def test_the_examples_run() -> None:
    norm, num_watched = run_ranks(1, worker)
    config = preset("tiny-deepseek-v3")
    assert norm > 0 and num_watched == config.num_layers + config.num_mtp_layers
