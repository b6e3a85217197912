"""TitanLayer: a torchtitan MoE block as a MoELayer with the same names, shapes and checkpoints.

| torchtitan 0.2               | torchtitan 0.3                                      | here        |
|------------------------------|-----------------------------------------------------|-------------|
| experts.w1, w2, w3           | routed_experts.inner_experts.w1_EFD, w2_EDF, w3_EFD | `Experts`   |
| router.gate.weight (, .bias) | router.gate.weight (, .bias)                        | `Router`    |
| expert_bias (saved)          | expert_bias_E (saved)                               | same buffer |
| tokens_per_expert            | tokens_per_expert_E                                 | `MoEState`  |
| shared_experts.w1, w2, w3    | shared_experts.w1, w2, w3                           | same module |

Legend: B sequences, t tokens of a sequence on this rank, D model dim, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from moecore.base.options.layer import BalanceConfig, MoEConfig
from moecore.base.params import shard_parameter
from moecore.families.adopt import adopt
from moecore.moe.forced_routing import force_even_load
from moecore.moe.layer import LayerLayout, MoELayer, RoutedLayer

Fills = Mapping[str, Mapping[str, Callable[[Tensor], Any]]]  # part, parameter -> initialiser
Layer = TypeVar("Layer", bound="TitanLayer")


class TitanLayer(MoELayer):
    """A MoELayer that replaces a torchtitan MoE block; each torchtitan version has a subclass."""

    names: ClassVar[LayerLayout]
    known_classes: ClassVar[Mapping[str, tuple[type, ...]]]

    def _apply(self, fn: Any, recurse: bool = True) -> TitanLayer:
        """Apply `fn` to all tensors; the selection bias stays fp32 and shared with the router."""
        super()._apply(fn, recurse)
        name = self.layout.expert_bias
        if name in self._buffers:
            self._buffers[name] = self.get_part("router")._buffers[name]
        return self

    def forward(  # type: ignore[override]  # a forward of torchtitan has no cp of its own
        self, x: Tensor, padding_mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Return this rank's output [sequences, local tokens, model dim]; `x` may be a DTensor."""
        return super().forward(x.to_local() if isinstance(x, DTensor) else x, padding_mask)

    @torch.no_grad()
    def init_parameters(self, initialisers: Fills, init_shared: Callable[[Any], Any]) -> None:
        """Initialize parameters by `initialisers[module][parameter]`, and selection biases to 0."""
        for role, by_name in initialisers.items():
            for name, fill in by_name.items():
                if (param := getattr(self.get_part(role), name)) is not None:
                    fill(param)
        if self.get_part("shared") is not None:
            init_shared(self.get_part("shared"))
        bias = self.get_part("router").selection_bias
        if bias is not None:
            nn.init.zeros_(bias)


def adopt_block(
    layer_class: type[Layer], block: Any, model: nn.Module, *, update_bias: bool = True
) -> Layer:
    """Return a `layer_class` with the parameters of a torchtitan block of known classes."""
    for path, classes in layer_class.known_classes.items():
        part = attrgetter(path)(block)
        if type(part) not in classes:
            raise NotImplementedError(
                f"MoE {path.rpartition('.')[2]} ({type(part).__name__}) must be "
                f"{classes[0].__name__} for a moecore model: drop the subclass, converter or comm "
                "backend that replaced it"
            )
    names = layer_class.names
    router: dict[str, Tensor] = dict(block.router.gate.named_parameters(recurse=False))
    experts = dict(block.get_submodule(names.experts).named_parameters(recurse=False))
    config = _make_config(block, experts[names.expert_layout.w1].shape, update_bias=update_bias)
    if config.expert_bias:
        router[names.expert_bias] = getattr(block, names.expert_bias)
    parts = dict(router=router, experts=experts, shared=block.shared_experts)
    layer = cast(Layer, adopt(config, names, layer_class=layer_class, **parts))
    if config.expert_bias:
        # As in torchtitan's checkpoints, the layer saves the bias, and the router does not.
        layer.register_buffer(names.expert_bias, router[names.expert_bias].float())
        bias_E = layer.get_buffer(names.expert_bias)
        layer.get_part("router").register_buffer(names.expert_bias, bias_E, persistent=False)
    if block.router._debug_force_load_balance:
        force_even_load(layer)
    return layer


def _make_config(block: Any, shape: torch.Size, *, update_bias: bool) -> MoEConfig:
    """Return a torchtitan block's config; `shape` of w1 is (experts, hidden dim, model dim)."""
    (num_experts, hidden_dim, dim), router = shape, block.router
    weights_on_input = getattr(block, "score_before_experts", False)  # an option of 0.2
    if weights_on_input and router.top_k > 1:
        raise NotImplementedError(
            f"MoEArgs.score_before_experts (True) must be False with top_k ({router.top_k}) > 1: "
            "a token travels once, so it cannot be weighted for each expert apart"
        )
    rate = block.load_balance_coeff if update_bias else None
    return MoEConfig(
        dim=dim,
        hidden_dim=hidden_dim,
        num_experts=num_experts,
        top_k=router.top_k,
        score_function=router.score_func,
        normalize_weights=router.route_norm,
        routed_scaling_factor=router.route_scale,
        num_groups=router.num_expert_groups or 1,
        top_groups=router.num_limited_groups if router.num_expert_groups else 1,
        expert_bias=block.load_balance_coeff is not None,
        router_bias=router.gate.bias is not None,
        weights_on_input=weights_on_input,
        balance=BalanceConfig(bias_update_rate=rate or 0.0),
    )


def shard_dense_parts(layer: RoutedLayer, tp_mesh: DeviceMesh) -> None:
    """Shard the shared experts of a layer on meta over tp and replicate its router, in place."""
    router = layer.get_part("router")
    for name in dict(router.named_parameters(recurse=False)):
        shard_parameter(router, name, tp_mesh, (Replicate(),))
    shared = layer.get_part("shared")
    if shared is None:
        return
    # Every rank has its own tokens [T, D]; the tokens are all-gathered for the sharded matrices.
    tokens = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))
    plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel(output_layouts=Shard(0))}
    parallelize_module(shared, tp_mesh, tokens)
    parallelize_module(shared, tp_mesh, {**plan, "w3": ColwiseParallel()})
