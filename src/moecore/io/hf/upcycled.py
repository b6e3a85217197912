"""Upcycled transformers models: the transformers MoE class that would load their files.

A dense model whose MLPs `upcycle_modules` replaced keeps its dense class, which cannot load
experts. The model is therefore exported for an MoE class with the same names of other tensors. Its
layers must follow the routing rule of that class:

| dense | class with experts | rule |
| --- | --- | --- |
| Qwen3 | Qwen3-MoE, any layers | softmax, normalised or not |
| Qwen2 | Qwen2-MoE, any layers, a shared expert of hidden dim 0 | softmax, normalised or not |
| Llama, Mistral | Mixtral, every layer | softmax, normalised |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.options.layer import MoEConfig
from moecore.io.checkpoint.config_differences import find_moe_differences
from moecore.models.decoder import Decoder
from moecore.moe.layer import LayerLayout, MoELayer


@dataclass(frozen=True, slots=True)
class UpcycledFamily:
    """A transformers MoE family; an upcycled dense model is exported with its config and names."""

    model_type: str
    some_dense: bool  # whether layers may be dense
    always_normalizes: bool  # whether routing weights are always divided by their sum
    sizes: tuple[str, str, str]  # fields: experts, experts per token, hidden dim of an expert
    fixed: Mapping[str, Any]  # fields of every upcycled model


_QWEN_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_QWEN3 = UpcycledFamily("qwen3_moe", True, False, _QWEN_SIZES, {"decoder_sparse_step": 1})
_QWEN2 = replace(
    _QWEN3,
    model_type="qwen2_moe",
    fixed={"decoder_sparse_step": 1, "shared_expert_intermediate_size": 0, "qkv_bias": True},
)
_MIXTRAL = UpcycledFamily(
    "mixtral", False, True, ("num_local_experts", "num_experts_per_tok", "intermediate_size"), {}
)
FAMILIES = {"qwen3": _QWEN3, "qwen2": _QWEN2, "llama": _MIXTRAL, "mistral": _MIXTRAL}


def make_upcycled_config(model: nn.Module) -> dict[str, Any] | None:
    """Return config.json of the MoE class for an upcycled dense model; None for any other model."""
    layers: dict[int, MoEConfig] = {}  # of the MoE layers with moecore's names, by layer index
    for name, module in model.named_modules():
        prefix, _, number = name.removesuffix(".mlp").rpartition(".")
        is_layer = name.endswith(".mlp") and prefix.endswith("layers") and number.isdecimal()
        if is_layer and isinstance(module, MoELayer) and module.layout == LayerLayout():
            layers[int(number)] = module.config
    config = getattr(model, "config", None)
    if not layers or isinstance(model, Decoder) or not hasattr(config, "to_dict"):
        return None
    values: dict[str, Any] = config.to_dict()  # type: ignore[union-attr]
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None:
        if any("expert" in name for name in values):
            return None
        activation = next(iter(layers.values())).activation
        lacks = "" if activation == "swiglu" else f", which lacks {activation!r}"
        raise ValueError(
            f"config.model_type ({values.get('model_type')!r}) of an upcycled model must be one "
            f"of {', '.join(FAMILIES)}, which have a class with experts; the closest is "
            f"MixtralForCausalLM{lacks}: keep native checkpoints (Saver)"
        )
    if model.base_model is model:
        raise ValueError(
            f"model ({type(model).__name__.removeprefix('FSDP')}) must have a head to be written: "
            "pass the ...ForCausalLM that holds it"
        )
    return _build_moe_config(values, family, layers)


def make_empty_shared_experts(
    model: nn.Module, hf_config: Mapping[str, Any], model_tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the zero-sized shared experts that Qwen2-MoE's class needs, by name; {} for others."""
    if isinstance(model, Decoder) or hf_config.get("model_type") != "qwen2_moe":
        return {}
    if hf_config["shared_expert_intermediate_size"] != 0:
        return {}
    tensors: dict[str, Tensor] = {}
    for name, router in model_tensors.items():
        prefix = name.removesuffix("router.weight")
        if prefix == name:
            continue
        D = router.shape[1]
        shapes = {f"_expert.{part}": (0, D) for part in ("gate_proj", "up_proj")}
        shapes |= {"_expert.down_proj": (D, 0), "_expert_gate": (1, D)}
        for part, shape in shapes.items():
            zeros = torch.zeros(shape, dtype=router.dtype, device=router.device)
            tensors[f"{prefix}shared{part}.weight"] = zeros
    return tensors


def _build_moe_config(
    dense_config: Mapping[str, Any], family: UpcycledFamily, layers: Mapping[int, MoEConfig]
) -> dict[str, Any]:
    """Build the MoE class's config.json from the dense config `dense_config` and the MoE layers."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family.model_type]
    dense = [i for i in range(dense_config["num_hidden_layers"]) if i not in layers]
    moe = next(iter(layers.values()))
    for i, config in layers.items():
        _check_routing_rule(i, config, moe, family)
    if dense_config.get("use_sliding_window") and family is _QWEN3:
        raise ValueError(
            "config.use_sliding_window (True) must be False, because Qwen3MoeForCausalLM has one "
            "window for all layers: keep native checkpoints (Saver)"
        )
    if dense and not family.some_dense:
        raise ValueError(
            f"layers ({dense}) must be upcycled too, because {family.model_type!r} is the closest "
            "class with experts and has them in every layer: upcycle all, or keep native "
            "checkpoints (Saver)"
        )
    names = {*kind().to_dict(), "head_dim"}
    moe_values = {name: value for name, value in dense_config.items() if name in names}
    moe_values |= dict(zip(family.sizes, (moe.num_experts, moe.top_k, moe.hidden_dim), strict=True))
    moe_values |= {"model_type": family.model_type, **family.fixed}
    moe_values |= {"router_aux_loss_coef": moe.balance.micro_batch_coef, "architectures": None}
    if family.some_dense:
        moe_values |= {"mlp_only_layers": dense, "norm_topk_prob": moe.normalizes}
    return moe_values


def _check_routing_rule(
    layer_idx: int, config: MoEConfig, first_config: MoEConfig, family: UpcycledFamily
) -> None:
    """Raise ValueError unless a layer has the family's routing rule and the first layer's sizes."""
    normalizes = family.always_normalizes or first_config.normalizes
    expected_config = MoEConfig(
        dim=first_config.dim,
        hidden_dim=first_config.hidden_dim,
        num_experts=first_config.num_experts,
        top_k=first_config.top_k,
        normalize_weights=normalizes,
    )
    if config.score_order == "post":  # equal to normalized scores
        config = replace(config, score_order="pre", normalize_weights=True)
    for difference in find_moe_differences(config, expected_config):
        raise ValueError(
            f"layer {layer_idx}'s {difference.name} ({difference.value}) must be "
            f"{difference.reference} in {family.model_type!r}, the closest class with experts: "
            "upcycle with it, or keep native checkpoints (Saver)"
        )
