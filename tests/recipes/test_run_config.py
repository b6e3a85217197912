import shutil
import tomllib

import pytest

from moecore.io import set_latest
from moecore.io.checkpoint.manifest import read_manifest
from moecore.recipes.resume import list_option_changes
from tests.recipes.launched import metrics

BEFORE = """
seed = 0
ep = 2
run_dir = "a"
[optimizer]
lr = 0.1
[pipeline]
layout = "Et|tL"
[[stages]]
name = "long.1"
steps = 2
checkpoint-every = 5
"""
AFTER = """
seed = 0
ep = 4
run_dir = "a"
data = ["b"]
[optimizer]
lr = 0.2
[logging]
wandb = "c"
[[stages]]
name = "long.1"
steps = 3
checkpoint-every = 6
"""
LAYOUT = "(does not change the numbers if a step has as many rows)"
CHANGES = [
    f"ep: 2 -> 4 {LAYOUT}",
    "optimizer.lr: 0.1 -> 0.2 (changes the numbers)",
    f"pipeline.layout: 'Et|tL' -> None {LAYOUT}",
    "stages.long.1.steps: 2 -> 3 (changes the numbers)",
    "stages.long.1.checkpoint-every: 5 -> 6 (does not change the numbers)",
    "data: None -> ['b'] (changes the numbers)",
    "logging.wandb: None -> 'c' (does not change the numbers)",
]


def test_changes_say_whether_numbers_change() -> None:
    assert list_option_changes(tomllib.loads(BEFORE), tomllib.loads(AFTER)) == CHANGES
    assert list_option_changes(tomllib.loads(AFTER), tomllib.loads(AFTER)) == []


def test_a_training_continues_by_its_own_file(train, tmp_path, capsys) -> None:
    run_dir = tmp_path / "run"
    file, steps = run_dir / "config.toml", run_dir / "checkpoints"
    words = "--num-layers 2 --batch-size 1 --seq-len 64 --steps 2 --sample-every 0 --tokens random"
    words += " --param-groups *,lr_factor=0.5"

    errors: list[str] = []

    def start(more: str, code: int = 0) -> list[str]:
        """Start from step 1 if it is there; return the lines of changes."""
        if steps.exists():
            set_latest(steps / "step-000001")
            shutil.rmtree(steps / "step-000002", ignore_errors=True)
        capsys.readouterr()
        assert train.run_rank(train.parse_arguments(more.split())) == code
        printed = capsys.readouterr()
        errors.append(printed.err)
        return [line for line in printed.out.splitlines() if " -> " in line]

    assert start(f"{words} --checkpoint-every 1 --run-dir {run_dir}") == []
    straight, saved = metrics(run_dir), file.read_text()
    assert straight[0]["lr"] == 0.003  # of the schedule, without factors
    assert start(str(file)) == [] and metrics(run_dir) == straight
    assert file.read_text() == saved and "[optimizer]\n" in saved
    assert start(f"{file} --seed 7", code=2) == ["seed: 0 -> 7 (changes the numbers)"]
    assert file.read_text() == saved
    assert "model.num_layers: 2 -> 3" in start(f"{file} --num-layers 3", code=2)[0]
    assert errors[-1].endswith("build them as when it was saved, or use another --run-dir\n")
    assert start(f"{file} --lr 0.5 --weight-decay 0.5 --expert-loads-every 5") == [
        "expert_loads_every: 10 -> 5 (does not change the numbers)",
        "optimizer.lr: 0.003 -> 0.5 (changes the numbers)",
        "optimizer.weight_decay: 0.1 -> 0.5 (changes the numbers)",
    ]
    groups = read_manifest(steps / "step-000002").facts.optimizer or []
    assert {group["weight_decay"] for group in groups if group["params"]} == {0.0, 0.5}
    assert tomllib.loads(file.read_text())["optimizer"]["lr"] == 0.5
    assert metrics(run_dir)[1]["lr"] != straight[1]["lr"]
    file.write_text("seed = ")
    assert start(f"{words} --run-dir {run_dir}") == [] and "seed = 0\n" in file.read_text()


def test_the_rows_of_a_step_determine_its_micro_batches() -> None:
    from moecore.recipes.pretrain import parse_arguments

    words = ["--tokens", "random", "--preset", "tiny", "--batch-size", "2", "--run-dir", "runs/x"]
    args = parse_arguments([*words, "--global-batch-size", "24"])
    assert [args.count_micro_batches(ranks) for ranks in (1, 2, 3, 4)] == [12, 6, 4, 3]
    assert parse_arguments([*words, "--grad-accum", "5"]).count_micro_batches(7) == 5
    both = parse_arguments([*words, "--global-batch-size", "24", "--grad-accum", "2"])
    for wrong, ranks in ((args, 5), (both, 3)):
        with pytest.raises(ValueError, match=r"^--global-batch-size \(24\) must be a multiple of"):
            wrong.count_micro_batches(ranks)
