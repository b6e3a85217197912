"""Merging of LoRA adapters into the weights of a PeftModel, on the shards of each rank.

A merge unshards one pair A, B at a time and adds s * B A to each rank's shard of the weight, in
fp32. Only weights with DoRA are unsharded. A weight in 4 bits does not change, and exports add
s * B A to its dequantised values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.failures import run_and_share_errors
from moecore.base.fields import check_arguments
from moecore.base.params import clean_name, compute_global_indices
from moecore.base.peft_layers import is_dora_linear, is_tuner_layer
from moecore.families.transformers.lora import refuse_unmerging, unwrap_peft
from moecore.io.hf.pieces import get_detached_shard, select_shard, unshard_tensor
from moecore.moe.experts import Experts
from moecore.moe.low_rank import LowRank
from moecore.moe.stored_weights import EXPORT_UPDATE, get_four_bit_blocks
from moecore.precision.stored import refuse_fp8_storage
from moecore.train.rerun import drop_step


@dataclass(frozen=True, slots=True)
class Merge:
    """A weight, its peft layer, and the function that adds active LoRA adapters to its shard."""

    weight: Tensor
    layer: Any
    add: Callable[[Tensor], None]  # changes a tensor like this rank's shard; collective

    def list_tensors(self) -> list[Tensor]:
        """Return the A and B tensors of the layer's active adapters."""
        owners: list[Any] = [getattr(self.layer, kind) for kind in self.layer.adapter_layer_names]
        names = _list_applied_adapters(self.layer)
        parts = [owner[name] for name in names for owner in owners if name in owner]
        return [part if isinstance(part, Tensor) else part.weight for part in parts]

    def list_scaling_factors(self) -> tuple[float, ...]:
        """Return the scaling factor of each active adapter."""
        return tuple(self.layer.scaling[name] for name in _list_applied_adapters(self.layer))


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add the active adapters to the weights of a PeftModel, in place. Collective.

    Weight + scale * B A of all active adapters is computed on shards, in fp32, and rounded once to
    the weight's dtype. DoRA unshards a weight, to scale its rows by their norms. Forward then
    ignores the adapters, and peft cannot unmerge them. A weight in 4 bits does not change: forward
    still computes its adapters, and exports add them to the dequantised values. Gradients and token
    counts of an unfinished step are dropped (`TrainStep.drop`).

    Args:
        model: a PeftModel, plain or parallelized, with storage.

    Raises:
        ValueError: on every rank, for a model without active, unmerged adapters.
        NotImplementedError: before any weight changes, for adapters other than LoRA on linear
            layers, embeddings and experts, or one DoRA adapter on linear layers.
    """
    check_arguments(merge_adapters, locals())
    merges = run_and_share_errors(lambda: _find_active_merges(model))
    drop_step(model)
    for merge in merges:
        if get_four_bit_blocks(merge.weight) is None:
            merge.add(get_detached_shard(merge.weight))
            merge.layer.merged_adapters += _list_applied_adapters(merge.layer)
        elif not isinstance(merge.layer, LowRank):
            _merge_dense_into_exports(merge.layer)
    for module in model.modules():
        if isinstance(module, Experts):
            _merge_into_exports(module)
            module.reader.drop_copies()
    refuse_unmerging(model)


def find_merges(model: nn.Module) -> list[Merge]:
    """Return a `Merge` per weight with active adapters; NotImplementedError if one cannot merge."""
    owners = Counter[Tensor](p for _, p in model.named_parameters(remove_duplicate=False))
    for name, unmerged_layer in find_unmerged_layers(model).items():
        _refuse_unmergeable_layer(unmerged_layer)
        if not isinstance(unmerged_layer, LowRank) and owners[_get_base_weight(unmerged_layer)] > 1:
            raise NotImplementedError(
                f"{clean_name(name)} must not be merged, because another module has its weight "
                "(tie_word_embeddings), but not its adapters: save_adapters"
            )
    items = []
    for module in model.modules():
        if isinstance(module, Experts):
            for name, update in module.lora_updates.items():
                add = partial(_merge_into_experts, module, name, update)
                items.append(Merge(getattr(module, name), update, add))
        elif is_tuner_layer(module) and not isinstance(module, LowRank):
            layer: Any = module
            items.append(Merge(_get_base_weight(layer), layer, partial(_merge_into_dense, layer)))
    return [
        merge
        for merge in items
        if _list_applied_adapters(merge.layer) and not getattr(merge.layer, "in_exports", False)
    ]


def check_no_unmerged_adapters(model: nn.Module) -> None:
    """Raise ValueError if a model has active adapters that are not merged into weights."""
    for name in find_unmerged_layers(model):
        raise ValueError(
            f"adapters of {clean_name(name)} must be merged into the weights, which are all "
            "that is written: call moecore.io.merge_adapters(model) first, or save_adapters"
        )


def find_unmerged_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers, by name, whose forward adds the output of unmerged adapters."""
    return {
        n: m
        for n, m in model.named_modules()
        if is_tuner_layer(m) and _list_applied_adapters(m) and not getattr(m, "in_exports", False)
    }


