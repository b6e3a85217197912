"""Who is chosen, who stays and with which weight, on the host: the truth of routing.

Choices are made by loops over Python floats, from the text of `MoEConfig` alone; weights are dense
masked algebra, so that gradients reach the logits. Nothing is shared with the production path.

Legend: N tokens of the micro-batch, D model dim, E experts, K experts per token.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import torch
from torch import Tensor

from moecore.base.options.layer import CapacityConfig, MoEConfig

Rows = list[list[float]]
SINKHORN_ROUNDS = 32  # part of the definition: another number may choose otherwise
MARGIN_BINS = 1000  # likewise


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRouting:
    """The decision for N tokens, dense over the experts.

    Attributes:
        logits_NE: router dtype, differentiable.
        scores_NE: fp32, scores divided by their sum; differentiable.
        chosen_NE: bool, before capacity.
        kept_NE: bool, what capacity left.
        counted_NE: bool, what balance losses count: the choice, or each token's best scores where
            a bias or groups move the choice.
        weights_NE: fp32, 0 where not chosen; differentiable.
        real_N: bool, False = padding.
    """

    logits_NE: Tensor
    scores_NE: Tensor
    chosen_NE: Tensor
    kept_NE: Tensor
    counted_NE: Tensor
    weights_NE: Tensor
    real_N: Tensor

    def real_mean(self, values: Tensor, part: slice = slice(None)) -> Tensor:
        """Return the mean of the real tokens' values [N, ...] over dim 0; 0 without such tokens."""
        real = self.real_N[part]
        return values[part][real].sum(0) / max(int(real.sum()), 1)


def route_reference(
    x_ND: Tensor,
    real_N: Tensor,
    borders: list[int],
    params: Mapping[str, Tensor],
    config: MoEConfig,
    *,
    training: bool,
    given_ids_NK: Tensor | None,
    given_weights_NK: Tensor | None = None,
) -> ReferenceRouting:
    """Return the routing of one micro-batch, whose sequences have `borders` from 0 to N.

    `params` are those of `moe_reference`. `real_N` is False for padding. `given_ids_NK` (-1 = none)
    replace the choice, and `given_weights_NK` the weights of given ids.
    """
    dtype = getattr(torch, config.router_dtype)
    logits_NE = x_ND.to(dtype) @ params["router.weight"].to(dtype).T
    if config.router_bias:
        logits_NE = logits_NE + params["router.bias"].to(dtype)
    scores_NE, real = _scores(logits_NE, config), real_N.tolist()
    if given_ids_NK is None:
        bias = params["router.expert_bias"].tolist() if config.expert_bias else None
        chosen = _choose(logits_NE.detach(), real, bias, config, training)
    else:
        chosen = [[e in row for e in range(config.num_experts)] for row in given_ids_NK.tolist()]
    chosen = [[c and r for c in row] for row, r in zip(chosen, real, strict=True)]
    chosen_NE = _mask(chosen, logits_NE)
    weights_NE = _weights(logits_NE, scores_NE, chosen_NE, config)
    if given_ids_NK is not None and given_weights_NK is not None:
        weights_NE = torch.zeros_like(weights_NE)
        for token, (row, given) in enumerate(zip(given_ids_NK, given_weights_NK, strict=True)):
            weights_NE[token, row[row >= 0].long()] = given[row >= 0]
    counted = chosen
    if config.expert_bias or config.top_groups < config.num_groups:
        bare = replace(config, num_groups=1, top_groups=1, group_experts=2)
        ranked = (scores_NE if config.score_order == "pre" else logits_NE).tolist()
        counted = [
            [r and c for c in _tokens_choice(row, bare)]
            for row, r in zip(ranked, real, strict=True)
        ]
    sequences = [real[a:b] for a, b in pairwise(borders)]
    kept = _keep(chosen, weights_NE.tolist(), sequences, config, training)
    total_N1 = scores_NE.sum(-1, keepdim=True)
    return ReferenceRouting(
        logits_NE=logits_NE,
        scores_NE=(scores_NE / total_N1).float(),
        chosen_NE=chosen_NE,
        kept_NE=_mask(kept, logits_NE),
        counted_NE=_mask(counted, logits_NE),
        weights_NE=weights_NE,
        real_N=real_N,
    )


def capacity_reference(factor: float, num_real: int, config: MoEConfig) -> int:
    """Return ceil(factor * N * K / E), exact for the factor as it is written; N real tokens."""
    return math.ceil(Fraction(repr(factor)) * num_real * config.top_k / config.num_experts)


def _mask(rows: list[list[bool]], like_NE: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.bool, device=like_NE.device).view(like_NE.shape)


def _scores(logits_NE: Tensor, config: MoEConfig) -> Tensor:
    if config.score_function == "sigmoid":
        return torch.sigmoid(logits_NE)
    if config.score_function == "sqrtsoftplus":
        # log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|))
        tails_NE = torch.log1p(torch.exp(-logits_NE.abs()))
        return torch.sqrt(logits_NE.clamp(min=0) + tails_NE)
    exps = torch.exp(logits_NE - logits_NE.amax(-1, keepdim=True))
    return exps / exps.sum(-1, keepdim=True)


def _weights(logits_NE: Tensor, scores_NE: Tensor, chosen_NE: Tensor, config: MoEConfig) -> Tensor:
    if config.score_order == "post":
        top_N1 = logits_NE.masked_fill(~chosen_NE, float("-inf")).amax(-1, keepdim=True)
        top_N1 = torch.where(chosen_NE.any(-1, keepdim=True), top_N1, 0)
        # The inner `where` keeps what is not chosen from overflowing.
        shifted_NE = torch.where(chosen_NE, logits_NE - top_N1, 0)
        parts_NE = torch.where(chosen_NE, torch.exp(shifted_NE), 0)
    else:
        parts_NE = torch.where(chosen_NE, scores_NE, 0)
    several = config.top_k > 1 or (config.assignment == "expert_choice" and config.num_experts > 1)
    if several if config.normalize_weights is None else config.normalize_weights:
        total_N1 = parts_NE.sum(-1, keepdim=True)
        parts_NE = parts_NE / torch.where(chosen_NE.any(-1, keepdim=True), total_N1, 1)
    return (parts_NE * config.routed_scaling_factor).float()


