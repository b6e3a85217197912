"""The tensors that a forward saves for backward."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def list_saved(run: Callable[[], Any]) -> list[Tensor]:
    """Return the tensors that a forward saves for backward."""
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run()
    return saved