def lacks_unmerged_adapters(model: nn.Module) -> bool:
    """Whether no adapter is active and unmerged. False for a pipeline stage without adapters."""
    is_peft = unwrap_peft(model) is not model
    is_stage_without = is_peft and not any(map(is_tuner_layer, model.modules()))
    return not is_stage_without and not find_unmerged_layers(model)


def _find_active_merges(model: nn.Module) -> list[Merge]:
    """Return `find_merges(model)`; ValueError without unmerged adapters, or for FP8 storage."""
    merges = find_merges(model)
    refuse_fp8_storage(model, "merged")
    if lacks_unmerged_adapters(model):
        raise ValueError(
            f"model ({type(model).__name__}) must have active adapters that are not merged: attach "
            "them by peft.get_peft_model before parallelize_moe"
        )
    return merges


def _refuse_unmergeable_layer(layer: Any) -> None:
    """Raise NotImplementedError if a layer's adapters are not plain LoRA."""
    options = (getattr(layer, name, {}) for name in ("lora_variant", "lora_bias"))
    names = _list_applied_adapters(layer)
    has_variant = any(option.get(name) for option in options for name in names)
    if len(names) == 1 and is_dora_linear(layer, names[0]):
        has_variant = bool(layer.lora_bias.get(names[0]))
    is_known = isinstance(layer, LowRank) or _get_layer_kind(layer) is not None
    if has_variant or not is_known:
        raise NotImplementedError(
            f"{type(layer).__name__} with LoraConfig.lora_bias, a variant other than DoRA, or "
            "several adapters of which one has DoRA must not be merged here: save_adapters, and "
            "merge by peft on the stock model"
        )


def _get_base_weight(layer: Any) -> Tensor:
    """Return the weight that the adapters of peft's `layer` change."""
    weight: Tensor = layer.get_base_layer().weight
    return weight


def _get_layer_kind(layer: Any) -> str | None:
    """Return "linear" or "embedding" for peft's LoRA layer classes, None for other classes."""
    from peft.tuners.lora import Embedding, Linear

    return "linear" if type(layer) is Linear else "embedding" if type(layer) is Embedding else None


def _list_applied_adapters(layer: Any) -> list[str]:
    """Return the names of the unmerged adapters whose output the layer's forward adds."""
    if isinstance(layer, LowRank):
        return layer.in_use
    if layer.disable_adapters or layer.merged:
        return []
    known_names = {name for kind in layer.adapter_layer_names for name in getattr(layer, kind)}
    return [name for name in layer.active_adapters if name in known_names]


