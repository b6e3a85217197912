"""Family: what moecore does to a live model of one kind beside sharding it, and what it asks of it.

`moecore.families.family_of(model)` chooses the record; the rooms below take what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moecore.attention.context_parallel.held import ContextParallel
from moecore.base.copies import copy_modules, on_meta
from moecore.base.options.context import ContextOptions
from moecore.base.options.indexer import IndexerConfig
from moecore.base.options.precision import Recipe
from moecore.moe.layer import RoutedLayer
from moecore.packing.collate import PackedBatch
from moecore.parallel.pipeline.stages import StagedModel

Adapter = Callable[[nn.Module, nn.Module], RoutedLayer]
ADAPTER_FIX = "pass adapters={MyBlock: fn}, whose key is the class itself"  # of a wrong type


class Family(Protocol):
    """What moecore does to models of one kind.

    The methods with a body serve models that declare what moecore asks of them, such as `Decoder`.
    """

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that is sharded: the model without a wrapper that only calls it."""
        return model

    def swap_blocks(
        self, model: nn.Module, adapters: Mapping[type, Adapter]
    ) -> dict[str, RoutedLayer]:
        """Replace MoE blocks in place; return all MoE layers by qualified name."""

    def copy_with_layers(
        self, model: nn.Module, adapters: Mapping[type, Adapter]
    ) -> tuple[nn.Module, dict[str, RoutedLayer]]:
        """Return a copy of a model on meta, its MoE blocks replaced, and the copy's MoE layers."""
        copy = copy_modules(model, on_meta)[model]
        return copy, self.swap_blocks(copy, adapters)

    def prepare(self, model: nn.Module) -> None:
        """Prepare a model whose blocks were swapped, before anything is sharded."""
        return

    def set_dtypes(self, model: nn.Module, dtype: torch.dtype | None) -> frozenset[str]:
        """Let tensors stay fp32 that must in a dtype (None = their own); return their names."""

    def staged(self, model: nn.Module) -> StagedModel:
        """Return what runs pipeline stages; NotImplementedError for a model that cannot be cut."""
        if not hasattr(model, "stage_parts"):
            raise NotImplementedError(
                f"model ({type(model).__name__}) must be a Decoder or a causal language model of "
                "transformers, or have stage_parts, to be cut to stages"
            )
        return cast(StagedModel, model)

    def tensor_parallel(self, model: nn.Module) -> Any:
        """Return what may be a `TensorParallelModel` for a model."""
        return model

    def check_tensor_parallel(self, model: nn.Module, tp: int) -> None:
        """Raise for an unsharded model, its blocks swapped, that tp ranks cannot cut."""
        return  # `Decoder` checks its config, of which every stage has all fields

    def context(self, model: nn.Module) -> Any:
        """Return what may be a `ContextParallelModel` or a `DynamicContextModel` for a model."""
        return model

    def indexers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the layers whose sparse attention has an indexer that can learn."""
        layers = (m for m in model.modules() if hasattr(m, "train_indexer"))
        return [layer for layer in layers if layer.indexer is not None]

    def train_indexers(self, model: nn.Module, config: IndexerConfig) -> None:
        """Let the indexers of a model learn, each as the `aux_loss` of its layer."""
        for layer in self.indexers(model):
            cast(Any, layer).train_indexer(config)

    def has_tokens(self, inputs: Mapping[str, Any]) -> bool | Tensor:
        """Return whether a forward of these keyword arguments has any token but padding."""
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
        """Return the number of token ids of a model; None for one that does not declare it."""
        size = getattr(getattr(model, "config", None), "vocab_size", None)
        return size if isinstance(size, int) else None

    def adapters_off(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which a model runs without its adapters; ValueError without any."""
        raise ValueError(
            f"model ({type(model).__name__}) must have adapters of peft to be its own reference: "
            "pass a reference model"
        )

    def head_shapes(self, model: nn.Module) -> Sequence[tuple[int, int]]:
        """Return [V, D] of the heads whose loss `fuse_loss` has computed in chunks of tokens."""

    def fuse_loss(self, model: nn.Module, recipe: Recipe | None) -> None:
        """Let losses be computed in chunks of tokens, by a recipe, that read logits of all."""

    def finish(self, model: nn.Module, *, wrapper: nn.Module, drops_cache: bool) -> None:
        """Refuse or warn of calls that a parallelized model, `unwrapped`'s, cannot follow."""
        # `wrapper` is the caller's module. `drops_cache`: whether cached keys and values defeat an
        # option.


def has_rows(inputs: Mapping[str, Any], *names: str) -> bool:
    """Return whether no argument of these names is an empty tensor."""
    values = (inputs.get(name) for name in names)
    return all(value.numel() > 0 for value in values if isinstance(value, Tensor))


@runtime_checkable
class TensorParallelModel(Protocol):
    """A model that cuts its own dense parameters: for tp > 1, unless they are DTensors already."""

    def apply_tensor_parallel(self, tp_mesh: DeviceMesh) -> Any:
        """Cut everything but the routed experts over a mesh of one dim, in place."""


@runtime_checkable
class ContextParallelModel(Protocol):
    """A model whose attention communicates over parts of rows: what cp > 1 needs.

    Its MoE layers get the tokens of `kernels/zigzag.py`, and `cu_seqlens` of the whole rows.
    """

    def context_options(self, options: ContextOptions, cp: int, tp: int) -> ContextOptions:
        """Return the way without "auto"; raise ValueError for one that its heads cannot go."""

    def apply_context_parallel(self, cp: ContextParallel) -> None:
        """Take whole rows, and work on the tokens that this rank holds, from now on."""


@runtime_checkable
class DynamicContextModel(Protocol):
    """A model whose forwards have a cp each, which its MoE layers get: `ContextOptions.dynamic`."""

    def context_options(self, options: ContextOptions, cp: int, tp: int) -> ContextOptions:
        """As of `ContextParallelModel`."""

    def apply_context_groups(self, groups: Mapping[int, ContextParallel]) -> None:
        """Take this rank's place in its group of each size > 1, for forwards with that cp."""
