"""transformers' Trainer and TRL's, and experts by name (docs/transformers.md).

The names are imported on first use, because `MoETrainer` needs accelerate.
"""

from typing import TYPE_CHECKING

from moecore.base.lazy_names import make_lazy_getattr

_NAMES = {"experts": "register_experts", "trainer": "MoETrainer"}
if TYPE_CHECKING:
    from moecore.integrations.transformers.experts import register_experts as register_experts
    from moecore.integrations.transformers.trainer import MoETrainer as MoETrainer
else:  # type checkers would take any name for granted
    __all__ = [name for names in _NAMES.values() for name in names.split()]
    __getattr__ = make_lazy_getattr(__name__, _NAMES)
