"""moecore: PyTorch-native Mixture-of-Experts training."""

from moecore.config import BalanceConfig, CapacityConfig, MoEConfig, ParallelConfig
from moecore.fsdp import FSDPOptions, clip_grad_norm_
from moecore.mesh import Meshes, build_meshes
from moecore.moe.dispatch.exchange import ExchangeError
from moecore.moe.dispatch.nvlink_options import NVLinkOptions
from moecore.moe.layer import MoELayer
from moecore.moe.state import moe_state
from moecore.parallelize import parallelize_moe

__version__ = "0.1.0"

__all__ = [
    "BalanceConfig",
    "CapacityConfig",
    "ExchangeError",
    "FSDPOptions",
    "Meshes",
    "MoEConfig",
    "MoELayer",
    "NVLinkOptions",
    "ParallelConfig",
    "build_meshes",
    "clip_grad_norm_",
    "moe_state",
    "parallelize_moe",
]
