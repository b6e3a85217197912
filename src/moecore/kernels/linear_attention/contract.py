"""What a gated delta rule is of: tokens of documents that lie end to end.

Legend: T tokens, n documents, H value heads, h query and key heads (a divisor of H), k and v dims
of a head.

The state of a head is a matrix S_kv. Each token decays it, corrects what it returns for the token's
key, and reads it with the token's query:

    S = exp(g) S              S = S + key (beta (value - S^T key))^T              o = S^T query

A query is scaled by k ** -0.5. A document begins with a state of its own, or with zeros. What a
state adds is linear in it: two columns of S do not meet.

Source: Gated Delta Networks (arXiv:2412.06464).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DeltaRule(NamedTuple):
    """The arguments of a gated delta rule."""

    q_Thk: Tensor
    k_Thk: Tensor
    v_THv: Tensor
    g_TH: Tensor  # logarithms of decays, <= 0
    beta_TH: Tensor  # learning rates, 0 to 1
    norm_qk: bool  # queries and keys are divided by their length (note "length" of `gated_delta`)
