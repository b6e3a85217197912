import pytest
import torch
from torch import Tensor

from moecore.io.hf import changes
from moecore.io.hf.changes import Digests


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "CHUNK", 16)


def digest(digests: Digests, *tensors: Tensor) -> tuple[int, int]:
    return digests.compute({"x": tensors})["x"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    digests, x = Digests(), torch.arange(113).to(dtype)
    bits, seen = x.view(torch.uint8), {digest(digests, x)}
    for place in range(bits.numel()):
        for bit in (0, 7):
            bits[place] ^= 1 << bit
            seen.add(digest(digests, x))
            bits[place] ^= 1 << bit
    assert len(seen) == 1 + 2 * bits.numel()
    assert digest(digests, x) in seen and digest(digests, x) == digest(digests, x.clone())


def test_order_counts_within_and_across_chunks_and_tensors() -> None:
    digests = Digests()
    x = torch.arange(256, dtype=torch.int32)
    orders = [x, x.flip(0), x.roll(1), x.roll(16), x.view(2, 128).flip(0).flatten()]
    assert len({digest(digests, order) for order in orders}) == len(orders)
    a, b = x[:5], x[5:10].clone()
    assert len({digest(digests, a, b), digest(digests, b, a), digest(digests, a)}) == 3


def test_zero_and_negative_zero_differ_and_layout_does_not_count() -> None:
    digests = Digests()
    assert digest(digests, torch.zeros(3)) != digest(digests, -torch.zeros(3))
    x = torch.randn(6, 7)
    assert digest(digests, x.T) == digest(digests, x.T.contiguous())
    odd = torch.arange(9, dtype=torch.bfloat16)[1:]
    assert digest(digests, odd) == digest(digests, odd.clone())
    assert digest(digests, torch.empty(0)) == (0, 0)


def test_others_factors_give_other_digests() -> None:
    x = torch.randn(9)
    assert digest(Digests(), x) != digest(Digests(), x)
