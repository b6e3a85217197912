"""What a forward keeps for its backward, as handles, and who decides their form.

Autograd hands every tensor that an operation saves to one function. Here that function asks the
packers of the running code, the innermost first, and the first that answers decides: a weight is
kept in place of its cast (`fsdp/local_weights.py`), an activation is computed again
(`recompute.py`) or lies in host memory. What nobody takes is kept.

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

from moecore._autograd import saved_tensor_hooks, version


class Handle(Protocol):
    """Stands for a tensor that an operation has saved."""

    def unpack(self) -> Tensor:
        """Return the tensor as it was saved. A retained graph asks more than once."""
        ...


Packer = Callable[[Tensor], Handle | None]


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
            raise RuntimeError(
                f"a tensor {tuple(self._tensor.shape)} that backward needs was changed in place "
                f"since forward (version {version(self._tensor)}, not {self._version}): change a "
                "clone"
            )
        return self._tensor


class _Packers(threading.local):
    """The packers of this thread, in the order in which they are asked."""

    first: tuple[Packer, ...] = ()
    inner: tuple[Packer, ...] = ()


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
