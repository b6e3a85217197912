import pytest
import torch
from torch import Tensor

from moecore.kernels.common import iterate_expert_slices
from moecore.kernels.grouped.wgrad import grouped_wgrad
from tests.kernels.conftest import check_without_host, poison

# Rows of each expert: empty ones, one row, one expert, odd numbers, full steps of 64 rows.
COUNTS = {
    "mixed": [5, 0, 1, 300, 0, 77],
    "one expert": [131],
    "full steps": [64, 128, 64],
    "all to one": [0, 0, 190, 0],
    "no rows": [0, 0, 0],
}
SIZES = [(24, 40), (128, 256), (200, 392)]


def grouped_wgrad_ref(x, y_RN, offsets_e, *, row_ids_R=None, transposed=False) -> Tensor:
    """Return what `grouped_wgrad` does, expert by expert, summed in fp32. Host sync."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    x_RM = x if row_ids_R is None else x.index_select(0, row_ids_R)
    out = []
    for rows in iterate_expert_slices(offsets_e):
        product = x_RM[rows].to(dtype).T @ y_RN[rows].to(dtype)
        out.append(product.T if transposed else product)
    return torch.stack(out).to(x.dtype)


def make(counts, M, N, device, dtype, scale=1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Source rows, expert rows (zero past the last one in use), offsets and row ids."""
    torch.manual_seed(0)
    offsets = (torch.tensor(counts) * scale).cumsum(0).int()
    used = int(offsets[-1])
    S, R = max(9, used // 3), used + 5
    x, y = torch.randn(S, M).to(dtype), torch.randn(R, N).to(dtype)
    y[used:] = 0
    row_ids = torch.randint(0, S, (R,), dtype=torch.int32)
    return x.to(device), y.to(device), offsets.to(device), row_ids.to(device)


Case = tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]


