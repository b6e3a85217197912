import pytest
import torch
from torch import Tensor

from moecore.kernels.grouped.gemm import grouped_gemm, grouped_gemm_activation
from moecore.kernels.rows.activation import GATED_KINDS, ActivationOptions
from tests.helpers.grids import grid
from tests.kernels.grouped.oracle import grouped_gemm_activation_ref, grouped_gemm_ref

# Rows of each expert: empty ones, one row, one expert, primes, tiles that are just full.
COUNTS = {
    "mixed": [5, 0, 1, 40, 0, 33],
    "one expert": [37],
    "full tiles": [16, 32, 16],
    "all to one": [0, 0, 61, 0],
    "no rows": [0, 0, 0],
}
SIZES = [(24, 40), (64, 32), (136, 72)]


def dtype_of(device: str) -> torch.dtype:
    """fp16 where Triton interprets: there, products of bf16 numbers are wrong."""
    return torch.bfloat16 if device == "cuda" else torch.float16


def scale(device: str) -> int:
    return 16 if device == "cuda" else 1


def make(counts: list[int], device: str, spare: int = 3) -> tuple[Tensor, Tensor, int]:
    """Offsets, the row ids of R = used + spare rows, and the number of source rows."""
    offsets = torch.tensor(counts).cumsum(0).int()
    S = max(7, int(offsets[-1]) // 2)
    row_ids = torch.randint(0, S, (int(offsets[-1]) + spare,), dtype=torch.int32)
    return offsets.to(device), row_ids.to(device), S


def check(found: Tensor, exact: Tensor, plain: Tensor, used: int) -> None:
    """The 2x rule on the rows in use: all of them, and the worst one."""
    found, exact, plain = (t[:used].double() for t in (found, exact, plain))
    assert found.isfinite().all()
    if not used:
        return
    ours, theirs = (found - exact).norm(dim=1), (plain - exact).norm(dim=1)
    floor = 1e-6 * exact.norm(dim=1).max()
    assert ours.norm() <= 2 * theirs.norm() + floor and ours.max() <= 2 * theirs.max() + floor


@grid(name=COUNTS, gather=[False, True], transposed=[False, True], sizes=SIZES)
def test_grouped_gemm(name, gather, transposed, sizes, device) -> None:
    K, N = sizes
    torch.manual_seed(0)
    counts = [n * scale(device) for n in COUNTS[name]]
    offsets, row_ids, S = make(counts, device)
    dtype, e, used = dtype_of(device), len(counts), sum(counts)
    a = torch.randn(S if gather else row_ids.shape[0], K, device=device).to(dtype)
    if not gather:
        a[used:] = float("nan")  # nothing may read rows that belong to nobody
    shape = (e, N, K) if transposed else (e, K, N)
    b = torch.randn(shape, device=device).to(dtype)
    b = b.transpose(1, 2) if transposed else b
    ids = row_ids if gather else None
    found = grouped_gemm(a, b, offsets, row_ids_R=ids)
    again = grouped_gemm(a, b, offsets, row_ids_R=ids)
    exact = grouped_gemm_ref(a.double(), b.double(), offsets, row_ids_R=ids)
    plain = grouped_gemm_ref(a, b, offsets, row_ids_R=ids)
    assert found.shape == (row_ids.shape[0], N) and found.dtype == dtype
    assert torch.equal(found[:used], again[:used])
    check(found, exact, plain, used)
    assert N > 64 or not found[used:].any()
    wide = grouped_gemm(a, b, offsets, row_ids_R=ids, dtype=torch.float32)[:used]
    assert wide.dtype == torch.float32
    assert (wide - exact[:used]).norm() <= 2e-6 * exact[:used].norm()
    old = torch.randn(found.shape, device=device).to(dtype)
    out = grouped_gemm(a, b, offsets, row_ids_R=ids, out=old.clone())
    check(out, old.double() + exact, old + plain, used)
    assert torch.equal(out[used:], old[used:])


@grid(name=COUNTS, sizes=SIZES, kind=list(GATED_KINDS))
def test_grouped_gemm_activation(name: str, sizes: tuple[int, int], kind: str, device: str) -> None:
    D, F = sizes
    torch.manual_seed(1)
    counts = [n * scale(device) for n in COUNTS[name]]
    offsets, row_ids, S = make(counts, device)
    dtype, used = dtype_of(device), sum(counts)
    options = ActivationOptions(kind=kind, limit=1.0)
    x = torch.randn(S, D, device=device).to(dtype)
    w1 = (torch.randn(len(counts), 2 * F, D, device=device) / D**0.5).to(dtype)
    weights = torch.rand(row_ids.shape[0], device=device)
    h, a = grouped_gemm_activation(x, w1, row_ids, weights, offsets, options)
    exact_h, exact_a = grouped_gemm_activation_ref(
        x.double(), w1.double(), row_ids, weights.double(), offsets, options
    )
    plain_h, plain_a = grouped_gemm_activation_ref(x, w1, row_ids, weights, offsets, options)
    check(h, exact_h, plain_h, used)
    check(a, exact_a, plain_a, used)


def test_worked_example() -> None:
    a = torch.tensor([[1.0], [2.0], [3.0]])
    b = torch.tensor([[[10.0, 1.0]], [[20.0, 2.0]]])
    offsets = torch.tensor([1, 3], dtype=torch.int32)
    assert grouped_gemm_ref(a, b, offsets).tolist() == [[10, 1], [40, 4], [60, 6]]
    ids = torch.tensor([2, 0, 0], dtype=torch.int32)
    assert grouped_gemm_ref(a, b, offsets, row_ids_R=ids).tolist() == [[30, 3], [20, 2], [20, 2]]


@pytest.mark.gpu
def test_output_of_more_than_2_to_the_31_elements() -> None:
    R, K, N = 300_000, 64, 8192
    offsets = torch.tensor([100_000, 300_000], dtype=torch.int32, device="cuda")
    a = torch.randn(R, K, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(2, K, N, device="cuda", dtype=torch.bfloat16)
    out = grouped_gemm(a, b, offsets)
    torch.testing.assert_close(out[-1000:], a[-1000:] @ b[1], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(out[:1000], a[:1000] @ b[0], rtol=2e-2, atol=2e-2)
