import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from moecore.rl import DPO, GRPO, GSPO, PPO, Rollouts
from moecore.rl.objectives import MAX_LOG_RATIO, Objective

LOG_P, LOW, HIGH, KL_COEF, BETA = -0.5, 0.2, 0.3, 0.1, 0.5
LOG_RATIOS = [0.0, *(s * x for x in (1e-3, 1.0, 50.0, 120.0, 1e4) for s in (1, -1)), math.inf]
ADVANTAGES = (-1.5, 0.0, 2.0)
FIELDS: dict[str, Any] = dict(clip=LOW, clip_high=HIGH)
OBJECTIVES: dict[str, Objective] = {
    "ppo": PPO(**FIELDS),
    **{f"ppo-{kl}": PPO(kl=kl, kl_coef=KL_COEF, **FIELDS) for kl in ("k1", "k2", "k3")},  # type: ignore[arg-type]
    "grpo": GRPO(kl_coef=KL_COEF, **FIELDS),
    "gspo": GSPO(**FIELDS),
    "dpo": DPO(beta=BETA),
}


def batch() -> tuple[Rollouts, Tensor]:
    """Return two tokens per sequence, one a prompt, and weights of losses, among them zeros."""
    cases = list(product(LOG_RATIOS, ADVANTAGES, (1.0, 0.0)))
    log_r = torch.tensor([[0.0, case[0]] for case in cases]).flatten()
    made = Rollouts.of([[1]] * len(cases), [[2]] * len(cases)).replace(
        advantages_N=torch.tensor([[0.0, case[1]] for case in cases]).flatten(),
        old_log_probs_N=LOG_P - log_r,
        ref_log_probs_N=LOG_P - log_r.nan_to_num(posinf=1e4),
    )
    return made, torch.tensor([[0.0, case[2]] for case in cases]).flatten()


def clipped_gradient(log_r: float, advantage: float) -> float:
    """Return d/dx of -min(e^x A, clip(e^x) A); 0 where fp32 cannot hold e^x."""
    if log_r > MAX_LOG_RATIO:
        return 0.0
    r = math.exp(log_r)
    is_clipped = (advantage > 0 and r > 1 + HIGH) or (advantage < 0 and r < 1 - LOW)
    return 0.0 if is_clipped else -r * advantage


def kl_gradient(d: float, estimator: str) -> float:
    """Return the derivative by log p of an estimate at d = log p_ref - log p."""
    if estimator == "k3":
        return 0.0 if d > MAX_LOG_RATIO else 1 - math.exp(d)
    return 1.0 if estimator == "k1" else -d


def pair_gradients(log_r_N: list[float], weights_N: list[float]) -> list[float]:
    """Return gradients of DPO, whose pairs are tokens 1 and 3, 5 and 7, and so on."""
    gradients = [0.0] * len(log_r_N)
    for chosen in range(1, len(log_r_N), 4):
        margin = BETA * (log_r_N[chosen] - log_r_N[chosen + 2])
        slope = -BETA / (1 + math.exp(min(margin, 700)))
        weight = weights_N[chosen] + weights_N[chosen + 2]
        gradients[chosen], gradients[chosen + 2] = weight * slope, -weight * slope
    return gradients


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_are_those_by_hand_at_any_ratio(name: str) -> None:
    rollouts, weights_N = batch()
    log_probs_N = torch.full_like(weights_N, LOG_P).requires_grad_()
    loss_N = OBJECTIVES[name](log_probs_N, None, rollouts)
    (loss_N * weights_N).sum().backward()
    assert log_probs_N.grad is not None and bool(loss_N.isfinite().all())
    # fp64 differences of the fp32 numbers that the objective reads.
    log_r_N = (log_probs_N.double() - rollouts.old_log_probs_N.double()).tolist()
    d_N = (rollouts.ref_log_probs_N.double() - log_probs_N.double()).tolist()
    advantages_N = rollouts.advantages_N.tolist()  # type: ignore[union-attr]
    if name == "dpo":
        expected = pair_gradients([-d for d in d_N], weights_N.tolist())
    else:
        estimator = {"ppo": "", "gspo": "", "grpo": "k3"}.get(name, name[-2:])
        expected = [
            w * (clipped_gradient(x, a) + (KL_COEF * kl_gradient(d, estimator) if estimator else 0))
            for x, a, d, w in zip(log_r_N, advantages_N, d_N, weights_N.tolist(), strict=True)
        ]
    found = log_probs_N.grad.double()
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=2e-5, atol=2e-7)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sequence_with_one_extreme_token_has_the_gradient_of_its_mean(sign: int) -> None:
    # GSPO's ratio is that of the mean: 240 / 4 = 60 is within fp32 though e^240 is not.
    made = Rollouts.of([[1]], [[2, 3, 4, 5]])
    log_r = torch.tensor([0.0, 0.0, 240.0 * sign, 0.0, 0.0])
    made = made.replace(old_log_probs_N=LOG_P - log_r, advantages_N=torch.full((5,), -1.0))
    log_probs_N = torch.full((5,), LOG_P, requires_grad=True)
    GSPO(**FIELDS)(log_probs_N, None, made)[1:].sum().backward()
    slope = math.exp(60.0) if sign > 0 else 0.0  # e^-60 is clipped below
    expected = torch.tensor([0.0, *[slope] * 4])
    torch.testing.assert_close(log_probs_N.grad, expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_smooth_pair_has_both_orders(smoothing: float) -> None:
    """-(1 - s) log sigmoid(beta d) - s log sigmoid(-beta d): conservative DPO."""
    chosen, rejected = 0.7, -0.4
    found = DPO(beta=BETA, label_smoothing=smoothing).compute_pair_losses(
        torch.tensor([[chosen, rejected]])
    )
    x = BETA * (chosen - rejected)
    wanted = (1 - smoothing) * math.log1p(math.exp(-x)) + smoothing * math.log1p(math.exp(x))
    assert found.item() == pytest.approx(wanted, rel=1e-6)