def gathered(case: tuple[Tensor, Tensor, Tensor, Tensor], gather: bool) -> Case:
    """Arguments and row ids, or rows that are gathered already; nobody's rows hold NaN."""
    x, y, offsets, row_ids = case
    if gather:
        return (x, y, offsets), row_ids
    x = x.index_select(0, row_ids)
    x[int(offsets[-1]) :] = float("nan")
    return (x, y, offsets), None


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gather", [False, True], ids=["contiguous", "gather"])
@pytest.mark.parametrize("name", COUNTS)
def test_path_without_hopper(name: str, gather: bool, transposed: bool) -> None:
    args, row_ids = gathered(make(COUNTS[name], 24, 40, "cpu", torch.float32), gather)
    how = {"row_ids_R": row_ids, "transposed": transposed}
    expected = grouped_wgrad_ref(*args, **how)
    torch.testing.assert_close(grouped_wgrad(*args, **how), expected, rtol=1e-4, atol=1e-4)
    main = torch.ones_like(expected)
    assert grouped_wgrad(*args, **how, out=main, accumulate=True) is main
    torch.testing.assert_close(main, 1 + expected, rtol=1e-4, atol=1e-4)
    grouped_wgrad(*args, **how, out=main, accumulate=True, scale=0.3)
    torch.testing.assert_close(main, 1 + 1.3 * expected, rtol=1e-4, atol=1e-4)
    assert grouped_wgrad(*args, **how, out=main, scale=0.3) is main
    torch.testing.assert_close(main, 0.3 * expected, rtol=1e-4, atol=1e-4)
    scaled = grouped_wgrad(*args, **how, dtype=torch.float64, scale=0.3)
    assert scaled.dtype == torch.float64
    torch.testing.assert_close(scaled, 0.3 * expected.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("M, N", SIZES)
@pytest.mark.parametrize("gather", [False, True], ids=["contiguous", "gather"])
@pytest.mark.parametrize("name", COUNTS)
def test_kernel(name, gather, M, N, transposed, dtype) -> None:
    poison()
    args, row_ids = gathered(make(COUNTS[name], M, N, "cuda", dtype, scale=3), gather)
    how = {"row_ids_R": row_ids, "transposed": transposed}
    found, again = grouped_wgrad(*args, **how), grouped_wgrad(*args, **how)
    assert torch.equal(found, again)
    x, y, offsets = args
    exact = grouped_wgrad_ref(x.double(), y.double(), offsets, **how)
    plain = grouped_wgrad_ref(*args, **how)
    ours, theirs = (found.double() - exact).norm(dim=2), (plain.double() - exact).norm(dim=2)
    floor = 1e-6 * exact.norm(dim=2).max()
    assert ours.norm() <= 2 * theirs.norm() + floor
    assert ours.max() <= 2 * theirs.max() + floor  # the worst row


@pytest.mark.gpu
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("M, N", SIZES)
@pytest.mark.parametrize("gather", [False, True], ids=["contiguous", "gather"])
def test_kernel_adds_to_main_gradients(gather, M, N, transposed, main_dtype) -> None:
    args, row_ids = gathered(make(COUNTS["mixed"], M, N, "cuda", torch.bfloat16), gather)
    how = {"row_ids_R": row_ids, "transposed": transposed}
    x, y, offsets = args
    exact = grouped_wgrad_ref(x.double(), y.double(), offsets, **how)
    main = torch.randn(exact.shape, device="cuda").to(main_dtype)
    expected = main.double() + 2 * exact
    for _ in range(2):
        assert grouped_wgrad(*args, **how, out=main, accumulate=True) is main
    bound = 1e-5 if main_dtype == torch.float32 else 1e-2
    assert (main.double() - expected).norm() <= bound * expected.norm()
    assert grouped_wgrad(*args, **how, out=main) is main
    assert torch.equal(main, grouped_wgrad(*args, **how, dtype=main_dtype))


def wide_products(x_RM: Tensor, y_RN: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """torch's products of bf16 rows with fp32 results, expert by expert."""
    stops = offsets.tolist()
    pairs = [(x_RM[a:b], y_RN[a:b]) for a, b in zip([0, *stops[:-1]], stops, strict=True)]
    out = torch.stack([torch.mm(x.T, y, out_dtype=torch.float32) for x, y in pairs])
    return out.mT if transposed else out


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("M, N", SIZES)
@pytest.mark.parametrize("gather", [False, True], ids=["contiguous", "gather"])
@pytest.mark.parametrize("name", COUNTS)
def test_kernel_writes_scaled_fp32(name, gather, M, N, transposed) -> None:
    """Bounded by torch's products with fp32 results, of the same cores: nothing is rounded to bf16.

    Tensor cores add with fewer bits than fp32 has: against fp32 products both are 4 times worse.
    """
    poison()
    args, row_ids = gathered(make(COUNTS[name], M, N, "cuda", torch.bfloat16, scale=3), gather)
    how = {"row_ids_R": row_ids, "transposed": transposed}
    found = grouped_wgrad(*args, **how, dtype=torch.float32, scale=0.3)
    assert found.dtype == torch.float32
    x, y, offsets = args
    exact = 0.3 * grouped_wgrad_ref(x.double(), y.double(), offsets, **how)
    plain = 0.3 * wide_products(x if row_ids is None else x[row_ids], y, offsets, transposed)
    ours, theirs = (found.double() - exact).norm(dim=2), (plain.double() - exact).norm(dim=2)
    floor = 1e-6 * exact.norm(dim=2).max()
    assert ours.norm() <= 2 * theirs.norm() + floor
    assert ours.max() <= 2 * theirs.max() + floor  # the worst row
    main = torch.ones_like(found)
    grouped_wgrad(*args, **how, out=main, accumulate=True, scale=0.3)
    torch.testing.assert_close(main, 1 + found, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_kernel_reads_rows_past_2_to_the_31_elements() -> None:
    S, M, N = 300_000, 8192, 64
    x = torch.randn(S, M, device="cuda", dtype=torch.bfloat16)
    row_ids = torch.tensor([S - 1, 0, S - 2, 1], dtype=torch.int32, device="cuda")
    y = torch.randn(4, N, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([1, 4], dtype=torch.int32, device="cuda")
    found = grouped_wgrad(x, y, offsets, row_ids_R=row_ids)
    expected = grouped_wgrad_ref(x, y, offsets, row_ids_R=row_ids)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_kernel_never_syncs_and_replays_in_a_graph() -> None:
    def step(x: Tensor, y: Tensor, offsets: Tensor, row_ids: Tensor) -> list[Tensor]:
        return [grouped_wgrad(x, y, offsets, row_ids_R=row_ids)]

    for counts in ([70, 0, 130], [0, 199, 1]):
        check_without_host(step, make(counts, 128, 256, "cuda", torch.bfloat16))
