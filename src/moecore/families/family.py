"""The family of a model: `family_of` finds its record, `swap_blocks` replaces its MoE blocks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from moecore.families.plain import Plain
from moecore.families.transformers.family import Transformers
from moecore.families.transformers.stock import is_hf, is_pretrained
from moecore.moe.layer import RoutedLayer
from moecore.parallel.family import Adapter, Family


def family_of(model: nn.Module) -> Family:
    """Return a model's family: `Transformers` if any of its modules is transformers' own."""
    of_transformers = any(is_hf(module) or is_pretrained(module) for module in model.modules())
    return Transformers() if of_transformers else Plain()


def swap_blocks(model: nn.Module, adapters: Mapping[type, Adapter]) -> dict[str, RoutedLayer]:
    """Replace MoE blocks in place; return all MoE layers by qualified name."""
    return family_of(model).swap_blocks(model, adapters)
