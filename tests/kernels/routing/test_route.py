"""route: every choice exactly that of the reference, ties and NaN included; weights and gradients.

Exact choices need logits on a coarse grid: two scores then are equal in both implementations, or
far apart, while random ones may differ in the last bit and swap places. Then a choice must be one
that rounding explains, and such rows at most twice as many as plain PyTorch has.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moecore.kernels.routing.route import RouteOptions, route, route_ref
from tests.kernels.choices import BASE, SIGMOID, is_possible
from tests.kernels.conftest import check_without_host

SQRT = replace(BASE, score_function="sqrtsoftplus")
POST = replace(BASE, score_order="post")
# name -> (experts, options, with a selection bias)
CASES = {
    "softmax": (13, BASE, False),
    "softmax-raw-bias": (16, replace(BASE, normalize=False, scale=0.3), True),
    "sigmoid-bias": (16, replace(SIGMOID, scale=2.5), True),
    "sigmoid-raw": (13, replace(SIGMOID, normalize=False), False),
    "post": (12, POST, False),
    "post-bias-groups": (12, replace(POST, num_groups=3, top_groups=1, scale=1.5), True),
    "post-sigmoid": (12, replace(POST, score_function="sigmoid", scale=1.5), True),
    "post-sigmoid-raw": (13, replace(POST, score_function="sigmoid", normalize=False), False),
    "deepseek": (160, replace(SIGMOID, top_k=6, num_groups=8, top_groups=3, scale=2.5), True),
    "groups-of-two": (16, replace(BASE, top_k=4, num_groups=8, top_groups=4), False),
    "all-groups": (12, replace(BASE, num_groups=4, top_groups=4), True),
    "sqrtsoftplus-bias": (16, replace(SQRT, scale=1.5), True),
    "sqrtsoftplus-raw": (13, replace(SQRT, normalize=False), False),
    "sqrtsoftplus-groups": (12, replace(SQRT, num_groups=3, top_groups=2), True),
    "groups-by-the-best": (12, replace(BASE, num_groups=4, top_groups=2, group_experts=1), True),
    "groups-by-three": (15, replace(SIGMOID, num_groups=3, top_groups=2, group_experts=3), True),
    "groups-by-all": (15, replace(POST, num_groups=3, top_groups=1, group_experts=5), False),
    "groups-of-one": (8, replace(SIGMOID, num_groups=8, top_groups=4, group_experts=1), True),
    "one-expert": (1, replace(BASE, top_k=1), False),
    "all-experts": (13, replace(SIGMOID, top_k=13), True),
    "many": (1024, replace(BASE, top_k=32), True),
}
SLOW = ("deepseek", "many")  # for the interpreter


def num_tokens(name: str, device: str) -> int:
    return 3001 if device == "cuda" else 7 if name in SLOW else 67


def inputs(name: str, device: str, *, grid: bool = True) -> tuple[Tensor, Tensor | None]:
    """Logits, of 40 positive values with many ties or of any, and a bias."""
    generator = torch.Generator().manual_seed(len(name))
    E, _, with_bias = CASES[name]
    T = num_tokens(name, device)
    logits = torch.randint(1, 41, (T, E), generator=generator) / 16
    if not grid:
        logits = 3 * torch.randn(T, E, generator=generator)
    bias = torch.randint(-3, 2, (E,), generator=generator) / 4 if with_bias else None
    return logits.to(device), None if bias is None else bias.to(device)


def with_gradient(logits, bias, options, *, ref) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, weights, and the gradient of the logits under fixed weights of the weights."""
    logits = logits.detach().clone().requires_grad_()
    ids, weights = (route_ref if ref else route)(logits, bias, options)
    factor = torch.linspace(-1, 2, weights.numel(), device=weights.device).view_as(weights)
    (weights * factor).sum().backward()
    assert logits.grad is not None
    return ids, weights.detach(), logits.grad


def choose(scores: list[list[float]], options: RouteOptions) -> list[list[int]]:
    """Ids by the reference when these are the selection scores."""
    options = replace(options, score_order="post", score_function="softmax")
    return route(torch.tensor(scores), None, options)[0].tolist()


