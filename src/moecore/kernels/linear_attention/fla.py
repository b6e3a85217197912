"""The delta rule with a decay per key dim, of the package flash-linear-attention.

The package's function is public. It reads `cu_seqlens` on the host, and caches the values by tensor
object.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moecore.kernels.linear_attention.contract import DeltaRule

PACKAGE = "flash-linear-attention"
HALVES = (torch.bfloat16, torch.float16)
MAX_KEY_DIM = 256
FUNCTION = ("fla.ops.kda", "chunk_kda")
PARAMETERS = {"initial_state", "output_final_state", "cu_seqlens"}


def find_problem(rule: DeltaRule) -> str | None:
    """Return why flash-linear-attention cannot compute this rule, in one line; None = it can."""
    v_THv, key_dim = rule.v_THv, rule.k_Thk.shape[-1]
    if key_dim > MAX_KEY_DIM:
        return f"key dims ({key_dim}) must be <= {MAX_KEY_DIM} for {PACKAGE}"
    if rule.beta_TH is None or rule.g_THk.ndim == 2:
        return f"beta and a decay per key dim must be given for {PACKAGE}"
    if not v_THv.is_cuda or v_THv.dtype not in HALVES:
        return f"tensors ({v_THv.dtype} on {v_THv.device.type}) must be of 16 bits on cuda"
    return _find_import_problem()


def gated_delta_rule(
    rule: DeltaRule, cu_seqlens: Tensor, initial_states_nHkv: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return outputs o_THv and each document's last state, computed by flash-linear-attention."""
    q, k, v, g, beta = rule[:5]
    assert beta is not None, "`find_problem` requires learning rates"
    o_1THv, states_nHkv = _import_function()(
        *(x[None] for x in (q, k, v, g, beta)),
        scale=rule.scale,
        initial_state=initial_states_nHkv,
        output_final_state=True,
        use_qk_l2norm_in_kernel=rule.norm_qk,
        cu_seqlens=cu_seqlens,
    )
    return o_1THv[0], states_nHkv


@cache
def _import_function() -> Callable[..., Any]:
    """Import and return the package's function; ImportError or AttributeError if missing."""
    return getattr(importlib.import_module(FUNCTION[0]), FUNCTION[1])  # type: ignore[no-any-return]


@cache
def _find_import_problem() -> str | None:
    """Return why the package's function cannot be imported; None = it can."""
    try:
        function = _import_function()
    except (ImportError, AttributeError) as error:
        return f"{PACKAGE} must be installed and have {'.'.join(FUNCTION)} ({error}): install it"
    missing = PARAMETERS - inspect.signature(function).parameters.keys()
    if missing:
        return f"{PACKAGE} must take {', '.join(sorted(missing))}: install another release"
    return None
