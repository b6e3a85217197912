"""Adapters of transformers' experts modules: any class with the common experts interface.

The interface (`transformers.integrations.moe`) is stacked matrices, an activation, and a forward
with ids and weights as arguments. Flags on the module give the order of the matrices. Only this
module is replaced. Router, shared experts and buffers of its block remain transformers modules.

Legend: E experts, D model dim, F hidden dim of an expert, C columns of FC1 (2F with a gate).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, get_args

import torch
from torch import Tensor, nn

from moecore.base.options.layer import Activation, MoEConfig
from moecore.families.adopt import adopt_experts
from moecore.families.transformers import stock
from moecore.kernels.rows.activation import ActivationOptions, activate_rows
from moecore.moe.dispatch.local import LocalDispatcher
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.experts import OwnActivation
from moecore.moe.layer import RoutedLayer
from moecore.moe.routed_experts import RoutedExperts

FLAGS = ("is_transposed", "has_bias")  # attributes that the interface sets on every module
# Classes with the interface, but without its decorator.
UNFLAGGED = ("LongcatFlashExperts", "Step3p7Experts")
ACTIVATION = "act_fn"
SLOPES, LIMITS = ("alpha", "swiglu_alpha"), ("limit", "swiglu_limit")


def find_experts_adapter(module: nn.Module) -> Callable[[Any, nn.Module], RoutedExperts] | None:
    """Return `route_experts` if an experts module has transformers' interface, otherwise None."""
    is_known = all(hasattr(module, flag) for flag in FLAGS) or type(module).__name__ in UNFLAGGED
    return route_experts if stock.is_transformers_module(module) and is_known else None


def route_experts(experts: Any, model: nn.Module) -> RoutedExperts:
    """Return RoutedExperts with the parameters of an experts module; `model` is unused."""
    stock.refuse_customised_experts(experts, child_names=(ACTIVATION, "identity_expert"))
    layout = read_layout(experts)
    fields, activation = read_experts(experts, layout)
    config = MoEConfig(**fields, top_k=1)  # not used: the model's router chooses
    return adopt_experts(config, layout, get_used_parameters(experts), own_activation=activation)


def read_layout(experts: Any) -> ExpertLayout:
    """Return the parameter names, order of dims and order of gate and up of an experts module."""
    w1 = "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj"
    is_concatenated = getattr(experts, "is_concatenated", True)
    return ExpertLayout(
        w1=w1,
        w2="down_proj",
        b1=f"{w1}_bias",
        b2="down_proj_bias",
        transposed=getattr(experts, "is_transposed", False),
        gate_up="concatenated" if is_concatenated else "interleaved",
    )


def get_used_parameters(experts: Any) -> dict[str, nn.Parameter]:
    """Return an experts module's parameters by name, without rows of identity (zero) experts."""
    # LongCat-Flash's FC1 has rows for experts that return their input, but its checkpoints do not.
    tensors = dict(experts.named_parameters(recurse=False))
    if getattr(experts, "zero_expert_num", 0):
        for name, tensor in tensors.items():
            trimmed = tensor.detach()[: experts.num_routed_experts].clone()
            tensors[name] = nn.Parameter(trimmed, requires_grad=tensor.requires_grad)
    return tensors


def read_experts(experts: Any, layout: ExpertLayout) -> tuple[dict[str, Any], OwnActivation | None]:
    """Return `MoEConfig` fields (sizes, activation, biases), and the module's own activation.

    The second result is None if a moecore activation equals the module's activation.
    NotImplementedError for an activation that is not elementwise.
    """
    num_experts, sizes = len(getattr(experts, layout.w2)), getattr(experts, layout.w1).shape[1:]
    fc1_dim, dim = reversed(sizes) if layout.transposed else sizes
    options = read_activation(experts, layout)
    gated, interleaved = options.gated, layout.gate_up == "interleaved"
    if options.function is not None and not _is_elementwise(options.function, gated, interleaved):
        raise NotImplementedError(
            f"activation of {type(experts).__name__} must compute each column from its own "
            "gate and up columns, along which experts may be cut: pass an adapter of yours, "
            "see docs/extending.md"
        )
    fields: dict[str, Any] = {
        "dim": dim,
        "hidden_dim": fc1_dim // 2 if gated else fc1_dim,
        "num_experts": num_experts,
        "zero_experts": getattr(experts, "zero_expert_num", 0) or 0,
        "activation": options.kind,
        "activation_limit": options.limit,
        "activation_alpha": options.alpha,
        "fc1_bias": hasattr(experts, layout.b1),
        "fc2_bias": hasattr(experts, layout.b2),
    }
    return fields, options.function


