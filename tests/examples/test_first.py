from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import run_ranks

pytest.importorskip("transformers", minversion="5")
SCRIPT = Path(__file__).parents[2] / "examples" / "first.py"


def of_ranks(rank: int, device: torch.device) -> list[Any]:
    """Return the last tokens of each rank, its loads, and what it prints."""
    printed, names = StringIO(), dict[str, Any]()
    code = SCRIPT.read_text()
    with redirect_stdout(printed), patch("torch.distributed.destroy_process_group"):
        exec(compile(code, SCRIPT.name, "exec"), names)
    mine = names["tokens"], names["done"].metrics.tokens_per_expert, printed.getvalue()
    found: list[Any] = [None, None]
    dist.all_gather_object(found, mine)
    return found


def test_ranks_have_other_data_and_one_prints() -> None:
    (tokens, loads, printed), (others, _, nothing) = run_ranks(2, of_ranks)
    assert tokens.shape == others.shape and not torch.equal(tokens, others)
    assert len(printed.splitlines()) == 3 and nothing == ""
    counts = [float(counts.sum()) for counts in loads.values()]
    assert counts == [2 * tokens.numel() * 2.0] * 2  # of both ranks, top 2, in both layers
