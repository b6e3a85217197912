"""Every record of options, each checked where it is made."""

from moecore.base.options.context import ContextOptions as ContextOptions
from moecore.base.options.dispatch import (
    CloneOptions as CloneOptions,
)
from moecore.base.options.dispatch import (
    DispatcherName as DispatcherName,
)
from moecore.base.options.dispatch import (
    NVLinkOptions as NVLinkOptions,
)
from moecore.base.options.fsdp import FSDPOptions as FSDPOptions
from moecore.base.options.layer import (
    BalanceConfig as BalanceConfig,
)
from moecore.base.options.layer import (
    CapacityConfig as CapacityConfig,
)
from moecore.base.options.layer import (
    MoEConfig as MoEConfig,
)
from moecore.base.options.memory import MemoryOptions as MemoryOptions
from moecore.base.options.memory import StashOptions as StashOptions
from moecore.base.options.precision import (
    Precision as Precision,
)
from moecore.base.options.precision import (
    PrecisionName as PrecisionName,
)
from moecore.base.options.precision import (
    Recipe as Recipe,
)