def read_activation(experts: Any, layout: ExpertLayout) -> ActivationOptions:
    """Return the options of the first moecore activation that equals the module's on samples.

    If no activation is equal, `ActivationOptions.function` is the module's activation.
    """
    gated, interleaved = getattr(experts, "has_gate", True), layout.gate_up == "interleaved"
    activation = _get_stock_activation(experts, gated=gated)
    h_RC = _make_activation_samples(gated)
    reference = activation(h_RC)
    limit, alpha = (_find_positive_attribute(experts, names) for names in (LIMITS, SLOPES))
    for kind in get_args(Activation):
        options = ActivationOptions(
            kind=kind, limit=limit or 7.0, alpha=alpha or 1.702, interleaved=interleaved
        )
        if options.gated != gated:
            continue
        if torch.allclose(activate_rows(h_RC, options), reference, rtol=1e-6, atol=1e-7):
            return options
    return ActivationOptions(kind="swiglu" if gated else "silu", function=activation)


def _get_stock_activation(experts: Any, *, gated: bool) -> Callable[[Tensor], Tensor]:
    """Return the module's activation [rows, FC1 columns] -> [rows, hidden dim] without matrices."""
    # `copy.copy` calls constructors of FSDP2's classes, and fails for parametrized classes.
    shell: Any = object.__new__(type(experts))
    act = experts._modules.get(ACTIVATION)
    modules = {} if act is None else {ACTIVATION: act}
    shell.__dict__.update(vars(experts) | {"_parameters": {}, "_modules": modules})
    if act is not None and [*act.parameters(), *act.buffers()]:
        raise NotImplementedError(
            f"{ACTIVATION} ({type(act).__name__}) of {type(experts).__name__} must have no "
            "parameters: an activation that is trained is not built yet"
        )
    if hasattr(shell, "_apply_gate") and gated:
        result: Callable[[Tensor], Tensor] = shell._apply_gate
        return result
    return partial(_apply_gated_activation, shell.act_fn) if gated else shell.act_fn


def _apply_gated_activation(act_fn: Callable[[Tensor], Tensor], h_RC: Tensor) -> Tensor:
    """Return act_fn(gate) * up of column halves, as classes without `_apply_gate` (Llama 4) do."""
    gate, up = h_RC.chunk(2, dim=-1)
    return act_fn(gate) * up


def _find_positive_attribute(experts: Any, attribute_names: Sequence[str]) -> float | None:
    values = (getattr(experts, name, None) for name in attribute_names)
    return next((v for v in values if isinstance(v, int | float) and 0 < v < inf), None)


def _is_elementwise(activation: Callable[[Tensor], Tensor], gated: bool, interleaved: bool) -> bool:
    """Whether each output column depends only on its own gate and up columns, on samples."""
    h_RC = _make_activation_samples(gated)
    if not gated:
        return torch.equal(activation(h_RC[:, :3]), activation(h_RC)[:, :3])
    F_ = h_RC.shape[1] // 2
    columns = range(6) if interleaved else [*range(3), *range(F_, F_ + 3)]
    return torch.equal(activation(h_RC[:, list(columns)]), activation(h_RC)[:, :3])


def _make_activation_samples(gated: bool) -> Tensor:
    """Return fp32 test rows [291, C] of small to large values; C = 16 if `gated`, otherwise 8."""
    steps = torch.linspace(-12.0, 12.0, 97, dtype=torch.float32, device="cpu")
    values = torch.cat([steps, steps / 64, steps * 64])
    rows_R8 = torch.stack([values.roll(k * 37) for k in range(8)], dim=1)
    return torch.cat([rows_R8, rows_R8.roll(101, 0)], dim=1) if gated else rows_R8


def has_vision_experts(block: nn.Module) -> bool:
    """Whether a block has separate MoE modules for text tokens and for image tokens."""
    return stock.is_transformers_module(block) and isinstance(
        getattr(block, "vision_moe", None), nn.Module
    )


def get_image_mask(
    block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Return the forward argument [B, T] that is nonzero for image tokens; None = no images."""
    return stock.bind_arguments(block, args, kwargs).get("moe_mm_token_type_ids")


def hook_vision_experts(model: nn.Module) -> None:
    """Run image experts also in forwards without images, since all ranks must join all-to-alls."""
    for block in model.modules():
        if has_vision_experts(block):
            block.register_forward_hook(_run_vision_experts_on_text, with_kwargs=True)


def _run_vision_experts_on_text(
    block: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Forward hook: if no token is an image, run image experts on zero tokens; add 0 to output."""
    hidden_BTD: Tensor = stock.bind_arguments(block, args, kwargs)["hidden_states"]
    kinds_BT = get_image_mask(block, args, kwargs)
    layers = (m for m in block.vision_moe.modules() if isinstance(m, RoutedLayer))
    is_local = all(isinstance(layer.dispatcher, LocalDispatcher) for layer in layers)
    if is_local or (kinds_BT is not None and kinds_BT.any()):  # as of the block
        return output
    nothing, _ = block.vision_moe(hidden_BTD.flatten(0, 1)[:0])
    return output[0] + nothing.sum(), *output[1:]
