"""`Unit`: parameters that are all-gathered, resharded and reduced together, and their state.

    SHARDED --unshard()--> UNSHARDING --wait_for_unshard()--> UNSHARDED --reshard()--> SHARDED
    UNSHARDING --reshard()--> SHARDED      a prefetch without a use

A unit is made of modules and shards of their parameters. `wait_for_unshard` gives the modules
unsharded parameters in a buffer, which several units share.

A unit is in use during a forward of its modules, and in backward from the gradient of an output to
the gradient of the last input. A prefetch does not use the buffer of a unit in use. A unit whose
module runs may use the buffer of a unit whose backward has not ended, because without input
gradients no event ends that backward. If a backward reads saved parameters of a SHARDED unit, it
raises an error, because `reshard` changes their versions.
"""

import enum
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.failures import publish_errors
from moecore.base.rank_checks import DTYPES, check_collective_headers
from moecore.base.torch_private import (
    disable_dispatch_modes,
    set_version_counters,
    sum_version_counters,
)
from moecore.kernels.experts.contract import SINK
from moecore.parallel.fsdp.buffers import Buffer
from moecore.parallel.fsdp.formats import Format
from moecore.parallel.fsdp.gradients import Gradients
from moecore.parallel.fsdp.params import UnitParam, UnitViews, make_views, register_params
from moecore.parallel.fsdp.plan import FlatLayout, UnitOptions
from moecore.parallel.fsdp.progress import Progress
from moecore.parallel.fsdp.transport import ShardCopies, UnitStreams, UnitTransport, make_transport


class State(enum.Enum):
    """The state of a unit: SHARDED, UNSHARDING (all-gather launched) or UNSHARDED (usable)."""

    SHARDED = enum.auto()
    UNSHARDING = enum.auto()
    UNSHARDED = enum.auto()


