"""How an existing model's MoE block becomes a MoELayer and keeps its parameter names."""

from moecore.adapters.adopt import adopt
from moecore.adapters.base import Adapter

__all__ = ["Adapter", "adopt"]
