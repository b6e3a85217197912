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
is a store's (`store.py`): host memory, or pages (`stash.py`).

Note "chunks": stages of a pipeline are attached one by one, with a fraction each. Other items run
between forward and backward of a stage, so whoever knows their order announces the backward
(`chunk`, `bring_back`): the last layer travels, too, and what it kept is freed by `free`.

Note "streams": copies run on streams of their own, and device memory is freed after the current
stream waits for the copy that still reads or writes it: no allocator event decides when, so all
ranks and a CUDA graph's capture do the same. A part may run on another stream than its block, if
that one begins by waiting for the block's. Host memory is given back by the last handle's death;
whoever gets it next copies after work that has waited for its last reader.

Note "order": a part has run backward when each of its handles has been unpacked, or has died. The
copy back is launched once they all have died, or at the next unpacking, which is after the part's
last operation was launched. A retained graph brings everything back once more.

Note "where it does nothing": under no_grad, compilers, the caller's own hooks of saved tensors
(activation checkpointing), and in a forward that backward repeats.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from moecore.base.fields import Bound, CountOrZero, NumBytes, check_arguments
from moecore.base.saved import (
    Handle,
    Kept,
    UsedRows,
    changed_in_place,
    packing,
    used_rows,
)
from moecore.base.torch_names import is_recomputing, storage_key, version
from moecore.train.memory.groups import REST, Chunk, Copy, Group, Key, Layer, Use, bytes_of
from moecore.train.memory.host import HostPool
from moecore.train.memory.store import HostStore, Store
from moecore.train.memory.streams import Streams
from moecore.train.memory.wrap import within, wrap

Registry = dict[str, nn.Parameter | None] | dict[str, Tensor | None]  # of a module

MIN_BYTES = 2**20  # what is smaller costs the host more time than its memory is worth
Fraction = Annotated[float, Bound(">=", 0), Bound("<=", 1)]


class _Offloaded:
    """A view of a storage."""

    __slots__ = ("_dtype", "_offload", "_offset", "_shape", "_stride", "_use")

    def __init__(self, offload: Offload, use: Use, tensor: Tensor) -> None:
        self._offload, self._use = offload, use
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()

    def unpack(self) -> Tensor:
        """Return the view, of the storage as it was saved.

        Raises:
            RuntimeError: when it was changed in place since forward.
        """
        data = self._offload._fetch(self._use, self._shape)
        view = torch.empty(0, dtype=self._dtype, device=data.device)
        return view.set_(data.untyped_storage(), self._offset, self._shape, self._stride)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._offload._leave(self._use)


