"""Regions: functions whose values are recomputed in backward instead of being saved.

A region saves its inputs and the outputs of its products (matrix products, attention). Other values
(norms, activations, rotary embeddings, residual adds) and the region's outputs are dropped. The
first backward that reads a dropped value recomputes the region. Products are not recomputed: the
gradient of y = x W reads x and W, never y. Recomputation therefore runs no product here:

    x saved -> norm -> [x' dropped] -> linear -> [q saved] -> rotary -> [q' dropped] -> attention
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.base.regions import intercept_products, is_in_region
from moecore.base.saved_tensors import Handle, is_packing, pack_tensor, use_packer
from moecore.base.torch_private import (
    get_autocast_dtype,
    get_storage_key,
    is_plain_eager,
    sum_version_counters,
    tree_flatten,
    tree_unflatten,
)
from moecore.moe.pairs import get_rng_states, set_rng_states

SMALL = 8  # a tensor at most 1 / SMALL of the largest input is saved, not recomputed


class _RecomputationEnd(Exception):
    """Raised to end a recomputation as soon as all dropped values have been recomputed."""


class _View(NamedTuple):
    """Shape, stride, offset and dtype of a tensor in a storage."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Self:
        return cls(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)


class _ValuePlace(NamedTuple):
    """A value's position in a region: "saved" value `number`, "output" `number`, or an "input".

    An "input" is argument `position` of matmul or attention call `number`.
    """

    kind: str
    number: int
    position: int = 0


@dataclass(slots=True)
class _RegionProduct:
    """A matrix product or attention call in a function that is recomputed, and its output."""

    inputs: list[Any]  # until the call ends
    output: Any = None  # of the call, until the region ends; then handles
    is_needed: bool = True
    versions: tuple[int, ...] = ()  # of the output
    numbers: Sequence[Tensor] = ()  # generator states after the call, if it may draw numbers


class _DroppedValue:
    """The handle that replaces a saved tensor until its region recomputes it in backward."""

    __slots__ = ("_base", "_place", "_region", "_view")

    def __init__(self, region: "_RegionCall", place: _ValuePlace, base: _View, view: _View) -> None:
        self._region, self._place, self._base, self._view = region, place, base, view
        region.handle_counts[place] += 1

    def unpack(self) -> Tensor:
        """Return the recomputed tensor; the first read in a backward recomputes the region."""
        value = self._region.get_value(self._place)
        if _View.from_tensor(value) != self._base:
            raise RuntimeError(
                f"{self._region.name} must compute the same values in backward as in forward, but "
                f"a tensor {tuple(self._base.shape)} came back as {tuple(value.shape)}: leave it "
                "out of MemoryOptions.recompute"
            )
        view = self._view
        if view == self._base:
            return value
        return value.as_strided(view.shape, view.stride, view.offset)


