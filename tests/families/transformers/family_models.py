"""A tiny random model of every MoE family of the installed transformers, made by introspection.

A family is a model file with routed experts. Its tiny config is the default one with every size
that `SIZES` knows made small, each kind of layer once, and what `FAMILIES` has for the family.
"""

import inspect
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

from moecore.families.transformers.stock import get_text_decoder

transformers = pytest.importorskip("transformers", minversion="5")

MODELS = Path(transformers.__file__).parent / "models"
SIZES: dict[str, Any] = {
    name: size
    for size, names in {
        64: "max_position_embeddings",
        61: "vocab_size unpadded_vocab_size vocab_size_per_layer_input num_labels",
        32: (
            "hidden_size out_hidden_size d_model output_dim moe_hidden_size "
            "projection_intermediate_size"
        ),
        16: (
            "intermediate_size moe_intermediate_size dense_intermediate_size "
            "shared_intermediate_size shared_expert_intermediate_size "
            "moe_shared_expert_intermediate_size kv_lora_rank q_lora_rank embed_dim image_size "
            "d_ff encoder_ffn_dim decoder_ffn_dim num_mel_bins shared_experts_intermediate_size "
            "expert_ffn_hidden_size ffn_hidden_size router_hidden_size intermediate_size_mlp "
            "rel_extent output_channels mlp_dim num_position_embeddings"
        ),
        9: "canvas_length",
        8: (
            "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim "
            "linear_key_head_dim linear_value_head_dim patch_size d_kv downsample_hidden_size "
            "mamba_n_heads mamba_num_heads mamba_head_dim mamba_d_state ssm_state_size "
            "hidden_size_per_layer_input linear_head_dim swa_head_dim o_lora_rank"
        ),
        4: (
            "num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
            "index_topk sliding_window linear_num_value_heads chunk_size mamba_chunk_size n_heads "
            "linear_num_heads swa_num_attention_heads sliding_window_size d_rel"
        ),
        2: (
            "num_key_value_heads num_experts_per_tok num_experts_per_token top_k_experts moe_topk "
            "moe_k index_n_heads linear_num_key_heads depth num_heads encoder_layers "
            "decoder_layers encoder_attention_heads decoder_attention_heads n_groups n_layers "
            "swa_num_key_value_heads o_groups"
        ),
        1: "n_group num_expert_group topk_group",
    }.items()
    for name in names.split()
}
NEEDED = {"n_routed_experts", "num_experts", "num_experts_per_tok", "top_k_experts"}
NEEDED |= {"moe_intermediate_size", "moe_k", "n_group", "topk_group"}

