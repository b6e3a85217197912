"""Model families: `find_family` returns the functions by which models are parallelized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from moecore.base.options.indexer import IndexerConfig
from moecore.base.options.precision import Recipe
from moecore.families.adapters import replace_blocks
from moecore.families.fp32_modules import set_dtypes
from moecore.families.transformers import lora, stock
from moecore.families.transformers.attention import use_causal_attention
from moecore.families.transformers.blocks import find_hf_adapter, get_refusal_reason
from moecore.families.transformers.context import CausalContext
from moecore.families.transformers.experts import hook_vision_experts
from moecore.families.transformers.fused_modules import LAYER, fuse_hyper_connections, fuse_norms
from moecore.families.transformers.guards import (
    guard_models,
    refuse_accelerate,
    refuse_lost_router_logits,
    warn_about_cache,
)
from moecore.families.transformers.head import find_plain_heads, fuse_loss
from moecore.families.transformers.log_probs import accept_log_prob_losses
from moecore.families.transformers.pipeline import StagedCausal
from moecore.families.transformers.row_adapters import accept_adapter_ids
from moecore.families.transformers.rows import hook_moe_layers
from moecore.families.transformers.sparse_attention import add_indexer_losses, find_sparse_attention
from moecore.families.transformers.tensor_parallel import TensorParallelTransformer
from moecore.models.head import Head
from moecore.moe.layer import RoutedLayer
from moecore.packing.collate import PackedBatch
from moecore.parallel.model.family import Adapter, Family, has_no_empty_tensor
from moecore.parallel.pipeline.stages import StagedModel


class ProtocolFamily(Family):
    """The model-specific functions of `parallelize_moe` for models that implement protocols."""

    @override
    def swap_blocks(
        self, model: nn.Module, adapters: Mapping[type, Adapter]
    ) -> dict[str, RoutedLayer]:
        """Replace MoE blocks in place by MoE layers; return {qualified name: MoE layer}."""
        return replace_blocks(model, adapters, lambda _: None, lambda _: None)

    @override
    def set_dtypes(self, model: nn.Module, dtype: torch.dtype | None) -> frozenset[str]:
        return set_dtypes(model, dtype)

    @override
    def get_head_shapes(self, model: nn.Module) -> Sequence[tuple[int, int]]:
        """Return [vocab_size, dim] of each output projection (`Head`)."""
        configs = (m.config for m in model.modules() if isinstance(m, Head))
        return [(config.vocab_size, config.dim) for config in configs]

    @override
    def fuse_loss(self, model: nn.Module, recipe: Recipe | None) -> None:
        """Set the FP8 recipe of each `Head`'s loss; None = computed in the weight's dtype."""
        for module in model.modules():
            if isinstance(module, Head):
                module.loss_recipe = recipe

    @override
    def install_guards(
        self, model: nn.Module, *, wrapper: nn.Module, warns_about_cache: bool
    ) -> None:
        refuse_accelerate(model)
        lora.refuse_peft_methods(wrapper)


class TransformersFamily(ProtocolFamily):
    """The model-specific functions of `parallelize_moe` for transformers models, also with peft."""

    @override
    def unwrap_peft(self, model: nn.Module) -> nn.Module:
        return lora.unwrap_peft(model)

    @override
    def swap_blocks(
        self, model: nn.Module, adapters: Mapping[type, Adapter]
    ) -> dict[str, RoutedLayer]:
        """Replace MoE blocks in place by MoE layers with peft's LoRA; return {name: MoE layer}."""
        with lora.unwrap_experts(model) as wrapped:
            layers = replace_blocks(model, adapters, find_hf_adapter, get_refusal_reason)
            lora.adapt_experts(wrapped, layers)
        return layers

    @override
    def prepare_for_sharding(self, model: nn.Module) -> None:
        """Add hooks that pass padding and documents to MoE layers, and fuse norms, in place."""
        refuse_lost_router_logits(model)
        hook_moe_layers(model)
        hook_vision_experts(model)
        accept_log_prob_losses(model)
        if hasattr(model, "peft_config"):
            accept_adapter_ids(model)
        fuse_norms(model)
        fuse_hyper_connections([m for m in model.modules() if stock.is_stock_forward(m, LAYER)])

    @override
    def has_tokens(self, inputs: Mapping[str, Any], depth: int = 0) -> bool | Tensor:
        """Return whether any token is not padding; a 0-dim bool tensor if `inputs` has a mask."""
        mask_BT = inputs.get("padding_mask")
        if mask_BT is not None:
            result: bool | Tensor = ~mask_BT.all()
            return result
        mask = inputs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            return mask.any()
        return has_no_empty_tensor(inputs, "input_ids", "inputs_embeds")

    @override
    def make_forward_arguments(self, batch: PackedBatch) -> dict[str, Any]:
        """Return a transformers forward's arguments for a packed batch: no labels and no cache."""
        names = ("input_ids", "position_ids", "padding_mask", "cu_seqlens", "max_seqlen")
        inputs: dict[str, Any] = {n: batch[n] for n in names}  # type: ignore[literal-required]
        return inputs | {"use_cache": False}

    @override
    def get_vocab_size(self, model: nn.Module) -> int | None:
        """Return the text decoder's vocabulary size; None = its config has none."""
        config: Any = getattr(self.unwrap_peft(model), "config", None)
        if not hasattr(config, "get_text_config"):
            return super().get_vocab_size(model)
        size: int | None = getattr(config.get_text_config(), "vocab_size", None)
        return size

    @override
    def disable_adapters(self, model: nn.Module) -> AbstractContextManager[None]:
        if lora.unwrap_peft(model) is model:
            return super().disable_adapters(model)
        return lora.disable_adapters(model)

    @override
    def make_staged_model(self, model: nn.Module) -> StagedModel:
        """Wrap a causal language model as `StagedCausal` unless it has `stage_parts` itself."""
        is_causal = hasattr(model, "get_output_embeddings") and not hasattr(model, "stage_parts")
        return StagedCausal(model) if is_causal else super().make_staged_model(model)

    @override
    def make_tensor_parallel_model(self, model: nn.Module) -> Any:
        if hasattr(model, "apply_tensor_parallel"):
            return model
        return TensorParallelTransformer(model)

    @override
    def check_tensor_parallel(self, model: nn.Module, tp: int) -> None:
        owner = self.make_tensor_parallel_model(model)
        if isinstance(owner, TensorParallelTransformer):
            owner.check_degree(tp)

    @override
    def make_context_parallel_model(self, model: nn.Module) -> Any:
        """Wrap a causal language model as `CausalContext`; return any other model unchanged."""
        if any(hasattr(model, f"apply_context_{suffix}") for suffix in ("parallel", "groups")):
            return model
        attributes = ("loss_function", "get_output_embeddings")
        is_causal = all(hasattr(type(model), name) for name in attributes)
        return CausalContext(model) if is_causal else model

    @override
    def find_indexers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return layers without attention sinks that have an indexer, which selects keys."""
        layers = [layer for layer in find_sparse_attention(model) if layer.indexer is not None]
        return [layer for layer in layers if not hasattr(layer, "sinks")]

    @override
    def add_indexer_losses(self, model: nn.Module, config: IndexerConfig) -> None:
        """Make attention causal; add the loss that trains indexers (they select keys), in place."""
        for outer in stock.find_outermost_models(model):
            use_causal_attention(outer)
        add_indexer_losses(model, config)

    @override
    def get_head_shapes(self, model: nn.Module) -> Sequence[tuple[int, int]]:
        """Return [vocab_size, dim] of each head that is a linear without bias."""
        return [(head.out_features, head.in_features) for _, head in find_plain_heads(model)]

    @override
    def fuse_loss(self, model: nn.Module, recipe: Recipe | None) -> None:
        """Compute head and training loss together in chunks of tokens, in place."""
        fuse_loss(model, recipe)

    @override
    def install_guards(
        self, model: nn.Module, *, wrapper: nn.Module, warns_about_cache: bool
    ) -> None:
        """Make methods that need full parameters raise; `warns_about_cache` adds cache warnings."""
        super().install_guards(model, wrapper=wrapper, warns_about_cache=warns_about_cache)
        guard_models(model)
        if warns_about_cache:
            warn_about_cache(model)


def find_family(model: nn.Module) -> Family:
    """Return `TransformersFamily` if a module is from transformers, otherwise `ProtocolFamily`."""
    of_transformers = any(
        stock.is_transformers_module(module) or stock.is_pretrained(module)
        for module in model.modules()
    )
    return TransformersFamily() if of_transformers else ProtocolFamily()


def swap_blocks(model: nn.Module, adapters: Mapping[type, Adapter]) -> dict[str, RoutedLayer]:
    """Replace MoE blocks in place by MoE layers; return {qualified name: MoE layer}."""
    return find_family(model).swap_blocks(model, adapters)
