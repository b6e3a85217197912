"""Activations in host memory between forward and backward, by part of a block.

    offload = Offload(device, fraction=0.5)
    offload.attach(model.layers, part_of)      # module -> name of its part, or None

wraps the forward of each block in `offload.layer(i, num_layers)` and that of each part in
`offload.part(name, module)`. Callers may enter both themselves. What operations within a part save
for backward is offloaded as whole storages, each once however many views of it are saved:

    forward     part of layer n ends          -> its storages start to be copied out
                same part of layer n + 1      -> the device memory of layer n's is freed
    backward    part of layer n has run       -> that of layer n - 1 starts to be copied back
                the last handle has unpacked  -> the device memory is freed

So at most one layer's worth of parts is on the device beside what stays, whatever the number of
layers. A part that the next layer lacks comes back as its first part has run backward. The last
layer stays, as do weights and buffers of the part's module, what is smaller than `min_bytes`, what
is beyond `fraction` or `max_host_bytes`, and what somebody else holds on to: a storage that is
still there after it was freed here, such as a rotary table, is not offloaded again. Of matrices
whose used rows are counted on the device (`saved.counting_rows`) no others travel. Where copies lie
is a store's (`store.py`): host memory, or pages (`stash.py`); when they are made and read is in
`storages.py`.

Note "chunks": stages of a pipeline are attached one by one, with a fraction each. Other items run
between forward and backward of a stage, so whoever knows their order announces the backward
(`chunk`, `bring_back`): the last layer travels, too, and what it kept is freed by `free`.

Note "where it does nothing": under no_grad, compilers, the caller's own hooks of saved tensors
(activation checkpointing), and in a forward that backward repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from moecore.base.fields import Bound, CountOrZero, NumBytes, check_arguments
from moecore.base.saved import packing
from moecore.base.torch_names import is_recomputing, storage_key
from moecore.train.memory.groups import REST, Key, Layer, OffloadChunk, StorageGroup
from moecore.train.memory.storages import SavedStorages

Registry = dict[str, nn.Parameter | None] | dict[str, Tensor | None]  # of a module

MIN_BYTES = 2**20  # what is smaller costs the host more time than its memory is worth
Fraction = Annotated[float, Bound(">=", 0), Bound("<=", 1)]


class Offload(SavedStorages):
    """Keeps what a model's blocks save for backward in host memory: which storages go, and when.

    Values come back as they were: gradients have the bits that they have without. A copy of it, or
    of a model with it, starts empty.

    Args:
        device: of the model; tensors elsewhere are kept. On meta it counts alone.
        fraction: how much of the bytes of all layers but the last is offloaded at most, in the
            order in which parts end: what cannot hide behind compute makes steps slower.
        max_host_bytes: pinned memory, in all; beyond it tensors are kept. None = no limit.
    """

    _rows_alone = False  # it takes nothing but matrices whose used rows are counted

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
        self._layer: Layer | None = None  # that runs
        self._previous: Layer | None = None
        self._chunk: OffloadChunk | None = None  # that runs
        self._unwrap: list[Callable[[], None]] = []
        self._registries: WeakKeyDictionary[nn.Module, list[Registry]] = WeakKeyDictionary()

    def __reduce__(self) -> Any:
        options: dict[str, Any] = {"fraction": self.fraction, "min_bytes": self.min_bytes}
        options["max_host_bytes"] = self._pool.max_bytes
        return partial(Offload, self._streams.device, **options), ()

    def attach(
        self,
        blocks: Sequence[nn.Module],
        part_of: Callable[[nn.Module], str | None],
        fraction: Fraction | None = None,
    ) -> None:
        """Wrap the forward of blocks and of their parts.

        Args:
            blocks: called one after the other.
            part_of: module -> name of its part, or None. A block that has a name itself offloads
                what its parts do not hold, too.
            fraction: of their bytes; None = that of all.
        """
        for index, block in enumerate(blocks):
            for module in block.modules():
                name = part_of(module)
                if module is not block and name is not None:
                    self._unwrap.append(wrap(module, within, partial(self.part, name, module)))
            rest = None if part_of(block) is None else block
            around = partial(self.layer, index, len(blocks), rest, fraction)
            self._unwrap.append(wrap(block, within, around))

    def detach(self) -> None:
        """Unwrap what `attach` has wrapped; host memory stays for the next."""
        while self._unwrap:
            self._unwrap.pop()()

    def close(self) -> None:
        """Unwrap what `attach` has wrapped and free host memory. Host sync.

        After the backward of every forward, and after CUDA graphs that hold copies are gone.
        """
        self.detach()
        self._streams.synchronize()
        with self._locked():
            self._store.clear()
            self._copies.clear()
            self._previous = None

    @contextmanager
    def chunk(self, *, leaves_whole: bool, held: Tensor | None = None) -> Iterator[OffloadChunk]:
        """Surround a forward of blocks whose backward is announced.

        Args:
            leaves_whole: whether what the last block keeps goes out, too; `free` frees it then.
            held: stays on the device anyway, as an input that the caller holds until backward.
        """
        chunk, is_done = OffloadChunk(leaves_whole), False
        if held is not None:
            ref = StorageWeakRef(held.untyped_storage())
            self._staying[ref.cdata] = ref
        self._chunk = chunk
        try:
            yield chunk
            is_done = True
        finally:
            self._chunk = None
            with self._locked():
                if not is_done:
                    self._retire(lambda group: True)
                chunk.leaving, self._leaving = self._leaving, []

    def free(self, chunk: OffloadChunk) -> None:
        """Free the device memory of what a chunk's last block has copied out."""
        with self._locked():
            for group in chunk.leaving:
                group.retire()
            chunk.leaving = []

    def bring_back(self, chunk: OffloadChunk) -> None:
        """Start to copy back all that a chunk has copied out: its backward is near.

        Device memory is taken now. What `free` has yet to free is on the device, and stays there.
        """
        with self._locked():
            chunk.leaving = []
            for layer in reversed(chunk.layers):
                self._bring_all(reversed(layer.groups.values()))

    @contextmanager
    def layer(
        self,
        index: int,
        num_layers: int,
        rest: nn.Module | None = None,
        fraction: Fraction | None = None,
    ) -> Iterator[None]:
        """Surround the forward of a block.

        Args:
            index: of the block, from 0; a forward calls blocks in order.
            num_layers: the last block's parts stay on the device, unless a chunk leaves whole.
            rest: None, or the block, whose savings outside of parts are offloaded when it ends.
            fraction: of the bytes of the forward; None = that of all. The first block's counts.
        """
        if not torch.is_grad_enabled() or is_recomputing() or torch.compiler.is_compiling():
            yield
            return
        outer, previous, chunk = self._layer, self._previous, self._chunk
        is_last = index == num_layers - 1 and not (chunk is not None and chunk.leaves_whole)
        layer = Layer(index, is_last, self._streams.current())
        if index == 0:
            self._start_forward(self.fraction if fraction is None else fraction)
        is_done = False
        self._layer = layer
        try:
            with nullcontext() if rest is None else self._saving(REST, rest):
                yield
            is_done = True
        finally:
            self._layer, self._previous = outer, layer
            with self._locked():
                is_next = previous is not None and previous.index == index - 1
                layer.follow(previous if is_next else None)
                if chunk is not None:
                    chunk.layers.append(layer)
                self._retire(lambda group: layer.is_last or not is_done or group.layer is not layer)

    @contextmanager
    def part(self, name: str, module: nn.Module) -> Iterator[None]:
        """Surround the forward of a module in a block; elsewhere it does nothing.

        Args:
            name: of the part: the same of the same module in other layers.
            module: whose weights and buffers are no activations.
        """
        layer = self._layer
        if layer is None or not torch.is_grad_enabled() or is_recomputing():
            yield
            return
        number = sum(other == name for other, _ in layer.groups)
        key = (name, number)
        if self._streams.current() == layer.stream:
            with self._locked():
                self._retire(lambda group: group.layer is not layer and group.key == key)
        with self._saving(key, module):
            yield

    @contextmanager
    def _saving(self, key: Key, module: nn.Module) -> Iterator[None]:
        """Within, offload what is saved."""
        assert self._layer is not None
        group = StorageGroup(key, self._layer, self._keys_of(module))
        self._layer.groups[key] = group
        is_done = False
        try:
            with packing(partial(self._pack, group), rows_alone=self._rows_alone):
                yield
            is_done = True
        finally:
            if is_done:
                with self._locked():
                    self._send(group)

    @torch.no_grad()
    def _keys_of(self, module: nn.Module) -> frozenset[int]:
        """Return the storages in which the parameters and buffers of a module lie now."""
        found = self._registries.get(module)
        if found is None:
            found = [d for m in module.modules() for d in (m._parameters, m._buffers)]
            self._registries[module] = found
        tensors = (t for registry in found for t in registry.values() if t is not None)
        local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
        return frozenset(storage_key(t) for t in local)

    def _send(self, group: StorageGroup) -> None:
        """Start to copy out what a part has saved, unless it stays."""
        if not group.layer.is_last:
            self._put(group)


def wrap(module: nn.Module, function: Callable[..., Any], *how: Any) -> Callable[[], None]:
    """Call `function(forward, *how, args, kwargs)` in the place of a module's forward.

    A compiler of the caller's own sees the forward alone.

    Returns:
        What puts the forward back, the last wrapped first.
    """
    own, forward = vars(module).get("forward"), module.forward
    wrapped = partial(_unless_compiled, function, forward, how)  # a deep copy of it is the copy's
    module.forward = update_wrapper(wrapped, forward)  # type: ignore[method-assign]
    return partial(_put_back, module, own)


def within(
    forward: Callable[..., Any],
    context: Callable[[], AbstractContextManager[Any]],
    args: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Call a forward in a context: a function for `wrap`."""
    with context():
        return forward(*args, **kwargs)


def _unless_compiled(
    function: Callable[..., Any],
    forward: Callable[..., Any],
    how: tuple[Any, ...],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    return function(forward, *how, args, kwargs)


def _put_back(module: nn.Module, own: Callable[..., Any] | None) -> None:
    if own is None:
        del module.forward
    else:
        module.forward = own  # type: ignore[method-assign]
