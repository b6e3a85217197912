"""Checkpoints of other trainers: torch.distributed.checkpoint (DCP), plain or of Megatron-Core.

Names are imported on first use, as those of `moecore.hf` are.
"""

from importlib import import_module
from typing import Any

_HOMES = {"dcp_to_native": "convert", "native_to_dcp": "convert"}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
