"""How a module reads its parameters and shares quantised copies of them.

Layers keep activations as plain local tensors; what a parameter is (whole, sharded over ep, etp or
tp, replicated over tp) follows from its DTensor placements alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from moecore.base.params import GATHERED_BLOCKS, local_param
from moecore.base.saved_tensors import Handle, TensorHandle, is_packing, packing
from moecore.base.torch_private import (
    NOTHING,
    local_of,
    storage_key,
    tree_leaves,
    version,
)
from moecore.kernels.rows.scaling import Blocks

T = TypeVar("T")


def gathered_blocks(param: Tensor) -> Blocks | None:
    """Return what stands for the values of a parameter that was gathered in FP8; else None."""
    return getattr(param, GATHERED_BLOCKS, None)


@torch.no_grad()
def _made_of(param: Tensor) -> tuple[int, ...]:
    """Return what changes with a parameter's values: address and versions."""
    # An operation on a DTensor counts at the DTensor, an operation on its part at the part.
    local = local_of(param)
    return local.data_ptr(), version(local), version(param)


class ParamReader:
    """How a module gets at this rank's part of its parameters, and at quantised copies of them.

    A copy is used while the announced micro-batches of a step last, and dropped by the last of
    them. Outside of a step every forward makes its own: fused optimizers, replayed graphs and
    writes to `.data` change a weight and count nowhere, so no copy may wait for a later step.

    Without `keep` forward and backward each make their own.
    """

    def __init__(self, *, keep: bool = True) -> None:
        self.keep = keep
        self._shares = False  # whether later micro-batches of the step use the copies
        self._copies: dict[Hashable, tuple[tuple[int, ...], Any]] = {}  # what it was made of, copy
        # Storage -> weights and what was made of them, while they are read: held, so that no
        # key becomes another storage's.
        self._operands: dict[int, Tensor] = {}
        self._packs = False  # whether saved tensors are asked about

    def read(self, param: nn.Parameter, *, cast: bool = True) -> Tensor:
        """Return the part, differentiably; `cast` is False for a part that may have no values."""
        local = local_param(param, reads=cast)
        if self._packs:
            self._operands[storage_key(local)] = local
        return local

    def blocks_of(self, param: nn.Parameter) -> Blocks | None:
        """Return what stands for the values of a parameter that was gathered in FP8; else None."""
        blocks = gathered_blocks(param)
        if blocks is not None and self._packs:
            for tensor in blocks.tensors():
                self._operands[storage_key(tensor)] = tensor
        return blocks

    def quantised(
        self, key: Hashable, params: Sequence[nn.Parameter], make: Callable[[], T]
    ) -> T | None:
        """Return quantised weights that forward and backward share; None = each makes its own."""
        if not self.keep:
            return None
        before, copy = self._copies.pop(key, (None, None))
        made_of = tuple(number for param in params for number in _made_of(param))
        if before != made_of:
            copy = None  # freed before its successor is made
            with torch.no_grad():
                copy = make()
        if self._shares:
            self._copies[key] = made_of, copy
        for tensor in tree_leaves(copy) if self._packs else ():
            self._operands[storage_key(tensor)] = tensor
        return cast(T, copy)

    def reading(self) -> AbstractContextManager[None]:
        """Surround reading and use: weights, gathered or quantised ones too, are no activations."""
        if torch.compiler.is_compiling() or not is_packing():  # then all is kept
            return NOTHING
        return self._packing()

    @contextmanager
    def _packing(self) -> Iterator[None]:
        self._packs = True
        try:
            with packing(self._pack):
                yield
        finally:
            self._packs = False
            self._operands.clear()

    def _pack(self, tensor: Tensor) -> Handle | None:
        return TensorHandle(tensor) if storage_key(tensor) in self._operands else None

    def start_micro_batch(self, *, is_last: bool) -> None:
        """Announce a forward and backward, and whether an optimizer step follows them."""
        self._shares = self.keep and not is_last

    def drop_copies(self) -> None:
        """Drop what was made of weights, which change now, or for a graph that makes its own."""
        self._copies.clear()
        self._shares = False
