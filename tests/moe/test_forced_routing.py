"""Forced even loads: the choice by closed form, weights and gradients by the oracle."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from moecore import BalanceConfig
from moecore.base.options.layer import CapacityConfig
from moecore.moe import forced_routing as fr
from tests.moe import moe_cases as mc

CPU = torch.device("cpu")


def test_ids_by_hand() -> None:
    assert fr.make_even_ids(5, 8, 2, CPU).tolist() == [[0, 3], [6, 1], [4, 7], [2, 5], [0, 3]]
    assert fr.make_even_ids(0, 8, 2, CPU).shape == (0, 2)


@pytest.mark.parametrize(
    ("T", "E", "K"), [(12, 12, 3), (8, 12, 3), (24, 12, 1), (5, 12, 12), (7, 12, 5), (9, 13, 5)]
)
def test_loads_are_even_and_experts_distinct(T: int, E: int, K: int) -> None:
    ids_TK = fr.make_even_ids(T, E, K, CPU)
    counts = torch.bincount(ids_TK.flatten(), minlength=E)
    assert int(counts.max() - counts.min()) <= 1
    assert all(len(set(row)) == K for row in ids_TK.tolist())
    first = max(1, 2 * E // (3 * K))
    step = next(n for n in range(first, 2 * E + 1) if math.gcd(n, E) == 1)
    assert ids_TK.tolist() == [[(t * K + k) * step % E for k in range(K)] for t in range(T)]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "fields",
    [
        {"balance": mc.ALL_LOSSES},
        {"score_order": "post", "expert_bias": True},
        {"score_function": "sigmoid", "capacity": CapacityConfig(factor=0.8)},
        {"assignment": "sinkhorn", "top_k": 8},
    ],
    ids=str,
)
def test_against_the_oracle(fields: dict[str, Any], training: bool) -> None:
    layer = mc.make_layer(replace(mc.BASE, **fields)).train(training)
    fr.force_even_load(layer)
    given = fr.make_even_ids(21, 8, layer.config.top_k, CPU)
    for mask in (None, mc.padding(3, 7)):
        layer.tracker.counts = None
        layer.zero_grad()
        mc.compare_with_oracle(layer, mc.tokens(3, 7, 32), padding_mask=mask, given_ids_NK=given)


def test_no_bias_moves_and_expert_choice_stays() -> None:
    quantile = BalanceConfig(
        z_loss_coef=0.1, bias_update="quantile", bias_update_rate=1.0, bias_per_micro_batch=True
    )
    fields = dict(score_function="sigmoid", expert_bias=True, balance=quantile)
    layer, chosen = (
        mc.make_layer(replace(mc.BASE, **fields)),
        mc.make_layer(mc.OPTIONS["expert-choice"]),
    )
    fr.force_even_load(torch.nn.ModuleList([layer, chosen]))
    assert layer.config.balance == layer.router.config.balance == BalanceConfig(z_loss_coef=0.1)
    assert chosen.router.forced_ids is None


def test_a_forced_layer_is_one_graph_in_eval() -> None:
    layer = mc.make_layer(mc.BASE).eval()
    fr.force_even_load(layer)
    router = torch.compile(layer.router, backend="aot_eager", fullgraph=True)
    x_TD = mc.tokens(12, 32)
    assert torch.equal(router(x_TD).expert_ids_TK, fr.make_even_ids(12, 8, 2, CPU))
