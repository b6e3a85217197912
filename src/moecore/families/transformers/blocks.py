"""Adapters of transformers (>= 5) MoE blocks whose routing rule is one of `MoEConfig`.

Blocks of other families keep their router: see `experts.py`. Parameter names, shapes and the order
of stored weights do not change, so the model's checkpoints load, and an existing optimizer has the
same parameters. Blocks are found by class name, without importing transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from moecore.base.options.layer import MoEConfig
from moecore.families.adopt import adopt
from moecore.families.transformers import stock
from moecore.families.transformers.experts import (
    find_experts_adapter,
    get_used_parameters,
    read_experts,
    read_layout,
)
from moecore.families.transformers.router_logits import record_logits
from moecore.families.transformers.router_records import (
    RECORDS,
    SCORES,
    STACKED,
    MeanOutputLayer,
    PairOutputLayer,
    RouterRecord,
    TokenIdLayer,
    read_routing,
)
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.layer import LayerLayout, MoELayer, RoutedLayer
from moecore.moe.selection_bias import add_submodule

DEEPSEEK_V4 = replace(STACKED, token_experts="tid2eid")
QWEN2_MOE = replace(STACKED, shared="shared_expert", shared_gate="shared_expert_gate")
GPT_OSS = LayerLayout(
    expert_layout=ExpertLayout(
        w1="gate_up_proj",
        w2="down_proj",
        b1="gate_up_proj_bias",
        b2="down_proj_bias",
        transposed=True,
        gate_up="interleaved",
    )
)
LLAMA4 = LayerLayout(
    shared="shared_expert",
    expert_layout=ExpertLayout(
        w1="gate_up_proj", w2="down_proj", transposed=True, gate_up="concatenated"
    ),
)
REFUSED = {
    "DbrxFFN": "the matrices of all experts are one of two dims",
    "JetMoeAttention": "experts are parts of attention",
    "JetMoeMoE": "its model has experts in attention, too",
    "NllbMoeSparseMLP": "experts are a dict of modules",
    "SwitchTransformersSparseMLP": "experts are a dict of modules",
}


def find_hf_adapter(module: nn.Module) -> Callable[[Any, nn.Module], RoutedLayer] | None:
    """Return a function (block, model) -> MoE layer for a transformers block or its experts."""
    name = type(module).__name__ if stock.is_transformers_module(module) else ""
    record = RECORDS.get(name)
    if record is not None and read_routing(module, record) is not None:
        return partial(_adopt_with_record, record=record)
    if name in _ADAPTERS and not getattr(module, "jitter_noise", 0):
        return _ADAPTERS[name]
    return find_experts_adapter(module)


def get_refusal_reason(module: nn.Module) -> str | None:
    """Return why a transformers MoE block is not supported; None for any other module."""
    return REFUSED.get(type(module).__name__) if stock.is_transformers_module(module) else None


def _adopt_softmax_block(block: Any, model: nn.Module, layout: LayerLayout = STACKED) -> MoELayer:
    """Convert a Qwen3-MoE, OLMoE or Mixtral block: softmax over all experts, then the best K."""
    stock.refuse_customised_block(block, layout)
    normalize = getattr(block.gate, "norm_topk_prob", True)  # Mixtral, Qwen3-VL, Qwen3.5 always do
    return _adopt_stacked(block, layout, top_k=block.gate.top_k, normalize_weights=normalize)


def _adopt_with_record(block: Any, model: nn.Module, record: RouterRecord) -> MoELayer:
    experts = block.get_submodule(record.layout.experts)
    layout = replace(record.layout, expert_layout=read_layout(experts))
    stock.refuse_customised_block(block, layout, child_names=record.children)
    routing = read_routing(block, record)
    assert routing is not None
    layer_class, combination = record.layer_class, "shared_expert_combination_strategy"
    if getattr(block, combination, "") == "average" and hasattr(block, "shared_experts"):
        layer_class = MeanOutputLayer
    layer = _adopt_stacked(block, layout, layer_class=layer_class, **routing)
    for name in record.children:
        add_submodule(layer, name, block.get_submodule(name))
    return layer


def _adopt_deepseek_v4(block: Any, model: nn.Module) -> MoELayer:
    """Convert a DeepSeek-V4 block: a selection bias, or in the first layers experts by token id."""
    stock.refuse_customised_block(block, DEEPSEEK_V4)
    gate = block.gate
    routing: dict[str, Any] = {}
    if block.is_hash:
        routing = {"assignment": "hash", "hash_vocab_size": len(gate.tid2eid)}
    function = type(gate.score_fn).__name__
    routing |= {"top_k": gate.top_k, "score_function": SCORES.get(function, function)}
    routing |= {"normalize_weights": True, "routed_scaling_factor": gate.routed_scaling_factor}
    return _adopt_stacked(block, DEEPSEEK_V4, layer_class=TokenIdLayer, **routing)


def _adopt_gpt_oss(block: Any, model: nn.Module) -> MoELayer:
    """Convert a gpt-oss block: softmax over K chosen logits, biases, interleaved gate and up."""
    stock.refuse_customised_block(block, GPT_OSS)
    routing = {"top_k": block.router.top_k, "score_order": "post"}
    routing["normalize_weights"] = True  # also where K = 1
    return _adopt_stacked(block, GPT_OSS, layer_class=PairOutputLayer, **routing)


def _adopt_llama4(block: Any, model: nn.Module) -> MoELayer:
    """Convert a Llama 4 block: the sigmoid of the top-1 logit scales the input; a shared expert."""
    stock.refuse_customised_block(block, LLAMA4)
    routing = {"top_k": block.router.top_k, "score_function": "sigmoid", "weights_on_input": True}
    return _adopt_stacked(block, LLAMA4, layer_class=PairOutputLayer, **routing)


def _adopt_stacked(
    block: Any, layout: LayerLayout, layer_class: type[MoELayer] = MoELayer, **router_fields: Any
) -> MoELayer:
    """Convert a block with these router fields of `MoEConfig` to a `layer_class`."""
    experts = block.get_submodule(layout.experts)
    expert_fields, own_activation = read_experts(experts, layout.expert_layout)
    router_tensors = _get_tensors(block.get_submodule(layout.router))
    if layout.bias_owner is not None:
        of_owner = _get_tensors(block.get_submodule(layout.bias_owner))
        router_tensors |= {n: t for n, t in of_owner.items() if n == layout.expert_bias}
    fields = expert_fields | {"dim": router_tensors["weight"].shape[1], **router_fields}
    fields["expert_bias"] = layout.expert_bias in router_tensors
    fields["router_bias"] = "bias" in router_tensors
    latent: tuple[nn.Module, nn.Module] | None = None
    if layout.latent_down:
        down, up = (block.get_submodule(n) for n in (layout.latent_down, layout.latent_up))
        if not isinstance(down, nn.Identity):
            latent, fields["latent_dim"] = (down, up), expert_fields["dim"]
    layer = adopt(
        MoEConfig(**fields),
        layout,
        router=router_tensors,
        experts=get_used_parameters(experts) | dict(experts.named_buffers(recurse=False)),
        latent=latent,
        shared=getattr(block, layout.shared, None),
        shared_gate=getattr(block, layout.shared_gate) if layout.shared_gate else None,
        own_activation=own_activation,
        layer_class=layer_class,
    )
    return record_logits(layer, stock.get_router(block, layout))


def _get_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name, without its submodules' tensors."""
    return dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))