class Offload:
    """Keeps what a model's blocks save for backward in host memory.

    Values come back as they were: gradients have the bits that they have without. A copy of it, or
    of a model with it, starts empty.

    Args:
        device: of the model; tensors elsewhere are kept. On meta it counts alone.
        fraction: how much of the bytes of all layers but the last is offloaded at most, in the
            order in which parts end: what cannot hide behind compute makes steps slower.
        min_bytes: smaller storages are kept.
        max_host_bytes: pinned memory, in all; beyond it tensors are kept. None = no limit.

    Attributes:
        kept_bytes: what forwards have saved so far in parts of layers but the last, from
            `min_bytes` up.
        out_bytes: how much of it was copied out; rows that are not in use count.
        back_bytes: and back.
        late_bytes: how much of that only when backward asked for it.
        observe: gets each tensor that is taken; None = nobody does.
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
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.fraction, self.min_bytes = fraction, min_bytes
        self.kept_bytes = self.out_bytes = self.back_bytes = self.late_bytes = 0
        self.observe: Callable[[Tensor], None] | None = None
        self._streams = Streams(device)
        self._pool = HostPool(
            pinned=device.type == "cuda",
            max_bytes=max_host_bytes,
            device="meta" if device.type == "meta" else "cpu",
        )
        self._store: Store = HostStore(self._streams, self._pool)
        self._nothing = torch.empty(0, device=device)
        self._layer: Layer | None = None  # that runs
        self._previous: Layer | None = None
        self._chunk: Chunk | None = None  # that runs
        self._share = fraction  # of this forward
        self._leaving: list[Group] = []  # groups whose device memory is not freed yet
        # Storage -> the last copy of it. Its address would not do: a unit may free and allocate the
        # memory of a storage that stays.
        self._copies: dict[int, Copy] = {}
        self._staying: dict[int, StorageWeakRef] = {}  # beyond the fraction, or held
        self._done: list[Group] = []  # groups that have run backward just now
        self._offered = self._taken = 0  # bytes of this forward
        self._dead: deque[Use] = deque()
        self._lock = threading.Lock()  # forward, autograd's thread, and whoever frees a graph
        self._unwrap: list[Callable[[], None]] = []
        self._registries: WeakKeyDictionary[nn.Module, list[Registry]] = WeakKeyDictionary()

    def __reduce__(self) -> Any:
        options: dict[str, Any] = {"fraction": self.fraction, "min_bytes": self.min_bytes}
        options["max_host_bytes"] = self._pool.max_bytes
        return partial(Offload, self._streams.device, **options), ()

    @property
    def host_bytes(self) -> int:
        """Host memory that is reserved, used or not."""
        return self._pool.num_bytes

    @property
    def used_host_bytes(self) -> int:
        """Host memory that handles hold."""
        return self._pool.used_bytes

    @property
    def away(self) -> frozenset[int]:
        """Storages (`StorageWeakRef.cdata`) whose copy in host memory backward waits for."""
        return frozenset(key for key, copy in self._copies.items() if copy.piece is not None)

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
    def chunk(self, *, leaves_whole: bool, held: Tensor | None = None) -> Iterator[Chunk]:
        """Surround a forward of blocks whose backward is announced.

        Args:
            leaves_whole: whether what the last block keeps goes out, too; `free` frees it then.
            held: stays on the device anyway, as an input that the caller holds until backward.
        """
        chunk, is_done = Chunk(leaves_whole), False
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

    def free(self, chunk: Chunk) -> None:
        """Free the device memory of what a chunk's last block has copied out."""
        with self._locked():
            for group in chunk.leaving:
                group.retire()
            chunk.leaving = []

    def bring_back(self, chunk: Chunk) -> None:
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
        group = Group(key, self._layer, self._keys_of(module))
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

    # Forward.

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

    def _start_forward(self, share: float) -> None:
        self._share = share
        self._offered = self._taken = 0
        with self._locked():
            known = self._copies.items()
            self._copies = {a: c for a, c in known if c.readers.alive or not c.ref.expired()}
            self._staying = {a: ref for a, ref in self._staying.items() if not ref.expired()}

    def _pack(self, group: Group, tensor: Tensor) -> Handle | None:
        """Return the handle of a tensor; None leaves it to the other packers."""
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            return None
        used = used_rows(tensor)
        if not self._store.takes(used):
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < max(self.min_bytes, 1) or tensor.device != self._streams.device:
            return None
        if storage_key(tensor) in group.weights:
            return Kept(tensor)
        if tensor.is_conj() or tensor.is_neg():
            return None
        with self._lock:  # deaths meanwhile are counted by the next call
            ref = StorageWeakRef(storage)
            copy = self._copies.get(ref.cdata)
            outlives = copy is not None and not copy.ref.expired()
            if copy is None or not outlives or not copy.holds(tensor):
                if outlives or not (group.layer.is_last or self._goes(ref, storage.nbytes())):
                    return None
                copy = self._new(tensor, ref, group, used)
            use = Use(copy, group, copy.readers.join(), group.readers.join())
        if self.observe is not None:
            self.observe(tensor)
        return _Offloaded(self, use, tensor)

    def _goes(self, ref: StorageWeakRef, size: int) -> bool:
        """Whether a storage that is saved for the first time is within the fraction."""
        stays = self._staying.get(ref.cdata)
        if stays is not None and not stays.expired():
            return False
        self._offered += size
        self.kept_bytes += size
        if self._taken + size <= self._share * self._offered:
            self._taken += size
            return True
        self._staying[ref.cdata] = ref
        return False

    def _new(
        self, tensor: Tensor, ref: StorageWeakRef, group: Group, used: UsedRows | None
    ) -> Copy:
        storage = tensor.untyped_storage()
        counter = tensor.detach()
        if not tensor.is_inference():
            counter.data = self._nothing
        copy = Copy(
            size=storage.nbytes(),
            ref=ref,
            counter=counter,
            version=version(tensor),
            data=bytes_of(storage),
            home=group.layer.stream,
            used=used,
        )
        self._copies[ref.cdata] = copy
        group.fresh.append(copy)
        return copy

    def _send(self, group: Group) -> None:
        """Start to copy out what a part has saved, unless it stays."""
        if not group.layer.is_last:
            self._put(group)

    def _put(self, group: Group) -> None:
        ready = [copy for copy in group.fresh if copy.readers.alive and copy.is_as_saved()]
        going = self._store.put(ready)
        self._taken -= sum(copy.size for copy in group.fresh if copy.piece is None)
        if going:
            self.out_bytes += sum(copy.size for copy in going)
            self._leaving.append(group)

    def _retire(self, is_due: Callable[[Group], bool]) -> None:
        """Free the device memory of groups that were copied out."""
        for group in self._leaving:
            if is_due(group):
                group.retire()
        self._leaving = [group for group in self._leaving if not is_due(group)]

    # Backward.

    def _fetch(self, use: Use, shape: torch.Size) -> Tensor:
        """Return a storage on the device, which the current stream may read from here on."""
        copy, group = use.copy, use.group
        with self._locked():
            if version(copy.counter) != copy.version:
                raise changed_in_place(shape, version(copy.counter), copy.version)
            if copy.data is None:
                self.late_bytes += copy.size
                self._bring([copy])
            data = copy.data
            assert data is not None
            if copy.is_back:
                assert copy.busy is not None
                current = self._streams.current()
                copy.busy.hold(current)
                if isinstance(current, torch.cuda.Stream) and current != copy.home:
                    data.record_stream(current)
            use.copy_turn, is_over = copy.readers.asked(use.copy_turn)
            if is_over and copy.piece is not None:
                copy.free()
            group.is_asked = True
            use.group_turn, is_over = group.readers.asked(use.group_turn)
            if is_over:
                self._done.append(group)
        return data

    def _bring_all(self, groups: Iterable[Group], gone: Sequence[Any] = ()) -> None:
        """Start to copy back what is away of groups, in the order of backward.

        Args:
            groups: in that order.
            gone: pieces that nobody asks for any more.
        """
        for group in groups:
            copies = [c for c in reversed(group.fresh) if c.readers.alive and c.data is None]
            if copies:
                self._bring(copies, gone)
                gone = ()
        if gone:
            self._store.give(gone)

    def _bring(self, copies: Sequence[Copy], gone: Sequence[Any] = ()) -> None:
        """Start to copy storages back."""
        home = self._streams.current()
        for copy in copies:
            copy.data = torch.empty(copy.size, dtype=torch.uint8, device=self._streams.device)
            copy.home, copy.is_back = home, True
            self.back_bytes += copy.size
        self._store.bring(copies, gone)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Within, no other thread changes anything; what has happened since is done first."""
        with self._lock:
            self._tend()
            yield
        self._tend_if_free()

    def _leave(self, use: Use) -> None:
        """Count the death of a handle, which may come at any time, within the lock too."""
        self._dead.append(use)
        self._tend_if_free()

    def _tend_if_free(self) -> None:
        while self._dead and self._lock.acquire(blocking=False):
            try:
                self._tend(more_may_die=True)
            finally:
                self._lock.release()

    def _tend(self, *, more_may_die: bool = False) -> None:
        """Bring back what is next, and free what no handle stands for.

        Args:
            more_may_die: wait for the other handles of a part that has run backward, which die one
                after the other: what they stood for is given back with what comes.
        """
        if not self._dead and not self._done:
            return
        gone = []
        while self._dead:
            use = self._dead.popleft()
            copy, group = use.copy, use.group
            is_over = copy.readers.leave(use.copy_turn)
            if not copy.readers.alive or (is_over and copy.piece is not None):
                copy.free()
            if not copy.readers.alive and copy.piece is not None:
                gone.append(copy.piece)
                copy.piece = None
            if group.readers.leave(use.group_turn) and group.is_asked:
                self._done.append(group)
        done = [g for g in self._done if not (more_may_die and g.readers.alive)]
        self._done = [group for group in self._done if group not in done]
        for group in done:
            group.is_asked = False
        self._bring_all(chain.from_iterable(group.before for group in done), gone)
