"""The arguments of a delta rule with decays, of documents packed end to end.

Legend: T tokens, n documents, H value heads, h query and key heads (a divisor of H), k and v dims
of a head.

The state of a head is a matrix S_kv. Each token decays the state, corrects its value for the
token's key, and reads the state with the token's query:

    S = exp(g) S              S = S + key (beta (value - S^T key))^T              o = S^T query

A head has one decay (gated delta nets), or one per key dim (Kimi delta attention). Without learning
rates a token adds key value^T without a correction (Mamba-2). A document starts with its initial
state, or with zeros. Outputs are linear in the state, and the columns of S are independent.

A document that begins with the state S ends with the state L + M S. L is its last state if S = 0.
The map M [k, k] depends on neither values nor queries. Without learning rates and with one decay
per head, M is a factor, the product of decays. If dS' is the gradient of the last state, then the
gradient of S is its value for dS' = 0, plus M^T dS'.

Source: Gated Delta Networks (arXiv:2412.06464), Kimi Linear (arXiv:2510.26692), Mamba-2
(arXiv:2405.21060).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

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


class StateChain(Protocol):
    """Computes the initial states of documents from last states of documents, also of other ranks.

    cp ranks store parts of documents, which are the `documents` of a rule.
    """

    def compute_initial_states(self, transitions: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
        """Return the initial state of each document [n, H, k, v], and maps for backward.

        `transitions` [n, H, k, v + k] has L and M of each document, or [n, H, k, v + 1] if each M
        is a factor, repeated for k rows. v is `value_dim`.
        """

    def compute_last_gradients(self, initial_gradients: Tensor, maps: Tensor) -> Tensor:
        """Return the gradient of each document's last state, [n, H, k, v].

        `initial_gradients` are the gradients of initial states if the gradients of last states are
        zero.
        """
