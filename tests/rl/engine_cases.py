"""Rollouts, and objectives by hand: one process, one sequence at a time, plain PyTorch.

The formulas are those of the papers: PPO arXiv:1707.06347, GRPO arXiv:2402.03300, GSPO
arXiv:2507.18071, DPO arXiv:2305.18290, estimators of KL by J. Schulman ("Approximating KL
Divergence").
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore import BalanceConfig, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.base.torch_private import get_local_tensor
from moecore.models import Decoder, DecoderConfig, preset
from moecore.rl import DPO, GRPO, GSPO, PPO, Engine, OwnObjective, Rollouts, RouterReplay
from moecore.rl.objectives import Objective
from tests.rl.replay_cases import randomize

VOCABULARY, TEMPERATURE = 128, 0.8
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


def engine_of(model, *, max_tokens=64, device="cpu", **options) -> Engine:
    """An engine of one process; options are those of parallelize_moe."""
    parallelize_moe(model, build_meshes(ParallelConfig(), device_type=device), **options)
    return Engine(model, TrainStep(model), max_tokens=max_tokens)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = ((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
    return {name: get_local_tensor(grad).clone() for name, grad in grads}


def rollouts_of(
    data_rank: int,
    vocabulary: int = VOCABULARY,
    lengths: Sequence[tuple[int, int]] = LENGTHS,
) -> Rollouts:
    """Other sequences on every data rank, and more on later ones; ratios on both sides of clips."""
    generator = torch.Generator().manual_seed(data_rank)
    lengths = [*lengths, *lengths][: 4 + 2 * (data_rank % 2)]
    ids = [torch.randint(0, vocabulary, (a + b,), generator=generator) for a, b in lengths]
    pairs = [(x[:a], x[a:]) for x, (a, _) in zip(ids, lengths, strict=True)]
    made = Rollouts.of(*zip(*pairs, strict=True), temperature=TEMPERATURE)
    N = len(made.tokens_N)
    return made.replace(
        advantages_N=torch.randn(N, generator=generator),
        old_log_probs_N=torch.randn(N, generator=generator) - 5,
        ref_log_probs_N=torch.randn(N, generator=generator) - 5,
        weights_N=torch.rand(N, generator=generator) + 0.5,
    )


def moved(rollouts: Rollouts, device: torch.device | str) -> Rollouts:
    values = {field.name: getattr(rollouts, field.name) for field in fields(rollouts)}
    tensors = {name: x.to(device) for name, x in values.items() if isinstance(x, Tensor)}
    return rollouts.replace(**tensors)


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
        names = ("advantages_N", "old_log_probs_N", "ref_log_probs_N", "weights_N")
        numbers = [getattr(rollouts, name) for name in names]
        given = [None if x is None else x[start + chosen] for x in numbers]
        picked = log_p.gather(1, ids[chosen][:, None])[:, 0]
        found.append(Response(picked, -(log_p.exp() * log_p).sum(-1), *given))  # type: ignore[arg-type]
    return found


def routes_by_hand(model: nn.Module, rollouts: Rollouts) -> Tensor:
    """int32 [N, L, K], which experts each token goes to, one forward for each sequence."""
    replay = RouterReplay(model)
    with torch.no_grad(), replay.record():
        responses_of(model, rollouts)
    return torch.stack([torch.cat(ids) for ids in replay.choices().values()], dim=1)


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
    generator = torch.Generator().manual_seed(2)
    weights_NLK = torch.rand(rollouts.routes_NLK.shape, generator=generator) + 0.1
    return rollouts.replace(route_weights_NLK=weights_NLK)


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.min(ratio * advantages, torch.clip(ratio, 1 - low, 1 + high) * advantages)


def kl(response: Response, estimator: str) -> Tensor:
    log_r = response.ref - response.log_p
    return {"k1": -log_r, "k2": 0.5 * log_r**2, "k3": torch.exp(log_r) - 1 - log_r}[estimator]


def ppo_tokens(r: Response, estimator: str) -> Tensor:
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


ByHand = Callable[[Sequence[Response]], Tensor]


def mean_of(mean, tokens, *args) -> ByHand:
    return lambda responses: mean([tokens(r, *args) for r in responses], responses)


CLIPS: dict[str, Any] = dict(clip=CLIP, clip_high=HIGH)
PPO_FIELDS: dict[str, Any] = CLIPS | dict(kl_coef=KL_COEF, entropy_coef=ENTROPY_COEF)
OBJECTIVES: dict[str, tuple[Objective, ByHand]] = {
    "ppo-k1": (PPO(kl="k1", **PPO_FIELDS), mean_of(token_mean, ppo_tokens, "k1")),
    "ppo-k2": (PPO(kl="k2", **PPO_FIELDS), mean_of(token_mean, ppo_tokens, "k2")),
    "ppo-k3": (PPO(kl="k3", **PPO_FIELDS), mean_of(token_mean, ppo_tokens, "k3")),
    "ppo-sequence": (
        PPO(kl="k1", mean="sequence", **PPO_FIELDS),
        mean_of(sequence_mean, ppo_tokens, "k1"),
    ),
    "grpo": (GRPO(), mean_of(sequence_mean, grpo_tokens)),
    "gspo": (GSPO(**CLIPS), mean_of(sequence_mean, gspo_tokens)),
    "dpo": (DPO(beta=BETA), dpo),
    "own": (
        OwnObjective(own, entropy=True, needs=("advantages_N",)),
        mean_of(token_mean, own_tokens),
    ),
}


def by_hand(model, every, name) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the rollouts of all data ranks, and every gradient."""
    model.zero_grad(set_to_none=True)
    responses = [r for rollouts in every for r in responses_of(model, rollouts)]
    loss = OBJECTIVES[name][1](responses)
    loss.backward()
    return loss.detach(), gradients(model)
