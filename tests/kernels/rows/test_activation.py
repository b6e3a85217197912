import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.kernels.rows.activation import (
    GATED_KINDS,
    KINDS,
    PLAIN_KINDS,
    ActivationOptions,
    activate_rows,
    differentiate_activation,
    split_columns,
    weighted_activation,
    weighted_activation_bwd,
    weighted_activation_bwd_ref,
    weighted_activation_ref,
)
from tests.kernels.conftest import check_twice, check_without_host, poison

ALL = [
    ActivationOptions(kind=kind, limit=1.5, up_limit=2.5, interleaved=interleaved)
    for kind in KINDS
    for interleaved in (False, True)
]
NAMES = [f"{o.kind}-{'interleaved' if o.interleaved else 'split'}" for o in ALL]


def inputs(R, F_, options, *, device="cpu", dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """h, weights and the output's gradient."""
    generator = torch.Generator(device).manual_seed(R * 31 + F_)
    where: dict[str, Any] = dict(generator=generator, device=device)
    C = 2 * F_ if options.gated else F_
    h_RC = (2 * torch.randn(R, C, **where)).to(dtype)
    weights_R = torch.rand(R, **where) + 0.1
    if dtype == torch.float64:
        weights_R = weights_R.double()
    return h_RC, weights_R, torch.randn(R, F_, **where).to(dtype)


def count(n: int, device: str = "cpu") -> Tensor:
    return torch.tensor(n, dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    ("kind", "gate", "up", "expected"),
    [
        ("swiglu", 1.0, 2.0, 2 / (1 + math.exp(-1))),
        ("geglu", 1.0, 2.0, 1 + math.tanh((2 / math.pi) ** 0.5 * 1.044715)),
        ("relu2", -3.0, 3.0, 9.0),
        ("relu", -3.0, 3.0, 3.0),
        ("gelu", 0.0, 1.0, 0.5 * (1 + math.erf(0.5**0.5))),
        ("gelu", 0.0, -2.0, -(1 - math.erf(2**0.5))),
        ("silu", 0.0, -2.0, -2 / (1 + math.exp(2))),
        ("clamped_swiglu", 10.0, -9.0, -6 * 7 / (1 + math.exp(-1.702 * 7))),
        ("clamped_swiglu", -10.0, 9.0, 8 * -10 / (1 + math.exp(1.702 * 10))),
        ("limited_swiglu", 10.0, -9.0, 7 / (1 + math.exp(-7)) * -7),
        ("limited_swiglu", -10.0, 9.0, -10 / (1 + math.exp(10)) * 7),
        ("situ_glu", 3.0, -9.0, 7 * math.tanh(3 / 7) / (1 + math.exp(-3)) * 7 * math.tanh(-9 / 7)),
    ],
)
def test_known_values(kind: str, gate: float, up: float, expected: float) -> None:
    options = ActivationOptions(kind=kind)
    h = torch.tensor([[gate, up]], dtype=torch.float64)
    found = activate_rows(h, options)
    wanted = [[expected]] if options.gated else [[0.0, expected]]
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))
    assert activate_rows(h.bfloat16(), options).dtype == torch.float32
    weighted = weighted_activation(h, torch.tensor([0.5]), None, options)
    torch.testing.assert_close(weighted, torch.tensor(wanted, dtype=torch.float64) / 2)


def test_gate_and_up_have_limits_of_their_own() -> None:
    """Kimi K3's 4 and 25, by the published formula; slopes by the chain rule."""
    gate, up, options = 5.0, -30.0, ActivationOptions(kind="situ_glu", limit=4.0, up_limit=25.0)
    s, t, v = 1 / (1 + math.exp(-gate)), math.tanh(gate / 4), math.tanh(up / 25)
    h = torch.tensor([[gate, up]], dtype=torch.float64)
    assert activate_rows(h, options).item() == pytest.approx(4 * t * s * 25 * v, rel=1e-12)
    slopes = ((1 - t * t) * s + 4 * t * s * (1 - s)) * 25 * v, 4 * t * s * (1 - v * v)
    assert differentiate_activation(h, options).tolist()[0] == pytest.approx(slopes, rel=1e-12)
    clamped = ActivationOptions(kind="limited_swiglu", limit=4.0, up_limit=25.0)
    expected = 4 / (1 + math.exp(-4)) * -25
    assert activate_rows(h, clamped).item() == pytest.approx(expected, rel=1e-12)
    near = activate_rows(h / 1e3, options), activate_rows(h / 1e3, ActivationOptions(kind="swiglu"))
    torch.testing.assert_close(*near, rtol=1e-5, atol=0)  # as SwiGLU around 0


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'tanh'.*must be one of 'swiglu'"):
        ActivationOptions(kind="tanh")


