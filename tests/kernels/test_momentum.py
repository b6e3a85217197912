from typing import Any

import pytest
import torch

from moecore.kernels.momentum import BLOCK, momentum_, momentum_ref_

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("shape", [(0, 3), (1,), (3, 5, 7), (BLOCK,), (2, BLOCK + 3)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nesterov", [False, True])
def test_what_the_reference_does(shape, dtype, nesterov, device) -> None:
    grad = torch.randn(shape, device=device).to(dtype)
    for scale in (None, torch.full((), 3.0, device=device)):
        got, want = (m.clone() for m in [torch.randn(shape, device=device)] * 2)
        how: dict[str, Any] = dict(decay=0.9, nesterov=nesterov, grad_scale=scale)
        how["found_inf"] = None if scale is None else torch.zeros((), device=device)
        found = momentum_(grad, got, dtype, **how)
        wanted = momentum_ref_(grad, want, dtype, **how)
        assert found.dtype == dtype
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        bound = 1e-6 if dtype == torch.float32 else 2**-7  # the interpreter cuts to bf16
        torch.testing.assert_close(found, wanted, rtol=bound, atol=1e-6)


@pytest.mark.parametrize("function", [momentum_, momentum_ref_])
def test_a_skipped_step_leaves_bits(function: Any, device: str) -> None:
    momentum = torch.randn(3, 70, device=device)
    before = momentum.clone()
    grad = torch.full_like(momentum, torch.nan)
    grad[0] = torch.inf
    nan, one = torch.full((), torch.nan, device=device), torch.ones((), device=device)
    out = function(
        grad, momentum, torch.float32, decay=0.9, nesterov=True, grad_scale=nan, found_inf=one
    )
    assert torch.equal(momentum, before) and out.isfinite().all()


def test_strided_and_fp64(device: str) -> None:
    grad, momentum = torch.randn(2, 6, 10, device=device)
    want = momentum.double().lerp(grad.double(), 0.25).t()
    momentum_(grad.t(), momentum.t(), torch.float32, decay=0.75, nesterov=False)
    torch.testing.assert_close(momentum.t().double(), want)
    wide = torch.zeros(4, device=device, dtype=torch.float64)
    momentum_(torch.full_like(wide, 1 / 3), wide, torch.float64, decay=0.0, nesterov=True)
    assert torch.equal(wide, torch.full_like(wide, 1 / 3))


@pytest.mark.gpu
def test_addresses_past_2_to_the_31() -> None:
    grad, momentum = torch.zeros(2, (1 << 31) + 5, device="cuda").unbind()
    grad[-3:] = 2.0
    out = momentum_(grad, momentum, torch.bfloat16, decay=0.5, nesterov=False)
    assert out[-4:].tolist() == momentum[-4:].tolist() == [0.0, 1.0, 1.0, 1.0]
