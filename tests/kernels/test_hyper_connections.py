from itertools import product

import pytest
import torch
from torch import Tensor

from moecore.kernels import hyper_connections
from moecore.kernels import hyper_connections as hc
from moecore.kernels.triton_api import INTERPRET
from tests.helpers.grids import beside
from tests.helpers.saved import list_saved

# Tokens, streams, dim and iterations. A token's program takes 1024 elements of a stream at a time,
# and the gradient's program BLOCK_T tokens.
SHAPES = [(18, 4, 37, 20), (1, 3, 130, 3), (2, 4, 1030, 2), (3, 2, 9, 1), (0, 4, 8, 2)]
DTYPES = [torch.float32, torch.bfloat16]
# The first shape has both dtypes by day, of the others every second one.
CASES = list(product(SHAPES, DTYPES))
NIGHTLY = [case for place, case in enumerate(CASES[2:]) if place % 4 in (1, 2)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """18 tokens are two tiles of the interpreted gradient, as 3000 tokens are many on a GPU."""
    if INTERPRET:
        monkeypatch.setitem(hyper_connections.TILE, "BLOCK_T", 16)


def options(iterations: int) -> hc.SinkhornOptions:
    return hc.SinkhornOptions(iterations=iterations, eps=1e-6, norm_eps=1e-6)


def leaves(T: int, N: int, D: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Streams, fn, base, scale and a sublayer's output."""
    g, M = torch.Generator().manual_seed(T + D), (2 + N) * N
    sizes = ((T, N, D), (M, N * D), (M,), (3,), (T, D))
    streams, fn, base, scale, y = (torch.randn(size, generator=g) for size in sizes)
    made = [streams.to(dtype), fn * (N * D) ** -0.5, base, scale, y.to(dtype)]
    return [t.to(device) for t in made]


def run(given: list[Tensor], how: hc.SinkhornOptions, *, plain: bool = False) -> list[Tensor]:
    """Return x, the expanded streams, and the gradients of `given`."""
    *mixed, y = given = [t.detach().requires_grad_() for t in given]
    if plain:
        x, weights = hc.collapse_streams_ref(*mixed, how)
        out = hc.expand_streams_ref(mixed[0], y, weights)
    else:
        x, collapsed = hc.collapse_streams(*mixed, how)
        out = hc.expand_streams(y, collapsed)
    g = torch.Generator().manual_seed(7)
    grads = [torch.randn(t.shape, generator=g).bfloat16().to(t) for t in (x, out)]
    return [x.detach(), out.detach(), *torch.autograd.grad([x, out], given, grads)]


def check(given: list[Tensor], how: hc.SinkhornOptions) -> None:
    exact = run([t.double() for t in given], how, plain=True)
    assert_as_exact(run(given, how), run(given, how, plain=True), exact)


def assert_as_exact(of_kernels: list[Tensor], of_plain: list[Tensor], exact: list[Tensor]) -> None:
    """The worst element and the worst row are at most twice as wrong as plain PyTorch's."""
    for found, plain, want in zip(of_kernels, of_plain, exact, strict=True):
        assert found.shape == plain.shape and found.dtype == plain.dtype
        if not want.numel():
            continue
        # The interpreter cuts numbers to bf16 and does not round them.
        cut = INTERPRET and found.dtype == torch.bfloat16
        floor = 2**-7 if cut else 2**-20
        error, allowed = ((t.double() - want).abs() for t in (found, plain))
        assert error.max() <= 2 * allowed.max() + floor * want.abs().max()
        size = want.norm(dim=-1).clamp(min=1e-30)  # of a row; no tokens have gradients of 0
        assert (error.norm(dim=-1) / size).max() <= 2 * (allowed.norm(dim=-1) / size).max() + floor


def test_by_hand() -> None:
    """One stream: comb is 1, so a residual connection with weights."""
    streams, y = torch.tensor([[[3.0, 4.0]]]).double(), torch.tensor([[1.0, -1.0]]).double()
    fn = torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]]).double()
    base, scale = torch.tensor([0.5, 0.0, 1.0]).double(), torch.tensor([2.0, 1.0, 1.0]).double()
    how = hc.SinkhornOptions(iterations=20, eps=0.0, norm_eps=0.0)
    x, collapsed = hc.collapse_streams(streams, fn, base, scale, how)
    rms = 12.5**0.5
    pre = 1 / (1 + torch.exp(torch.tensor(-(2 * 3 / rms + 0.5)).double()))
    post = 2 / (1 + torch.exp(torch.tensor(-4 / rms).double()))
    torch.testing.assert_close(x, pre * streams[:, 0])
    torch.testing.assert_close(hc.expand_streams(y, collapsed), streams + post * y[:, None])


