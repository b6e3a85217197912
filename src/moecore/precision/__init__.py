"""Dense linears that multiply in FP8, MXFP8 or NVFP4, and experts that are stored in FP8."""

from moecore.precision.stored import store_experts_in_fp8

__all__ = ["store_experts_in_fp8"]
