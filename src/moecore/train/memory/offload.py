"""Offload: stores saved activations in host memory between forward and backward, by block part.

    offload = Offload(device, fraction=0.5)
    offload.attach(model.layers, get_part_name)      # module -> name of its part, or None

`attach` wraps the forward of each block in `offload.offload_layer(i, num_layers)` and the forward
of each part in `offload.offload_part(name, module)`. The tensors that a part saves for backward are
offloaded as full storages, each once for all its saved views:

    forward     part of layer n ends          -> copies of its storages to the host start
                same part of layer n + 1      -> the device memory of layer n's part is freed
    backward    part of layer n has run       -> copies of layer n - 1's part to the device start
                the last handle has unpacked  -> the device memory is freed

The device therefore has the offloaded parts of at most one layer, for any number of layers. These
tensors stay on the device: tensors of the last layer, weights and buffers of the part's module,
storages below `min_bytes`, storages beyond `fraction` or `max_host_bytes`, and storages that other
code references, such as a rotary table. If only some rows of a matrix are in use
(`saved_tensors.mark_used_rows`), only these rows are copied.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Annotated, Any
from weakref import ReferenceType, WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from moecore.base.fields import Bound, CountOrZero, NumBytes, check_arguments
from moecore.base.saved_tensors import use_packer
from moecore.base.torch_private import get_local_tensor, get_storage_key, is_inside_backward
from moecore.train.memory.groups import REST, Key, Layer, OffloadChunk, StorageGroup
from moecore.train.memory.storages import SavedStorages

Registry = dict[str, nn.Parameter | None] | dict[str, Tensor | None]  # of a module

MIN_BYTES = 2**20  # what is smaller costs the host more time than its memory is worth
Fraction = Annotated[float, Bound(">=", 0), Bound("<=", 1)]


class Offload(SavedStorages):
    """Offloads saved tensors of a model's blocks to host memory, without a change of gradients.

    A deep copy of an `Offload`, or of a model with an `Offload`, has the same options and no
    copies. Only storages on `device` of at least `min_bytes` are offloaded. If `device` is meta,
    bytes are counted without copies. `fraction` is the maximum share of the saved bytes that is
    offloaded, in the order in which parts of blocks end. The last block is not offloaded. A step
    is slower if its compute takes less time than the copies. At most `max_host_bytes` of pinned
    memory are used; None = no limit.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        fraction: Fraction = 1.0,
        min_bytes: CountOrZero = MIN_BYTES,
        max_host_bytes: NumBytes | None = None,
    ) -> None:
        check_arguments(Offload.__init__, locals())
        super().__init__(device, fraction, min_bytes, max_host_bytes)
        self._layer: Layer | None = None  # whose forward runs
        self._previous: Layer | None = None
        self._chunk: OffloadChunk | None = None  # whose forward runs
        self._unwrap: list[Callable[[], None]] = []
        self._registries: WeakKeyDictionary[nn.Module, list[Registry]] = WeakKeyDictionary()

    def __reduce__(self) -> Any:
        options: dict[str, Any] = {"fraction": self.fraction, "min_bytes": self.min_bytes}
        options["max_host_bytes"] = self._pool.max_bytes
        return partial(Offload, self._streams.device, **options), ()

    def attach(
        self,
        blocks: Sequence[nn.Module],
        get_part_name: Callable[[nn.Module], str | None],
        fraction: Fraction | None = None,
    ) -> None:
        """Wrap the forwards of blocks and of their parts, to offload the tensors that they save.

        Call `attach` once per pipeline stage. `get_part_name` returns the name of a module's part,
        or None for other modules. A block with a name also offloads tensors saved outside of parts.
        `fraction` None = the `fraction` of this object.
        """
        for index, block in enumerate(blocks):
            for module in block.modules():
                name = get_part_name(module)
                if module is not block and name is not None:
                    part = partial(self.offload_part, name, module)
                    self._unwrap.append(wrap_forward(module, call_in_context, part))
            rest = None if get_part_name(block) is None else block
            around = partial(self.offload_layer, index, len(blocks), rest, fraction)
            self._unwrap.append(wrap_forward(block, call_in_context, around))

    def detach(self) -> None:
        """Unwrap the forwards that `attach` has wrapped; host memory stays reserved."""
        while self._unwrap:
            self._unwrap.pop()()

    def close(self) -> None:
        """Unwrap the forwards that `attach` has wrapped and free host memory. Host sync."""
        # Call it after the backward of every forward, and after CUDA graphs with copies are freed.
        self.detach()
        self._streams.synchronize()
        with self._hold_lock():
            self._store.clear()
            self._copies.clear()
            self._previous = None

    @contextmanager
    def offload_forward(
        self, *, offloads_last_block: bool, resident_input: Tensor | None = None
    ) -> Iterator[OffloadChunk]:
        """Return a context for a forward of all blocks; it yields the record of this forward.

        Call `start_copy_back` before the backward. If `offloads_last_block`, the last block is also
        offloaded, and `free_last_block` frees its device memory. `resident_input` is not offloaded,
        because the caller holds this input until backward.
        """
        # Forwards and backwards of other stages run between forward and backward of a stage. Only
        # the pipeline has their order, so it announces the backward.
        chunk, is_done = OffloadChunk(offloads_last_block), False
        if resident_input is not None:
            ref = StorageWeakRef(resident_input.untyped_storage())
            self._staying[ref.cdata] = ref
        self._chunk = chunk
        try:
            yield chunk
            is_done = True
        finally:
            self._chunk = None
            with self._hold_lock():
                if not is_done:
                    self._free_copied_groups(lambda group: True)
                chunk.pending_free, self._pending_free = self._pending_free, []

    def free_last_block(self, chunk: OffloadChunk) -> None:
        """Free the last block's storages, which `offload_forward` has copied to the host."""
        with self._hold_lock():
            for group in chunk.pending_free:
                group.free_device_memory()
            chunk.pending_free = []

    def start_copy_back(self, chunk: OffloadChunk) -> None:
        """Start to copy the last block of `chunk` back to the device; call it before the backward.

        The backward of each block copies back the block before it.
        """
        with self._hold_lock():
            chunk.pending_free = []  # what `free_last_block` has not freed yet stays on the device
            for layer in chunk.layers[-1:]:
                self._copy_groups_to_device(reversed(layer.groups.values()))

    @contextmanager
    def offload_layer(
        self,
        layer_idx: int,
        num_layers: int,
        block: nn.Module | None = None,
        fraction: Fraction | None = None,
    ) -> Iterator[None]:
        """Return a context that offloads the saved tensors of block `layer_idx` of `num_layers`.

        `block` is the block's module if tensors outside of parts are also offloaded. The `fraction`
        of block 0 applies to all blocks; None = the `fraction` of this object.
        """
        # Nothing is offloaded under no_grad, in a recomputed forward and in a compiler. Under the
        # caller's own hooks of saved tensors (activation checkpointing) `use_packer` does nothing.
        if not torch.is_grad_enabled() or is_inside_backward() or torch.compiler.is_compiling():
            yield
            return
        outer, previous, chunk = self._layer, self._previous, self._chunk
        is_last = layer_idx == num_layers - 1 and (chunk is None or not chunk.offloads_last_block)
        layer = Layer(layer_idx, is_last, self._streams.get_current_stream())
        if layer_idx == 0:
            self._start_forward(self.fraction if fraction is None else fraction)
        is_done = False
        self._layer = layer
        try:
            with nullcontext() if block is None else self._offload_saved_tensors(REST, block):
                yield
            is_done = True
        finally:
            self._layer, self._previous = outer, layer
            with self._hold_lock():
                is_next = previous is not None and previous.index == layer_idx - 1
                layer.link_to_previous(previous if is_next else None)
                if chunk is not None:
                    chunk.layers.append(layer)
                frees_all = layer.is_last or not is_done
                self._free_copied_groups(lambda group: frees_all or group.layer() is not layer)

    @contextmanager
    def offload_part(self, part_name: str, module: nn.Module) -> Iterator[None]:
        """Return a context that offloads `module`'s saved tensors as the part `part_name`."""
        # Weights and buffers of `module` are not offloaded. Outside of a block it does nothing.
        layer = self._layer
        if layer is None or not torch.is_grad_enabled() or is_inside_backward():
            yield
            return
        key = (part_name, sum(other == part_name for other, _ in layer.groups))
        if self._streams.get_current_stream() == layer.stream:
            with self._hold_lock():
                self._free_copied_groups(lambda g: g.layer() is not layer and g.key == key)
        with self._offload_saved_tensors(key, module):
            yield

    @contextmanager
    def _offload_saved_tensors(self, group_key: Key, module: nn.Module) -> Iterator[None]:
        """Return a context that offloads saved tensors, except `module`'s weights, as one group."""
        layer = self._layer
        assert layer is not None
        group = StorageGroup(
            key=group_key,
            layer=ReferenceType(layer),
            is_last=layer.is_last,
            stream=layer.stream,
            weights=self._find_storage_keys(module),
        )
        layer.groups[group_key] = group
        with use_packer(partial(self._pack_tensor, group), only_used_rows=self._rows_only):
            yield
        with self._hold_lock():
            self._copy_group_unless_last(group)

    @torch.no_grad()
    def _find_storage_keys(self, module: nn.Module) -> frozenset[int]:
        registries = self._registries.get(module)
        if registries is None:
            registries = [d for m in module.modules() for d in (m._parameters, m._buffers)]
            self._registries[module] = registries
        tensors = (t for registry in registries for t in registry.values() if t is not None)
        return frozenset(get_storage_key(get_local_tensor(t)) for t in tensors)

    def _copy_group_unless_last(self, group: StorageGroup) -> None:
        if not group.is_last:
            self._copy_group_to_store(group)


def wrap_forward(
    module: nn.Module, function: Callable[..., Any], *bound_args: Any
) -> Callable[[], None]:
    """Replace forward by function(forward, *bound_args, args, kwargs); return an undo function."""
    instance_forward, forward = vars(module).get("forward"), module.forward
    # A partial of bound methods: the deep copy of a module gets a forward of its own.
    wrapped = partial(_call_unless_compiled, function, forward, bound_args)
    module.forward = update_wrapper(wrapped, forward)
    return partial(_restore_forward, module, instance_forward)


def call_in_context(
    forward: Callable[..., Any],
    context: Callable[[], AbstractContextManager[Any]],
    args: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Return `forward(*args, **kwargs)`, called in `context()`; a `function` for `wrap_forward`."""
    with context():
        return forward(*args, **kwargs)


def _call_unless_compiled(
    function: Callable[..., Any],
    forward: Callable[..., Any],
    bound_args: tuple[Any, ...],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return `function(forward, *bound_args, args, kwargs)`; torch.compile calls only `forward`."""
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    return function(forward, *bound_args, args, kwargs)


def _restore_forward(module: nn.Module, instance_forward: Callable[..., Any] | None) -> None:
    if instance_forward is None:
        del module.forward
    else:
        module.forward = instance_forward
