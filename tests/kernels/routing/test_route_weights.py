from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moecore.kernels.routing.route import route, route_weights, route_weights_ref
from tests.kernels.choices import BASE, SIGMOID
from tests.kernels.routing.test_route import CASES, POST, SQRT, inputs

OPTIONS = {
    "softmax": BASE,
    "softmax-raw": replace(BASE, normalize=False, scale=0.5),
    "sigmoid": replace(SIGMOID, scale=2.5),
    "sqrtsoftplus": SQRT,
    "post": POST,
    "post-sigmoid": replace(POST, score_function="sigmoid"),
}


def gradient(logits: Tensor, ids: Tensor, options: object, *, ref: bool) -> tuple[Tensor, Tensor]:
    logits = logits.detach().clone().requires_grad_()
    weights = (route_weights_ref if ref else route_weights)(logits, ids, options)
    factors = torch.linspace(-1, 2, weights.numel(), device=logits.device).view(weights.shape)
    (weights * factors).sum().backward()
    assert logits.grad is not None
    return weights.detach(), logits.grad


@pytest.mark.parametrize("name", [n for n in CASES if n != "many"])
def test_own_choices_get_their_own_bits(name: str, device: str) -> None:
    options = CASES[name][1]
    logits, bias = inputs(name, device, grid=False)
    first, second = (logits.clone().requires_grad_() for _ in range(2))
    ids, expected = route(first, bias, options)
    found = route_weights(second, ids, options)
    assert torch.equal(found, expected)
    for weights in (expected, found):
        weights.square().sum().backward()
    assert torch.equal(first.grad, second.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["all-groups", "softmax-raw-bias", "groups-of-two", "post"])
def test_bits_do_not_depend_on_the_address(name: str, device: str) -> None:
    """Logits that are not aligned are loaded in other pieces, so other lanes hold them."""
    options = CASES[name][1]
    logits, bias = inputs(name, device, grid=False)
    moved = torch.cat([logits.new_zeros(1), logits.flatten()])[1:].view(logits.shape)
    ids, weights = route(logits, bias, options)
    moved_ids, moved_weights = route(moved, bias, options)
    assert torch.equal(ids, moved_ids) and torch.equal(weights, moved_weights)
    assert torch.equal(weights, route_weights(moved, ids, options))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, for rows without a choice
@pytest.mark.parametrize("num_columns", [1, 3, 7])
@pytest.mark.parametrize("name", OPTIONS)
def test_missing_choices_have_no_part(name: str, num_columns: int, device: str) -> None:
    """Against a loop that sees only the choices there are; all of E, and rows without any."""
    options, E = replace(OPTIONS[name], top_k=num_columns), 7
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(11, E, generator=generator)
    order = torch.stack([torch.randperm(E, generator=generator) for _ in range(11)])
    ids = order[:, :num_columns].int()
    ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.4, -1)
    ids[4] = -1
    found, dlogits = gradient(logits.to(device), ids.to(device), options, ref=False)
    truth, dtruth = gradient(logits.double(), ids, options, ref=True)
    torch.testing.assert_close(found.cpu().double(), truth, rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(dlogits.cpu().double(), dtruth, rtol=1e-5, atol=2e-6)
    for t in range(11):
        here = [int(e) for e in ids[t] if e >= 0]
        row = logits[t].double()
        if options.is_softmax_after_choice:
            by_hand = row[here].softmax(0)
        else:
            scores = {"softmax": row.softmax(0), "sigmoid": row.sigmoid()}.get(
                options.score_function, (1 + row.exp()).log().sqrt()
            )[here]
            by_hand = scores / scores.sum() if options.normalize else scores
        assert (truth[t][ids[t] < 0] == 0).all()
        torch.testing.assert_close(truth[t][ids[t] >= 0], by_hand * options.scale)
    assert (dlogits[4] == 0).all(), "a token without a choice has no gradient"


def test_all_experts_of_many(device: str) -> None:
    """Expert choice: as many columns as experts."""
    E = 160
    logits = torch.randn(3, E, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(E).expand(3, E).int().clone()
    ids[1, ::2] = -1
    options = replace(SIGMOID, top_k=1, normalize=False)
    found = route_weights(logits.to(device), ids.to(device), options).cpu()
    torch.testing.assert_close(found, torch.where(ids >= 0, logits.sigmoid(), 0.0))


def test_no_tokens(device: str) -> None:
    logits = torch.zeros(0, 7, device=device, requires_grad=True)
    weights = route_weights(logits, torch.zeros(0, 3, dtype=torch.int32, device=device), BASE)
    assert weights.shape == (0, 3)
    weights.sum().backward()
    assert logits.grad is not None and logits.grad.shape == (0, 7)


def test_custom_op_contract(device: str) -> None:
    logits = torch.randn(5, 7, device=device, requires_grad=True)
    ids = torch.tensor([[0, 3], [1, -1], [-1, -1], [6, 2], [4, 5]]).int().to(device)
    arguments = (logits, ids, 2, "softmax", "pre", True, 1.0, 1, 1, 2)
    torch.library.opcheck(torch.ops.moecore.route_weights.default, arguments)
