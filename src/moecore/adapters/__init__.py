"""How an existing model's MoE block becomes a MoELayer and keeps its parameter names."""

from moecore.adapters.adopt import adopt, adopt_experts
from moecore.adapters.base import Adapter
from moecore.moe.routed import RoutedExperts

__all__ = ["Adapter", "RoutedExperts", "adopt", "adopt_experts"]
