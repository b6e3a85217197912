import math

import pytest
import torch
from torch import Tensor

from moecore.kernels.routing.balance import balance_statistics, balance_statistics_ref
from moecore.kernels.routing.balance_loss import balance_loss, balance_loss_ref
from moecore.kernels.routing.counts import count_experts_and_tokens
from moecore.kernels.routing.scores import SCORE_FUNCTIONS
from tests.kernels.conftest import check_without_host
from tests.kernels.routing.test_counts import count_experts, make_ids

# (T, B, E); tiles have 4096 / E rows, at most 256.
SHAPES = [
    (1, 1, 1),
    (5, 1, 3),
    (24, 3, 8),
    (14, 7, 13),
    (5, 5, 2),
    (99, 3, 130),
    (9, 1, 1024),
    (530, 1, 16),
    (2311, 1, 7),
]
GPU_SHAPES = [
    (32768, 1, 128),
    (32768, 8, 128),
    (8191 * 3, 3, 257),
    (16384, 4, 1024),
    (4096, 4096, 64),
]
ALL = [1.2, 2.0, 5.6, 0.01]  # factors of the four losses


def shapes(device: str) -> list[tuple[int, int, int]]:
    return SHAPES + (GPU_SHAPES if device == "cuda" else [])


def make_logits(T: int, E: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(T * 1000 + E)
    return (torch.randn(T, E, generator=generator) * 3 + 1).to(device)


def make_mask(T: int, B: int, device: str = "cpu") -> Tensor:
    """A third is padding, and so is the whole first sequence of several."""
    mask = torch.rand(T, generator=torch.Generator().manual_seed(T)) < 1 / 3
    if B > 1:
        mask[: T // B] = True
    return mask.to(device)


def random(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(device)


def assert_as_good(ours: Tensor, plain: Tensor, truth: Tensor, name: str) -> None:
    """At most twice the error of plain fp32, for the whole tensor and for the worst row."""
    assert ours.shape == plain.shape == truth.shape and ours.isfinite().all(), name
    rows = [(t.double() - truth.double()).reshape(-1, truth.shape[-1]) for t in (ours, plain)]
    scale = truth.double().reshape(-1, truth.shape[-1]).norm(dim=-1)
    for measure in (lambda e: e.norm(), lambda e: e.norm(dim=-1).max()):
        found, allowed = float(measure(rows[0])), 2 * float(measure(rows[1]))
        assert found <= allowed + 1e-6 * float(measure(scale[:, None])), (name, found, allowed)


def test_statistics_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(4.0), 0.0], [0.0, 0.0], [9.0, 9.0]])
    sums, z_sum = balance_statistics(logits, 2, "softmax")
    torch.testing.assert_close(sums, torch.tensor([[1.05, 0.95], [1.0, 1.0]]))
    log2 = math.log(2.0)
    z = math.log(4.0) ** 2 + math.log(5.0) ** 2 + log2**2 + (9 + log2) ** 2
    assert float(z_sum) == pytest.approx(z)
    # Sigmoids 1/2 and 3/4, then 4/5 and 1/2.
    sums, found = balance_statistics(logits[:2], 1, "sigmoid")
    torch.testing.assert_close(sums, torch.tensor([[0.4 + 8 / 13, 0.6 + 5 / 13]]))
    assert float(found) == pytest.approx(math.log(4.0) ** 2 + math.log(5.0) ** 2)
    # sqrt(softplus(log(e - 1))) is 1, and 2 that of log(e^4 - 1).
    logits = torch.tensor([[math.log(math.e - 1), math.log(math.exp(4) - 1)]])
    sums, _ = balance_statistics(logits, 1, "sqrtsoftplus")
    torch.testing.assert_close(sums, torch.tensor([[1 / 3, 2 / 3]]))