def test_worked_example_of_weights() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).log()  # scores 0, 1/6, 2/6, 3/6
    options = replace(BASE, top_k=2, scale=10.0)
    ids, weights = route(logits, None, options)
    assert ids.tolist() == [[3, 2]] and ids.dtype == torch.int32
    torch.testing.assert_close(weights, torch.tensor([[6.0, 4.0]]))
    weights = route(logits, None, replace(options, normalize=False))[1]
    torch.testing.assert_close(weights, torch.tensor([[5.0, 10 / 3]]))
    bias = torch.tensor([1.0, 0.0, 0.0, 0.0])  # moves the choice, not the weight
    ids, weights = route(logits, bias, replace(options, normalize=False))
    assert ids.tolist() == [[0, 3]]
    torch.testing.assert_close(weights, torch.tensor([[0.0, 5.0]]))


def test_tie_order() -> None:
    options = replace(BASE, top_k=4)
    assert choose([[1.0] * 9, [0.0, 2.0, 2.0, 1.0, 2.0, 0.0, 1.0, 0.0, 0.0]], options) == [
        [0, 1, 2, 3],
        [1, 2, 4, 3],
    ]
    assert choose([[-0.0, 0.0, -0.0, 0.0, -1.0]], options) == [[0, 1, 2, 3]]
    groups = replace(BASE, top_k=3, num_groups=3, top_groups=2)
    # Sums 3, 4 and 3: groups 1 and 0.
    assert choose([[1.0, 2.0, 2.0, 2.0, 2.0, 1.0]], groups) == [[1, 2, 3]]


def test_nan_counts_as_the_greatest() -> None:
    nan, inf = float("nan"), float("inf")
    options = replace(BASE, top_k=3)
    assert choose([[1.0, nan, inf, -nan, -inf]], options) == [[1, 3, 2]]
    assert choose([[nan] * 5], options) == [[0, 1, 2]]
    ids, weights = route(torch.tensor([[nan, 1.0, 2.0, 3.0]]), None, options)
    assert ids.tolist() == [[0, 1, 2]]  # a softmax with one NaN is all NaN
    assert weights.isnan().all()


def test_group_experts_by_hand() -> None:
    """Groups [5 0 0], [3 3 0] and [2 2 2]: the best, the best two or all three decide."""
    scores = [[5.0, 0.0, 0.0, 3.0, 3.0, 0.0, 2.0, 2.0, 2.0]]
    for group_experts, ids in ((1, [0, 1, 2]), (2, [3, 4, 5])):
        options = replace(BASE, num_groups=3, top_groups=1, group_experts=group_experts)
        assert choose(scores, options) == [ids]
    # Sums of 5, 6 and 6 tie: the lower group.
    options = replace(BASE, num_groups=3, top_groups=1, group_experts=3)
    assert choose(scores, options) == [[3, 4, 5]]
    assert choose([[*scores[0][:8], 2.5]], options) == [[8, 6, 7]]


