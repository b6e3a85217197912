"""Dense linears in FP8, and experts that are stored in it."""

from moecore.precision.stored import store_experts_in_fp8

__all__ = ["store_experts_in_fp8"]
