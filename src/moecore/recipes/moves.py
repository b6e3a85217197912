"""Moves of experts between ranks during a run, by the loads of all steps since the last move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moecore.base.torch_private import foreach_add_
from moecore.train import move_experts

KEY = "loads_since_move/"  # in front of a layer's name, in a checkpoint


class ExpertMoves:
    """Moves experts after every `every` steps; 0 = never. All ranks have the same loads.

    Attributes:
        orders: layer name -> the expert in each slot; without an entry, the model's order.
    """

    def __init__(self, every: int, device: torch.device) -> None:
        self._every, self._device = every, device
        self._loads: dict[str, Tensor] = {}  # layer name -> int64 [E], tokens since the last move
        self.orders: dict[str, list[int]] = {}

    def end_step(self, step: int, job: Any, loads: Mapping[str, Tensor]) -> None:
        """Add a step's tokens per expert; after the last step of an interval, move experts."""
        if not self._every:
            return
        if self._loads:
            foreach_add_([*self._loads.values()], [loads[name] for name in self._loads])
        else:
            self._loads = {name: loads_E.clone() for name, loads_E in loads.items()}
        if step % self._every == 0:
            orders = move_experts(job.model, job.optimizers, self._loads)
            self.orders = {name: order_E.tolist() for name, order_E in orders.items()}
            self._loads = {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the loads since the last move, for a checkpoint."""
        return {KEY + name: loads_E.clone() for name, loads_E in self._loads.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the loads of a `state_dict`, if any, from the extra values of a checkpoint."""
        if self._every:
            names = [name for name in state if name.startswith(KEY)]
            self._loads = {x.removeprefix(KEY): state[x].to(self._device) for x in names}