def test_padding_by_hand() -> None:
    """Tokens of two sequences, the second and all of the last padding."""
    logits = torch.tensor([[0.0, math.log(3.0)], [7.0, math.nan], [math.inf, 1.0], [5.0, 5.0]])
    logits.requires_grad_()
    mask = torch.tensor([False, True, True, True])
    sums, z_sum = balance_statistics(logits, 2, "softmax", mask)
    (sums[0, 1] + z_sum).backward()
    torch.testing.assert_close(sums.detach(), torch.tensor([[0.25, 0.75], [0.0, 0.0]]))
    assert float(z_sum.detach()) == pytest.approx(math.log(4.0) ** 2)
    both, expected = 2 * math.log(4.0), torch.zeros(4, 2)
    expected[0] = torch.tensor([both * 0.25 - 0.1875, both * 0.75 + 0.1875])
    torch.testing.assert_close(logits.grad, expected)
    for wrong in (mask[:3], mask[:, None], mask.int()):
        with pytest.raises(ValueError, match=r"padding_mask_T \(.*\) must be bool of \[T\] \(4\)"):
            balance_statistics(logits, 2, "softmax", wrong)


def test_losses_by_hand() -> None:
    """Two sequences of two tokens, E=2, K=1: counts [2, 0] and [1, 1]."""
    counts = torch.tensor([[2, 0, 2], [1, 1, 2]])
    sums, z_sum = torch.tensor([[1.7, 0.3], [0.9, 1.1]]), torch.tensor(6.0)
    losses = balance_loss(
        sums,
        z_sum,
        counts,
        [2 * 1.0, 2 * 10.0, 2 * 100.0, 0.1],
        global_counts_E=torch.tensor([4, 12]),
    )
    micro = 2 * (0.75 * 0.65 + 0.25 * 0.35)
    sequence = (2 * 0.85 + 2 * (0.5 * 0.45 + 0.5 * 0.55)) / 2
    everywhere = 2 * (0.25 * 0.65 + 0.75 * 0.35)
    expected = torch.tensor([micro, 10 * sequence, 100 * everywhere, 0.1 * 6 / 4])
    torch.testing.assert_close(losses, expected)
    assert losses.dtype == torch.float32 and float(balance_loss(sums, z_sum, counts, ALL)[2]) == 0.0


@pytest.mark.parametrize("function", SCORE_FUNCTIONS)
def test_gradients_of_the_references(function: str) -> None:
    logits = make_logits(6, 5).double().requires_grad_()
    for mask in (None, make_mask(6, 3)):
        assert torch.autograd.gradcheck(
            lambda x, mask=mask: balance_statistics_ref(x, 3, function, mask), logits
        )
    counts = count_experts_and_tokens(make_ids(6, 2, 5), 3, 5)
    sums, z_sum = (t.detach().requires_grad_() for t in balance_statistics_ref(logits, 3, function))
    total = count_experts(make_ids(9, 2, 5), 1, 5)[0]
    assert torch.autograd.gradcheck(
        lambda s, z: balance_loss_ref(s, z, counts, ALL, global_counts_E=total), (sums, z_sum)
    )


@pytest.mark.parametrize("function", SCORE_FUNCTIONS)
def test_statistics_against_reference(device: str, function: str) -> None:
    for T, B, E in shapes(device):
        logits = make_logits(T, E, device)
        dsums, dz = random(B, E, device=device), random(1, device=device)[0] * 0.1
        results = []
        for run, x in (
            (balance_statistics, logits.clone()),
            (balance_statistics_ref, logits.clone()),
            (balance_statistics_ref, logits.double()),
        ):
            sums, z_sum = run(x.requires_grad_(), B, function)
            ((sums * dsums).sum() + z_sum * dz).backward()
            results.append((sums.detach(), z_sum.detach()[None, None], x.grad))
        for name, *trio in zip(("score_sums", "z_sum", "dlogits"), *results, strict=True):
            assert_as_good(*trio, f"{name} {function} {(T, B, E)}")


@pytest.mark.parametrize("function", SCORE_FUNCTIONS)
def test_padding_is_as_if_it_were_not_there(device: str, function: str) -> None:
    """The real tokens of each sequence alone give the same sums and gradients."""
    for T, B, E in shapes(device)[:9]:
        mask, logits = make_mask(T, B, device), make_logits(T, E, device)
        logits[mask] = torch.tensor([math.nan, math.inf, -math.inf], device=device)[
            torch.arange(int(mask.sum()), device=device) % 3
        ][:, None]
        dsums, results = random(B, E, device=device), []
        for run, x in (
            (balance_statistics, logits.clone()),
            (balance_statistics_ref, logits.clone()),
            (alone, logits.double()),
        ):
            sums, z_sum = run(x.requires_grad_(), B, function, mask)
            ((sums * dsums).sum() + z_sum * 0.1).backward()
            assert x.grad is not None and not x.grad[mask].any()
            results.append((sums.detach(), z_sum.detach()[None, None], x.grad))
        for name, *trio in zip(("score_sums", "z_sum", "dlogits"), *results, strict=True):
            assert_as_good(*trio, f"{name} {function} {(T, B, E)}")


