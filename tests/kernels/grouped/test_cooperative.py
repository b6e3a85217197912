import pytest
import torch

from moecore.kernels.grouped.cooperative import cooperative_activation, cooperative_gemm
from moecore.kernels.grouped.skeleton import Addend
from moecore.kernels.rows.activation import ActivationOptions, weighted_activation_ref
from moecore.kernels.rows.row_tiles import map_row_tiles
from tests.kernels.grouped.oracle import grouped_gemm_activation_ref, grouped_gemm_ref
from tests.kernels.grouped.test_grouped_gemm import check
from tests.kernels.row_cases import COUNTS, KINDS, SIZES, make, randn

pytestmark = pytest.mark.gpu


def addend_of(R: int, e: int, rank: int, N: int, *, transposed: bool) -> Addend | None:
    """Rows of `rank` columns and a matrix of every expert; None for a rank of 0."""
    m = randn(e, *((N, rank) if transposed else (rank, N)))
    return Addend(randn(R, rank), m.transpose(1, 2) if transposed else m) if rank else None


@pytest.mark.parametrize("rank", [0, 8, 64, 136])
@pytest.mark.parametrize("K, N", SIZES)
@pytest.mark.parametrize("transposed", [False, True], ids=["KN", "NK"])
@pytest.mark.parametrize("name", COUNTS)
def test_gemm(name: str, transposed: bool, K: int, N: int, rank: int) -> None:
    """NaN stands in rows that belong to no expert."""
    counts = COUNTS[name]
    offsets, row_ids, tiles, _ = make(counts)
    R, e, used = row_ids.shape[0], len(counts), sum(counts)
    for dtype in (torch.bfloat16,) if rank else (torch.bfloat16, torch.float16):
        a = randn(R, K, dtype=dtype)
        b = randn(e, *((N, K) if transposed else (K, N)), dtype=dtype)
        b = b.transpose(1, 2) if transposed else b
        addend = addend_of(R, e, rank, N, transposed=transposed)
        pairs = [(a, b), *([addend] if addend else [])]
        for x, _ in pairs:
            x[used:] = float("nan")
        found = cooperative_gemm(a, b, tiles, addend=addend)
        again = cooperative_gemm(a, b, tiles, addend=addend)
        assert found.shape == (R, N) and found.dtype == dtype
        assert torch.equal(found[:used], again[:used])
        exact = sum(grouped_gemm_ref(x.double(), m.double(), offsets) for x, m in pairs)
        check(found, exact, sum(grouped_gemm_ref(x, m, offsets) for x, m in pairs), used)


@pytest.mark.parametrize("rank", [8, 64, 136])
@pytest.mark.parametrize("D, F", SIZES)
@pytest.mark.parametrize("name", COUNTS)
def test_activation_with_an_addend(name: str, D: int, F: int, rank: int) -> None:
    counts = COUNTS[name]
    offsets, row_ids, tiles, _ = make(counts)
    R, e, used = row_ids.shape[0], len(counts), sum(counts)
    options = ActivationOptions(kind="swiglu")
    x, weights, w1 = randn(R, D), torch.rand(R, device="cuda"), randn(e, 2 * F, D) / D**0.5
    addend = addend_of(R, e, rank, 2 * F, transposed=True)
    assert addend is not None
    h, a = cooperative_activation(x, w1, tiles, weights, options, addend=addend)
    pairs = ((x, w1.transpose(1, 2)), addend)
    exact = sum(grouped_gemm_ref(rows.double(), m.double(), offsets) for rows, m in pairs)
    plain = sum(grouped_gemm_ref(rows, m, offsets) for rows, m in pairs)
    check(h, exact, plain, used)
    exact_a = weighted_activation_ref(exact, weights.double(), offsets[-1], options)
    check(a, exact_a, weighted_activation_ref(plain, weights, offsets[-1], options), used)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("D, F", SIZES)
@pytest.mark.parametrize("name", COUNTS)
def test_activation(name: str, D: int, F: int, kind: str) -> None:
    counts = COUNTS[name]
    offsets, row_ids, tiles, _ = make(counts)
    R, used = row_ids.shape[0], sum(counts)
    options = ActivationOptions(kind=kind, limit=1.0)
    x, weights = randn(R, D), torch.rand(R, device="cuda")
    w1 = randn(len(counts), 2 * F, D) / D**0.5
    rows = torch.arange(R, dtype=torch.int32, device="cuda")
    h, a = cooperative_activation(x, w1, tiles, weights, options)
    exact = (x.double(), w1.double(), rows, weights.double(), offsets, options)
    exact_h, exact_a = grouped_gemm_activation_ref(*exact)
    plain_h, plain_a = grouped_gemm_activation_ref(x, w1, rows, weights, offsets, options)
    check(h, exact_h, plain_h, used)
    check(a, exact_a, plain_a, used)


def test_output_of_more_than_2_to_the_31_elements() -> None:
    R, K, N = 300_000, 64, 8192
    offsets = torch.tensor([100_000, 300_000], dtype=torch.int32, device="cuda")
    a, b = randn(R, K), randn(2, K, N)
    out = cooperative_gemm(a, b, map_row_tiles(offsets, R))
    torch.testing.assert_close(out[-1000:], a[-1000:] @ b[1], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(out[:1000], a[:1000] @ b[0], rtol=2e-2, atol=2e-2)
