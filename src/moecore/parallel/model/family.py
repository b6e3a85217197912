"""`Family`: the support for one kind of model, such as transformers models.

`moecore.families.family_of(model)` returns the family of a model. Other packages call its methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moecore.attention.context_parallel.local_tokens import ContextParallel
from moecore.base.copies import copy_modules, make_meta_parameter
from moecore.base.options.context import ContextOptions
from moecore.base.options.indexer import IndexerConfig
from moecore.base.options.precision import Recipe
from moecore.moe.layer import RoutedLayer
from moecore.packing.collate import PackedBatch
from moecore.parallel.pipeline.stages import StagedModel

Adapter = Callable[[nn.Module, nn.Module], RoutedLayer]
ADAPTER_FIX = "pass adapters={MyBlock: fn}, whose key is the class itself"  # for a wrong type


class Family(Protocol):
    """The operations of moecore on models of one kind, besides sharding.

    The default methods are for models that have moecore's own attributes, such as `Decoder`.
    """

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module to shard: the model without a wrapper such as peft's."""
        return model

    def swap_blocks(
        self, model: nn.Module, adapters: Mapping[type, Adapter]
    ) -> dict[str, RoutedLayer]:
        """Replace MoE blocks by MoE layers in place; return all MoE layers by qualified name."""

    def copy_with_layers(
        self, model: nn.Module, adapters: Mapping[type, Adapter]
    ) -> tuple[nn.Module, dict[str, RoutedLayer]]:
        """Return a copy on the meta device with replaced MoE blocks, and its MoE layers by name."""
        copy = copy_modules(model, make_meta_parameter)[model]
        return copy, self.swap_blocks(copy, adapters)

    def prepare(self, model: nn.Module) -> None:
        """Change a model after its MoE blocks were replaced, before parameters are sharded."""
        return

    def set_dtypes(self, model: nn.Module, dtype: torch.dtype | None) -> frozenset[str]:
        """Prepare tensors for compute in a dtype; return the names of tensors that stay in fp32."""

    def staged(self, model: nn.Module) -> StagedModel:
        """Return the model's `StagedModel`; raise a NotImplementedError if it has no stages."""
        if not hasattr(model, "stage_parts"):
            raise NotImplementedError(
                f"model ({type(model).__name__}) must be a Decoder or a causal language model of "
                "transformers, or have stage_parts, to be cut to stages"
            )
        return cast(StagedModel, model)

    def tensor_parallel(self, model: nn.Module) -> Any:
        """Return the object that applies tensor parallelism if it is a `TensorParallelModel`."""
        return model

    def check_tensor_parallel(self, model: nn.Module, tp: int) -> None:
        """Raise a ValueError if tensor parallelism over `tp` ranks does not fit a model."""
        return  # `Decoder.apply_tensor_parallel` checks its config

    def context(self, model: nn.Module) -> Any:
        """Return the object that may be a `ContextParallelModel` or a `DynamicContextModel`."""
        return model

    def indexers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the layers whose sparse attention has a trainable indexer."""
        layers = (m for m in model.modules() if hasattr(m, "train_indexer"))
        return [layer for layer in layers if layer.indexer is not None]

    def train_indexers(self, model: nn.Module, config: IndexerConfig) -> None:
        """Train the indexers of a model, each with the `aux_loss` of its layer."""
        for layer in self.indexers(model):
            cast(Any, layer).train_indexer(config)

    def has_tokens(self, inputs: Mapping[str, Any]) -> bool | Tensor:
        """Return whether a forward with these arguments has tokens that are not padding."""
        mask_BT = inputs.get("padding_mask_BT")
        return has_rows(inputs, "tokens_BT") if mask_BT is None else ~mask_BT.all()

    def arguments(self, batch: PackedBatch) -> dict[str, Any]:
        """Return a packed batch as keyword arguments of a forward, without its labels."""
        return {
            "tokens_BT": batch["input_ids"],
            "padding_mask_BT": batch["padding_mask"],
            "cu_seqlens": batch["cu_seqlens"],
            "max_seqlen": batch["max_seqlen"],
        }

    def vocab_size(self, model: nn.Module) -> int | None:
        """Return `config.vocab_size` of a model, or None."""
        size = getattr(getattr(model, "config", None), "vocab_size", None)
        return size if isinstance(size, int) else None

    def disable_adapters(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which adapters are disabled; raise a ValueError without adapters."""
        raise ValueError(
            f"model ({type(model).__name__}) must have adapters of peft to be its own reference: "
            "pass a reference model"
        )

    def head_shapes(self, model: nn.Module) -> Sequence[tuple[int, int]]:
        """Return the shapes [V, D] of the heads whose loss is computed in chunks of tokens."""

    def fuse_loss(self, model: nn.Module, recipe: Recipe | None) -> None:
        """Make the model compute its loss in chunks of tokens; the recipe is for FP8 heads."""

    def finish(self, model: nn.Module, *, wrapper: nn.Module, drops_cache: bool) -> None:
        """Install guards for methods that a parallelized model does not support.

        Args:
            model: the sharded module.
            wrapper: the caller's module, which may wrap it.
            drops_cache: whether forwards must not return cached keys and values.
        """


def has_rows(inputs: Mapping[str, Any], *names: str) -> bool:
    """Return whether the arguments with these names are not empty tensors."""
    values = (inputs.get(name) for name in names)
    return all(value.numel() > 0 for value in values if isinstance(value, Tensor))


@runtime_checkable
class TensorParallelModel(Protocol):
    """A model that supports tp > 1 by sharding its dense parameters itself."""

    def apply_tensor_parallel(self, tp_mesh: DeviceMesh) -> Any:
        """Shard all parameters except routed experts over a 1-D mesh, in place."""


@runtime_checkable
class ContextParallelModel(Protocol):
    """A model that supports cp > 1.

    Its MoE layers receive the zigzag slice of tokens (`kernels/zigzag.py`), and `cu_seqlens` of the
    full rows.
    """

    def context_options(self, options: ContextOptions, cp: int, tp: int) -> ContextOptions:
        """Return options with a resolved `way`; raise a ValueError if the heads do not fit."""

    def apply_context_parallel(self, cp: ContextParallel) -> None:
        """Make forwards receive full rows and compute on this rank's slice of tokens."""


@runtime_checkable
class DynamicContextModel(Protocol):
    """A model that supports `ContextOptions.dynamic`: each forward has its own cp."""

    def context_options(self, options: ContextOptions, cp: int, tp: int) -> ContextOptions:
        """As of `ContextParallelModel`."""

    def apply_context_groups(self, groups: Mapping[int, ContextParallel]) -> None:
        """Set the `ContextParallel` for each cp > 1 that a forward can have."""
