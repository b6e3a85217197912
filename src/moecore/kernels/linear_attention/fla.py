"""The delta rule with decays and the short convolution of the package flash-linear-attention.

The package's functions are public. They read `cu_seqlens` on the host, and cache the values by
tensor object. On meta tensors that stand for a GPU, `fla_on_meta.py` replaces the functions.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.kernels.common import TRITON, has_hopper_kernels, is_gpu, triton
from moecore.kernels.linear_attention import fla_on_meta
from moecore.kernels.linear_attention.contract import DeltaRule

PACKAGE = "flash-linear-attention"
HALVES = (torch.bfloat16, torch.float16)
MAX_KEY_DIM = 256
RULE = ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
RULE_BY_CHANNEL = ("fla.ops.kda", "chunk_kda")
RULE_WITHOUT_RATES = ("fla.ops.simple_gla", "chunk_simple_gla")
# Triton versions from WRONG_FROM to before WRONG_BEFORE miscompile the backward of a decay per head
# for Hopper. The package then raises (fla-org/flash-linear-attention#640) unless it has tilelang.
WRONG_FROM, WRONG_BEFORE = (3, 4), (3, 7, 1)
CONVOLUTION = ("fla.modules.causal_conv1d", "causal_conv1d")
PARAMETERS = {"initial_state", "output_final_state", "cu_seqlens"}


def find_problem(rule: DeltaRule) -> str | None:
    """Return why flash-linear-attention cannot compute this rule, in one line; None = it can."""
    if rule.k_Thk.shape[-1] > MAX_KEY_DIM:
        return f"key dims ({rule.k_Thk.shape[-1]}) must be <= {MAX_KEY_DIM} for {PACKAGE}"
    if rule.beta_TH is None and (rule.norm_qk or rule.g_THk.ndim == 3):
        return f"beta (None) must come with a decay per head and without norm_qk for {PACKAGE}"
    reason, name = _find_device_problem(rule.v_THv), _get_function_name(rule)
    is_on_meta = name == RULE_WITHOUT_RATES or (name == RULE and rule.norm_qk)
    if reason is None and rule.v_THv.is_meta and not is_on_meta:
        return f"rule (of {name[1]}) must be of {RULE[1]} with norm_qk, or without beta, on meta"
    return reason or _find_triton_problem(rule) or _find_import_problem(*name, rule.v_THv.is_meta)


def find_convolution_problem(x_TD: Tensor) -> str | None:
    """Return why flash-linear-attention cannot convolve the tokens, in one line; None = it can."""
    return _find_device_problem(x_TD) or _find_import_problem(*CONVOLUTION, x_TD.is_meta)


def gated_delta_rule(
    rule: DeltaRule, cu_seqlens: Tensor, initial_states_nHkv: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return outputs o_THv and each document's last state, computed by flash-linear-attention."""
    q, k, v, g, beta = rule[:5]
    rate_kwargs: dict[str, Any] = {}
    if beta is None:  # that function has a key head for each value head
        q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    else:
        rate_kwargs = dict(beta=beta[None], use_qk_l2norm_in_kernel=rule.norm_qk)
    if v.is_meta:
        rule = rule._replace(q_Thk=q, k_Thk=k)
        return fla_on_meta.gated_delta_rule(rule, cu_seqlens, initial_states_nHkv)
    o_1THv, states_nHkv = _import_function(*_get_function_name(rule))(
        *(x[None] for x in (q, k, v, g)),
        scale=rule.scale,
        initial_state=initial_states_nHkv,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        **rate_kwargs,
    )
    return o_1THv[0], states_nHkv


def causal_convolution(
    x_TD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    cu_seqlens: Tensor,
    previous_tokens_nwD: Tensor | None,
    apply_silu: bool,
) -> Tensor:
    """Return the convolved tokens y_TD, computed by flash-linear-attention."""
    if x_TD.is_meta:
        return fla_on_meta.causal_convolution(x_TD, weight_DW, bias_D, previous_tokens_nwD)
    state_nDW = None if previous_tokens_nwD is None else F.pad(previous_tokens_nwD.mT, (1, 0))
    y_1TD, _ = _import_function(*CONVOLUTION)(
        x_TD[None],
        weight_DW,
        bias_D,
        initial_state=state_nDW,
        activation="silu" if apply_silu else None,
        cu_seqlens=cu_seqlens,
    )
    return y_1TD[0]  # type: ignore[no-any-return]


def _get_function_name(rule: DeltaRule) -> tuple[str, str]:
    """Return (module, function) of flash-linear-attention that computes this rule."""
    if rule.beta_TH is None:
        return RULE_WITHOUT_RATES
    return RULE_BY_CHANNEL if rule.g_THk.ndim == 3 else RULE


def _find_device_problem(x: Tensor) -> str | None:
    """Return why flash-linear-attention does not support x's device or dtype; None = it does."""
    if is_gpu(x) and x.dtype in HALVES:
        return None
    return f"tensors ({x.dtype} on {x.device.type}) must be of 16 bits on cuda for {PACKAGE}"


def _find_triton_problem(rule: DeltaRule) -> str | None:
    """Return why the installed Triton computes the rule wrongly on Hopper; None = it does not."""
    device = rule.v_THv.device
    if device.type == "meta" or rule.g_THk.ndim == 3 or not has_hopper_kernels(device):
        return None
    if not WRONG_FROM <= TRITON < WRONG_BEFORE or find_spec("tilelang") is not None:
        return None
    return f"Triton ({triton.__version__}) must be >= 3.7.1, or tilelang installed, for {PACKAGE}"


@cache
def _import_function(module_name: str, function_name: str) -> Callable[..., Any]:
    """Import and return a function of the package; ImportError or AttributeError if missing."""
    return getattr(importlib.import_module(module_name), function_name)  # type: ignore[no-any-return]


@cache
def _find_import_problem(module_name: str, function_name: str, on_meta: bool) -> str | None:
    """Return why the package's function cannot be imported; None = it can, or `on_meta` is True."""
    if on_meta:  # meta stands for a GPU of a host with the package
        return None
    try:
        function = _import_function(module_name, function_name)
    except (ImportError, AttributeError) as error:
        name = f"{module_name}.{function_name}"
        return f"{PACKAGE} must be installed and have {name} ({error}): install it"
    missing = PARAMETERS - inspect.signature(function).parameters.keys()
    if missing:
        return f"{PACKAGE} must take {', '.join(sorted(missing))}: install another release"
    return None
