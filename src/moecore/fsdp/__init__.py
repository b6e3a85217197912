"""FSDP2 on two meshes: units, gradient scale, prefetch, clipping across meshes."""

from moecore.fsdp.clip import GradientNorm, clip_grad_norm_
from moecore.fsdp.shard import FSDPOptions

__all__ = ["FSDPOptions", "GradientNorm", "clip_grad_norm_"]
