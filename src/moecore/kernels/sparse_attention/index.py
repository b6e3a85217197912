"""Which keys an indexer selects, and how far its softmax is from the attention's probabilities.

Legend: C queries of a chunk, N keys, K keys that a query reads, h heads, i dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moecore.kernels.sparse_attention.contract import IndexerHeads
from moecore.kernels.sparse_attention.keys import Keys


def index_scores(index: IndexerHeads, keys: Keys) -> Tensor:
    """Return I_CK of a chunk's queries, -inf where a query does not see a key."""
    dots_ChK = keys.dot(index.q_thi, keys.of(index.k_Ni)).relu_()
    scores_CK = torch.einsum("chk,ch->ck", dots_ChK, index.w_th.to(dots_ChK.dtype))
    return scores_CK.masked_fill_(~keys.seen_CK, -torch.inf)


def select(scores_CS: Tensor, first: int, top_k: int) -> Tensor:
    """Return int32 [C, top_k], the keys of the largest scores, from `first` on, ascending.

    -1 stands behind the last where a query sees fewer. Of equal scores the earlier keys are taken,
    whatever the chunk: `Tensor.topk` alone leaves that open, and scores of 0 are frequent.

    Example: scores [2, 0, 0, 3, 0], first 10 and top_k 3 give [10, 11, 13].
    """
    C, S = scores_CS.shape
    is_choice_CS = scores_CS > -torch.inf
    if top_k < S:
        cutoff_C1 = scores_CS.topk(top_k, sorted=False).values.amin(-1, keepdim=True)
        above_CS = scores_CS > cutoff_C1
        equal_CS = (scores_CS == cutoff_C1) & is_choice_CS
        remaining_C1 = top_k - above_CS.sum(-1, keepdim=True)
        is_choice_CS = above_CS | (equal_CS & (equal_CS.cumsum(-1) <= remaining_C1))
    places_CS = (is_choice_CS.cumsum(-1) - 1).masked_fill_(~is_choice_CS, top_k)
    keys_CS = torch.arange(first, first + S, dtype=torch.int32, device=scores_CS.device)
    out = keys_CS.new_full((C, top_k + 1), -1)  # the last column is of those not chosen
    return out.scatter_(1, places_CS, keys_CS.expand(C, S))[:, :top_k]


def divergence(p_CK: Tensor, scores_CK: Tensor) -> Tensor:
    """Return KL_C of p against the softmax of scores; p is 0 where scores are -inf."""
    log_q_CK = scores_CK.log_softmax(-1).masked_fill(p_CK == 0, 0)
    return (torch.xlogy(p_CK, p_CK) - p_CK * log_q_CK).sum(-1)


def divergence_gradient(
    dkl_C: Tensor, p_CK: Tensor, index: IndexerHeads, keys: Keys, dk_Ni: Tensor
) -> tuple[Tensor, Tensor]:
    """Return dq_Chi and dw_Ch, and add to dk_Ni, for the gradients of a chunk's divergences."""
    rows = keys.of(index.k_Ni)
    dots_ChK = keys.dot(index.q_thi, rows)
    w_Ch = index.w_th.to(dots_ChK.dtype)
    scores_CK = torch.einsum("chk,ch->ck", dots_ChK.relu(), w_Ch)
    q_CK = scores_CK.masked_fill_(~keys.seen_CK, -torch.inf).softmax(-1)
    dscores_CK = (q_CK - p_CK) * dkl_C[:, None]
    dw_Ch = torch.einsum("chk,ck->ch", dots_ChK.relu(), dscores_CK)
    ddots_ChK = (dscores_CK[:, None] * w_Ch[..., None]).masked_fill_(dots_ChK <= 0, 0)
    ddots_ChK = ddots_ChK.to(rows.dtype)
    keys.add(dk_Ni, (ddots_ChK, index.q_thi))
    return keys.weigh(ddots_ChK, rows), dw_Ch
