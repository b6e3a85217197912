"""MoE layers one above the other, whose shapes have room for more rows than come, on a CPU."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore import MoEConfig, MoELayer, NVLinkOptions
from moecore.base.options.layer import CapacityConfig
from moecore.base.options.memory import StashOptions
from moecore.kernels.rows.index import build_index
from moecore.kernels.rows.record import Rows
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.placement import ExpertPlacement
from moecore.moe.records import BalancedRows, ExpertInput, Routing
from moecore.train.memory.stash import Stash
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


class RoomyDispatcher:
    """All experts are here, and there is room for several times the tokens, with holes of NaN.

    Nothing waits for the device, so that a CUDA graph may hold it on any GPU.
    """

    waits_on_host = False
    pairs = None
    room: float = 3  # times the tokens, at least 1
    num_experts = EXPERTS

    def has_spare_rows(self, *, pads: bool) -> bool:
        return True

    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertInput:
        (T, D), K = x_TD.shape, routing.weights_TK.shape[1]
        S = math.ceil(self.room * T)
        place_T = ((2 * torch.arange(T, device=x_TD.device) + 1) * self.room / 2).long()
        rows_SD = x_TD.new_full((S, D), torch.nan).index_copy(0, place_T, x_TD)
        ids_SK = routing.expert_ids_TK.new_full((S, K), -1)
        ids_SK = ids_SK.index_copy(0, place_T, routing.expert_ids_TK)
        weights_SK = routing.weights_TK.new_zeros(S, K).index_copy(0, place_T, routing.weights_TK)
        owned = dict(first_expert=0, num_local_experts=self.num_experts)
        index = build_index(ids_SK, weights_SK, **owned, max_pairs=S * K)
        return ExpertInput(Rows(rows_SD), index, place_T, balanced=BalancedRows(T, T * K))

    def combine(self, y_SD: Any, plan: Any) -> Tensor:
        return y_SD.index_select(0, plan)


def set_dispatchers(model, group, how, *, fp8=False, **options) -> None:
    """Let the layers of a tower, whose experts are this rank's, use one dispatcher."""
    place = ExpertPlacement(group=group, num_experts=EXPERTS, ep=group.size(), etp=1)
    given = NVLinkOptions(**dict(max_tokens=MAX_TOKENS, row_factor=None) | options)
    exchanges = EmulatedExchangePool(group, ep=group.size(), options=given, fp8=fp8)
    exchanges.watch = "skips"
    for layer in model.layers:
        is_padded, moe = how == "padded", layer.moe
        moe.dispatcher = (
            AllToAllDispatcher(place, fp8=fp8) if is_padded else NVLinkDispatcher(place, exchanges)
        )


def make_tower(num_layers, how="nvlink", sizes=None, **options) -> Tower:
    """Return one on the default group; "padded" has room for all rows of a capacity.

    Args:
        num_layers: of MoE.
        how: "nvlink", emulated, "padded" all-to-all, or "roomy", without a group.
        sizes: fields of the layers' config.
        options: of the nvlink dispatcher.
    """
    capacity = {"capacity": CapacityConfig(factor=8.0, pad=True)} if how == "padded" else {}
    model = Tower(num_layers, **capacity, **(sizes or {}))
    if how == "roomy":
        for layer in model.layers:
            layer.moe.dispatcher = RoomyDispatcher()
        return model
    group = dist.group.WORLD
    assert group is not None
    set_dispatchers(model, group, how, **options)
    return model


def part_of(module: nn.Module) -> str | None:
    return "moe" if isinstance(module, MoELayer) else None


def stashed(model: Tower, **options: Any) -> Stash:
    """Return what keeps a tower's rows in small pages."""
    options = dict(page_rows=4, factor=3.0) | options
    device = next(model.parameters()).device
    stash = Stash(device, StashOptions(**options), len(model.layers))
    stash.attach(list(model.layers), part_of)
    return stash
