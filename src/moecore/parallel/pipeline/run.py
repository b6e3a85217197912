"""Runs a pipeline schedule on one rank: its stages' forwards, backwards and messages.

    F   receive hidden states -> forward of the stage -> send its output; store input and graph
    B   receive the gradient of that output -> backward -> send the gradient of the input
    D   B, with deferred matmuls of weight gradients
    W   the deferred matmuls

An `Overlap` is a pair of a forward and a backward (`TrainStep.side_by_side`). With offload, the
saved tensors of the next item's backward start to return before an item runs. Device memory of a
forward's last block, if that is offloaded, is freed after the next item.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from moecore.base.torch_private import annotate_range
from moecore.parallel.arguments import SharedArguments
from moecore.parallel.fsdp.deferred import WeightGradients
from moecore.parallel.fsdp.engine import UnitEngine
from moecore.parallel.pipeline.layout import PipelineLayout, Stage
from moecore.parallel.pipeline.offload import find_next_backwards, list_last_block_offloads
from moecore.parallel.pipeline.orders import Action, Item, Overlap, list_actions
from moecore.parallel.pipeline.schedule import PipelineConfig, Schedule, make_schedule
from moecore.parallel.pipeline.stages import StagedModel, get_hidden_shape
from moecore.parallel.pipeline.timeline import make_trace_name
from moecore.parallel.pipeline.transport import Groups, StageTransport

Inputs = Mapping[str, Any]  # keyword arguments of the model
SideBySide = Callable[[Callable[[], Tensor | None], Callable[[], None]], Tensor | None]


class StageOffload(Protocol):
    """Offloads the tensors that the forwards of pipeline stages save for backward."""

    def offload_forward(
        self, *, offloads_last_block: bool, resident_input: Tensor | None
    ) -> AbstractContextManager[Any]:
        """Return a context that offloads a forward's saved tensors; it yields a record of these."""

    def start_copy_back(self, chunk: Any) -> None:
        """Start to copy a forward's offloaded tensors (record `chunk`) to the device."""

    def free_last_block(self, chunk: Any) -> None:
        """Free the device memory of a forward's last block, after its copy to the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """The model and stages of a pipeline rank, and the objects that run its schedule."""

    model: StagedModel  # runs this rank's stages
    engine: UnitEngine  # of its units
    config: PipelineConfig
    layout: PipelineLayout
    rank: int  # among the pipeline ranks
    groups: Groups
    arguments: SharedArguments
    dtype: torch.dtype
    device: torch.device
    offload: StageOffload | None = None  # of this rank's saved tensors
    pre_hooks: OrderedDict[int, Callable[[], None]] = field(default_factory=OrderedDict)

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return dist.get_world_size(self.groups[0])

    @property
    def num_chunks(self) -> int:
        """Number of stages of each rank."""
        return len(self.layout.stages) // self.num_ranks

    def register_pre_hook(self, hook: Callable[[], None]) -> RemovableHandle:
        """Register a function that runs before each schedule; its errors must be on all ranks."""
        handle = RemovableHandle(self.pre_hooks)
        self.pre_hooks[handle.id] = hook
        return handle

    def build_schedule(self, num_micro_batches: int) -> Schedule:
        """Return the order of forwards and backwards on every rank, for a step's micro-batches."""
        return make_schedule(
            self.config.schedule,
            pp=self.num_ranks,
            chunks=self.num_chunks,
            num_micro_batches=num_micro_batches,
        )


def run_pipeline(
    pipeline: Pipeline,
    micro_batches: Sequence[Inputs],
    scale_loss: Callable[[Tensor], Tensor],
    run_side_by_side: SideBySide,
) -> Tensor:
    """Run all passes (`Overlap`s by `run_side_by_side`); return unscaled losses [n]. Collective."""
    schedule = _check_and_schedule(pipeline, micro_batches)
    return _ScheduleRun(pipeline, schedule, micro_batches, scale_loss, run_side_by_side).run()


@torch.no_grad()
def forward_pipeline(pipeline: Pipeline, micro_batches: Sequence[Inputs]) -> Tensor:
    """Run forwards of n micro-batches without gradients; return losses, fp32 [n]. Collective."""
    schedule = _check_and_schedule(pipeline, micro_batches)
    actions = ([a for item in order for a in list_actions(item)] for order in schedule.orders)
    forwards = tuple(tuple(a for a in order if a.kind == "F") for order in actions)
    return _ScheduleRun(pipeline, replace(schedule, orders=forwards), micro_batches).run()


def _check_and_schedule(pipeline: Pipeline, micro_batches: Sequence[Inputs]) -> Schedule:
    """Check the micro-batches and compare them between ranks; return their schedule. Collective."""
    for inputs in micro_batches:
        pipeline.model.check_inputs(inputs)
    for hook in pipeline.pre_hooks.values():
        hook()
    pipeline.arguments.compare_micro_batches(micro_batches)
    return pipeline.build_schedule(len(micro_batches))


@dataclass(slots=True)
class _StageForward:
    """A stage's forward whose backward has not run: its input, and its output's graph edge."""

    hidden: Tensor | None  # input of the stage; None for tokens
    edge: GradientEdge | None  # of the graph that computed the output; None = nothing is trained
    chunk: Any  # of `StageOffload`; None without offload