@settings(max_examples=60, deadline=None, database=None)
@given(st.data())
def test_selection_property(data: st.DataObject) -> None:
    size, num_groups = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    top_groups = data.draw(st.integers(1, num_groups))
    E, K = size * num_groups, data.draw(st.integers(1, size * top_groups))
    count = data.draw(st.integers(1, size))
    groups = dict(num_groups=num_groups, top_groups=top_groups, group_experts=count)
    options = replace(POST, top_k=K, **groups)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    logits = torch.rand(5, E, generator=generator)
    if data.draw(st.booleans()):
        logits = torch.ones(5, E)  # all tie, where the bias is 0
    bias = torch.randn(E, generator=generator) * data.draw(st.sampled_from([0.0, 0.1, 10.0]))
    ids_TK = route_ref(logits, bias, options)[0]
    for row, ids in zip((logits + bias).tolist(), ids_TK.tolist(), strict=True):
        best = {g: sum(sorted(row[g * size : (g + 1) * size])[-count:]) for g in range(num_groups)}
        kept = sorted(best, key=lambda g: -best[g])[:top_groups]
        allowed = [e for e in range(E) if e // size in kept]
        assert ids == sorted(allowed, key=lambda e: -row[e])[:K]


@pytest.mark.parametrize("name", [n for n in CASES if n not in SLOW])
def test_gradcheck(name: str) -> None:
    logits, bias = inputs(name, "cpu", grid=False)
    logits = logits[:4].double().requires_grad_()
    bias = None if bias is None else bias.double()
    torch.autograd.gradcheck(lambda z: route_ref(z, bias, CASES[name][1])[1], logits)


def test_fp64_decides_in_fp64() -> None:
    logits = torch.zeros(1, 12, dtype=torch.float64)
    logits[0, 4], logits[0, 9] = 1.0, 1.0 + 2.0**-40
    for options in (BASE, SIGMOID, SQRT, POST):
        ids, weights = route(logits, None, options)
        assert ids[0].tolist() == [9, 4, 0] and weights.dtype == torch.float32


def test_low_precision_logits_are_widened() -> None:
    logits = inputs("softmax", "cpu")[0]  # exact in bf16
    for a, b in zip(route(logits.bfloat16(), None, BASE), route(logits, None, BASE), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype


def test_refuses_what_cannot_be() -> None:
    logits = torch.zeros(2, 12)
    for options in (
        replace(BASE, top_k=13),
        replace(BASE, top_k=0),
        replace(BASE, num_groups=5),
        replace(BASE, top_k=5, num_groups=3, top_groups=1),
    ):
        with pytest.raises(ValueError, match=r"logits_TE of 12 experts must split into num_groups"):
            route(logits, None, options)
    options = replace(BASE, num_groups=4, top_groups=2, group_experts=4)
    message = r"group_experts \(4\) must be <= the experts of a group \(3"
    with pytest.raises(ValueError, match=message):
        route(logits, None, options)
    route(logits, None, replace(options, top_groups=4))  # no group is excluded


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("name", CASES)
def test_choice_is_exact(name: str, device: str) -> None:
    logits, bias = inputs(name, device)
    options = CASES[name][1]
    ids, weights = route(logits, bias, options)
    expected = route_ref(logits, bias, options)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(weights, expected[1], rtol=1e-6, atol=1e-9)


def row_errors(found: Tensor, exact: Tensor) -> Tensor:
    return (found.double() - exact).abs().amax(-1)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("grid", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_weights_and_gradient_against_fp64(name: str, grid: bool, device: str) -> None:
    logits, bias = inputs(name, device, grid=grid)
    options = CASES[name][1]
    found = with_gradient(logits, bias, options, ref=False)
    plain = with_gradient(logits, bias, options, ref=True)
    exact = with_gradient(logits.double(), bias, options, ref=True)
    differs, plain_differs = ((ids != exact[0]).any(-1) for ids in (found[0], plain[0]))
    assert differs.float().mean() <= 2 * plain_differs.float().mean() + 1e-3
    assert is_possible(found[0], logits, bias, options).all()
    same = ~(differs | plain_differs)
    for a, b, e in zip(found[1:], plain[1:], exact[1:], strict=True):
        ours, theirs = row_errors(a, e)[same], row_errors(b, e)[same]
        scale = float(e.abs().max())
        # The worst row, and all rows together.
        assert float(ours.max()) <= 2 * float(theirs.max()) + 1e-7 * scale
        assert (
            float(ours.square().mean().sqrt())
            <= 2 * float(theirs.square().mean().sqrt()) + 5e-8 * scale
        )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_special_values(device: str) -> None:
    """NaN, infinities, zeros of both signs, and scores that underflow to ties."""
    nan, inf = float("nan"), float("inf")
    rows = [
        [1.0, nan, inf, -nan, -inf, 0.0],
        [nan] * 6,
        [-inf] * 5 + [1.0],
        [-0.0, 0.0, -0.0, -1.0, 0.0, -2.0],
        [1e30, -1e30, 3e38, -3e38, 1e-40, -1e-40],
        [-420.0, -360.0, 0.0, -400.0, 5.0, -500.0],
        [inf, inf, 0.0, 1.0, 2.0, 3.0],
    ]
    logits = torch.tensor(rows, device=device)
    for options in (
        BASE,
        SIGMOID,
        SQRT,
        POST,
        replace(POST, num_groups=3, top_groups=2),
        replace(POST, num_groups=3, top_groups=2, group_experts=1),
        replace(POST, num_groups=2, top_groups=1, group_experts=3),
        replace(SIGMOID, num_groups=2, top_groups=1),
    ):
        ids, weights = route(logits, None, options)
        expected = route_ref(logits, None, options)
        assert torch.equal(ids, expected[0]), options
        torch.testing.assert_close(weights, expected[1], equal_nan=True, rtol=1e-6, atol=1e-12)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_extreme_logits_have_finite_gradients(device: str) -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0, 50.0], [-1e4, -2e4, -3e4, -90.0]], device=device)
    bias = torch.tensor([-9.0, 9.0, 0.0, 0.0], device=device)
    for options in (BASE, SIGMOID, SQRT, replace(BASE, normalize=False)):
        found = with_gradient(logits, bias, replace(options, top_k=2), ref=False)
        expected = with_gradient(logits, bias, replace(options, top_k=2), ref=True)
        for a, e in zip(found, expected, strict=True):
            assert a.isfinite().all()
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-7)


