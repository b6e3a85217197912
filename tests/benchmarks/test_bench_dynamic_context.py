import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.helpers.ranks import run_ranks

ARGUMENTS = "--preset tiny-qwen3 --device cpu --layers 1 --steps 1"
ROWS = "--row-tokens 256 --rows 2 --documents split"


def ranks(rank: int, device: torch.device) -> Any:
    from benchmarks import bench_dynamic_context as bench

    words = f"bench {ARGUMENTS} {ROWS} --lengths".split()
    with patch.object(sys, "argv", [*words, "lognormal (7, 1.5)"]):
        args = bench.parse_arguments()
    return bench.measure(args, {name: make(args, 2) for name, make in bench.VARIANTS.items()})


@pytest.mark.slow
@pytest.mark.nightly  # test_bench_fsdp.py starts ranks by the same code
def test_variants_have_one_loss() -> None:
    static, dynamic = run_ranks(2, ranks)
    assert static["loss"] == pytest.approx(dynamic["loss"], rel=1e-5)
    assert static["cps"] == {"2": 6} and dynamic["cps"].keys() <= {"1", "2"}
    assert dynamic["ratio"] == dynamic["tokens_per_s"] / static["tokens_per_s"]
