"""Attached: what `parallelize_moe` leaves on a model, in one record, and how it is found again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from moecore.moe.dispatch.exchange_pool import ExchangePool
from moecore.moe.layer import RoutedLayer
from moecore.moe.shortage import Capacity, Holder
from moecore.moe.state import MoEState
from moecore.parallel.request import Request

if TYPE_CHECKING:
    from moecore.parallel.across import AllStages
    from moecore.parallel.pipeline.layout import PipelineLayout, Stage
    from moecore.parallel.pipeline.run import Pipeline, StageOffload
    from moecore.parallel.shard.engine import Engine
    from moecore.parallel.shard.plan import ShardPlan

ATTACHED = "_moecore_attached"  # attribute of a parallelized model


@dataclass(kw_only=True, slots=True)
class Attached:
    """What is known of a parallelized model; each phase of `parallelize_moe` adds to it.

    Attributes:
        layers: their MoE layers by name.
        dtype: of the model's first parameter, before it was sharded.
        layout: its pipeline stages; None = it is whole.
        exchanges: of dispatcher "nvlink"; None with any other.
        shared_by: who shares a micro-batch, for each cp of dynamic ones.
        engine: when units are gathered and reduced; None = something else shards.
        compiled: modules inside of what torch.compile runs.
        offload: of activations; None = they stay.
        stash: pages for rows; None = none.
        state: the balance record, from the phase that makes it.
        capacity: of exchanges and stash, likewise.
        pipeline: the place among stages; None = it is whole.
        all_stages: what the stages hold; None = it is whole.
    """

    request: Request
    plan: ShardPlan
    layers: Mapping[str, RoutedLayer]
    dtype: torch.dtype
    layout: PipelineLayout | None
    stages: Sequence[Stage]
    exchanges: ExchangePool | None = None
    shared_by: dict[int, dist.ProcessGroup] = field(default_factory=dict)
    engine: Engine | None = None
    compiled: set[nn.Module] = field(default_factory=set)
    offload: StageOffload | None = None
    stash: Holder | None = None
    state: MoEState | None = None
    capacity: Capacity | None = None
    pipeline: Pipeline | None = None
    all_stages: AllStages | None = None

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks of the plan."""
        return [model.get_submodule(name) for name in self.plan.blocks]


def attached(model: nn.Module) -> Attached | None:
    """Return the record of a model, or of the one in peft's wrapper; None = it has none."""
    found: Attached | None = getattr(model, ATTACHED, None)
    return found


def attached_in(model: nn.Module) -> list[Attached]:
    """Return the records of the parallelized models that a model is or holds."""
    own = attached(model)
    if own is not None:  # as is common; then nothing in it has been parallelized
        return [own]
    found = (attached(module) for module in model.modules())
    return [record for record in found if record is not None]


def request_of(model: nn.Module) -> Request | None:
    """Return what `parallelize_moe` was asked for; None = the model has not been parallelized."""
    found = attached(model)
    return None if found is None else found.request


def engines_of(model: nn.Module) -> list[Engine]:
    """Return the engines of the parallelized models that a model is or holds."""
    return [found.engine for found in attached_in(model) if found.engine is not None]


def moe_state(model: nn.Module) -> MoEState:
    """Return the balance record that a parallelized model owns.

    Raises:
        ValueError: when the model has not been parallelized.
    """
    found = attached(model)
    if found is None or found.state is None:
        raise ValueError(
            f"model ({type(model).__name__}) must be parallelized to have a balance record: "
            "call parallelize_moe(model, meshes) first"
        )
    return found.state


def capacity_of(model: nn.Module) -> Capacity:
    """Return the holders of rows of a parallelized model, and what their shortage is."""
    found = attached(model)
    assert found is not None and found.capacity is not None, "its balance record was found"
    return found.capacity
