"""Packers, which decide whether a tensor that autograd saves is stored, recomputed or offloaded.

Autograd calls one pack hook for every tensor that an operation saves for backward. The hook of this
file (`pack_tensor`) calls the active packers, the innermost packer first. The first packer that
accepts the tensor returns its handle. If no packer accepts the tensor, it stays in GPU memory.

torch calls only the innermost pair of saved-tensor hooks. If the caller installs hooks (activation
checkpointing, `save_on_cpu`), no packer is called inside them.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, Protocol

import torch
from torch import Tensor

from moecore.base.torch_private import get_saved_tensor_hooks, get_storage_key, sum_version_counters


class Handle(Protocol):
    """The object that a packer returns to autograd in place of a saved tensor."""

    def unpack(self) -> Tensor:
        """Return the saved tensor. Autograd calls this more than once for a retained graph."""


Packer = Callable[[Tensor], Handle | None]


def make_in_place_error(shape: torch.Size, version: int, saved_version: int) -> RuntimeError:
    """Return the error for a saved tensor whose `version` in backward is not `saved_version`."""
    return RuntimeError(
        f"a tensor {tuple(shape)} that backward needs was changed in place since forward "
        f"(version {version}, not {saved_version}): change a clone"
    )


class TensorHandle:
    """A handle that stores the tensor; an in-place change before backward is an error."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # `detach` avoids a reference cycle: an operation that saves its own output would otherwise
        # keep its graph alive.
        self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self._version = sum_version_counters(tensor)

    def unpack(self) -> Tensor:
        """Return the tensor; raise a RuntimeError if it was changed in place since forward."""
        version = sum_version_counters(self._tensor)
        if version != self._version:
            raise make_in_place_error(self._tensor.shape, version, self._version)
        return self._tensor


@dataclass(frozen=True, slots=True)
class UsedRows:
    """Which rows of a padded matrix contain data; packers need not save the other rows."""

    length: int
    num_rows: Tensor | None = None  # 0-dim int32: the first rows are in use; None = see `slots`
    slots: Tensor | None = None  # int32 [length, K]: a row of negative slots is not in use
    balanced: int | None = None  # number of used rows with balanced routing; None = not known
    storage: int | None = None  # `get_storage_key` of the matrix; None = any of this length

    def matches(self, tensor: Tensor) -> bool:
        """Whether this record describes `tensor`: the padded matrix or a slice of its columns."""
        is_data = tensor.dtype.is_floating_point or tensor.dtype == torch.uint8
        if tensor.ndim != 2 or not is_data:
            return False
        if tensor.shape[0] != self.length or not self.length:
            return False
        row_bytes = tensor.stride(0) * tensor.element_size()
        fills_storage = row_bytes * self.length == tensor.untyped_storage().nbytes()
        return fills_storage and self.storage in (None, get_storage_key(tensor))


class _Packers(threading.local):
    """The active packers of this thread: `first` is called before `inner`."""

    first: tuple[Packer, ...] = ()
    inner: tuple[Packer, ...] = ()
    rows: tuple[UsedRows, ...] = ()  # of matrices with unused rows


_packers = _Packers()


@contextmanager
def use_packer(
    packer: Packer, *, is_first: bool = False, only_used_rows: bool = False
) -> Iterator[None]:
    """Return a context in which a packer is called for each tensor that autograd saves.

    If the caller has installed saved_tensors_hooks, the context does nothing.

    Args:
        packer: returns a handle, or None if it does not accept the tensor.
        is_first: call it before all active packers; by default inner packers are called first.
        only_used_rows: the packer accepts only tensors that are saved in `mark_used_rows`; no
            hook is installed outside of it, which saves host time.
    """
    hooks = get_saved_tensor_hooks()
    if hooks is not None and hooks[0] is not pack_tensor:
        yield
        return
    before = _packers.first, _packers.inner
    if is_first:
        _packers.first = (packer, *_packers.first)
    else:
        _packers.inner = (packer, *_packers.inner)
    try:
        with nullcontext() if only_used_rows else _install_pack_hook():
            yield
    finally:
        _packers.first, _packers.inner = before


@contextmanager
def mark_used_rows(*rows: UsedRows) -> Iterator[None]:
    """Return a context that tells packers which rows of padded, saved matrices have data.

    The records replace those of an outer context. The first matching record of a tensor is used.
    """
    before, _packers.rows = _packers.rows, rows
    try:
        with _install_pack_hook():
            yield
    finally:
        _packers.rows = before


def _install_pack_hook() -> AbstractContextManager[Any]:
    """Install `pack_tensor` in a context, unless no packer or another hook is active."""
    if get_saved_tensor_hooks() is not None or not is_packing():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(pack_tensor, methodcaller("unpack"))


def find_used_rows(tensor: Tensor) -> UsedRows | None:
    """Return the record of a saved tensor's used rows (`mark_used_rows`); None = all rows."""
    for rows in _packers.rows:
        if rows.matches(tensor):
            return rows
    return None


def is_packing() -> bool:
    """Whether the pack hook is active: a packer exists, and the caller installed no hooks."""
    hooks = get_saved_tensor_hooks()
    return bool(_packers.first or _packers.inner) if hooks is None else hooks[0] is pack_tensor


def pack_tensor(tensor: Tensor) -> Handle:
    """Autograd's pack hook: return the handle of the first packer that accepts the tensor."""
    for packer in (*_packers.first, *_packers.inner):
        handle = packer(tensor)
        if handle is not None:
            return handle
    return TensorHandle(tensor)
