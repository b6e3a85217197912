"""`compute_rank_bytes`: one rank's bytes of parameters, gradients and buffers, from a plan."""

from dataclasses import dataclass

import torch

from moecore.base.fields import CountOrZero, check_arguments
from moecore.parallel.fsdp.buffers import plan_buffers
from moecore.parallel.fsdp.plan import ShardPlan, UnitRole


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleBytes:
    """Bytes on one rank of all units (parameter groups) with one role, such as the experts."""

    role: UnitRole
    parameters: int  # this rank's shards on the device
    gradients: int  # this rank's shards of the gradients, in the parameters' dtype
    unsharded: int  # all parameters of the role, all-gathered or cast at the same time


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBytes:
    """Bytes of parameters, gradients and buffers on one rank.

    Activations, optimizer states and copies inside collectives are not included.
    """

    roles: tuple[RoleBytes, ...]  # by role, in the order of the units
    weights: int  # buffers of unsharded parameters, allocated in the first step
    sums: int  # shared buffers of gradient sums, allocated in the first step
    # Gradient sums of units that accumulate over micro-batches, without sums that become the
    # gradients themselves.
    accumulated: int
    host: int = 0  # parameters in host memory

    @property
    def parameters(self) -> int:
        """Bytes of this rank's parameter shards."""
        return sum(role.parameters for role in self.roles)

    @property
    def gradients(self) -> int:
        """Bytes of this rank's gradient shards."""
        return sum(role.gradients for role in self.roles)


def compute_rank_bytes(plan: ShardPlan, rank: CountOrZero = 0) -> RankBytes:
    """Return the bytes of parameters, gradients and buffers of a global rank; maximal at rank 0.

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
                parameters=sum(p.num_bytes(coordinate) for p in role_params if not p.on_host),
                gradients=sum(p.num_bytes(coordinate) for p in role_params if p.trainable),
                unsharded=sum(
                    layout.unsharded_numel // layout.values_per_byte * _get_itemsize(layout.gathers)
                    for unit in units
                    for layout in unit.layouts
                    if layout.has_buffer
                ),
            )
        )
    trained = {param.name for param in plan.params if param.trainable}
    buffers = list(plan_buffers(plan))
    weights = sum(buffer.num_bytes for buffer in buffers if buffer.contents == "weights")
    return RankBytes(
        roles=tuple(roles),
        weights=weights,
        sums=sum(buffer.num_bytes for buffer in buffers) - weights,
        accumulated=sum(
            layout.buffer_numel * _get_itemsize(layout.reduces)
            for unit in plan.units
            if unit.accumulates
            for layout in unit.layouts
            if any(slot.param in trained for slot in layout.slots)
            and (layout.dtype != layout.reduces if layout.ranks == 1 else not plan.nccl_ub)
        ),
        host=sum(param.num_bytes(coordinate) for param in plan.params if param.on_host),
    )


def _get_itemsize(dtype_name: str) -> int:
    return int(getattr(torch, dtype_name).itemsize)
