"""Moves of experts between ranks during a run, by the loads of all steps since the last move."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.torch_private import foreach_add_
from moecore.parallel.mesh import read_launcher_number
from moecore.planning.costs import CostTable
from moecore.planning.gpus import GPUS, find_gpu_name
from moecore.planning.record import Work
from moecore.recipes.metrics import Moment, compute_rank_imbalance
from moecore.train.expert_moves import OrdersByName, count_moved_bytes, move_experts

KEY = "loads_since_move/"  # in front of a layer's name, in a checkpoint


class ExpertMoves:
    """Moves experts after every `every` steps; 0 = never. All ranks have the same loads.

    Attributes:
        orders: layer name -> int64 [E], the expert in each slot; without an entry, the model's
            order.
    """

    def __init__(self, every: int, device: torch.device) -> None:
        self._every, self._device = every, device
        self._loads: dict[str, Tensor] = {}  # layer name -> int64 [E], tokens since the last move
        self.orders: OrdersByName = {}

    def end_step(self, step: int, job: Any, loads: Mapping[str, Tensor]) -> list[str]:
        """Add a step's tokens per expert; after the last step of an interval, move experts.

        Returns the lines of text that report a move.
        """
        if not self._every:
            return []
        if self._loads:
            foreach_add_([*self._loads.values()], [loads[name] for name in self._loads])
        else:
            self._loads = {name: loads_E.clone() for name, loads_E in loads.items()}
        return [] if step % self._every else self._move(step, job)

    def _move(self, step: int, job: Any) -> list[str]:
        """Move experts; return a line with the cost. Collective. Synchronizes the device."""
        loads, before, began = self._loads, self.orders, Moment(self._device)
        self.orders, self._loads = move_experts(job.model, job.optimizers, loads), {}
        ended = Moment(self._device)
        ended.wait_for_gpu()
        num_bytes = count_moved_bytes(job.model, job.optimizers, before, self.orders)
        costs = torch.tensor(
            [num_bytes, began.seconds_until(ended)], dtype=torch.float64, device=self._device
        )
        dist.all_reduce(costs, op=dist.ReduceOp.MAX)
        num_bytes, seconds = int(costs[0]), float(costs[1])
        if not num_bytes:
            return []
        ep, layers = job.meshes.parallel.ep, self.orders.items()
        # Entries after those of an order count zero experts.
        loads_of = {name: loads[name][: len(order_E)].tolist() for name, order_E in layers}
        load_before, load_after = (
            fmean(compute_rank_imbalance(x, ep, orders.get(name)) for name, x in loads_of.items())
            for orders in (before, self.orders)
        )
        planned_s = plan_move_seconds(num_bytes, ep, self._device)
        plan_text = "unknown link" if planned_s is None else f"planned {planned_s:.3g} s"
        return [
            f"experts moved after step {step}: load of the busiest rank / mean "
            f"{load_before:.2f} -> {load_after:.2f}, {num_bytes / 2**20:,.3g} MiB to a rank in "
            f"{seconds:.3g} s ({plan_text})"
        ]

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the loads since the last move, for a checkpoint."""
        return {KEY + name: loads_E.clone() for name, loads_E in self._loads.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the loads of a `state_dict`, if any, from the extra values of a checkpoint."""
        if self._every:
            names = [name for name in state if name.startswith(KEY)]
            self._loads = {x.removeprefix(KEY): state[x].to(self._device) for x in names}


def plan_move_seconds(num_bytes: int, ep: int, device: torch.device) -> float | None:
    """Return the planned seconds of a move that sends `num_bytes` to and from each of `ep` ranks.

    Bytes are divided by the measured rate of an all-to-all. None = the GPU is not known.
    """
    gpu = find_gpu_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if gpu is None:
        return None
    domain_ranks = min(ep, read_launcher_number("LOCAL_WORLD_SIZE", ep), GPUS[gpu].domain)
    work = Work("all_to_all", "collective", 0, 2 * num_bytes, (ep,), "bfloat16")
    return CostTable.of(gpu).seconds(work, domain_ranks)