def test_sqrtsoftplus_keeps_its_digits_far_out(device: str) -> None:
    """From e^(x/2), where softplus underflows, to sqrt(x): weights and slopes against fp64."""
    options = replace(SQRT, top_k=1, normalize=False)
    x = torch.cat([torch.linspace(-160, -20, 71), torch.linspace(-20, 30, 451)])
    x = torch.cat([x, torch.tensor([-1e-30, 0.0, 1e-30, 1e4, 1e30])]).to(device)[:, None]
    true = x.double()
    score = torch.log1p(torch.exp(true.clamp(max=40))).maximum(true).sqrt()
    slope = torch.sigmoid(true) / (2 * score)
    factor = torch.linspace(-1, 2, x.numel(), device=device)[:, None]
    # The interpreter's fma rounds twice, which costs `exp` the correction of a large exponent.
    kernel_rtol = 1e-6 if device == "cuda" else 6e-6
    for ref, logits, rtol in ((False, x, kernel_rtol), (True, x, 1e-6), (True, true, 1e-14)):
        _, weights, grad = with_gradient(logits, None, options, ref=ref)
        torch.testing.assert_close(weights.double(), score, rtol=rtol, atol=0)
        torch.testing.assert_close(grad.double(), slope * factor.to(x.dtype), rtol=rtol, atol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("group_experts", [1, 2])
def test_excluded_groups_stay_out(group_experts: int, device: str) -> None:
    """Also when every allowed expert is at -inf, by its logit or by its bias."""
    inf = float("inf")
    groups = replace(POST, top_k=4, num_groups=3, top_groups=2, group_experts=group_experts)
    rows = [[-5.0, -6.0, -7.0, -8.0, -9.0, -9.0], [-inf, -inf, -5.0, -6.0, -inf, -inf]]
    ids = route(torch.tensor(rows, device=device), None, groups)[0]
    assert ids.tolist() == [[0, 1, 2, 3], [2, 3, 0, 1]]
    # Group 0 is out, though its ids are lower than those of allowed experts at -inf.
    row = [-inf, -inf, -inf, -5.0, -6.0, -inf, -7.0, -8.0, -inf]
    ids = route(torch.tensor([row], device=device), None, replace(groups, top_k=6))[0]
    assert ids.tolist() == [[3, 4, 6, 7, 5, 8]]
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]], device=device)
    scored = [
        replace(groups, score_order="pre", score_function=f)
        for f in ("softmax", "sigmoid", "sqrtsoftplus")
    ]
    for options in (groups, *scored):
        for bias, expected in (
            ([-inf] * 6, [0, 1, 2, 3]),
            ([-9.0, -9.0, -inf, -inf, -99.0, -99.0], [1, 0, 5, 4]),
            ([-9.0, -inf, -inf, -19.0, -inf, -inf], [0, 3, 1, 2]),
        ):
            ids = route(logits, torch.tensor(bias, device=device), options)[0]
            assert ids.tolist() == [expected], (bias, options)


