import importlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.waits import asleep, launched
from tests.recipes.launched import metrics

STEPS = "--max-steps 8 --seq-len 128 --batch-size 2 --grad-accum 2 --checkpoint-every 0"
CORPUS = "--preset tiny --steps 8 --seq-len 128 --batch-size 2 --grad-accum 2 --checkpoint-every 0"
SIZES = dict(hidden_size=128, num_hidden_layers=2, head_dim=32, moe_intermediate_size=128)


def script_of(name: str) -> Any:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    return importlib.import_module(f"moecore.recipes.{name}")


def rank_of(rank: int, device: torch.device, name: str, words: list[str]) -> int:
    script = script_of(name)
    code: int = script.run_rank(script.parse_arguments(words))
    return code


def steps_ahead(rank: int, device: torch.device, name: str, words: list[str]) -> None:
    script = script_of(name)
    train_step = importlib.import_module("moecore.recipes.loop").train_step
    job = script.build_job(script.parse_arguments(words))
    first, *_, before = [train_step(job, step) for step in range(1, 6)]  # compiled, captured
    first.read_metrics()  # what reads them waits once, for its kernels and memory
    with launched("a step"):
        train_step(job, 6)
    with asleep("the metrics of a step before"):
        assert math.isfinite(before.read_metrics()[0]["loss"])


def words_of(name: str, folder: Path, monkeypatch: Any) -> str:
    """Return the arguments of a script for a tiny run."""
    if name == "finetune":
        pytest.importorskip("transformers", minversion="5", reason="the script trains its models")
        tiny = folder / "tiny"
        importlib.import_module("moecore.recipes.tiny_model").write_tiny_model(tiny, **SIZES)
        return f"--model {tiny} --data {tiny}/chats.jsonl {STEPS}"
    file = folder / "text.jsonl"
    file.write_text("".join(json.dumps({"text": "abc " * (1 + i % 50)}) + "\n" for i in range(400)))
    return f"--data {file} {CORPUS}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pretrain", "finetune"])
def test_graphs_train_as_eager_steps(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    words = words_of(name, tmp_path, monkeypatch)
    if name == "finetune":
        words += " --eval-every 4"
    for run, more in (("eager", []), ("graph", ["--cuda-graph"])):
        all_words = [*words.split(), "--run-dir", str(tmp_path / run), *more]
        assert run_ranks(1, rank_of, name, all_words, device_type="cuda") == 0
    found, wanted = metrics(tmp_path / "graph"), metrics(tmp_path / "eager")
    assert len(found) == len(wanted) >= 8
    for mine, other in zip(found, wanted, strict=True):
        for key in {"loss", "eval_loss", "grad_norm"} & other.keys():
            assert mine[key] == pytest.approx(other[key], rel=0.02), (mine["step"], key)


@pytest.mark.gpu
@pytest.mark.parametrize("more", [[], ["--cuda-graph"]], ids=["eager", "graph"])
@pytest.mark.parametrize("name", ["train", "pretrain", "finetune"])
def test_the_host_is_a_step_ahead(name, more, tmp_path, monkeypatch) -> None:
    words = words_of(name, tmp_path, monkeypatch)
    all_words = [*words.split(), "--run-dir", str(tmp_path / "run"), *more]
    run_ranks(1, steps_ahead, name, all_words, device_type="cuda")
