from collections.abc import Iterator

import pytest
import torch

from moecore.kernels.rows import cast as casts
from moecore.kernels.rows.cast import _CastOptions as Options
from moecore.kernels.rows.scaling import compute_amax_ref
from tests.kernels.conftest import PARAMS, interpreter, poison
from tests.kernels.grouped.test_scaled_rows import hard

__all__ = ["interpreter"]  # a fixture
pytest.importorskip("triton")
SHAPES = [(1, 16), (130, 144), (16, 272)]
KINDS = ("tile", "block", "row", "tensor")


@pytest.fixture(params=PARAMS)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda":
        poison()
    yield request.param


def assert_same(ours: casts.Parts, truth: casts.Parts) -> None:
    for got, wanted in zip(ours, truth, strict=True):
        if got is None or wanted is None:
            assert got is wanted
            continue
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        got, wanted = got.float(), wanted.float()  # the bits of a NaN mean nothing
        assert torch.equal(got.nan_to_num(7e4), wanted.nan_to_num(7e4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_cast(kind: str, fmt: str, power_of_two: bool, device: str) -> None:
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            x = hard(shape, dtype, device)
            how = (None, None, Options(kind, fmt, power_of_two, True, True))
            assert_same(casts._launch_quantise(x, *how), casts._quantise_matrix_ref(x, *how))


def test_one_operand_alone_and_rows_apart(device: str) -> None:
    x = hard((130, 288), torch.float32, device)
    for rows, columns in ((True, False), (False, True)):
        for part in (x[:, 16:160], x.T[:144]):
            how = (None, None, Options("tile", "e4m3", True, rows, columns))
            assert_same(casts._launch_quantise(part, *how), casts._quantise_matrix_ref(part, *how))


@pytest.mark.parametrize("kind", KINDS)
def test_no_operand(kind: str, device: str) -> None:
    """As of dy where a bias alone is trained; what it adds to a history stays."""
    x, how = hard((20, 48), torch.bfloat16, device), Options(kind, "e4m3", True, False, False)
    assert casts._launch_quantise(x, None, None, how) == (None,) * 4
    seen = torch.zeros(1, device=device)
    casts._launch_quantise(x, None, seen, how)
    assert seen == x[x.isfinite()].abs().max()


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_whole_rows(fmt: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows alone take one kernel, which reads rows twice that it cannot hold."""
    for elements in (casts.ROW_ELEMENTS, 64):
        monkeypatch.setattr(casts, "ROW_ELEMENTS", elements)
        for T, D in ((130, 150), (3, 208)):
            x = hard((T, D), torch.float32, device)
            for power_of_two in (True, False):
                how = (None, None, Options("row", fmt, power_of_two, True, False))
                assert_same(casts._launch_quantise(x, *how), casts._quantise_matrix_ref(x, *how))
    how = (None, None, Options("row", fmt, False, False, True))  # columns alone
    assert_same(casts._launch_quantise(x, *how), casts._quantise_matrix_ref(x, *how))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_any_shape(kind: str, device: str) -> None:
    x = hard((2 * 9, 48), torch.bfloat16, device)
    how = (None, None, Options(kind, "e4m3", True, True, True))
    whole = x.view(2, 9, 48)
    one_each = x.as_strided((18, 1, 48), (48, 7, 1))  # contiguous: no row is 7 from the next
    for part in (whole, whole.transpose(0, 1), whole[..., 16:], one_each, whole.mT):
        rows = part.reshape(-1, part.shape[-1])
        assert_same(casts._launch_quantise(part, *how), casts._quantise_matrix_ref(rows, *how))


def test_delayed(device: str) -> None:
    x = hard((130, 144), torch.float32, device)
    given = torch.tensor([0.0, 2.0, 1.0, 0.5], device=device)  # of parts
    for seen in (0.0, 1e38):
        ours, truth = (torch.tensor([seen], device=device) for _ in range(2))
        how = Options("tensor", "e5m2", False, True, True)
        assert_same(
            casts._launch_quantise(x, given, ours, how),
            casts._quantise_matrix_ref(x, given, truth, how),
        )
        assert torch.equal(ours, truth)


def test_amax(device: str) -> None:
    for shape in SHAPES:
        x = hard(shape, torch.bfloat16, device)
        for past in (None, 0.0, 0.25, 1e30):  # of earlier steps: where it is not 0 x is not read
            given = None if past is None else torch.tensor([past], device=device)
            wanted = casts.choose_amax_ref(given, compute_amax_ref(x))
            assert torch.equal(casts._launch_amax(x, given).amax(0, keepdim=True), wanted)
            assert past in (None, 0.0) or wanted == past
