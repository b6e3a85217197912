import math

import pytest
import torch

from moecore.kernels.rows import scaling
from moecore.kernels.rows.cast import compute_amax, quantise_matrix
from moecore.kernels.rows.scaling import KINDS, Blocks, cast_ref, compute_operand_shape, matmul_ref
from tests.precision.plain import rounded

BLOCK_OF = {kind: block for block, kind in KINDS.items()}
ALL = [(kind, fmt, p2) for kind in BLOCK_OF for fmt in ("e4m3", "e5m2") for p2 in (True, False)]


def quantised(x: torch.Tensor, kind: str, fmt: str = "e4m3", p2: bool = True) -> Blocks:
    return cast_ref(x, None, kind, fmt, p2)


def dequantise(operand: Blocks) -> torch.Tensor:
    """Return fp32 [M, K]."""
    scales = scaling._expand_scales(
        scaling._view_scales_by_rows(operand), operand.kind, *operand.values.shape
    )
    return operand.values.float() * scales


@pytest.mark.parametrize(("kind", "fmt", "p2"), ALL)
@pytest.mark.parametrize("shape", [(1, 16), (130, 144), (3, 128)])
def test_every_rounding(kind: str, fmt: str, p2: bool, shape: tuple[int, int]) -> None:
    """Against the same block by block in fp64; the last blocks are short."""
    x = torch.randn(shape) * torch.exp(3 * torch.randn(shape[0], 1))
    x[0, 3] = 1e4  # one huge outlier
    x[:, 5] = 0
    wide = dequantise(quantised(x, kind, fmt, p2))
    assert wide.shape == compute_operand_shape(*shape, kind)
    truth = rounded(x, BLOCK_OF[kind], fmt, p2).float()
    assert torch.equal(wide[: shape[0], : shape[1]], truth)
    assert not wide[shape[0] :].any() and not wide[:, shape[1] :].any()


@pytest.mark.parametrize("kind", BLOCK_OF)
def test_zeros_denormals_and_the_largest_numbers(kind: str) -> None:
    zeros = quantised(torch.zeros(16, 128), kind)
    assert not dequantise(zeros).any() and zeros.scales.max() == 2.0**-126
    tiny = torch.full((16, 128), 1e-40)
    assert (dequantise(quantised(tiny, kind)) - tiny).abs().max() <= 2.0**-136
    large = torch.full((16, 128), 3e38)
    assert dequantise(quantised(large, kind)).isfinite().all()


def test_infinity_and_nan() -> None:
    """NaN stays where it is; infinity takes all values under its scale along."""
    x = torch.randn(130, 256)
    x[1, 2], x[3, 130] = math.nan, -math.inf
    nans = {kind: dequantise(quantised(x, kind)).isnan()[:130, :256] for kind in BLOCK_OF}
    assert [nans[kind].sum().item() for kind in ("tile", "block", "row", "tensor")] == [
        1 + 128,
        1 + 128 * 128,
        1 + 256,
        130 * 256,
    ]
    assert nans["tile"][1, 2] and nans["tile"][3, 128:].all()


def test_an_amax_from_elsewhere_saturates() -> None:
    x = torch.tensor([[0.5, -3.0, math.inf, math.nan] * 4])
    wide = dequantise(cast_ref(x, torch.tensor([1.75]), "tensor", "e4m3", True))
    assert wide[0, :2].tolist() == [0.5, -1.75] and wide[0, 2:4].isnan().all()
    assert compute_amax(x).item() == math.inf
    assert compute_amax(torch.tensor([[1.0, math.nan]])).item() == 1
    assert compute_amax(torch.zeros(0, 16)).item() == 0


@pytest.mark.parametrize("kinds", [("tile", "block"), ("tile", "tile"), ("row", "row")])
def test_a_product_is_that_of_wide_operands(kinds: tuple[str, str]) -> None:
    a = quantised(torch.randn(40, 272), kinds[0], p2=False)
    b = quantised(torch.randn(144, 272), kinds[1], p2=False)
    truth = dequantise(a).double() @ dequantise(b).double().T
    torch.testing.assert_close(matmul_ref(a, b).double(), truth, rtol=1e-5, atol=1e-4)


def test_both_operands_of_one_cast() -> None:
    x = torch.randn(70, 48)
    both = quantise_matrix(x, "tile", power_of_two=True)
    assert both.rows is not None and both.columns is not None
    assert torch.equal(dequantise(both.rows), dequantise(quantised(x, "tile")))
    assert torch.equal(dequantise(both.columns), dequantise(quantised(x.T, "tile")))
    assert both.columns.values.shape == (48, 128) and both.columns.values.is_contiguous()
    seen = torch.tensor([0.5])
    one = quantise_matrix(x, "tensor", power_of_two=True, columnwise=False, new_amax=seen)
    assert one.columns is None and seen.item() == x.abs().max().item()
    quantise_matrix(
        torch.tensor([[math.inf, math.nan] * 8]), "tensor", power_of_two=True, new_amax=seen
    )
    assert seen.item() == x.abs().max().item()
