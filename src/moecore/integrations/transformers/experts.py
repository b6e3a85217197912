"""moecore's experts as an experts implementation of transformers.

After `register_experts`, experts modules of transformers call `experts_forward` as their forward.
Their parameters keep transformers' names, shapes and order, and the kernels read views of them.

Legend: T tokens, K experts per token, D model dim, E local experts.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moecore.base.params import get_local_param
from moecore.base.torch_private import get_autocast_dtype
from moecore.families.transformers.experts import read_activation, read_layout
from moecore.kernels.experts.contract import ExpertMLPOptions, ExpertSpec, ExpertWeights
from moecore.kernels.experts.expert_mlp import expert_mlp
from moecore.kernels.experts.products import choose_products
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.index import build_index
from moecore.kernels.rows.record import Rows
from moecore.moe.backends import Computation, find_backend_computation
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.records import ExpertInput

NAME = "moecore"
PLAN = "_moecore_plan"  # attribute of an experts module
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class ExpertsPlan(NamedTuple):
    """The layout and activation of a transformers experts module."""

    layout: ExpertLayout
    activation: ActivationOptions


def register_experts() -> None:
    """Register "moecore" as a value of transformers' `experts_implementation`.

    Call it before `from_pretrained(..., experts_implementation="moecore")` or
    `model.set_experts_implementation("moecore")`, which select moecore's experts.

    Raises:
        RuntimeError: if transformers is older than 5.17.
    """
    import transformers
    from transformers.integrations import finegrained_fp8, moe, mxfp4

    if not hasattr(finegrained_fp8, "FP8ExpertsInterface"):
        raise RuntimeError(
            f"transformers ({transformers.__version__}) must be >= 5.17 for experts_implementation "
            f"({NAME!r}), because older releases refuse registered names: upgrade it"
        )
    for interface in (moe.ExpertsInterface, finegrained_fp8.FP8ExpertsInterface):
        interface.register(NAME, experts_forward)
    _refuse_construction(mxfp4.Mxfp4GptOssExperts)


def experts_forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the weighted sum over each token's experts. Arguments have transformers' names.

    Args:
        experts: an experts module with transformers' interface.
        hidden_states: [tokens T, model dim D].
        top_k_index: integer [T, experts per token K]; ids outside of [0, experts) are ignored.
        top_k_weights: float [T, K]; differentiable.

    Returns:
        [T, D] in the dtype of `hidden_states`, summed in fp32 and rounded once. No host sync in
        bf16 on Hopper.
    """
    _store_plan_if_missing(id(experts))
    plan: ExpertsPlan = getattr(experts, PLAN)
    x_TD, weights = _cast_operands(experts, plan.layout, hidden_states)
    if not getattr(experts, "has_post_expert_norm", False):
        sum_TD = _compute_experts(x_TD, top_k_index, top_k_weights, weights, plan.activation)
        return sum_TD.to(hidden_states.dtype)
    # The norm precedes the routing weights, so each choice of a token is a row.
    ids_TK, K = top_k_index, top_k_index.shape[1]
    unit_N1 = torch.ones_like(top_k_weights).view(-1, 1)
    rows = x_TD.repeat_interleave(K, dim=0)
    y_ND = experts.post_expert_norm(
        _compute_experts(rows, ids_TK.view(-1, 1), unit_N1, weights, plan.activation)
    )
    is_local_TK = (ids_TK >= 0) & (ids_TK < weights.w2_eDF.shape[0])
    weights_TK1 = top_k_weights.masked_fill(~is_local_TK, 0).unsqueeze(-1)
    y_TD: Tensor = (y_ND.unflatten(0, (-1, K)) * weights_TK1).sum(1)
    return y_TD.to(hidden_states.dtype)


@torch.compiler.assume_constant_result  # runs while torch.compile traces
def _store_plan_if_missing(experts_id: int) -> None:
    """Store the `ExpertsPlan` of an experts module as its attribute in the first forward."""
    # The id, because Dynamo of torch 2.11 passes no module to a function that it does not trace.
    experts: Any = ctypes.cast(experts_id, ctypes.py_object).value
    if PLAN in vars(experts):
        return
    layout = read_layout(experts)
    if getattr(experts, layout.w2).dtype not in DTYPES:
        raise NotImplementedError(_format_quantised_error(type(experts)))
    setattr(experts, PLAN, ExpertsPlan(layout, read_activation(experts, layout)))