@pytest.mark.parametrize("kind", GATED_KINDS)
def test_interleaved_is_a_permutation_of_columns(kind: str) -> None:
    h, w, _ = inputs(4, 5, ActivationOptions(kind=kind))
    alternating = torch.stack(h.chunk(2, -1), -1).flatten(-2)
    split = weighted_activation(h, w, None, ActivationOptions(kind=kind))
    options = ActivationOptions(kind=kind, interleaved=True)
    assert torch.equal(weighted_activation(alternating, w, None, options), split)
    assert torch.equal(torch.cat(split_columns(alternating, options), -1), h)


@pytest.mark.parametrize("options", ALL, ids=NAMES)
def test_gradients(options: ActivationOptions) -> None:
    h, w, da = inputs(6, 3, options)
    h.requires_grad_(), w.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h, w: weighted_activation(h, w, count(4), options), (h, w)
    )
    assert torch.autograd.gradcheck(lambda h: weighted_activation(h, None, None, options), h)
    a = weighted_activation_ref(h, w, count(4), options)
    dh, dw = torch.autograd.grad(a, (h, w), da)
    found = weighted_activation_bwd_ref(h.detach(), da, w.detach(), count(4), options)
    for x, y in zip(found, (dh, dw, a.detach()), strict=True):
        torch.testing.assert_close(x, y)
    slopes = differentiate_activation(h.detach(), options)
    (by_autograd,) = torch.autograd.grad(activate_rows(h, options).sum(), h)
    torch.testing.assert_close(slopes, by_autograd)


def test_rows_past_the_count_are_not_read() -> None:
    check_unused_rows("cpu", ActivationOptions(kind="swiglu"))


def check_unused_rows(device: str, options: ActivationOptions) -> None:
    h, w, da = inputs(7, 4, options, device=device, dtype=torch.float32)
    for t in (h, w, da):
        t[5:] = float("nan")
    h.requires_grad_(), w.requires_grad_()
    a = weighted_activation(h, w, count(5, device), options)
    a.backward(da)
    found = weighted_activation_bwd(h.detach(), da, w.detach(), count(5, device), options)
    for t in (a.detach(), h.grad, w.grad, *found):
        assert t is not None and not t[5:].any() and not t.isnan().any()


# R, F, rows in use (None: all, and no count is passed)
TINY = {
    "plain": (19, 24, 15),
    "wide": (5, 300, None),
    "one-row": (1, 1, 1),
    "prime": (67, 37, None),
    "none-used": (9, 16, 0),
    "no-row": (0, 8, 0),
}
REAL = {
    "qwen3-30b": (262144, 768, 250001),
    "mixtral": (16384, 14336, None),
    "gpt-oss": (32771, 2880, 32768),
    "more-than-2^31": ((1 << 20) + 3, 1024, None),
}


@pytest.mark.parametrize("options", ALL, ids=NAMES)
@pytest.mark.parametrize("name", TINY)
def test_kernel_is_as_good_as_pytorch(device: str, name: str, options: ActivationOptions) -> None:
    # The interpreter cuts fp32 to bf16 instead of rounding, so bf16 is for GPUs.
    dtypes = [torch.float32, torch.float16] + [torch.bfloat16] * (device == "cuda")
    for dtype in dtypes:
        check_against_fp64(device, TINY[name], options, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [ALL[0], ALL[-1]], ids=[NAMES[0], NAMES[-1]])
@pytest.mark.parametrize("name", REAL)
def test_kernel_is_as_good_as_pytorch_at_real_sizes(name: str, options: ActivationOptions) -> None:
    poison()
    check_against_fp64("cuda", REAL[name], options, torch.bfloat16)


