import pytest
import torch

from moecore.kernels.rows.e4m3 import FP8
from moecore.kernels.rows.quantised import quantise_rows
from moecore.kernels.rows.record import Rows, widen_rows
from moecore.kernels.triton_api import INTERPRET


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("R", "C", "used"), [(0, 128, 0), (1, 128, 1), (37, 384, 30), (37, 384, 0)]
)
@pytest.mark.parametrize("power_of_two", [True, False])
def test_equals_the_reference(power_of_two, R, C, used, dtype, device) -> None:
    if INTERPRET and dtype == torch.bfloat16 and not power_of_two:
        pytest.skip("the interpreter truncates to bf16")
    sizes = torch.logspace(-30, 10, max(R, 1), device=device)
    x = torch.randn(R, C, device=device) * sizes[:R, None]
    if R:
        x[0, :3] = torch.tensor([0.0, torch.nan, 1e-44])
        x[-1, -1] = torch.inf
    rows = quantise_rows(x.to(dtype), power_of_two=power_of_two)
    assert rows.values.dtype == FP8
    num_rows = torch.tensor(used, dtype=torch.int32, device=device)
    found, expected = widen_rows(rows, num_rows), rows.widen()
    assert found.dtype == dtype and found.shape == x.shape
    assert torch.equal(found[:used].nan_to_num(7.0), expected[:used].nan_to_num(7.0))
    assert torch.equal(found[:used].isnan(), expected[:used].isnan())


def test_wide_rows_stay_what_they_are() -> None:
    x = torch.randn(3, 128)
    assert widen_rows(Rows(x), torch.tensor(3)) is x
