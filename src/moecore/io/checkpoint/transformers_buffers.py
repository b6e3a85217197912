"""Buffers of transformers models that no checkpoint stores, such as rotary frequencies."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def compute_missing_buffers(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Compute the buffers of transformers modules that no checkpoint stores, from their configs.

    Returns pairs of the model's buffer, which does not change, and the computed CPU tensor.
    NotImplementedError if a buffer cannot be computed.
    """
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
            fresh = _initialize_buffers(module, _find_owner_model(model, path))
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


def _find_owner_model(model: nn.Module, path: str) -> Any:
    """Return the innermost transformers model that has the module at `path`, or None."""
    names = path.split(".")
    around = [model, *(model.get_submodule(".".join(names[:i])) for i in range(1, len(names)))]
    return next((m for m in reversed(around) if hasattr(m, "_init_weights")), None)


def _initialize_buffers(module: nn.Module, owner: Any) -> dict[str, Tensor | None]:
    """Return new CPU buffers of a module by name, filled by `owner._init_weights`.

    Buffers that this method does not fill are NaN.
    """
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
