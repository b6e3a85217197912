from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.kernels.grouped import scaled_rows
from moecore.kernels.rows.scaling import Blocks, OperandPair
from moecore.kernels.triton_api import INTERPRET

pytest.importorskip("triton", reason="kernels are compared with their references")
COUNTS = [[5, 0, 135, 1, 0, 20], [0, 0, 3], [0], [40]]  # rows of experts
LAYOUTS = [(True, True), (True, False), (False, True)]  # rows, columns


def hard(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return rows of all sizes, a row and a column of zeros, and what is not finite."""
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.exp(2 * torch.randn(*shape[:-1], 1))
    if shape[-2] > 4:
        x[..., 0, :], x[..., :, 3] = 0, 0
        x[..., 1, 2], x[..., 4, 4], x[..., 3, 5] = float("inf"), float("nan"), 3e38
        if not INTERPRET or dtype == torch.float32:  # whose bf16 has no denormals
            x[..., 2, :] *= 1e-42
    return x.to(dtype).to(device)


def assert_same(found: Blocks | None, truth: Blocks | None, *, rows: Any, scales: Any) -> None:
    """Compare what is not padding; the bits of a NaN mean nothing."""
    if found is None or truth is None:
        assert found is truth
        return
    assert found.values.dtype == truth.values.dtype and found.kind == truth.kind
    assert found.values.is_contiguous() and found.scales.is_contiguous()
    for got, wanted, used in (
        (found.values.float(), truth.values.float(), rows),
        (found.scales, truth.scales, scales),
    ):
        assert got.shape == wanted.shape
        assert torch.equal(got[used].nan_to_num(7e4), wanted[used].nan_to_num(7e4))


def check_rows(found: OperandPair, truth: OperandPair, offsets_e: Tensor) -> None:
    used, end = int(offsets_e[-1]), int(scaled_rows.pad_rows(offsets_e, 0).offsets_e[-1])
    assert_same(found.rows, truth.rows, rows=slice(used), scales=slice(used))
    columns = (slice(None), slice(end))
    assert_same(found.columns, truth.columns, rows=columns, scales=slice(None))


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_offsets(counts: list[int], device: str) -> None:
    offsets_e = torch.tensor(counts, device=device).cumsum(0).int()
    assert torch.equal(
        scaled_rows.pad_offsets(offsets_e), scaled_rows.pad_rows(offsets_e, 0).offsets_e
    )


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("per_row", [True, False])
def test_rows(per_row: bool, fmt: str, power_of_two: bool, device: str) -> None:
    """Rows past the last expert's hold more than all others, and count for nothing."""
    how: Any = dict(per_row=per_row, power_of_two=power_of_two, fp8_format=fmt)
    for i, counts in enumerate(COUNTS):
        offsets_e = torch.tensor(counts, device=device).cumsum(0).int()
        used = sum(counts)
        for D, dtype in ((144, torch.bfloat16), (16, torch.float32)):
            x_RD = hard((used + 7, D), dtype, device)
            x_RD[used:] = float("inf") if i % 2 else float("nan")
            x_RD = x_RD.T.contiguous().T if i == 2 else x_RD
            for rows, columns in LAYOUTS if i == 0 else LAYOUTS[:1]:
                layouts = dict(rowwise=rows, columnwise=columns)
                found = scaled_rows.quantise_expert_rows(
                    x_RD, offsets_e, scaled_rows.pad_offsets(offsets_e), **how, **layouts
                )
                check_rows(
                    found,
                    scaled_rows.quantise_expert_rows_ref(x_RD, offsets_e, **how, **layouts),
                    offsets_e,
                )


def test_finite_rows(device: str) -> None:
    """One scale that is a number, of rows that lie apart."""
    x_RD = torch.randn(180, 320, device=device)[:, 16:304]
    offsets_e = torch.tensor([100, 100, 171], device=device).int()
    x_RD[171:] = 1e30
    for per_row in (True, False):
        how: Any = dict(per_row=per_row, power_of_two=False)
        found = scaled_rows.quantise_expert_rows(
            x_RD, offsets_e, scaled_rows.pad_offsets(offsets_e), **how
        )
        check_rows(found, scaled_rows.quantise_expert_rows_ref(x_RD, offsets_e, **how), offsets_e)
        assert found.rows is not None and found.rows.values[:171].float().abs().max() == 448


def test_rows_that_are_longer_than_a_program(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    from moecore.kernels.rows import cast

    monkeypatch.setattr(cast, "ROW_ELEMENTS", 64)
    x_RD, offsets_e = hard((20, 208), torch.float32, device), torch.tensor([17], device=device)
    how: Any = dict(per_row=True, power_of_two=True, columnwise=False)
    found = scaled_rows.quantise_expert_rows(x_RD, offsets_e.int(), None, **how)
    check_rows(found, scaled_rows.quantise_expert_rows_ref(x_RD, offsets_e.int(), **how), offsets_e)


@pytest.mark.parametrize("past", [0.0, 0.25])
def test_an_amax_that_may_be_of_no_rows(past: float, device: str) -> None:
    x_RD, offsets_e = torch.randn(180, 144, device=device), torch.tensor([100, 171], device=device)
    x_RD[171:] = 1e38  # not read
    found = scaled_rows.compute_row_amax(x_RD, offsets_e.int(), torch.tensor([past], device=device))
    assert found.amax() == (past or x_RD[:171].abs().max())


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_an_amax_of_other_rows(fmt: str, device: str) -> None:
    """What exceeds it is clipped, infinity is NaN and not seen, and both layouts are one."""
    x_RD = hard((180, 144), torch.float32, device)
    x_RD[171:] = 1e38
    offsets_e = torch.tensor([100, 100, 171], device=device).int()
    how: Any = dict(per_row=False, power_of_two=False, fp8_format=fmt)
    how["amax"] = torch.tensor([4.0], device=device)
    for start in (0.0, 3.2e38):
        seen, of_ref = (torch.full((1,), start, device=device) for _ in range(2))
        found = scaled_rows.quantise_expert_rows(
            x_RD, offsets_e, scaled_rows.pad_offsets(offsets_e), **how, new_amax=seen
        )
        truth = scaled_rows.quantise_expert_rows_ref(x_RD, offsets_e, **how, new_amax=of_ref)
        check_rows(found, truth, offsets_e)
        assert torch.equal(seen, of_ref)
        assert torch.equal(seen.cpu(), torch.tensor([max(start, 3e38)]))
    rows, columns = found
    wide = rows.values[:171].float() * rows.scales[:171, None]
    finite = x_RD[:171].clamp(-4, 4).masked_fill(x_RD[:171].isinf(), torch.nan)
    torch.testing.assert_close(wide, finite, rtol=2**-2, atol=2**-6, equal_nan=True)
    place_R = scaled_rows.pad_rows(offsets_e, 180).position_R[:171]
    same = columns.values.float()[:, place_R].T * columns.scales[0, 0]
    torch.testing.assert_close(same, wide, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("per_row", [True, False])
def test_matrices(per_row: bool, power_of_two: bool, device: str) -> None:
    how: Any = dict(per_row=per_row, power_of_two=power_of_two)
    for shape, dtype in (((3, 144, 48), torch.bfloat16), ((2, 16, 272), torch.float32)):
        w_eND = hard(shape, dtype, device) * 2.0 ** torch.arange(shape[0], device=device).view(
            -1, 1, 1
        ).to(dtype)
        w_eND[-1] = w_eND[-1].nan_to_num(0, 3, -3)  # a matrix has its own scale
        for rows, columns in LAYOUTS:
            layouts = dict(rowwise=rows, columnwise=columns)
            found = scaled_rows.quantise_expert_matrices(w_eND, **how, **layouts)
            truth = scaled_rows.quantise_expert_matrices_ref(w_eND, **how, **layouts)
            for got, wanted in zip(found, truth, strict=True):
                assert_same(got, wanted, rows=slice(None), scales=slice(None))
    assert scaled_rows.has_cast_kernel(w_eND)
