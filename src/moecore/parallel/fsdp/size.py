"""`compute_rank_bytes`: one rank's bytes of parameters, gradients and buffers, from a plan."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch

from moecore.base.fields import CountOrZero, check_arguments
from moecore.parallel.fsdp.buffers import plan_buffers
from moecore.parallel.fsdp.plan import ShardPlan, UnitPlan, UnitRole


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleBytes:
    """One rank's bytes for all units with one role, such as the experts."""

    role: UnitRole
    parameters: int  # this rank's shards
    gradients: int  # this rank's shards of the gradients, in the parameters' dtype
    unsharded: int  # all parameters of the role, all-gathered or cast at the same time


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBytes:
    """One rank's bytes, without activations, optimizer states and copies inside collectives."""

    roles: tuple[RoleBytes, ...]  # by role, in the order of the units
    weights: int  # buffers of unsharded parameters, allocated in the first step
    sums: int  # shared buffers of gradient sums, allocated in the first step
    # Gradient sums of units that accumulate over micro-batches, without sums that become the
    # gradients themselves.
    accumulated: int

    @property
    def parameters(self) -> int:
        """Bytes of this rank's parameter shards."""
        return sum(role.parameters for role in self.roles)

    @property
    def gradients(self) -> int:
        """Bytes of this rank's gradient shards."""
        return sum(role.gradients for role in self.roles)


def compute_rank_bytes(plan: ShardPlan, rank: CountOrZero = 0) -> RankBytes:
    """Return the bytes of parameters, gradients and buffers of a global rank; rank 0 has the most.

    Raises:
        ValueError: if the rank is not in the plan's world.
    """
    check_arguments(compute_rank_bytes, locals())
    coordinate, params = plan.coordinate(rank), {param.name: param for param in plan.params}
    roles = []
    for role in dict.fromkeys(unit.role for unit in plan.units):
        units = [unit for unit in plan.units if unit.role == role]
        role_params = [params[name] for unit in units for name in unit.params]
        roles.append(
            RoleBytes(
                role=role,
                parameters=sum(p.num_bytes(coordinate) for p in role_params),
                gradients=sum(p.num_bytes(coordinate) for p in role_params if p.trainable),
                unsharded=sum(_count_unsharded_bytes(unit) for unit in units),
            )
        )
    trained = {param.name for param in plan.params if param.trainable}
    buffers = list(plan_buffers(plan))
    weights = sum(buffer.num_bytes for buffer in buffers if buffer.contents == "weights")
    return RankBytes(
        roles=tuple(roles),
        weights=weights,
        sums=sum(buffer.num_bytes for buffer in buffers) - weights,
        accumulated=sum(_count_sum_bytes(u, trained) for u in plan.units if u.accumulates),
    )


def _count_unsharded_bytes(unit: UnitPlan) -> int:
    """Return the bytes of a unit's buffers of unsharded parameters, with padding."""
    return sum(
        layout.unsharded_numel // layout.values_per_byte * _get_itemsize(layout.gathers)
        for layout in unit.layouts
        if layout.has_buffer
    )


def _count_sum_bytes(unit: UnitPlan, trained_names: Set[str]) -> int:
    """Return the bytes of a unit's gradient sums, without sums that become `.grad`.

    `trained_names` has the names of all trainable parameters.
    """
    return sum(
        layout.buffer_numel * _get_itemsize(layout.reduces)
        for layout in unit.layouts
        if any(slot.param in trained_names for slot in layout.slots)
        and (layout.ranks > 1 or layout.dtype != layout.reduces)
    )


def _get_itemsize(dtype_name: str) -> int:
    """Return the bytes per element of the dtype with a name such as "bfloat16"."""
    return int(getattr(torch, dtype_name).itemsize)
