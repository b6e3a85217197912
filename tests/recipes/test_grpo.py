import json
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moecore.io import set_latest
from moecore.io.checkpoint.directory import make_step_path
from moecore.recipes.errors import RewardError
from moecore.recipes.grpo_job import call_reward, cut_after_end, load_reward
from moecore.recipes.tiny_model import (
    PROMPTS,
    make_digit_tokenizer,
    reward_sum,
    write_sums_model,
    write_tiny_model,
)
from tests.recipes.launched import metrics

transformers = pytest.importorskip("transformers", minversion="5")
STEPS, SAVED = 30, 24
REWARD = """
calls = []


def reward(prompts, completions, topic, completion_ids, **columns):
    calls.append((prompts, completions, topic, completion_ids, columns))
    return [ids[0] % 7 / 7 for ids in completion_ids]
"""


@pytest.mark.slow
@pytest.mark.nightly  # the engine has its numbers in tests/rl
def test_the_reward_rises_and_a_stopped_run_goes_on(grpo: ModuleType, tmp_path: Path) -> None:
    write_sums_model(tmp_path / "sums")
    words = f"--model {tmp_path / 'sums'} --data {tmp_path / 'sums' / PROMPTS}"
    words += f" --steps {STEPS} --batch-size 8 --seq-len 128 --checkpoint-every {SAVED} --lr 4e-3"
    words += " --reward moecore.recipes.tiny_model:reward_sum --max-new-tokens 3 --aux-loss 0.01"
    args = grpo.parse_arguments([*words.split(), "--run-dir", str(tmp_path / "run")])
    assert grpo.run_rank(args) == 0
    straight = metrics(tmp_path / "run")
    rewards = [line["reward"] for line in straight]
    # 128 completions of a random policy have 0.08, with a standard error of 0.02.
    assert mean(rewards[:3]) < 0.15 and min(rewards[-5:]) > 0.35
    set_latest(make_step_path(tmp_path / "run" / "checkpoints", SAVED))
    assert grpo.run_rank(args) == 0 and metrics(tmp_path / "run") == straight


