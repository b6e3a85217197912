"""Optimizers: AdamW in one launch, with moments of half the size if asked."""

from moecore.optim.adamw import AdamW

__all__ = ["AdamW"]
