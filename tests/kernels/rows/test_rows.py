from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moecore.kernels.rows.index import ExpertIndex, build_index
from moecore.kernels.rows.move import (
    copy_first_rows,
    copy_first_rows_ref,
    gather_rows,
    gather_rows_ref,
    sum_rows,
    sum_rows_ref,
)
from tests.kernels.conftest import check_without_host, poison

Where = tuple[Tensor, Tensor, Tensor]  # row_ids_R, slots_SK, num_rows


def index_of(S, K, E, *, num_local=None, multiple=1, device="cpu") -> Where:
    """The index of a random routing with dropped choices and, with num_local < E, foreign ones."""
    generator = torch.Generator().manual_seed(S * 31 + K * 7 + E)
    ids_SK = torch.rand(S, E, generator=generator).argsort(1)[:, :K]
    ids_SK = ids_SK.masked_fill(torch.rand(S, K, generator=generator) < 0.1, -1).to(torch.int32)
    index: ExpertIndex = build_index(
        ids_SK,
        torch.ones(S, K),
        first_expert=0,
        num_local_experts=num_local or E,
        row_multiple=multiple,
    )
    where = (index.row_ids_R, index.slots_SK, index.offsets_e[-1].clone())
    return tuple(t.to(device) for t in where)  # type: ignore[return-value]


