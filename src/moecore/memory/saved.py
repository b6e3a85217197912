"""What a forward keeps for its backward, as handles, and who decides their form.

Autograd hands every tensor that an operation saves to one function. Here that function asks the
packers of the running code, the innermost first, and the first that answers decides: a weight is
kept, an activation is computed again (`recompute.py`) or lies in host memory. What nobody takes is
kept too.

Note "other hooks": torch asks the innermost pair of hooks alone. Under hooks of the caller's own
(activation checkpointing, `save_on_cpu`) nothing is packed here: those decide.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from moecore._torch import saved_tensor_hooks, version


class Handle(Protocol):
    """Stands for a tensor that an operation has saved."""

    def unpack(self) -> Tensor:
        """Return the tensor as it was saved. A retained graph asks more than once."""
        ...


Packer = Callable[[Tensor], Handle | None]


def changed_in_place(shape: torch.Size, now: int, then: int) -> RuntimeError:
    """Return the error for a saved tensor that has another version than at forward."""
    return RuntimeError(
        f"a tensor {tuple(shape)} that backward needs was changed in place since forward "
        f"(version {now}, not {then}): change a clone"
    )


class Kept:
    """The tensor itself; a change in place before backward is an error, as without hooks."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, version(tensor)

    def unpack(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: when it was changed in place since forward.
        """
        if version(self._tensor) != self._version:
            raise changed_in_place(self._tensor.shape, version(self._tensor), self._version)
        return self._tensor


class _Packers(threading.local):
    """The packers of this thread, in the order in which they are asked."""

    first: tuple[Packer, ...] = ()
    inner: tuple[Packer, ...] = ()
    rows: tuple[int, Tensor] | None = None  # length, and how many are in use


_here = _Packers()


@contextmanager
def packing(packer: Packer, *, is_first: bool = False) -> Iterator[None]:
    """Within, ask a packer about each tensor that an operation saves.

    Args:
        packer: returns a handle, or None for a tensor that it leaves to the next one.
        is_first: ask it before all that are on within, too; else inner ones are asked before it.
    """
    hooks = saved_tensor_hooks()
    if hooks is not None and hooks[0] is not keep:
        yield
        return
    before = _here.first, _here.inner
    if is_first:
        _here.first = (packer, *_here.first)
    else:
        _here.inner = (packer, *_here.inner)
    try:
        if hooks is not None:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(keep, _unpack):
            yield
    finally:
        _here.first, _here.inner = before


@contextmanager
def counting_rows(length: int, num_rows: Tensor) -> Iterator[None]:
    """Within, saved matrices of so many rows have the first `num_rows` in use.

    What lies past them means nothing, and need not come back.

    Args:
        length: of the matrices, and of no others that are saved.
        num_rows: 0-dim int32 on the device.
    """
    before, _here.rows = _here.rows, (length, num_rows)
    try:
        yield
    finally:
        _here.rows = before


def used_rows(tensor: Tensor) -> Tensor | None:
    """Return how many rows of a tensor that is being saved are in use; None = all."""
    if _here.rows is None or tensor.ndim != 2 or tensor.shape[0] != _here.rows[0]:
        return None
    is_whole = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
    return _here.rows[1] if is_whole else None


def is_packing() -> bool:
    """Whether saved tensors are asked about: a packer is on, and no hooks of the caller's own."""
    hooks = saved_tensor_hooks()
    return hooks is not None and hooks[0] is keep


def keep(tensor: Tensor) -> Handle:
    """Return the handle of a tensor for backward, by the packers of the running code."""
    for packer in (*_here.first, *_here.inner):
        handle = packer(tensor)
        if handle is not None:
            return handle
    return Kept(tensor)


def _unpack(handle: Handle) -> Tensor:
    return handle.unpack()
