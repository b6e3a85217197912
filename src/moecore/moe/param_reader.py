"""ParamReader: reads a module's parameters and shares quantised copies of them.

Activations are plain local tensors. Only the DTensor placements of a parameter say whether it is
unsharded, sharded over ep, etp or tp, or replicated over tp.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from moecore.base.params import GATHERED_BLOCKS, get_local_param
from moecore.base.saved_tensors import Handle, TensorHandle, is_packing, use_packer
from moecore.base.torch_private import (
    NOTHING,
    get_local_tensor,
    get_storage_key,
    sum_version_counters,
    tree_leaves,
)
from moecore.kernels.rows.scaling import Blocks
from moecore.moe.stored_weights import get_four_bit_blocks, read_on_device

T = TypeVar("T")


def get_fp8_blocks(param: Tensor) -> Blocks | None:
    """Return the FP8 values and scales of a parameter that was all-gathered in FP8; or None."""
    return getattr(param, GATHERED_BLOCKS, None)


@torch.no_grad()
def _make_version_key(param: Tensor) -> tuple[int, ...]:
    """Return a key that changes with a parameter's values: its address and version counters."""
    # An in-place operation increments the version of the DTensor, or of its local tensor.
    local = get_local_tensor(param)
    return local.data_ptr(), sum_version_counters(local), sum_version_counters(param)


@dataclass(frozen=True, slots=True)
class RecomputedView:
    """Saved for backward instead of a view: a function that recomputes the viewed tensor."""

    make: Callable[[], Tensor]
    place: tuple[Sequence[int], Sequence[int], int]  # size, stride and offset of the view

    @classmethod
    def from_view(cls, view: Tensor, make: Callable[[], Tensor]) -> Self:
        """Return the record that replaces `view`, a view of the result of `make`."""
        return cls(make, (view.size(), view.stride(), int(view.storage_offset())))

    def unpack(self) -> Tensor:
        """Recompute the base tensor; return the view."""
        return self.make().as_strided(*self.place)


class ParamReader:
    """Reads the local shards of a module's parameters, and caches quantised copies of them.

    The micro-batches of a step share a copy. Outside of a step every forward makes a new copy.
    Copies are dropped after the step, because fused optimizers, graph replays and writes to `.data`
    change a weight without a new version counter. If `caches_copies` is False, forward and backward
    each quantise the weights.
    """

    def __init__(self, *, caches_copies: bool = True) -> None:
        self._caches_copies = caches_copies
        self.dequantises = False  # whether a parameter is stored in 4 bits
        self._shares = False  # whether later micro-batches of the step use the copies
        # Key of a copy -> key of the parameters' values, copy.
        self._copies: dict[Hashable, tuple[tuple[int, ...], Any]] = {}
        # Storage -> weights and their copies, inside `exclude_from_activations`. References to the
        # tensors keep their storage keys unique.
        self._operands: dict[int, Tensor] = {}
        self._dequantised: dict[int, Blocks] = {}  # storage of a dequantised weight -> its blocks
        self._packs = False  # whether `_pack` is called for saved tensors

    def read(
        self, param: nn.Parameter, *, needs_values: bool = True, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return a DTensor parameter's local shard, or a plain parameter itself. Differentiable.

        If `needs_values`, a parameter that has only FP8 blocks raises NotImplementedError. With
        `dtype`, 4-bit blocks are dequantised, and other values cast, to this dtype.
        """
        blocks = None
        if self.dequantises and not torch.compiler.is_compiling():
            blocks = get_four_bit_blocks(param)
        if blocks is None or dtype is None:
            local = get_local_param(param, needs_values=needs_values)
        else:
            local = read_on_device(blocks, dtype)
        if self._packs:
            key = get_storage_key(local)
            self._operands[key] = local
            if blocks is not None and dtype is not None:
                self._dequantised[key] = blocks
        return local if dtype is None else local.to(dtype)

    def read_fp8_blocks(self, param: nn.Parameter) -> Blocks | None:
        """Return FP8 blocks of an all-gathered parameter, or None; not counted as activations."""
        blocks = get_fp8_blocks(param)
        if blocks is not None and self._packs:
            for tensor in blocks.tensors():
                self._operands[get_storage_key(tensor)] = tensor
        return blocks

    def get_quantised_weights(
        self, key: Hashable, params: Sequence[nn.Parameter], quantise: Callable[[], T]
    ) -> T | None:
        """Return `quantise()`, cached in a step until `params` change; None if caching is off."""
        if not self._caches_copies:
            return None
        before, copy = self._copies.pop(key, (None, None))
        value_key = tuple(number for param in params for number in _make_version_key(param))
        if before != value_key:
            copy = None  # freed before the next copy is made
            with torch.no_grad():
                copy = quantise()
        if self._shares:
            self._copies[key] = value_key, copy
        for tensor in tree_leaves(copy) if self._packs else ():
            self._operands[get_storage_key(tensor)] = tensor
        return cast(T, copy)

    def exclude_from_activations(self) -> AbstractContextManager[None]:
        """Return a context in which saved weights and their copies do not count as activations."""
        if torch.compiler.is_compiling() or not (self.dequantises or is_packing()):
            return NOTHING
        return self._pack_saved_weights()

    @contextmanager
    def _pack_saved_weights(self) -> Iterator[None]:
        """Return a context in which autograd saves `_pack(weight)`, which backward reads again."""
        self._packs = True
        try:
            with use_packer(self._pack):
                yield
        finally:
            self._packs = False
            self._operands.clear()
            self._dequantised.clear()

    def _pack(self, tensor: Tensor) -> Handle | None:
        """Return the object to save for backward in place of a weight; None for an activation."""
        key = get_storage_key(tensor)
        if (blocks := self._dequantised.get(key)) is not None:
            read_values = partial(read_on_device, blocks, tensor.dtype)
            return RecomputedView.from_view(tensor, read_values)
        return TensorHandle(tensor) if key in self._operands else None

    def start_micro_batch(self, *, is_last: bool) -> None:
        """Start a micro-batch; the next micro-batch reuses quantised copies unless `is_last`."""
        self._shares = self._caches_copies and not is_last

    def drop_copies(self) -> None:
        """Drop all copies. Call it when weights change, and before a CUDA graph is captured."""
        self._copies.clear()
        self._shares = False