def test_columns_and_rows_sum_to_one_and_comb_is_read_by_column() -> None:
    streams, *weights, y = leaves(5, 4, 6, torch.float64)
    weights = [w.double() for w in weights]
    _, collapsed = hc.collapse_streams(streams, *weights, options(20))
    comb = collapsed.weights_TW[:, 4:].view(5, 4, 4)
    ones = torch.ones(5, 4).double()
    torch.testing.assert_close(comb.sum(1), ones, rtol=0, atol=1e-5)
    torch.testing.assert_close(comb.sum(2), ones, rtol=0, atol=0.05)
    want = torch.einsum("tjk,tjd->tkd", comb, streams)
    want = want + torch.einsum("tk,td->tkd", collapsed.weights_TW[:, :4], y)
    torch.testing.assert_close(hc.expand_streams(y, collapsed), want)


@pytest.mark.parametrize(("shape", "dtype"), beside(CASES, NIGHTLY, several=True), ids=str)
def test_reference(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    *sizes, iterations = shape
    check(leaves(*sizes, dtype, device), options(iterations))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_sizes(dtype: torch.dtype) -> None:
    given = leaves(3000, 4, 7168, dtype, "cuda")
    check(given, options(20))
    for first, second in zip(run(given, options(20)), run(given, options(20)), strict=True):
        assert torch.equal(first, second)


def test_any_layout_and_an_input_that_is_not_read(device: str) -> None:
    """Streams that lie apart, an output of one element's memory, and no gradient of x."""
    given = leaves(3, 2, 10, torch.float32, device)
    given[0] = given[0].transpose(0, 2).contiguous().transpose(0, 2)
    grads = []
    for plain, dtype in ((False, torch.float32), (True, torch.float32), (True, torch.float64)):
        streams, *weights = (t.detach().to(dtype).requires_grad_() for t in given[:4])
        y = torch.ones(1, 1, device=device, dtype=dtype, requires_grad=True)
        if plain:
            _, mixed = hc.collapse_streams_ref(streams, *weights, options(3))
            out = hc.expand_streams_ref(streams, y.expand(3, 10), mixed)
        else:
            _, collapsed = hc.collapse_streams(streams, *weights, options(3))
            out = hc.expand_streams(y.expand(3, 10), collapsed)
        (out.sum() + out[0, 0, 0]).backward()
        grads.append([t.grad for t in (streams, *weights, y)])
    assert_as_exact(*grads)


def test_what_backward_keeps(device: str) -> None:
    """Streams and the sublayer's output once, and 45 numbers per token, in fp32."""
    T, N, D = 6, 4, 64
    *given, y = (t.requires_grad_() for t in leaves(T, N, D, torch.bfloat16, device))

    def forward() -> None:
        _, collapsed = hc.collapse_streams(*given, options(20))
        hc.expand_streams(y, collapsed)

    kept = {t.data_ptr(): t.untyped_storage().nbytes() for t in list_saved(forward)}
    num_bytes = sum(kept.values()) - sum(t.nbytes for t in given[1:])
    assert num_bytes == T * (2 * N * D + 2 * D + 4 * (24 + 20 + 1))
