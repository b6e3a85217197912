"""Buffers that no file holds, such as transformers' rotary frequencies: worked out anew.

They follow from the config, so state dicts leave them out, and `to_empty` leaves them undefined. A
module is built again from its config, or initialised again by the model around it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def fresh_buffers(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return (buffer, value) of each buffer of a transformers module that no file holds.

    Raises:
        NotImplementedError: when a buffer follows neither from the module's config nor from the
            model's initialisation.
    """
    found = []
    for path, module in model.named_modules():
        if not module._buffers or not type(module).__module__.startswith("transformers."):
            continue
        saved = module.state_dict()
        names = [name for name in module._buffers if name not in saved]
        try:
            with torch.device("cpu"):
                fresh = type(module)(module.config)._buffers  # type: ignore[operator]
        except (AttributeError, TypeError) as error:
            fresh = _initialised(module, _owner(model, path))
            left = [n for n in names if fresh.get(n) is not None and fresh[n].isnan().any()]  # type: ignore[union-attr]
            if left:
                raise NotImplementedError(
                    f"{path} ({type(module).__name__}) has buffers {left} that no file holds, and "
                    f"must be built from its config or filled by its model: {error}"
                ) from None
        for name in names:
            buffer, value = module._buffers[name], fresh[name]
            if buffer is not None and value is not None:
                found.append((buffer, value))
    return found


def _owner(model: nn.Module, path: str) -> Any:
    """Return the innermost model of transformers that holds a module, or None."""
    names = path.split(".")
    around = [model, *(model.get_submodule(".".join(names[:i])) for i in range(1, len(names)))]
    return next((m for m in reversed(around) if hasattr(m, "_init_weights")), None)


def _initialised(module: nn.Module, owner: Any) -> dict[str, Tensor | None]:
    """Return a module's buffers as transformers fills them; NaN where it does not."""
    shell = copy.copy(module)
    shell._parameters = {
        name: None if param is None else nn.Parameter(param.detach().to("meta"))
        for name, param in module._parameters.items()
    }
    shell._buffers = {
        name: None if b is None else torch.full(b.shape, torch.nan, dtype=torch.float32)
        for name, b in module._buffers.items()
    }
    if owner is not None:
        owner._init_weights(shell)
    return shell._buffers
