"""The arguments of a delta rule with decays, of documents packed end to end.

Legend: T tokens, n documents, H value heads, h query and key heads (a divisor of H), k and v dims
of a head.

The state of a head is a matrix S_kv. Each token decays the state, corrects its value for the
token's key, and reads the state with the token's query:

    S = exp(g) S              S = S + key (beta (value - S^T key))^T              o = S^T query

A head has one decay (gated delta nets), or one per key dim (Kimi delta attention). Without learning
rates a token adds key value^T without a correction (Mamba-2). A document starts with its initial
state, or with zeros. Outputs are linear in the state, and the columns of S are independent.

Source: Gated Delta Networks (arXiv:2412.06464), Kimi Linear (arXiv:2510.26692), Mamba-2
(arXiv:2405.21060).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DeltaRule(NamedTuple):
    """The inputs of a gated delta rule for T tokens of consecutively packed documents."""

    q_Thk: Tensor
    k_Thk: Tensor
    v_THv: Tensor
    g_THk: Tensor  # logarithms of decays, <= 0; [T, H] if a head has one decay
    beta_TH: Tensor | None  # learning rates, 0 to 1; None = no correction
    scale: float  # factor on queries
    norm_qk: bool  # whether queries and keys are divided by their length