def rows_of(n: int, D: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(n, D, generator=generator, device=device).to(dtype)


def test_worked_example() -> None:
    slots = torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
    ids = torch.tensor([0, 1, 0], dtype=torch.int32)
    y = torch.tensor([[1.0], [2.0], [4.0]])
    assert sum_rows(y, ids, slots).tolist() == [[5.0], [2.0]]
    assert gather_rows(torch.tensor([[7.0], [8.0]]), ids, slots).tolist() == [[7.0], [8.0], [7.0]]
    slots[0, 0] = -1  # row 0 is padding, whose row id names a source row all the same
    assert gather_rows(torch.tensor([[7.0], [8.0]]), ids, slots).tolist() == [[0.0], [8.0], [7.0]]


@settings(max_examples=60, deadline=None, database=None)
@given(st.integers(0, 8), st.integers(1, 4), st.booleans())
def test_each_is_the_gradient_of_the_other(S: int, K: int, half: bool) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    ids, slots, num_rows = index_of(S, K, 4, num_local=3, multiple=2)
    x = rows_of(S, 3, "cpu", dtype).requires_grad_()
    y = rows_of(ids.numel(), 3, "cpu", dtype, seed=1)
    y[int(num_rows) :] = float("nan")  # nobody reads them
    y.requires_grad_()
    gathered = gather_rows(x, ids, slots, num_rows)
    summed = sum_rows(y, ids, slots, num_rows)
    assert gathered.dtype == summed.dtype == dtype and summed.shape == x.shape
    by_hand = torch.zeros(S, 3)
    for s in range(S):
        for slot in slots[s].tolist():
            if slot >= 0:
                assert torch.equal(gathered[slot], x[s])
                by_hand[s] += y[slot].detach().float()
    unnamed = sorted(set(range(ids.numel())) - set(slots.flatten().tolist()))
    assert not gathered[unnamed].any() and torch.equal(summed, by_hand.to(dtype))
    gathered.backward(y.detach())
    assert torch.equal(x.grad, summed.detach())  # type: ignore[arg-type]
    summed.backward(x.detach())
    assert torch.equal(y.grad, gathered.detach())  # type: ignore[arg-type]


def test_gradcheck() -> None:
    ids, slots, num_rows = index_of(5, 2, 4)
    x = rows_of(5, 3, "cpu", torch.float64).requires_grad_()
    y = rows_of(ids.numel(), 3, "cpu", torch.float64).requires_grad_()
    for gather, add in ((gather_rows, sum_rows), (gather_rows_ref, sum_rows_ref)):
        assert torch.autograd.gradcheck(lambda t, op=gather: op(t, ids, slots, num_rows), x)
        assert torch.autograd.gradcheck(lambda t, op=add: op(t, ids, slots, num_rows), y)


def test_16_bit_sums_round_once() -> None:
    """1 + 256 ones: added in bf16 the sum sticks at 256."""
    slots = torch.arange(1000, dtype=torch.int32)[None]
    ids = torch.zeros(1000, dtype=torch.int32)
    ones = torch.ones(1000, 2, dtype=torch.bfloat16)
    assert sum_rows(ones, ids, slots).tolist() == [[1000.0, 1000.0]]
    x = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    gather_rows(x, ids, slots).backward(ones)
    assert x.grad is not None and x.grad.tolist() == [[1000.0, 1000.0]]


def test_ops_tell_the_truth_to_the_compiler() -> None:
    ids, slots, num_rows = index_of(5, 2, 4, multiple=2)
    x = rows_of(5, 3, "cpu", torch.float32).requires_grad_()
    y = rows_of(ids.numel(), 3, "cpu", torch.float32).requires_grad_()
    for name, tensor in (("gather_rows", x), ("sum_rows", y)):
        op = getattr(torch.ops.moecore, name).default
        torch.library.opcheck(op, (tensor, ids, slots, num_rows))
        torch.library.opcheck(op, (tensor, ids, slots, None))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def there_and_back(x: Tensor) -> Tensor:
        return sum_rows(gather_rows(x, ids, slots, num_rows) * 2, ids, slots, num_rows)

    there_and_back(x).sum().backward()
    assert torch.equal(x.grad, (slots >= 0).sum(1)[:, None] * 2.0 * torch.ones_like(x))  # type: ignore[arg-type]


# S, K, E, num_local, multiple, D
TINY = {
    "plain": (17, 3, 9, 9, 1, 40),
    "padded": (33, 2, 5, 5, 16, 300),
    "expert-parallel": (50, 8, 64, 8, 1, 16),
    "one-token": (1, 1, 1, 1, 1, 1),
    "all-experts": (5, 7, 7, 7, 1, 37),
    "more-choices-than-a-block": (2, 41, 43, 43, 4, 16),
    "no-token": (0, 2, 4, 4, 1, 8),
    "no-token-but-padding": (0, 2, 4, 4, 16, 8),
    "nothing-local": (6, 1, 97, 1, 1, 8),
}
REAL = {
    "qwen3-30b": (32768, 8, 128, 128, 128, 2048),
    "deepseek-v3-ep8": (16384, 8, 256, 32, 16, 7168),
    "gpt-oss": (8192, 4, 32, 32, 1, 2880),
    "more-than-2^31": ((1 << 18) + 3, 4, 8, 8, 1, 2048),
}


@pytest.mark.parametrize(
    ("name", "with_num_rows"),
    [*((name, True) for name in TINY), ("padded", False), ("no-token-but-padding", False)],
)
def test_kernel_equals_reference(device: str, name: str, with_num_rows: bool) -> None:
    # The interpreter cuts fp32 to bf16 instead of rounding, so bf16 is for GPUs.
    dtypes = [torch.float32, torch.float16] + [torch.bfloat16] * (device == "cuda")
    for dtype in dtypes:
        check_against_reference(device, TINY[name], dtype, with_num_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_kernel_equals_reference_at_real_sizes(name: str) -> None:
    poison()
    check_against_reference("cuda", REAL[name], torch.bfloat16, True)


def check_against_reference(device, case, dtype, with_num_rows) -> None:
    S, K, E, num_local, multiple, D = case
    ids, slots, used = index_of(S, K, E, num_local=num_local, multiple=multiple, device=device)
    if not with_num_rows and not S:
        ids = ids[:0]  # without num_rows every row id must exist
    num_rows = used if with_num_rows else None
    x = rows_of(S, D, device, dtype).requires_grad_()
    y = rows_of(ids.numel(), D, device, dtype, seed=1)
    named = torch.zeros(ids.numel() + 1, dtype=torch.bool, device=device)
    named[slots.flatten().long()] = True  # -1 is the spare last entry
    y[~named[:-1]] = float("nan")  # nobody reads them
    y.requires_grad_()
    gathered = gather_rows(x, ids, slots, num_rows)
    assert torch.equal(gathered, gather_rows_ref(x, ids, slots, num_rows))
    summed = sum_rows(y, ids, slots, num_rows)
    expected = sum_rows_ref(y, ids, slots, num_rows)
    assert torch.equal(summed, expected)
    (dx,) = torch.autograd.grad(gathered, x, y.detach())
    assert torch.equal(dx, expected)
    (dy,) = torch.autograd.grad(summed, y, x.detach())
    assert torch.equal(dy, gathered.detach())


def test_kernel_reads_strided_input(device: str) -> None:
    ids, slots, num_rows = index_of(19, 3, 5, device=device)
    x = rows_of(24, 19, device, torch.float32).T
    assert torch.equal(gather_rows(x, ids, slots), gather_rows_ref(x, ids, slots, None))
    y = rows_of(24, ids.numel(), device, torch.float32).T.requires_grad_()
    strided = slots.T.contiguous().T
    summed = sum_rows(y, ids, strided, num_rows)
    assert torch.equal(summed, sum_rows_ref(y, ids, slots, num_rows))
    summed.sum().backward()  # a gradient with stride 0
    assert y.grad is not None and torch.equal(
        y.grad, (torch.arange(ids.numel(), device=device) < num_rows)[:, None] * torch.ones_like(y)
    )


@pytest.mark.gpu
def test_no_sync_same_bits_capture_and_compile() -> None:
    ids, slots, num_rows = index_of(4096, 8, 64, multiple=16, device="cuda")
    x = rows_of(4096, 1024, "cuda", torch.bfloat16).requires_grad_()

    def step(x: Tensor) -> Tensor:
        y = gather_rows(x, ids, slots, num_rows)
        return sum_rows(y * y, ids, slots, num_rows)

    def both(x: Tensor) -> list[Tensor]:
        out = step(x)
        return [out, *torch.autograd.grad(out, x, x.detach())]

    expected = check_without_host(both, (x,))
    compiled: Any = torch.compile(lambda x: step(x), fullgraph=True)
    assert torch.equal(compiled(x), expected[0])


def bytes_of(R: int, B: int, device: str) -> Tensor:
    return torch.randint(0, 256, (R, B), device=device, dtype=torch.uint8)


@pytest.mark.parametrize(("R", "B"), [(1, 4), (37, 12), (300, 1024), (129, 6)])
def test_copied_first_rows(R: int, B: int, device: str) -> None:
    source = bytes_of(R, B, device)
    for used in (0, 1, R // 2, R, R + 5):
        target = bytes_of(R, B, device)
        before = target.clone()
        num_rows = torch.tensor(used, dtype=torch.int32, device=device)
        copy_first_rows(target, source, num_rows)
        copy_first_rows_ref(before, source, num_rows)
        assert torch.equal(target, before)


@pytest.mark.gpu
def test_first_rows_to_pinned_memory_and_back() -> None:
    source = bytes_of(5000, 3072, "cuda")
    host = torch.zeros(5000, 3072, dtype=torch.uint8, pin_memory=True)
    back, num_rows = torch.zeros_like(source), torch.tensor(1234, dtype=torch.int32, device="cuda")
    copy_first_rows(host, source, num_rows)
    copy_first_rows(back, host, num_rows)
    torch.cuda.synchronize()
    assert torch.equal(host[:1234], source[:1234].cpu()) and not host[1234:].any()
    assert torch.equal(back[:1234], source[:1234]) and not back[1234:].any()
