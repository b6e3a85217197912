"""RoutedExperts(x_TD, ids_TK, weights_TK) -> y_TD: experts for a model that has its own router.

`RoutedExperts` replaces a model's experts module. The model's block, router and shared experts do
not change, and parameters keep their names. moecore counts loads. The model computes its balance
loss.

Legend: T local tokens, D model dim, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from moecore.base.fields import Device, FloatDtype, check_arguments
from moecore.base.options.layer import MoEConfig
from moecore.moe.balance import LoadTracker
from moecore.moe.dispatch.local import LocalDispatcher
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.experts import Experts, OwnActivation
from moecore.moe.layer import RoutedLayer, cast_to_autocast
from moecore.moe.micro_batch import MicroBatch
from moecore.moe.records import Routing


class RoutedExperts(RoutedLayer, Experts):
    """The routed experts of a model that has its own router. Arguments are as in `Experts`."""

    def __init__(
        self,
        config: MoEConfig,
        *,
        layout: ExpertLayout | None = None,
        own_activation: OwnActivation | None = None,
        device: Device | None = None,
        dtype: FloatDtype | None = None,
    ) -> None:
        check_arguments(RoutedExperts.__init__, locals())
        Experts.__init__(
            self, config, layout=layout, own_activation=own_activation, device=device, dtype=dtype
        )
        self.dispatcher = LocalDispatcher(config.num_experts)
        self.tracker = LoadTracker(config)

    def get_part_name(self, role: str) -> str:
        """Return "": this module is the experts."""
        return ""

    def get_part(self, role: str) -> Any:
        """Return this module for "experts", and None for any other role."""
        return self if role == "experts" else None

    def check_config(self, layer_name: str, config: MoEConfig) -> None:
        """Raise ValueError if a field of the config differs: this layer has no moecore router."""
        for field in fields(config):
            value = getattr(config, field.name)
            if value != getattr(self.config, field.name):
                raise ValueError(
                    f"{field.name} ({value}) must be left out for {layer_name}, whose router is "
                    "the model's own: use what the model has, such as "
                    "config.output_router_logits=True"
                )

    def run_on_zero_tokens(self, x_0D: Tensor) -> Tensor:
        """Return the output [0, D] for zero tokens, without this module's hooks."""
        choices_0K = x_0D.new_zeros(0, self.config.top_k, requires_grad=x_0D.requires_grad)
        return self.forward(x_0D, choices_0K.detach().int(), choices_0K)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """Return the weighted sum over each token's experts. Arguments have transformers' names.

        Args:
            hidden_states: [T, D].
            top_k_index: integer [T, K]. An id from E on is one of the config's `zero_experts`; any
                other id outside of [0, E) is ignored.
            top_k_weights: float [T, K]; differentiable.

        Returns:
            [T, D] in the dtype of `hidden_states`; summed in fp32 and rounded once.
        """
        x_TD = hidden_states
        is_expert_TK = (top_k_index >= 0) & (top_k_index < self.config.num_candidates)
        ids_TK = top_k_index.where(is_expert_TK, -1).to(torch.int32)
        routing = Routing(
            expert_ids_TK=ids_TK, weights_TK=top_k_weights.float(), chosen_ids_TK=ids_TK
        )
        y_TD = self._run_routed_experts(cast_to_autocast(x_TD), routing).to(x_TD.dtype)
        micro_batch = MicroBatch(group=self.tracker.groups.micro_batch)
        return self._track_load(y_TD, routing, micro_batch, None)
