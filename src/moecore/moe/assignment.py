"""Rules that choose experts other than by top-k, and the drop of choices over capacity.

Legend: N tokens that are routed together, T tokens of this rank, E experts, K choices per token.

Every function is deterministic, and needs no host sync and no gradient. Weights are computed
afterwards for the chosen ids (`kernels/routing/route.py`). If scores are equal, the lower expert id
and the lower token index win. `mask_choices_within_capacity` receives an order of tokens instead.
"""

import torch
from torch import Tensor

from moecore.base.fields import check_arguments
from moecore.base.options.layer import ASSIGNMENTS, AssignmentRule, DropOrder

SINKHORN_ITERATIONS = 32


def register_assignment(name: str, rule: AssignmentRule) -> None:
    """Register a rule that chooses the experts of tokens, as a value of `MoEConfig.assignment`.

    Call this function on every rank.

    Args:
        name: a new name.
        rule: called without gradients with the logits [N, E] of a data rank's micro-batch, the
            number K of experts per token, and the padding mask bool [N] or None. It returns ids
            [N, K], each at most once per token, -1 = no expert. All ranks of a micro-batch must
            return identical ids. The router computes the weights.

    Raises:
        ValueError: when the name is already registered, or the rule is not a function.
    """
    check_arguments(register_assignment, locals())
    ASSIGNMENTS.register(name, rule)


def choose_by_sinkhorn(logits_NE: Tensor, top_k: int, padding_mask_N: Tensor | None) -> Tensor:
    """Return int64 [N, K]: each token's best experts by scores that Sinkhorn iterations balance."""
    # The scores are the matrix exp(logits) with alternately scaled rows and columns, so that every
    # row sums to 1 and every column to N / E: BASE layers (arXiv:2103.16716), with Sinkhorn's
    # iterations (arXiv:2202.01169). The sums of columns exclude padding. A single token has equal
    # scores for all experts, so rounding decides.
    plan_NE = logits_NE.log_softmax(-1)
    if padding_mask_N is not None:
        plan_NE = plan_NE.masked_fill(padding_mask_N[:, None], -torch.inf)
    for _ in range(SINKHORN_ITERATIONS):
        columns_1E = plan_NE.logsumexp(0, keepdim=True)
        plan_NE = plan_NE - columns_1E.masked_fill(columns_1E == -torch.inf, 0.0)
        rows_N1 = plan_NE.logsumexp(1, keepdim=True)
        plan_NE = plan_NE - rows_N1.masked_fill(rows_N1 == -torch.inf, 0.0)
    return plan_NE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def choose_tokens_by_expert(
    scores_NE: Tensor, capacity: Tensor | int, padding_mask_N: Tensor | None
) -> Tensor:
    """Return int64 [N, E]: column e contains e if expert e chose the token, otherwise -1.

    Each expert chooses the `capacity` tokens with its best scores, but no padding (True in the
    mask; None = no padding). Source: expert choice routing, arXiv:2202.09368.
    """
    # Example, capacity 1: scores [[.9, .4], [.8, .6]] give [[0, -1], [-1, 1]].
    N, E = scores_NE.shape
    if padding_mask_N is not None:
        scores_NE = scores_NE.masked_fill(padding_mask_N[:, None], -torch.inf)
    order_NE = scores_NE.sort(dim=0, descending=True, stable=True).indices
    ranks_N1 = torch.arange(N, device=scores_NE.device)[:, None]
    rank_NE = torch.empty_like(order_NE).scatter_(0, order_NE, ranks_N1.expand(N, E))
    is_choice_NE = rank_NE < capacity
    if padding_mask_N is not None:
        is_choice_NE &= ~padding_mask_N[:, None]
    return torch.where(is_choice_NE, torch.arange(E, device=scores_NE.device), -1)


def mask_choices_within_capacity(
    ids_NK: Tensor,
    weights_NK: Tensor,
    num_experts: int,
    *,
    capacity: Tensor | int,
    drop_order: DropOrder,
    tokens_N: Tensor,
) -> Tensor:
    """Return bool [N, K]: False for (token, expert) choices to drop, and for the id -1.

    Each expert keeps at most `capacity` choices: those with the highest weights if `drop_order` is
    "probability", or the first in the order of `tokens_N` (token indices) if it is "position".
    Equal weights are also kept in the order of `tokens_N`.
    """
    # Example, capacity 1, ids [[0], [0], [1]], weights [[.2], [.7], [.5]]: "probability" leaves
    # tokens 1 and 2, "position" leaves tokens 0 and 2.
    K = ids_NK.shape[1]
    ids = ids_NK.flatten().long()
    expert = torch.where(ids < 0, num_experts, ids)
    first = (tokens_N[:, None] * K + torch.arange(K, device=ids.device)).flatten()
    if drop_order == "probability":
        weights = weights_NK.detach().flatten()[first]
        first = first[weights.sort(descending=True, stable=True).indices]
    by_expert = first[expert[first].sort(stable=True).indices]
    sorted_expert = expert[by_expert]
    first_of_expert = torch.searchsorted(sorted_expert, sorted_expert)
    place = torch.arange(ids.numel(), device=ids.device) - first_of_expert  # within its expert
    remains = (place < capacity) & (sorted_expert < num_experts)
    return torch.empty_like(remains).scatter_(0, by_expert, remains).view(ids_NK.shape)
