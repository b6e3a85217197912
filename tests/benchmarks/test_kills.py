import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import kills
from safetensors.torch import save_file

from moecore.moe.router import Router
from tests.integrations.torchft_runs import MODEL, TIE, RecordedChoices, Replay


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
    """The process that repeats them gets the choices, also those of a rank that was killed."""
    rows = rows_of_replicas()
    keys = ("place", "rank")
    forwards = [
        {key: row[key] for key in keys} | {"choices": [row["place"][1], row["rank"]]}
        for row in rows
    ]
    del rows[-1]  # of a rank that was killed after the step had counted

    def repeat(choices: dict[int, Any]) -> list[Replay]:
        in_order = [[0, 0], [0, 1], [1, 0], [1, 1]]
        assert list(choices.values()) == [in_order, in_order[:2], in_order]
        return [Replay(1.0, [4.0] * len(x), [1e-5, 1e-3][:step]) for step, x in choices.items()]

    monkeypatch.setattr(kills, "replayed", repeat)
    figures = kills.compare_replicas(rows, forwards, 2, 7.0)
    assert (figures["steps"], figures["lost_steps"], figures["full_steps"]) == (3, 1, 2)
    assert (figures["difference"], figures["longest_pause_s"]) == (0.0, 3.0)
    assert figures["goodput"] == pytest.approx(3 / 7)
    assert (figures["other_choices"], figures["largest_gap"]) == (3, 1e-3)
    assert figures["routing_faults"] == [(2, 1e-3)]
    rows = rows_of_replicas()
    rows[0]["loss"] = 4.5
    assert kills.compare_replicas(rows, forwards, 2, 7.0)["difference"] == 0.125
    rows[0]["digest"] = "b"  # of rank 0, of which replica 1 has another one
    with pytest.raises(AssertionError, match="replicas differ"):
        kills.compare_replicas(rows, forwards, 2, 7.0)
    with pytest.raises(AssertionError, match="a step is missing"):
        kills.compare_replicas(rows_of_replicas()[4:], forwards, 2, 7.0)


def test_only_ties_of_scores_explain_other_experts() -> None:
    """Experts 2 and 3 have equal scores, and of the two the router chooses the lower id."""
    router = Router(MODEL.moe)
    router.init_weights(std=1.0, key="", seed=0)
    router.weight.data[3] = router.weight.data[2]
    x_TD = torch.randn(64, MODEL.dim, generator=torch.Generator().manual_seed(0))
    ids_TK = router(x_TD).chosen_ids_TK
    token = int(((ids_TK == 2).any(1) & ~(ids_TK == 3).any(1)).nonzero()[0])
    tied_TK, wrong_TK = ids_TK.clone(), ids_TK.clone()
    tied_TK[token][ids_TK[token] == 2] = 3
    wrong_TK[token] = (ids_TK[token] + 4) % 8
    tape = RecordedChoices(router)
    for recorded_TK in (ids_TK, tied_TK, wrong_TK):
        tape.of_forwards = iter([recorded_TK.tolist()])
        assert torch.equal(router(x_TD).chosen_ids_TK, recorded_TK)
    tied, wrong = tape.gaps
    assert tied < TIE / 100 and wrong > TIE
