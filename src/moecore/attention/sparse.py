"""Sparse attention of a `Sequence`: each query reads the keys that an indexer selects for it.

Legend: B rows, T tokens of a row, N tokens of all rows, K selected keys, H heads, l dims of a
latent key, d and v dims of a head.

All heads share one latent key and one indexer key per token. With cp > 1 each rank therefore
all-gathers both kinds of keys, and computes only its local queries (`kernels/sparse_attention`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moecore.attention.sequence import Sequence
from moecore.base.regions import run_product
from moecore.base.torch_private import get_autocast_dtype
from moecore.kernels.sparse_attention import (
    IndexerHeads,
    KeySpans,
    LatentHeads,
    SparseOutput,
    sparse_attention,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyChoice:
    """Which keys sparse attention reads; `KeyChoice()` = all earlier keys and the query's own."""

    top_k: int | None = None  # keys with the largest indexer scores; None = no new choice
    selected_BTK: Tensor | None = None  # keys that an earlier layer selected, see `attend_sparse`
    returns_divergences: bool = False  # whether to return the indexer's divergences
    fp8_scores: bool = False  # whether the scores that select keys are products in FP8


@torch.compiler.disable  # a graph break; code before and after it is compiled
def attend_sparse(
    heads: LatentHeads,
    indexer: IndexerHeads | None,
    sequence: Sequence,
    choice: KeyChoice,
    *,
    scale: float,
    sinks_H: Tensor | None = None,
) -> SparseOutput:
    """Return o_BTHv, the selected keys and the indexer's KL divergences for this rank's tokens.

    Selected keys are int32 [B, T, K], indices into the tokens of all full rows; -1 fills unused
    entries. `indexer` may be None if `choice` has neither `top_k` nor `returns_divergences`. With
    cp > 1 the call is collective: forward all-gathers keys, and backward reduces their gradients.
    """
    dtype = get_autocast_dtype(heads.q_tHd)
    if dtype is not None:  # as products do
        projections = (None if x is None else x.to(dtype) for x in heads[2:])
        heads = LatentHeads(heads.q_tHd.to(dtype), heads.keys_Nl.to(dtype), *projections)
    B, T = heads.q_tHd.shape[:2]
    keys_Nl = gather_keys(heads.keys_Nl, sequence)
    flat = heads._replace(q_tHd=heads.q_tHd.flatten(0, 1), keys_Nl=keys_Nl)
    if indexer is not None:
        q, k, w = indexer
        indexer = IndexerHeads(q.flatten(0, 1), gather_keys(k, sequence), w.flatten(0, 1))
    # The range of keys, in full rows, that each local query sees in its document.
    stride = 1 if sequence.local_tokens is None else sequence.local_tokens.cp.size
    full_T, device = T * stride, heads.q_tHd.device
    places_BT = sequence.positions_BT
    if places_BT is None:
        places_BT = torch.arange(full_T, device=device).expand(B, full_T)
    tokens_BT = torch.arange(B * full_T, device=device).view(B, full_T)
    local_t = sequence.slice_local(tokens_BT).flatten()
    first_t = local_t - sequence.slice_local(places_BT).flatten()
    selected_BTK = choice.selected_BTK
    out: SparseOutput = run_product(
        sparse_attention,
        flat,
        KeySpans(first_t, local_t, stride, sequence.max_seqlen or full_T),
        scale=scale,
        sinks_H=sinks_H,
        indexer=indexer,
        top_k=choice.top_k,
        selected_tK=None if selected_BTK is None else selected_BTK.flatten(0, 1),
        returns_divergences=choice.returns_divergences,
        fp8_scores=choice.fp8_scores,
    )
    return SparseOutput(*(None if x is None else x.unflatten(0, (B, T)) for x in out))  # type: ignore[arg-type]


def gather_keys(x_BTX: Tensor, sequence: Sequence) -> Tensor:
    """Return x of all tokens of the full rows, [N, ...], all-gathered over the cp ranks."""
    local_tokens = sequence.local_tokens
    return (x_BTX if local_tokens is None else local_tokens.gather(x_BTX)).flatten(0, 1)
