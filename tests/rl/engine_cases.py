"""Rollouts, and objectives by hand: one process, one sequence at a time, plain PyTorch.

The formulas are those of the papers: PPO arXiv:1707.06347, GRPO arXiv:2402.03300, GSPO
arXiv:2507.18071, DPO arXiv:2305.18290, estimators of KL by J. Schulman ("Approximating KL
Divergence").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore import BalanceConfig
from moecore.models import Decoder, DecoderConfig, preset
from moecore.rl import DPO, GRPO, GSPO, PPO, OwnObjective, Rollouts, RouterReplay
from moecore.rl.objectives import Objective
from tests.rl.replay_cases import randomize

VOCABULARY = 128
TEMPERATURE = 0.8
LENGTHS = [(3, 5), (2, 9), (4, 1), (1, 6)]  # of prompt and response
CLIP, HIGH, KL_COEF, ENTROPY_COEF, BETA = 0.2, 0.3, 0.1, 0.02, 0.5


def config(num_experts: int = 8) -> DecoderConfig:
    """Balance losses would not be the same whatever the micro-batches."""
    tiny = preset("tiny-shared")
    assert tiny.moe is not None
    moe = replace(
        tiny.moe, num_experts=num_experts, num_groups=1, top_groups=1, balance=BalanceConfig()
    )
    return replace(tiny, moe=moe, ce_chunk_tokens=7)


def decoder(num_experts: int = 8) -> Decoder:
    model = Decoder(config(num_experts))
    randomize(model, 0)
    return model


def rollouts_of(data_rank: int, vocabulary: int = VOCABULARY) -> Rollouts:
    """Other sequences on every data rank, and more on later ones; ratios on both sides of clips."""
    generator = torch.Generator().manual_seed(data_rank)
    lengths = (LENGTHS * 2)[: 4 + 2 * (data_rank % 2)]
    ids = [torch.randint(0, vocabulary, (a + b,), generator=generator) for a, b in lengths]
    made = Rollouts.of(
        [x[:a] for x, (a, _) in zip(ids, lengths, strict=True)],
        [x[a:] for x, (a, _) in zip(ids, lengths, strict=True)],
        temperature=TEMPERATURE,
    )
    N = len(made.tokens_N)
    return made.replace(
        advantages_N=torch.randn(N, generator=generator),
        old_log_probs_N=torch.randn(N, generator=generator) - 5,
        ref_log_probs_N=torch.randn(N, generator=generator) - 5,
        weights_N=torch.rand(N, generator=generator) + 0.5,
    )


def near(rollouts: Rollouts, log_probs_N: Tensor) -> Rollouts:
    """Old log-probabilities near those of the policy, so that ratios lie around the clips."""
    noise = torch.linspace(-0.6, 0.6, len(log_probs_N))
    order = torch.randperm(len(noise), generator=torch.Generator().manual_seed(1))
    return rollouts.replace(
        old_log_probs_N=log_probs_N + noise[order], ref_log_probs_N=log_probs_N - noise
    )


@dataclass
class Response:
    """What is known of the response of one sequence."""

    log_p: Tensor  # of its tokens, with gradient
    entropy: Tensor
    advantages: Tensor
    old: Tensor
    ref: Tensor
    weights: Tensor


def responses_of(logits_of: Callable[[Tensor], Tensor], rollouts: Rollouts) -> list[Response]:
    """One forward for each sequence."""
    found = []
    for i, start in enumerate(rollouts.borders[:-1]):
        ids = rollouts.tokens_N[start : rollouts.borders[i + 1]]
        chosen = rollouts.response_mask_N[start : rollouts.borders[i + 1]].nonzero().flatten()
        log_p = F.log_softmax(logits_of(ids[None])[0] / rollouts.temperature, dim=-1)
        log_p = log_p[chosen - 1]
        given = [
            None if x is None else x[start + chosen]
            for x in (
                rollouts.advantages_N,
                rollouts.old_log_probs_N,
                rollouts.ref_log_probs_N,
                rollouts.weights_N,
            )
        ]
        picked = log_p.gather(1, ids[chosen][:, None])[:, 0]
        found.append(Response(picked, -(log_p.exp() * log_p).sum(-1), *given))  # type: ignore[arg-type]
    return found


def routes_by_hand(model: nn.Module, rollouts: Rollouts) -> Tensor:
    """int32 [N, L, K], which experts each token goes to, one forward for each sequence."""
    replay = RouterReplay(model)
    with torch.no_grad(), replay.record():
        responses_of(model, rollouts)
    layers = [torch.cat(ids) for ids in replay.choices().values()]
    return torch.stack(layers, dim=1)


def replayed(model: nn.Module, every: Sequence[Rollouts]) -> AbstractContextManager[None]:
    """Return a context in which each sequence in its turn goes to the experts of its routes."""
    replay = RouterReplay(model)

    def entries(field: str) -> dict[str, list[Tensor]]:
        return {
            name: [x for r in every for x in getattr(r, field)[:, place].split(r.lengths)]
            for place, name in enumerate(replay.layer_names)
        }

    is_weighted = every[0].route_weights_NLK is not None
    weights = entries("route_weights_NLK") if is_weighted else None
    return replay.replay(entries("routes_NLK"), weights=weights)


def log_probs_by_hand(model: nn.Module, rollouts: Rollouts) -> Tensor:
    """fp32 [N], by the routes of the rollouts if they have any, one forward for each sequence."""
    has_routes = rollouts.routes_NLK is not None
    with torch.no_grad(), replayed(model, [rollouts]) if has_routes else nullcontext():
        found = responses_of(model, rollouts)
    log_probs_N = torch.zeros(len(rollouts.tokens_N))
    log_probs_N[rollouts.response_mask_N] = torch.cat([r.log_p for r in found]).float()
    return log_probs_N


def forced(routes_NLK: Tensor, num_experts: int) -> Tensor:
    """Other experts for every third token."""
    moved = (routes_NLK + 1) % num_experts
    return torch.where(torch.arange(len(moved))[:, None, None] % 3 == 0, moved, routes_NLK)


def weighted(rollouts: Rollouts) -> Rollouts:
    """With weights of the routes that no router would give."""
    assert rollouts.routes_NLK is not None
    generator = torch.Generator().manual_seed(2)
    weights_NLK = torch.rand(rollouts.routes_NLK.shape, generator=generator) + 0.1
    return rollouts.replace(route_weights_NLK=weights_NLK)


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.min(ratio * advantages, torch.clip(ratio, 1 - low, 1 + high) * advantages)


def kl(response: Response, estimator: str) -> Tensor:
    log_r = response.ref - response.log_p
    return {"k1": -log_r, "k2": 0.5 * log_r**2, "k3": torch.exp(log_r) - 1 - log_r}[estimator]


def ppo_tokens(r: Response, estimator: str = "k1") -> Tensor:
    loss = clipped(torch.exp(r.log_p - r.old), r.advantages, CLIP, HIGH)
    return loss + KL_COEF * kl(r, estimator) - ENTROPY_COEF * r.entropy


def grpo_tokens(r: Response) -> Tensor:
    loss = clipped(torch.exp(r.log_p - r.old), r.advantages, CLIP, CLIP)
    return loss + 0.04 * kl(r, "k3")


def gspo_tokens(r: Response) -> Tensor:
    s = torch.exp((r.log_p - r.old).sum() / len(r.log_p))
    return clipped(s, r.advantages, CLIP, HIGH)


def own_tokens(r: Response) -> Tensor:
    return -r.advantages * r.log_p.exp() + r.entropy**2


def own(log_probs_N: Tensor, entropy_N: Tensor | None, rollouts: Rollouts) -> Tensor:
    assert entropy_N is not None and rollouts.advantages_N is not None
    return -rollouts.advantages_N * log_probs_N.exp() + entropy_N**2


def token_mean(losses: Sequence[Tensor], responses: Sequence[Response]) -> Tensor:
    pairs = list(zip(losses, responses, strict=True))
    total = torch.stack([(loss * r.weights).sum() for loss, r in pairs]).sum()
    return total / torch.stack([r.weights.sum() for r in responses]).sum()


def sequence_mean(losses: Sequence[Tensor], responses: Sequence[Response]) -> Tensor:
    pairs = list(zip(losses, responses, strict=True))
    return torch.stack([(loss * r.weights).sum() / r.weights.sum() for loss, r in pairs]).mean()


def dpo(responses: Sequence[Response]) -> Tensor:
    losses = []
    for chosen, rejected in zip(responses[::2], responses[1::2], strict=True):
        margin = (chosen.log_p - chosen.ref).sum() - (rejected.log_p - rejected.ref).sum()
        losses.append(-torch.log(torch.sigmoid(BETA * margin)))
    return torch.stack(losses).mean()


PPO_FIELDS: dict[str, Any] = dict(
    clip=CLIP, clip_high=HIGH, kl_coef=KL_COEF, entropy_coef=ENTROPY_COEF
)
OBJECTIVES: dict[str, tuple[Objective, Callable[[Sequence[Response]], Tensor]]] = {
    **{
        f"ppo-{name}": (
            PPO(kl=name, **PPO_FIELDS),  # type: ignore[arg-type]
            lambda rs, name=name: token_mean([ppo_tokens(r, name) for r in rs], rs),
        )
        for name in ("k1", "k2", "k3")
    },
    "ppo-sequence": (
        PPO(kl="k1", mean="sequence", **PPO_FIELDS),
        lambda rs: sequence_mean([ppo_tokens(r) for r in rs], rs),
    ),
    "grpo": (GRPO(), lambda rs: sequence_mean([grpo_tokens(r) for r in rs], rs)),
    "gspo": (
        GSPO(clip=CLIP, clip_high=HIGH),
        lambda rs: sequence_mean([gspo_tokens(r) for r in rs], rs),
    ),
    "dpo": (DPO(beta=BETA), dpo),
    "own": (
        OwnObjective(own, entropy=True, needs=("advantages_N",)),
        lambda rs: token_mean([own_tokens(r) for r in rs], rs),
    ),
}


def by_hand(
    model: nn.Module, every: Sequence[Rollouts], name: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the rollouts of all data ranks, and every gradient."""
    model.zero_grad(set_to_none=True)
    responses = [r for rollouts in every for r in responses_of(model, rollouts)]
    loss = OBJECTIVES[name][1](responses)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest error of an element over the largest of its tensor."""
    assert found.keys() == wanted.keys()
    return max(
        float((found[n] - wanted[n]).abs().max() / wanted[n].abs().max().clamp(min=1e-12))
        for n in wanted
    )
