import pytest
import torch
from torch import Tensor

from moecore.kernels.rows.rotary import rotary, rotary_ref
from moecore.kernels.triton_api import INTERPRET

DTYPES = [torch.float32, torch.float16] if INTERPRET else [torch.float32, torch.bfloat16]
SHAPES = [(2, 5, 3, 8, 0), (1, 7, 1, 64, 0), (2, 3, 4, 6, 10), (3, 1, 2, 2, 1), (1, 0, 2, 4, 0)]


def tables(T: int, d: int, device: str) -> tuple[Tensor, Tensor]:
    angles = torch.randn(T, d // 2, device=device)
    return angles.cos(), angles.sin()


def spread(x: Tensor, layout: str) -> Tensor:
    """Return the same numbers in other memory: a slice of wider rows, or heads before tokens."""
    if layout == "slice":
        return torch.cat((x, x), dim=-1)[..., : x.shape[-1]]
    if layout == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x


@pytest.mark.parametrize("layout", ["contiguous", "slice", "heads first"])
@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_reference(shape: tuple[int, ...], neighbours: bool, layout: str, device: str) -> None:
    B, T, H, d, n = shape
    cos, sin = tables(T, d, device)
    for dtype in DTYPES:
        x = spread(torch.randn(B, T, H, n + d, device=device).to(dtype), layout)
        got, want = x.detach().requires_grad_(), x.detach().float().requires_grad_()
        y = rotary(got, cos, sin, interleaved=neighbours)
        y_ref = rotary_ref(want, cos, sin, interleaved=neighbours)
        dy = spread(torch.randn(y.shape, device=device).to(dtype), layout)
        y.backward(dy)
        y_ref.backward(dy.float())
        bound = dict(rtol=torch.finfo(dtype).eps / 2, atol=1e-6)  # one rounding
        assert y.dtype == dtype == got.grad.dtype
        torch.testing.assert_close(y.float(), y_ref, **bound)
        torch.testing.assert_close(got.grad.float(), want.grad, **bound)


@pytest.mark.gpu
def test_rows_past_2_to_the_31() -> None:
    x = torch.randn(1, 1 << 15, 513, 128, device="cuda", dtype=torch.bfloat16)  # 2^31 + elements
    cos, sin = tables(1 << 15, 128, "cuda")
    got = rotary(x, cos, sin)[:, -2:]
    want = rotary_ref(x[:, -2:], cos[-2:], sin[-2:], interleaved=False)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)