def _choose(
    logits_NE: Tensor, real: list[bool], bias: list[float] | None, config: MoEConfig, training: bool
) -> list[list[bool]]:
    """Return chosen[n][e], whatever it is for padding."""
    if config.assignment == "expert_choice":
        return _experts_choose(_scores(logits_NE, config).tolist(), real, config, training)
    if config.assignment == "sinkhorn" and training:
        ranked = _sinkhorn(logits_NE.tolist(), real)
    else:
        pre = config.score_order == "pre"
        ranked = (_scores(logits_NE, config) if pre else logits_NE).tolist()
        if bias is not None and training and config.balance.bias_per_micro_batch:
            bias = _even_bias(ranked, real, bias, config)
        if bias is not None:
            ranked = [[v + b for v, b in zip(row, bias, strict=True)] for row in ranked]
    return [_tokens_choice(row, config) for row in ranked]


def _tokens_choice(row: list[float], config: MoEConfig) -> list[bool]:
    """Rank groups, then experts; among equals the lower id wins, as Python's sort is stable."""
    size = config.num_experts // config.num_groups
    groups = list(range(config.num_groups))
    if config.top_groups < config.num_groups:
        best = {
            g: sum(sorted(row[g * size : (g + 1) * size])[-config.group_experts :]) for g in groups
        }
        groups = sorted(groups, key=lambda g: -best[g])[: config.top_groups]
    allowed = [e for g in sorted(groups) for e in range(g * size, (g + 1) * size)]
    picks = sorted(allowed, key=lambda e: -row[e])[: config.top_k]
    return [e in picks for e in range(config.num_experts)]


def _even_bias(scores: Rows, real: list[bool], bias: list[float], config: MoEConfig) -> list[float]:
    """Return the K / E quantile of each expert's margins, from a histogram of the real tokens."""
    K, E = config.top_k, config.num_experts
    low, width = min(bias) - 1, (max(bias) - min(bias) + 2) / MARGIN_BINS
    counts = [[0] * MARGIN_BINS for _ in range(E)]
    for row in [row for row, is_real in zip(scores, real, strict=True) if is_real]:
        cutoff = sorted(v + b for v, b in zip(row, bias, strict=True))[-K - 1]
        for e, score in enumerate(row):
            counts[e][max(0, min(MARGIN_BINS - 1, int((cutoff - score - low) / width)))] += 1
    wanted = sum(real) * K / E
    if not wanted:
        return bias
    solved = []
    for row_counts in counts:
        below = place = 0
        while below + row_counts[place] < wanted:
            below += row_counts[place]
            place += 1
        solved.append(low + width * (place + (wanted - below) / row_counts[place]))
    return solved


def _experts_choose(
    scores: Rows, real: list[bool], config: MoEConfig, training: bool
) -> list[list[bool]]:
    """Each expert takes its C best real tokens; among equals the earlier one."""
    factor = 1.0
    if config.capacity is not None:
        factor = _factor(config.capacity, training) or config.capacity.factor
    C, E = capacity_reference(factor, sum(real), config), config.num_experts
    candidates = [n for n, is_real in enumerate(real) if is_real]
    takers = []
    for e in range(E):
        takers.append(set(sorted(candidates, key=lambda n: -scores[n][e])[:C]))
    return [[n in takers[e] for e in range(E)] for n in range(len(scores))]


def _sinkhorn(logits: Rows, real: list[bool]) -> Rows:
    """Scale columns and rows of exp(logits) in turn, so that columns sum to N / E, rows to 1."""
    rows = [n for n, is_real in enumerate(real) if is_real]
    E = len(logits[0]) if logits else 0
    plan = [[math.exp(v - max(row)) for v in row] for row in logits]
    plan = [[v / sum(row) for v in row] for row in plan]
    for _ in range(SINKHORN_ROUNDS):
        sums = [sum(plan[n][e] for n in rows) or 1.0 for e in range(E)]
        for n in rows:
            row = [v * len(rows) / E / s for v, s in zip(plan[n], sums, strict=True)]
            plan[n] = [v / sum(row) for v in row]
    return plan


def _factor(capacity: CapacityConfig, training: bool) -> float | None:
    return capacity.factor if training else capacity.eval_factor


def _keep(
    chosen: list[list[bool]],
    weights: Rows,
    real: list[list[bool]],
    config: MoEConfig,
    training: bool,
) -> list[list[bool]]:
    """Return what stays when each expert takes at most its capacity: see `CapacityConfig.drop`."""
    factor = None if config.capacity is None else _factor(config.capacity, training)
    if config.capacity is None or factor is None or config.assignment == "expert_choice":
        return chosen
    C = capacity_reference(factor, sum(map(sum, real)), config)
    positions = [sum(sequence[:t]) for sequence in real for t in range(len(sequence))]
    in_order = sorted(range(len(chosen)), key=lambda n: positions[n])
    kept = [[False] * config.num_experts for _ in chosen]
    for e in range(config.num_experts):
        wanting = [n for n in in_order if chosen[n][e]]
        if config.capacity.drop == "probability":
            wanting = sorted(wanting, key=lambda n: -weights[n][e])
        for n in wanting[:C]:
            kept[n][e] = True
    return kept