EXPERTS = re.compile(
    r"^class \w*Experts\(nn\.Module(Dict)?\):|^@use_experts_implementation", re.MULTILINE
)
HEADS = ("ForCausalLM", "ForConditionalGeneration", "ForBlockDiffusion", "ForTokenClassification")
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
SAM = {"downsample_channels": [16, 32], "global_attn_indexes": [1]}
WINDOWS = ["full_attention", "sliding_attention"]
DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2_moe": DENSE_FIRST,
    "dbrx": {"d_model": 32, "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "deepseek_ocr2": {
        "text_config": DENSE_FIRST,
        "vision_config": {"sam_config": SAM},
    },
    "deepseek_v2": {"first_k_dense_replace": 1},
    "deepseek_v4": {
        "index_n_heads": 16,  # see axk2
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "layer_types": WINDOWS,
    },
    "dots3_note": {
        "index_n_heads": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
        "per_layer_config": None,
    },
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [16, 8], "rope_parameters": MROPE},
    },
    "deepseek_v3": {"first_k_dense_replace": 1},
    # Of few heads many scores are 0, and which of equal ones topk takes is open.
    "axk2": {"index_n_heads": 16},
    "deepseek_v32": {"index_n_heads": 16},
    "glm_moe_dsa": {"index_n_heads": 16, "indexer_types": ["full", "shared"]},
    "flint": {"mlp_only_layers": [0]},
    "gemma4": {"enable_moe_block": True},
    "glm4v_moe": {"text_config": {"rope_parameters": MROPE | {"mrope_section": [1, 1, 0]}}},
    "glm5_next": {"text_config": {"index_kpool": 2, "qk_rope_head_dim": 0}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hy_v4": {"index_n_heads": 16, "indexer_types": ["full", "shared"]},
    "hy_v4_vl": {
        "text_config": {
            "index_n_heads": 16,
            "indexer_types": ["full", "shared"],
            "rope_parameters": MROPE,
            "hc_magnitude": 1.0,
        },
    },
    "hunyuan_v1_moe": {"head_dim": 8},
    "inkling2_loop": {
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 2,
    },
    "inkling": DENSE_FIRST,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "laguna": {"layer_types": WINDOWS, "num_attention_heads_per_layer": [4, 2]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4": {
        "num_experts_per_tok": 1,
        "attention_chunk_size": 4,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0],
        "floor_scale": 3,
    },
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 3},
    "mellum": {"layer_types": WINDOWS} | DENSE_FIRST,
    "minimax_m3_vl": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 2,
        "index_topk_blocks": 2,
    }
    | DENSE_FIRST,
    "mistral4": {"head_dim": 16, "first_k_dense_replace": 1},
    "muse_spark": {"audio_config": {"num_hidden_layers": 4, "out_hidden_size": 32}},
    "nemotron_h": {"moe_latent_size": 24},
    "nllb_moe": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "qwen4_exp": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "qwen2_moe": {"use_sliding_window": True, "layer_types": WINDOWS, "mlp_only_layers": [0]},
    "qwen3_omni_moe": {"vision_config": {"deepstack_visual_indexes": [0]}},
    "qwen3_vl_moe": {
        "text_config": {"moe_intermediate_size": 24},
        "vision_config": {"deepstack_visual_indexes": [0]},
    },
    "step3p7": {
        "text_config": {
            "layer_types": WINDOWS,
            "num_sliding_attention_heads": 2,
            "sliding_window": 4,
            "swiglu_limits": [0.0, 0.5],
            "swiglu_limits_shared": [0.5, 0.3],
        }
    },
    "switch_transformers": {"decoder_start_token_id": 0},
    "unlimited_ocr": {"vision_config": {"sam_config": SAM}},
    "zaya": {"num_experts_per_tok": 1},
}


IMAGES = (
    "ernie4_5_vl_moe",
    "glm4v_moe",
    "qwen3_omni_moe",
    "qwen3_vl_moe",
)  # with images in batches
FROZEN_TOWER = "glm4v_moe"
IS_BEFORE_5_23 = Version(transformers.__version__) < Version("5.23")
CHANGED = {  # since transformers 5.17
    "aria": "has a router that is a plain linear",
    "dbrx": "does not read a config that it has written",
    "diffusion_gemma": "has no class of its text config",
    "jamba": "has a router that is a plain linear",
}


@cache
def family_names() -> tuple[str, ...]:
    """Return the model files with routed experts, in order."""
    files = sorted(MODELS.glob("*/modeling_*.py"))
    return tuple(f.parent.name for f in files if EXPERTS.search(f.read_text()))


def model_class(family: str) -> Any:
    """Return the class with a language model's head, or the first with another."""
    if family in CHANGED and IS_BEFORE_5_23:
        pytest.skip(f"{family} of transformers {transformers.__version__} {CHANGED[family]}")
    reason = f"transformers {transformers.__version__} has no {family}"
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}", reason=reason)
    for head in HEADS:
        for name, value in vars(module).items():
            own = inspect.isclass(value) and value.__module__ == module.__name__
            if own and name.endswith(head) and "PreTrainedModel" not in name:
                return value
    raise LookupError(family)


# Gradients of hyper-connections: those of stock's batch and of its rows one by one differ by 8e-6.
BOUNDS = {"deepseek_v4": 5e-5}


def skip_unless_in_bf16(family: str) -> None:
    """Skip a test of a class that does not run in bf16."""
    if family == "deepseek_v4" and IS_BEFORE_5_23:
        pytest.skip("DeepSeek-V4 of transformers < 5.23 has norms in fp32, and products in bf16")


