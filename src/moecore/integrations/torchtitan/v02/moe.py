"""TitanMoE: a torchtitan MoE block as a MoELayer that keeps its names, shapes and checkpoints.

| torchtitan's block (0.2.x)        | here                                                   |
|-----------------------------------|--------------------------------------------------------|
| experts.w1, w2, w3                | `Experts` with gate_up="separate", same names          |
| router.gate.weight (and .bias)    | `Router`, a child of an empty module called `router`   |
| expert_bias (saved)               | the same buffer; the router chooses with it            |
| tokens_per_expert (not saved)     | `moe_state(model)` counts                              |
| shared_experts.w1, w2, w3         | the block's own module                                 |
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torchtitan.models.moe import MoE
from torchtitan.models.moe.moe import GroupedExperts, TokenChoiceTopKRouter
from torchtitan.models.utils import trunc_normal_

from moecore.families.adopt import adopt
from moecore.integrations.torchtitan.layer import TitanLayer, block_config, check_class
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.forced import force_even_load
from moecore.moe.layer import LayerLayout

BIAS = "expert_bias"
LAYOUT = LayerLayout(
    router="gate",
    shared="shared_experts",
    expert_bias=BIAS,
    expert_layout=ExpertLayout(w1="w1", w2="w2", w3="w3", gate_up="separate"),
)
EXPERTS_STD = 0.02  # torchtitan fills w1 with it whatever the layer's std


class TitanMoE(TitanLayer):
    """A TitanLayer under the names of 0.2's `MoE`; made by `titan_moe`, not by hand."""

    names = LAYOUT
    holders: ClassVar = {"router": "router"}

    @torch.no_grad()
    def init_weights(  # type: ignore[override]
        self, init_std: float, buffer_device: torch.device | None = None
    ) -> None:
        """Fill the block as torchtitan does, in its order: one seed gives both the same values.

        Args:
            init_std: standard deviation of all matrices but w1.
            buffer_device: not used; buffers follow the model.
        """
        experts, gate = self.part("experts"), self._router
        for name, std in (("w1", EXPERTS_STD), ("w2", init_std), ("w3", init_std)):
            trunc_normal_(getattr(experts, name), mean=0.0, std=std)
        trunc_normal_(gate.weight, mean=0.0, std=init_std)
        if gate.bias is not None:
            nn.init.zeros_(gate.bias)
        if self.layout.shared in self._modules:
            self.part("shared").init_weights(init_std)
        if gate.selection_bias is not None:
            nn.init.zeros_(gate.selection_bias)


def titan_moe(block: nn.Module, model: nn.Module, *, update_bias: bool = True) -> TitanMoE:
    """Return a TitanMoE that holds the parameters of a torchtitan block; an adapter.

    Args:
        block: torchtitan's `MoE`.
        model: not used; part of an adapter's signature.
        update_bias: move the selection bias by the block's `load_balance_coeff` after every step.

    Raises:
        NotImplementedError: for a block that a MoELayer cannot compute, or whose router or experts
            are of another class.
    """
    assert isinstance(block, MoE)
    check_class("router", block.router, TokenChoiceTopKRouter)
    check_class("experts", block.experts, GroupedExperts)
    if block.score_before_experts and block.router.top_k > 1:
        raise NotImplementedError(
            f"MoEArgs.score_before_experts (True) must be False with top_k ({block.router.top_k}) "
            "> 1: a token travels once, so it cannot be weighted for each expert apart"
        )
    gate = block.router.gate
    router = {"weight": gate.weight} | ({} if gate.bias is None else {"bias": gate.bias})
    config = block_config(
        block,
        block.experts.w1.shape,
        update_bias=update_bias,
        weights_on_input=block.score_before_experts,
    )
    if config.expert_bias:
        router[BIAS] = block.expert_bias
    layer = adopt(
        config,
        LAYOUT,
        router=router,
        experts=dict(block.experts.named_parameters(recurse=False)),
        shared=block.shared_experts,
        layer_class=TitanMoE,
    )
    assert isinstance(layer, TitanMoE)
    if config.expert_bias:
        layer.adopt_bias(block.expert_bias)
    if block.router._debug_force_load_balance:
        force_even_load(layer)
    return layer