def _cast_operands(
    experts: Any, layout: ExpertLayout, x_TD: Tensor
) -> tuple[Tensor, ExpertWeights]:
    """Return `x_TD` and the experts' local weights, cast to autocast's or the parameters' dtype."""
    w1, w2 = (get_local_param(getattr(experts, name)) for name in (layout.w1, layout.w2))
    dtype = get_autocast_dtype(x_TD) or w2.dtype
    b1, b2 = (getattr(experts, name, None) for name in (layout.b1, layout.b2))
    weights = ExpertWeights(
        w1_eCD=(w1.transpose(1, 2) if layout.transposed else w1).to(dtype),
        w2_eDF=(w2.transpose(1, 2) if layout.transposed else w2).to(dtype),
        b1_eC=None if b1 is None else get_local_param(b1).to(dtype),
        b2_eD=None if b2 is None else get_local_param(b2).to(dtype),
    )
    return x_TD.to(dtype), weights


def _compute_experts(
    x_SD: Tensor,
    ids_SK: Tensor,
    weights_SK: Tensor,
    weights: ExpertWeights,
    activation: ActivationOptions,
) -> Tensor:
    """Return [S, D]: for each row of `x_SD`, the weighted sum of its experts in [0, E)."""
    rows = Rows(x_SD)
    index = build_index(
        ids_SK.to(torch.int32),
        weights_SK.to(torch.promote_types(weights_SK.dtype, torch.float32)),
        first_expert=0,
        num_local_experts=weights.w2_eDF.shape[0],
    )
    spec = ExpertSpec.from_weights(rows, weights, activation)
    is_compiling = torch.compiler.is_compiling()
    choose = _choose_computation.__wrapped__ if is_compiling else _choose_computation
    computation = choose(spec, activation)
    if isinstance(computation, ExpertMLPOptions):
        return expert_mlp(rows, weights, index, computation)
    # torch.compile can trace torch's grouped_mm only in bf16.
    is_eager = is_compiling and x_SD.dtype != torch.bfloat16
    run = _run_computation_eager if is_eager else _run_computation
    return run(computation, ExpertInput(rows, index, None), weights, activation)


def _run_computation(computation: Computation, *arguments: Any) -> Tensor:
    """Return `computation(*arguments)`; `_run_computation_eager` is excluded from torch.compile."""
    return computation(*arguments)


_run_computation_eager = torch.compiler.disable(_run_computation)


@lru_cache
def _choose_computation(
    expert_spec: ExpertSpec, activation: ActivationOptions
) -> ExpertMLPOptions | Computation:
    """Return the function that computes these experts, or options for `expert_mlp` if none does."""
    needs_autograd = expert_spec.fc1_bias or expert_spec.fc2_bias or expert_spec.own_activation
    computation = find_backend_computation("auto", expert_spec, needs_autograd=needs_autograd)
    if computation is not None:
        return computation
    return ExpertMLPOptions(activation=activation, products=choose_products("auto", expert_spec))


def _refuse_construction(cls: type[nn.Module]) -> None:
    """Patch the constructor of `cls` to raise an error if the config selects experts "moecore"."""
    construct: Any = cls.__init__
    if hasattr(construct, "__wrapped__"):
        return

    @wraps(construct)
    def refuse_or_construct(self: nn.Module, config: Any) -> None:
        if getattr(config, "_experts_implementation", None) == NAME:
            raise NotImplementedError(_format_quantised_error(cls))
        construct(self, config)

    cls.__init__ = refuse_or_construct  # type: ignore[method-assign]


def _format_quantised_error(cls: type) -> str:
    return (
        f"experts_implementation ({NAME!r}) must not go with quantised experts ({cls.__name__}): "
        "load the model with dequantize=True in its quantization config"
    )
