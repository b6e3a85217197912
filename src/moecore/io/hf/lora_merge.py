"""Adapters of a parallelized peft model, added to the weights that they adapt.

Each rank gathers one A and B at a time and adds s * B A to its own part of the weight: the base
model is never whole anywhere. Afterwards peft's layers and `Experts.lora` are marked as merged, so
that forward reads the weights alone, and `export_hf` writes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecore.base.fields import check_arguments
from moecore.families.transformers.lora import is_tuner_layer, refuse_unmerging
from moecore.io.checkpoint.ranks import on_every_rank
from moecore.io.hf.target import local_part
from moecore.moe.experts import Experts
from moecore.moe.low_rank import LowRank
from moecore.moe.params import clean_name, global_indices
from moecore.train.rerun import drop_step


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add the active adapters to the weights, in place. Collective.

    As peft's `merge_adapter`, on shards: outputs stay the same but for rounding to the weights'
    dtype, and adapters have no part in forward any more. Adapters keep their values, and peft
    cannot disable them or choose others from then on. What a half-done step has left is dropped
    (`TrainStep.drop`).

    Args:
        model: a PeftModel, plain or parallelized, with storage.

    Raises:
        ValueError: on every rank, for a model without adapters that are active and not merged.
        NotImplementedError: for adapters other than LoRA on linear layers, embeddings and experts,
            before anything is merged.
    """
    check_arguments(merge_adapters, locals())
    on_every_rank(lambda: _check(model))
    drop_step(model)
    for module in model.modules():
        if isinstance(module, Experts):
            for name, update in module.updates.items():
                _merge_experts(module, name, update)  # type: ignore[arg-type]
            module.reader.drop_copies()
        elif is_tuner_layer(module) and not isinstance(module, LowRank):
            _merge_dense(module)
    refuse_unmerging(model)


def refuse_unmerged(model: nn.Module) -> None:
    """Raise ValueError for a model whose forward adds adapters to weights."""
    for name in unmerged(model):
        raise ValueError(
            f"adapters of {clean_name(name)} must be merged into the weights, which are all "
            "that is written: call moecore.io.merge_adapters(model) first, or save_adapters"
        )


def unmerged(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers whose forward adds adapters to their weights, by name."""
    return {n: m for n, m in model.named_modules() if is_tuner_layer(m) and _waiting(m)}


def _check(model: nn.Module) -> None:
    waiting = unmerged(model).values()
    if not waiting:
        raise ValueError(
            f"model ({type(model).__name__}) must have active adapters that are not merged: attach "
            "them by peft.get_peft_model before parallelize_moe"
        )
    for layer in waiting:
        _check_kind(layer)


def _check_kind(layer: Any) -> None:
    variants = any(getattr(layer, "lora_variant", {}).get(n) for n in _waiting(layer))
    biased = any(getattr(layer, "lora_bias", {}).get(n) for n in _waiting(layer))
    is_known = isinstance(layer, LowRank) or _weight_kind(layer) is not None
    if variants or biased or not is_known:
        raise NotImplementedError(
            f"{type(layer).__name__} with LoraConfig.use_dora, lora_bias or another variant must "
            "not be merged here: save_adapters, and merge by peft on the stock model"
        )


def _weight_kind(layer: Any) -> str | None:
    from peft.tuners.lora import Embedding, Linear

    return "linear" if type(layer) is Linear else "embedding" if type(layer) is Embedding else None


def _waiting(layer: Any) -> list[str]:
    """Return the adapters that a layer's forward adds."""
    if isinstance(layer, LowRank):
        return layer.in_use
    if layer.disable_adapters or layer.merged:
        return []
    held = {name for kind in layer.adapter_layer_names for name in getattr(layer, kind)}
    return [name for name in layer.active_adapters if name in held]


def _merge_dense(layer: Any) -> None:
    for adapter in _waiting(layer):
        if _weight_kind(layer) == "linear":
            a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        else:
            a, b = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
        delta = (_whole(b) @ _whole(a)) * layer.scaling[adapter]
        if _weight_kind(layer) == "embedding" or layer.fan_in_fan_out:
            delta = delta.T
        weight = layer.get_base_layer().weight
        indices = global_indices(weight)
        local_part(weight).add_(_select(delta, indices))
        layer.merged_adapters.append(adapter)


def _merge_experts(experts: Experts, name: str, update: Any) -> None:
    weight = getattr(experts, name)
    local, (own, *rest) = local_part(weight), global_indices(weight)
    for adapter in _waiting(update):
        a_ErI, b_EOr = _whole(update.lora_A[adapter]), _whole(update.lora_B[adapter])
        for place, e in enumerate(own.tolist()):  # one expert at a time: its matrix is formed
            delta = (b_EOr[e] @ a_ErI[e]) * update.scaling[adapter]
            delta = delta.T if experts.layout.transposed else delta
            local[place].add_(_select(delta.reshape(weight.shape[1:]), rest))
        update.merged_adapters.append(adapter)


def _select(whole: Tensor, indices: list[Tensor]) -> Tensor:
    """Return what belongs to a shard with these global indices."""
    for dim, index in enumerate(indices):
        if index.numel() != whole.shape[dim]:
            whole = whole.index_select(dim, index.to(whole.device))
    return whole


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
