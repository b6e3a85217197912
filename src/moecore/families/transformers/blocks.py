"""Adapters of transformers (>= 5) MoE blocks, with one record per class of blocks.

    RECORDS        class of a block -> `RouterRecord`, for routing rules that `MoEConfig` expresses
    read_routing   block, record -> router fields of `MoEConfig`; None = the block keeps its router

Blocks without a record, or with options that `MoEConfig` lacks, keep their router: see
`experts.py`. Parameter names, shapes and the order of stored weights do not change, so the model's
checkpoints load, and an existing optimizer has the same parameters. Blocks are found by class name,
without importing transformers.

Records name the options that a block's forward reads. moecore computes logits and weights in fp32,
also where a class rounds them to bf16. moecore adds 1e-20 to the sum by which it divides weights.
For classes that add nothing, or that divide by at least 1e-12 (ERNIE), the quotient is equal unless
all chosen scores of a token are below 1e-12.

The layer classes have the forward's arguments or results of transformers' blocks.

transformers records router logits (output_router_logits) by hooks on the modules of its own router
classes. A block with a MoELayer has no such module, so `record_logits` adds one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from moecore.base.options.layer import MoEConfig, ScoreFunction, ScoreOrder
from moecore.base.torch_private import HOOKS
from moecore.families.adopt import adopt
from moecore.families.transformers import stock
from moecore.families.transformers.experts import (
    find_experts_adapter,
    get_used_parameters,
    read_experts,
    read_layout,
)
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.layer import LayerLayout, MoELayer, RoutedLayer
from moecore.moe.records import Routing
from moecore.moe.selection_bias import add_submodule


class PairOutputLayer(MoELayer):
    """An MoELayer that returns (output, None), as decoder layers of gpt-oss and Llama 4 expect."""

    def forward(  # type: ignore[override]
        self, x: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Return the output of `MoELayer.forward`, and None."""
        return super().forward(x, *args, **kwargs), None


