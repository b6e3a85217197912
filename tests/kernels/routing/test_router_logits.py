import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.kernels.routing import router_logits as module
from moecore.kernels.routing import router_logits as rl
from tests.kernels.conftest import check_without_host

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def inputs(T, D, E, device, weight_dtype, *, x_dtype=BF16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(T + D + E)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    x, weight, bias = draw(T, D), 0.05 * draw(E, D), 0.1 * draw(E)
    return x.to(x_dtype), weight.to(weight_dtype), bias.to(weight_dtype)


def upstream(T: int, E: int, device: str) -> Tensor:
    """A gradient of the logits as a softmax gives it: rows that add up to about 0."""
    generator = torch.Generator(device).manual_seed(7)
    g = torch.randn(T, E, generator=generator, device=device)
    return g - g.mean(-1, keepdim=True)


def results(tensors: tuple[Tensor, ...], g: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
    """Logits and gradients: of the op, or of F.linear in `dtype` rounded to the op's dtypes."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
    logits = rl.router_logits(*leaves) if dtype is None else F.linear(*leaves)
    logits.backward(g.to(logits.dtype))
    grads = [t.grad for t in leaves]
    if dtype == FP32:
        grads = [grad.to(t.dtype) for grad, t in zip(grads, tensors, strict=True)]  # type: ignore[union-attr]
    return [logits.detach(), *grads]  # type: ignore[list-item]


@pytest.mark.parametrize("x_dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("weight_dtype", [BF16, FP16, FP32])
def test_dtypes(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    tensors = inputs(6, 16, 5, "cpu", weight_dtype, x_dtype=x_dtype)
    logits, *grads = results(tensors, upstream(6, 5, "cpu"), None)
    assert logits.dtype == FP32 and torch.equal(logits, F.linear(*(t.float() for t in tensors)))
    assert [g.dtype for g in grads] == [x_dtype, weight_dtype, weight_dtype]


def test_gradcheck() -> None:
    tensors = [t.double().requires_grad_() for t in inputs(4, 6, 3, "cpu", FP32)]
    torch.autograd.gradcheck(lambda *t: rl.router_logits_ref(*t, dtype=torch.float64), tensors)


def test_second_derivative() -> None:
    tensors = [t.double().requires_grad_() for t in inputs(4, 6, 3, "cpu", FP32)]
    torch.autograd.gradgradcheck(lambda *t: rl.router_logits_ref(*t, dtype=torch.float64), tensors)


def test_function_transforms() -> None:
    """As of F.linear: forward mode, and reverse mode for each of several tokens."""
    x, weight, bias = (t.double() for t in inputs(4, 6, 3, "cpu", FP32))

    def total(x: Tensor) -> Tensor:
        return rl.router_logits_ref(x, weight, bias, dtype=torch.float64).square().sum()

    _, tangent = torch.func.jvp(total, (x,), (x,))
    by_token = torch.func.vmap(torch.func.grad(lambda x: total(x[None])))(x)
    expected = torch.func.grad(lambda x: F.linear(x, weight, bias).square().sum())(x)
    torch.testing.assert_close(by_token, expected)
    torch.testing.assert_close(tangent, (expected * x).sum())


def check_autocast(tensors: tuple[Tensor, ...]) -> None:
    """Backward inside of autocast gives the gradients of one outside."""
    g, found = upstream(37, 13, str(tensors[0].device)), []
    for enabled in (False, True):
        leaves = [t.clone().requires_grad_() for t in tensors]
        logits = rl.router_logits(*leaves)
        with torch.autocast(g.device.type, dtype=FP16, enabled=enabled):
            found.append(torch.autograd.grad(logits, leaves, g))
    assert all(map(torch.equal, *found))


def test_refuses_shapes_that_do_not_fit() -> None:
    x, weight, bias = inputs(4, 6, 3, "cpu", FP32)
    for args in ((x[:, :5], weight, bias), (x, weight, bias[:2]), (x, weight[:2], bias)):
        with pytest.raises(ValueError, match="must agree in D and E"):
            rl.router_logits(*args)


def shapes(device: str) -> list[tuple[int, int, int]]:
    """Prime and tiny ones, experts past a tile, chains past a chunk, splits past one."""
    small = [(37, 48, 13), (1, 8, 1), (130, 1100, 70)]
    large = [(257, 2048, 160), (5003, 2880, 32), (8192, 2048, 128), (4099, 7168, 256), (3, 33, 512)]
    return small + large if device == "cuda" else small


def errors(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """Relative to the whole tensor, and of the worst row relative to an average row."""
    difference, size = found.double() - exact, exact.square().mean().sqrt()
    if difference.ndim == 1:
        difference = difference[:, None]
    row = difference.square().mean(-1).sqrt().max()
    return float(difference.square().mean().sqrt() / size), float(row / size)


@pytest.mark.parametrize("weight_dtype", [BF16, FP32])
def test_errors_against_fp64(weight_dtype: torch.dtype, device: str) -> None:
    """At most twice those of plain fp32, whose matmul may split its sum into shorter chains."""
    for shape in shapes(device):
        tensors = inputs(*shape, device, weight_dtype)
        g = upstream(shape[0], shape[2], device)
        found, plain, exact = (results(tensors, g, d) for d in (None, FP32, torch.float64))
        for name, a, p, e in zip(
            ("logits", "x", "weight", "bias"), found, plain, exact, strict=True
        ):
            if not e.any():
                continue
            assert a.dtype == p.dtype
            floor = 4e-7 if a.dtype == FP32 else 2e-4
            for ours, theirs in zip(errors(a, e), errors(p, e), strict=True):
                assert ours <= 2 * theirs + floor, (name, shape, ours, theirs)


@pytest.mark.parametrize("weight_dtype", [BF16, FP32])
def test_splits_of_the_tokens_add_up(weight_dtype, device, monkeypatch) -> None:
    """The gradient of the weight from several programs, the last of them with fewer tokens."""
    tensors, g = inputs(131, 24, 5, device, weight_dtype), upstream(131, 5, device)
    once = results(tensors, g, None)[2]
    monkeypatch.setattr(module, "SPLIT_TOKENS", 32)
    split = results(tensors, g, None)[2]
    tolerance = 1e-2 if weight_dtype == BF16 else 1e-5  # one rounding to bf16 may differ
    torch.testing.assert_close(split, once, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("x_dtype", [BF16, FP32])
@pytest.mark.parametrize("weight_dtype", [BF16, FP32])
def test_autocast_rounds_no_gradient_of_kernels(x_dtype, weight_dtype, device) -> None:
    check_autocast(inputs(37, 48, 13, device, weight_dtype, x_dtype=x_dtype))


@pytest.mark.parametrize("parts", [(0, 1, 2), (0, 1), (1, 0, 0)])
@pytest.mark.parametrize("side_by_side", [True, False])
def test_parts_add_up(parts: tuple[int, ...], side_by_side: bool, device: str) -> None:
    v = inputs(37, 48, 13, device, FP32)[1] * 2.0 ** torch.arange(-60, 36, 2, device=device)
    if side_by_side:
        v = v.T.contiguous()
    out = rl._split_into_parts(v, parts, side_by_side=side_by_side)
    stacked = out.chunk(len(parts), dim=1 if side_by_side else 0)
    padding = [part[:, 13:] if side_by_side else part[13:] for part in stacked]
    assert not torch.stack(padding).any()
    used = [part[:, :13] if side_by_side else part[:13] for part in stacked]
    by_index = dict(zip(parts, used, strict=True))
    total = sum(by_index[i].double() for i in sorted(by_index, reverse=True))
    left = 0.0 if len(by_index) == 3 else 2.0**-14
    assert ((total - v.double()).abs() <= left * v.abs()).all()  # type: ignore[operator]


def test_values_that_are_not_finite_stay_visible(device: str) -> None:
    x, weight, bias = inputs(20, 48, 13, device, FP32)
    weight[3, 5], weight[4, 6], x[7] = float("inf"), float("nan"), float("inf")
    found, expected = rl.router_logits(x, weight, bias), rl.router_logits_ref(x, weight, bias)
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert torch.equal(found.isnan(), expected.isnan())
    torch.testing.assert_close(found[:7], expected[:7], equal_nan=True)


@pytest.mark.parametrize("weight_dtype", [BF16, FP32])
def test_layouts(weight_dtype: torch.dtype, device: str) -> None:
    """No token, columns of wider tensors, transposed ones, no bias, a broadcast gradient."""
    x, weight, _ = inputs(24, 50, 10, device, weight_dtype)
    for x_TD, weight_ED in (
        (x[:0], weight),
        (x[:, 1:34], weight[:, 8:41]),
        (x[:, :24].T, weight[:, :24]),
        (x[:, :10], weight[:, :10].T),
    ):
        leaves = [x_TD.detach().requires_grad_(), weight_ED.detach().requires_grad_()]
        logits = rl.router_logits(*leaves)
        grads = torch.autograd.grad(logits.sum(), leaves)
        expected = rl.router_logits_ref(*leaves, None)
        wanted = torch.autograd.grad(expected.sum(), leaves)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        for a, e in zip(grads, wanted, strict=True):
            assert a.shape == e.shape and a.dtype == e.dtype
            torch.testing.assert_close(a, e, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("needed", [0, 1, 2])
def test_only_the_gradient_that_is_asked_for(needed: int, device: str) -> None:
    tensors = inputs(9, 24, 5, device, BF16)
    everything = results(tensors, upstream(9, 5, device), None)[1:]
    leaves = [t.clone().requires_grad_(i == needed) for i, t in enumerate(tensors)]
    rl.router_logits(*leaves).backward(upstream(9, 5, device))
    for i, t in enumerate(leaves):
        assert torch.equal(t.grad, everything[i]) if i == needed else t.grad is None  # type: ignore[arg-type]


def test_custom_op_contract(device: str) -> None:
    leaves = [t.requires_grad_() for t in inputs(5, 16, 3, device, FP32)]
    torch.library.opcheck(torch.ops.moecore.router_logits.default, tuple(leaves))


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", [BF16, FP32])
def test_repeats_captures_and_never_syncs(weight_dtype: torch.dtype) -> None:
    g = upstream(4099, 96, "cuda")

    def with_gradients(*leaves: Tensor) -> list[Tensor]:
        logits = rl.router_logits(*leaves)
        return [logits, *torch.autograd.grad(logits, leaves, g)]

    tensors = inputs(4099, 2048, 96, "cuda", weight_dtype)
    check_without_host(with_gradients, [t.requires_grad_() for t in tensors])


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", [BF16, FP32])
def test_tf32_changes_nothing(weight_dtype: torch.dtype) -> None:
    tensors, g = inputs(1000, 2048, 96, "cuda", weight_dtype), upstream(1000, 96, "cuda")
    first = results(tensors, g, None)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        again = results(tensors, g, None)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
def test_addresses_past_two_to_the_31() -> None:
    D, E = 8192, 16
    T = (1 << 31) // D + 100
    x, weight, _ = inputs(100, D, E, "cuda", BF16)
    far = torch.zeros(T, D, device="cuda", dtype=BF16)
    far[-100:] = x
    far.requires_grad_()
    weight.requires_grad_()
    logits = rl.router_logits(far, weight)
    g = torch.zeros_like(logits)
    g[-100:] = upstream(100, E, "cuda")
    dx, dweight = torch.autograd.grad(logits, (far, weight), g)
    near = x.requires_grad_()
    wanted = rl.router_logits(near, weight)
    near_dx, near_dweight = torch.autograd.grad(wanted, (near, weight), g[-100:])
    assert torch.equal(logits[-100:], wanted) and not logits[:-100].any()
    assert torch.equal(dx[-100:], near_dx) and not dx[:-100].any()
    torch.testing.assert_close(dweight, near_dweight, rtol=1e-2, atol=1e-3)
