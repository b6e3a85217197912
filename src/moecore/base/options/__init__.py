"""Every record of options, each checked where it is made."""

from moecore.base.options.context import ContextOptions
from moecore.base.options.dispatch import CloneOptions, DispatcherName, NVLinkOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.layer import BalanceConfig, CapacityConfig, MoEConfig
from moecore.base.options.memory import MemoryOptions, StashOptions
from moecore.base.options.precision import Precision, PrecisionName, Recipe

__all__ = [
    "BalanceConfig",
    "CapacityConfig",
    "CloneOptions",
    "ContextOptions",
    "DispatcherName",
    "FSDPOptions",
    "MemoryOptions",
    "MoEConfig",
    "NVLinkOptions",
    "Precision",
    "PrecisionName",
    "Recipe",
    "StashOptions",
]