def _adopt_deepseek_v2(block: Any, model: nn.Module) -> MoELayer:
    """Convert a DeepSeek-V2 block: softmax, group-limited top-k if configured, shared experts."""
    stock.refuse_customised_block(block, STACKED)
    gate = block.gate
    routing = {"top_k": gate.top_k, "normalize_weights": False}
    routing["routed_scaling_factor"] = gate.routed_scaling_factor
    if gate.topk_method == "group_limited_greedy" and gate.topk_group < gate.num_group:
        routing |= {"num_groups": gate.num_group, "top_groups": gate.topk_group, "group_experts": 1}
    return _adopt_stacked(block, STACKED, **routing)


# Adapter -> classes of blocks whose code, including the router, is equal up to names.
_BLOCK_CLASSES: dict[Callable[[Any, nn.Module], MoELayer], tuple[str, ...]] = {
    _adopt_softmax_block: (
        *("FlexOlmoSparseMoeBlock", "MellumSparseMoeBlock", "MiniMaxSparseMoeBlock"),
        *("MixtralSparseMoeBlock", "OlmoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock"),
        *("Qwen3OmniMoeThinkerTextSparseMoeBlock", "Qwen3VLMoeTextSparseMoeBlock"),
    ),
    # And a shared expert with a sigmoid gate.
    partial(_adopt_softmax_block, layout=QWEN2_MOE): (
        *("Qwen2MoeSparseMoeBlock", "Qwen3NextSparseMoeBlock", "Qwen3_5MoeSparseMoeBlock"),
        *("Qwen3OmniMoeTalkerTextSparseMoeBlock", "Qwen4ExpTextSparseMoeBlock"),
    ),
    _adopt_deepseek_v2: ("DeepseekOcr2TextMoe", "DeepseekV2Moe", "UnlimitedOcrTextMoe"),
    _adopt_deepseek_v4: ("DeepseekV4SparseMoeBlock",),
    _adopt_gpt_oss: ("GptOssMLP",),
    _adopt_llama4: ("Llama4TextMoe",),
}
_ADAPTERS = {name: adapter for adapter, names in _BLOCK_CLASSES.items() for name in names}
