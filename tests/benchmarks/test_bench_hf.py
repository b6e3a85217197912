"""The benchmark of a transformers model on two CPU ranks, as its users start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", minversion="5")

REPO = Path(__file__).parents[2]
ARGUMENTS = "--preset tiny-qwen3 --seq-len 32 --batch-size 2 --warm-up 1 --timed 2"


@pytest.mark.slow
def test_all_variants_compute_the_same(tmp_path: Path) -> None:
    launcher = "-m torch.distributed.run --nproc-per-node 2"
    command = f"{launcher} -m benchmarks.bench_hf {ARGUMENTS} --results {tmp_path}".split()
    here = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    here |= {"PYTHONPATH": os.pathsep.join([str(REPO / "src"), str(REPO)])}
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | here, cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["variant"] for row in rows] == ["transformers", "moecore", "moecore+loss"]
    assert done.stdout.count("tokens/s/GPU") == len(rows)
    for row in rows:
        assert row["losses"] == pytest.approx(rows[0]["losses"], abs=1e-4)
        rate = 2 * 32 / row["step_ms"] * 1e3
        assert row["tokens_per_second_per_gpu"] == pytest.approx(rate, rel=1e-4)
    assert rows[0]["losses"][0] != rows[0]["losses"][-1], "it trains"


class HostReads(TorchDispatchMode):
    """Counts values that the host reads from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_attention_of_the_graph_variants_reads_nothing_on_the_host() -> None:
    from benchmarks.bench_hf import CAUSAL, on_meta
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = dict(hidden_size=32, num_hidden_layers=1, vocab_size=99, moe_intermediate_size=16)
    heads = dict(num_attention_heads=2, num_key_value_heads=1)
    config = Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, **sizes, **heads)
    on_meta(config)  # registers it
    tokens_BT = torch.randint(0, 99, (2, 16), generator=torch.Generator().manual_seed(0))
    losses, reads = [], []
    for attention in (None, CAUSAL):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        with HostReads() as found:
            losses.append(model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss)
        reads.append(found.count)
    assert reads[0] > 0 == reads[1]
    assert losses[0] == losses[1]
