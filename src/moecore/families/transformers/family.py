"""Transformers: the family of models with modules of transformers, also with adapters of peft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from typing_extensions import override

from moecore.families.adapters import replace_blocks
from moecore.families.plain import Plain
from moecore.families.transformers.blocks import find_hf_adapter, why_refused
from moecore.families.transformers.context import CausalContext
from moecore.families.transformers.guards import refuse_save_pretrained, warn_about_cache
from moecore.families.transformers.lora import (
    adapt_experts,
    adapted,
    experts_unwrapped,
    refuse_peft_methods,
)
from moecore.families.transformers.outputs import refuse_lost_outputs
from moecore.families.transformers.pipeline import StagedCausal
from moecore.families.transformers.rows import tell_layers
from moecore.moe.layer import RoutedLayer
from moecore.parallel.family import Adapter
from moecore.parallel.pipeline.stages import StagedModel


class Transformers(Plain):
    """A `Family`; methods that a model declares itself take precedence."""

    @override
    def unwrapped(self, model: nn.Module) -> nn.Module:
        return adapted(model)

    @override
    def swap_blocks(
        self, model: nn.Module, adapters: Mapping[type, Adapter]
    ) -> dict[str, RoutedLayer]:
        with experts_unwrapped(model) as wrapped:
            layers = replace_blocks(model, adapters, find_hf_adapter, why_refused)
            adapt_experts(wrapped, layers)
        return layers

    @override
    def swapped(self, model: nn.Module) -> None:
        refuse_lost_outputs(model)
        tell_layers(model)

    @override
    def staged(self, model: nn.Module) -> StagedModel:
        is_causal = hasattr(model, "get_output_embeddings") and not hasattr(model, "stage_parts")
        return StagedCausal(model) if is_causal else super().staged(model)

    @override
    def context(self, model: nn.Module) -> Any:
        if any(hasattr(model, f"apply_context_{what}") for what in ("parallel", "groups")):
            return model
        needed = ("loss_function", "get_output_embeddings")
        is_causal = all(hasattr(type(model), name) for name in needed)
        return CausalContext(model) if is_causal else model

    @override
    def attached(self, model: nn.Module, *, wrapper: nn.Module, drops_cache: bool) -> None:
        super().attached(model, wrapper=wrapper, drops_cache=drops_cache)
        refuse_save_pretrained(model)
        if drops_cache:
            warn_about_cache(model)
        refuse_peft_methods(wrapper)
