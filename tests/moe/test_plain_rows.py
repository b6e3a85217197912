import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moecore.moe.backends import gather_rows_by_index, sum_rows_by_index


@settings(max_examples=60, deadline=None, database=None)
@given(st.integers(0, 6), st.integers(0, 12), st.integers(0, 10**6), st.booleans())
def test_gather_and_sum_are_adjoint(S: int, R: int, seed: int, half: bool) -> None:
    """<gather(x), y> == <x, sum(y)>, and each is the other's gradient."""
    generator = torch.Generator().manual_seed(seed)
    R = R if S else 0
    dtype = torch.bfloat16 if half else torch.float32
    ids = torch.randint(0, max(S, 1), (R,), generator=generator).int()
    # Small whole numbers: exact in bf16, so that equality is exact.
    x = torch.randint(-4, 5, (S, 3), generator=generator).to(dtype).requires_grad_()
    y = torch.randint(-4, 5, (R, 3), generator=generator).to(dtype).requires_grad_()
    gathered, summed = gather_rows_by_index(x, ids), sum_rows_by_index(y, ids, S)
    assert gathered.dtype == summed.dtype == dtype and summed.shape == x.shape
    by_hand = torch.zeros(S, 3)
    for r, s in enumerate(ids.tolist()):
        assert torch.equal(gathered[r], x[s])
        by_hand[s] += y[r].detach().float()
    assert torch.equal(summed.float(), by_hand)
    gathered.backward(y.detach())
    assert torch.equal(x.grad, summed.detach())  # type: ignore[arg-type]
    summed.backward(x.detach())
    assert torch.equal(y.grad, gathered.detach())  # type: ignore[arg-type]


def test_bf16_sums_round_once() -> None:
    """Added one by one in bf16 the sum sticks at 256."""
    ids = torch.zeros(1000, dtype=torch.int32)
    ones = torch.ones(1000, 2, dtype=torch.bfloat16, requires_grad=True)
    assert sum_rows_by_index(ones, ids, 1).tolist() == [[1000.0, 1000.0]]
    x = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    gather_rows_by_index(x, ids).backward(torch.ones(1000, 2, dtype=torch.bfloat16))
    assert x.grad is not None and x.grad.tolist() == [[1000.0, 1000.0]]
