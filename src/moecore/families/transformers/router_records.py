"""How transformers' MoE blocks select experts, one record per class of blocks.

    RECORDS        class of a block -> `RouterRecord`, for routing rules that `MoEConfig` expresses
    OWN_ROUTERS    class of a router -> why its model keeps it
    read_routing   block, record -> router fields of `MoEConfig`; None = the block keeps its router

Records name the options that a block's forward reads. moecore computes logits and weights in fp32,
also where a class rounds them to bf16. moecore adds 1e-20 to the sum by which it divides weights.
For classes that add nothing, or that divide by at least 1e-12 (ERNIE), the quotient is equal unless
all chosen scores of a token are below 1e-12.

The layer classes have the forward's arguments or results of transformers' blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from moecore.base.options.layer import ScoreFunction, ScoreOrder
from moecore.families.transformers.stock import get_router
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.layer import LayerLayout, MoELayer


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
BIAS_OF_BLOCK = replace(STACKED, bias_owner="")
SCORES = {"SqrtSoftplusActivation": "sqrtsoftplus", "Sigmoid": "sigmoid"}
# Options that must be 0, False or absent, because moecore's router has no such step, or because the
# class ignores the parameter that it makes (router_bias).
UNSUPPORTED = ("jitter_noise", "router_logit_softcapping", "router_bias")
MAX_NORM_MIN = 1e-12  # a larger bound of the sum of weights would change weights


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterRecord:
    """How to read the routing options of a class of MoE blocks from the block or its router."""

    layout: LayerLayout = STACKED  # names of the block's parts, except inside its experts module
    # Of the logits, unless the router has `expert_selection_fn`; None = the module `score_fn`.
    score_function: ScoreFunction | None = "softmax"
    score_order: ScoreOrder = "pre"  # "pre" selects by score; "post" selects by logit, then scores
    normalize: bool | str = True  # whether weights are divided by their sum, or an option
    scale: str = ""  # option with a factor on the weights or on the routed output; "" = 1
    ranks_groups: bool = False  # whether groups are ranked by the sum of their two best scores
    layer_class: type[MoELayer] = MoELayer  # for blocks with another forward
    children: tuple[str, ...] = ()  # children that `layer_class` runs, except parts of `layout`


DEEPSEEK_V3 = RouterRecord(
    score_function="sigmoid",
    normalize="norm_topk_prob",
    scale="routed_scaling_factor",
    ranks_groups=True,
)
GRANITE = RouterRecord(layout=STACKED_ROUTER, score_order="post")
MINIMAX_M3 = RouterRecord(score_function="sigmoid", scale="routed_scaling_factor")
MISTRAL_4 = replace(DEEPSEEK_V3, score_function="softmax")

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
    "AXK1MoE": replace(
        DEEPSEEK_V3, layer_class=NormedOutputLayer, children=("post_mlp_layernorm",)
    ),
    # It gives experts of other groups the score 0, which may be the best below a negative bias.
    "AXK2MoE": replace(DEEPSEEK_V3, ranks_groups=False),
    "AfmoeSparseMoeBlock": RouterRecord(
        layout=replace(BIAS_OF_BLOCK, router="router.gate", expert_bias="expert_bias"),
        score_function="sigmoid",
        scale="route_scale",
    ),
    "AriaTextMoELayer": GRANITE,
    "Cohere2MoeSparseMoeBlock": RouterRecord(score_order="post", normalize="norm_topk_prob"),
    "Ernie4_5_MoeSparseMoeBlock": RouterRecord(
        layout=replace(STACKED, bias_owner="gate.moe_statics")
    ),
    "FlintSparseMoeBlock": RouterRecord(
        layout=replace(STACKED, shared="shared_expert"),
        score_function="sigmoid",
        normalize="norm_topk_prob",
    ),
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
    "LaraMiniSparseMoeBlock": RouterRecord(
        layout=replace(STACKED, shared="shared_expert"), normalize="norm_topk_prob"
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
    "OpenAIPrivacyFilterMLP": replace(GRANITE, layer_class=PairOutputLayer),
}

# A router's class -> why moecore's router cannot replace it.
OWN_ROUTERS = {
    "Ernie4_5_VLMoeMoeTopKRouter": "other experts for images",
    "Gemma4TextRouter": "trained factors of experts",
    "InklingTopkRouter": "shared experts are weighted, too",
    "Lfm2MoeTopKRouter": "1e-6 in the sum of weights",
    "PhimoeTopKRouter": "sparsemixer",
    "ZayaRouter": "an MLP across layers",
}


def get_first_attribute(owners: tuple[Any, ...], *attribute_names: str) -> Any:
    """Return the first of the named attributes that an owner has, or None."""
    return next((getattr(o, n) for o in owners for n in attribute_names if hasattr(o, n)), None)


def read_routing(block: Any, record: RouterRecord) -> dict[str, Any] | None:
    """Return router fields of `MoEConfig` for a block; None if its options are not expressible."""
    router = get_router(block, record.layout)
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
    }
    num_groups = get_first_attribute(owners, "num_group", "n_group") or 1
    top_groups = get_first_attribute(owners, "topk_group") or num_groups
    if record.ranks_groups:
        return routing | {"num_groups": num_groups, "top_groups": top_groups}
    return None if top_groups < num_groups else routing