def test_layouts(device: str) -> None:
    """Zero tokens, one token, columns of a wider matrix, a transposed one, a broadcast gradient."""
    wide = inputs("softmax", device)[0]
    for logits in (wide[:0], wide[:1], wide[:, 2:9], wide[:9].T):
        logits = logits.detach().requires_grad_()
        ids, weights = route(logits, None, BASE)
        expected = route_ref(logits, None, BASE)
        assert ids.shape == weights.shape == (logits.shape[0], 3) and torch.equal(ids, expected[0])
        torch.testing.assert_close(weights, expected[1])
        raw = route(logits, None, replace(BASE, normalize=False))[1]
        raw_ref = route_ref(logits, None, replace(BASE, normalize=False))[1]
        (a,) = torch.autograd.grad(raw.sum(), logits)  # stride 0
        (b,) = torch.autograd.grad(raw_ref.sum(), logits)
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_custom_op_contract(device: str) -> None:
    logits, bias = inputs("deepseek", device)
    logits = logits[:2].requires_grad_()
    args = (logits, bias, 6, "sigmoid", "pre", True, 2.5, 8, 3, 2)
    # Not its AOT dispatch check, which cannot add up an int and a float output: see the next test.
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.moecore.route.default, args, test_utils=utils)


def test_compiles_without_breaks(device: str) -> None:
    logits, bias = inputs("sigmoid-bias", device)
    backend = "inductor" if device == "cuda" else "aot_eager"
    forward = torch.compile(lambda z: route(z, bias, SIGMOID), fullgraph=True, backend=backend)
    leaf = logits.clone().requires_grad_()
    ids, weights = forward(leaf)
    weights.square().sum().backward()
    plain = logits.clone().requires_grad_()
    expected = route(plain, bias, SIGMOID)
    expected[1].square().sum().backward()
    assert torch.equal(ids, expected[0]) and torch.equal(weights, expected[1])
    assert leaf.grad is not None and plain.grad is not None and torch.equal(leaf.grad, plain.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["softmax-raw-bias", "deepseek", "post"])
def test_repeats_captures_and_never_syncs(name: str) -> None:
    logits, bias = inputs(name, "cuda", grid=False)

    def with_gradients(logits: Tensor) -> list[Tensor]:
        ids, weights = route(logits, bias, CASES[name][1])
        return [ids, weights, *torch.autograd.grad(weights, logits, torch.ones_like(weights))]

    check_without_host(with_gradients, (logits.requires_grad_(),), (logits.detach().flip(0),))


@pytest.mark.gpu
def test_addresses_past_two_to_the_31() -> None:
    E = 1024
    T = (1 << 31) // E + 100
    logits = torch.zeros(T, E, device="cuda")
    logits[-50:] = torch.randint(0, 40, (50, E), device="cuda") / 16
    logits.requires_grad_()
    ids, weights = route(logits, None, SIGMOID)
    (dlogits,) = torch.autograd.grad(weights, logits, torch.ones_like(weights))
    tail = logits.detach()[-50:].clone().requires_grad_()
    expected = route_ref(tail, None, SIGMOID)
    (grad,) = torch.autograd.grad(expected[1], tail, torch.ones_like(expected[1]))
    assert torch.equal(ids[-50:], expected[0]) and (ids[:-50].sum(-1) == 3).all()
    torch.testing.assert_close(weights[-50:], expected[1])
    torch.testing.assert_close(dlogits[-50:], grad)


@pytest.mark.gpu
def test_a_path_without_a_kernel_says_so() -> None:
    message = r"routing to 4 experts in torch.float64 has no kernel: plain"
    with pytest.warns(UserWarning, match=message):
        route(torch.zeros(2, 4, dtype=torch.float64, device="cuda"), None, replace(BASE, top_k=1))
