"""What a forward keeps for its backward, as handles, and who decides their form.

Autograd hands every tensor that an operation saves to one function. Here that function asks the
packers of the running code, the innermost first, and the first that answers decides: a weight is
kept, an activation is computed again (`recompute.py`) or lies in host memory. What nobody takes is
kept too. torch asks the innermost pair of hooks alone: under hooks of the caller's own (activation
checkpointing, `save_on_cpu`) nothing is packed here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moecore.base.torch_private import saved_tensor_hooks, storage_key, version


class Handle(Protocol):
    """Stands for a tensor that an operation has saved."""

    def unpack(self) -> Tensor:
        """Return the tensor as it was saved. A retained graph asks more than once."""


Packer = Callable[[Tensor], Handle | None]


def changed_in_place(shape: torch.Size, current_version: int, saved_version: int) -> RuntimeError:
    """Return the error for a saved tensor that has another version than at forward."""
    return RuntimeError(
        f"a tensor {tuple(shape)} that backward needs was changed in place since forward "
        f"(version {current_version}, not {saved_version}): change a clone"
    )


class TensorHandle:
    """The tensor itself; a change in place before backward is an error, as without hooks."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # An alias without the node: an operation that saves its own output would hold itself, and
        # a graph that is dropped would stay.
        self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self._version = version(tensor)

    def unpack(self) -> Tensor:
        """Return the tensor; raises RuntimeError when it was changed in place since forward."""
        if version(self._tensor) != self._version:
            raise changed_in_place(self._tensor.shape, version(self._tensor), self._version)
        return self._tensor


@dataclass(frozen=True, slots=True)
class UsedRows:
    """Which rows of a matrix are in use, where only the device knows; others need not come back."""

    length: int
    num_rows: Tensor | None = None  # 0-dim int32: the first so many; None = those with a slot
    slots: Tensor | None = None  # int32 [length, K]: negative in all of a row = it has no slot
    balanced: int | None = None  # how many rows with even loads; None = nobody has planned for them
    storage: int | None = None  # `storage_key` of the only matrix; None = all of this length

    def is_of(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage is a matrix with these rows, of which it holds columns."""
        if tensor.ndim != 2 or not tensor.dtype.is_floating_point:
            return False
        if tensor.shape[0] != self.length or not self.length:
            return False
        row_bytes = tensor.stride(0) * tensor.element_size()
        fills_storage = row_bytes * self.length == tensor.untyped_storage().nbytes()
        return fills_storage and self.storage in (None, storage_key(tensor))


class _Packers(threading.local):
    """The packers of this thread, in the order in which they are asked."""

    first: tuple[Packer, ...] = ()
    inner: tuple[Packer, ...] = ()
    rows: tuple[UsedRows, ...] = ()  # of matrices that have room for more


_packers = _Packers()


@contextmanager
def packing(packer: Packer, *, is_first: bool = False, only_rows: bool = False) -> Iterator[None]:
    """Within, ask a packer about each tensor that an operation saves."""
    # With `is_first` it is asked before all that are on, else inner ones are asked before it. With
    # `only_rows` it takes nothing but what is saved within `counting_rows`: elsewhere nobody is
    # asked because of it, which would take the host longer.
    hooks = saved_tensor_hooks()
    if hooks is not None and hooks[0] is not keep:
        yield
        return
    before = _packers.first, _packers.inner
    if is_first:
        _packers.first = (packer, *_packers.first)
    else:
        _packers.inner = (packer, *_packers.inner)
    try:
        with nullcontext() if only_rows else _asking():
            yield
    finally:
        _packers.first, _packers.inner = before


@contextmanager
def counting_rows(*rows: UsedRows) -> Iterator[None]:
    """Within, saved matrices have rows that are not in use; the first `rows` of a matrix count."""
    before, _packers.rows = _packers.rows, rows
    try:
        with _asking():
            yield
    finally:
        _packers.rows = before


def _asking() -> AbstractContextManager[Any]:
    """Return a context within which packers are asked, if there are any and no other hooks."""
    if saved_tensor_hooks() is not None or not is_packing():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(keep, _unpack)


def used_rows(tensor: Tensor) -> UsedRows | None:
    """Return which rows of the storage of a tensor that is being saved are in use; None = all."""
    for rows in _packers.rows:
        if rows.is_of(tensor):
            return rows
    return None


def is_packing() -> bool:
    """Whether saved tensors are asked about: a packer is on, and no hooks of the caller's own."""
    hooks = saved_tensor_hooks()
    return bool(_packers.first or _packers.inner) if hooks is None else hooks[0] is keep


def keep(tensor: Tensor) -> Handle:
    """Return the handle of a tensor for backward, by the packers of the running code."""
    for packer in (*_packers.first, *_packers.inner):
        handle = packer(tensor)
        if handle is not None:
            return handle
    return TensorHandle(tensor)


def _unpack(handle: Handle) -> Tensor:
    return handle.unpack()
