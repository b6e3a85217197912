"""transformers' Trainer, and TRL's, for models of `parallelize_moe`: see docs/trainer.md."""

from moecore.integrations.transformers.trainer import MoETrainer

__all__ = ["MoETrainer"]
