"""Options in pairs: every two values that may go together do so in some config, and agree with the
oracle there; every two that may not are refused by a rule that names both.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.moe import pair_table as pt
from tests.moe.moe_cases import compare_with_oracle, make_layer

CHOICES = pt.covering_choices()


@pytest.mark.parametrize("pair", pt.refusals(), ids=lambda pair: "-".join(v for _, v in pair))
def test_a_refused_pair_is_named_by_its_rule(pair: Any) -> None:
    message = pt.refusals()[pair]
    assert message.startswith("MoEConfig.") and "\n" not in message
    for option, _ in pair:
        assert any(name in message for name in pt.NAMES.get(option, (option,))), message


def padding_of(choice: pt.Choice, B: int, T: int) -> Tensor | None:
    if choice["padding"] == "no":
        return None
    return torch.arange(T) >= T - 2 * torch.arange(B)[:, None] - 1


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("choice", CHOICES, ids=pt.name_of)
def test_against_the_oracle(choice: pt.Choice, training: bool) -> None:
    layer = make_layer(pt.config_of(choice)).train(training)
    layer.get_part("experts").set_backend(choice["backend"])

    def forward(x: Tensor, mask: Tensor | None) -> Any:
        if choice["recompute"] == "no":
            return layer(x, mask)
        return checkpoint(layer, x, mask, use_reentrant=choice["recompute"] == "reentrant")

    x = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(2))
    compare_with_oracle(layer, x, padding_mask=padding_of(choice, 3, 8), forward=forward)
