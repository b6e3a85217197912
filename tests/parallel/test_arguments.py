"""Ranks that share rows but are given other arguments: every rank raises before it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecore import (
    ContextOptions,
    MoEConfig,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.failures import RankError
from moecore.models import Decoder, DecoderConfig
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.slow

WORLD, ROWS, LENGTH = 4, 2, 8
ODD = 1  # the rank that is given something else
CONFIG = DecoderConfig(
    vocab_size=60,
    dim=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    max_seq_len=4 * LENGTH,
    moe=MoEConfig(dim=16, hidden_dim=8, num_experts=4, top_k=2),
)
# Ranks 0 and 1 share rows, and so do 2 and 3; with stages 0 and 2 as well, and 1 and 3.
LAYOUTS: dict[str, tuple[ParallelConfig, dict[str, Any], dict[str, Any]]] = {
    "tp": (ParallelConfig(tp=2), {}, {}),
    "cp": (ParallelConfig(cp=2), {}, {}),
    "dynamic cp": (
        ParallelConfig(ep=2),
        dict(context=ContextOptions(dynamic=True), loss="sum"),
        dict(cp=2, num_tokens=2 * ROWS * LENGTH),
    ),
    "stages": (ParallelConfig(pp=2, tp=2), dict(pipeline=PipelineConfig(schedule="1f1b")), {}),
}
Change = Callable[[dict[str, Any]], Any]


def with_documents(given: dict[str, Any]) -> None:
    ends = torch.arange(0, ROWS * LENGTH + 1, LENGTH // 2, dtype=torch.int32)
    given |= dict(cu_seqlens=ends, max_seqlen=LENGTH // 2)


def with_mask(given: dict[str, Any]) -> None:
    given["padding_mask_BT"] = torch.arange(LENGTH).expand(ROWS, LENGTH) == LENGTH - 1


CHANGES: dict[str, tuple[Change, str]] = {
    "tokens": (lambda given: given["tokens_BT"].add_(1), "tokens_BT"),
    "labels": (lambda given: given["labels_BT"].neg_(), "labels_BT"),
    "number of labels": (lambda given: given.update(num_tokens=8 * LENGTH), "num_tokens"),
    "length": (
        lambda given: given.update({n: given[n][:, 2:] for n in ("tokens_BT", "labels_BT")}),
        "tokens_BT",
    ),
    "documents": (with_documents, "names of arguments"),
    "padding": (with_mask, "names of arguments"),
}


def inputs(seed: int, more: Mapping[str, Any]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(1, 60, (2, ROWS, LENGTH), generator=generator)
    return dict(tokens_BT=tokens, labels_BT=labels, num_tokens=4 * LENGTH) | dict(more)


def run(layout: str, change: Change | None, *, steps: int = 1) -> tuple[str | None, Tensor | None]:
    """Return the error of a model's last step, and the loss of the step before."""
    parallel, options, more = LAYOUTS[layout]
    torch.manual_seed(0)
    meshes = build_meshes(parallel, "cpu")
    model: Any = parallelize_moe(Decoder(CONFIG), meshes, **options)
    step, loss = TrainStep(model, num_micro_batches=1), None
    data = dist.get_rank() // 2 if layout == "dynamic cp" else meshes.data_rank
    for last in range(steps):
        given = inputs(data, more)
        if last:
            given |= {n: given[n].repeat(1, 2) for n in ("tokens_BT", "labels_BT")}
        odd = [ODD, WORLD - 1] if last else [ODD]  # later ones are compared where rows are shared
        if change is not None and last == steps - 1 and dist.get_rank() in odd:
            change(given)
        try:
            loss = step.forward_backward([given])
        except ValueError as error:
            step.drop()
            return str(error), loss
        step.finish()
    return None, loss


def line_of_a_rank_that_compares_alone() -> str:
    """Return the error of a comparison that other ranks, without new shapes, do not make."""
    ended = RuntimeError("gloo timed out")
    with patch("moecore.parallel.arguments.difference", side_effect=ended):
        try:
            run("tp", None)
        except RankError as error:
            return str(error)
    return ""


def worker(rank: int, _device: torch.device) -> Any:
    found: dict[Any, Any] = {"alone": line_of_a_rank_that_compares_alone()}
    for layout in LAYOUTS:
        found[layout, "first"] = {name: run(layout, how)[0] for name, (how, _) in CHANGES.items()}
        found[layout, "right"] = run(layout, None, steps=2)
        found[layout, "longer"] = run(layout, CHANGES["tokens"][0], steps=2)
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, found)
    return every


@pytest.fixture(scope="module")
def found() -> Any:
    return run_ranks(WORLD, worker, over_gloo=True)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_forward_refuses_other_arguments(layout: str, change: str, found: Any) -> None:
    errors = [of_rank[layout, "first"][change] for of_rank in found]
    assert all("must be the same on ranks that share rows" in e for e in errors[: ODD + 1]), errors
    assert all(CHANGES[change][1] in e for e in errors[: ODD + 1]), errors
    assert "meshes.data_rank" in errors[ODD]
    assert all(error is not None for error in errors), "every rank raises"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_arguments_train(layout: str, found: Any) -> None:
    for of_rank in found:
        error, loss = of_rank[layout, "right"]
        assert error is None and loss is not None and loss.isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_forward_of_new_shapes_refuses_other_arguments(layout: str, found: Any) -> None:
    for of_rank in found:
        error, loss = of_rank[layout, "longer"]
        assert loss is not None and "tokens_BT" in error


def test_a_rank_that_compares_alone_names_the_rows(found: Any) -> None:
    assert all("shapes of rows, which ranks take by meshes.data_rank" in f["alone"] for f in found)
