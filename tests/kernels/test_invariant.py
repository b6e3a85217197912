from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.kernels.invariant import batch_invariant, is_batch_invariant
from moecore.kernels.invariant.product import invariant_product
from moecore.kernels.triton_api import INTERPRET

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def close(found: Tensor, want: Tensor, plain: Tensor) -> None:
    """The worst element is at most twice as wrong as that of a plain product."""
    assert found.shape == want.shape
    if not want.numel():
        return
    error, allowed = (float((x.double() - want).abs().max()) for x in (found, plain))
    # The interpreter cuts numbers to bf16 and does not round them.
    cut = INTERPRET and found.dtype == torch.bfloat16
    floor = float(want.abs().max()) * (2**-7 if cut else 2**-21)
    assert error <= 2 * allowed + floor


def matrices(dtype: torch.dtype, device: str, M: int, K: int, N: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(M)
    a, b = torch.randn(M, K, generator=g), torch.randn(K, N, generator=g)
    return a.to(device, dtype), b.to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 40, 7), (37, 72, 130), (16, 0, 3), (0, 8, 8)], ids=str)
def test_what_the_reference_does(sizes, dtype, device) -> None:
    a, b = matrices(dtype, device, *sizes)
    a_wide, b_wide = a.double(), b.double()
    close(invariant_product(a, b), a_wide @ b_wide, a @ b)
    by_columns = a.t().contiguous().t(), b.t().contiguous().t()
    close(invariant_product(*by_columns), a_wide @ b_wide, a @ b)
    close(invariant_product(a, b, dtype=torch.float32), a_wide @ b_wide, a @ b)
    row, how = torch.randn(sizes[2], device=device).to(dtype), dict(beta=0.5, alpha=2.0)
    want = 2 * (a_wide @ b_wide) + 0.5 * row.double()
    close(invariant_product(a, b, row, **how), want, torch.addmm(row, a, b, **how))
    many = torch.stack([a, -a, a]), torch.stack([b, b, b])[:, :, ::2]
    close(invariant_product(*many), many[0].double() @ many[1].double(), many[0] @ many[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_number_of_rows(dtype: torch.dtype, device: str) -> None:
    # The interpreter's products are numpy's, in which places within a tile of 16 rows differ.
    most, K, N, step = (48, 70, 36, 16) if device == "cpu" else (4096, 2056, 776, 1)
    a, b = matrices(dtype, device, most, K, N)
    whole = invariant_product(a, b)
    for M in (1, 2, 15, 16, 33, 47, *(() if device == "cpu" else (100, 128, 129, 1500, 4095))):
        for start in {0, step, (most - M) // 2 // step * step, (most - M) // step * step}:
            part = invariant_product(a[start : start + M], b)
            assert torch.equal(part, whole[start : start + M])


def routed(x: Tensor) -> Tensor:
    """Rows in thirds by experts, of which one has none."""
    ends = [len(x) // 3, len(x) // 3, len(x)]
    offsets_e = torch.tensor(ends, dtype=torch.int32, device=x.device)
    w_eKN = weights(x, 3)
    return F.grouped_mm(x, w_eKN.transpose(1, 2), offs=offsets_e)


def weights(x: Tensor, *leading: int, N: int = 24) -> Tensor:
    g = torch.Generator().manual_seed(7)
    return torch.randn(*leading, N, x.shape[1], generator=g).to(x) / 8


def at_least_fp32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, weights(x)),
    "linear of rows of sequences": lambda x: F.linear(x[None], weights(x))[0],
    "linear with a bias": lambda x: F.linear(x, weights(x), weights(x)[:, 0].contiguous()),
    "one column": lambda x: F.linear(x, weights(x, N=1)),
    "vector": lambda x: x @ weights(x)[0],
    "out": lambda x: torch.mm(x, weights(x).t(), out=x.new_empty(len(x), 24)),
    "bmm": lambda x: torch.bmm(x[None], weights(x, 1).transpose(1, 2))[0],
    "baddbmm": lambda x: torch.baddbmm(x[None, :, :1], x[None], weights(x, 1).transpose(1, 2))[0],
    "einsum": lambda x: torch.einsum("td,ed->te", x, weights(x)),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(1, keepdim=True),
    "mean in fp32": lambda x: x[None].mean(-1, dtype=at_least_fp32(x))[0],
    "norm": lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
    "softmax": lambda x: x.softmax(-1),
    "fused norm": lambda x: F.rms_norm(x, x.shape[1:]),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "sigmoid in place": lambda x: x.clone().sigmoid_(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("place", PLACES)
def test_operations_of_torch(place: str, name: str, dtype: torch.dtype) -> None:
    operation, x = OPERATIONS[name], matrices(dtype, place, 67, 72, 1)[0]
    before = operation(x)
    with batch_invariant(place), torch.no_grad():
        assert is_batch_invariant()
        whole = operation(x)
        for start, stop in ((0, 1), (3, 4), (5, 38), (40, 67)):
            assert torch.equal(operation(x[start:stop]), whole[start:stop])
        with batch_invariant(place):
            assert torch.equal(operation(x), whole)
    close(whole, operation(x.double()).double(), before)
    assert not is_batch_invariant() and torch.equal(operation(x), before)


@pytest.mark.parametrize("place", PLACES)
def test_rows_of_experts(place: str) -> None:
    x = matrices(torch.bfloat16, place, 66, 64, 1)[0]
    before = routed(x)
    with batch_invariant(place):
        whole, fewer = routed(x), routed(torch.cat([x[:10], x[22:42]]))
        alone = x[22:] @ weights(x, 3)[2].t()
    assert torch.equal(fewer[10:], whole[22:42]) and torch.equal(fewer[:10], whole[:10])
    if place == "cpu":  # on a GPU kernels of two kinds
        assert torch.equal(alone, whole[22:])
    wide = [x[:22].double() @ weights(x, 3)[0].double().t()]
    wide += [x[22:].double() @ weights(x, 3)[2].double().t()]
    close(whole, torch.cat(wide), before)


@pytest.mark.gpu
def test_logits_in_fp32() -> None:
    x = matrices(torch.bfloat16, "cuda", 67, 72, 1)[0]

    def logits(x: Tensor) -> Tensor:
        return torch.mm(x, weights(x).t(), out_dtype=torch.float32)

    before = logits(x)
    with batch_invariant("cuda"):
        whole = logits(x)
        assert torch.equal(logits(x[5:9]), whole[5:9]) and whole.dtype == torch.float32
        with pytest.raises(NotImplementedError, match="must be bfloat16, float16 or float32"):
            x.double() @ weights(x).double().t()
    close(whole, x.double() @ weights(x).double().t(), before)


@pytest.mark.parametrize("place", PLACES)
def test_gradients_pass(place: str) -> None:
    def gradients(dtype: torch.dtype) -> list[Any]:
        x = matrices(torch.bfloat16, place, 33, 72, 1)[0].to(dtype).requires_grad_()
        w = weights(x.detach()).requires_grad_()
        F.silu(F.linear(x, w)).square().sum().backward()
        return [x.grad, w.grad]

    want, before = gradients(torch.float64), gradients(torch.bfloat16)
    with batch_invariant(place):
        found = gradients(torch.bfloat16)
    for got, wanted, plain in zip(found, want, before, strict=True):
        close(got, wanted, plain)


def test_a_failure_ends_the_context() -> None:
    with pytest.raises(RuntimeError), batch_invariant("cpu"):
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert not is_batch_invariant()
