"""Sparse attention of a `Sequence`: each query reads the keys that an indexer selects for it.

Legend: B rows, T tokens of a row, K selected keys, H heads, l numbers of a latent key, h heads of
the indexer, i dims of one.

Latent keys and the indexer's keys are one vector a token for all heads. So cp ranks gather both of
whole rows, and keep their own queries; see `kernels/sparse_attention` for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moecore.attention.sequence import Sequence
from moecore.base.regions import as_product
from moecore.base.torch_private import autocast_dtype
from moecore.kernels.sparse_attention import (
    IndexerHeads,
    KeySpans,
    LatentHeads,
    SparseOutput,
    sparse_attention,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyChoice:
    """Which of the keys that it sees a query reads; `KeyChoice()` is all."""

    top_k: int | None = None  # of the largest scores of the indexer
    selected_BTK: Tensor | None = None  # of another layer: see `attend_sparse`
    diverges: bool = False  # with the divergence of the indexer: `kernels/sparse_attention`


@torch.compiler.disable  # what is before and behind is compiled
def attend_sparse(
    heads: LatentHeads,
    index: IndexerHeads | None,
    sequence: Sequence,
    choice: KeyChoice,
    *,
    scale: float,
) -> SparseOutput:
    """Return o_BTHv, which keys were read and divergences, of this rank's tokens.

    Tensors of tokens are [B, T, ...] of this rank's, both in and out. Selected keys are int32
    [B, T, K], counted over all tokens of whole rows, -1 for none. Collective where ranks hold
    parts: keys are gathered, and backward adds the gradients of all ranks.
    """
    dtype = autocast_dtype(heads.q_tHd)
    if dtype is not None:  # as products do
        heads = LatentHeads(*(x.to(dtype) for x in heads))
    B, T = heads.q_tHd.shape[:2]
    flat = heads._replace(
        q_tHd=heads.q_tHd.flatten(0, 1), keys_Nl=_of_rows(heads.keys_Nl, sequence)
    )
    if index is not None:
        own_q, k, own_w = index
        index = IndexerHeads(own_q.flatten(0, 1), _of_rows(k, sequence), own_w.flatten(0, 1))
    selected_BTK = choice.selected_BTK
    out: SparseOutput = as_product(
        sparse_attention,
        flat,
        _spans(sequence, B, T, heads.q_tHd.device),
        scale=scale,
        index=index,
        top_k=choice.top_k,
        selected_tK=None if selected_BTK is None else selected_BTK.flatten(0, 1),
        diverges=choice.diverges,
    )
    return SparseOutput(*(None if x is None else x.unflatten(0, (B, T)) for x in out))  # type: ignore[arg-type]


def _of_rows(x_BTX: Tensor, sequence: Sequence) -> Tensor:
    """Return x_NX of whole rows."""
    local_tokens = sequence.local_tokens
    return (x_BTX if local_tokens is None else local_tokens.gather(x_BTX)).flatten(0, 1)


def _spans(sequence: Sequence, B: int, T: int, device: torch.device) -> KeySpans:
    stride = 1 if sequence.local_tokens is None else sequence.local_tokens.cp.size
    T *= stride
    places_BT = sequence.positions_BT
    if places_BT is None:
        places_BT = torch.arange(T, device=device).expand(B, T)
    own_t = sequence.slice_local(torch.arange(B * T, device=device).view(B, T)).flatten()
    first_t = own_t - sequence.slice_local(places_BT).flatten()
    return KeySpans(first_t, own_t, stride, sequence.max_seqlen or T)