def tiny_config(kind: type, overrides: Mapping[str, Any], sizes: Mapping[str, Any] = SIZES) -> Any:
    """Return a small config of a class; overrides of a nested config are a mapping by its name."""
    default = kind()
    kwargs: dict[str, Any] = {}
    values = {n: v for n, v in vars(default).items() if not n.startswith("_")}
    for name, value in values.items():
        if isinstance(value, transformers.PreTrainedConfig):
            kwargs[name] = tiny_config(type(value), overrides.get(name, {}), sizes)
        elif name in sizes and (isinstance(value, int) or (value is None and name in NEEDED)):
            kwargs[name] = sizes[name]
        elif "jitter" in name or "dropout" in name:
            kwargs[name] = 0.0
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int):
            kwargs[name] = 2 + sum(map(ord, name)) % 50
    depth = values.get("num_hidden_layers")
    lists = {n: v for n, v in values.items() if isinstance(v, list) and v and len(v) == depth}
    lists = {n: v for n, v in lists.items() if all(isinstance(x, str) for x in v)}
    if depth is not None:
        kinds = {n: list(dict.fromkeys(v)) for n, v in lists.items()}
        count = max([2, *map(len, kinds.values())])
        kwargs["num_hidden_layers"] = count
        for n, found in kinds.items():
            kwargs[n] = [found[-1 - i % len(found)] for i in range(count)][::-1]
    if values.get("num_key_value_heads") == values.get("num_attention_heads"):
        kwargs.pop("num_key_value_heads", None)
        if "num_key_value_heads" in values:
            kwargs["num_key_value_heads"] = sizes["num_attention_heads"]
    kwargs |= {n: v for n, v in overrides.items() if not isinstance(v, Mapping) or n not in kwargs}
    return kind(**{n: v for n, v in kwargs.items() if v is not None})


def tiny_model(family: str, *, vocab_size: int = SIZES["vocab_size"], **options: Any) -> Any:
    """Return a model of a family with large weights, in training; `options` of its config."""
    kind, sizes = model_class(family), SIZES | {"vocab_size": vocab_size}
    config = tiny_config(kind.config_class, FAMILIES.get(family, {}) | options, sizes)
    config._attn_implementation = "eager"
    config.use_cache = False
    torch.manual_seed(0)
    model = kind(config)
    fill(model)
    if family == FROZEN_TOWER:
        model.model.visual.requires_grad_(False)
    return model.train()


def freeze_indexers(model: nn.Module) -> None:
    """Freeze what a model's own loss has no gradient for."""
    for name, param in model.named_parameters():
        if ".indexer." in name:
            param.requires_grad_(False)


def freeze_towers(model: Any) -> None:
    """Freeze what text-only rows have no gradient for: towers, and experts of image tokens."""
    text = {*get_text_decoder(model).parameters(), *model.get_output_embeddings().parameters()}
    for name, param in model.named_parameters():
        if param not in text or ".vision_moe." in name:
            param.requires_grad_(False)


def fill(model: nn.Module) -> None:
    """Weights large enough that no expert, bias or sink is invisible."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" not in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
            elif name.endswith(
                "tid2eid"
            ):  # the experts of each token id, zeros if nothing fills it
                ids_V1 = torch.arange(len(buffer))[:, None]
                buffer.copy_((ids_V1 + torch.arange(buffer.shape[1])) % SIZES["num_local_experts"])


def batch(model: Any, seed: int) -> dict[str, Tensor]:
    """Return two sequences of ids that are no special tokens, or with an image in each."""
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(52, 61, (2, 9), generator=generator)
    if model.config.model_type not in IMAGES:
        return {"input_ids": ids_BT}
    config = model.config.vision_config
    side = 2 * config.spatial_merge_size
    columns = config.in_channels * config.patch_size**2 * getattr(config, "temporal_patch_size", 1)
    ids_BT[:, 2:6] = model.config.image_token_id
    of_ids = inspect.signature(model.forward).parameters
    kinds = {n: (ids_BT == model.config.image_token_id).int() for n in of_ids if "token_type" in n}
    return kinds | {
        "input_ids": ids_BT,
        "pixel_values": torch.randn(2 * side**2, columns, generator=generator),
        "image_grid_thw": torch.tensor([[1, side, side]] * 2),
    }


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the cross entropy of each id from the logits of its own place, and the router loss."""
    asked = {"output_router_logits": True} if hasattr(model, "router_aux_loss_coef") else {}
    out = model(**inputs, **asked)
    targets = inputs["input_ids"].flatten() % out.logits.shape[-1]
    loss = nn.functional.cross_entropy(out.logits.flatten(0, 1).float(), targets)
    return loss if getattr(out, "aux_loss", None) is None else loss + 0.1 * out.aux_loss


def config_values(family: str, sizes: Mapping[str, Any] = SIZES) -> dict[str, Any]:
    """Return what a config.json of a family's small model holds."""
    kind = model_class(family)
    config = tiny_config(kind.config_class, FAMILIES.get(family, {}), sizes)
    config.architectures = [kind.__name__]
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values
