import math
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState
from transformers import Trainer

from tests.helpers.grids import asked_for
from tests.helpers.ranks import run_ranks
from tests.integrations.trainer_runs import (
    DYNAMIC,
    OF_ROWS,
    against_stock,
    best_model,
    enter_launcher,
    exported,
    furthest,
    in_fp16,
    make_model,
    over_cp,
    over_dynamic_cp,
    over_tp,
    packs,
    padded,
    resumed,
    rows_of,
    skipped,
    trainer_of,
)

pytestmark = pytest.mark.slow

# An epoch has 7 rows for each rank, in 4 micro-batches of which the last has one row.
PARITY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tokens of all ranks": (dict(num_train_epochs=2, eval_strategy="epoch"), {}),
    "tokens of each rank": (dict(max_steps=3, average_tokens_across_devices=False), {}),
    "a step of one batch": (dict(max_steps=3, gradient_accumulation_steps=3, max_grad_norm=0), {}),
    "smoothed labels": (dict(max_steps=2, label_smoothing_factor=0.1), {}),
    "own balance loss": (dict(max_steps=2), dict(output_router_logits=True)),
}


def parity_and_files(rank, device, folder, cases=tuple(PARITY)):
    enter_launcher(rank, device, folder)
    found: dict[str, Any] = {
        name: against_stock(f"{folder}/parity", options, **config)
        for name, (options, config) in PARITY.items()
        if name in cases
    }
    return found | {"exported": exported(f"{folder}/exported")}


def worker(rank: int, device: torch.device, folder: str, cases: Collection[str]) -> dict[str, Any]:
    found = parity_and_files(rank, device, folder, cases)
    found["packed"] = packs(f"{folder}/packed")
    found["cp"] = over_cp(f"{folder}/cp")
    found["tp"] = over_tp(f"{folder}/tp")
    found["dynamic"] = over_dynamic_cp(f"{folder}/dynamic")
    found["resumed"] = resumed(f"{folder}/resumed")
    found["skipped"] = skipped(f"{folder}/skipped")
    found["fp16"] = in_fp16(f"{folder}/fp16")
    found["best"] = best_model(f"{folder}/best")
    if find_spec("trl") is not None:
        from tests.integrations import trl_runs

        for name in cases:
            if name not in PARITY:
                found[name] = getattr(trl_runs, name)(f"{folder}/{name}")
    return found


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    cases = dict.fromkeys(["tokens of all ranks", *asked_for(request, "case"), "grpo"])
    folder = str(tmp_path_factory.mktemp("trainer"))
    return run_ranks(2, worker, folder, [*cases], over_gloo=True)  # DDP


@pytest.mark.parametrize("case", PARITY)
def test_equals_stock_trainer_under_ddp(case: str, results: dict[str, Any]) -> None:
    check_parity(results[case])


def check_parity(found: dict[str, Any]) -> None:
    for ours, stock in zip(found["ours"], found["stock"], strict=True):
        assert ours == pytest.approx(stock, rel=1e-6)
    assert len(found["ours"][0]) >= 2
    error, name = found["error"]
    assert error <= 2 * found["stock error"][0], (name, error, found["stock error"])
    assert found["stock error"][0] < 1e-5 and found["moved"][0] > 1e-3


def test_packed_documents_train_as_padded_ones(results: dict[str, Any]) -> None:
    found = results["packed"]
    stock, ours, resumed = found["logs"]
    assert len(ours[0]) == 4 and ours[0] == pytest.approx(stock[0], rel=1e-5)
    assert ours[1] == pytest.approx(stock[1], rel=1e-5)
    assert ours[2] == stock[2] and len(ours[2]) >= 4  # tokens that are no padding
    assert found["distance"][0] <= 1e-5, found["distance"][1]
    assert resumed == ours and found["resumed"] == 0.0 < found["stopped"]


def rows_of_stock(folder: Path, **options: Any) -> Any:
    """Train by stock Trainer in this process, and leave its state as it was."""
    AcceleratorState._reset_state(reset_partial_state=True)
    stock = trainer_of(Trainer, make_model(), str(folder), **options)
    stock.train()
    AcceleratorState._reset_state(reset_partial_state=True)
    return rows_of(stock)


