"""Runs a schedule on one rank: forwards and backwards of its stages, and what travels between.

    F   receive hidden states -> forward of the stage -> send its output; keep input and graph
    B   receive the gradient of that output -> backward -> send the gradient of the input
    D   the same, but products that weight gradients are made of are kept
    W   these products

What is kept of a forward is its input and the edge of its graph: the output itself is freed when it
has left. A loss is divided as `TrainStep` says before its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moecore._torch import mark
from moecore.pipeline.config import PipelineConfig
from moecore.pipeline.layout import PipelineLayout, Stage
from moecore.pipeline.orders import Action, actions_of
from moecore.pipeline.schedule import Schedule, make_schedule
from moecore.pipeline.stages import hidden_shape, run_stage
from moecore.pipeline.timeline import mark_name
from moecore.pipeline.transport import Groups, Transport
from moecore.shard.engine import engines_of
from moecore.shard.weight_gradients import WeightGradients

PIPELINE_NAME = "_moecore_pipeline"  # attribute of a model that is cut into stages
Inputs = Mapping[str, Any]  # keyword arguments of the model


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """The place of a model among the stages of a pipeline.

    Attributes:
        config: as given.
        layout: of the whole model.
        rank: of this part of it, among the pipeline ranks.
        groups: see `Transport`.
        dtype: of hidden states.
        device: likewise.
    """

    config: PipelineConfig
    layout: PipelineLayout
    rank: int
    groups: Groups
    dtype: torch.dtype
    device: torch.device

    @property
    def size(self) -> int:
        """Pipeline ranks."""
        return dist.get_world_size(self.groups[0])

    @property
    def num_chunks(self) -> int:
        """Stages of each rank."""
        return len(self.layout.stages) // self.size

    def schedule(self, num_micro_batches: int) -> Schedule:
        """Return who does what in which order."""
        return make_schedule(
            self.config.schedule,
            pp=self.size,
            chunks=self.num_chunks,
            num_micro_batches=num_micro_batches,
        )


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """Return the place of a model among stages; None = it is whole."""
    return getattr(model, PIPELINE_NAME, None)


def run_pipeline(
    model: nn.Module,
    pipeline: Pipeline,
    micro_batches: Sequence[Inputs],
    scale: Callable[[Tensor], Tensor],
) -> Tensor:
    """Run forward and backward of all micro-batches; return their losses, fp32 [n], on every rank.

    Args:
        model: this rank's stages.
        pipeline: its place.
        micro_batches: arguments of the whole model's forward, the same on all pipeline ranks.
        scale: of a loss, before its backward.
    """
    schedule = pipeline.schedule(len(micro_batches))
    run = _Run(model, pipeline, schedule, micro_batches, scale)
    run.all(_actions(schedule, pipeline.rank))
    return run.losses()


@torch.no_grad()
def forward_pipeline(
    model: nn.Module, pipeline: Pipeline, micro_batches: Sequence[Inputs]
) -> Tensor:
    """Return the losses of micro-batches without gradients, fp32 [n], on every rank."""
    schedule = pipeline.schedule(len(micro_batches))
    forwards = [[a for a in _actions(schedule, r) if a.kind == "F"] for r in range(pipeline.size)]
    schedule = replace(schedule, orders=tuple(map(tuple, forwards)))
    run = _Run(model, pipeline, schedule, micro_batches, lambda loss: loss)
    run.all(forwards[pipeline.rank])
    return run.losses()


def _actions(schedule: Schedule, rank: int) -> list[Action]:
    """Return what a rank does, in order."""
    return [action for item in schedule.orders[rank] for action in actions_of(item)]


@dataclass(slots=True)
class _Forward:
    """What waits for its backward: the stage's input, and where its output comes from."""

    hidden: Tensor | None
    edge: GradientEdge


class _Run:
    """One run of a schedule."""

    def __init__(
        self,
        model: nn.Module,
        pipeline: Pipeline,
        schedule: Schedule,
        micro_batches: Sequence[Inputs],
        scale: Callable[[Tensor], Tensor],
    ) -> None:
        self._model, self._pipeline, self._micro_batches = model, pipeline, micro_batches
        self._scale = scale
        self._stages: tuple[Stage, ...] = pipeline.layout.stages
        self._transport = Transport(
            schedule,
            pipeline.rank,
            pipeline.groups,
            shape_of=self._shape_of,
            dtype=pipeline.dtype,
            device=pipeline.device,
        )
        self._waiting: dict[tuple[int, int], _Forward] = {}
        (self._engine,) = engines_of(model)
        self._later: dict[tuple[int, int], WeightGradients] = {}
        self._losses = torch.zeros(len(micro_batches), dtype=torch.float32, device=pipeline.device)
        self._do = {
            "F": self._forward,
            "B": self._backward,
            "D": self._backward_of_inputs,
            "W": self._backward_of_weights,
        }

    def all(self, actions: Sequence[Action]) -> None:
        """Run a rank's actions in order."""
        for action in actions:
            with mark(mark_name(action)):
                self._do[action.kind](action)
        self._transport.finish()

    def losses(self) -> Tensor:
        """Return the losses of the micro-batches. Collective over the pipeline ranks."""
        dist.all_reduce(self._losses, group=self._pipeline.groups[0])  # zeros elsewhere
        return self._losses

    def _forward(self, action: Action) -> None:
        stage, inputs = self._stages[action.stage], self._micro_batches[action.micro_batch]
        hidden = self._transport.receive(action)
        if hidden is not None and torch.is_grad_enabled():
            hidden.requires_grad_()
        out = run_stage(self._model, stage, hidden, inputs)
        if stage.loss:
            self._losses[action.micro_batch] = out.detach()
            out = self._scale(out)
        else:
            self._transport.send(action, out.detach())
        if torch.is_grad_enabled():
            place = action.stage, action.micro_batch
            self._waiting[place] = _Forward(hidden, get_gradient_edge(out))

    def _backward(self, action: Action) -> None:
        grad = self._transport.receive(action)
        found = self._waiting.pop((action.stage, action.micro_batch))
        torch.autograd.backward([found.edge], [grad])
        if found.hidden is not None:
            assert found.hidden.grad is not None, "every stage passes its hidden states on"
            self._transport.send(action, found.hidden.grad)

    def _backward_of_inputs(self, action: Action) -> None:
        later = self._later[action.stage, action.micro_batch] = WeightGradients()
        with self._engine.deferring(later):
            self._backward(action)

    def _backward_of_weights(self, action: Action) -> None:
        self._later.pop((action.stage, action.micro_batch)).run()

    def _shape_of(self, stage: int, micro_batch: int) -> tuple[int, ...]:
        """Return the shape of what enters a stage; what enters an empty one enters the next."""
        found = next(s for s in self._stages[stage:] if s.layers or s.mtp or s.loss)
        return hidden_shape(self._model, found, self._micro_batches[micro_batch])
