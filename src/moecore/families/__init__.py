"""Model families: how moecore replaces the MoE blocks of a model and keeps parameter names."""

from moecore.families.adopt import adopt, adopt_experts
from moecore.families.transformers.attention import use_causal_attention
from moecore.moe.routed_experts import RoutedExperts

__all__ = ["RoutedExperts", "adopt", "adopt_experts", "use_causal_attention"]
