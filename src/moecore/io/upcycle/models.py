"""Upcycling of models: a native decoder, its state dict, or any module with dense MLPs.

`upcycle.py` converts one MLP. Legend: D model dim, F hidden dim of the dense MLP, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.base.fields import CheckedRecord, check_arguments, format_name
from moecore.base.options.layer import GATED_ACTIVATIONS, MoEConfig
from moecore.families.adopt import adopt
from moecore.io.upcycle.upcycle import UpcycleOptions, upcycle_mlp
from moecore.kernels.rows.activation import activate_rows
from moecore.models.config import DecoderConfig
from moecore.models.decoder import Decoder
from moecore.moe.experts import make_activation_options
from moecore.moe.layer import LayerLayout, MoELayer

PROBE_TOKENS = 16
PROBE_STD = 3.0  # of hidden values; near 0 different activations have similar values


def upcycle_config(
    config: DecoderConfig,
    options: UpcycleOptions,
    *,
    layers: Iterable[int] | None = None,
    **moe_fields: Any,
) -> DecoderConfig:
    """Convert a dense decoder's config to the config of the upcycled MoE decoder.

    Args:
        config: the config of a dense decoder.
        options: number and size of the experts.
        layers: indices of the layers to convert; None = all.
        **moe_fields: fields of `MoEConfig` except dims, experts and top_k.

    Raises:
        ValueError: if the decoder already has MoE layers, a layer index is out of range, or a layer
            cannot reproduce the dense output.
    """
    check_arguments(upcycle_config, locals())
    if config.moe is not None:
        raise ValueError(
            "DecoderConfig.moe must be None for upcycling, which starts from a dense decoder: "
            "upcycle the dense checkpoint"
        )
    if config.mlp_activation != "swiglu":
        raise ValueError(
            f'DecoderConfig.mlp_activation ("{config.mlp_activation}") must be "swiglu" for '
            "upcycling, whose experts have gates: start from another model"
        )
    moe_layers = set(range(config.num_layers) if layers is None else layers)
    if not moe_layers or not moe_layers <= set(range(config.num_layers)):
        raise ValueError(
            f"layers ({sorted(moe_layers)}) must be at least one of [0, num_layers "
            f"({config.num_layers})): name existing layers, or use None for all"
        )
    moe = options.moe_config(dim=config.dim, hidden_dim=config.mlp_hidden_dim, **moe_fields)
    if moe.activation != "swiglu":
        raise ValueError(
            f'MoEConfig.activation ("{moe.activation}") must be "swiglu", that of a decoder\'s '
            "dense MLP: drop it"
        )
    dense_layers = tuple(i for i in range(config.num_layers) if i not in moe_layers)
    mlp_hidden_dim = config.mlp_hidden_dim if dense_layers else 0
    return replace(config, moe=moe, dense_layers=dense_layers, mlp_hidden_dim=mlp_hidden_dim)


def upcycle_state_dict(
    state: Mapping[str, Tensor], *, config: DecoderConfig, options: UpcycleOptions
) -> dict[str, Tensor]:
    """Convert a dense decoder's state dict to the state dict of the upcycled MoE decoder.

    Args:
        state: unsharded tensors of the dense decoder; not modified.
        config: the MoE decoder, from `upcycle_config`.
        options: number and size of the experts.

    Returns:
        The tensors of `Decoder(config)` by name: new tensors of converted layers, and the other
        tensors of `state` without a copy.

    Raises:
        ValueError: if a tensor is missing, unused or has a wrong shape.
    """
    check_arguments(upcycle_state_dict, locals())
    skeleton = Decoder(config, device="meta")
    tensors = dict(state)
    for name, module in skeleton.named_modules():
        if isinstance(module, MoELayer):
            children = ("gate_proj", "up_proj", "down_proj")
            *w1, w2 = (_pop_tensor(tensors, f"{name}.{child}.weight") for child in children)
            dense = {"w1": torch.stack(w1), "w2": w2}
            moe_tensors = upcycle_mlp(dense, config=module.config, options=options, layer_name=name)
            tensors.update({f"{name}.{part}": tensor for part, tensor in moe_tensors.items()})
    result = {}
    for name, expected_tensor in skeleton.state_dict().items():
        result[name] = _pop_tensor(tensors, name)
        if result[name].shape != expected_tensor.shape:
            raise ValueError(
                f"state dict {format_name(name)} {tuple(result[name].shape)} must have the shape "
                f"{tuple(expected_tensor.shape)} of the decoder's config: match the two"
            )
    if tensors:
        raise ValueError(
            f"state dict {min(tensors)} must belong to the dense decoder of this config: upcycle "
            "with the config that the checkpoint was trained with"
        )
    return result


def _pop_tensor(state: dict[str, Tensor], name: str) -> Tensor:
    """Remove a tensor from the state dict and return it; raise ValueError if it is missing."""
    if name not in state:
        raise ValueError(
            f"state dict must hold {name}: pass the whole state dict of the dense decoder"
        )
    return state.pop(name)


def upcycle_decoder(
    model: Decoder,
    options: UpcycleOptions,
    *,
    layers: Iterable[int] | None = None,
    **moe_fields: Any,
) -> Decoder:
    """Convert a dense decoder to an MoE decoder with equal outputs. Call it before sharding.

    Args:
        model: a dense decoder, not on meta. The result shares the memory of layers that are not
            converted, so do not use `model` afterwards.
        options, layers, **moe_fields: as in `upcycle_config`.

    Raises:
        ValueError: as `upcycle_config` and `upcycle_state_dict`.
    """
    check_arguments(upcycle_decoder, locals())
    config = upcycle_config(model.config, options, layers=layers, **moe_fields)
    state = upcycle_state_dict(model.state_dict(), config=config, options=options)
    upcycled = Decoder(config, device="meta")
    upcycled.load_state_dict(state, assign=True)
    return upcycled.train(model.training)


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPNames(CheckedRecord):
    """Names of the `nn.Linear` children of a dense MLP; the default fits most gated MLPs.

    Attributes:
        up: name of the first linear.
        down: name of the second linear.
        gate: name of the gate's linear; None if the activation has no gate, or if `up` is a fused
            matrix whose first half of rows is the gate.
    """

    up: str = "up_proj"
    down: str = "down_proj"
    gate: str | None = "gate_proj"


def upcycle_modules(
    model: nn.Module,
    options: UpcycleOptions,
    *,
    mlps: Collection[str] | Callable[[str, nn.Module], bool],
    names: MLPNames | None = None,
    **moe_fields: Any,
) -> nn.Module:
    """Replace dense MLPs of a model by MoE layers with the same output; return the model.

    To check `names` and the activation, each MLP is run on random tokens, and its output is
    compared with the output that is computed from the named matrices.

    Args:
        model: any module that is not on meta, before it is parallelized; modified in place.
        options: number and size of the experts.
        mlps: qualified names of the MLPs, or a predicate `(name, module) -> bool`. Each MLP maps
            [..., D] to [..., D].
        names: names of the matrices in an MLP; None = the defaults of `MLPNames`.
        **moe_fields: fields of `MoEConfig` except dims, experts, top_k and biases.

    Raises:
        ValueError: if an MLP does not exist, fails the check, or cannot be upcycled. The model is
            then unchanged.
    """
    check_arguments(upcycle_modules, locals())
    names = names or MLPNames()
    layers: dict[nn.Module, MoELayer] = {}
    for name, mlp in _find_mlps(model, mlps).items():
        dense = _read_mlp(name, mlp, names, moe_fields.get("activation", "swiglu"))
        config = options.moe_config(
            dim=dense["w2"].shape[0],
            hidden_dim=dense["w2"].shape[1],
            fc1_bias="b1" in dense,
            fc2_bias="b2" in dense,
            **moe_fields,
        )
        moe_tensors = upcycle_mlp(dense, config=config, options=options, layer_name=name)
        _check_same_output(name, mlp, dense, config)
        parts: dict[str, Any] = {"router": {}, "experts": {}}
        for tensor_name, tensor in moe_tensors.items():
            role, _, child = tensor_name.partition(".")
            parts[role][child] = tensor
        layers[mlp] = adopt(config, LayerLayout(), **parts)
        layers[mlp].train(mlp.training)
    for parent in list(model.modules()):
        for child, module in parent._modules.items():
            if module in layers:
                parent._modules[child] = layers[module]
    return model


def _find_mlps(
    model: nn.Module, mlps: Collection[str] | Callable[[str, nn.Module], bool]
) -> dict[str, nn.Module]:
    """Return the selected MLPs by name; ValueError if one does not exist or none is selected."""
    modules = dict(model.named_modules())
    mlp_names = [n for n, m in modules.items() if mlps(n, m)] if callable(mlps) else list(mlps)
    if not mlp_names:
        raise ValueError(
            f"mlps ({mlps!r}) must choose a module of {type(model).__name__}: name one"
        )
    for name in mlp_names:
        if name == "" or name not in modules:
            raise ValueError(
                f"mlps ({name!r}) must be modules inside {type(model).__name__}: use names from "
                "named_modules()"
            )
    return {name: modules[name] for name in mlp_names}


def _read_mlp(name: str, mlp: nn.Module, names: MLPNames, activation: str) -> dict[str, Tensor]:
    """Return a dense MLP's "w1", "w2" and any "b1", "b2", detached; ValueError if unsupported."""
    gated = activation in GATED_ACTIVATIONS
    if names.gate is not None and not gated:
        raise ValueError(
            f"MLPNames.gate ({names.gate!r}) must be None with MoEConfig.activation "
            f'("{activation}"), which has no gate: set gate=None or a gated activation'
        )
    children = [child for child in (names.gate, names.up) if child is not None]
    first = [_get_linear(name, mlp, child) for child in children]
    down = _get_linear(name, mlp, names.down)
    w1 = _stack_gate_up(name, [linear.weight for linear in first], gated)
    dense = {"w1": w1, "w2": down.weight.detach()}
    biases = [m.bias for m in first if m.bias is not None]
    if len(biases) not in (0, len(first)):
        raise ValueError(f"{name}.{names.gate} and {names.up} must both have a bias or none: add 0")
    if biases:
        dense["b1"] = _stack_gate_up(name, biases, gated)
    if down.bias is not None:
        dense["b2"] = down.bias.detach()
    for path, child in mlp.named_modules():
        if isinstance(child, nn.Dropout) and child.p > 0:
            raise ValueError(
                f"{name}.{path}.p ({child.p}) must be 0, because experts drop nothing: set it to 0"
            )
    return dense