class TokenIdLayer(MoELayer):
    """An MoELayer that accepts token ids with the argument name of DeepSeek-V4's layers."""

    def forward(  # type: ignore[override]
        self, x: Tensor, input_ids: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Return the output of `MoELayer.forward` for tokens with ids `input_ids`."""
        return super().forward(x, token_ids=input_ids, **kwargs)


class NormedOutputLayer(MoELayer):
    """An MoELayer whose output passes through the norm module `post_mlp_layernorm` (A.X K1)."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Apply the norm module to the output of `MoELayer.forward`, and return the result."""
        y: Tensor = self.get_submodule("post_mlp_layernorm")(super().forward(x, *args, **kwargs))
        return y


class MeanOutputLayer(MoELayer):
    """An MoELayer that returns the mean of the routed output and the shared output (Cohere)."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return half of the sum of routed and shared output, which `MoELayer.forward` computes."""
        return super().forward(x, *args, **kwargs) / 2


STACKED = LayerLayout(
    router="gate",
    shared="shared_experts",
    expert_bias="e_score_correction_bias",
    expert_layout=ExpertLayout(w1="gate_up_proj", w2="down_proj", gate_up="concatenated"),
)
STACKED_ROUTER = replace(STACKED, router="router")
SHARED_EXPERT = replace(STACKED, shared="shared_expert")
GATED_SHARED_EXPERT = replace(SHARED_EXPERT, shared_gate="shared_expert_gate")
BIAS_OF_BLOCK = replace(STACKED, bias_owner="")
SCORES = {"SqrtSoftplusActivation": "sqrtsoftplus", "Sigmoid": "sigmoid"}
# Options that must be 0, False or absent, because moecore's router has no such step, or because the
# class ignores the parameter that it makes (router_bias).
UNSUPPORTED = ("jitter_noise", "router_logit_softcapping", "router_bias")
MAX_NORM_MIN = 1e-12  # a larger bound of the sum of weights would change weights


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterRecord:
    """How `read_routing` reads the routing options of one class of transformers MoE blocks."""

    layout: LayerLayout = STACKED  # names of the block's parts, except inside its experts module
    # Of the logits, unless the router has `expert_selection_fn`; None = the module `score_fn`.
    score_function: ScoreFunction | None = "softmax"
    score_order: ScoreOrder = "pre"  # "pre" selects by score; "post" selects by logit, then scores
    normalize: bool | str = True  # whether weights are divided by their sum, or an option's name
    scale: str = ""  # name of the option with a factor on weights or the routed output; "" = 1
    group_experts: int = 0  # number of best scores whose sum ranks a group; 0 = unsupported
    weights_on_input: bool = False  # whether weights multiply the experts' input
    layer_class: type[MoELayer] = MoELayer  # for blocks with another forward
    children: tuple[str, ...] = ()  # children that `layer_class` runs, except parts of `layout`


DEEPSEEK_V3 = RouterRecord(
    score_function="sigmoid",
    normalize="norm_topk_prob",
    scale="routed_scaling_factor",
    group_experts=2,
)
SOFTMAX = RouterRecord(normalize="norm_topk_prob")
GRANITE = RouterRecord(layout=STACKED_ROUTER, score_order="post")
MINIMAX_M3 = RouterRecord(score_function="sigmoid", scale="routed_scaling_factor")
MISTRAL_4 = replace(DEEPSEEK_V3, score_function="softmax")
PAIR_OUTPUT = replace(GRANITE, layer_class=PairOutputLayer)

RECORDS: dict[str, RouterRecord] = {
    **dict.fromkeys(
        (
            *("BailingHybridMoE", "BeamMoE", "DeepseekV32MoE", "DeepseekV3MoE", "Dots1MoE"),
            *("Dots3NoteTextMoE", "ExaoneMoeSparseMoEBlock", "Glm4MoeLiteMoE", "Glm4MoeMoE"),
            *("Glm4vMoeTextMoE", "Glm5NextTextMoE", "GlmMoeDsaMoE", "HYV4MoE", "HYV4VLMoE"),
            *("KimiLinearMoE", "MiMoV2FlashMoE", "SolarOpenMoE"),
        ),
        DEEPSEEK_V3,
    ),
    **dict.fromkeys(
        ("GraniteMoeMoE", "GraniteMoeHybridMoE", "GraniteMoeSWAMoE", "GraniteMoeSharedMoE"), GRANITE
    ),
    **dict.fromkeys(
        ("LagunaSparseMoeBlock", "MiniMaxM3VLSparseMoeBlock", "Step3p7SparseMoeBlock"), MINIMAX_M3
    ),
    **dict.fromkeys(
        (
            *("FlexOlmoSparseMoeBlock", "MellumSparseMoeBlock", "OlmoeSparseMoeBlock"),
            *("Qwen3MoeSparseMoeBlock", "Qwen3OmniMoeThinkerTextSparseMoeBlock"),
        ),
        SOFTMAX,
    ),
    **dict.fromkeys(
        ("MiniMaxSparseMoeBlock", "MixtralSparseMoeBlock", "Qwen3VLMoeTextSparseMoeBlock"),
        RouterRecord(),
    ),
    **dict.fromkeys(
        (
            *("Qwen2MoeSparseMoeBlock", "Qwen3NextSparseMoeBlock", "Qwen4ExpTextSparseMoeBlock"),
            "Qwen3OmniMoeTalkerTextSparseMoeBlock",
        ),
        replace(SOFTMAX, layout=GATED_SHARED_EXPERT),
    ),
    **dict.fromkeys(
        ("DeepseekOcr2TextMoe", "DeepseekV2Moe", "UnlimitedOcrTextMoe"),
        RouterRecord(normalize=False, scale="routed_scaling_factor", group_experts=1),
    ),
    "AXK1MoE": replace(
        DEEPSEEK_V3, layer_class=NormedOutputLayer, children=("post_mlp_layernorm",)
    ),
    # It gives experts of other groups the score 0, which may be the best below a negative bias.
    "AXK2MoE": replace(DEEPSEEK_V3, group_experts=0),
    "AfmoeSparseMoeBlock": RouterRecord(
        layout=replace(BIAS_OF_BLOCK, router="router.gate", expert_bias="expert_bias"),
        score_function="sigmoid",
        scale="route_scale",
    ),
    "AriaTextMoELayer": GRANITE,
    "Cohere2MoeSparseMoeBlock": RouterRecord(score_order="post", normalize="norm_topk_prob"),
    # The first layers choose experts by token id.
    "DeepseekV4SparseMoeBlock": RouterRecord(
        layout=replace(STACKED, token_experts="tid2eid"),
        score_function=None,
        scale="routed_scaling_factor",
        layer_class=TokenIdLayer,
    ),
    "Ernie4_5_MoeSparseMoeBlock": RouterRecord(
        layout=replace(STACKED, bias_owner="gate.moe_statics")
    ),
    "FlintSparseMoeBlock": RouterRecord(
        layout=SHARED_EXPERT,
        score_function="sigmoid",
        normalize="norm_topk_prob",
    ),
    "GptOssMLP": PAIR_OUTPUT,
    "HYV3MoE": RouterRecord(
        layout=BIAS_OF_BLOCK, score_function="sigmoid", scale="router_scaling_factor"
    ),
    "HunYuanMoEV1Moe": RouterRecord(layout=replace(STACKED, router="gate.wg", shared="shared_mlp")),
    **dict.fromkeys(
        ("Inkling2LoopSparseMoeBlock", "Inkling2SparseMoeBlock"),
        RouterRecord(score_function=None, scale="routed_scaling_factor"),
    ),
    "JambaSparseMoeBlock": RouterRecord(layout=STACKED_ROUTER, normalize=False),
    "Kolibri1SparseMoeBlock": RouterRecord(
        score_function="sigmoid", score_order="post", normalize="norm_topk_prob"
    ),
    "LaraMiniSparseMoeBlock": RouterRecord(layout=SHARED_EXPERT, normalize="norm_topk_prob"),
    "Llama4TextMoe": RouterRecord(  # the sigmoid of the best logit multiplies the experts' input
        layout=replace(
            SHARED_EXPERT,
            router="router",
            expert_layout=replace(STACKED.expert_layout, transposed=True),
        ),
        score_function="sigmoid",
        normalize=False,
        weights_on_input=True,
        layer_class=PairOutputLayer,
    ),
    "LongcatFlashMoE": RouterRecord(
        layout=replace(STACKED, router="router.classifier", bias_owner="router"),
        normalize=False,
        scale="routed_scaling_factor",
    ),
    "MiniMaxM2SparseMoeBlock": RouterRecord(layout=BIAS_OF_BLOCK, score_function="sigmoid"),
    "Mistral4MoE": MISTRAL_4,
    "MistralLarge4TextMoE": replace(MISTRAL_4, normalize=True),
    "NemotronHMoE": replace(
        DEEPSEEK_V3,
        layout=replace(STACKED, latent_down="fc1_latent_proj", latent_up="fc2_latent_proj"),
    ),
    "OpenAIPrivacyFilterMLP": PAIR_OUTPUT,
    "Qwen3_5MoeSparseMoeBlock": RouterRecord(layout=GATED_SHARED_EXPERT),
}

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
    if (record := RECORDS.get(name)) is not None:
        routing = read_routing(module, record)
        if routing is not None:
            return partial(_adopt_block, record=record, routing=routing)
    return find_experts_adapter(module)


def get_refusal_reason(module: nn.Module) -> str | None:
    """Return why a transformers MoE block is not supported; None for any other module."""
    return REFUSED.get(type(module).__name__) if stock.is_transformers_module(module) else None


def _adopt_block(
    block: Any, model: nn.Module, record: RouterRecord, routing: dict[str, Any]
) -> MoELayer:
    """Convert a block to a MoE layer with router fields `routing`; `model` is unused."""
    layout = record.layout
    experts = block.get_submodule(layout.experts)
    if hasattr(experts, "is_transposed"):
        layout = replace(layout, expert_layout=read_layout(experts))
    stock.refuse_customised_block(block, layout, child_names=record.children)
    layer_class, combination = record.layer_class, "shared_expert_combination_strategy"
    if getattr(block, combination, "") == "average" and hasattr(block, "shared_experts"):
        layer_class = MeanOutputLayer
    expert_fields, own_activation = read_experts(experts, layout.expert_layout)
    router_tensors = _get_tensors(block.get_submodule(layout.router))
    if layout.bias_owner is not None:
        of_owner = _get_tensors(block.get_submodule(layout.bias_owner))
        router_tensors |= {n: t for n, t in of_owner.items() if n == layout.expert_bias}
    fields = expert_fields | {"dim": router_tensors["weight"].shape[1], **routing}
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
    for name in record.children:
        add_submodule(layer, name, block.get_submodule(name))
    return record_logits(layer, stock.get_router(block, layout))


def _get_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name, without its submodules' tensors."""
    return dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))


