"""Buffers that no file holds, such as transformers' rotary frequencies: worked out anew.

They follow from the config, so state dicts leave them out, and `to_empty` leaves them undefined.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def fresh_buffers(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return (buffer, value) of each buffer of a transformers module that no file holds.

    Raises:
        NotImplementedError: when the module cannot be built again from its config.
    """
    found = []
    for path, module in model.named_modules():
        names = [n for n in module._non_persistent_buffers_set if n in module._buffers]
        if not names or not type(module).__module__.startswith("transformers."):
            continue
        try:
            with torch.device("cpu"):
                fresh = type(module)(module.config)  # type: ignore[operator]
        except (AttributeError, TypeError) as error:
            raise NotImplementedError(
                f"{path} ({type(module).__name__}) has buffers {names} that no file holds, and "
                f"must be built from its config alone: {error}"
            ) from None
        for name in names:
            buffer, value = module._buffers[name], fresh._buffers[name]
            if buffer is not None and value is not None:
                found.append((buffer, value))
    return found
