"""The attention of tokens that lie on several ranks, by the way of their `ContextParallel`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from moecore.attention.context_parallel.allgather import GatherAttention
from moecore.attention.context_parallel.heads import gather_heads, scatter_heads
from moecore.attention.context_parallel.held import HeldTokens
from moecore.attention.context_parallel.ring import RingAttention
from moecore.attention.sequence import Sequence
from moecore.memory.products import as_scores


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
        k_Bthd: keys.
        v_Bthv: values.
        sequence: with `held`.
        scale: factor on q . k.
        window: as of `attend`.
        sinks_H: likewise.
        alone: `attend`, for a rank with whole rows.

    Raises:
        ValueError: for what the way cannot compute, before any communication.
    """
    held = sequence.held
    assert held is not None, "asked for only with tokens on several ranks"
    cp = held.cp
    _check(held, q_BtHd, k_Bthd, window)
    if cp.gathers:
        where = held, window, scale
        o: Tensor = as_scores(GatherAttention.apply, q_BtHd, k_Bthd, v_Bthv, sinks_H, *where)
        return o
    q, k, v = q_BtHd, k_Bthd, v_Bthv
    if cp.a2a is not None:
        q, k, v = scatter_heads((q, k, v), cp.a2a, held.a2a_layout)
        if sinks_H is not None:
            sinks_H = sinks_H.chunk(cp.a2a.size())[cp.a2a.rank()]
    if cp.ring is not None:
        ring = held.ring_layout, cp.ring, scale
        o = as_scores(RingAttention.apply, q, k, v, sinks_H, *ring)
    else:
        whole = replace(sequence, held=None)
        o = alone(q, k, v, whole, scale=scale, window=window, sinks_H=sinks_H)
    return o if cp.a2a is None else gather_heads(o, cp.a2a, held.a2a_layout)


def _check(held: HeldTokens, q: Tensor, k: Tensor, window: int | None) -> None:
    cp, heads = held.cp, k.shape[2]
    if cp.a2a is not None and heads % cp.a2a.size():
        raise ValueError(
            f"key/value heads ({heads}) must be a multiple of the ranks that exchange them "
            f"({cp.a2a.size()}): use another ContextOptions.way"
        )
    if cp.ring is not None and window is not None:
        raise ValueError(
            f"window ({window}) must be None with keys that travel: use ContextOptions.way 'a2a' "
            "or 'allgather'"
        )
    tokens = (q.shape[1] * cp.size,) if cp.gathers else ()
    if k.shape[1] not in (q.shape[1], *tokens):
        raise ValueError(
            f"keys ({k.shape[1]}) must be as many as queries ({q.shape[1]}): pass this rank's"
        )