def get_first_attribute(owners: tuple[Any, ...], *attribute_names: str) -> Any:
    """Return the first of the named attributes that an owner has, or None."""
    return next((getattr(o, n) for o in owners for n in attribute_names if hasattr(o, n)), None)


def read_routing(block: Any, record: RouterRecord) -> dict[str, Any] | None:
    """Return router fields of `MoEConfig` for a block; None if its options are not expressible."""
    router = stock.get_router(block, record.layout)
    # Forward reads the router's attribute, or the block's in early releases of 5. Both are copies
    # of the config's value.
    owners = (router, block, getattr(block, "config", None))
    if any(getattr(o, name, None) for o in owners[:2] for name in UNSUPPORTED):
        return None
    if (getattr(router, "norm_min", 0.0) or 0.0) > MAX_NORM_MIN:
        return None
    linear = block.get_submodule(record.layout.router)
    if linear is not router and type(linear) is not nn.Linear:  # such as one with LoRA
        return None
    function = getattr(router, "expert_selection_fn", record.score_function)
    if record.score_function is None:
        function = SCORES.get(type(router.score_fn).__name__)
    if function is None:
        return None
    is_softmax_after_choice = (record.score_order, function) == ("post", "softmax")  # its sum is 1
    normalize: Any = record.normalize
    if isinstance(normalize, str):
        normalize = is_softmax_after_choice or get_first_attribute(owners, normalize)
    routing: dict[str, Any] = {
        "top_k": get_first_attribute(owners, "top_k", "num_experts_per_tok"),
        "score_function": function,
        "score_order": record.score_order,
        "normalize_weights": normalize,
        "routed_scaling_factor": get_first_attribute(owners, record.scale) if record.scale else 1.0,
        "weights_on_input": record.weights_on_input,
    }
    if hasattr(router, record.layout.token_experts):
        table_VK = getattr(router, record.layout.token_experts)
        routing |= {"assignment": "hash", "hash_vocab_size": len(table_VK)}
    num_groups = get_first_attribute(owners, "num_group", "n_group") or 1
    top_groups = get_first_attribute(owners, "topk_group") or num_groups
    if top_groups >= num_groups or getattr(router, "topk_method", "") == "greedy":
        return routing
    groups = {"num_groups": num_groups, "top_groups": top_groups}
    is_ranked = record.group_experts > 0
    return routing | groups | {"group_experts": record.group_experts} if is_ranked else None


