"""Adapters of Hugging Face transformers (>= 5) MoE blocks.

Parameter names, shapes and the order of stored weights stay those of the model, so its checkpoints
load and its optimizer sees what it knew. Blocks are found by class name: transformers is not
imported here.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from moecore.adapters.adopt import adopt
from moecore.config import Activation, MoEConfig
from moecore.hf.stock import refuse_customised
from moecore.moe.experts import ExpertLayout
from moecore.moe.layer import LayerLayout, MoELayer
from moecore.moe.records import Routing

STACKED = LayerLayout(
    router="gate",
    shared="shared_experts",
    expert_bias="e_score_correction_bias",
    expert_layout=ExpertLayout(w1="gate_up_proj", w2="down_proj", gate_up="concatenated"),
)
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
ACTIVATIONS: dict[str, Activation] = {
    "SiLUActivation": "swiglu",
    "SiLU": "swiglu",
    "GELUTanh": "geglu",
    "PytorchGELUTanh": "geglu",
}

RECORDED = ("output_router_logits", "output_hidden_states", "output_attentions")


def find_hf_adapter(block: nn.Module) -> Callable[[Any, nn.Module], MoELayer] | None:
    """Return the adapter of a transformers MoE block, or None for any other module."""
    return _ADAPTERS.get(type(block).__name__) if _is_hf(block) else None


def refuse_lost_outputs(model: nn.Module) -> None:
    """Raise when outputs are asked for that transformers would not record.

    Hidden states, attentions or router logits would be None without a word, and the balance loss
    be computed from fewer layers, or from none. Asked for in the config: raises now. In a later
    forward: raises before its loss.

    Raises:
        NotImplementedError: for a base model parallelized itself, while one of `RECORDED` is asked
            for; with transformers before 5.6, while router logits are; in forward also when router
            logits of not every layer were recorded.
    """
    for module in model.modules():
        if not _is_hf(module) or getattr(module, "base_model", None) is not module:
            continue  # transformers records in the base model, below the head that has the loss
        refusals = _refusals(module, is_root=module is model)
        for option, refusal in refusals.items():
            if getattr(module.config, option, False):
                raise NotImplementedError(refusal)
        module.register_forward_hook(partial(_check_recorded, refusals), with_kwargs=True)


def _refusals(module: nn.Module, *, is_root: bool) -> dict[str, str]:
    """Return why outputs of the base model would be wrong or missing, by their option."""
    refusals = {}
    if is_root:
        # It looks up what to record by the name of the class, which FSDP2 changes at the root.
        for option in RECORDED:
            refusals[option] = (
                f"{option} (True) must be False for {type(module).__name__}, which transformers "
                "does not recognise once it is FSDP2's root: parallelize the model that holds it, "
                "such as ...ForCausalLM"
            )
    version = sys.modules["transformers"].__version__
    if tuple(int(n) for n in version.split(".")[:2]) < (5, 6):
        refusals["output_router_logits"] = (
            f"output_router_logits (True) must be False with transformers ({version}), whose "
            "balance loss reads probabilities as logits: use transformers >= 5.6"
        )
    return refusals


def refuse_save_pretrained(model: nn.Module) -> None:
    """Make `save_pretrained` of transformers models raise on every rank alike.

    It would read shards as whole tensors, and end on the rank that writes alone. It stays for a
    `state_dict` of whole tensors and for transformers' own distributed checkpoints.
    """
    for module in model.modules():
        if any(cls.__module__ == "transformers.modeling_utils" for cls in type(module).__mro__):
            hf: Any = module
            hf.save_pretrained = partial(_save_pretrained, hf.save_pretrained)


def _save_pretrained(
    save: Callable[..., Any],
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Mapping[str, Tensor] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Stand before transformers' own, with its arguments."""
    is_whole = state_dict and not any(isinstance(t, DTensor) for t in state_dict.values())
    if not is_whole and not kwargs.get("distributed_checkpoint"):
        raise NotImplementedError(
            f"state_dict ({'sharded' if state_dict else None}) of save_pretrained must hold the "
            "parallelized model's whole tensors: use moecore.hf.export_hf(model, path)"
        )
    return save(save_directory, is_main_process, state_dict, *args, **kwargs)


