"""Private names of torch's products: that they exist, and take what moecore gives them."""

from __future__ import annotations

import pytest
import torch

from moecore import _compat

TAKEN = {
    "_scaled_mm_v2": "self mat2 scale_a recipe_a swizzle_a scale_b recipe_b swizzle_b bias "
    "out_dtype",
    "_scaled_grouped_mm": "self mat2 scale_a scale_b offs bias scale_result out_dtype",
}


@pytest.mark.parametrize("name", TAKEN)
def test_an_operator_takes_these_arguments_in_this_order(name: str) -> None:
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    wanted = TAKEN[name].split()
    assert [a.name for a in arguments][: len(wanted)] == wanted


def test_names_are_those_operators() -> None:
    assert _compat.scaled_mm is torch._scaled_mm_v2
    assert _compat.scaled_grouped_mm is torch._scaled_grouped_mm
    a = torch.ones(4, 16, dtype=torch.bfloat16)
    b, ends = torch.ones(2, 16, 8, dtype=torch.bfloat16), torch.tensor([1, 4], dtype=torch.int32)
    assert torch.equal(_compat.grouped_mm(a, b, offs=ends), torch.full((4, 8), 16.0).bfloat16())
