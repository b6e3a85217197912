"""Errors and warnings for calls of transformers that a parallelized model cannot execute."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.families.transformers import stock
from moecore.moe.layer import MoELayer, RoutedLayer

# Arguments of `Decoder.forward` that transformers has under another name, or moecore elsewhere.
NATIVE = {
    "tokens_BT": "input_ids",
    "labels_BT": "labels",
    "padding_mask_BT": "attention_mask, or as padding_mask (True = padding)",
    "hidden": "inputs_embeds",
    "cp": "ParallelConfig.cp, or parallelize with ContextOptions(dynamic=True)",
    "stage": "parallelize_moe(pipeline=...)",
}
ROUTER_LOGITS = "output_router_logits"  # argument of a forward


def guard_models(model: nn.Module) -> None:
    """Make transformers models raise if they save shards or receive arguments of `Decoder`."""
    for module in model.modules():
        if stock.is_pretrained(module):
            hf: Any = module
            hf.save_pretrained = partial(_save_pretrained, hf.save_pretrained)
            if hasattr(hf, "generate"):
                hf.generate = partial(_run_generate, hf.generate)
            hf.register_forward_pre_hook(_refuse_decoder_arguments, with_kwargs=True)


def _save_pretrained(
    save: Callable[..., Any],
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Mapping[str, Tensor] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the class's `save`; refuse sharded tensors without `distributed_checkpoint`."""
    is_unsharded = state_dict and not any(isinstance(t, DTensor) for t in state_dict.values())
    if not is_unsharded and not kwargs.get("distributed_checkpoint"):
        raise NotImplementedError(
            f"state_dict ({'sharded' if state_dict else None}) of save_pretrained must hold the "
            "parallelized model's whole tensors: use moecore.io.export_hf(model, path)"
        )
    return save(save_directory, is_main_process, state_dict, *args, **kwargs)


def _run_generate(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    kwargs.setdefault("synced_gpus", dist.is_initialized() and dist.get_world_size() > 1)
    return generate(*args, **kwargs)


def _refuse_decoder_arguments(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    unknown = NATIVE.keys() - stock.get_forward_parameters(type(module).forward).keys()
    for name in sorted(kwargs.keys() & unknown):
        raise ValueError(
            f"{name} must be given as {NATIVE[name]} to {type(module).__name__}: it is an argument "
            "of moecore's Decoder, which models of transformers drop"
        )


def warn_about_cache(model: nn.Module) -> None:
    """Make base models warn if they use a key/value cache in training."""
    # torch.compile recompiles a layer for each index in the cache, up to a limit of 8; further
    # layers run in eager mode. Activations that the cache references are not recomputed.
    for base in _list_base_models(model):
        base.register_forward_pre_hook(_warn_if_cache_is_used, with_kwargs=True)


def _warn_if_cache_is_used(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a base model: warn if it trains with a key/value cache."""
    use_cache = stock.bind_arguments(module, args, kwargs).get("use_cache")
    use_cache = getattr(module.config, "use_cache", False) if use_cache is None else use_cache
    if use_cache and module.training and torch.is_grad_enabled():
        warnings.warn(
            f"use_cache (True) of {type(module).__name__} must be False to train it with "
            "DenseOptions(compile=True), or most of its layers stay uncompiled, and with "
            "MemoryOptions, or attention keeps all: pass use_cache=False, or set "
            "model.config.use_cache",
            stacklevel=2,
        )


def refuse_lost_router_logits(model: nn.Module) -> None:
    """Make forwards raise if they request router logits that would not be recorded."""
    for base in _list_base_models(model):  # transformers records in these, not with the loss
        base.register_forward_hook(_check_router_logits, with_kwargs=True)


def _list_base_models(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that are transformers base models (models without a head)."""
    modules = filter(stock.is_transformers_module, model.modules())
    return [module for module in modules if getattr(module, "base_model", None) is module]


def _check_router_logits(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook: raise NotImplementedError if requested router logits were not recorded."""
    layers_of = (m for m in module.modules() if isinstance(m, RoutedLayer))
    # transformers records no logits of layers with hash routing.
    recordable = [m for m in layers_of if m.config.assignment != "hash"]
    keywords = stock.bind_arguments(module, args, kwargs)
    if not recordable or not keywords.get(
        ROUTER_LOGITS, getattr(module.config, ROUTER_LOGITS, False)
    ):
        return  # the model was not parallelized, or the caller requests no logits
    # A model whose layers are RoutedExperts still has its own routers.
    layers = len(recordable) if any(isinstance(m, MoELayer) for m in recordable) else 0
    recorded = len(getattr(output, "router_logits", None) or ())
    if layers and recorded != layers:
        raise NotImplementedError(
            f"router_logits recorded ({recorded}) must equal the MoE layers ({layers}) of "
            f"{type(module).__name__}: set {ROUTER_LOGITS} to False and use "
            "parallelize_moe(moe={'balance': BalanceConfig(...)})"
        )


class ShardedDeviceMap(dict[str, str]):
    """An empty device map whose length raises, so that accelerate and Trainer refuse a model.

    accelerate calls `len(model.hf_device_map)` before it wraps a model. `generate` and other code
    read an empty map. `name` is the model's class in the error.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __len__(self) -> NoReturn:
        raise ValueError(
            f"model ({self._name}) must not be wrapped by Trainer or accelerate, because "
            "parallelize_moe has sharded it: use moecore.integrations.transformers.MoETrainer, or "
            "moecore.TrainStep in a loop of your own"
        )


def refuse_accelerate(model: nn.Module) -> None:
    """Make accelerate and Trainer raise if they receive `model` or a transformers model in it."""
    for module in model.modules():
        if module is model or stock.is_pretrained(module):
            module.hf_device_map = ShardedDeviceMap(type(module).__name__)  # type: ignore[assignment]