def test_a_reward_of_a_module_of_the_user(grpo, tmp_path, monkeypatch) -> None:
    """It gets messages and columns as TRL's do; the policy and the reference are the directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARD)
    sizes = dict(hidden_size=32, num_hidden_layers=1, head_dim=8, moe_intermediate_size=16)
    write_tiny_model(tmp_path / "tiny", **sizes)
    chats = [[{"role": "user", "content": text}] for text in ("One?", "And the other one?")]
    rows = [{"ask": chat, "topic": number} for number, chat in enumerate(chats)]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "grpo.toml").write_text(
        'model = "tiny"\ndata = ["a.jsonl"]\nsteps = 2\nbatch_size = 2\nseq_len = 128\n'
        'run_dir = "run"\ncheckpoint_every = 0\n[sampling]\nreward = "my_rewards:reward"\n'
        "group = 3\nmax_new_tokens = 8\n[grpo]\nkl_coef = 0.1\n[optimizer]\nlr = 1e-3\n"
        '[columns]\nprompt = "ask"\n'
    )
    assert grpo.run_rank(grpo.parse_arguments(["grpo.toml"])) == 0
    calls, lines = __import__("my_rewards").calls, metrics(tmp_path / "run")
    assert len(calls) == len(lines) == 2
    for (prompts, completions, topics, ids, columns), line in zip(calls, lines, strict=True):
        assert prompts == [chats[topic] for topic in topics] and not columns
        assert sorted(topics) == [0, 0, 0, 1, 1, 1] and topics[0] == topics[2]
        assert all(c[0]["role"] == "assistant" and len(c) == 1 for c in completions)
        assert line["response_tokens"] == pytest.approx(mean(map(len, ids)))
        assert line["reward"] == pytest.approx(mean(one[0] % 7 / 7 for one in ids))
    trained, first = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("run/export", "tiny")
    )
    key = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(trained[key], first[key])
    assert "kl_coef = 0.1\n" in (tmp_path / "run" / "config.toml").read_text()
    assert grpo.run_rank(grpo.parse_arguments(["run/config.toml"])) == 0
    assert metrics(tmp_path / "run") == lines


def test_adapters_are_trained_by_reward(grpo: ModuleType, tmp_path: Path, capsys: Any) -> None:
    """A dry run trains nothing; a run exports what peft has of the directory and its adapters."""
    peft = pytest.importorskip("peft", reason="adapters are those of peft")
    model, run_dir = tmp_path / "sums", tmp_path / "run"
    write_sums_model(model)
    config = json.loads((model / "generation_config.json").read_text())
    penalty = {"suppress_tokens": list(range(12))}  # the policy's probabilities are without it
    (model / "generation_config.json").write_text(json.dumps(config | penalty))
    words = f"--model {model} --data {model / PROMPTS} --run-dir {run_dir} --steps 2 --lr 1e-2"
    words += " --batch-size 4 --group 4 --seq-len 64 --reward moecore.recipes.tiny_model:reward_sum"
    words += " --max-new-tokens 2"
    assert grpo.dry_run(grpo.parse_arguments([*words.split(), "--gpus", "1"])) == 0
    printed = capsys.readouterr().out
    assert "peak memory" in printed and "first prompt: '0+0=', tokens [0, 10, 0, 11]" in printed
    assert "200 prompts; a step has 4 x 4 completions per rank" in printed and not run_dir.exists()
    adapters = ["--lora-rank", "4", "--grpo-kl-coef", "0.1"]
    assert grpo.run_rank(grpo.parse_arguments([*words.split(), *adapters])) == 0
    assert all(line["response_tokens"] > 1 for line in metrics(run_dir))
    ids = torch.tensor([[3, 10, 4, 11]])
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        before = load(model)(ids).logits
        adapted = peft.PeftModel.from_pretrained(load(model), run_dir / "adapters").eval()
        merged, expected = load(run_dir / "export")(ids).logits, adapted(ids).logits
    assert (merged - expected).abs().max() < 1e-5 < 1e-3 < (merged - before).abs().max()
    lines = (model / PROMPTS).read_text().splitlines(keepends=True)
    (model / PROMPTS).write_text("".join(lines[::-1]))
    assert grpo.run_rank(grpo.parse_arguments([*words.split(), *adapters])) == 2
    assert "--data (200 prompts, digest " in capsys.readouterr().err


def test_points_of_sums() -> None:
    completions = ["7", "71", "6", "", "67", "+"]
    points = reward_sum(["3+4="] * 6, completions, sum=[7] * 6, completion_ids=[])
    assert points == [1, 0.5, 0.5, 0, 0, 0]
    tokenizer = make_digit_tokenizer()
    ids = tokenizer("3+4=")["input_ids"]
    assert ids == [3, 10, 4, 11] and tokenizer.decode([7, 12], skip_special_tokens=True) == "7"


@pytest.mark.parametrize(
    "path, wanted",
    {
        "no_module_x:reward": "--reward (no_module_x:reward) must be MODULE:FUNCTION that imports:",
        "moecore.recipes.tiny_model": "must be MODULE:FUNCTION that imports:",
        "moecore.recipes.tiny_model:WORDS": "must name a function: correct it",
    }.items(),
)
def test_rewards_that_do_not_import(path: str, wanted: str) -> None:
    with pytest.raises(ValueError) as error:
        load_reward(path)
    assert wanted in str(error.value) and "\n" not in str(error.value)


BAD: dict[str, Any] = {
    "returned 1 values, which must be one finite number for each of 2": lambda **_: [1.0],
    "returned 2 values": lambda **_: [1.0, float("nan")],
    f"must return numbers: ZeroDivisionError: division by zero ({__file__} line": lambda **_: [
        1 / 0
    ],
    "must return numbers: TypeError": lambda **_: None,
}


@pytest.mark.parametrize("wanted", BAD)
def test_rewards_that_are_no_numbers(wanted: str) -> None:
    with pytest.raises(RewardError) as error:
        call_reward(BAD[wanted], ["a", "a"], ["b", "c"], {})
    assert wanted in str(error.value) and "\n" not in str(error.value)


def test_ends_of_responses() -> None:
    assert cut_after_end([7, 2, 3], {2, 9}) == [7, 2] and cut_after_end([1, 2], {9}) == [1, 2]
