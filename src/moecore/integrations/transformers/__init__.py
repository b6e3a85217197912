"""transformers' Trainer and TRL's, and experts by name (docs/transformers.md)."""

from typing import TYPE_CHECKING, Any

from moecore.integrations.transformers.experts import register_experts

if TYPE_CHECKING:
    from moecore.integrations.transformers.trainer import MoETrainer

__all__ = ["MoETrainer", "register_experts"]


def __getattr__(name: str) -> Any:
    """Import `MoETrainer` at its first use, because it needs accelerate."""
    if name != "MoETrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from moecore.integrations.transformers.trainer import MoETrainer

    return MoETrainer
