"""Plain: models that declare what moecore asks of them, such as its own decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import override

from moecore.families.adapters import replace_blocks
from moecore.families.kept_fp32 import kept_fp32
from moecore.families.transformers.guards import refuse_accelerate
from moecore.moe.layer import RoutedLayer
from moecore.parallel.family import Adapter, Family
from moecore.parallel.pipeline.stages import StagedModel


class Plain(Family):
    """A `Family` that knows nothing of its models."""

    @override
    def unwrapped(self, model: nn.Module) -> nn.Module:
        return model

    @override
    def swap_blocks(
        self, model: nn.Module, adapters: Mapping[type, Adapter]
    ) -> dict[str, RoutedLayer]:
        return replace_blocks(model, adapters, lambda _: None, lambda _: None)

    @override
    def swapped(self, model: nn.Module) -> None:
        pass

    @override
    def fp32_names(self, model: nn.Module, dtype: torch.dtype | None) -> frozenset[str]:
        return kept_fp32(model, dtype)

    @override
    def staged(self, model: nn.Module) -> StagedModel:
        if not hasattr(model, "stage_parts"):
            raise NotImplementedError(
                f"model ({type(model).__name__}) must be a Decoder or a causal language model of "
                "transformers, or have stage_parts, to be cut to stages"
            )
        return cast(StagedModel, model)

    @override
    def context(self, model: nn.Module) -> Any:
        return model

    @override
    def attached(self, model: nn.Module, *, wrapper: nn.Module, drops_cache: bool) -> None:
        refuse_accelerate(model)
