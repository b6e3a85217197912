"""The delta rule with decays of packed documents: the implementations, and which one computes it.

    fla.py      16 bits on GPUs, where the package flash-linear-attention is installed
    chunked.py  everything else, any device

Letters: `contract.py`. Length: x is divided by sqrt(sum(x ** 2) + 1e-6), as in both.
"""

from __future__ import annotations

from torch import Tensor

from moecore.kernels.common import no_autocast, warn_plain
from moecore.kernels.linear_attention import chunked, fla
from moecore.kernels.linear_attention.contract import DeltaRule


def gated_delta_rule(
    rule: DeltaRule, cu_seqlens: Tensor, initial_nHkv: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return what queries read, and the last state of each document. Differentiable once.

    Args:
        rule: tensors of any strides; q, k and v in one float dtype.
        cu_seqlens: int32 [n + 1], the first token of each document, and T; documents may be empty.
        initial_nHkv: the first states, fp32 (fp64 for fp64); None = zeros.

    Returns:
        o_THv in the dtype of q, and states_nHkv in fp32 (fp64 for fp64). With fla.py the host waits
        once for each `cu_seqlens`.
    """
    with no_autocast(rule.v_THv):
        if (reason := fla.supports(rule)) is None:
            return fla.gated_delta_rule(rule, cu_seqlens, initial_nHkv)
        warn_plain(rule.v_THv, f"a gated delta rule of {rule.v_THv.dtype} ({reason})")
        return chunked.gated_delta_rule(rule, cu_seqlens, initial_nHkv)