class Unit:
    """Parameters that are unsharded, resharded and reduced together, like `FSDPParamGroup`.

    The parameters have one dtype and mesh. The forward of each module in `modules` reads them.
    `format` converts shards to the values that are all-gathered over `shard_group` (None = not
    sharded). After the reduce-scatter, gradients are all-reduced over the groups of `replicas`.
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
    ) -> None:
        self.modules, self.params, self.options = list(modules), list(params), options
        self.prefetch_forward: list[Unit] = []
        self.prefetch_backward: list[Unit] = []
        self.header: CollectiveHeader | None = None  # set by the engine
        self._layout, self._format = layout, format
        self.state = State.SHARDED
        # Running forwards of the modules, innermost last: [0] first forwards, [1] recomputed ones.
        # None stands for a forward without gradients, and for a module that this rank skips.
        self.runs: tuple[list[Any], list[Any]] = ([], [])
        self.backwards = 0  # backwards of its modules that run
        self.pending_backwards: set[Any] = set()  # runs and visits whose backward has not ended
        self._streams = streams
        self.shard_group = shard_group
        self._transport: UnitTransport | None = None
        if shard_group is not None and params:
            self._transport = make_transport(shard_group, streams.device_type)
        self.gradients = Gradients(
            params,
            layout,
            transport=self._transport,
            replicas=replicas,
            options=options,
            streams=streams,
        )
        self._unshard_event = streams.make_event()
        self._views: UnitViews | None = None
        self._versioned_tensors: list[Tensor] = []  # tensors whose versions autograd checks
        self._unsharded_versions: list[int] = []  # their versions while the buffer has the values
        self._resharded_versions: list[int] = []  # their versions while the unit is SHARDED
        self._shard_versions: list[int] = []  # of the shards at the last all-gather
        self.buffer: Buffer[Unit] | None = None  # None = this rank's shards are unsharded

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the all-gathered values."""
        return self._format.dtype

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters are sharded over several ranks."""
        return self._transport is not None

    @property
    def device(self) -> torch.device:
        """Device of compute."""
        return self.params[0].device

    @property
    def is_in_use(self) -> bool:
        """Whether a forward or a backward of the modules is running."""
        return bool(any(self.runs) or self.backwards)

    @property
    def is_trained(self) -> bool:
        """Whether a parameter of the unit requires a gradient."""
        return any(param.sharded.requires_grad for param in self.params)

    def list_trained_params(self) -> list[Tensor]:
        """Return the unsharded parameters that require a gradient; [] before the first unshard."""
        unsharded = (param.unsharded for param in self.params)
        return [x for x in unsharded if x is not None and x.requires_grad]

    def expects_backward(self, forward_idx: int) -> bool:
        """Whether the unit expects the backward of the model's forward number `forward_idx`."""
        # Runs of enclosing modules, which can be in `pending_backwards` too, do not count.
        return any(
            waits.forward_idx == forward_idx and getattr(waits, "unit", self) is self
            for waits in self.pending_backwards
        )

    def list_versions(self) -> list[int]:
        """Return each shard's version counter; if unsharded, its value at the last all-gather."""
        if self.state is State.SHARDED or self.buffer is None:
            # In-place operations of a DTensor do not change the version of its local tensor.
            return [sum_version_counters(param.sharded, param.shard) for param in self.params]
        return self._shard_versions

    def refresh_sharded_params(self) -> None:
        """Read the modules' current shards if SHARDED, and their `requires_grad` in every state."""
        if self.state is State.SHARDED:
            changed = [param.refresh_sharded_param() for param in self.params]
            if any(changed) and self.buffer is None:
                self._versioned_tensors.clear()
        self.sync_requires_grad()

    def sync_requires_grad(self) -> None:
        """Copy `requires_grad` from the sharded to the unsharded parameters."""
        for param in self.params:
            unsharded, is_trained = param.unsharded, param.sharded.requires_grad
            if unsharded is not None and unsharded.requires_grad != is_trained:
                unsharded.requires_grad = is_trained

    def unshard(self) -> None:
        """If SHARDED, reshard the unit that uses the buffer; launch the all-gather. Collective."""
        if self.state is not State.SHARDED:
            return
        self._acquire_buffer()
        self._shard_versions = self.list_versions()
        # Selective checkpointing must see equal operations in forward and in recomputation, but
        # only one of the two may need this all-gather.
        with (
            torch.no_grad(),
            disable_dispatch_modes(),
            publish_errors(f"the all-gather of {self.options.name}"),
        ):
            if self.buffer is not None and self.buffer.registered is not None:
                self.buffer.registered.allocate(self.device)
            if not self._versioned_tensors:
                self._make_unsharded()
                self._streams.sync_gather_stream()  # the current stream may still use new memory
            if self.buffer is not None and self._views is not None:
                copies = self._streams.shard_copies
                if copies is not None:
                    device_shards = copies.fetch([param.shard for param in self.params])
                    for param, device_shard in zip(self.params, device_shards, strict=True):
                        param.device_shard = device_shard
                with self._streams.use_gather_stream() if self.is_sharded else nullcontext():
                    self.buffer.last_use.wait()
                    if copies is not None:
                        copies.wait()
                    self._fill_buffer(self._views)
                    self._unshard_event.record()
            set_version_counters(self._versioned_tensors, self._unsharded_versions)
        self.state = State.UNSHARDING

    def can_unshard(self) -> bool:
        """Whether a prefetch may use the buffer: no other unit in it is in use or UNSHARDING."""
        holder = None if self.buffer is None else self.buffer.holder
        if holder is None or holder is self:
            return True
        return not holder.is_in_use and holder.state is not State.UNSHARDING

    def wait_for_unshard(self) -> None:
        """Launch the all-gather if the unit is SHARDED; make the current stream wait for it."""
        if self.state is State.SHARDED:
            self.unshard()
        if self.state is State.UNSHARDING:
            self._unshard_event.wait()
            if self._streams.shard_copies is not None:
                self._free_device_shards()
            self.state = State.UNSHARDED

    def move_to_host(self, host_shards: Sequence[Tensor], shard_copies: ShardCopies) -> None:
        """Move the shards to `host_shards`; `shard_copies` copies these to the device."""
        self._streams.shard_copies = shard_copies
        for param, host_shard in zip(self.params, host_shards, strict=True):
            param.move_to_host(host_shard, shard_copies)

    def _free_device_shards(self) -> None:
        """Free the copies of host shards, which the all-gather has read."""
        for param in self.params:
            param.device_shard = None

    def register_params(self, *, unsharded: bool) -> None:
        """If UNSHARDED, register parameters on modules: unsharded if `unsharded`, else sharded."""
        if self.state is State.UNSHARDED:
            register_params(self.params, unsharded=unsharded)

    def reshard(self) -> None:
        """Register the sharded parameters and release the shared buffer. No communication."""
        if self.state is State.SHARDED:
            return
        self.register_params(unsharded=False)
        if self.state is State.UNSHARDING:
            self._unshard_event.wait()
            if self._streams.shard_copies is not None:
                self._free_device_shards()
        if self.buffer is not None:
            set_version_counters(self._versioned_tensors, self._resharded_versions)
            self.buffer.last_use.record()
            self.buffer.holder = None
        self.state = State.SHARDED

    def clear_events(self) -> None:
        """Forget the buffers' completed CUDA events: graph captures must not wait for them."""
        if self.buffer is not None:
            self.buffer.last_use.clear()
        self.gradients.clear_events()

    def list_buffers(self) -> list[Buffer[Any]]:
        """Return the unit's buffers of unsharded parameters and of gradient sums that exist."""
        return [b for b in (self.buffer, self.gradients.buffer) if b is not None]

    def _acquire_buffer(self) -> None:
        """Take the shared buffer and reshard its user; RuntimeError if both units run."""
        if self.buffer is None:
            return
        holder = self.buffer.holder
        if holder is not None and holder is not self:
            # In a pair the holder may belong to the other side; `UnitEngine.unshard_pass` repeats
            # its all-gather.
            if any(map(all, zip(self.runs, holder.runs, strict=True))):
                raise RuntimeError(
                    f"{self.options.name} and {holder.options.name} must not run at one time, "
                    "because they share memory: set a strategy of FSDPOptions to 'optim_grads'"
                )
            holder.reshard()
        self.buffer.holder = self

    def _make_unsharded(self) -> None:
        """Create the unsharded parameters as views of the buffer, or of the shards."""
        with torch.inference_mode(False):
            data = [param.shard for param in self.params]
            if self.buffer is not None:
                sizes = self._layout.unsharded_numel, self._layout.values_per_byte
                self._views = make_views(self.params, self.buffer.get_flat(self.device), *sizes)
                data = self._views.parameters
            self._versioned_tensors = self._format.make_unsharded(self.params, data)
        for index, param in enumerate(self.params):
            setattr(param.unsharded, SINK, partial(self.gradients.make_sink, index))
        self._unsharded_versions = [sum_version_counters(x) for x in self._versioned_tensors]
        self._resharded_versions = [n + 1 for n in self._unsharded_versions]

    def _fill_buffer(self, views: UnitViews) -> None:
        """Convert and all-gather the shards into the buffer `views`, on the current stream."""
        params = self.params
        self._format.write_shards(params, views.local)
        if self._transport is None:
            return
        header = [] if self.header is None else self.header.make_header(self)
        headers = self._transport.all_gather(views.regions, views.padded_local, header)
        if headers and self.header is not None and self.shard_group is not None:
            collective = f"the all-gather of {self.options.name}"
            check_collective_headers(collective, headers, self.header.formatters, self.shard_group)
        for param, region, data in zip(params, views.regions, views.parameters, strict=True):
            if param.is_strided:
                *outer, last = param.shard_shape
                parts = region.view(param.num_ranks, *outer, last // self._layout.values_per_byte)
                torch.cat(list(parts.unbind()), dim=param.slot.dim, out=data)


class CollectiveHeader:
    """Makes and checks the header of each all-gather: numbers that must be equal on all ranks.

    Ranks with different numbers would issue different collectives afterwards: gloo would end the
    process, or a rank would receive another unit's values. On CPUs each all-gather carries a header
    of 64 bytes, and all ranks of the group raise an error if headers differ. NCCL carries no
    header, because the host would have to wait for it.
    """

    def __init__(self, root: nn.Module, units: Sequence[Unit], device_type: str) -> None:
        self._root, self._device_type = root, device_type
        self._index = {unit: index for index, unit in enumerate(units)}
        self._forward_numbers = [0, 0, 0, 0]
        names = [unit.options.name for unit in units]
        self.formatters: dict[str, Callable[[int], str]] = {
            "the unit": names.__getitem__,
            "torch.is_grad_enabled()": lambda n: str(bool(n)),
            "model.training": lambda n: str(bool(n)),
            "autocast": lambda n: str(DTYPES[n]),
            "the micro-batch": lambda n: f"{n >> 32} of {n % (1 << 32)}" if n else "none",
            "requires_grad": lambda n: f"{n >> 32} parameters",
        }

    def begin_forward(self, progress: Progress | None) -> None:
        """Set the header's numbers for a model forward, such as grad mode and micro-batch."""
        autocast, micro_batch = None, 0
        if torch.is_autocast_enabled(self._device_type):
            autocast = torch.get_autocast_dtype(self._device_type)
        if progress is not None and progress.is_open:
            micro_batch = (progress.num_done + 1 << 32) + progress.number
        flags = [torch.is_grad_enabled(), self._root.training]
        self._forward_numbers = [*flags, DTYPES.index(autocast), micro_batch]

    def make_header(self, unit: Unit) -> list[int]:
        """Return unit index, numbers of the forward, and a checksum of all `requires_grad`."""
        trained = bytes(param.sharded.requires_grad for param in unit.params)
        checksum = (sum(trained) << 32) + zlib.crc32(trained)
        return [self._index[unit], *self._forward_numbers, checksum]
