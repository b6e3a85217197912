"""plan_hf_tensors: the Hugging Face tensors that have the elements of each native tensor.

Legend: E experts, D model dim, F hidden dim of an expert.

Only names of MoE layers, of the bias of attention's output and of multi-token prediction differ:

| native | "fused" | "per_expert" | "mixtral" |
| --- | --- | --- | --- |
| mlp.router.weight | mlp.gate.weight | mlp.gate.weight | block_sparse_moe.gate.weight |
| mlp.experts.w1[3, 0] | ...gate_up_proj[3, :F] | ...3.gate_proj.weight | ...3.w1.weight |
| mlp.experts.w1[3, 1] | ...gate_up_proj[3, F:] | ...3.up_proj.weight | ...3.w3.weight |
| mlp.experts.w2[3] | ...down_proj[3] | ...3.down_proj.weight | ...3.w2.weight |

gpt-oss has one layout: matrices with inputs first, gate and up interleaved, and a bias with each.

| native | gpt-oss |
| --- | --- |
| mlp.router.weight, mlp.router.bias | the same |
| mlp.experts.w1[3, 0] | mlp.experts.gate_up_proj[3, :, 0::2] transposed |
| mlp.experts.w1[3, 1] | mlp.experts.gate_up_proj[3, :, 1::2] transposed |
| mlp.experts.w2[3] | mlp.experts.down_proj[3] transposed |
| mlp.experts.b1[3, 0] | mlp.experts.gate_up_proj_bias[3, 0::2] |
| mlp.experts.b2 | mlp.experts.down_proj_bias |

"fused" has the in-memory names of transformers >= 5. "mixtral" is the published format of Mixtral,
"per_expert" of all other families. DeepSeek-V3 has multi-token prediction after its last layer
(mtp.0 is model.layers.61), with copies of embedding and head. Qwen3-Next has one module, below mtp.

Nemotron-H has one mixer and one norm a layer, experts without a gate, and "backbone" for "model" in
"per_expert":

| native | Nemotron-H |
| --- | --- |
| self_attn, linear_attn, mlp | mixer |
| input_layernorm, post_attention_layernorm | norm |
| model.embed_tokens, model.norm | model.embeddings, model.norm_f |
| mlp.latent.w_down, mlp.latent.w_up | mixer.fc1_latent_proj, mixer.fc2_latent_proj |
| linear_attn.in_proj, rows by group: its z, x, B, C, dt | mixer.in_proj: all z, x, B, C, dt |
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal, NoReturn

from torch import Tensor, nn

from moecore.base.fields import check_arguments, format_name
from moecore.base.params import clean_name
from moecore.io.hf.config import FAMILIES
from moecore.io.hf.pieces import FileRecipe, FileView, Region, TensorPiece
from moecore.models.config import DecoderConfig
from moecore.models.decoder import Decoder

HFLayout = Literal["fused", "per_expert", "mixtral"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
EXPERT_NAMES = {"per_expert": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}
DENSE_NAMES = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
QWEN3_NEXT_MTP = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "norm.weight": "norm.weight",
}
LATENT_NAMES = {"latent.w_down": "fc1_latent_proj.weight", "latent.w_up": "fc2_latent_proj.weight"}
NEMOTRON_H = (
    *((rf"\.{native}$", f".{hf_name}") for native, hf_name in LATENT_NAMES.items()),
    (r"\.embed_tokens\.", ".embeddings."),
    (r"^(model|backbone)\.norm\.", r"\1.norm_f."),
    (r"\.(input|post_attention)_layernorm\.", ".norm."),
    (r"(\.\d+)\.(self_attn|linear_attn|mlp)\.", r"\1.mixer."),
)
GPT_OSS = {  # name in files, and the dim and step there of each native dim
    "experts.w1": ("gate_up_proj", ((0, 1), (2, 1), (2, 2), (1, 1))),
    "experts.b1": ("gate_up_proj_bias", ((0, 1), (1, 1), (1, 2))),
    "experts.w2": ("down_proj", ((0, 1), (2, 1), (1, 1))),
    "experts.b2": ("down_proj_bias", ((0, 1), (1, 1))),
}
EXPERT_BIAS = ("router.expert_bias", "gate.e_score_correction_bias")  # DeepSeek-V3


def plan_hf_tensors(
    config: DecoderConfig, layout: HFLayout, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, FileRecipe]:
    """Return {native name: `FileRecipe`} of a native decoder's tensors, in state dict order.

    A recipe lists the Hugging Face tensors that store the native tensor. `layout` selects the names
    of expert tensors. `shapes` maps native names to shapes; None = shapes of `Decoder(config)`.
    """
    check_arguments(plan_hf_tensors, locals())
    if shapes is None:
        skeleton = Decoder(config, device="meta").state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in skeleton.items()}
    plan = dict[str, FileRecipe]()
    for name, shape in shapes.items():
        native_pieces = _list_native_pieces(name, shape, config, layout)
        pieces = (replace(p, name=_translate_name(p.name, config, layout)) for p in native_pieces)
        plan[name] = FileRecipe(shape, tuple(pieces))
    return plan


def map_hf_copies(config: DecoderConfig) -> dict[str, str]:
    """Map each file tensor that is a copy (tied head, MTP's embedding) to the original's name."""
    head = EMBEDDING if config.tie_embeddings else HEAD
    copies = {HEAD: EMBEDDING} if config.tie_embeddings else {}
    for k in range(config.num_mtp_layers if not config.attention_gate else 0):
        prefix = f"model.layers.{config.num_layers + k}."
        copies[f"{prefix}embed_tokens.weight"] = EMBEDDING
        copies[f"{prefix}shared_head.head.weight"] = head
    return copies


def collect_model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and persistent buffers by name; tied tensors have all names."""
    if not isinstance(model, Decoder) and not hasattr(getattr(model, "config", None), "model_type"):
        raise_unknown_model(model)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        name = clean_name(name)
        if not isinstance(tensor, Tensor):
            raise NotImplementedError(
                f"model state {format_name(name)} ({type(tensor).__name__}) must be a tensor: "
                "remove it"
            )
        tensors[name] = tensor
    return tensors


def raise_unknown_model(model: nn.Module) -> NoReturn:
    """Raise NotImplementedError for a model whose Hugging Face names are not known."""
    raise NotImplementedError(
        f"model ({type(model).__name__}) must be a moecore Decoder or a transformers model, "
        "whose Hugging Face names are known: translate other names yourself"
    )


def map_model_copies(model: nn.Module) -> dict[str, str]:
    """Map the name of each file tensor that is a copy (a tied head) to the original's name."""
    if isinstance(model, Decoder):
        return map_hf_copies(model.config)
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return {}
    table = getattr(model, "get_input_embeddings", lambda: None)()
    name = next((n for n, m in model.named_modules() if m is table), "")  # in a language model
    return {HEAD: f"{clean_name(name)}.weight" if name else EMBEDDING}


def find_first_ignored_layer(model: nn.Module) -> int | None:
    """Return the index of the first MTP layer if the model class ignores these layers, or None."""
    config: Any = None if isinstance(model, Decoder) else getattr(model, "config", None)
    family = FAMILIES.get(getattr(config, "model_type", ""))
    return config.num_hidden_layers if family is not None and family.has_mtp else None


def infer_hf_layout(names: Collection[str]) -> HFLayout:
    """Infer the layout of `plan_hf_tensors` from tensor names; "fused" if there are no experts."""
    if any(".block_sparse_moe." in name for name in names):
        return "mixtral"
    published = re.compile(r"\.(mlp|mixer)\.experts\.\d+\.|^backbone\.")
    if any(published.search(name) for name in names):
        return "per_expert"
    return "fused"


def _list_native_pieces(
    name: str, shape: tuple[int, ...], config: DecoderConfig, layout: HFLayout
) -> tuple[TensorPiece, ...]:
    """Return the pieces that store a native tensor, with names for `_translate_name`."""
    prefix, _, part = name.partition(".mlp.")
    if name.endswith(".linear_attn.in_proj.weight"):
        return _list_mamba2_pieces(name, shape, config)
    if not part or part in DENSE_NAMES or (config.pattern and part in LATENT_NAMES):
        return (TensorPiece(name, (), shape),)
    assert config.moe is not None, "the tensor is part of an MoE layer"
    is_gpt_oss = config.moe.activation == "clamped_swiglu" and layout != "mixtral"
    expert_pieces = (_list_gpt_oss_pieces if is_gpt_oss else list_routed_pieces)(
        name, shape, layout
    )
    is_known = config.moe.gated or bool(config.pattern) or not part.endswith(".w1")
    if expert_pieces and is_known:
        return expert_pieces
    mlp_path = f"{prefix}.mlp"
    if layout != "mixtral" and part == EXPERT_BIAS[0]:
        return (TensorPiece(f"{mlp_path}.{EXPERT_BIAS[1]}", (), shape),)
    if layout != "mixtral" and part.startswith("shared.") and is_known:
        pieces = _list_shared_pieces(mlp_path, part, shape, config)
        if pieces:
            return pieces
    raise NotImplementedError(
        f"{format_name(name)} {shape} must have a Hugging Face name in layout ({layout!r}), but no "
        "family of decoder_config_from_hf has such a tensor: keep the native names, or choose "
        "another layout"
    )


def list_routed_pieces(
    name: str, shape: tuple[int, ...], layout: HFLayout
) -> tuple[TensorPiece, ...]:
    """Return the file tensors that store a router's or experts' weight; () for other tensors."""
    prefix, _, part = name.rpartition(".mlp.")
    mlp_path = f"{prefix}.{'block_sparse_moe' if layout == 'mixtral' else 'mlp'}"
    if part == "router.weight":
        return (TensorPiece(f"{mlp_path}.gate.weight", (), shape),)
    if part not in ("experts.w1", "experts.w2"):
        return ()
    is_gated = len(shape) == 4
    if layout == "fused":
        if part == "experts.w2" or not is_gated:
            role = "down_proj" if part == "experts.w2" else "up_proj"
            return (TensorPiece(f"{mlp_path}.experts.{role}", (), shape),)
        E, _, F, D = shape
        return (TensorPiece(f"{mlp_path}.experts.gate_up_proj", (), (E, 2 * F, D)),)
    gate, up, down = EXPERT_NAMES[layout]
    roles: list[tuple[str, Region]] = [(gate, (0,)), (up, (1,))] if is_gated else [(up, ())]
    roles = [(down, ())] if part == "experts.w2" else roles
    return tuple(
        TensorPiece(f"{mlp_path}.experts.{e}.{role}.weight", (e, *region), shape[-2:])
        for e in range(shape[0])
        for role, region in roles
    )


def _list_gpt_oss_pieces(
    name: str, shape: tuple[int, ...], layout: HFLayout
) -> tuple[TensorPiece, ...]:
    """Return the piece that stores a router or expert tensor of gpt-oss; () for other tensors."""
    layer_path, _, part = name.rpartition(".mlp.")
    if part in ("router.weight", "router.bias"):
        return (TensorPiece(name, (), shape),)
    if part not in GPT_OSS:
        return ()
    role, places = GPT_OSS[part]
    dims = tuple((d, n, step) for n, (d, step) in zip(shape, places, strict=True))
    file_dims = range(max(d for d, *_ in dims) + 1)
    file_shape = tuple(math.prod(n for d, n, _ in dims if d == dim) for dim in file_dims)
    view = FileView(file_shape, (0,) * len(file_shape), tuple(dim for dim in dims if dim[1] > 1))
    is_equal = part == "experts.b2"
    file_name = f"{layer_path}.mlp.experts.{role}"
    return (TensorPiece(file_name, (), shape, None if is_equal else view),)


def _list_mamba2_pieces(
    name: str, shape: tuple[int, ...], config: DecoderConfig
) -> tuple[TensorPiece, ...]:
    """Return the pieces that store Mamba-2's in_proj: z, x, B, C and time steps of each group."""
    mamba = config.linear_attention
    assert mamba is not None, "the tensor is part of a linear layer"
    h, r = mamba.num_k_heads, mamba.num_v_heads // mamba.num_k_heads
    values, keys, D = r * mamba.head_v_dim, mamba.head_k_dim, shape[1]
    pieces, row = list[TensorPiece](), 0
    for group in range(h):
        file_row = 0
        for rows in (values, values, keys, keys, r):
            start = file_row + group * rows
            view = FileView(shape, (start, 0), ((0, rows, 1), (1, D, 1)))
            pieces.append(TensorPiece(name, (slice(row, row + rows),), (rows, D), view))
            row, file_row = row + rows, file_row + h * rows
    return tuple(pieces)


def _translate_name(name: str, config: DecoderConfig, layout: HFLayout) -> str:
    """Translate a native tensor name to its name in files, except names of expert tensors."""
    if config.pattern:
        name = name if layout == "fused" else re.sub(r"^model\.", "backbone.", name)
        for native, hf_name in NEMOTRON_H:
            name = re.sub(native, hf_name, name)
        return name
    name = name.replace(".self_attn.o_bias", ".self_attn.o_proj.bias")
    match = re.match(r"mtp\.(\d+)\.(block\.)?(.*)", name)
    if match is None:
        return name
    k, in_block, rest = match.groups()
    if config.attention_gate:
        if k != "0":
            raise NotImplementedError(
                f"DecoderConfig.num_mtp_layers ({config.num_mtp_layers}) must be 1 or 0 in files "
                "of Qwen3-Next, which name one module: keep the native names"
            )
        return f"mtp.layers.0.{rest}" if in_block else f"mtp.{QWEN3_NEXT_MTP[rest]}"
    if not in_block and rest == "norm.weight":
        rest = "shared_head.norm.weight"
    return f"model.layers.{config.num_layers + int(k)}.{rest}"


def _list_shared_pieces(
    mlp_path: str, part: str, shape: tuple[int, ...], config: DecoderConfig
) -> tuple[TensorPiece, ...]:
    """Return the pieces of a shared expert's tensor ("shared.w1"); () for gates of several."""
    moe = config.moe
    assert moe is not None, "the tensor is part of an MoE layer"
    if moe.shared_gate and moe.num_shared_experts > 1:
        return ()
    name = f"{mlp_path}.{'shared_expert' if moe.shared_gate else 'shared_experts'}"
    names = {"shared.gate": f"{name}_gate.weight", "shared.w2": f"{name}.down_proj.weight"}
    if part in names or not moe.gated:
        return (TensorPiece(names.get(part, f"{name}.up_proj.weight"), (), shape),)
    F_, D = shape[0] // 2, shape[1]
    return (
        TensorPiece(f"{name}.gate_proj.weight", (slice(0, F_),), (F_, D)),
        TensorPiece(f"{name}.up_proj.weight", (slice(F_, 2 * F_),), (F_, D)),
    )
