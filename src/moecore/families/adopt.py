"""Builds MoE layers around existing parameters; adapters call these functions.

`adopt` builds a MoELayer for a block, `adopt_experts` builds RoutedExperts for an experts module.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from moecore.base.fields import check_arguments
from moecore.base.options.layer import MoEConfig
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.experts import Experts, OwnActivation
from moecore.moe.layer import LayerLayout, MoELayer
from moecore.moe.routed_experts import RoutedExperts
from moecore.moe.router import Router
from moecore.moe.selection_bias import add_submodule


def adopt(
    config: MoEConfig,
    layout: LayerLayout,
    *,
    router: Mapping[str, Tensor],
    experts: Mapping[str, Tensor],
    shared: nn.Module | None = None,
    shared_gate: nn.Module | None = None,
    latent: tuple[nn.Module, nn.Module] | None = None,
    own_activation: OwnActivation | None = None,
    layer_class: type[MoELayer] = MoELayer,
) -> MoELayer:
    """Return a MoELayer whose parameters are the given tensors without copies.

    Args:
        config: config of the layer; `shared_hidden_dim` must be 0 if `shared` is given.
        layout: names of the block's parts in the model.
        router: "weight" [experts E, model dim D]. Also "bias" [E], the selection bias
            buffer [E] or [1, E] and the table of experts by token id, if the config has them.
            `layout.bias_owner` may name another module for the buffer.
        experts: stacked tensors by parameter name, with the shapes of
            `compute_expert_shapes(config, layout)`.
        shared: module that maps [T, D] to [T, D] for T tokens, used unchanged.
        shared_gate: module that maps [T, D] to [T, 1], used unchanged under the name
            `layout.shared_gate`. The sigmoid of its output multiplies the shared output.
        latent: modules that map [T, D] to [T, latent dim] and back, for a config with a latent dim.
            They are used unchanged as `layout.latent_down` and `layout.latent_up`.
        own_activation: differentiable function from FC1's output [rows, FC1 columns] to FC2's input
            [rows, hidden dim]; None = `config.activation`.
        layer_class: subclass of MoELayer whose forward has the signature of the block's forward.

    Raises:
        ValueError: if a tensor is missing or its shape does not fit the config; if only one of
            `shared_gate` and `layout.shared_gate` is given; or for a gate without `shared`.
        NotImplementedError: for latent experts without `latent`.
    """
    check_arguments(adopt, locals())
    if bool(layout.shared_gate) != (shared_gate is not None):
        raise ValueError(
            f"LayerLayout.shared_gate ({layout.shared_gate!r}) must name the shared_gate "
            f"({_get_class_name(shared_gate)}) of adopt: pass both or neither"
        )
    if shared_gate is not None and shared is None:
        raise ValueError(
            f"shared_gate ({_get_class_name(shared_gate)}) must come with shared (None) in adopt: "
            "pass the block's shared module"
        )
    if bool(config.latent_dim) != (latent is not None and bool(layout.latent_down)):
        raise NotImplementedError(
            f"MoEConfig.latent_dim ({config.latent_dim}) must be 0 in adopt unless latent and "
            "LayerLayout.latent_down name the two projections: pass all or none"
        )
    layer = layer_class(config, layout=layout, device="meta")
    if config.shared_hidden_dim and shared is None:
        raise ValueError(
            f"MoEConfig.shared_hidden_dim ({config.shared_hidden_dim}) must be 0 in adopt without "
            "shared (None): pass the block's shared module"
        )
    layer.get_part("experts").own_activation = own_activation
    _assign_parameters(layer.get_part("router"), router)
    _assign_parameters(layer.get_part("experts"), experts)
    if latent is not None:
        for name, module in zip((layout.latent_down, layout.latent_up), latent, strict=True):
            add_submodule(layer, name, module)
    if shared is not None:
        add_submodule(layer, layout.shared, shared)
    if shared_gate is not None:
        add_submodule(layer, layout.shared_gate, shared_gate)
    return layer


def adopt_experts(
    config: MoEConfig,
    layout: ExpertLayout,
    experts: Mapping[str, Tensor],
    *,
    own_activation: OwnActivation | None = None,
) -> RoutedExperts:
    """Return RoutedExperts whose parameters are the given tensors without copies.

    The arguments are as in `adopt`; only sizes, activation and biases of `config` are used.
    ValueError if a tensor is missing or its shape does not fit the config.
    """
    check_arguments(adopt_experts, locals())
    module = RoutedExperts(config, layout=layout, own_activation=own_activation, device="meta")
    _assign_parameters(module, experts)
    return module


def _check_hash_table(table_name: str, table_VK: Tensor, num_experts: int) -> None:
    """Raise ValueError if a token id's K experts in a table are not distinct valid ids."""
    sorted_VK = table_VK.sort(dim=1).values
    wrong_V = (sorted_VK[:, 1:] == sorted_VK[:, :-1]).any(1)
    wrong_V |= (table_VK < 0).any(1) | (table_VK >= num_experts).any(1)
    if wrong_V.any():
        row = int(wrong_V.nonzero()[0])
        raise ValueError(
            f"Router {table_name}[{row}] ({table_VK[row].tolist()}) must be distinct ids of the "
            f"{num_experts} experts: load the table of a checkpoint before"
        )


def _get_class_name(module: nn.Module | None) -> str:
    return "None" if module is None else type(module).__name__


def _assign_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace a module's parameters and buffers by `tensors` {name: tensor}, without a copy."""
    assert isinstance(module, Router | Experts)
    # A layout may name another module for the router's selection bias.
    bias_owner = module.bias_owner if isinstance(module, Router) else module
    slots = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    if bias_owner is not module:
        slots |= dict(bias_owner.named_buffers(recurse=False))
    if slots.keys() != tensors.keys():
        raise ValueError(
            f"{type(module).__name__} tensors {sorted(tensors)} must be {sorted(slots)}: "
            "match the adapter's config and layout to the block"
        )
    for name, tensor in tensors.items():
        has_bias_shape = name in bias_owner._buffers and tensor.shape == (1, len(slots[name]))
        if tensor.shape != slots[name].shape and not has_bias_shape:  # ERNIE: [1, E]
            raise ValueError(
                f"{type(module).__name__} {name} {tuple(tensor.shape)} must have the shape "
                f"{tuple(slots[name].shape)} that the adapter's config gives"
            )
        if module._parameters.pop(name, None) is None:
            # The selection bias, whose small steps need fp32, or the table of experts by token id.
            # A Parameter would leave the buffers.
            is_bias = tensor.is_floating_point()
            if not (is_bias or tensor.is_meta):
                _check_hash_table(name, tensor, module.config.num_experts)
            owner = bias_owner if is_bias else module
            setattr(owner, name, tensor.detach().float() if is_bias else tensor.detach())
            continue
        # Registered anew, so that the block's order stays.
        parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor.detach())
        module.register_parameter(name, parameter)