def _merge_into_dense(layer: Any, local_weight: Tensor) -> None:
    """Add s * B A of each active LoRA adapter to a shard of the weight of `layer`. Collective."""
    indices = compute_global_indices(_get_base_weight(layer))
    total = _upcast(local_weight)
    for adapter in _list_applied_adapters(layer):
        if _get_layer_kind(layer) == "linear":
            a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        else:
            a, b = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
        delta = (_upcast(unshard_tensor(b)) @ _upcast(unshard_tensor(a))) * layer.scaling[adapter]
        if _get_layer_kind(layer) == "embedding" or layer.fan_in_fan_out:
            delta = delta.T
        if is_dora_linear(layer, adapter):  # the only adapter
            full = _upcast(unshard_tensor(_get_base_weight(layer))) + delta
            vector = _upcast(unshard_tensor(layer.lora_magnitude_vector[adapter].weight))
            full *= (vector / torch.linalg.norm(full, dim=1))[:, None]
            total = select_shard(full, indices)
        else:
            total += select_shard(delta, indices)
    local_weight.copy_(total)


def _merge_into_experts(
    experts: Experts, weight_name: str, lora: Any, local_weight: Tensor
) -> None:
    """Add s * B A of each active LoRA adapter to a shard of the experts' weight. Collective."""
    indices = compute_global_indices(getattr(experts, weight_name))[0]
    adapters = _read_adapters(lora, unshard_tensor)
    for place, e in enumerate(indices.tolist()):  # one unsharded matrix at a time
        delta = _sum_updates(experts, weight_name, adapters, e)
        local_weight[place].copy_(_upcast(local_weight[place]) + delta)


def _merge_into_exports(experts: Experts) -> None:
    """Register the active LoRA adapters of experts in 4 bits, so that exports add their updates."""
    for name, lora in experts.lora_updates.items():
        if get_four_bit_blocks(getattr(experts, name)) is not None:
            adapters = _read_adapters(lora, get_detached_shard)  # of the local experts
            add = partial(_add_expert_updates, experts, name, adapters)
            setattr(getattr(experts, name), EXPORT_UPDATE, add)
            lora.in_exports = True


def _add_expert_updates(
    experts: Experts, weight_name: str, adapters: Any, values: Tensor, slices: tuple[slice, ...]
) -> None:
    """Add the LoRA updates to `values`, which are `slices` of this rank's shard in fp32."""
    num_local = get_detached_shard(getattr(experts, weight_name)).shape[0]
    for value, e in zip(values, range(num_local)[slices[0]], strict=True):
        value += _sum_updates(experts, weight_name, adapters, e)[slices[1:]]


def _merge_dense_into_exports(layer: Any) -> None:
    """Register active LoRA adapters of a linear in 4 bits, so that exports add B A. Collective."""
    adapters = _read_adapters(layer, lambda linear: _upcast(unshard_tensor(linear.weight)))

    def add(values: Tensor, slices: tuple[slice, ...]) -> None:
        """Add the updates to `values`, which are `slices` of the weight in fp32."""
        rows, columns = slices
        values += sum((b_Or[rows] @ a_rI[:, columns]) * s for a_rI, b_Or, s in adapters)

    setattr(layer.get_base_layer().weight, EXPORT_UPDATE, add)
    layer.in_exports = True


def _read_adapters(lora: Any, read: Callable[[Any], Tensor]) -> list[tuple[Tensor, Tensor, float]]:
    """Return A, B and the scale of each active adapter; `read` returns the values of A or B."""
    names = _list_applied_adapters(lora)
    return [(read(lora.lora_A[n]), read(lora.lora_B[n]), lora.scaling[n]) for n in names]


def _sum_updates(experts: Experts, weight_name: str, adapters: Any, e: int) -> Tensor:
    """Return the LoRA update of expert `e`, summed over adapters: this rank's shard in fp32."""
    weight = getattr(experts, weight_name)
    delta: Any = sum((_upcast(b_EOr[e]) @ _upcast(a_ErI[e])) * s for a_ErI, b_EOr, s in adapters)
    delta = (delta.T if experts.layout.transposed else delta).reshape(weight.shape[1:])
    return select_shard(delta, compute_global_indices(weight)[1:])


def _upcast(tensor: Tensor) -> Tensor:
    """Convert a tensor to fp32, unless its dtype has more bits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
