"""The weights of a choice that is given: of a replayed one, or one that a rule made.

    weights[t, k] = what `route` would give expert ids[t, k] as a weight, had it chosen ids[t]

Letters: T tokens, E experts, K choices per token; an id of -1 is no choice: its weight is 0, and
it has no part in the others'.
"""

import torch
from torch import Tensor

from moecore.kernels.route import RouteOptions
from moecore.kernels.scores import scores_ref


def route_weights_ref(logits_TE: Tensor, ids_TK: Tensor, options: RouteOptions) -> Tensor:
    """Return what `route_weights` returns, in plain PyTorch, in fp32 or fp64 as the logits."""
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    chosen_TK = ids_TK >= 0
    ids_TK = ids_TK.long().clamp(min=0)
    if options.score_order == "post":
        picked_TK = logits_TE.gather(1, ids_TK)
        # A row without a choice would be a softmax of nothing, NaN.
        out_TK = ~chosen_TK & chosen_TK.any(-1, keepdim=True)
        weights_TK = picked_TK.masked_fill(out_TK, -torch.inf).softmax(-1)
        weights_TK = torch.where(chosen_TK, weights_TK, 0)
    else:
        scores_TE = scores_ref(logits_TE, options.score_function)
        weights_TK = torch.where(chosen_TK, scores_TE.gather(1, ids_TK), 0)
        if options.normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK * options.scale


def route_weights(logits_TE: Tensor, ids_TK: Tensor, options: RouteOptions) -> Tensor:
    """Return the weights of the given choices; for a choice that `route` made, its weights.

    Args:
        logits_TE: [T, E], fp32 or fp64 (others are widened to fp32).
        ids_TK: int32, distinct in a row; -1 = no choice.
        options: scores and weights; what it says about choosing is not read.

    Returns:
        [T, K] fp32, differentiable in the logits; no host sync.
    """
    return route_weights_ref(logits_TE, ids_TK, options).float()
