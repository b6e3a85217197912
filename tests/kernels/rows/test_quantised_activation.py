import pytest
import torch
from torch import Tensor

from moecore.kernels.rows import quantised_activation as qa
from moecore.kernels.rows.activation import KINDS, ActivationOptions, weighted_activation_bwd_ref
from moecore.kernels.rows.quantised import quantise_rows_ref
from moecore.kernels.rows.record import Rows, widen_rows
from moecore.kernels.rows.scaling import Blocks
from tests.kernels.rows.test_quantised import DTYPES, codes, values_of

DIFFER = 2e-3  # of the codes: exp is not torch's to the last bit, so a few lie on the other side


def assert_close(values: Tensor, scales: Tensor, theirs: Tensor, their_scales: Tensor) -> None:
    """Scales of every value: nearly the same. Codes: at most one apart, and few of them.

    Where a gradient vanishes, rounding decides about its scale and its code.
    """
    if not values.numel():
        return
    assert torch.equal(values.float().isnan(), theirs.float().isnan())
    assert torch.equal(scales.isfinite(), their_scales.isfinite())
    assert (codes(values) != codes(theirs)).float().mean() <= DIFFER
    ours, wanted = (
        (x.float() * s).nan_to_num(0) for x, s in ((values, scales), (theirs, their_scales))
    )
    scales, their_scales = scales.nan_to_num(posinf=0), their_scales.nan_to_num(posinf=0)
    rounding = 2**-21 * wanted.abs().max()
    torch.testing.assert_close(scales, their_scales, rtol=1e-5, atol=float(rounding) / 448)
    step = torch.maximum(wanted.abs() / 7, their_scales / 500)
    assert ((ours - wanted).abs() <= step + rounding).all()


def assert_rows(ours: Blocks, theirs: Blocks, used: int) -> None:
    assert ours.values.shape == theirs.values.shape and ours.scales.shape == theirs.scales.shape
    parts = [
        (x.values[:used], x.scales[:, :used].T.repeat_interleave(128, 1)) for x in (ours, theirs)
    ]
    assert_close(*parts[0], *parts[1])


def assert_bits(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)


def inputs(R, F, options, dtype, device, used) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h, da, weights and the number of rows; NaN past it."""
    C = 2 * F if options.gated else F
    h = values_of(R, C, dtype=dtype, device=device)
    da = values_of(R, F, dtype=dtype, device=device)
    weights = values_of(R, 1, dtype=torch.float32, device=device)[:, 0].abs()
    for x in (h, da, weights):
        x[used:] = torch.nan
    return h, da, weights, torch.tensor(used, device=device, dtype=torch.int32)


def sizes_of(kind: str) -> tuple[list[tuple[int, int, int]], tuple[bool, ...]]:
    """Return rows, columns and used rows, and whether scales are powers of two.

    All sizes and scales are those of one activation with a gate and of one without.
    """
    if kind in ("swiglu", "relu2"):
        return [(41, 256, 34), (1, 128, 1), (0, 128, 0), (32, 384, 32)], (True, False)
    return [(19, 128, 17)], (False,)


@pytest.mark.parametrize("kind", KINDS)
def test_forward_of_the_reference(kind: str, device: str) -> None:
    options, (sizes, scales) = ActivationOptions(kind=kind), sizes_of(kind)
    for R, F, used in sizes:
        h, _, weights, num_rows = inputs(R, F, options, torch.bfloat16, device, used)
        for power_of_two in scales:
            how = dict(power_of_two=power_of_two)
            got, none = qa.quantised_activation(h, weights, num_rows, options, **how)
            want, _ = qa.quantised_activation_ref(h, weights, options, **how)
            assert_rows(got, want, used)
            assert none is None
            how["quantise_h"] = True
            again, kept = qa.quantised_activation(h, weights, num_rows, options, **how)
            expected = quantise_rows_ref(h[:used], power_of_two=power_of_two)
            assert_bits(again.values[:used], got.values[:used])
            assert_bits(kept.values[:used], expected.values)
            assert_bits(kept.scales[:used], expected.scales)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_without_weights(dtype: torch.dtype, device: str) -> None:
    options = ActivationOptions(kind="swiglu")
    h, *_ = inputs(35, 384, options, dtype, device, 35)
    h[0], h[1, 3], h[2, 500], h[3, 0] = 0, torch.nan, torch.inf, 30000.0
    got, _ = qa.quantised_activation(h, None, None, options, power_of_two=True)
    want, _ = qa.quantised_activation_ref(h, None, options, power_of_two=True)
    assert_rows(got, want, 35)
    assert (got.values[0].float() == 0).all() and got.scales.shape == (3, 36)
    wide = got.values.float() * got.scales.T[:35].repeat_interleave(128, 1)
    assert wide[1].isnan().nonzero().tolist() == [[3]] and wide[2].isnan().sum() == 128


@pytest.mark.parametrize("kind", KINDS)
def test_backward_of_the_reference(kind: str, device: str) -> None:
    options, (sizes, scales) = ActivationOptions(kind=kind), sizes_of(kind)
    for R, F, used in sizes:
        h, da, weights, num_rows = inputs(R, F, options, torch.bfloat16, device, used)
        args = (Rows(h), da, weights, num_rows, options)
        for power_of_two in scales:
            got = qa.quantised_activation_bwd(*args, power_of_two=power_of_two)
            want = qa.quantised_activation_bwd_ref(*args, power_of_two=power_of_two)
            assert_rows(got[0], want[0], used)
            assert_rows(got[2], want[2], used)
            scale = (da.float().abs() * want_output(h, da, options)).nan_to_num().sum(1)
            assert ((got[1] - want[1]).abs() <= 1e-5 * scale).all() and (got[1][used:] == 0).all()
            kept = quantise_rows_ref(h, power_of_two=power_of_two)
            of_kept = qa.quantised_activation_bwd(kept, *args[1:], power_of_two=power_of_two)
            wide = Rows(widen_rows(kept)), *args[1:]
            want = qa.quantised_activation_bwd(*wide, power_of_two=power_of_two)
            for i in (0, 2):
                assert_bits(of_kept[i].values[:used], want[i].values[:used])
            assert torch.equal(of_kept[1], want[1])
            if device == "cuda":
                again = qa.quantised_activation_bwd(*args, power_of_two=power_of_two)
                assert torch.equal(again[1], got[1])


def want_output(h: Tensor, da: Tensor, options: ActivationOptions) -> Tensor:
    return weighted_activation_bwd_ref(h.float(), da.float(), None, None, options)[2].abs()


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_without_weights(dtype: torch.dtype, device: str) -> None:
    options = ActivationOptions(kind="swiglu")
    h, da, *_ = inputs(35, 128, options, dtype, device, 35)
    h[0], da[1], h[2, 3], da[31, 4] = 0, 0, torch.nan, torch.inf
    got = qa.quantised_activation_bwd(Rows(h), da, None, None, options, power_of_two=True)
    want = qa.quantised_activation_bwd_ref(Rows(h), da, None, None, options, power_of_two=True)
    for ours, theirs in ((got[0], want[0]), (got[2], want[2])):
        assert_rows(ours, theirs, 35)
    assert got[2].values.float().isnan().nonzero().tolist() == [[2, 3]]


def test_columns_without_whole_blocks() -> None:
    options = ActivationOptions(kind="swiglu")
    with pytest.raises(ValueError, match=r"F \(100\) must be a multiple of 128"):
        qa.quantised_activation(torch.zeros(2, 200), None, None, options, power_of_two=True)