def check_against_fp64(device, case, options, dtype) -> None:
    R, F_, used = case
    num_rows = None if used is None else count(used, device)
    h, w, da = inputs(R, F_, options, device=device, dtype=dtype)
    h.requires_grad_(), w.requires_grad_()
    a = weighted_activation(h, w, num_rows, options)
    dh, dw = torch.autograd.grad(a, (h, w), da)
    assert (a.dtype, dh.dtype, dw.dtype) == (dtype, dtype, torch.float32)
    a = a.detach()
    again = weighted_activation_bwd(h.detach(), da, w.detach(), num_rows, options)
    assert all(torch.equal(x, y) for x, y in zip(again, (dh, dw, a), strict=True))
    for t in (a, dh, dw):
        assert used is None or not t[used:].any()
    # A block of rows at a time: fp64 of everything would not fit.
    for start in sorted({0, max((used or R) - 64, 0)}):
        rows = slice(start, min(start + 64, used if used is not None else R))
        with torch.no_grad():
            part, weights = h[rows].clone(), w[rows].clone()
        plain = gradients_of(plain_pytorch, part, weights.to(dtype), da[rows], options)
        exact = gradients_of(
            lambda *args: weighted_activation_ref(args[0], args[1], None, args[2]),
            part.double(),
            weights.double(),
            da[rows].double(),
            options,
        )
        for found, rough, true in zip((a, dh, dw), plain, exact, strict=True):
            check_twice(found[rows], rough, true, floor=4 * torch.finfo(dtype).eps)


def gradients_of(op, h, w, da, options) -> tuple[Tensor, ...]:
    h.requires_grad_(), w.requires_grad_()
    a = op(h, w, options)
    return a.detach(), *torch.autograd.grad(a, (h, w), da)


def plain_pytorch(h: Tensor, w: Tensor, options: ActivationOptions) -> Tensor:
    """Every step rounds to the dtype of h."""
    if not options.gated:
        plain = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
        a = plain[options.kind](h) if options.kind in plain else F.relu(h).square()
        return a * w[:, None]
    gate, up = split_columns(h, options)
    if options.kind == "swiglu":
        return F.silu(gate) * up * w[:, None]
    if options.kind == "geglu":
        return F.gelu(gate, approximate="tanh") * up * w[:, None]
    limit, up_limit = options.limit, options.up_limit or options.limit
    if options.kind == "situ_glu":
        capped = up_limit * torch.tanh(up / up_limit)
        return limit * torch.tanh(gate / limit) * torch.sigmoid(gate) * capped * w[:, None]
    gate, up = gate.clamp(max=limit), up.clamp(-up_limit, up_limit)
    if options.kind == "limited_swiglu":
        return F.silu(gate) * up * w[:, None]
    return (up + 1) * (gate * torch.sigmoid(options.alpha * gate)) * w[:, None]


def test_kernel_leaves_unused_rows_alone(device: str) -> None:
    for options in ALL:
        check_unused_rows(device, options)


def test_kernel_lets_nan_through_and_stays_finite_far_out(device: str) -> None:
    for options in ALL:
        h, _, da = inputs(4, 3, options, device=device, dtype=torch.float32)
        h[0], h[1], h[2] = 1e4, -1e4, float("nan")
        dh, _, a = weighted_activation_bwd(h, da, None, None, options)
        expected = weighted_activation_bwd_ref(h, da, None, None, options)
        assert dh[:2].isfinite().all() and a[:2].isfinite().all() and a[2].isnan().all()
        if options.kind == "relu":  # whose slope of a NaN is 1, as torch's
            assert torch.equal(dh[2], da[2])
        else:
            assert dh[2].isnan().all()
        torch.testing.assert_close(dh[:2], expected[0][:2])
        torch.testing.assert_close(a[:2], expected[2][:2])


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_kernel_at_the_bend_and_in_the_tails(device: str, kind: str) -> None:
    """Zeros of both signs, and where gelu's two terms cancel; slopes by autograd in fp64."""
    options = ActivationOptions(kind=kind)
    h = torch.cat([torch.linspace(-9, 9, 721), torch.tensor([-0.0, 0.0, 1e-30, -1e-30, 30.0])])
    h = h.to(device)[:, None]
    found = weighted_activation_bwd(h, torch.ones_like(h), None, None, options)
    exact = h.double().requires_grad_()
    a = activate_rows(exact, options)
    (slopes,) = torch.autograd.grad(a.sum(), exact)
    torch.testing.assert_close(found[2].double(), a.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[0].double(), slopes, rtol=1e-6, atol=1e-6)


