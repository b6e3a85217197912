import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from moecore.base.options.precision import Recipe
from moecore.precision.apply import list_quantised_linears

ARGUMENTS = (
    "--preset tiny --tokens random --num-layers 2 --batch-size 1 --seq-len 16 --sample-every 0"
    " --checkpoint-every 0 --grad-accum 2"
)


def arguments(run_dir: Path, *more: str) -> list[str]:
    return [*ARGUMENTS.split(), "--run-dir", str(run_dir), *more]


@pytest.mark.parametrize("scaling", [None, "blockwise"])
def test_experts_and_projections_get_the_recipe(train, tmp_path, scaling) -> None:
    more = ["--precision", scaling] if scaling else []
    job = train.build_job(train.parse_arguments(arguments(tmp_path, *more)))
    from moecore.recipes.loop import train_step

    dense, sparse = job.model.model.layers
    recipe = Recipe(scaling=scaling) if scaling else None
    assert sparse.mlp.get_part("experts").recipe == recipe
    assert any(list_quantised_linears(dense)) == (scaling is not None)
    assert torch.tensor(train_step(job, 1).read_metrics()[0]["loss"]).isfinite()


def test_fp16_goes_on_with_its_loss_scale(train: ModuleType, tmp_path: Path) -> None:
    from moecore.recipes.loop import train as train_to_end

    more = ["--dtype", "float16", "--checkpoint-every", "1", "--steps"]
    train_to_end(train.build_job(train.parse_arguments(arguments(tmp_path, *more, "1"))))
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (row["loss_scale"], row["skipped"]) == (2.0**16, 0.0)
    job = train.build_job(train.parse_arguments(arguments(tmp_path, *more, "2")))
    state = job.owner.state_dict()
    assert (job.start, state["loss_scale_num_good"]) == (1, 1)
    train_to_end(job)


def test_a_step_in_fp8_beside_one_without(train, tmp_path, monkeypatch, capsys) -> None:
    from benchmarks import bench_train

    own = ["--warm-up", "1", "--timed", "1", "--against-bf16"]
    own += ["--results", str(tmp_path / "results")]
    words = arguments(tmp_path, "--precision", "blockwise")
    monkeypatch.setattr(sys, "argv", ["bench_train", *own, *words])
    assert bench_train.main() == 0
    (file,) = (tmp_path / "results").iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["precision"] for row in rows] == [None, "blockwise"]
    rates = [row["tokens_per_second_per_gpu"] for row in rows]
    assert rows[1]["over_bf16"] == pytest.approx(rates[1] / rates[0], rel=1e-4)
    assert "over_bf16" not in rows[0] and "over_bf16" in capsys.readouterr().out
    assert 0 < abs(rows[0]["losses"][0] - rows[1]["losses"][0]) < 0.05


def test_without_a_precision_there_is_nothing_beside_bf16(train, tmp_path, monkeypatch, capsys):
    from benchmarks import bench_train

    monkeypatch.setattr(sys, "argv", ["bench_train", "--against-bf16", *arguments(tmp_path)])
    assert bench_train.main() == 2
    assert "--precision (None) must be set with --against-bf16" in capsys.readouterr().err