class _ScheduleRun:
    """Runs a schedule once on this rank, with the arguments of `run_pipeline`."""

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: Schedule,
        micro_batches: Sequence[Inputs],
        scale_loss: Callable[[Tensor], Tensor] = lambda loss: loss,
        run_side_by_side: SideBySide | None = None,
    ) -> None:
        self._pipeline, self._micro_batches = pipeline, micro_batches
        self._items: Sequence[Item] = schedule.orders[pipeline.rank]
        self._scale, self._side_by_side = scale_loss, run_side_by_side
        self._stages: tuple[Stage, ...] = pipeline.layout.stages
        self._transport = StageTransport(
            schedule,
            pipeline.rank,
            pipeline.groups,
            shape_of=self._get_input_shape,
            dtype=pipeline.dtype,
            device=pipeline.device,
        )
        self._forwards: dict[tuple[int, int], _StageForward] = {}
        self._engine = pipeline.engine
        self._deferred: dict[tuple[int, int], WeightGradients] = {}
        self._offload = pipeline.offload
        self._forward_chunk: Any = None  # the chunk of this item's forward
        self._offloads_last = False  # whether that chunk's last block is offloaded too
        self._losses = torch.zeros(len(micro_batches), dtype=torch.float32, device=pipeline.device)
        self._run_by_kind: dict[str, Callable[[Action], Tensor | None]] = {
            "F": self._run_forward,
            "B": self._run_backward,
            "D": self._run_input_backward,
            "W": lambda action: self._deferred.pop((action.stage, action.micro_batch)).run(),
        }

    def run(self) -> Tensor:
        """Run this rank's items; return the unscaled losses, fp32 [n], on all ranks. Collective."""
        items = self._items
        backwards, offloads = find_next_backwards(items), list_last_block_offloads(items)
        for item, backward, self._offloads_last in zip(items, backwards, offloads, strict=True):
            chunk, self._forward_chunk = self._forward_chunk, None
            if self._offload is not None and backward is not None:
                forward = self._forwards.get((backward.stage, backward.micro_batch))
                if forward is not None:
                    self._offload.start_copy_back(forward.chunk)
            with annotate_range(make_trace_name(item)):
                for action, result in self._run_item(item):
                    if result is not None:
                        self._transport.send_result(action, result)
            if self._offload is not None and chunk is not None:
                self._offload.free_last_block(chunk)
        self._transport.wait_for_sends()
        dist.all_reduce(self._losses, group=self._pipeline.groups[0])  # zeros on other ranks
        return self._losses

    def _run_item(self, item: Item) -> list[tuple[Action, Tensor | None]]:
        """Run an action or an `Overlap`; return each action with the tensor to send, or None."""
        if not isinstance(item, Overlap):
            return [(item, self._run_by_kind[item.kind](item))]
        gradient: list[Tensor | None] = []
        assert self._side_by_side is not None, "forwards alone are beside nothing"
        output = self._side_by_side(
            lambda: self._run_forward(item.forward),
            lambda: gradient.append(self._run_by_kind[item.backward.kind](item.backward)),
        )
        # Both are sent after the pair, the output first: messages have the order of the schedule.
        return [(item.forward, output), (item.backward, gradient[0])]

    def _run_forward(self, action: Action) -> Tensor | None:
        """Receive a stage's input, run its forward, and return the output or store the loss."""
        stage, inputs = self._stages[action.stage], self._micro_batches[action.micro_batch]
        hidden = self._transport.receive_input(action)
        if hidden is not None and torch.is_grad_enabled():
            hidden.requires_grad_()
        context: AbstractContextManager[Any] = nullcontext()
        if self._offload is not None and torch.is_grad_enabled():
            context = self._offload.offload_forward(
                offloads_last_block=self._offloads_last, resident_input=hidden
            )
        with context as chunk:
            out = self._pipeline.model(hidden=hidden, stage=stage, **inputs)
        output = None if stage.loss else self._check_output(out.detach(), action)
        if stage.loss:
            self._losses[action.micro_batch] = out.detach()
            out = self._scale(out)
        if torch.is_grad_enabled():
            place = action.stage, action.micro_batch
            edge = get_gradient_edge(out) if out.requires_grad else None
            self._forwards[place] = _StageForward(hidden, edge, chunk)
            self._forward_chunk = chunk
        return output

    def _check_output(self, out: Tensor, action: Action) -> Tensor:
        shape = self._get_input_shape(action.stage + 1, action.micro_batch)
        if out.dtype != self._pipeline.dtype or tuple(out.shape) != shape:
            raise ValueError(
                f"hidden states of stage {action.stage} ({out.dtype} {tuple(out.shape)}) must be "
                f"{self._pipeline.dtype} {shape}: keep the model, or FSDPOptions.param_dtype, in "
                "one dtype"
            )
        return out

    def _run_backward(self, action: Action) -> Tensor | None:
        grad = self._transport.receive_input(action)
        forward = self._forwards.pop((action.stage, action.micro_batch))
        if forward.edge is not None:
            torch.autograd.backward([forward.edge], [grad])
        return None if forward.hidden is None else forward.hidden.grad

    def _run_input_backward(self, action: Action) -> Tensor | None:
        deferred = self._deferred[action.stage, action.micro_batch] = WeightGradients()
        with self._engine.defer_weight_gradients(deferred):
            return self._run_backward(action)

    def _get_input_shape(self, stage: int, micro_batch: int) -> tuple[int, ...]:
        """Return the shape of a stage's input. An empty stage has the next stage's input shape."""
        next_stage = next(s for s in self._stages[stage:] if s.layers or s.mtp or s.loss)
        return get_hidden_shape(self._pipeline.model, next_stage, self._micro_batches[micro_batch])
