"""MoE layers one above the other, whose shapes have room for more rows than come, on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore import MoEConfig, MoELayer, NVLinkOptions
from moecore.config import CapacityConfig
from moecore.memory.options import StashOptions
from moecore.memory.stash import Stash
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.placement import ExpertPlacement
from tests.moe.emulated_exchange import EmulatedExchangePool

DIM, HIDDEN, EXPERTS, TOP_K, MAX_TOKENS = 16, 16, 4, 2, 160


class TowerBlock(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.moe = MoELayer(config)
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.moe(x))


class Tower(nn.Module):
    """MoE layers that return a loss, of inputs made from tokens."""

    def __init__(self, num_layers: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes: dict[str, Any] = dict(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS, top_k=TOP_K)
        config = MoEConfig(**(sizes | options))
        self.embedding = nn.Embedding(64, config.dim)
        self.layers = nn.ModuleList(TowerBlock(config) for _ in range(num_layers))

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        x = self.embedding(tokens_BT).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        return (x * self.embedding(labels_BT).flatten(0, 1)).sum()


def set_dispatchers(model: Tower, group: dist.ProcessGroup, how: str, **options: Any) -> None:
    """Let the layers of a tower, whose experts are this rank's, use one dispatcher."""
    place = ExpertPlacement(group=group, num_experts=EXPERTS, ep=group.size(), etp=1)
    given = NVLinkOptions(max_tokens=MAX_TOKENS, **options)
    exchanges = EmulatedExchangePool(group, ep=group.size(), options=given)
    for layer in model.layers:
        is_padded = how == "padded"
        moe = layer.moe
        moe.dispatcher = (
            AllToAllDispatcher(place) if is_padded else NVLinkDispatcher(place, exchanges)
        )


def make_tower(
    num_layers: int, how: str = "nvlink", sizes: dict[str, Any] | None = None, **options: Any
) -> Tower:
    """Return one on the default group; "padded" has room for all rows of a capacity.

    Args:
        num_layers: of MoE.
        how: "nvlink", emulated, or "padded" all-to-all.
        sizes: fields of the layers' config.
        options: of the nvlink dispatcher.
    """
    capacity = {"capacity": CapacityConfig(factor=8.0, pad=True)} if how == "padded" else {}
    model = Tower(num_layers, **capacity, **(sizes or {}))
    group = dist.group.WORLD
    assert group is not None
    set_dispatchers(model, group, how, **options)
    return model


def part_of(module: nn.Module) -> str | None:
    return "moe" if isinstance(module, MoELayer) else None


def stashed(model: Tower, **options: Any) -> Stash:
    """Return what keeps a tower's rows in small pages."""
    options = dict(page_rows=4, factor=3.0) | options
    stash = Stash(torch.device("cpu"), StashOptions(**options), len(model.layers))
    stash.attach(list(model.layers), part_of)
    return stash