def alone(logits: Tensor, B: int, function: str, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the tokens that are left when padding is cut out, sequence by sequence."""
    parts = [
        balance_statistics_ref(x[~m], 1, function)
        for x, m in zip(logits.chunk(B), mask.chunk(B), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.stack([p[1] for p in parts]).sum()


def test_statistics_of_strided_mask_and_of_padding_alone(device: str) -> None:
    logits, mask = make_logits(12, 5, device), make_mask(12, 1, device)
    strided = mask.repeat_interleave(2)[::2]
    assert not strided.is_contiguous()
    found = balance_statistics(logits, 3, "softmax", strided)
    expected = balance_statistics(logits, 3, "softmax", mask)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    unmasked = balance_statistics(logits, 3, "softmax", torch.zeros_like(mask))
    expected = balance_statistics(logits, 3, "softmax")
    assert all(torch.equal(a, b) for a, b in zip(unmasked, expected, strict=True))
    logits = logits.requires_grad_()
    sums, z_sum = balance_statistics(logits, 3, "sqrtsoftplus", torch.ones_like(mask))
    (sums.sum() + z_sum).backward()
    assert not sums.any() and not z_sum.any() and not logits.grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("function", SCORE_FUNCTIONS)
def test_statistics_of_extreme_logits(device: str, function: str) -> None:
    """Large logits, and experts that are switched off with -inf."""
    logits = torch.tensor([[80.0, -80.0, 0.0], [3e4, 3e4, -3e4], [-math.inf, 1.0, 2.0]])
    found = logits.to(device).requires_grad_()
    plain = logits.to(device).requires_grad_()
    for run, x in ((balance_statistics, found), (balance_statistics_ref, plain)):
        sums, z_sum = run(x, 1, function)
        assert sums.isfinite().all() and z_sum.isfinite()
        (sums.square().sum() + z_sum * 1e-9).backward()
    assert found.grad is not None and plain.grad is not None
    torch.testing.assert_close(found.grad, plain.grad, rtol=1e-5, atol=1e-7)


def test_statistics_of_strided_logits(device: str) -> None:
    logits = make_logits(10, 12, device).T
    x, same = logits.detach().requires_grad_(), logits.contiguous().requires_grad_()
    assert not x.is_contiguous()
    for leaf in (x, same):
        sums, z_sum = balance_statistics(leaf, 3, "sigmoid")
        # Expanded gradients (stride 0), as .sum() gives them.
        (sums.sum() + z_sum).backward()
    assert torch.equal(x.grad, same.grad)  # type: ignore[arg-type]


def test_statistics_of_no_gradient_and_fp64(device: str) -> None:
    logits = make_logits(6, 5, device)
    sums, z_sum = balance_statistics(logits, 2, "softmax")
    assert not sums.requires_grad and sums.dtype == z_sum.dtype == torch.float32
    double, z_double = balance_statistics(logits.double(), 2, "softmax")
    expected, z_expected = balance_statistics_ref(logits.double(), 2, "softmax")
    assert torch.equal(double, expected) and torch.equal(z_double, z_expected)
    wide, _ = balance_statistics(make_logits(2, 1025, device), 1, "softmax")
    torch.testing.assert_close(wide.sum(), torch.tensor(2.0, device=device))


def loss_case(T: int, B: int, E: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Score sums, z sum, counts with tokens, global counts."""
    sums, z_sum = balance_statistics_ref(make_logits(T, E, device), B, "softmax")
    counts = count_experts_and_tokens(make_ids(T, 2, E, device), B, E)
    total = 3 * count_experts(make_ids(T, 2, E, device, seed=1), 1, E)[0]
    return sums, z_sum, counts, total


@pytest.mark.parametrize("with_global", [False, True])
def test_loss_against_reference(device: str, with_global: bool) -> None:
    for T, B, E in shapes(device):
        sums, z_sum, counts, total = loss_case(T, B, E, device)
        total_or_none = total if with_global else None
        factors, results = random(4, device=device), []
        for run, dtype in (
            (balance_loss, torch.float32),
            (balance_loss_ref, torch.float32),
            (balance_loss_ref, torch.float64),
        ):
            s, z = (t.clone().to(dtype).requires_grad_() for t in (sums, z_sum))
            losses = run(s, z, counts, ALL, global_counts_E=total_or_none)
            (losses * factors).sum().backward()
            results.append((losses.detach()[:, None], s.grad, z.grad[None]))  # type: ignore[index]
        for name, *trio in zip(("losses", "dscore_sums", "dz_sum"), *results, strict=True):
            assert_as_good(*trio, f"{name} {(T, B, E)}")


@pytest.mark.parametrize("function", SCORE_FUNCTIONS)
@pytest.mark.parametrize("B", [0, 1, 3])
def test_everything_is_zero_without_tokens(device: str, function: str, B: int) -> None:
    logits = torch.zeros(0, 5, device=device, requires_grad=True)
    counts = count_experts_and_tokens(torch.zeros(0, 2, dtype=torch.int32, device=device), B, 5)
    sums, z_sum = balance_statistics(logits, B, function)
    total = torch.zeros(5, dtype=torch.int64, device=device)
    losses = balance_loss(sums, z_sum, counts, ALL, global_counts_E=total)
    losses.sum().backward()
    assert sums.shape == (B, 5) and not sums.any() and not z_sum.any()
    assert losses.tolist() == [0.0] * 4 and logits.grad is not None and logits.grad.shape == (0, 5)


def step(logits: Tensor, ids: Tensor, B: int, function: str, mask: Tensor | None = None) -> Tensor:
    """Everything that an auxiliary loss launches."""
    counts = count_experts_and_tokens(ids, B, logits.shape[1], mask)
    total = count_experts(ids, 1, logits.shape[1])[0]
    sums, z_sum = balance_statistics(logits, B, function, mask)
    return balance_loss(sums, z_sum, counts, ALL, global_counts_E=total)


def test_op_contracts(device: str) -> None:
    ops = torch.ops.moecore
    logits = make_logits(6, 5, device).requires_grad_()
    for mask in (None, make_mask(6, 2, device)):
        torch.library.opcheck(ops.balance_statistics, (logits, mask, 2, "sigmoid"))
    sums, z_sum, counts, total = loss_case(6, 2, 5, device)
    sums.requires_grad_()
    z_sum.requires_grad_()
    for global_counts in (None, total):
        torch.library.opcheck(ops.balance_loss, (sums, z_sum, counts, global_counts, ALL))


@pytest.mark.gpu
@pytest.mark.parametrize("function", SCORE_FUNCTIONS)
def test_kernels_never_sync_and_can_be_captured(function: str) -> None:
    ids = make_ids(4096, 2, 64, "cuda")

    def with_gradient(logits: Tensor) -> list[Tensor]:
        losses = step(logits, ids, 4, function)
        return [losses, *torch.autograd.grad(losses.sum(), logits)]

    check_without_host(with_gradient, (make_logits(4096, 64, "cuda").requires_grad_(),))


@pytest.mark.gpu
def test_statistics_address_past_2_to_the_31() -> None:
    T, E = (1 << 21) + 64, 1024
    logits = torch.zeros(T, E, device="cuda")
    logits[-32:] = make_logits(32, E, "cuda")
    tail = logits[-32:].clone().requires_grad_()
    logits.requires_grad_()
    sums, z_sum = balance_statistics(logits, 2, "softmax")
    weights = random(E, device="cuda")
    (sums[1] * weights).sum().backward()
    tail_sums, tail_z = balance_statistics_ref(tail, 1, "softmax")
    (tail_sums[0] * weights).sum().backward()
    torch.testing.assert_close(sums[0], torch.full_like(sums[0], T / 2 / E))
    torch.testing.assert_close(sums[1], tail_sums[0] + (T / 2 - 32) / E)
    assert float(z_sum) == pytest.approx(float(tail_z) + (T - 32) * math.log(E) ** 2, rel=1e-5)
    assert logits.grad is not None and tail.grad is not None and not logits.grad[: T // 2].any()
    torch.testing.assert_close(logits.grad[-32:], tail.grad, rtol=1e-5, atol=1e-7)
