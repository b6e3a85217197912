"""Copies of the table on several stages stay equal; a bad stage stops all of them.

Steps that equal one process are part of `test_parity.py`.
"""

import math
import re
import warnings
from typing import Any

import torch
import torch.distributed as dist

from moecore import ParallelConfig, TrainStep, build_meshes, clip_grad_norm_, parallelize_moe
from moecore.base.rank_checks import gather_objects
from moecore.models import Decoder
from moecore.parallel.model.parallel_state import all_reduce_stage_copies, find_staged_module
from tests.helpers.errors import error_of
from tests.helpers.ranks import ranks_fixture
from tests.parallel.pipeline.stages import (
    CONFIG,
    LAYOUTS,
    TABLE,
    build,
    local,
    plain,
    set_gradients,
)

STEPS = 5


def num_copies(layout: str) -> int:
    return len(LAYOUTS[layout][1])


def optimizer_of(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def drift(layout: str) -> bool:
    """Whether holders' tables stay equal to the bit, with gradients whose sums are rounded."""
    model = build(layout)
    optimizer = optimizer_of(model)
    table = dict(model.named_parameters()).get(TABLE)
    for step in range(STEPS):
        set_gradients(model, step)
        if table is not None:
            torch.manual_seed(10 * step + dist.get_rank())
            local(table.grad).copy_(torch.randn_like(local(table)) * 10.0 ** (dist.get_rank() - 2))
        all_reduce_stage_copies(model)
        clip_grad_norm_(model, 0.1)
        optimizer.step()
    tables = [t for t in gather_objects(None if table is None else local(table)) if t is not None]
    assert len(tables) == num_copies(layout)
    return all(torch.equal(tables[0], other) for other in tables[1:])


def missing_gradient() -> bool:
    """Whether a holder without a gradient gets that of the others."""
    model = build("quarters")
    table = dict(model.named_parameters()).get(TABLE)
    set_gradients(model, 0)
    if dist.get_rank() == 0:
        table.grad = None
    all_reduce_stage_copies(model)
    found = gather_objects(None if table is None else local(table.grad))
    whole = plain()
    set_gradients(whole, 0, scale=2.0)
    wanted = whole.model.embed_tokens.weight.grad
    return all(torch.equal(f, wanted) for i, f in enumerate(found) if i != 1)


def skip(bad_rank: int, *, fused: bool) -> dict[str, Any]:
    """A nan on one stage."""
    model = build("halves")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    step = TrainStep(model, optimizer, max_norm=1.0)
    before = [local(p).clone() for p in model.parameters()]
    with step.micro_batches():
        set_gradients(model, 0)
    name, param = list(model.named_parameters())[-1]
    if dist.get_rank() == bad_rank:
        local(param.grad).view(-1)[0] = math.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = step.finish()
    kept = all(torch.equal(a, local(b)) for a, b in zip(before, model.parameters(), strict=True))
    return {
        "kept": gather_objects(kept),
        "names": gather_objects(done.norm.non_finite),
        "wanted": gather_objects(name)[bad_rank],
        "warned": fused or all(gather_objects(bool(caught))),
    }


def refusals() -> dict[str, list[str]]:
    """What each rank is told about stages that do not fit."""

    def refused(change: Any) -> list[str]:
        meshes = build_meshes(ParallelConfig(pp=2), "cpu")
        model = Decoder(CONFIG)
        model.init_weights(0)
        change(model)
        pipeline = LAYOUTS["halves"][0]
        return gather_objects(error_of(lambda: parallelize_moe(model, meshes, pipeline=pipeline)))

    def table(model: Decoder) -> None:
        if dist.get_rank() >= 2:
            with torch.no_grad():
                model.model.embed_tokens.weight[61, 0] += 1  # only one of its shards has it

    def weights(model: Decoder) -> None:
        if dist.get_rank() == 3:
            with torch.no_grad():
                model.model.norm.weight[0] += 1

    return {f.__name__: refused(f) for f in (table, weights)}


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    return {
        "drift": drift("quarters"),
        "missing": missing_gradient(),
        "skip": [skip(bad, fused=fused) for bad in (0, 3) for fused in (False, True)],
        "refusals": refusals(),
    }


results = ranks_fixture(4, worker)


def test_copies_stay_equal(results: dict[str, Any]) -> None:
    assert results["drift"] and results["missing"]


def test_nan_of_a_stage_skips_the_step_of_all(results: dict[str, Any]) -> None:
    for result in results["skip"]:
        assert result["kept"] == [True] * 4 and result["warned"]
        assert result["names"] == [(result["wanted"],)] * 4


def test_stages_that_do_not_fit_are_refused_on_every_rank(results: dict[str, Any]) -> None:
    found = results["refusals"]
    assert all(f"weights of {TABLE} must be equal on the" in error for error in found["table"])
    weights = found["weights"]
    of_stage = "weights of model.norm.weight .* of a pipeline stage"
    assert all(re.match(of_stage, error) for error in weights), weights


def test_a_model_without_stages_has_nothing_to_sum() -> None:
    model = plain()
    set_gradients(model, 0)
    before = model.model.embed_tokens.weight.grad.clone()
    all_reduce_stage_copies(model)
    assert torch.equal(model.model.embed_tokens.weight.grad, before)
    assert find_staged_module(model) == (model, None)
