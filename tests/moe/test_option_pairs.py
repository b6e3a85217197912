"""Options in pairs: every two values that may go together do so in some config, and agree with the
oracle there; every two that may not are refused by a rule that names both.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.moe.moe_cases import compare_with_oracle, make_layer
from tests.moe.pair_table import (
    NAMES,
    TABLE,
    Choice,
    all_pairs,
    config_of,
    covering_choices,
    name_of,
    neutral,
    refusals,
)

CHOICES = covering_choices()


def test_neutral_values_go_with_every_value() -> None:
    for option, values in TABLE.items():
        for value in values:
            config_of({option: value})
        for other in TABLE:
            if other != option:
                pairs = [((option, neutral()[option]), (other, value)) for value in TABLE[other]]
                assert not any(pair in refusals() for pair in pairs)


def test_every_valid_pair_is_covered() -> None:
    covered = {pair for choice in CHOICES for pair in combinations(choice.items(), 2)}
    missing = [pair for pair in all_pairs() if pair not in covered and pair not in refusals()]
    assert not missing
    assert not covered & refusals().keys()
    assert len(CHOICES) <= 70, "few enough to run on every change"


@pytest.mark.parametrize("pair", refusals(), ids=lambda pair: "-".join(v for _, v in pair))
def test_a_refused_pair_is_named_by_its_rule(pair: Any) -> None:
    message = refusals()[pair]
    assert message.startswith("MoEConfig.") and "\n" not in message
    for option, _ in pair:
        assert any(name in message for name in NAMES.get(option, (option,))), message


def padding_of(choice: Choice, B: int, T: int) -> Tensor | None:
    if choice["padding"] == "no":
        return None
    return torch.arange(T) >= T - 2 * torch.arange(B)[:, None] - 1


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("choice", CHOICES, ids=name_of)
def test_against_the_oracle(choice: Choice, training: bool) -> None:
    layer = make_layer(config_of(choice)).train(training)
    layer.get_part("experts").set_backend(choice["backend"])

    def forward(x: Tensor, mask: Tensor | None) -> Any:
        if choice["recompute"] == "no":
            return layer(x, mask)
        return checkpoint(layer, x, mask, use_reentrant=choice["recompute"] == "reentrant")

    x = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(2))
    compare_with_oracle(layer, x, padding_mask=padding_of(choice, 3, 8), forward=forward)