def _get_linear(name: str, mlp: nn.Module, child_name: str) -> nn.Linear:
    """Return the `nn.Linear` with the name `child_name` in the MLP `name`, or raise ValueError."""
    module = dict(mlp.named_modules()).get(child_name)
    if not isinstance(module, nn.Linear):
        raise ValueError(
            f"{name}.{child_name} ({type(module).__name__}) must be an nn.Linear of "
            f"{type(mlp).__name__}: name its matrices with MLPNames"
        )
    return module


def _stack_gate_up(name: str, parts: Sequence[Tensor], has_gate: bool) -> Tensor:
    """Return gate and up, in two tensors or a fused one, as [2, F, ...]; up without a gate."""
    parts = [part.detach() for part in parts]
    if not has_gate:
        return parts[0]
    if len(parts) == 2:
        return torch.stack(parts)
    if parts[0].shape[0] % 2:
        raise ValueError(
            f"{name} has {parts[0].shape[0]} hidden columns, which must be even to hold gate and "
            "up: name the gate with MLPNames, or use an activation without one"
        )
    halves: Tensor = parts[0].unflatten(0, (2, -1))
    return halves


@torch.no_grad()
def _check_same_output(
    name: str, mlp: nn.Module, dense: Mapping[str, Tensor], config: MoEConfig
) -> None:
    """Raise ValueError if an MLP and its tensors `dense` differ on random tokens."""
    w1, w2_DF = dense["w1"].flatten(0, -2), dense["w2"]
    b1 = dense["b1"].flatten() if "b1" in dense else None
    size, generator = (PROBE_TOKENS, config.dim), torch.Generator().manual_seed(0)
    x_TD = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(w1)
    x_TD = x_TD * (PROBE_STD / F.linear(x_TD, w1).std().clamp(min=1e-3))
    hidden_TF = activate_rows(F.linear(x_TD, w1, b1), make_activation_options(config))
    target_TD = F.linear(hidden_TF.to(x_TD), w2_DF, dense.get("b2"))
    was_training = mlp.training
    mlp.eval()
    output_TD = mlp(x_TD)
    mlp.train(was_training)
    scale = target_TD.abs().max().clamp(min=torch.finfo(target_TD.dtype).tiny)
    error = float((output_TD - target_TD).abs().max() / scale)
    bound = max(3e-5, 8 * torch.finfo(x_TD.dtype).eps)
    if not error <= bound:
        raise ValueError(
            f'{name} ({type(mlp).__name__}) must compute down("{config.activation}"(up(x))) of '
            f"the named matrices, but differs by {error:.1e} of its scale (bound {bound:.1e}): "
            "name its activation and its matrices"
        )
