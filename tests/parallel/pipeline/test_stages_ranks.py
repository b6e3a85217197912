"""Stages under cp, tp, ep and sharding against the whole model on the same ranks, to the bit.

Four ranks are spawned once. Each has all stages of a model, and hands its own tokens on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore import ParallelConfig, build_meshes, parallelize_moe
from moecore.models import Decoder, preset
from tests.families.transformers.hf_models import random_model
from tests.helpers.ranks import run_ranks
from tests.parallel.pipeline.emulated import run_on

ROWS, TOKENS = 2, 32
CUTS = torch.tensor([0, 8, 32, 48, 64], dtype=torch.int32)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of three layers and its meshes."""

    model: str
    parallel: dict[str, int]
    packed: bool = False

    @property
    def layout(self) -> str:
        return "Et||tt|m|mL" if self.model == "decoder" else "Et||t|L"


CASES = {
    "cp and tp, rows": Case(model="decoder", parallel=dict(cp=2, tp=2, ep=4)),
    "cp and tp, documents": Case(model="decoder", parallel=dict(cp=2, tp=2, ep=2), packed=True),
    "sharded, with experts over ranks": Case(model="decoder", parallel=dict(ep=2)),
    "transformers, cp, rows": Case(model="qwen3-moe", parallel=dict(cp=2, ep=2)),
    "transformers, cp, documents": Case(model="qwen3-moe", parallel=dict(cp=4, ep=4), packed=True),
}


def make(case: Case) -> nn.Module:
    if case.model != "decoder":
        return random_model(case.model, num_hidden_layers=2)
    config = replace(preset("tiny-deepseek-v3"), num_mtp_layers=2)
    model = Decoder(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" not in name:
                param.mul_(6.0)
    return model


def inputs_of(case: Case, data_rank: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(data_rank)
    ids = torch.randint(0, 61, (ROWS, TOKENS), generator=g)
    labels = ids.roll(-1, 1).masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -100)
    names = ("tokens_BT", "labels_BT") if case.model == "decoder" else ("input_ids", "labels")
    inputs: dict[str, Any] = dict(zip(names, (ids, labels), strict=True))
    return inputs | (dict(cu_seqlens=CUTS, max_seqlen=24) if case.packed else {})


def run_whole(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    if isinstance(model, Decoder):
        loss: Tensor = model(**inputs)
    else:
        loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad()
    return {
        name: (grad.to_local() if isinstance(grad, DTensor) else grad).clone()
        for name, grad in found.items()
        if grad is not None
    }


def worker(rank: int, device: torch.device) -> dict[str, tuple[list[str], list[tuple[int, ...]]]]:
    found = {}
    for name, case in CASES.items():
        meshes = build_meshes(ParallelConfig(**case.parallel), "cpu")
        model, inputs = make(case), inputs_of(case, meshes.data_rank)
        parallelize_moe(model, meshes)
        loss = run_whole(model, inputs)
        expected = gradients(model)
        result = run_on([model], case.layout, inputs, backward=True)
        got = gradients(model)
        wrong = [] if torch.equal(loss, result.output) else ["loss"]
        wrong += got.keys() ^ expected.keys()
        wrong += [n for n in got.keys() & expected.keys() if not same(n, got[n], expected[n])]
        every: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, wrong)
        found[name] = [name for names in every for name in names], result.shapes
    return found


def same(name: str, got: Tensor, expected: Tensor) -> bool:
    """Whether gradients are equal; those of several lookups of the table are added in turn."""
    if name == "model.embed_tokens.weight":
        return bool((got - expected).abs().max() <= 1e-6 * expected.abs().max())
    return torch.equal(got, expected)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    result: dict[str, Any] = run_ranks(4, worker)
    return result


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_the_whole(name: str, found: dict[str, Any]) -> None:
    assert found[name][0] == []


def test_hidden_states_are_those_of_own_tokens(found: dict[str, Any]) -> None:
    assert found["cp and tp, documents"][1] == [(2, 8, 64), (2, 8, 64), (2, 2, 8, 64)]
    assert found["transformers, cp, documents"][1] == [(2, 8, 32), (2, 8, 32)]
