import math

import pytest
import torch
from benchmarks.agreement import ROUNDING, ROUNDINGS, count_roundings, describe_error
from torch import Tensor

from moecore import MoEConfig, MoELayer
from moecore.base.options.precision import Recipe

FP8 = torch.float8_e4m3fn
RECIPES = {
    "bf16": None,
    "blockwise": Recipe(keep_hidden="wide"),
    "h8": Recipe(),
    "hybrid": Recipe(scaling="rowwise", grad_format="e5m2"),
}


def rounded(x: Tensor) -> Tensor:
    """Each row by its own scale to E4M3 and back."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(FP8).float() * scale


def test_one_rounding_is_what_it_is_derived_to_be() -> None:
    x = torch.randn(512, 128, generator=torch.Generator().manual_seed(0))
    error = float((rounded(x) - x).norm() / x.norm())
    assert error == pytest.approx(ROUNDING, rel=0.15)


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Tensor]]:
    """Output and gradients of one layer, by recipe."""
    torch.manual_seed(0)
    config = MoEConfig(dim=256, hidden_dim=128, num_experts=4, top_k=2)
    layer = MoELayer(config, dtype=torch.bfloat16)
    x_TD = torch.randn(192, 256, dtype=torch.bfloat16, requires_grad=True)
    dy_TD, found = torch.randn_like(x_TD), {}
    for name, recipe in RECIPES.items():
        experts = layer.get_part("experts")
        experts.set_backend("auto", recipe=recipe)
        leaves = {"x": x_TD, "w1": experts.w1, "w2": experts.w2}
        y_TD = layer(x_TD)
        grads = torch.autograd.grad(y_TD, list(leaves.values()), dy_TD)
        found[name] = {"y": y_TD.detach(), **dict(zip(leaves, grads, strict=True))}
    return found


@pytest.mark.parametrize("name", ["blockwise", "h8", "hybrid"])
def test_a_layer_in_fp8_is_let_through(results: dict[str, dict[str, Tensor]], name: str) -> None:
    recipe = RECIPES[name]
    assert recipe is not None
    for tensor, roundings in count_roundings(recipe).items():
        found, right = results[name][tensor], results["bf16"][tensor]
        assert describe_error(found, right, roundings) is None, tensor
        error = float((found.float() - right.float()).norm() / right.float().norm())
        assert error == pytest.approx(ROUNDING * math.sqrt(roundings), rel=0.25), tensor


def test_an_expert_without_tokens_has_no_error(results: dict[str, dict[str, Tensor]]) -> None:
    found, right = (results[name]["w2"].clone() for name in ("blockwise", "bf16"))
    found[1] = right[1] = 0
    assert describe_error(found, right, ROUNDINGS["w2"]) is None
    found[1, 0, 0] = 1
    assert "a row differs" in (describe_error(found, right, ROUNDINGS["w2"]) or "")


def test_what_is_not_fp8_or_wrong_is_not(results: dict[str, dict[str, Tensor]]) -> None:
    found, right = results["blockwise"]["y"], results["bf16"]["y"]

    def problem(found: Tensor) -> str:
        return describe_error(found, right, ROUNDINGS["y"]) or ""

    assert "less than one rounding" in problem(right), "it was bf16"
    assert "more than" in problem(found * 2), "a scale off by a power of two"
    one_row = found.clone()
    one_row[[5, 6]] = found[[6, 5]]
    assert problem(one_row), "two rows changed places"
    one_block = found.clone()
    one_block[:, :128] *= 2
    assert "more than" in problem(one_block), "the scales of one block are another's"
    assert "more than" in problem(found * torch.nan)
