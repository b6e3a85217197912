import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import kills
from safetensors.torch import save_file

from moecore import TrainStep
from tests.integrations.torchft_runs import Repetition, repeat_steps


def test_a_line_that_is_cut_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert kills.read_last(file, "step") == 0
    file.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert kills.read_last(file, "step") == 2


def write_run(run_dir: Path, losses: list[float], tensors: list[dict[str, Any]]) -> Path:
    checkpoint = run_dir / f"checkpoints/step-{len(losses):06}"
    checkpoint.mkdir(parents=True)
    lines = [json.dumps({"step": i, "loss": x}) for i, x in enumerate(losses, start=1)]
    (run_dir / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for rank, blocks in enumerate(tensors):
        save_file(blocks, checkpoint / f"rank-{rank:05}.safetensors")
    return run_dir


def test_losses_and_tensors_are_compared_by_their_bits(tmp_path: Path) -> None:
    """Another rank may have written the replica of a tensor; a block may not be another rank's."""
    a, b, c = (torch.tensor([float(x)]) for x in range(3))
    first = write_run(tmp_path / "first", [2.0, 1.0], [{"w": a, "step": c}, {"w": b}])
    again = write_run(tmp_path / "again", [2.0, 1.0], [{"w": a}, {"w": b, "step": c}])
    other = write_run(tmp_path / "other", [2.0, 1.25], [{"w": b, "step": c}, {"w": a, "x": c}])
    same = kills.compare_commands(again, first)
    assert same == {"difference": 0.0, "differing_losses": 0, "differing_tensors": 0}
    found = kills.compare_commands(other, first)
    assert found == {"difference": 0.25, "differing_losses": 1, "differing_tensors": 2}


def rows_of_replicas() -> list[dict[str, Any]]:
    """Return the rows of three steps of two replicas with two ranks; one leaves before step 1."""
    places = [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 0, 1), (2, 0, 2), (2, 1, 2)]
    rows = []
    for number, place in enumerate(places):
        for rank in range(2):
            row = {"place": list(place), "rank": rank, "loss": 4.0, "seconds": 1.0}
            row |= {"ended": 10.0 + number} | {"norm": 1.0, "chosen": 8 * place[2], "digest": "a"}
            rows.append(row if number != 2 else {k: row[k] for k in ("place", "rank", "loss")})
    return rows


def test_steps_of_replicas_are_counted_and_compared(monkeypatch: Any) -> None:
    rows = rows_of_replicas()
    del rows[-1]  # of a rank that was killed after the step had counted

    def repeat(sizes: list[int]) -> list[Repetition]:
        assert sizes == [2, 1, 2]
        return [Repetition(1.0, [4.0] * 2 * size) for size in sizes]

    monkeypatch.setattr(kills, "repeat_steps", repeat)
    figures = kills.compare_replicas(rows, 2, 7.0)
    assert (figures["steps"], figures["lost_steps"], figures["full_steps"]) == (3, 1, 2)
    assert (figures["difference"], figures["longest_pause_s"]) == (0.0, 3.0)
    assert figures["goodput"] == pytest.approx(3 / 7)
    rows = rows_of_replicas()
    rows[0]["loss"] = 4.5
    assert kills.compare_replicas(rows, 2, 7.0)["loss_difference"] == 0.125
    rows[0]["digest"] = "b"  # of rank 0, of which replica 1 has another one
    with pytest.raises(AssertionError, match="replicas differ"):
        kills.compare_replicas(rows, 2, 7.0)
    with pytest.raises(AssertionError, match="a step is missing"):
        kills.compare_replicas(rows_of_replicas()[4:], 2, 7.0)


@pytest.mark.parametrize("fault", ["none", "gradients twice", "weights in fp32"])
def test_a_fault_in_one_step_exceeds_the_bounds(fault: str, monkeypatch: Any) -> None:
    """The only replica of step 1 counts twice, or its weights lose the bits that fp32 lacks."""
    finish, steps = TrainStep.finish, count()

    def finish_with_fault(step: TrainStep) -> Any:
        if next(steps) == 1:
            for param in step.model.parameters():
                if fault == "gradients twice" and param.grad is not None:
                    param.grad *= 2
                elif fault == "weights in fp32":
                    param.data.copy_(param.data.float())
        return finish(step)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "finish", finish_with_fault)
        steps_made = repeat_steps([2, 1, 2])
    rows = rows_of_replicas()
    for row in rows:
        step, replica, _ = row["place"]
        if "norm" in row:
            row["norm"] = steps_made[step].norm
            row["loss"] = steps_made[step].losses[2 * replica + row["rank"]]
    assert bool(kills.count_problems(kills.compare_replicas(rows, 2, 7.0))) == (fault != "none")
