"""transformers' Trainer and TRL's (docs/trainer.md), and experts by name (docs/transformers.md)."""

from moecore.integrations.transformers.experts import register_experts
from moecore.integrations.transformers.trainer import MoETrainer

__all__ = ["MoETrainer", "register_experts"]