def test_kernel_keeps_the_bits_of_small_values_under_smooth_limits(device: str) -> None:
    """Each element by itself, from far inside of both limits to far outside."""
    options = ActivationOptions(kind="situ_glu", limit=4.0, up_limit=25.0)
    small = torch.logspace(-15, 1.3, 111)
    values = torch.cat([small, -small, torch.linspace(-20, 20, 161)])
    h = torch.stack([values, 5 * values.roll(100)], dim=1).to(device)
    found = weighted_activation_bwd(h, torch.ones_like(h[:, :1]), None, None, options)
    exact = h.double().requires_grad_()
    a = activate_rows(exact, options)
    (slopes,) = torch.autograd.grad(a.sum(), exact)
    # An exp of a GPU rounds x * log2(e) first: 20 * 2^-24 of the sigmoid.
    torch.testing.assert_close(found[2].double(), a.detach(), rtol=2e-6, atol=0)
    cancelled = 4 * 25 * torch.finfo(torch.float32).eps  # of 1 - tanh^2 near 1, as in torch
    torch.testing.assert_close(found[0].double(), slopes, rtol=2e-6, atol=cancelled)


def test_a_function_runs_in_place_of_the_kernel(device: str) -> None:
    options = ActivationOptions(kind="swiglu", function=lambda h: h.chunk(2, -1)[0].sin())
    h_RC, weights_R, _ = inputs(5, 16, options, device=device, dtype=torch.float32)
    expected = h_RC[:, :16].sin() * weights_R[:, None]
    assert torch.equal(weighted_activation(h_RC, weights_R, None, options), expected)


def test_kernel_reads_strided_input(device: str) -> None:
    options = ActivationOptions(kind="swiglu")
    h, w, da = inputs(9, 6, options, device=device, dtype=torch.float32)
    strided = h.T.contiguous().T, w.repeat(2, 1).T[:, 0], da.T.contiguous().T
    found = weighted_activation_bwd(strided[0], strided[2], strided[1], None, options)
    expected = weighted_activation_bwd(h, da, w, None, options)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    h.requires_grad_()
    weighted_activation(h, w, None, options).sum().backward()  # a gradient with stride 0
    assert h.grad is not None and h.grad.isfinite().all()


def test_ops_tell_the_truth_to_the_compiler(device: str) -> None:
    options = ActivationOptions(kind="geglu")
    h, w, da = inputs(9, 6, options, device=device, dtype=torch.float32)
    rest = (count(7, device), "geglu", 7.0, 7.0, 1.702, False)
    backward = torch.ops.moecore.weighted_activation_bwd.default
    for with_output in (False, True):
        torch.library.opcheck(backward, (h, da, w, *rest, with_output))
    args = (h.requires_grad_(), w.requires_grad_(), *rest)
    torch.library.opcheck(torch.ops.moecore.weighted_activation.default, args)


@pytest.mark.gpu
def test_no_sync_same_bits_capture_and_compile() -> None:
    options = ActivationOptions(kind="swiglu")
    h, w, da = inputs(4096, 768, options, device="cuda", dtype=torch.bfloat16)
    num_rows = count(4001, "cuda")

    def both(h: Tensor, w: Tensor) -> list[Tensor]:
        a = weighted_activation(h, w, num_rows, options)
        return [a, *torch.autograd.grad(a, (h, w), da)]

    expected = check_without_host(both, (h.requires_grad_(), w.requires_grad_()))
    compiled = torch.compile(weighted_activation, fullgraph=True)
    assert torch.equal(compiled(h, w, num_rows, options), expected[0])
