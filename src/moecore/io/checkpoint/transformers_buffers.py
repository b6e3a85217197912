"""Buffers of transformers models that no checkpoint stores, such as rotary frequencies."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def compute_missing_buffers(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return (buffer, computed CPU tensor) of transformers' buffers that no checkpoint stores."""
    pairs = []
    for path, module in model.named_modules():
        if not module._buffers or not type(module).__module__.startswith("transformers."):
            continue
        state_dict = module.state_dict()
        names = [name for name in module._buffers if name not in state_dict]
        try:
            with torch.device("cpu"):
                fresh = type(module)(module.config)._buffers
        except (AttributeError, TypeError) as error:
            fresh = _initialize_buffers(model, path, module)
            undefined = [n for n in names if fresh.get(n) is not None and fresh[n].isnan().any()]  # type: ignore[union-attr]
            if undefined:
                raise NotImplementedError(
                    f"{path} ({type(module).__name__}) has buffers {undefined} that no file holds, "
                    f"and must be built from its config or filled by its model: {error}"
                ) from None
        for name in names:
            buffer, value = module._buffers[name], fresh[name]
            if buffer is not None and value is not None:
                pairs.append((buffer, value))
    return pairs


def _initialize_buffers(model: nn.Module, path: str, module: nn.Module) -> dict[str, Tensor | None]:
    """Return new CPU buffers of the module at `path`; NaN where `_init_weights` fills none."""
    names = path.split(".")
    around = [model, *(model.get_submodule(".".join(names[:i])) for i in range(1, len(names)))]
    owner: Any = next((m for m in reversed(around) if hasattr(m, "_init_weights")), None)
    shell = copy.copy(module)
    shell._parameters = {
        name: None if param is None else nn.Parameter(param.detach().to("meta"))
        for name, param in module._parameters.items()
    }
    nan = torch.full((), torch.nan, dtype=torch.float32, device="cpu")
    shell._buffers = {
        name: None if b is None else nan.repeat(b.shape) for name, b in module._buffers.items()
    }
    if owner is not None:
        with torch.device("cpu"):
            owner._init_weights(shell)
    return shell._buffers