class _LogitRecorder(nn.Module):
    """A module without parameters whose forward returns a `Router`'s logits to transformers' hooks.

    transformers hooks its router classes and records the first output, or Llama 4's second output.
    The recorder is a subclass of the block's router class and returns the logits twice.
    """

    def __init__(self) -> None:
        nn.Module.__init__(self)  # not the router class, which would make parameters
        self._is_hf_initialized = True  # transformers then initialises no parameters

    def forward(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Return the routing's logits [T, E] twice."""
        assert routing.logits_TE is not None, "moecore's routers return logits"
        return routing.logits_TE, routing.logits_TE


def record_logits(layer: MoELayer, router: nn.Module) -> MoELayer:
    """Make transformers' hooks on the old `router` record the logits of `layer`; return `layer`."""
    recorder = type(f"{type(router).__name__}Recorder", (_LogitRecorder, type(router)), {})()
    for name in HOOKS:
        if "forward_hooks" in name:  # the hooks, and flags of their arguments
            vars(recorder)[name].update(vars(router)[name])
    router_module = layer.get_part("router")
    router_module.recorder = recorder
    router_module.register_forward_hook(_pass_to_recorder)
    return layer


def _pass_to_recorder(router: Any, args: tuple[Tensor], routing: Routing) -> None:
    """Forward hook of a router: call its recorder, whose hooks belong to transformers."""
    router.recorder(args[0], routing)
