"""Adapters of Hugging Face transformers (>= 5) MoE blocks.

Parameter names, shapes and the order of stored weights stay those of the model, so its checkpoints
load and its optimizer sees what it knew. Blocks are found by class name: transformers is not
imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from moecore.adapters.adopt import adopt
from moecore.config import Activation, MoEConfig
from moecore.moe.experts import ExpertLayout
from moecore.moe.layer import LayerLayout, MoELayer

STACKED = LayerLayout(
    router="gate",
    shared="shared_experts",
    expert_bias="e_score_correction_bias",
    expert_layout=ExpertLayout(w1="gate_up_proj", w2="down_proj", gate_up="concatenated"),
)
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
ACTIVATIONS: dict[str, Activation] = {
    "SiLUActivation": "swiglu",
    "SiLU": "swiglu",
    "GELUTanh": "geglu",
    "PytorchGELUTanh": "geglu",
}


def find_hf_adapter(block: nn.Module) -> Callable[[Any, nn.Module], MoELayer] | None:
    """Return the adapter of a transformers MoE block, or None for any other module."""
    if not type(block).__module__.startswith("transformers.models."):
        return None
    return _ADAPTERS.get(type(block).__name__)


def refuse_router_logits(model: nn.Module) -> None:
    """Raise when the model's own balance loss is asked for, now or in any later forward.

    transformers collects router logits from its own router class, which adapted blocks no longer
    hold: it would add a loss of 0 without a word.

    Raises:
        NotImplementedError: when `config.output_router_logits` is set.
    """
    if not type(model).__module__.startswith("transformers.models."):
        return

    def check(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        default = getattr(getattr(module, "config", None), "output_router_logits", False)
        if kwargs.get("output_router_logits", default):
            raise NotImplementedError(
                "output_router_logits (True) must be False: the balance loss rides on the layer's "
                "output, use parallelize_moe(balance=BalanceConfig(global_batch_coef=...))"
            )

    check(model, (), {})
    model.register_forward_pre_hook(check, with_kwargs=True, prepend=True)


def _softmax_block(block: Any, model: nn.Module) -> MoELayer:
    """Qwen3-MoE, OLMoE and Mixtral: softmax over all experts, then the best K."""
    if getattr(block, "jitter_noise", 0):
        raise NotImplementedError(
            f"router_jitter_noise ({block.jitter_noise}) must be 0: set it to 0 in the config"
        )
    normalize = getattr(block.gate, "norm_topk_prob", True)  # Mixtral always does
    config = replace(_stacked_config(block), normalize_weights=normalize)
    return _adopt_stacked(block, config)


def _deepseek_v3(block: Any, model: nn.Module) -> MoELayer:
    """DeepSeek-V3: sigmoid scores, a selection bias, group-limited top-k, shared experts."""
    gate = block.gate
    config = replace(
        _stacked_config(block),
        score_function="sigmoid",
        expert_bias=True,
        normalize_weights=gate.norm_topk_prob,
        routed_scaling_factor=gate.routed_scaling_factor,
        num_groups=gate.num_group,
        top_groups=gate.topk_group,
    )
    return _adopt_stacked(block, config)


def _gpt_oss(block: Any, model: nn.Module) -> MoELayer:
    """gpt-oss: softmax over the K chosen logits, biases everywhere, interleaved gate and up."""
    router, experts = block.router, block.experts
    config = MoEConfig(
        dim=experts.hidden_size,
        hidden_dim=experts.intermediate_size,
        num_experts=experts.num_experts,
        top_k=router.top_k,
        score_order="post",
        router_bias=True,
        activation="clamped_swiglu",
        activation_limit=experts.limit,
        activation_alpha=experts.alpha,
        fc1_bias=True,
        fc2_bias=True,
    )
    return adopt(
        config, GPT_OSS, router=_tensors(router), experts=_tensors(experts), layer_class=_GptOss
    )


class _GptOss(MoELayer):
    """gpt-oss decoder layers expect (output, router scores) and read the output only."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def _stacked_config(block: Any) -> MoEConfig:
    num_experts, fc1_dim, dim = block.experts.gate_up_proj.shape
    activation = type(block.experts.act_fn).__name__
    if activation not in ACTIVATIONS:
        raise NotImplementedError(
            f"hidden_act ({activation}) of {type(block).__name__} must be one of "
            f"{', '.join(sorted(ACTIVATIONS))}: other activations are not built yet"
        )
    return MoEConfig(
        dim=dim,
        hidden_dim=fc1_dim // 2,
        num_experts=num_experts,
        top_k=block.gate.top_k,
        activation=ACTIVATIONS[activation],
    )


def _adopt_stacked(block: Any, config: MoEConfig) -> MoELayer:
    shared = getattr(block, "shared_experts", None)
    router, experts = _tensors(block.gate), _tensors(block.experts)
    return adopt(config, STACKED, router=router, experts=experts, shared=shared)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    parameters = dict(module.named_parameters(recurse=False))
    return parameters | dict(module.named_buffers(recurse=False))


_ADAPTERS: dict[str, Callable[[Any, nn.Module], MoELayer]] = {
    "Qwen3MoeSparseMoeBlock": _softmax_block,
    "OlmoeSparseMoeBlock": _softmax_block,
    "MixtralSparseMoeBlock": _softmax_block,
    "DeepseekV3MoE": _deepseek_v3,
    "GptOssMLP": _gpt_oss,
}
