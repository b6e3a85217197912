"""Unit: parameters that are gathered, freed and reduced together, and the state that they are in.

    SHARDED --gather()--> GATHERING --wait()--> WHOLE --free()--> SHARDED
    GATHERING --free()--> SHARDED      a prefetch that nobody used

A unit is in use between the start and the end of a forward of its modules, and from the gradient
of such a forward's outputs to that of its inputs. No prefetch takes its buffer then. Another unit
that runs takes it from one whose backward has not ended, as where no input needs a gradient. What
autograd has saved of a unit that is SHARDED cannot be read: the versions of its whole parameters
say that they were overwritten, and backward raises.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from moecore._autograd import no_dispatch_modes, set_versions
from moecore.shard.buffers import Buffer
from moecore.shard.params import UnitParam
from moecore.shard.plan import FlatLayout
from moecore.shard.transport import Transport, transport_of


class State(enum.Enum):
    """Where the values of a unit are; see the module."""

    SHARDED = enum.auto()
    GATHERING = enum.auto()
    WHOLE = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitOptions:
    """How a unit computes and communicates.

    Attributes:
        name: of messages.
        compute_dtype: of whole parameters; None = their own.
        reduce_dtype: in which gradients are summed.
        divisor: of the sum.
        cast_inputs: to which floating inputs of its modules are cast; None = as they are.
        stays: whether it stays whole from forward to backward.
    """

    name: str
    compute_dtype: torch.dtype | None
    reduce_dtype: torch.dtype
    divisor: float
    cast_inputs: torch.dtype | None
    stays: bool


class Streams:
    """Where units of a model communicate: beside compute on a GPU, in line on a CPU."""

    def __init__(self, device_type: str) -> None:
        self.is_async = device_type == "cuda"
        self._gather = torch.cuda.Stream(priority=-1) if self.is_async else None
        self._reduce = torch.cuda.Stream(priority=-1) if self.is_async else None
        self._queued: list[torch.cuda.Stream] = []  # what nothing has waited for

    def on_device(self, value: Any) -> Any:
        """Return a value with its tensors on the GPU, where units compute on one."""
        if not self.is_async or all(not _is_on_cpu(leaf) for leaf in tree_leaves(value)):
            return value
        return tree_map_only(Tensor, lambda x: x.cuda(non_blocking=True), value)

    def record(self) -> torch.Event | None:
        """Return an event after what the current stream has queued."""
        if not self.is_async:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, event: torch.Event | None) -> None:
        """Let the current stream wait for an event."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def join(self) -> None:
        """Let the current stream wait for all communication."""
        for stream in self._queued:  # no other: it may be no part of a CUDA graph
            torch.cuda.current_stream().wait_stream(stream)
        self._queued.clear()

    def keep(self, tensor: Tensor) -> None:
        """Keep a tensor's memory until the reductions that are queued have run."""
        if self._reduce is not None:
            tensor.record_stream(self._reduce)

    def start(self) -> None:
        """Let gathers wait for the current stream, which has written the shards."""
        if self._gather is not None:
            self._follow(self._gather)

    def gathering(self) -> AbstractContextManager[Any]:
        """Queue what follows beside compute, on the stream of gathers."""
        return nullcontext() if self._gather is None else torch.cuda.stream(self._gather)

    def reducing(self) -> AbstractContextManager[Any]:
        """Queue what follows behind compute, on the stream of reductions."""
        if self._reduce is None:
            return nullcontext()
        self._follow(self._reduce)
        return torch.cuda.stream(self._reduce)

    def _follow(self, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        if stream not in self._queued:
            self._queued.append(stream)


class Unit:
    """Modules whose parameters live together.

    Args:
        modules: they run the unit.
        params: of one dtype and mesh.
        layout: of their memory.
        shard_group: ranks that hold shards; None = this rank alone.
        replica_group: ranks that hold the same shards; None = none.
        options: see there.
        streams: of the model.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        params: Sequence[UnitParam],
        *,
        layout: FlatLayout,
        shard_group: dist.ProcessGroup | None,
        replica_group: dist.ProcessGroup | None,
        options: UnitOptions,
        streams: Streams,
        device_type: str,
    ) -> None:
        self.modules, self.params, self.options = list(modules), list(params), options
        self.ahead_in_forward: list[Unit] = []
        self.ahead_in_backward: list[Unit] = []
        self._layout = layout
        self.state = State.SHARDED
        self.runs: list[Any] = []  # of the forwards that run, the innermost last
        self.forwards = 0  # of its modules that run
        self.backwards = 0
        self.waiting = 0  # forwards whose backward has not ended
        self.reduces = True  # with the next backward, which then frees it too
        self._streams, self._replicas = streams, replica_group
        self._transport: Transport | None = None
        if shard_group is not None and params:
            self._transport = transport_of(shard_group, device_type)
        self._gathered: torch.Event | None = None
        self._views: _Views | None = None
        self._added: list[Tensor | None] | None = None  # of micro-batches before the last
        self.buffer = Buffer(self.numel, self.dtype) if self.has_buffer else None
        self.sums: Buffer | None = (
            None  # memory in which gradients are reduced; None = new each time
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the whole parameters."""
        own = self.params[0].dtype if self.params else torch.float32
        return self.options.compute_dtype or own

    @property
    def has_buffer(self) -> bool:
        """Whether whole parameters are not this rank's shards themselves."""
        if not self.params:
            return False
        return self._transport is not None or self.dtype != self.params[0].dtype

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks hold parts of its parameters."""
        return self._transport is not None

    @property
    def numel(self) -> int:
        """Elements of its buffer."""
        beside = sum(param.shape.numel() for param in self.params if param.is_strided)
        return self._layout.whole_numel + beside

    @property
    def device(self) -> torch.device:
        """Of its shards."""
        return self.params[0].shard.device

    @property
    def in_use(self) -> bool:
        """Whether a forward or a backward of its modules runs."""
        return bool(self.forwards or self.backwards)

    def refresh(self) -> None:
        """Take the sharded parameters that stand in the modules now."""
        changed = False
        for param in self.params:
            changed |= param.refresh()
        if changed and self._views is not None and not self.has_buffer:
            self._views = None

    def gather(self) -> None:
        """Begin to make the parameters whole; nothing where they are. Collective.

        Raises:
            RuntimeError: when a unit in use has the buffer.
        """
        if self.state is not State.SHARDED:
            return
        self._take_buffer()
        # Selective checkpointing must see the same operations in forward and in recomputation, of
        # which one may find the unit gathered.
        with torch.no_grad(), no_dispatch_modes():
            self._gather()
        self.state = State.GATHERING

    def _gather(self) -> None:
        streams, views = self._streams, self._views
        if views is None:
            views = self._make_views()
            streams.start()  # the current stream may use what it has freed
        if self.buffer is not None:
            with streams.gathering():
                streams.wait(self.buffer.event)
                self._fill(views)
                self._gathered = streams.record()
        set_versions(views.wholes, views.current)

    def can_gather(self) -> bool:
        """Whether no unit in use, or about to be, has its buffer."""
        holder = None if self.buffer is None else self.buffer.holder
        if holder is None or holder is self:
            return True
        return not holder.in_use and holder.state is not State.GATHERING

    def wait(self) -> None:
        """Gather what is not, and let the current stream wait for it."""
        if self.state is State.SHARDED:
            self.gather()
        if self.state is State.GATHERING:
            self._streams.wait(self._gathered)
            self.state = State.WHOLE

    def register(self, *, whole: bool) -> None:
        """Let modules have whole or sharded parameters."""
        if self.state is State.WHOLE:
            for param in self.params:
                param.register(param.whole if whole else param.sharded)  # type: ignore[arg-type]

    def free(self) -> None:
        """Give the buffer to others. No communication."""
        if self.state is State.SHARDED:
            return
        self.register(whole=False)
        if self.state is State.GATHERING:
            self._streams.wait(self._gathered)
        assert self._views is not None
        if self.buffer is not None:
            set_versions(self._views.wholes, self._views.overwritten)
            self.buffer.event = self._streams.record()
            self.buffer.holder = None
        self.state = State.SHARDED

    def has_all_gradients(self) -> bool:
        """Whether backward has reached every parameter that is trained."""
        return all(
            param.whole is None or not param.whole.requires_grad or param.whole.grad is not None
            for param in self.params
        )

    def reduce(self) -> None:
        """Move gradients of whole parameters to the sharded ones, or keep their sum. Collective."""
        if self._views is None:
            return
        grads = [param.take_grad() for param in self.params]
        if not self.reduces:
            self._added = self._add(grads)
            return
        if self._added is not None:
            grads, self._added = self._add(grads), None
        with torch.no_grad():
            self._reduce([(p, g) for p, g in zip(self.params, grads, strict=True) if g is not None])

    def drop_events(self) -> None:
        """Let nothing wait for what is done: a CUDA graph may not wait for events from outside."""
        for buffer in (self.buffer, self.sums):
            if buffer is not None:
                buffer.event = None

    def drop_gradients(self) -> None:
        """Drop the gradients of whole parameters."""
        self._added = None
        for param in self.params:
            if param.whole is not None:
                param.whole.grad = None

    def _take_buffer(self) -> None:
        if self.buffer is None:
            return
        holder = self.buffer.holder
        if holder is not None and holder is not self:
            if holder.forwards:
                raise RuntimeError(
                    f"{self.options.name} and {holder.options.name} must not run at one time, "
                    "because they share memory: set FSDPOptions.reshard_after_forward to False"
                )
            holder.free()
        self.buffer.holder = self

    def _make_views(self) -> _Views:
        """Return the pieces of the buffer, which whole parameters are from now on."""
        with torch.inference_mode(False):
            if self.buffer is None:
                views = _Views([], [], [], [param.shard for param in self.params])
            else:
                views = _views(self.params, self.buffer.flat(self.device), self._layout.whole_numel)
            for param, data in zip(self.params, views.parameters, strict=True):
                param.make_whole(data)
            views.wholes = [p.whole for p in self.params if p.whole is not None]
        versions = [whole._version for whole in views.wholes]
        views.current, views.overwritten = versions, [n + 1 for n in versions]
        self._views = views
        return views

    def _fill(self, views: _Views) -> None:
        """Gather into the buffer; on the stream of gathers."""
        params = self.params
        if self._transport is None:
            torch._foreach_copy_(views.parameters, [param.shard for param in params])
            return
        torch._foreach_copy_(views.own, [param.shard.view(-1) for param in params])
        self._transport.gather(views.regions, views.padded)
        for param, region, data in zip(params, views.regions, views.parameters, strict=True):
            if param.is_strided:
                parts = region.view(param.num_ranks, *param.shard_shape)
                torch.cat(list(parts.unbind()), dim=param.slot.dim, out=data)

    def _add(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Return the sums of earlier micro-batches and these gradients."""
        dtype, found = self.options.reduce_dtype, list[Tensor | None]()
        for old, grad in zip(self._added or [None] * len(grads), grads, strict=True):
            if old is None or grad is None:
                found.append(old if grad is None else grad.to(dtype))
            else:
                found.append(old.add_(grad))
        return found

    def _reduce(self, grads: list[tuple[UnitParam, Tensor]]) -> None:
        if not grads:
            return
        params, streams, dtype = [p for p, _ in grads], self._streams, self.options.reduce_dtype
        summed = torch.empty(self._layout.shard_numel, dtype=dtype, device=self.device)
        flat = summed  # of one rank
        if self.sums is not None:
            streams.wait(self.sums.event)
            flat = self.sums.flat(self.device)
        elif self._transport is not None:
            flat = torch.empty(self.numel, dtype=dtype, device=self.device)
        views = _views(params, flat, self._layout.whole_numel)
        torch._foreach_copy_(views.parameters, [grad for _, grad in grads])
        grads.clear()
        for param, region, data in zip(params, views.regions, views.parameters, strict=True):
            if param.is_strided:
                parts = data.chunk(param.num_ranks, dim=param.slot.dim)
                torch.stack(parts, out=region.view(param.num_ranks, *param.shard_shape))
        with streams.reducing():
            if self._transport is not None:
                shards = [_of_shard(summed, param)[: param.slot.shard_numel] for param in params]
                self._transport.reduce(shards, views.regions)
                if self.sums is None:
                    streams.keep(flat)
                else:
                    self.sums.event = streams.record()
            if self._replicas is not None:
                dist.all_reduce(summed, group=self._replicas)
            if self.options.divisor != 1.0:
                summed.div_(self.options.divisor)
            streams.keep(summed)
            summed = summed.to(params[0].dtype)
            for param in params:
                part = _of_shard(summed, param)
                param.put_grad(part[: param.shard.numel()].view(param.shard.shape))


def _is_on_cpu(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "cpu"


@dataclass(slots=True)
class _Views:
    """Pieces of a unit's memory, per parameter.

    Attributes:
        regions: the shards of all ranks.
        padded: this rank's part of each.
        own: that without padding.
        parameters: the whole parameters; where dim 0 is cut, the regions without padding.
        wholes: those as modules have them.
        current: the versions of these while their values are there.
        overwritten: and while they are not.
    """

    regions: list[Tensor]
    padded: list[Tensor]
    own: list[Tensor]
    parameters: list[Tensor]
    wholes: list[Tensor] = field(default_factory=list)
    current: list[int] = field(default_factory=list)
    overwritten: list[int] = field(default_factory=list)


def _of_shard(flat: Tensor, param: UnitParam) -> Tensor:
    """Return what begins with a parameter's part of a flat shard."""
    return flat[param.slot.shard_offset :]


def _views(params: Sequence[UnitParam], flat: Tensor, beside: int) -> _Views:
    """Cut a unit's memory.

    Args:
        params: some of the unit's.
        flat: the memory.
        beside: where the memory of strided parameters begins, behind all regions.
    """
    views = _Views([], [], [], [])
    for param in params:
        slot, size = param.slot, param.shape.numel()
        n, at = slot.shard_numel, slot.whole_offset
        region = flat[at : at + param.num_ranks * n]
        padded = region[param.rank * n : (param.rank + 1) * n]
        if param.is_strided:
            at, beside = beside, beside + size
        views.regions.append(region)
        views.padded.append(padded)
        views.own.append(padded[: param.shard.numel()])
        views.parameters.append(flat[at : at + size].view(param.shape))
    return views
