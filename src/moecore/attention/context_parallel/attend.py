"""The attention of tokens that lie on several ranks, by the way of their `ContextParallel`.

Note "windows in a ring": queries of a window have little to compute while keys travel, and those of
a short document may see keys of every rank. So the ranks of a ring gather the keys of a layer with
a window, which sends no more than a ring does; its other layers keep the ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moecore.attention.context_parallel.allgather import GatherAttention
from moecore.attention.context_parallel.heads import gather_heads, scatter_heads
from moecore.attention.context_parallel.held import HeldTokens
from moecore.attention.context_parallel.ring import RingAttention
from moecore.attention.sequence import Sequence
from moecore.base.regions import as_product


@torch.compiler.disable  # what is before and behind is compiled
def attend_over_ranks(
    q_BtHd: Tensor,
    k_Bthd: Tensor,
    v_Bthv: Tensor,
    sequence: Sequence,
    *,
    scale: float,
    window: int | None,
    sinks_H: Tensor | None,
    alone: Callable[..., Tensor],
) -> Tensor:
    """Return o_BtHv of this rank's tokens; see `attention.function.attend`. Collective.

    Args:
        q_BtHd: this rank's tokens, like k and v. With "allgather" these may be of whole rows.
        sequence: with `held`.
        scale: factor on q . k.
        window: as of `attend`.
        alone: `attend`, for a rank with whole rows.

    Raises:
        ValueError: for what the way cannot compute, before any communication.
    """
    held = sequence.held
    assert held is not None, "asked for only with tokens on several ranks"
    cp = held.cp
    _check(held, q_BtHd, k_Bthd)
    q, k, v = q_BtHd, k_Bthd, v_Bthv
    if cp.a2a is not None:
        q, k, v = scatter_heads((q, k, v), cp.a2a, held.a2a_layout)
        if sinks_H is not None:
            sinks_H = sinks_H.chunk(cp.a2a.size())[cp.a2a.rank()]
    ring = held.over_ring
    if cp.gathers or (cp.ring is not None and window is not None):  # note "windows in a ring"
        o: Tensor = as_product(GatherAttention.apply, q, k, v, sinks_H, ring, window, scale)
    elif cp.ring is not None:
        o = as_product(RingAttention.apply, q, k, v, sinks_H, ring.layout, cp.ring, scale)
    else:
        whole = replace(sequence, held=None)
        o = alone(q, k, v, whole, scale=scale, window=window, sinks_H=sinks_H)
    return o if cp.a2a is None else gather_heads(o, cp.a2a, held.a2a_layout)


def _check(held: HeldTokens, q: Tensor, k: Tensor) -> None:
    cp, heads = held.cp, k.shape[2]
    if cp.a2a is not None and heads % cp.a2a.size():
        raise ValueError(
            f"key/value heads ({heads}) must be a multiple of the ranks that exchange them "
            f"({cp.a2a.size()}): use another ContextOptions.way"
        )
    tokens = (q.shape[1] * cp.size,) if cp.gathers else ()
    if k.shape[1] not in (q.shape[1], *tokens):
        raise ValueError(
            f"keys ({k.shape[1]}) must be as many as queries ({q.shape[1]}): pass this rank's"
        )
