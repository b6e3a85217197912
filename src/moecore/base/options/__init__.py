"""Every record of options, each checked where it is made."""

from moecore.base.options.context import ContextOptions as ContextOptions
from moecore.base.options.dispatch import (
    CloneOptions as CloneOptions,
    DispatcherName as DispatcherName,
    NVLinkOptions as NVLinkOptions,
)
from moecore.base.options.fsdp import FSDPOptions as FSDPOptions
from moecore.base.options.layer import (
    BalanceConfig as BalanceConfig,
    CapacityConfig as CapacityConfig,
    MoEConfig as MoEConfig,
)
from moecore.base.options.memory import MemoryOptions as MemoryOptions, StashOptions as StashOptions
from moecore.base.options.precision import (
    Precision as Precision,
    PrecisionName as PrecisionName,
    Recipe as Recipe,
)
