"""ShardPlan -> bytes on one rank: what it stores, and what is whole for a while."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from moecore._fields import CountOrZero, check_arguments
from moecore.shard.plan import ParamPlan, ShardPlan, UnitPlan, UnitRole


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleBytes:
    """Bytes of the units of one role on one rank.

    Attributes:
        role: of the units.
        num_units: how many.
        parameters: this rank's parts, as they are stored.
        gradients: this rank's parts of the gradients, in the parameters' dtype.
        gathered: all of them all-gathered at once; of experts that are whole, their casts.
    """

    role: UnitRole
    num_units: int
    parameters: int
    gradients: int
    gathered: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBytes:
    """Bytes on one rank. Activations, optimizers and copies inside of collectives do not count.

    Attributes:
        roles: by role, in the order of the units.
        resident: gathered parameters that stay from forward to backward.
        most_gathered: most gathered parameters at once: resident ones, those in use, and those that
            are gathered ahead.
        most_unreduced: the largest unit's whole gradients, in the dtype in which they are reduced.
    """

    roles: tuple[RoleBytes, ...]
    resident: int
    most_gathered: int
    most_unreduced: int

    @property
    def parameters(self) -> int:
        """Bytes of all stored parameters."""
        return sum(role.parameters for role in self.roles)

    @property
    def gradients(self) -> int:
        """Bytes of all reduced gradients."""
        return sum(role.gradients for role in self.roles)


def rank_bytes(plan: ShardPlan, rank: CountOrZero = 0) -> RankBytes:
    """Return the bytes on one rank; the first rank's parts are the largest.

    Args:
        plan: of the model.
        rank: of the world.

    Raises:
        ValueError: for a rank that the world does not have.
    """
    check_arguments(rank_bytes, locals())
    coordinate, params = plan.coordinate(rank), {param.name: param for param in plan.params}
    own = {unit.name: [params[name] for name in unit.params] for unit in plan.units}
    gathered = {unit.name: _gathered(unit) for unit in plan.units}
    resident = {unit.name for unit in plan.units if unit.stays_unsharded}
    roles = []
    for role in dict.fromkeys(unit.role for unit in plan.units):
        units = [unit for unit in plan.units if unit.role == role]
        held = [param for unit in units for param in own[unit.name]]
        roles.append(
            RoleBytes(
                role=role,
                num_units=len(units),
                parameters=sum(p.num_bytes(coordinate) for p in held),
                gradients=sum(p.num_bytes(coordinate) for p in held if p.trainable),
                gathered=sum(gathered[unit.name] for unit in units),
            )
        )
    at_once = (resident | set(_in_use(plan, unit)) for unit in plan.units)
    return RankBytes(
        roles=tuple(roles),
        resident=sum(gathered[name] for name in resident),
        most_gathered=max(sum(gathered[name] for name in names) for names in at_once),
        most_unreduced=max(_unreduced(unit, own[unit.name]) for unit in plan.units),
    )


def _gathered(unit: UnitPlan) -> int:
    """Return the bytes of a unit's unsharded parameters, padding included."""
    total = 0
    for layout in unit.layouts:
        stored = getattr(torch, layout.dtype)
        dtype = getattr(torch, unit.gather_dtype or layout.dtype)
        dtype = dtype if stored.is_floating_point else stored
        if not unit.whole or dtype != stored:  # whole ones are computed with as they are
            total += layout.whole_numel * dtype.itemsize
    return int(total)


def _unreduced(unit: UnitPlan, params: Iterable[ParamPlan]) -> int:
    itemsize = getattr(torch, unit.reduce_dtype).itemsize
    trained = (p for p in params if p.trainable and not unit.whole)
    return int(sum(math.prod(p.computed_shape()) for p in trained) * itemsize)


def _in_use(plan: ShardPlan, unit: UnitPlan) -> Iterable[str]:
    """Return the units that are gathered while one computes: also those around it, and ahead."""
    first = unit.modules[0]
    yield unit.name
    yield from unit.forward_prefetch
    for other in plan.units:
        if any(first.startswith(f"{module}.") for module in other.modules):
            yield other.name
