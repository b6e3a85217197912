import pytest
import torch
from benchmarks.train_head import SMALLEST, VARIANTS, flush
from torch import Tensor

from moecore.base.options.precision import Recipe
from moecore.precision.head import BlockwiseHeadProducts


def compute(variant: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits and the gradients of hidden states and weight, fp32."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 128, generator=generator) for n in (128, 256))
    weight *= 0.3  # logits of about 3
    labels = torch.randint(256, (128,), generator=generator)
    how = {"recipe": Recipe()} if issubclass(VARIANTS[variant], BlockwiseHeadProducts) else {}
    products = VARIANTS[variant](weight, training=True, **how)
    logits = products.compute_logits(hidden)
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
    _, d_logits = products.compute_cross_entropy(logits.clone(), labels, needs_grad=True)
    products.write_d_hidden(d_logits, d_hidden)
    products.add_d_weight(d_logits, d_weight, overwrites=True)
    return logits, d_hidden, d_weight


@pytest.mark.parametrize(
    ("variant", "differs"),
    [
        ("fp8", (True, True, True)),
        ("fp8-logits", (True, True, True)),
        ("fp8-gradients", (False, True, True)),
        ("flushed", (False, True, True)),
        ("flushed-weight", (False, False, True)),
    ],
)
def test_a_head_differs_where_it_says(variant: str, differs: tuple[bool, ...]) -> None:
    pairs = list(zip(compute(variant), compute("bf16"), strict=True))
    assert tuple(not torch.equal(ours, exact) for ours, exact in pairs) == differs
    for (ours, exact), bound in zip(pairs, (0.05, 0.15, 0.15), strict=True):
        assert (ours - exact).norm() <= bound * exact.norm()


def test_flush_zeroes_what_e4m3_does() -> None:
    x = torch.logspace(0, -16, 256).repeat(128, 1)
    for rows in (1, 128):
        blocks = x.unflatten(0, (-1, rows)).unflatten(2, (-1, 128))
        scale = blocks.amax((1, 3), keepdim=True) / 448
        e4m3 = (blocks / scale).to(torch.float8_e4m3fn).float().view_as(x)
        flushed = flush(x, rows)
        assert torch.equal(flushed == 0, e4m3 == 0) and bool((flushed == 0).any())
        assert torch.equal(flushed[flushed != 0], x[flushed != 0])
    assert SMALLEST < 2**-18
