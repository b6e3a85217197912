"""TitanLayer: a MoELayer under the names of a torchtitan MoE block, for any version of torchtitan.

Legend: B sequences, t tokens of a sequence on this rank, D model dim, E experts.

torchtitan keeps some parts one module deeper (`router.gate`) and saves the selection bias as a
buffer of the block. Here those modules stand empty around moecore's parts, and the router chooses
with the block's own buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

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
from moecore.moe.layer import LayerLayout, MoELayer, RoutedLayer
from moecore.moe.params import shard_parameter
from moecore.moe.router import Router


class TitanLayer(MoELayer):
    """A MoELayer under torchtitan's names; a version's subclass has them, and fills it.

    Args:
        layout: `names`.
        device: "meta", because `adopt` fills it.

    Attributes:
        names: the layout, with the innermost name of each part.
        holders: role of a part -> name of the module around it.
    """

    names: ClassVar[LayerLayout]
    holders: ClassVar[Mapping[str, str]]

    def __init__(
        self,
        config: MoEConfig,
        *,
        layout: LayerLayout | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, layout=layout or self.names, device=device, dtype=dtype)
        for role, holder in self.holders.items():
            name = getattr(self.layout, role)
            part = self._modules.pop(name)
            self.add_module(holder, nn.Module())
            self.get_submodule(holder).add_module(name, part)
            deeper: dict[str, Any] = {role: f"{holder}.{name}"}
            self.layout = replace(self.layout, **deeper)

    def adopt_bias(self, bias_E: Tensor) -> None:
        """Save the selection bias as this layer's own buffer, as torchtitan's checkpoints have it.

        The router holds the same tensor, which it does not save.
        """
        self.register_buffer(self._bias, bias_E.float())
        self._router.register_buffer(self._bias, self._buffers[self._bias], persistent=False)

    @property
    def _router(self) -> Router:
        return self.part("router")

    @property
    def _bias(self) -> str:
        return self.layout.expert_bias

    def _apply(self, fn: Any, recurse: bool = True) -> TitanLayer:
        """Move like any module; the bias stays fp32 and one tensor."""
        super()._apply(fn, recurse)
        if self._bias in self._buffers:
            self._buffers[self._bias] = self._router._buffers[self._bias]
        return self

    def forward(  # type: ignore[override]  # a forward of torchtitan has no cp of its own
        self, x: Tensor, padding_mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Return the block's output for this rank's tokens.

        Args:
            x: [B, t, D]; under tp a DTensor cut along the sequence.
            padding_mask: not used by torchtitan, like the next one; see `MoELayer.forward`.

        Returns:
            [B, t, D], a plain tensor.
        """
        x_BtD = x.to_local() if isinstance(x, DTensor) else x
        return super().forward(x_BtD, padding_mask)


def cut_dense_parts(layer: RoutedLayer, tp_mesh: DeviceMesh) -> None:
    """Keep the router whole on every tp rank and cut the shared experts. No communication.

    Args:
        layer: on meta; its routed experts are left alone.
    """
    router = layer.part("router")
    for name in dict(router.named_parameters(recurse=False)):
        shard_parameter(router, name, tp_mesh, (Replicate(),))
    shared = layer.part("shared")
    if shared is None:
        return
    # Every rank brings its own tokens [T, D]; all ranks' tokens meet at the cut matrices.
    tokens = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))
    plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel(output_layouts=Shard(0))}
    parallelize_module(shared, tp_mesh, tokens)
    parallelize_module(shared, tp_mesh, {**plan, "w3": ColwiseParallel()})


def check_class(name: str, part: Any, *known: type) -> None:
    """Raise NotImplementedError for a part of an MoE block that computes something of its own."""
    if type(part) not in known:
        raise NotImplementedError(
            f"MoE {name} ({type(part).__name__}) must be {known[0].__name__} for a moecore model: "
            "drop the subclass, converter or comm backend that replaced it"
        )


def block_config(
    block: Any, shape: torch.Size, *, update_bias: bool, weights_on_input: bool = False
) -> MoEConfig:
    """Return the config of a torchtitan MoE block.

    Args:
        block: torchtitan's `MoE`, of any version.
        shape: of its w1.
        update_bias: move the selection bias by the block's `load_balance_coeff` after every step.
        weights_on_input: whether the block weights tokens before its experts.
    """
    (num_experts, hidden_dim, dim), router = shape, block.router
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
