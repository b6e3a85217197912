import pytest
import torch

from moecore.base.options.precision import Recipe
from moecore.kernels.rows.microscaled_rows import (
    pack_microscaled_rows,
    pack_microscaled_rows_ref,
    widen_microscaled_rows,
    widen_microscaled_rows_ref,
)
from tests.kernels.rows.microscaling_oracle import Rounding
from tests.kernels.rows.test_microscaled import hard

RECIPES = [Recipe(scaling="mxfp8"), Recipe(scaling="nvfp4")]
both = pytest.mark.parametrize("recipe", RECIPES, ids=["mxfp8", "nvfp4"])


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [96, 1120])  # one step of a program, and two
def test_kernels_equal_plain_pytorch(recipe, dtype, columns, device: str) -> None:
    x = hard(37, columns, dtype=dtype, device=device)
    packed, expected = pack_microscaled_rows(x, recipe), pack_microscaled_rows_ref(x, recipe)
    for ours, theirs in zip(packed, expected, strict=True):
        nan = torch.zeros_like(theirs, dtype=torch.bool)
        if theirs.dtype != torch.uint8:  # a NaN may have another sign
            nan = theirs.float().isnan()
            assert torch.equal(ours.float().isnan(), nan)
        bits = (t.view(torch.uint8).masked_fill(nan, 0) for t in (ours, theirs))
        assert torch.equal(*bits)
    wide = widen_microscaled_rows(*packed, dtype)
    theirs = widen_microscaled_rows_ref(*expected, dtype)
    torch.testing.assert_close(wide, theirs, rtol=0, atol=0, equal_nan=True)


@both
def test_values_are_those_of_the_format_s_definition(recipe: Recipe) -> None:
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)) * torch.arange(9)[:, None]
    wide = widen_microscaled_rows_ref(*pack_microscaled_rows_ref(x, recipe), torch.bfloat16)
    assert torch.equal(wide.double(), Rounding(recipe).saved(x))  # exact in bf16
