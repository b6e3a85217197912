"""A repeated step of `moecore finetune` counts once: in all metrics, for all objectives."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moecore.recipes.tiny_model import write_tiny_model
from moecore.train.rerun import Reruns
from tests.helpers.ranks import run_ranks
from tests.recipes.launched import metrics, rank_of_command

pytest.importorskip("peft", minversion="0.21", reason="adapters, which extra `lora` has")
COMMON = "--seq-len 96 --batch-size 2 --grad-accum 2 --max-steps 2 --eval-every 0 --eval-share 0"
WORDS = {
    "sft": "--data {0}/chats.jsonl --aux-loss 0.1",
    "dpo": "--data {0}/pairs.jsonl --objective dpo",
    "kto": "--data {0}/labelled.jsonl --objective kto",
    "distill": "--data {0}/chats.jsonl --objective distill --distill-teacher {0}",
    "adapters": "--lora-rank 4 --adapters a={0}/chats.jsonl b={0}/chats.jsonl",
}


def run_twice(self: Any, run_step: Any, drop_step: Any, tapes: Any) -> Any:
    """Run a step as if its rows had not fit at first."""
    rewinders = [tape.make_rewind() for tape in tapes]
    run_step()
    drop_step()
    for rewind in rewinders:
        rewind()
    return run_step()


def train(rank: int, device: torch.device, folder: Path) -> None:
    for name, words in WORDS.items():
        for once in (True, False):
            run = Reruns.run_until_rows_fit if once else run_twice
            options = f"{words} {COMMON} --model {{0}} --run-dir {{0}}/{name}-{once}"
            with patch.object(Reruns, "run_until_rows_fit", run):
                arguments = options.format(folder).split()
                code, said = rank_of_command(rank, device, "finetune", 1, arguments)
            assert code == 0, said


def test_metrics_of_repeated_steps(tmp_path: Path) -> None:
    sizes = dict(hidden_size=32, num_hidden_layers=1, head_dim=8, moe_intermediate_size=16)
    write_tiny_model(tmp_path, **sizes)
    for name in ("chats", "pairs"):  # few rows: each run encodes all
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(path.read_text().splitlines()[:40]))
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    rows = [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for pair in pairs
        for name in ("chosen", "rejected")
    ]
    (tmp_path / "labelled.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run_ranks(1, train, tmp_path)
    for name in WORDS:
        once, repeated = (metrics(tmp_path / f"{name}-{which}") for which in (True, False))
        assert len(once) == 2 and once == repeated, name
