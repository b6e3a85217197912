"""MoELayer: route -> dispatch -> experts -> combine. The only file that knows all four.

Legend: T local tokens, D model dim, S source rows held after dispatch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from moecore.config import BalanceConfig, MoEConfig
from moecore.moe.balance import LoadTracker
from moecore.moe.dispatch.base import Dispatcher
from moecore.moe.dispatch.local import LocalDispatcher
from moecore.moe.experts import ExpertLayout, Experts
from moecore.moe.router import Router
from moecore.moe.shared import SharedExpert


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLayout:
    """Names under which a model keeps the parts of its MoE block; the default is moecore's own.

    Attributes:
        router, experts, shared: child module names.
        expert_bias: name of the router's selection bias buffer.
        expert_layout: names and order inside the experts module.
    """

    router: str = "router"
    experts: str = "experts"
    shared: str = "shared"
    expert_bias: str = "expert_bias"
    expert_layout: ExpertLayout = field(default_factory=ExpertLayout)


class MoELayer(nn.Module):
    """A Mixture-of-Experts layer; a plain module in one process, CPU or GPU.

    `parallelize_moe` gives it another dispatcher and shards its experts; its forward stays.

    Args:
        config: the layer.
        layout: names of its parts.
        device: device of the parameters; "meta" allocates nothing.
        dtype: dtype of the parameters.

    Source: the routing weight applied before FC2 is Megatron-Core's memory-efficient permutation
    (arXiv:2603.07685).
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        layout: LayerLayout | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.layout = layout or LayerLayout()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        names = self.layout
        router = Router(config, expert_bias_name=names.expert_bias, **where)
        experts = Experts(config, layout=names.expert_layout, **where)
        self.add_module(names.router, router)
        self.add_module(names.experts, experts)
        if config.shared_hidden_dim:
            self.add_module(names.shared, SharedExpert(config, **where))
        self.dispatcher: Dispatcher = LocalDispatcher(config.num_experts)
        self.tracker = LoadTracker(config)
        if not router.weight.is_meta:
            self.init_weights(key="", seed=int(torch.randint(1 << 62, ())))  # torch.manual_seed's

    def init_weights(self, *, key: str, std: float = 0.02, seed: int = 0) -> None:
        """Fill all parameters, the same on every layout. No communication.

        Args:
            key: name of this layer in its model; two layers with one key get the same weights.
            std: standard deviation of the matrices; biases become 0.
            seed: seed of the model.

        Raises:
            ValueError: when an adopted child (a model's own shared expert) cannot be filled.
        """
        for name, child in self.named_children():
            if not isinstance(child, Router | Experts | SharedExpert):
                raise ValueError(
                    f"{name} ({type(child).__name__}) must be filled by its own model: call its "
                    "initialiser, and init_weights of this layer's router and experts"
                )
            child.init_weights(std=std, key=f"{key}.{name}", seed=seed)

    def set_balance(self, balance: BalanceConfig) -> None:
        """Replace the balance config of this layer."""
        self.config = replace(self.config, balance=balance)
        for owner in (self.tracker, self.part("router"), self.part("experts")):
            owner.config = self.config

    def part(self, role: str) -> Any:
        """Return the child that plays "router", "experts" or "shared", whatever its name."""
        return self.get_submodule(getattr(self.layout, role))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for any number of tokens, zero included.

        Args:
            x: [T, D] or [B, T, D]. Under tp, this rank's slice of each sequence.

        Returns:
            Same shape and dtype. Auxiliary losses ride on it: they change no value, and reach the
            gradient in backward.
        """
        x_TD = x.reshape(-1, x.shape[-1])
        routing = self.part("router")(x_TD)
        expert_input = self.dispatcher.dispatch(_autocast(x_TD), routing)
        y_SD = self.part("experts")(expert_input)
        y_TD = self.dispatcher.combine(y_SD, expert_input.plan)
        if self.layout.shared in self._modules:
            y_TD = y_TD + self.part("shared")(x_TD)
        y = y_TD.to(x.dtype).view(x.shape)
        if not self.training:
            return y
        return self.tracker.attach(y, routing, x.shape[0] if x.ndim == 3 else 1)


def _autocast(x: Tensor) -> Tensor:
    """The dtype in which rows travel and are multiplied; the router reads x as it came."""
    if torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x
