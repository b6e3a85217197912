"""Options of `route`, and whether rounding explains a choice for logits that nearly tie.

Letters: T tokens, E experts, K choices, G groups of S experts.
"""

from dataclasses import replace

import torch
from torch import Tensor

from moecore.kernels.routing.route import RouteOptions
from moecore.kernels.routing.scores import compute_scores_ref

BASE = RouteOptions(
    top_k=3,
    score_function="softmax",
    score_order="pre",
    normalize=True,
    scale=1.0,
    num_groups=1,
    top_groups=1,
)
SIGMOID = replace(BASE, score_function="sigmoid")
EPS = torch.finfo(torch.float32).eps
SCORE_ERROR = 16 * EPS  # of a score, relative: rounded logit differences of 8 to 16 cost 4 eps
SUM_ERROR = 4 * EPS  # of a score plus a bias, and of a group's sum: one or a few roundings


def is_possible(ids_TK, logits_TE, bias_E, options) -> Tensor:
    """Return bool [T]: each slot holds what scores within rounding of the exact ones can put there.

    The k-th best of scores that lie between `low` and `high` lies between the k-th best of both.
    So where no scores of a row are that close, one choice in one order is possible.
    """
    low_TE, high_TE = _score_bounds(logits_TE, bias_E, options)
    certain_TE, possible_TE = _groups_kept(low_TE, high_TE, options)
    worst_TK = _best_first(low_TE.where(certain_TE, -torch.inf))[:, : options.top_k]
    best_TK = _best_first(high_TE.where(possible_TE, -torch.inf))[:, : options.top_k]
    ids_TK = ids_TK.long()
    fits_TK = (high_TE.gather(1, ids_TK) >= worst_TK) & (low_TE.gather(1, ids_TK) <= best_TK)
    fits_TK &= possible_TE.gather(1, ids_TK)
    distinct_T = (ids_TK.sort(-1).values.diff(dim=-1) > 0).all(-1)
    return fits_TK.all(-1) & distinct_T


def _score_bounds(logits_TE, bias_E, options) -> tuple[Tensor, Tensor]:
    """Return fp64 [T, E], the least and the greatest selection scores."""
    ranked_TE = logits_TE.double()
    error_TE = torch.zeros_like(ranked_TE)
    if options.score_order == "pre":
        ranked_TE = compute_scores_ref(ranked_TE, options.score_function)
        error_TE = SCORE_ERROR * ranked_TE
    if bias_E is not None:
        ranked_TE = ranked_TE + bias_E
    error_TE = error_TE + SUM_ERROR * ranked_TE.abs()
    return ranked_TE - error_TE, ranked_TE + error_TE


def _groups_kept(low_TE: Tensor, high_TE: Tensor, options: RouteOptions) -> tuple[Tensor, Tensor]:
    """Return bool [T, E]: the experts whose groups are kept for certain, and perhaps."""
    G, top = options.num_groups, options.top_groups
    if top == G:
        return torch.ones_like(low_TE, dtype=torch.bool), torch.ones_like(low_TE, dtype=torch.bool)
    S = low_TE.shape[1] // G
    low_TG, high_TG = (
        x.unflatten(1, (G, S)).topk(options.group_experts, dim=-1).values.sum(-1)
        for x in (low_TE, high_TE)
    )
    certain_TG = low_TG > _best_first(high_TG)[:, top : top + 1]
    possible_TG = high_TG >= _best_first(low_TG)[:, top - 1 : top]
    return certain_TG.repeat_interleave(S, 1), possible_TG.repeat_interleave(S, 1)


def _best_first(x: Tensor) -> Tensor:
    return x.sort(dim=-1, descending=True).values
