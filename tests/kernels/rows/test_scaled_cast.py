import pytest
import torch

from moecore.kernels.rows.scaled_cast import scaled_cast, scaled_cast_ref
from moecore.kernels.triton_api import INTERPRET

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TARGETS = DTYPES[:2] if INTERPRET else DTYPES  # the interpreter cuts to bf16 instead of rounding


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (8192,), (2, 4099, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to", TARGETS)
def test_bits_of_the_reference(shape, dtype, to, device) -> None:
    x = torch.randn(shape, device=device).to(dtype)
    for scale in (1.0, 0.125, 1 / 3):
        for given in (scale, torch.tensor(scale, device=device)):
            got = scaled_cast(x, to, given)
            assert got.dtype == to and torch.equal(got, scaled_cast_ref(x, to, scale))


def test_strided_and_not_finite(device: str) -> None:
    x = torch.randn(6, 10, device=device)[:, ::2].t()
    x[0, 0], x[1, 1], x[2, 2] = float("nan"), float("inf"), -0.0
    got, want = scaled_cast(x, torch.float16, 0.5), scaled_cast_ref(x, torch.float16, 0.5)
    assert got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_addresses_past_2_to_the_31() -> None:
    x = torch.zeros((1 << 31) + 5, device="cuda", dtype=torch.bfloat16)
    x[-3:] = 3.0
    assert scaled_cast(x, torch.float32, 2.0)[-4:].tolist() == [0.0, 6.0, 6.0, 6.0]


def test_fp64_stays_fp64() -> None:
    x = torch.tensor([1 / 3], dtype=torch.float64)
    assert torch.equal(scaled_cast(x, torch.float64, 0.1), x * 0.1)
