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
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.torch_names import is_recomputing, no_dispatch_modes, set_versions, version
from moecore.kernels.experts.contract import SINK
from moecore.parallel.shard.buffers import Buffer
from moecore.parallel.shard.formats import Format
from moecore.parallel.shard.gradients import Gradients
from moecore.parallel.shard.params import UnitParam, UnitViews, cut_views
from moecore.parallel.shard.plan import FlatLayout
from moecore.parallel.shard.streams import UnitStreams
from moecore.parallel.shard.transport import UnitTransport, transport_of


class State(enum.Enum):
    """Where the values of a unit are; see the module."""

    SHARDED = enum.auto()
    GATHERING = enum.auto()
    WHOLE = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitOptions:
    """How a unit computes and communicates.

    Attributes:
        reduce_dtype: in which gradients are summed.
        cast_inputs: to which floating inputs of its modules are cast; None = as they are.
        stays: whether it stays whole from forward to backward.
        accumulates: whether its gradients wait for the last micro-batch of a step.
    """

    name: str
    reduce_dtype: torch.dtype
    divisor: float
    cast_inputs: torch.dtype | None
    stays: bool
    accumulates: bool


class Unit:
    """Modules whose parameters live together.

    Args:
        params: of one dtype and mesh.
        shard_group: ranks that hold shards; None = this rank alone.
        replicas: groups of ranks that hold the same shards.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        params: Sequence[UnitParam],
        *,
        layout: FlatLayout,
        format: Format,
        shard_group: dist.ProcessGroup | None,
        replicas: Sequence[dist.ProcessGroup],
        options: UnitOptions,
        streams: UnitStreams,
        device_type: str,
    ) -> None:
        self.modules, self.params, self.options = list(modules), list(params), options
        self.ahead_in_forward: list[Unit] = []
        self.ahead_in_backward: list[Unit] = []
        self._layout, self._format = layout, format
        self.state = State.SHARDED
        # Of the forwards that run, the innermost last; recomputed ones, of a backward, apart.
        self.runs: tuple[list[Any], list[Any]] = ([], [])
        self.forwards = 0  # of its modules that run
        self.backwards = 0
        self.waiting: set[Any] = set()  # runs whose backward has not ended
        self._streams = streams
        self._transport: UnitTransport | None = None
        if shard_group is not None and params:
            self._transport = transport_of(shard_group, device_type)
        self.gradients = Gradients(
            params,
            layout,
            transport=self._transport,
            replicas=replicas,
            dtype=options.reduce_dtype,
            divisor=options.divisor,
            accumulates=options.accumulates,
            streams=streams,
        )
        self._gathered = streams.mark()
        self._views: UnitViews | None = None
        self._counting: list[Tensor] = []  # what counts changes of whole parameters
        self._current: list[int] = []  # its versions while their values are there
        self._overwritten: list[int] = []  # and while they are not
        self.buffer: Buffer[Unit] | None = None  # None = the shards are the whole parameters

    @property
    def dtype(self) -> torch.dtype:
        """Of what is gathered."""
        return self._format.dtype

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks hold parts of its parameters."""
        return self._transport is not None

    @property
    def device(self) -> torch.device:
        """Of its shards."""
        return self.params[0].shard.device

    @property
    def in_use(self) -> bool:
        """Whether a forward or a backward of its modules runs."""
        return bool(self.forwards or self.backwards)

    def refresh(self) -> None:
        """Take the sharded parameters that stand in the modules now, and which are trained."""
        if self.state is State.SHARDED:
            changed = [param.refresh() for param in self.params]
            if any(changed) and self.buffer is None:
                self._counting.clear()
        for param in self.params:
            param.follow()

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
        if not self._counting:
            self._make_wholes()
            self._streams.start()  # the current stream may use what it has freed
        if self.buffer is not None and self._views is not None:
            with self._streams.gathering() if self.is_sharded else nullcontext():
                self.buffer.mark.wait()
                self._fill(self._views)
                self._gathered.set()
        set_versions(self._counting, self._current)

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
            self._gathered.wait()
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
            self._gathered.wait()
        if self.buffer is not None:
            set_versions(self._counting, self._overwritten)
            self.buffer.mark.set()
            self.buffer.holder = None
        self.state = State.SHARDED

    def drop_marks(self) -> None:
        """Let nothing wait for what is done, which may be no part of a CUDA graph."""
        if self.buffer is not None:
            self.buffer.mark.clear()
        self.gradients.drop_marks()

    def _take_buffer(self) -> None:
        if self.buffer is None:
            return
        holder = self.buffer.holder
        if holder is not None and holder is not self:
            # A forward that takes turns with this backward, or the other way, gathers again.
            if holder.runs[is_recomputing()]:
                raise RuntimeError(
                    f"{self.options.name} and {holder.options.name} must not run at one time, "
                    "because they share memory: set a strategy of FSDPOptions to 'optim_grads'"
                )
            holder.free()
        self.buffer.holder = self

    def _make_wholes(self) -> None:
        """Make the whole parameters, of the buffer or of the shards, which they are."""
        with torch.inference_mode(False):
            data = [param.shard for param in self.params]
            if self.buffer is not None:
                flat = self.buffer.flat(self.device)
                self._views = cut_views(self.params, flat, self._layout.whole_numel)
                data = self._views.parameters
            self._counting = self._format.make_whole(self.params, data)
        for index, param in enumerate(self.params):
            setattr(param.whole, SINK, partial(self.gradients.sink, index))
        self._current = [version(tensor) for tensor in self._counting]
        self._overwritten = [n + 1 for n in self._current]

    def _fill(self, views: UnitViews) -> None:
        """Gather into the buffer; on the stream of gathers."""
        params = self.params
        self._format.fill(params, views.own)
        if self._transport is None:
            return
        self._transport.gather(views.regions, views.padded)
        for param, region, data in zip(params, views.regions, views.parameters, strict=True):
            if param.is_strided:
                parts = region.view(param.num_ranks, *param.shard_shape)
                torch.cat(list(parts.unbind()), dim=param.slot.dim, out=data)
