"""TitanMoE: an MoE block of torchtitan 0.3 as a MoELayer that keeps names, shapes and checkpoints.

| torchtitan's block (0.3)                              | here                              |
|-------------------------------------------------------|-----------------------------------|
| routed_experts.inner_experts.w1_EFD, w2_EDF, w3_EFD   | `Experts` with gate_up="separate" |
| routed_experts.token_dispatcher (no tensors)          | the dispatcher of the job         |
| router.gate.weight (and .bias)                        | `Router`                          |
| expert_bias_E (saved)                                 | the router chooses with it        |
| tokens_per_expert_E (not saved)                       | `moe_state(model)` counts         |
| shared_experts.w1, w2, w3                             | the block's own module            |

Legend: B sequences, t tokens of a sequence on this rank, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.moe import GroupedExperts, MoE, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
from torchtitan.protocols.module import Module

from moecore.families.adopt import adopt
from moecore.integrations.torchtitan.layer import (
    TitanLayer,
    block_config,
    check_class,
    cut_dense_parts,
)
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.forced import force_even_load
from moecore.moe.layer import LayerLayout

BIAS = "expert_bias_E"
Fill = Callable[[Tensor], Any]


class TitanMoE(TitanLayer, Module):
    """A TitanLayer under the names of 0.3's `MoE`; made by `titan_moe`, not by hand.

    Attributes:
        fills: (parameter, how torchtitan fills it), in its order.
    """

    names = LayerLayout(
        router="gate",
        experts="inner_experts",
        shared="shared_experts",
        expert_bias=BIAS,
        expert_layout=ExpertLayout(w1="w1_EFD", w2="w2_EDF", w3="w3_EFD", gate_up="separate"),
    )
    holders: ClassVar = {"router": "router", "experts": "routed_experts"}
    fills: dict[str, dict[str, Fill]]

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Take part in torchtitan's tensor parallelism: see `cut_dense_parts`.

        Args:
            parallel_dims: with tp > 1.
        """
        cut_dense_parts(self, parallel_dims.get_mesh("tp"))

    def forward(  # type: ignore[override]  # a forward of torchtitan has no cp of its own
        self, x: Tensor, padding_mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Return the block's output, cut like its input.

        Args:
            x: [B, t, D]; under tp a DTensor cut along the sequence.
            padding_mask: not used by torchtitan, like the next one; see `MoELayer.forward`.
        """
        y_BtD = super().forward(x, padding_mask, cu_seqlens)
        if not isinstance(x, DTensor):
            return y_BtD
        return DTensor.from_local(y_BtD, x.device_mesh, x.placements, run_check=False)

    @torch.no_grad()
    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Fill the block as torchtitan does, in its order: one seed gives both the same values.

        Args:
            buffer_device: not used; buffers follow the model.
        """
        for role, fills in self.fills.items():
            for name, fill in fills.items():
                fill(getattr(self.part(role), name))
        if self.layout.shared in self._modules:
            self.part("shared").init_states(buffer_device=buffer_device)
        if self._router.selection_bias is not None:
            nn.init.zeros_(self._router.selection_bias)


def titan_moe(block: nn.Module, model: nn.Module, *, update_bias: bool = True) -> TitanMoE:
    """Return a TitanMoE that holds the parameters of a torchtitan block; an adapter.

    Args:
        block: torchtitan's `MoE`.
        model: not used; part of an adapter's signature.
        update_bias: move the selection bias by the block's `load_balance_coeff` after every step.

    Raises:
        NotImplementedError: for experts, a router or a dispatcher of another class: what that class
            is there for (quantization, DeepEP) would be lost.
    """
    assert isinstance(block, MoE)
    inner, router = block.routed_experts.inner_experts, block.router
    check_class("inner_experts", inner, GroupedExperts)
    check_class("router", router, TokenChoiceTopKRouter)
    dispatcher = block.routed_experts.token_dispatcher
    check_class("token_dispatcher", dispatcher, AllToAllTokenDispatcher, LocalTokenDispatcher)
    parts = {"experts": inner, "router": router.gate}
    tensors = {role: dict(part.named_parameters(recurse=False)) for role, part in parts.items()}
    fills = {
        role: {name: part._param_init[name] for name in tensors[role]}
        for role, part in parts.items()
    }
    config = block_config(block, inner.w1_EFD.shape, update_bias=update_bias)
    if config.expert_bias:
        tensors["router"][BIAS] = block.expert_bias_E
    layer = cast(
        TitanMoE,
        adopt(
            config,
            TitanMoE.names,
            router=tensors["router"],
            experts=tensors["experts"],
            shared=block.shared_experts,
            layer_class=TitanMoE,
        ),
    )
    layer.fills = fills
    if config.expert_bias:
        layer.adopt_bias(block.expert_bias_E)
    if block.router._debug_force_load_balance:
        force_even_load(layer)
    return layer
