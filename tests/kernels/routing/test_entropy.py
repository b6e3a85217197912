import math

import pytest
import torch
from torch import Tensor

from moecore.kernels.routing.entropy import UNIT, add_entropy_, add_entropy_ref
from moecore.kernels.routing.scores import SCORE_FUNCTIONS, compute_scores_ref


def total(device: str = "cpu") -> Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device)


def logits(T: int, E: int) -> Tensor:
    return torch.randn(T, E, generator=torch.Generator().manual_seed(T * E)) * 2


@pytest.mark.parametrize("function", SCORE_FUNCTIONS)
@pytest.mark.parametrize(("T", "E"), [(0, 8), (1, 1), (77, 12), (300, 128), (3, 1500)])
def test_sum_of_the_reference(T: int, E: int, function: str, device: str) -> None:
    logits_TE, padding_T = logits(T, E).to(device), torch.arange(T, device=device) % 5 == 3
    for padding in (None, padding_T):
        ours, theirs = total(device), total(device)
        add_entropy_(ours, logits_TE, function, padding)
        add_entropy_ref(theirs, logits_TE, function, padding)
        assert ours[1] == theirs[1]
        assert int((ours[0] - theirs[0]).abs()) * UNIT <= 2e-6 * T * math.log(E + 1)


def test_a_nan_counts_as_none_and_padding_not_at_all(device: str) -> None:
    logits_TE = logits(4, 8).to(device)
    logits_TE[1], logits_TE[2] = math.nan, math.nan
    padding_T = torch.tensor([False, False, True, False], device=device)
    ours, theirs = total(device), total(device)
    add_entropy_(ours, logits_TE, "sigmoid", padding_T)
    add_entropy_ref(theirs, logits_TE[[0, 3]], "sigmoid", None)
    assert ours[1] == 3 and int((ours[0] - theirs[0]).abs()) < 100


@pytest.mark.parametrize("function", SCORE_FUNCTIONS)
def test_reference_is_the_entropy_and_adds_up_to_the_bit(function: str) -> None:
    logits_TE, padding_T = logits(64, 12), torch.arange(64) % 7 == 3
    scores_TE = compute_scores_ref(logits_TE.double(), function)[~padding_T]
    p_TE = scores_TE / scores_TE.sum(1, keepdim=True)
    expected = float(torch.distributions.Categorical(p_TE).entropy().sum())
    whole, parts = total(), total()
    add_entropy_ref(whole, logits_TE, function, padding_T)
    assert float(whole[0]) * UNIT == pytest.approx(expected, rel=1e-6)
    assert int(whole[1]) == int((~padding_T).sum())
    for part in torch.randperm(64).split([40, 1, 0, 23]):
        add_entropy_(parts, logits_TE[part], function, padding_T[part])
    assert torch.equal(whole, parts)


def test_worked_example_and_ends() -> None:
    found = total()
    add_entropy_ref(found, torch.zeros(1, 2), "softmax", None)
    assert found.tolist() == [round(math.log(2) / UNIT), 1]
    add_entropy_ref(found.zero_(), torch.tensor([[0.0, -math.inf], [500.0, 0.0]]), "softmax", None)
    assert found.tolist() == [0, 2]
    add_entropy_(found.zero_(), torch.zeros(3, 4, dtype=torch.bfloat16), "sigmoid")
    assert found.tolist() == [3 * round(math.log(4) / UNIT), 3]
