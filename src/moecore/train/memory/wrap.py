"""Functions in the place of a module's forward. A copy of the module calls its own forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn


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