@dataclass(eq=False)
class _RegionCall:
    """One call of a region (a function that is recomputed in backward), and its recomputation."""

    name: str
    function: Callable[..., Any]
    has_products: bool  # False = `function` runs no product, which saves host time
    products: list[_RegionProduct] = field(default_factory=list)
    _inputs: list[Any] = field(default_factory=list)  # handles of tensors, and other leaves
    _tree: Any = None  # the structure of the arguments, a pytree spec
    _versions: tuple[int, ...] = ()  # of the inputs
    _resident_keys: set[int] = field(default_factory=set)  # storages that stay while it runs
    _largest: int = 0
    _num_values: int = 0
    _num_products: int = 0
    _running_product: _RegionProduct | None = None
    _last: int = 0  # products before the last value that is dropped
    handle_counts: Counter[_ValuePlace] = field(default_factory=Counter)
    _remaining_counts: Counter[_ValuePlace] = field(default_factory=Counter)
    _values: dict[_ValuePlace, Tensor] = field(default_factory=dict)
    # Outputs of products in the second run, while it runs: the storage of one that is freed would
    # be given to a value that is looked for, and is known.
    _replayed_outputs: list[Any] = field(default_factory=list)
    _context: Any = None  # autocast of the first run
    _rng_states: Sequence[Tensor] = ()  # states of torch's generators before the first run
    _own_rng_states: dict[torch.Generator, Tensor] = field(default_factory=dict)  # of a model's own
    _stream: torch.cuda.Stream | None = None  # of the second run, and its end
    _event: torch.cuda.Event | None = None
    _is_rerun: bool = False

    # The first run.

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the region's function and return its result; save the inputs of the recomputation."""
        leaves, self._tree = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._start_run(tensors)
        self._rng_states = get_rng_states()
        products = intercept_products(self, has_products=self.has_products)
        with use_packer(self._pack_tensor), products:
            output = self.function(*args, **kwargs)
        if self._versions != _list_versions(tensors) or any(
            p.versions != _list_versions(_list_tensors(p.output)) for p in self.products
        ):
            raise NotImplementedError(
                f"{self.name} must not change its input or a product's output in place to be "
                "computed again: leave it out of MemoryOptions.recompute"
            )
        if tensors and (dtype := get_autocast_dtype(tensors[0])) is not None:
            self._context = torch.autocast(tensors[0].device.type, dtype)
        # Later modules then save handles of large outputs, not the tensors.
        for number, leaf in enumerate(tree_flatten(output)[0]):
            if isinstance(leaf, Tensor) and leaf.requires_grad and not self._is_saved(leaf):
                self._last = len(self.products)
                version = sum_version_counters(leaf)
                region_output = _RegionOutput(self, number, leaf, version)
                _thread_regions.outputs[get_storage_key(leaf)] = region_output
        self._inputs = [
            (pack_tensor(leaf), leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        for number, product in enumerate(self.products):
            product.is_needed = number < self._last
            product.output = _map_leaves(_pack_leaf, product.output) if product.is_needed else None
        self._resident_keys.clear()
        return output

    def _start_run(self, inputs: list[Tensor]) -> None:
        """Reset the counters for the first or second run; `inputs` are the region's inputs."""
        self._versions = _list_versions(inputs)
        self._resident_keys = {get_storage_key(tensor) for tensor in inputs}
        self._largest = max((tensor.nbytes for tensor in inputs), default=0)
        self._num_values = self._num_products = 0

    def _pack_tensor(self, tensor: Tensor) -> Handle | None:
        """Return the handle that replaces a saved tensor; None = the region does not replace it."""
        if self._is_saved(tensor):
            return None
        if self._running_product is None:
            place = _ValuePlace("saved", self._num_values)
            self._num_values += 1
            return self._make_handle(place, tensor, tensor)
        for position, value in enumerate(self._running_product.inputs):
            if not isinstance(value, Tensor) or value.is_leaf:
                continue
            if get_storage_key(value) == get_storage_key(tensor) and value.dtype == tensor.dtype:
                place = _ValuePlace("input", self._num_products, position)
                return self._make_handle(place, value, tensor)
        return None  # of the product's own, such as attention's log-sum-exp

    def _is_saved(self, tensor: Tensor) -> bool:
        """Whether a tensor is saved, not recomputed: small, a subclass, input or product output."""
        if tensor.nbytes * SMALL <= self._largest or not _is_plain_tensor(tensor):
            return True
        return get_storage_key(tensor) in self._resident_keys

    def _make_handle(self, value_place: _ValuePlace, base: Tensor, tensor: Tensor) -> _DroppedValue:
        self._last = self._num_products
        return _DroppedValue(self, value_place, _View.from_tensor(base), _View.from_tensor(tensor))

    @property
    def is_running_product(self) -> bool:
        """Whether a matmul or attention call is running; calls inside of it belong to the call."""
        return self._running_product is not None

    def run_product(self, operation: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a matmul or attention and save its output, which a recomputation returns."""
        number = self._num_products
        inputs = tree_flatten((args, kwargs))[0]
        if self._is_rerun:
            return self._rerun_product(number, inputs)
        product = _RegionProduct(inputs)
        self.products.append(product)
        self._running_product = product
        try:
            output = operation(*args, **kwargs)
        finally:
            self._running_product, product.inputs = None, []
        product.output, product.versions = output, _list_versions(_list_tensors(output))
        if operation is F.scaled_dot_product_attention:
            product.numbers = get_rng_states()
        self._resident_keys |= {get_storage_key(t) for t in _list_tensors(output)}
        self._num_products += 1
        return output

    def save_generator(self, generator: torch.Generator) -> None:
        """Save the state of a random generator of the model before the function uses it."""
        if not self._is_rerun:
            self._own_rng_states.setdefault(generator, generator.get_state())

    # The second run.

    def get_value(self, value_place: _ValuePlace) -> Tensor:
        """Return a recomputed value; the first call in a backward recomputes the region."""
        if value_place not in self._values:
            self._rerun()
        value = self._values[value_place]
        if self._event is not None:
            stream = torch.cuda.current_stream(value.device)
            if stream != self._stream:
                stream.wait_event(self._event)
                value.record_stream(stream)
        self._remaining_counts[value_place] -= 1
        if self._remaining_counts[value_place] <= 0:
            del self._values[value_place]
        return value

    def _rerun(self) -> None:
        """Run the function again with saved inputs, and store all values that have handles."""
        leaves = [_unpack_leaf(leaf) for leaf in self._inputs]
        args, kwargs = tree_unflatten(leaves, self._tree)
        self._start_run([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        self._remaining_counts, self._values = Counter(self.handle_counts), {}
        wants_output = any(place.kind == "output" for place in self.handle_counts)
        self._is_rerun = True
        try:
            # No backward runs through the second run, so nothing is unpacked.
            hooks = torch.autograd.graph.saved_tensors_hooks(self._store_tensor, lambda x: x)
            products = intercept_products(self, has_products=self.has_products)
            autocast = self._context or nullcontext()
            with self._restore_generators(), torch.enable_grad(), autocast, hooks, products:
                output = self.function(*args, **kwargs)
            for number, leaf in enumerate(tree_flatten(output)[0]) if wants_output else ():
                if isinstance(leaf, Tensor):
                    self._store_value(_ValuePlace("output", number), leaf)
        except _RecomputationEnd:
            pass
        finally:
            self._is_rerun = False
            self._resident_keys.clear()
            self._replayed_outputs.clear()
        missing = [place for place in self.handle_counts if place not in self._values]
        if missing:
            raise RuntimeError(
                f"{self.name} must save the same tensors in backward as in forward, but "
                f"{len(missing)} of {len(self.handle_counts)} were not: leave it out of "
                "MemoryOptions.recompute"
            )
        first_value = next(iter(self._values.values()))
        if first_value.is_cuda:
            self._stream = torch.cuda.current_stream(first_value.device)
            self._event = self._stream.record_event()

    @contextmanager
    def _restore_generators(self) -> Iterator[None]:
        """Return a context with the forward's random states; current states return afterwards."""
        before, own_states = get_rng_states(), {g: g.get_state() for g in self._own_rng_states}
        set_rng_states(self._rng_states)
        for generator, state in self._own_rng_states.items():
            generator.set_state(state)
        try:
            yield
        finally:
            # The offset in a CUDA generator's state grows with each draw.
            states = [x[1] for x in (before, get_rng_states()) if x[1:]]
            offsets = [int(state.view(torch.int64)[1]) for state in states]
            has_drawn = len(offsets) > 1 and offsets[1] > offsets[0]
            set_rng_states(before)
            for generator, state in own_states.items():
                generator.set_state(state)
            # In one capture backward comes after what forward has drawn; each begins at 0.
            if has_drawn and torch.cuda.is_current_stream_capturing():
                raise NotImplementedError(
                    f"{self.name} must not draw random numbers where its backward is a CUDA graph "
                    "of its own: leave it out of MemoryOptions.recompute"
                )

    def _store_tensor(self, tensor: Tensor) -> None:
        """Store a tensor that the recomputation saves, if forward replaced it by a handle."""
        # Both runs save the same tensors in the same order, so a place in it names a value.
        if not self._is_saved(tensor):
            place = _ValuePlace("saved", self._num_values)
            self._num_values += 1
            self._store_value(place, tensor)

    def _rerun_product(self, product_idx: int, inputs: list[Any]) -> Any:
        """Store the recomputed inputs of a matmul or attention call; return its saved output."""
        self._num_products += 1
        for position, value in enumerate(inputs):
            if isinstance(value, Tensor):
                self._store_value(_ValuePlace("input", product_idx, position), value)
        product = self.products[product_idx]
        if not product.is_needed:
            raise _RecomputationEnd
        if product.numbers:  # of products only attention draws; it is left out, and its states set
            set_rng_states(product.numbers)
        output = _map_leaves(_unpack_leaf, product.output)
        self._replayed_outputs.append(output)
        self._resident_keys |= {get_storage_key(t) for t in _list_tensors(output)}
        return output

    def _store_value(self, value_place: _ValuePlace, tensor: Tensor) -> None:
        """Store a recomputed value if it has handles; after the last such value, stop the run."""
        if value_place in self.handle_counts:
            self._values[value_place] = tensor.detach()
            if len(self._values) == len(self.handle_counts):
                raise _RecomputationEnd


class _RegionOutput(NamedTuple):
    """An output of a recomputed region. `tensor` keeps the storage alive, so its key is unique."""

    region: _RegionCall
    number: int  # index among the leaves of the region's result
    tensor: Tensor
    version: int  # sum of version counters when the region ended


class _ThreadRegions(threading.local):
    """This thread's outputs of recomputed regions; `is_sharing` = handles may replace them."""

    def __init__(self) -> None:
        self.outputs: dict[int, _RegionOutput] = {}
        self.is_sharing = False


_thread_regions = _ThreadRegions()


def recompute(
    region_name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    has_products: bool = True,
) -> Any:
    """Return `function(*args, **kwargs)`; backward recomputes tensors that the function saves.

    `region_name` is for errors. If `has_products`, the function may call matmuls or attention,
    whose outputs are saved and not recomputed.
    """
    kwargs = dict(kwargs or {})
    if is_in_region() or not _thread_regions.is_sharing or not is_packing():
        return function(*args, **kwargs)
    if not torch.is_grad_enabled() or not all(map(_is_plain_tensor, _list_tensors((args, kwargs)))):
        return function(*args, **kwargs)
    return _RegionCall(region_name, function, has_products).run(args, kwargs)


@contextmanager
def share_region_outputs() -> Iterator[None]:
    """Return a context in which modules save handles of recomputable outputs, not the outputs."""
    regions = _thread_regions
    if regions.is_sharing or not torch.is_grad_enabled() or not is_plain_eager():
        yield
        return
    regions.is_sharing = True
    try:
        with use_packer(_pack_output, is_first=True):
            yield
    finally:
        regions.is_sharing = False
        regions.outputs.clear()


def _pack_output(tensor: Tensor) -> Handle | None:
    """Return a handle if `tensor` is an unchanged output of `recompute` in this thread, or None."""
    out = _thread_regions.outputs.get(get_storage_key(tensor)) if _is_plain_tensor(tensor) else None
    if out is None or out.version != sum_version_counters(tensor):
        return None
    if out.tensor.dtype != tensor.dtype:
        return None
    views = _View.from_tensor(out.tensor), _View.from_tensor(tensor)
    return _DroppedValue(out.region, _ValuePlace("output", out.number), *views)


def _pack_leaf(leaf: Any) -> Any:
    """Return a (handle, requires_grad) pair for a tensor, any other leaf unchanged."""
    return (pack_tensor(leaf.detach()), leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _unpack_leaf(leaf: Any) -> Any:
    """Return a detached tensor for a (handle, requires_grad) pair, any other leaf unchanged."""
    if not isinstance(leaf, tuple):
        return leaf
    handle, requires_grad = leaf
    return handle.unpack().detach().requires_grad_(requires_grad)


def _map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, list):
        return [_map_leaves(function, item) for item in tree]
    if isinstance(tree, tuple) and not (len(tree) == 2 and hasattr(tree[0], "unpack")):
        return tuple(_map_leaves(function, item) for item in tree)
    return function(tree)


def _list_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _list_versions(tensors: list[Tensor]) -> tuple[int, ...]:
    return tuple(map(sum_version_counters, tensors))


def _is_plain_tensor(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter)