def warn_about_cache(model: nn.Module) -> None:
    """Warn at training forwards that keep keys and values, in a model whose layers are compiled.

    Each layer is then compiled anew for its place in the cache, up to torch's limit of 8; the
    others run as they are.
    """
    for module in model.modules():
        if _is_hf(module) and getattr(module, "base_model", None) is module:
            module.register_forward_pre_hook(_check_cache, with_kwargs=True)


def _check_cache(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a base model."""
    asked = kwargs.get("use_cache")
    asked = getattr(module.config, "use_cache", False) if asked is None else asked
    if asked and module.training and torch.is_grad_enabled():
        warnings.warn(
            f"use_cache (True) of {type(module).__name__} must be False to train it with "
            "compile_dense=True, or most of its layers stay uncompiled: pass use_cache=False, or "
            "set model.config.use_cache",
            stacklevel=2,
        )


def _check_recorded(
    refusals: Mapping[str, str], module: Any, args: Any, kwargs: dict[str, Any], output: Any
) -> None:
    """Forward hook of a base model; its output's `router_logits` has one tensor per MoE layer."""
    asked = [o for o in RECORDED if kwargs.get(o, getattr(module.config, o, False))]
    layers = sum(isinstance(m, MoELayer) for m in module.modules())
    if not layers and not isinstance(module, FSDPModule):
        return  # not parallelized in the end
    for option in asked:
        if option in refusals:
            raise NotImplementedError(refusals[option])
    recorded = len(getattr(output, "router_logits", None) or ())
    if layers and "output_router_logits" in asked and recorded != layers:
        raise NotImplementedError(
            f"router_logits recorded ({recorded}) must equal the MoE layers ({layers}) of "
            f"{type(module).__name__}: set output_router_logits to False and use "
            "parallelize_moe(balance=BalanceConfig(...))"
        )


class _Recorder(nn.Module):
    """What transformers takes for the router of an adapted block; it has no parameters.

    transformers hooks the modules of its own router classes and keeps output 0. `Router` returns a
    record instead, so it holds a recorder, made a subclass of the block's router class, and passes
    it what it routed. The recorder returns what the block's own router would.
    """

    def __init__(self) -> None:
        nn.Module.__init__(self)  # not the router class, which would make parameters
        self._is_hf_initialized = True  # so that transformers does not look for them

    def forward(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
        return routing.logits_TE, routing.weights_TK, routing.expert_ids_TK


def _record_logits(layer: MoELayer, router: nn.Module) -> MoELayer:
    """Let transformers find the layer's router logits where it found those of `router`.

    Its hooks come along: transformers installs them only once, maybe before this call. Nobody
    else's can be there, `swap_blocks` refuses them.
    """
    recorder = type(f"{type(router).__name__}Recorder", (_Recorder, type(router)), {})()
    for key, hook in router._forward_hooks.items():
        with_kwargs = key in router._forward_hooks_with_kwargs
        recorder.register_forward_hook(hook, with_kwargs=with_kwargs)
    own = layer.part("router")
    own.recorder = recorder
    own.register_forward_hook(_pass_to_recorder)
    return layer


def _pass_to_recorder(router: Any, args: tuple[Tensor], routing: Routing) -> None:
    router.recorder(args[0], routing)


def _is_hf(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.models.")


def _softmax_block(block: Any, model: nn.Module) -> MoELayer:
    """Qwen3-MoE, OLMoE and Mixtral: softmax over all experts, then the best K."""
    refuse_customised(block, STACKED)
    if getattr(block, "jitter_noise", 0):
        raise NotImplementedError(
            f"router_jitter_noise ({block.jitter_noise}) must be 0: transformers multiplies the "
            "input of router and experts by fresh noise, a MoELayer does not; set it to 0"
        )
    normalize = getattr(block.gate, "norm_topk_prob", True)  # Mixtral always does
    config = replace(_stacked_config(block), normalize_weights=normalize)
    return _adopt_stacked(block, config)


def _qwen2_moe(block: Any, model: nn.Module) -> MoELayer:
    """Qwen2-MoE: softmax routing, and a shared expert with a sigmoid gate."""
    refuse_customised(block, QWEN2_MOE)
    config = replace(_stacked_config(block), normalize_weights=block.gate.norm_topk_prob)
    return _adopt_stacked(block, config, QWEN2_MOE)


def _deepseek_v3(block: Any, model: nn.Module) -> MoELayer:
    """DeepSeek-V3: sigmoid scores, a selection bias, group-limited top-k, shared experts."""
    refuse_customised(block, STACKED)
    config = replace(
        _stacked_config(block, top_k=_option(block, "top_k", "num_experts_per_tok")),
        score_function="sigmoid",
        expert_bias=True,
        normalize_weights=_option(block, "norm_topk_prob"),
        routed_scaling_factor=_option(block, "routed_scaling_factor"),
        num_groups=_option(block, "num_group", "n_group"),
        top_groups=_option(block, "topk_group"),
    )
    return _adopt_stacked(block, config)


def _option(block: Any, *names: str) -> Any:
    """Return what forward reads: of the router, or of the block in early releases of 5.

    Both hold copies of the config's, which forward never sees again.
    """
    owners = (block.gate, block, block.config)
    return next(getattr(o, n) for o in owners for n in names if hasattr(o, n))


def _gpt_oss(block: Any, model: nn.Module) -> MoELayer:
    """gpt-oss: softmax over the K chosen logits, biases everywhere, interleaved gate and up."""
    refuse_customised(block, GPT_OSS)
    router, experts = block.router, block.experts
    config = MoEConfig(
        dim=experts.hidden_size,
        hidden_dim=experts.intermediate_size,
        num_experts=experts.num_experts,
        top_k=router.top_k,
        score_order="post",
        normalize_weights=True,  # also where K = 1
        router_bias=True,
        activation="clamped_swiglu",
        activation_limit=experts.limit,
        activation_alpha=experts.alpha,
        fc1_bias=True,
        fc2_bias=True,
    )
    layer = adopt(
        config, GPT_OSS, router=_tensors(router), experts=_tensors(experts), layer_class=_GptOss
    )
    return _record_logits(layer, router)


class _GptOss(MoELayer):
    """gpt-oss decoder layers expect (output, router scores) and read the output only."""

    def forward(  # type: ignore[override]
        self, x: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        return super().forward(x, padding_mask), None


def _stacked_config(block: Any, *, top_k: int | None = None) -> MoEConfig:
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
        top_k=top_k or block.gate.top_k,
        activation=ACTIVATIONS[activation],
    )


def _adopt_stacked(block: Any, config: MoEConfig, layout: LayerLayout = STACKED) -> MoELayer:
    layer = adopt(
        config,
        layout,
        router=_tensors(block.gate),
        experts=_tensors(block.experts),
        shared=getattr(block, layout.shared, None),
        shared_gate=getattr(block, layout.shared_gate) if layout.shared_gate else None,
    )
    return _record_logits(layer, block.gate)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    parameters = dict(module.named_parameters(recurse=False))
    return parameters | dict(module.named_buffers(recurse=False))


_ADAPTERS: dict[str, Callable[[Any, nn.Module], MoELayer]] = {
    "Qwen2MoeSparseMoeBlock": _qwen2_moe,
    "Qwen3MoeSparseMoeBlock": _softmax_block,
    "OlmoeSparseMoeBlock": _softmax_block,
    "MixtralSparseMoeBlock": _softmax_block,
    "DeepseekV3MoE": _deepseek_v3,
    "GptOssMLP": _gpt_oss,
}
