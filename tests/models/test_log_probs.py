import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.models import Decoder, preset
from moecore.models.log_probs import LogProbLoss, linear_log_probs
from tests.models.test_loss import Recorder, make


def reference(hidden, weight, labels, temperature, dtype=torch.float64):
    """Log-probabilities, entropies, and both gradients of a loss of both, by log_softmax."""
    h, w = (t.detach().to(dtype).requires_grad_() for t in (hidden, weight))
    logits = (h @ w.t()).float() if dtype == torch.bfloat16 else h @ w.t()
    log_p = F.log_softmax(logits / temperature, dim=1)
    counts = labels != -100
    picked = log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0].where(counts, 0)
    entropy = -(log_p.exp() * log_p).sum(1).where(counts, 0)
    loss(picked, entropy).backward()
    return picked.detach(), entropy.detach(), h.grad, w.grad


def loss(log_probs: Tensor, entropy: Tensor | None) -> Tensor:
    """Return a loss with another gradient at every token."""
    steps = torch.linspace(-1, 2, len(log_probs), dtype=log_probs.dtype)
    found = (log_probs * steps).sum()
    return found if entropy is None else found + (entropy * steps.flip(0)).sum()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_fp32_equals_log_softmax(chunk, temperature):
    hidden, weight, labels = make(37, 13, 101)
    found = linear_log_probs(
        hidden, weight, labels, temperature=temperature, entropy=True, chunk_tokens=chunk
    )
    loss(*found).backward()
    wanted = reference(hidden, weight, labels, temperature)
    for got, want in zip((*found, hidden.grad, weight.grad), wanted, strict=True):
        assert got.dtype == torch.float32 and (got - want).abs().max() <= 2e-6 * want.abs().max()
    alone, none = linear_log_probs(hidden, weight, labels, temperature=temperature)
    assert none is None
    torch.testing.assert_close(alone, found[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("entropy", [False, True])
def test_gradcheck_in_fp64(entropy):
    hidden, weight, labels = make(9, 4, 11, torch.float64)

    def run(h, w):
        found = linear_log_probs(h, w, labels, temperature=1.3, entropy=entropy, chunk_tokens=4)
        return tuple(x for x in found if x is not None)

    assert torch.autograd.gradcheck(run, (hidden, weight))


def test_bf16_errs_at_most_twice_what_pytorch_errs():
    hidden, weight, labels = make(256, 64, 307, torch.bfloat16)
    found = linear_log_probs(hidden, weight, labels, entropy=True, chunk_tokens=100)
    loss(*found).backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    exact = reference(hidden, weight, labels, 1.0)
    plain = reference(hidden, weight, labels, 1.0, torch.bfloat16)
    ours = (*found, hidden.grad, weight.grad)
    for got, other, want in zip(ours, plain, exact, strict=True):
        floor = 1e-6 * want.abs().max()
        assert (got - want).norm() <= 2 * (other - want).norm() + floor
        assert (got - want).abs().max() <= 2 * (other - want).abs().max() + floor


def test_under_autocast_gradients_have_the_dtypes_of_what_they_are_of():
    hidden, weight, labels = make(64, 16, 33)
    with torch.autocast("cpu", torch.bfloat16):
        log_probs, _ = linear_log_probs(hidden, weight, labels)
    loss(log_probs, None).backward()
    exact = reference(hidden, weight, labels, 1.0)[0]
    assert log_probs.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert 1e-5 < (log_probs - exact).abs().max() < 0.05, "products in bf16"


def test_gradients_of_rows_without_a_label_reach_nothing():
    hidden, weight, labels = make(8, 4, 16)
    labels[:4] = -100
    log_probs, entropy = linear_log_probs(hidden, weight, labels, entropy=True)
    grads = torch.full((8,), float("nan")), torch.full((8,), float("inf"))
    grads[0][4:], grads[1][4:] = 1, 1
    torch.autograd.backward((log_probs, entropy), grads)
    assert not log_probs[:4].any() and not entropy[:4].any() and not hidden.grad[:4].any()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


@pytest.mark.parametrize("n", [0, 5])
def test_no_label_gives_zeros(n):
    hidden, weight, _ = make(n, 4, 8)
    log_probs, _ = linear_log_probs(hidden, weight, torch.full((n,), -100))
    log_probs.sum().backward()
    assert log_probs.shape == (n,) and not log_probs.any()
    assert not hidden.grad.any() and not weight.grad.any()


def test_a_second_derivative_is_refused():
    hidden, weight, labels = make(9, 4, 11)
    log_probs, _ = linear_log_probs(hidden, weight, labels)
    with pytest.raises(NotImplementedError, match=r"create_graph \(True\) must be False"):
        torch.autograd.grad(log_probs.sum(), hidden, create_graph=True)


def test_logits_of_all_tokens_never_exist():
    hidden, weight, labels = make(400, 8, 300)
    with Recorder() as seen:
        found = linear_log_probs(hidden, weight, labels, entropy=True, chunk_tokens=50)
        loss(*found).backward()
    assert seen.largest == 50 * 300


def test_a_loss_of_logits_is_that_of_the_head():
    hidden, weight, labels = make(12, 4, 16)
    labels_BT = labels.view(2, 6)
    losses = LogProbLoss(
        labels_BT=labels_BT,
        function=lambda lp, e: loss(lp.flatten(), e.flatten()),
        temperature=0.5,
        entropy=True,
    )
    whole = lambda x: x  # noqa: E731
    ours = losses.compute_from_hidden(
        hidden.view(2, 6, 4), weight, labels_BT, whole, chunk_tokens=5
    )
    other = losses.compute_from_logits((hidden @ weight.t()).view(2, 6, 16), labels_BT, whole)
    torch.testing.assert_close(ours, other)
    for a, b in zip(
        torch.autograd.grad(ours, (hidden, weight)),
        torch.autograd.grad(other, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_decoder_returns_a_loss_of_its_logits_without_predicting_further() -> None:
    model = Decoder(preset("tiny-deepseek-v3"))
    tokens = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    given = LogProbLoss(labels_BT=labels, function=lambda x, _: x.square().mean(), temperature=0.6)
    found = model(tokens, log_prob_loss=given)
    log_p = (model(tokens) / 0.6).log_softmax(-1)
    picked = log_p.gather(2, labels.clamp(min=0)[..., None])[..., 0].where(labels != -100, 0)
    torch.testing.assert_close(found, picked.square().mean())
    found.backward()
    assert model.mtp_losses is None
    assert all((p.grad is None) == ("mtp" in n) for n, p in model.named_parameters())
    with pytest.raises(ValueError, match=r"labels \(2, 12\) must be None with a log_prob_loss"):
        model(tokens, labels, log_prob_loss=given)
    with pytest.raises(ValueError, match=r"LogProbLoss.labels_BT \(2, 12\) must have the shape"):
        model(tokens[:, :8], log_prob_loss=given)


@pytest.mark.gpu
def test_bf16_on_cuda_equals_fp64() -> None:
    hidden, weight, labels = make(300, 64, 1000, torch.bfloat16)
    h, w = (t.detach().cuda().requires_grad_() for t in (hidden, weight))
    found = linear_log_probs(h, w, labels.cuda(), entropy=True, chunk_tokens=128)
    steps = torch.linspace(-1, 2, 300, device="cuda")
    ((found[0] * steps).sum() + (found[1] * steps.flip(0)).sum()).backward()
    exact = reference(hidden, weight, labels, 1.0)
    plain = reference(hidden, weight, labels, 1.0, torch.bfloat16)
    for got, same, want in zip((*found, h.grad, w.grad), plain, exact, strict=True):
        error = (got.detach().cpu() - want).norm()
        assert error <= 2 * (same - want).norm() + 1e-6 * want.abs().max()


def test_logits_of_minus_infinity_add_nothing_to_the_entropy():
    logits_BTV = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(0))
    labels_BT, excluded = torch.tensor([[0, 1, -100]]), logits_BTV.clone()
    excluded[..., 4] = -torch.inf
    excluded.requires_grad_()
    loss = LogProbLoss(labels_BT=labels_BT, function=lambda p, h: (p + h).sum(), entropy=True)
    found = loss.compute_from_logits(excluded, labels_BT, lambda rows: rows)
    found.backward()
    kept = logits_BTV[..., :4].double().requires_grad_()  # the distribution without that token
    p = kept.log_softmax(-1)[:, :2]
    wanted = p.gather(-1, labels_BT[:, :2, None]).sum() - (p.exp() * p).sum()
    wanted.backward()
    torch.testing.assert_close(found.double(), wanted)
    assert excluded.grad is not None and not excluded.grad[..., 4].any()
    torch.testing.assert_close(excluded.grad[..., :4].double(), kept.grad)
