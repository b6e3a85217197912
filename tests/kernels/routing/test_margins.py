from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.kernels.routing.margins import (
    NUM_BINS,
    add_margins_,
    add_margins_ref,
    compute_even_bias,
    compute_even_bias_ref,
    compute_margin_range,
)
from moecore.kernels.routing.scores import compute_scores_ref

# Tokens, experts and choices; more than 1024 experts are more than one warp holds.
SIZES = [(0, 8, 2), (1, 2, 1), (77, 12, 11), (300, 128, 8)]


def inputs(T: int, E: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(T * E)
    logits_TE = torch.randn(T, E, generator=generator) * 2
    return logits_TE.to(device), (torch.randn(E, generator=generator) / 10).to(device)


def count(function: Any, *args: Any) -> Tensor:
    _, bias_E, *_ = args
    histogram_EX = torch.zeros(len(bias_E), NUM_BINS, dtype=torch.int64, device=bias_E.device)
    function(histogram_EX, *args)
    return histogram_EX


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("T", "E", "K"), [*SIZES, (3, 1025, 4), (3, 1536, 4)])
def test_counts_of_the_reference(T: int, E: int, K: int, function: str, device: str) -> None:
    """A score may differ in its last bit, and so a margin at an edge be in the next bin."""
    logits_TE, bias_E = inputs(T, E, device)
    padding_T = torch.arange(T, device=device) % 5 == 3
    for padding in (None, padding_T):
        ours, theirs = (
            count(f, logits_TE, bias_E, K, function, padding)
            for f in (add_margins_, add_margins_ref)
        )
        counted = T if padding is None else int((~padding_T).sum())
        assert (ours.sum(1) == counted).all() and ours.dtype == torch.int64
        moved_E = (ours - theirs).cumsum(1).abs().amax(1)
        assert int(moved_E.sum()) <= 2 + T * E // 5000


def test_adds_to_what_is_there_and_equals_count_as_often(device: str) -> None:
    """All scores of a token are equal: the cutoff is that score, and each margin is 0."""
    logits_TE, bias_E = torch.zeros(6, 8, device=device), torch.zeros(8, device=device)
    histogram_EX = torch.full((8, NUM_BINS), 2, dtype=torch.int64, device=device)
    add_margins_(histogram_EX, logits_TE, bias_E, 3, "sigmoid")
    added_EX = histogram_EX - 2
    assert added_EX[:, NUM_BINS // 2 - 1 : NUM_BINS // 2 + 1].sum(1).tolist() == [6] * 8
    assert added_EX.sum(1).tolist() == [6] * 8


def test_worked_example() -> None:
    """Scores 0.5, 0.75 and 0.25 with K = 1: the second best is 0.5, so margins are 0, -1/4, 1/4."""
    scores_E = torch.tensor([0.5, 0.75, 0.25], dtype=torch.float64)
    logits_TE = scores_E.logit().float()[None]
    assert torch.allclose(compute_scores_ref(logits_TE, "sigmoid"), scores_E.float())
    histogram_EX = count(add_margins_ref, logits_TE, torch.zeros(3), 1, "sigmoid", None)
    low, width = compute_margin_range(torch.zeros(3))
    assert float(low) == -1 and float(width) == 2 / NUM_BINS
    bins_E, edges_E = histogram_EX.argmax(1), torch.tensor([500, 375, 625])
    assert ((bins_E == edges_E) | (bins_E == edges_E - 1)).all(), "edges, but for rounding"


def test_a_nan_is_no_address(device: str) -> None:
    logits_TE, bias_E = inputs(5, 16, device)
    logits_TE[2] = float("nan")
    for function in ("softmax", "sigmoid"):
        histogram_EX = count(add_margins_, logits_TE, bias_E, 2, function)
        assert histogram_EX.sum(1).tolist() == [5] * 16


@pytest.mark.parametrize(("T", "E", "K"), SIZES[1:])
def test_even_bias_has_the_bits_of_the_reference(T: int, E: int, K: int, device: str) -> None:
    """Layers of other biases side by side, each as it would be alone; nothing counted in one."""
    logits_TE, bias_E = inputs(T, E, device)
    bias_LE = torch.stack([bias_E, bias_E.flip(0) * 3, bias_E - 5])
    histogram_LEX = torch.stack(
        [count(add_margins_ref, logits_TE, bias, K, "sigmoid", None) for bias in bias_LE]
    )
    histogram_LEX[1] = 0
    solved_LE = compute_even_bias(histogram_LEX, bias_LE, K)
    assert torch.equal(solved_LE, compute_even_bias_ref(histogram_LEX, bias_LE, K))
    assert torch.equal(solved_LE[1], bias_LE[1]) and solved_LE.dtype == torch.float32
    assert torch.equal(solved_LE[2], compute_even_bias(histogram_LEX[2], bias_LE[2], K))
    assert torch.equal(solved_LE, compute_even_bias(histogram_LEX.mT.contiguous().mT, bias_LE, K))


def test_even_bias_of_more_experts_than_one_warp_holds(device: str) -> None:
    """One layer: the interpreter runs a program for each expert."""
    logits_TE, bias_E = inputs(9, 1025, device)
    histogram_EX = count(add_margins_ref, logits_TE, bias_E, 24, "sigmoid", None)
    solved_E = compute_even_bias(histogram_EX, bias_E, 24)
    assert torch.equal(solved_E, compute_even_bias_ref(histogram_EX, bias_E, 24))


def test_even_bias_worked_example(device: str) -> None:
    """K / E of 8 tokens are 2. One expert has 1 in bin 10 and 4 in bin 20: a quarter into it."""
    histogram_EX = torch.zeros(4, NUM_BINS, dtype=torch.int64, device=device)
    histogram_EX[:, 999] = 8
    histogram_EX[0, 10], histogram_EX[0, 20], histogram_EX[0, 999] = 1, 4, 3
    solved_E = compute_even_bias(histogram_EX, torch.zeros(4, device=device), 1)
    expected = torch.tensor([-1 + 20.25 * 0.002] + [-1 + 999.25 * 0.002] * 3)
    torch.testing.assert_close(solved_E.cpu(), expected, atol=1e-6, rtol=0)
