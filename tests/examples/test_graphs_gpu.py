"""--cuda-graph on a GPU: steps of packed documents, replayed, train as eager ones do."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.examples.test_train import metrics
from tests.helpers.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = "--max-steps 8 --seq-len 128 --batch-size 2 --grad-accum 2 --checkpoint-every 0"
CORPUS = "--preset tiny --steps 8 --seq-len 128 --batch-size 2 --grad-accum 2 --checkpoint-every 0"
SIZES = dict(hidden_size=128, num_hidden_layers=2, head_dim=32, moe_intermediate_size=128)


def rank_of(rank: int, device: torch.device, name: str, words: list[str]) -> int:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    sys.path.insert(0, str(EXAMPLES))
    script = importlib.import_module(name)
    code: int = script.run_rank(script.parse_arguments(words))
    return code


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pretrain", "finetune_hf"])
def test_graphs_train_as_eager_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "finetune_hf":
        pytest.importorskip("transformers", minversion="5", reason="the script trains its models")
        monkeypatch.syspath_prepend(str(EXAMPLES))
        tiny = tmp_path / "tiny"
        importlib.import_module("tiny_hf").make(tiny, **SIZES)
        words = f"--model {tiny} --data {tiny}/chats.jsonl {STEPS} --eval-every 4"
    else:
        file = tmp_path / "text.jsonl"
        file.write_text(
            "".join(json.dumps({"text": "abc " * (1 + i % 50)}) + "\n" for i in range(400))
        )
        words = f"--data {file} {CORPUS}"
    for run, more in (("eager", []), ("graph", ["--cuda-graph"])):
        all_words = [*words.split(), "--run-dir", str(tmp_path / run), *more]
        assert run_ranks(1, rank_of, name, all_words, device_type="cuda") == 0
    found, wanted = metrics(tmp_path / "graph"), metrics(tmp_path / "eager")
    assert len(found) == len(wanted) >= 8
    for mine, other in zip(found, wanted, strict=True):
        for key in {"loss", "eval_loss", "grad_norm"} & other.keys():
            assert mine[key] == pytest.approx(other[key], rel=0.02), (mine["step"], key)