def test_cp_and_tp_ranks_train_on_the_same_rows(results, no_group_left, tmp_path):
    """Against stock Trainer in one process, each document in a row of its own."""
    wanted, weights = rows_of_stock(tmp_path, collate=padded, **OF_ROWS)
    for ours, found in (results["cp"], results["tp"]):
        for one, other in zip(ours, wanted, strict=True):
            assert len(one) >= 2 and one == pytest.approx(other, rel=1e-5)
        distance, name = furthest(found, weights)
        assert distance <= 1e-5, name


def test_a_cp_for_each_micro_batch_trains_the_same(results, no_group_left, tmp_path):
    """Against stock Trainer in one process, each document in a row of its own."""
    (wanted, weights), dynamic = rows_of_stock(tmp_path, **DYNAMIC), results["dynamic"]
    (ours, found), _, (resumed, again) = dynamic["runs"]
    assert dynamic["cps"] == {1, 2}
    for one, other in zip(ours, wanted, strict=True):
        assert len(one) >= 2 and one == pytest.approx(other, rel=1e-5)
    distance, name = furthest(found, weights)
    assert distance <= 1e-5, name
    assert resumed == ours and furthest(again, found)[0] == 0.0
    assert dynamic["refused"].startswith("documents or plan ('")
    assert dynamic["refused"].endswith(
        "must be the same on every rank: give all ranks the same dataset, seed and "
        "ScheduledCollator but for its data_rank"
    )


def test_evaluation_and_metrics_are_logged(results: dict[str, Any]) -> None:
    found = results["tokens of all ranks"]
    assert len(found["ours"][3]) == 2
    assert {f"expert_load/model.layers.{i}.mlp" for i in range(2)} <= found["log"].keys()
    assert not any(name.startswith("z_loss") for name in found["log"])  # not in use


def test_fp16_scales_losses_and_goes_on_with_the_scale(results: dict[str, Any]) -> None:
    found = results["fp16"]
    wide, once, after = found["wide"], found["once"], found["after"]
    assert once[2] == [2.0**16, 2.0**16, 2.0**15, 2.0**15] and wide[2] == []
    assert once[0][0] == pytest.approx(wide[0][0], rel=1e-3)
    assert once[1][0] == pytest.approx(wide[1][0], rel=1e-2)
    for all_steps, last_steps in zip(once, after, strict=True):
        assert last_steps[-2:] == all_steps[2:]
    assert found["distance"] == 0.0


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(results: dict[str, Any]) -> None:
    found = results["resumed"]
    assert found["losses"][0] == found["losses"][1] and found["draws"][0] == found["draws"][1]
    assert found["distance"][0] == 0.0 and found["checkpoints"] == ["step-000006"]
    assert "must have no checkpoints (step-000006)" in found["refusal"]


def test_a_nan_on_one_rank_skips_the_step_on_all(results: dict[str, Any]) -> None:
    second, third = results["skipped"]
    assert second == 0.0 and third > 0.0


def test_the_best_model_is_loaded_at_the_end(results: dict[str, Any]) -> None:
    found = results["best"]
    best = max(found["losses"])
    assert best > found["losses"][-1]
    assert found["best"] == f"step-{found['losses'].index(best) + 1:06d}"
    assert math.isclose(found["now"], best, rel_tol=1e-6)


def test_save_model_writes_what_from_pretrained_reads(results: dict[str, Any]) -> None:
    check_files(results["exported"])


def check_files(found: dict[str, Any]) -> None:
    assert found["files"] == ["config.json", "generation_config.json", "model.safetensors"]
    assert found["distance"][0] == found["read"][0] == 0.0


@pytest.mark.gpu
def test_on_gpus(tmp_path: Path) -> None:
    found = run_ranks(2, parity_and_files, str(tmp_path), device_type="cuda")
    check_files(found.pop("exported"))
    for name in PARITY:
        check_parity(found[name])


@pytest.mark.parametrize("case", ["sft", "dpo", "grpo"])
def test_equals_trl_under_ddp(case: str, results: dict[str, Any]) -> None:
    pytest.importorskip("trl")
    found = results[case]
    for ours, stock in zip(found["ours"], found["stock"], strict=True):
        assert len(ours) >= 1 and ours == pytest.approx(stock, rel=1e-6, abs=1e-6)
    distance, name = found["distance"]
    assert distance <= 1e-6, name


def test_ranks_sample_as_trl_does_and_end_apart(results: dict[str, Any]) -> None:
    pytest.importorskip("trl")
    found = results["grpo"]
    assert found["same samples"] == [True] * 2 and len(set(found["longest"])) == 2
