"""`Family`: the support for one kind of model, such as transformers models.

`moecore.families.find_family(model)` returns a model's family. Other packages call its methods.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moecore.attention.context_parallel.local_tokens import ContextParallel
from moecore.attention.sequence import Sequence as Documents
from moecore.attention.sequence import make_packed_sequence
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
    """The operations that depend on the model's class; the defaults suit models like `Decoder`."""

    def unwrap_peft(self, model: nn.Module) -> nn.Module:
        """Return the module to shard: the model inside a wrapper such as peft's `PeftModel`."""
        return model

    def swap_blocks(
        self, model: nn.Module, adapters: Mapping[type, Adapter]
    ) -> dict[str, RoutedLayer]:
        """Replace MoE blocks by MoE layers in place; return {qualified name: MoE layer}."""

    def copy_with_layers(
        self, model: nn.Module, adapters: Mapping[type, Adapter]
    ) -> tuple[nn.Module, dict[str, RoutedLayer]]:
        """Copy a model to meta; return the copy, and the result of `swap_blocks` for the copy."""
        copy = copy_modules(model, make_meta_parameter)[model]
        return copy, self.swap_blocks(copy, adapters)

    def prepare_for_sharding(self, model: nn.Module) -> None:
        """Apply other model-specific changes in place, after `swap_blocks` and before sharding."""
        return

    def set_dtypes(self, model: nn.Module, dtype: torch.dtype | None) -> frozenset[str]:
        """Cast a model in place to compute in `dtype`; return names of tensors that stay fp32."""

    def make_staged_model(self, model: nn.Module) -> StagedModel:
        """Return the model's `StagedModel`; NotImplementedError if it has no pipeline stages."""
        if not hasattr(model, "stage_parts"):
            raise NotImplementedError(
                f"model ({type(model).__name__}) must be a Decoder or a causal language model of "
                "transformers, or have stage_parts, to be cut to stages"
            )
        return cast(StagedModel, model)

    def make_tensor_parallel_model(self, model: nn.Module) -> Any:
        """Return a `TensorParallelModel` of the model; an object of another class = no tp."""
        return model

    def check_tensor_parallel(self, model: nn.Module, tp: int) -> None:
        """Raise a ValueError if the model cannot be sharded over `tp` tensor parallel ranks."""
        return  # `Decoder.apply_tensor_parallel` checks its config

    def make_context_parallel_model(self, model: nn.Module) -> Any:
        """Return a `ContextParallelModel` or `DynamicContextModel`; any other object = no cp."""
        return model

    def find_indexers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the layers whose sparse attention has a trainable indexer."""
        layers = (m for m in model.modules() if hasattr(m, "enable_indexer_training"))
        return [layer for layer in layers if layer.indexer is not None]

    def add_indexer_losses(self, model: nn.Module, config: IndexerConfig) -> None:
        """Add the indexer's loss, with the options `config`, to each layer with an indexer."""
        for layer in self.find_indexers(model):
            cast(Any, layer).enable_indexer_training(config)

    def has_tokens(self, inputs: Mapping[str, Any], depth: int = 0) -> bool | Tensor:
        """Whether a document of forward's arguments has more than `depth` tokens without padding.

        Return a bool or a 0-dim bool tensor.
        """
        mask_BT = inputs.get("padding_mask_BT")
        if not depth:
            return has_no_empty_tensor(inputs, "tokens_BT") if mask_BT is None else ~mask_BT.all()
        tokens_BT, borders = inputs["tokens_BT"], inputs.get("cu_seqlens")
        if mask_BT is None:
            mask_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        sequence = Documents()
        if borders is not None:
            sequence = make_packed_sequence(borders, None, tokens_BT.shape, tokens_BT.device)
        return ~sequence.shift_tokens(mask_BT, depth, True).all()

    def count_predictions(self, model: nn.Module) -> int:
        """Return the number of further tokens that the model's multi-token prediction predicts."""
        configs = (getattr(module, "config", None) for module in model.modules())
        return max(getattr(config, "num_predictions", 0) for config in configs)

    def make_forward_arguments(self, batch: PackedBatch) -> dict[str, Any]:
        """Convert a packed batch to keyword arguments of the model's forward, without labels."""
        return {
            "tokens_BT": batch["input_ids"],
            "padding_mask_BT": batch["padding_mask"],
            "cu_seqlens": batch["cu_seqlens"],
            "max_seqlen": batch["max_seqlen"],
        }

    def get_vocab_size(self, model: nn.Module) -> int | None:
        """Return the vocabulary size of the model's config; None if the config has no size."""
        size = getattr(getattr(model, "config", None), "vocab_size", None)
        return size if isinstance(size, int) else None

    def disable_adapters(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which peft's adapters are disabled; ValueError without adapters."""
        raise ValueError(
            f"model ({type(model).__name__}) must have adapters of peft to be its own reference: "
            "pass a reference model"
        )

    def get_head_shapes(self, model: nn.Module) -> Sequence[tuple[int, int]]:
        """Return (vocabulary size, model dim) of each head whose loss is computed in chunks."""

    def fuse_loss(self, model: nn.Module, recipe: Recipe | None) -> None:
        """Change `model` in place: its forward computes head and loss in chunks of tokens."""

    def install_guards(
        self, model: nn.Module, *, wrapper: nn.Module, warns_about_cache: bool
    ) -> None:
        """Make methods of `model` and its `wrapper` that need unsharded parameters raise errors."""


def has_no_empty_tensor(inputs: Mapping[str, Any], *names: str) -> bool:
    """Whether none of the arguments `names` is an empty tensor; absent arguments do not count."""
    values = (inputs.get(name) for name in names)
    return all(value.numel() > 0 for value in values if isinstance(value, Tensor))


@runtime_checkable
class TensorParallelModel(Protocol):
    """A model with a method that shards its dense parameters, as tp > 1 requires."""

    def apply_tensor_parallel(self, tp_mesh: DeviceMesh) -> Any:
        """Shard all parameters except routed experts over the 1-D mesh `tp_mesh`, in place."""


@runtime_checkable
class ContextParallelModel(Protocol):
    """A model that supports context parallelism (cp > 1).

    Its MoE layers receive this rank's zigzag slice of the tokens (`kernels/zigzag.py`), and the
    `cu_seqlens` of the unsliced sequences.
    """

    def context_options(self, options: ContextOptions, cp: int, tp: int) -> ContextOptions:
        """Return `options` with communication method `way` chosen; ValueError if none fits."""

    def apply_context_parallel(self, cp: ContextParallel) -> None:
        """Make forwards receive full sequences and compute only this rank's slice."""


@runtime_checkable
class DynamicContextModel(Protocol):
    """A model that supports `ContextOptions.dynamic`: each forward has its own cp."""

    def context_options(self, options: ContextOptions, cp: int, tp: int) -> ContextOptions:
        """Return `options` with communication method `way` chosen for this `cp`."""

    def apply_context_groups(self, groups: Mapping[int, ContextParallel]) -> None:
        """Set {cp degree: `ContextParallel`}, one entry for each cp > 1 that a forward may use."""
