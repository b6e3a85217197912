from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.kernels.grouped.scaled_rows import pad_rows
from moecore.kernels.rows.activation import (
    ActivationOptions,
    weighted_activation,
    weighted_activation_bwd,
    weighted_activation_bwd_ref,
)
from moecore.kernels.rows.microscaled import quantise_microscaled
from moecore.kernels.rows.microscaled_activation import ExpertOrder, microscaled_activation
from moecore.kernels.rows.scaling import Blocks

pytest.importorskip("triton", reason="it is of kernels")
RECIPE = Recipe(scaling="mxfp8")
COUNTS, SPARE, F = [17, 0, 1, 34], 9, 96  # rows of experts, rows of none, and hidden dim


def make_layout(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return expert_R, and rows and experts of the layout that pads experts to full blocks."""
    offsets_e = torch.tensor(COUNTS, device=device).cumsum(0).int()
    padded = pad_rows(offsets_e, sum(COUNTS) + SPARE, RECIPE.weight_multiple)
    row_P = torch.arange(padded.num_rows, device=device)
    source_P = torch.full((padded.num_rows + 1,), -1, device=device)
    source_P.index_copy_(0, padded.position_R, row_P[: sum(COUNTS) + SPARE])
    expert_P = torch.searchsorted(padded.offsets_e, row_P.int(), right=True)
    return padded.expert_R, source_P[:-1], expert_P


def make_inputs(kind: str, dtype: torch.dtype, device: str) -> Any:
    """h, da, weights, rows in use and options; NaN in rows of no expert, an infinity in others."""
    options, generator = ActivationOptions(kind=kind), torch.Generator().manual_seed(0)
    R, used = sum(COUNTS) + SPARE, sum(COUNTS)
    h, da, weights = (
        torch.randn(R, n, generator=generator) for n in (F * (1 + options.gated), F, 1)
    )
    h[3, 5], h[4, :40], da[7] = torch.inf, 0, 0
    for x in (h, da, weights):
        x[used:] = torch.nan
    weights_R, num_rows = weights[:, 0].abs().to(device), torch.tensor(used, device=device).int()
    return h.to(device, dtype), da.to(device, dtype), weights_R, num_rows, options


def check_bits(ours: Blocks, theirs: Blocks, used: int | None = None) -> None:
    """Bits are equal, but those of NaN, in the rows in use; `used` is None if rows are columns."""
    assert ours.kind == theirs.kind
    for a, b in zip(ours.tensors(), theirs.tensors(), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if used is not None and len(a) == sum(COUNTS) + SPARE:
            a, b = a[:used], b[:used]
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
@pytest.mark.parametrize("pack", [False, True], ids=["values", "packed"])
def test_operands_have_the_bits_of_two_kernels(pack: bool, kind: str, device: str) -> None:
    expert_R, source_P, expert_P = make_layout(device)
    h, da, *where = make_inputs(kind, torch.bfloat16, device)

    def quantise(x: Tensor, **how: Any) -> Blocks:
        return quantise_microscaled(x, RECIPE, num_experts=len(COUNTS), pack=pack, **how)

    used, order = sum(COUNTS), ExpertOrder(len(COUNTS), pack, source_P)
    (a,), none = microscaled_activation(h, None, *where, order)
    check_bits(a, quantise(weighted_activation(h, *where), expert_M=expert_R), used)
    assert none is None
    (dh, dh_columns, a), dweights_R = microscaled_activation(h, da, *where, order)
    dh_RC, expected_R, a_RF = weighted_activation_bwd(h, da, *where)
    of_columns = dict(over_rows=True, source_rows_M=source_P, expert_M=expert_P)
    check_bits(dh, quantise(dh_RC, is_gradient=True, expert_M=expert_R), used)
    check_bits(dh_columns, quantise(dh_RC, is_gradient=True, **of_columns))
    check_bits(a, quantise(a_RF, **of_columns))
    assert dweights_R is not None and not dweights_R[used:].any()
    torch.testing.assert_close(dweights_R, expected_R, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_operands_are_rounded_gradients_of_the_definition(device: str) -> None:
    """In fp32, of plain PyTorch; the only difference is one rounding to the format."""
    order = ExpertOrder(len(COUNTS), False, make_layout(device)[1])
    h, da, *where = make_inputs("swiglu", torch.float32, device)
    h[3, 5] = 1
    (dh, *_), _ = microscaled_activation(h, da, *where, order)
    expected = weighted_activation_bwd_ref(h, da, *where)[0][: sum(COUNTS)]
    error = (dh.values.float()[: sum(COUNTS)] - expected).norm() / expected.norm()
    assert 0.01 < error < 0.03, error
