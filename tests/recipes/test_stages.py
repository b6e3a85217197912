import importlib
import json
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moecore.io import decoder_config_from_hf, set_latest
from moecore.io.checkpoint.manifest import read_manifest
from moecore.models import preset
from moecore.recipes import schedule
from moecore.recipes.decoder_config import RotaryOptions, add_rotary_fields, replace_rotary
from moecore.recipes.pretrain import PretrainConfig
from tests.helpers.ranks import run_ranks
from tests.recipes import test_pretrain
from tests.recipes.launched import rank_of_command

corpus = test_pretrain.corpus
RAMP = schedule.BatchRamp(ramp_start=2, ramp_increment=2, ramp_tokens=80)


def test_sizes_of_steps_by_hand() -> None:
    sizes = schedule.StepSizes([schedule.EqualSteps(1, 2, 8), schedule.EqualSteps(4, 4, 8)])
    assert [sizes.get_rows(step) for step in range(1, 6)] == [2, 2, 2, 4, 4]
    assert [sizes.count_tokens_through(step) for step in range(6)] == [0, 16, 32, 48, 80, 112]
    assert [sizes.count_steps(n) for n in (0, 1, 16, 48, 49, 80, 81)] == [0, 1, 1, 3, 4, 4, 5]


def test_a_ramp_by_hand() -> None:
    """From 2 to 6 rows of 8 tokens over 80 tokens: 2 rows more from token 40 on, and from 80."""
    parts = list(
        schedule.iterate_equal_steps(RAMP, first_step=1, rows=6, seq_len=8, tokens_before=0)
    )
    # 3 steps of 16 tokens end at 48, the first end of a step that is >= 40; one of 32 ends at 80.
    assert parts == [(1, 2, 8), (4, 4, 8), (5, 6, 8)]
    total = 0
    for step in range(1, 9):  # the definition, step by step
        rows = min(6, 2 + 2 * (total * 2 // 80))
        assert schedule.StepSizes(parts).get_rows(step) == rows
        total += 8 * rows
        assert schedule.StepSizes(parts).count_tokens_through(step) == total
    later = list(
        schedule.iterate_equal_steps(RAMP, first_step=5, rows=6, seq_len=16, tokens_before=80)
    )
    assert later == [(5, 6, 16)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ramp_start": 2}, "BatchRamp.ramp_increment (None) must be given with ramp_start"),
        ({"ramp_start": 3}, "ramp_start (3) must be a multiple of 2, the rows of a micro-batch"),
        ({"ramp_increment": 4}, "ramp_start (4) plus a multiple of ramp_increment (4) must be 6"),
        ({"ramp_start": 8}, "ramp_start (8) plus a multiple of ramp_increment (2) must be 6"),
    ],
)
def test_ramps_that_do_not_fit(values: dict[str, int], message: str) -> None:
    others = {"ramp_start": 4, "ramp_increment": 2, "ramp_tokens": 80}
    others = {} if "ramp_increment (None)" in message else others
    with pytest.raises(ValueError) as error:
        schedule.BatchRamp(**(others | values)).check_multiples(rows=6, micro_batch_rows=2)
    assert str(error.value).startswith(message), error.value


def planned(tables: list[dict[str, Any]], **options: Any) -> list[PretrainConfig]:
    """Return stages of 4 rows of 8 tokens, or as their tables say."""
    common = {"steps": 10, "seq_len": 8, "batch_size": 4, "checkpoint_every": 5, **options}
    values = [
        {k: v for k, v in schedule.get_stage_options(table).items() if k != "schedule"}
        for table in tables
    ]
    stages = tuple(PretrainConfig(**common | value) for value in values)
    args = PretrainConfig(**common, stages=stages, stage_tables=tuple(tables))
    return schedule.plan_stages(args, lambda options: (options.batch_size, 2, schedule.BatchRamp()))


def test_stages_by_hand() -> None:
    """Two stages: 4 steps of 32 tokens, and 100 tokens in steps of 64, rounded up to 2 steps."""
    first, second = planned(
        [
            {"name": "a", "steps": 4},
            {"name": "b", "tokens": 100, "seq_len": 16, "schedule": {"lr_schedule": "linear"}},
        ]
    )
    assert (first.steps, first.stage.begin, first.stage.last) == (4, 0, 6)
    assert (second.steps, second.stage.begin, second.stage.has_schedule) == (6, 4, True)
    assert second.stage.sizes.count_tokens_through(6) == 4 * 32 + 2 * 64
    cosine = schedule.LearningRateSchedule(
        warmup_tokens=64, min_lr_ratio=0.0
    )  # 2 steps, then 4 to 0
    rates = [first.stage.compute_rate_factor(cosine, step) for step in (1, 2, 3, 4)]
    expected = [0.5, 1.0, *(0.5 * (1 + math.cos(math.pi * n / 4)) for n in (1, 2))]
    assert rates == pytest.approx(expected)
    linear = schedule.LearningRateSchedule(lr_schedule="linear", warmup_tokens=64, min_lr_ratio=0.5)
    assert [second.stage.compute_rate_factor(linear, step) for step in (5, 6)] == [1.0, 0.5]
    assert second.stage.is_previous_stage(4, "a") and not second.stage.is_previous_stage(5, "b")
    with pytest.raises(ValueError, match=r"\[\[stages\]\] must have stage 'a' end at or after ste"):
        second.stage.is_previous_stage(3, "a")
    (plain,) = planned([])
    assert (plain.steps, plain.stage.name, plain.stage.is_previous_stage(3, None)) == (
        10,
        "",
        False,
    )


ERRORS = {
    "stages must be tables": {"stages": 3},
    "must have a name: give one": {"stages": [{"steps": 3}]},
    "StageLength.steps (None) must be given without": {"stages": [{"name": "a"}]},
    "StageLength.steps (2) must be given without": {
        "stages": [{"name": "a", "steps": 2, "tokens": 9}]
    },
    "must have names that differ": {"stages": [{"name": "a", "steps": 1}] * 2},
    "steps (3) must be in each of [[stages]]": {"steps": 3, "stages": [{"name": "a", "steps": 2}]},
    "stage 'a' must not have run_dir": {"stages": [{"name": "a", "steps": 2, "run-dir": "b"}]},
}


@pytest.mark.parametrize("message", ERRORS)
def test_stages_that_are_wrong(message: str) -> None:
    with pytest.raises(ValueError) as error:
        schedule.split_stages(ERRORS[message])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_stages_need_checkpoints() -> None:
    with pytest.raises(ValueError, match=r"--checkpoint-every \(0\) must be > 0 with"):
        planned([{"name": "a", "steps": 1}], checkpoint_every=0)
    assert (
        schedule.read_stage_length({"name": "a", "tokens": 10**13}).tokens == 10**13
    )  # more than int32 holds
    assert schedule.LearningRateSchedule(warmup_tokens=10**11).warmup_tokens == 10**11


def test_rotary_options_reach_a_config_and_its_export() -> None:
    """transformers' own config reads back what is written."""
    transformers = pytest.importorskip("transformers")
    options = RotaryOptions(theta=5e5, yarn_factor=4.0, yarn_length=32, max_length=128)
    config = replace(preset("tiny"), max_seq_len=32)
    longer = options.apply(config)
    assert (longer.rope_theta, longer.max_seq_len) == (5e5, 128)
    assert longer.yarn is not None and longer.yarn.factor == 4.0
    assert RotaryOptions().apply(config) is config
    values = transformers.Qwen3MoeConfig(
        num_hidden_layers=1, max_position_embeddings=32, num_experts=4, num_experts_per_tok=2
    ).to_dict()
    native = options.apply(decoder_config_from_hf(values))
    written = add_rotary_fields(values, native)
    assert decoder_config_from_hf(written) == native
    rope = transformers.Qwen3MoeConfig(**written).rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("yarn", 4.0, 5e5)
    plain = decoder_config_from_hf(values)
    assert replace_rotary(native, {"rope_theta": plain.rope_theta, "max_seq_len": 32}) == plain
    with pytest.raises(ValueError, match=r"RotaryOptions.yarn_factor \(2.0\) must be given with"):
        RotaryOptions(yarn_factor=2.0)


RUN = """
hf_config = "{corpus}"
tokenizer = "{corpus}"
run_dir = "{run_dir}"
batch_size = 1
grad_accum = 3
seq_len = 16
checkpoint_every = 2
workers = 1
aux_loss = 0.0
data = [
    {{path = "{corpus}/text.jsonl", name = "text"}},
    {{path = "{corpus}/ids.jsonl", weight = 2.0, field = "ids", name = "ids"}},
]

[batch]
ramp_start = 2
ramp_increment = 2
ramp_tokens = 160

[[stages]]
name = "short"
steps = 4

[[stages]]
name = "long"
tokens = 800
seq_len = 32
data = [{{path = "{corpus}/text.jsonl", name = "text"}}]
{layout}
[stages.rotary]
theta = 5e4
[stages.schedule]
lr_schedule = "linear"
warmup_steps = 1
[stages.optimizer]
lr = 1e-3
"""


def staged(corpus: Path, run_dir: Path, layout: str = "") -> list[str]:
    """Write the file of a run and return the words that name it."""
    run_dir.mkdir(exist_ok=True)
    file = run_dir.with_suffix(".toml")
    file.write_text(RUN.format(corpus=corpus, run_dir=run_dir, layout=layout))
    return [str(file)]


@pytest.mark.slow
def test_a_run_that_is_killed_in_its_second_stage_continues(corpus: Path, tmp_path: Path) -> None:
    """Bit for bit, and with another layout in the second stage up to rounding."""
    run_dir = tmp_path / "unbroken"
    said = test_pretrain.run_in_forks(staged(corpus, run_dir))
    assert "stage short: steps 1 to 4" in said and "stage long: steps 5 to 9" in said
    unbroken = test_pretrain.metrics(run_dir)
    assert [line["step"] for line in unbroken] == list(range(1, 10))
    assert [line["rows"] for line in unbroken] == [2, 2, 2, 4, 6, 6, 6, 6, 6]
    assert [line["tokens"] for line in unbroken][3:6] == [160, 352, 544]
    assert [line["lr"] for line in unbroken][4:6] == pytest.approx([1e-3, 1e-3 * (1 - 0.9 / 4)])
    manifest = read_manifest(run_dir / "checkpoints" / "step-000008")
    assert manifest.facts.extra["stage"] == "long" and manifest.facts.extra["step"] == 8
    assert manifest.facts.extra["data"]["rows"] == 6 * 4
    export = json.loads((run_dir / "export" / "config.json").read_text())
    assert export["rope_parameters"]["rope_theta"] == 5e4
    killed = tmp_path / "killed"
    shutil.copytree(run_dir, killed)
    set_latest(killed / "checkpoints" / "step-000008")
    shutil.rmtree(killed / "checkpoints" / "step-000009")
    shutil.rmtree(killed / "export")
    more = [f"{killed}/config.toml", "--run-dir", str(killed)]
    assert "stage long: steps 9 to 9" in test_pretrain.run_in_forks(more)
    assert test_pretrain.metrics(killed) == unbroken
    other = tmp_path / "other"
    test_pretrain.run_in_forks(staged(corpus, other, "ep = 1\ndp_replicate = 2\ndp_shard = 1"))
    assert (other / "export").is_dir()
    for line, expected in zip(test_pretrain.metrics(other), unbroken, strict=True):
        for name in ("loss", "grad_norm", "lr", "tokens"):
            assert line[name] == pytest.approx(expected[name], rel=3e-5), (line["step"], name)


def rank_with_signal(rank: int, device: torch.device, words: list[str]) -> tuple[int, str]:
    """Be a rank of the script; rank 1 gets SIGTERM in the last step of the first stage."""
    loop = importlib.import_module("moecore.recipes.loop")
    save = loop.save_checkpoint

    def save_and_kill(job: Any, saver: Any, step: int) -> None:
        save(job, saver, step)
        if (rank, step) == (1, 4):
            os.kill(os.getpid(), signal.SIGTERM)

    with patch.object(loop, "save_checkpoint", save_and_kill):
        return rank_of_command(rank, device, "pretrain", 2, words)


@pytest.mark.slow
def test_a_signal_in_the_last_step_of_a_stage_stops_the_run(corpus: Path, tmp_path: Path) -> None:
    code, said = run_ranks(2, rank_with_signal, staged(corpus, tmp_path / "run"))
    assert code == 128 + signal.SIGINT, said
    assert "stage long" not in said and "moecore: stopped" not in said  # the launcher says it
    assert [line["step"] for line in test_pretrain.metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_stages_of_other_models_are_refused(pretrain, corpus, tmp_path) -> None:
    file = tmp_path / "run.toml"
    data = 'data = ["python:"]\n[[stages]]\nname = "a"\nsteps = 1\n[[stages]]\nname = "b"\nsteps=1'
    file.write_text(f"{data}\n[stages.model]\nnorm_eps = 1e-3")
    args = pretrain.parse_arguments([str(file)])
    with pytest.raises(ValueError, match=r"norm_eps \(0.001\) of stage 'b' must be 1e-06, as in"):
        pretrain.check_stages(args, 2)
    with pytest.raises(ValueError, match="--steps must be left out with"):
        pretrain.parse_arguments([str(file), "--steps", "4"])
    assert torch.cuda.is_available() or pretrain.count_ranks(args) == 2
