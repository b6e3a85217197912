"""How an existing model's MoE block becomes a MoELayer and keeps its parameter names."""

from moecore.adapters.adopt import adopt
from moecore.adapters.base import Adapter
from moecore.adapters.hf_attention import use_causal_attention

__all__ = ["Adapter", "adopt", "use_causal_attention"]
