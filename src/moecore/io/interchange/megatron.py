"""The correspondence of Megatron-Core's tensors and Hugging Face tensors, by rows.

Legend: L layers, E experts, D model dim, F hidden dim, G groups of query heads (heads of keys and
values), q query heads of a group, d head dim.

A block is one matrix or vector of one layer and expert; its rows are rows of Hugging Face tensors
("per_expert" names), one part after the other:

| Megatron-Core, in decoder.layers | rows |
| --- | --- |
| self_attention.linear_qkv.weight [G * (q + 2) * d, D] | per group: its q query heads, k, v |
| self_attention.linear_proj.weight | o_proj |
| self_attention.linear_qkv.layer_norm_weight | input_layernorm |
| self_attention.q_layernorm.weight, k_layernorm | q_norm, k_norm |
| mlp.linear_fc1.weight [2F, D] | all of gate_proj, then all of up_proj |
| mlp.router.weight, mlp.router.expert_bias | gate.weight, gate.e_score_correction_bias |
| mlp.experts.experts.linear_fc1.weight [E, 2F, D] | gate_proj, up_proj of each expert |
| mlp.shared_experts.linear_fc1.weight, .gate_weight | shared_experts, shared_expert_gate |
| self_attention.linear_q_down_proj, _q_up_proj, _kv_down_proj, _kv_up_proj | MLA's projections |

Layers with equal shapes are stacked in one tensor, [L, ...]; with dense layers, each layer has
its own names (decoder.layers.3.). Both are supported, and also norms that are not fused into
the next linear, one tensor per expert, and gate and up in two tensors (weight_w, weight_v).
Rows of the embedding and of the output layer after the vocabulary are padding.

Source: Megatron-LM's sharded state dicts and Megatron Bridge's tables of names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, NoReturn

from moecore.base.fields import format_name
from moecore.io.hf.names import EMBEDDING, HEAD, map_hf_copies, plan_hf_tensors
from moecore.io.hf.pieces import map_file_shapes
from moecore.models.config import DecoderConfig

WORDS = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
ROOTS = ("embedding.", "decoder.", "output_layer.", "mtp.")  # prefixes of the model's tensors
LAYERS, MTP = "decoder.layers", "mtp.layers"
Shapes = Mapping[str, tuple[int, ...]]
# Fields that Megatron-Core supports. Any other field must have its default.
SUPPORTED_FIELDS = frozenset(
    {
        *("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "windows"),
        *("qk_norm", "rope_theta", "rotary_dim", "norm_eps", "tie_embeddings", "dense_layers"),
        *("mlp_hidden_dim", "num_mtp_layers", "mtp_repeats", "mtp_loss_coef", "mtp_detached"),
        *("max_seq_len", "ce_chunk_tokens", "mla.kv_lora_rank", "mla.qk_nope_head_dim"),
        *("mla.qk_rope_head_dim", "mla.v_head_dim", "mla.q_lora_rank", "mla.norm_eps", "yarn"),
        *("mla.yarn", "moe.dim", "moe.hidden_dim", "moe.num_experts", "moe.top_k", "moe.balance"),
        *("moe.score_function", "moe.score_order", "moe.normalize_weights", "moe.num_groups"),
        *("moe.routed_scaling_factor", "moe.top_groups", "moe.group_experts", "moe.expert_bias"),
        *("moe.router_dtype", "moe.router_jitter", "moe.capacity", "moe.shared_hidden_dim"),
        *("moe.num_shared_experts", "moe.shared_gate"),
    }
)
# Arguments of Megatron-LM that change a model's function, and that DecoderConfig does not support.
OTHER_FUNCTIONS = (
    *("activation_func_clamp_value", "activation_func_tanh_clamp_scale", "glu_linear_offset"),
    *("activation_func_tanh_clamp_scale_linear", "apply_layernorm_1p", "quick_geglu"),
    *("moe_apply_probs_on_input", "rotary_interleaved", "no_rope_freq", "qk_l2_norm"),
    *("apply_residual_connection_post_layernorm", "use_rope_scaling"),
)
# Arguments with one value that DecoderConfig does not support and that adds no tensor.
OTHER_CHOICES = {"softmax_type": "off-by-one", "position_embedding_type": "none"}
# Blocks of a layer: names in Megatron-Core (the first is written, all are read), and the Hugging
# Face tensors with its rows. Blocks of tensors that the model lacks are skipped.
Table = tuple[tuple[str, str], ...]
GROUPED: Table = (
    ("q_layernorm.weight", "q_norm.weight"),
    ("k_layernorm.weight", "k_norm.weight"),
    ("linear_proj.weight", "o_proj.weight"),
)
MLA: Table = (
    ("linear_q_proj.weight", "q_proj.weight"),
    ("linear_q_down_proj.weight", "q_a_proj.weight"),
    ("linear_q_up_proj.layer_norm_weight q_layernorm.weight", "q_a_layernorm.weight"),
    ("linear_q_up_proj.weight", "q_b_proj.weight"),
    ("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight"),
    ("linear_kv_up_proj.layer_norm_weight kv_layernorm.weight", "kv_a_layernorm.weight"),
    ("linear_kv_up_proj.weight", "kv_b_proj.weight"),
    ("linear_proj.weight", "o_proj.weight"),
)
MLP: Table = (
    ("linear_fc1.weight", "gate_proj.weight up_proj.weight"),
    ("linear_fc2.weight", "down_proj.weight"),
)
ROUTER: Table = (
    ("router.weight", "gate.weight"),
    ("router.expert_bias", "gate.e_score_correction_bias"),
    ("shared_experts.gate_weight", "shared_expert_gate.weight"),
)
MTP_NORMS: Table = (
    *((f"{name}.weight", f"{name}.weight") for name in ("enorm", "hnorm", "eh_proj")),
    ("final_layernorm.weight", "shared_head.norm.weight"),
)


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A range of rows of a Hugging Face tensor."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class MegatronBlock:
    """A matrix or vector of a layer or expert in Megatron-Core, and the Hugging Face rows in it."""

    names: tuple[str, ...]  # in its layer; the first is written, all are read
    parts: tuple[TensorPart, ...]
    shape: tuple[int, ...]
    layers: str = ""  # LAYERS or MTP; "" outside of layers
    layer: int = 0
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Name of the Megatron-Core tensor that stores a `MegatronBlock`, and index in the tensor."""

    key: str
    index: tuple[int, ...]  # into the first dims, which are layers, experts, both or none
    dims: tuple[int, ...]  # sizes of the first dims
    rows: int  # size of the next dim


def build_megatron_blocks(config: DecoderConfig) -> list[MegatronBlock]:
    """Return a decoder's `MegatronBlock`s; NotImplementedError if Megatron-Core lacks a tensor."""
    shapes = map_file_shapes(plan_hf_tensors(config, "per_expert"))
    unnamed = ["proj.bias", "proj_bias", "router.bias", "sinks", "conv1d.weight"]
    unnamed += ["q_proj.weight"] if config.attention_gate else []
    unnamed += ["norm.weight"] if config.zero_centered_norms or config.pattern else []
    unnamed += ["mlp.up_proj.weight"] if config.mlp_activation == "relu2" else []
    for name in shapes:
        if name.endswith(tuple(unnamed)):
            _refuse_unnamed(name, shapes)
    blocks = _build_blocks(((WORDS, EMBEDDING),), shapes)
    for i in range(config.num_layers):
        layer_blocks = _build_layer_blocks(f"model.layers.{i}.", config, shapes)
        blocks += [replace(block, layers=LAYERS, layer=i) for block in layer_blocks]
    last = (("decoder.final_layernorm.weight", "model.norm.weight"), (OUTPUT, HEAD))
    blocks += _build_blocks(last, shapes)
    for k in range(config.num_mtp_layers):
        hf_prefix = f"model.layers.{config.num_layers + k}."
        mtp_blocks = _build_blocks(MTP_NORMS, shapes, hf_prefix=hf_prefix)
        for block in _build_layer_blocks(hf_prefix, config, shapes):
            inner = ("transformer_layer.", "mtp_model_layer.")
            names = tuple(f"{outer}{name}" for outer in inner for name in block.names)
            mtp_blocks.append(replace(block, names=names))
        blocks += [replace(block, layers=MTP, layer=k) for block in mtp_blocks]
    covered = {part.name for block in blocks for part in block.parts}
    for name in shapes:
        if name not in covered:
            _refuse_unnamed(name, shapes)
    problem = next(_find_unsupported_fields(config), None)
    if problem is not None:
        raise NotImplementedError(
            f"DecoderConfig.{problem}, else Megatron-Core computes another function of these "
            "weights: keep native files, or Hugging Face's"
        )
    return blocks


def _find_unsupported_fields(config: DecoderConfig) -> Iterator[str]:
    """Yield an error text for each config field that Megatron-Core does not support."""
    parts: list[tuple[str, Any]] = [("", config), ("moe.", config.moe), ("mla.", config.mla)]
    for prefix, part in parts:
        for field in fields(part) if part is not None else ():
            name, value = prefix + field.name, getattr(part, field.name)
            if name not in (*SUPPORTED_FIELDS, "moe", "mla") and value != field.default:
                yield f"{name} ({value!r}) must be {field.default!r}"
    mla, moe = config.mla, config.moe
    if mla is not None and mla.norm_eps != config.norm_eps:
        yield f"mla.norm_eps ({mla.norm_eps}) must be norm_eps ({config.norm_eps})"
    if moe is None:
        return
    if moe.top_groups < moe.num_groups and moe.group_experts != moe.top_k // moe.top_groups:
        yield (
            f"moe.group_experts ({moe.group_experts}) must be top_k ({moe.top_k}) // top_groups "
            f"({moe.top_groups})"
        )
    if moe.score_function != "softmax" and moe.normalizes != (moe.top_k > 1):
        yield f"moe.normalize_weights ({moe.normalizes}) must be {moe.top_k > 1}"


def _refuse_unnamed(name: str, shapes: Shapes) -> NoReturn:
    """Raise NotImplementedError: Megatron-Core has no known name for the tensor `name`."""
    raise NotImplementedError(
        f"{format_name(name)} {shapes[name]} must have a name in Megatron-Core, which has none "
        "that is known: go by way of a Hugging Face directory and Megatron Bridge"
    )


def get_export_place(block: MegatronBlock, config: DecoderConfig) -> LayerPlace:
    """Return the Megatron-Core tensor to which a block is exported, and the block's index in it."""
    is_stacked = not config.dense_layers  # all layers have equal shapes
    return next(_list_candidate_places(block, config, stacked=is_stacked))[0]


def find_stored_tensors(
    megatron_block: MegatronBlock, shapes: Shapes, config: DecoderConfig
) -> tuple[tuple[LayerPlace, ...], list[str]]:
    """Return a block's `LayerPlace`s (none, one, or two for gate and up), and error texts."""
    for stacked in (True, False):
        for places in _list_candidate_places(megatron_block, config, stacked=stacked):
            num_dims = [(shapes.get(place.key), len(place.index)) for place in places]
            if all(s is not None and len(s) == n + len(megatron_block.shape) for s, n in num_dims):
                problems = (_find_shape_problem(place, megatron_block, shapes) for place in places)
                return places, list(chain.from_iterable(problems))
    place = get_export_place(megatron_block, config)
    return (), [f"{place.key}{list(place.index) or ''} is missing"]


def _list_candidate_places(
    block: MegatronBlock, config: DecoderConfig, *, stacked: bool
) -> Iterator[tuple[LayerPlace, ...]]:
    """Yield each tuple of tensors, one or (gate, up), that may store a block."""
    prefix = f"{block.layers}." if block.layers else ""
    index, dims = [block.layer], [config.num_layers]
    if not stacked or block.layers != LAYERS:
        prefix += f"{block.layer}." if block.layers else ""
        index, dims = [], []
    num_experts = config.moe.num_experts if config.moe else 0
    for name in block.names:
        for form, expert in _list_expert_names(name, block.expert):
            index_and_dims = (*index, *expert), (*dims, *(num_experts for _ in expert))
            yield (LayerPlace(f"{prefix}{form}", *index_and_dims, block.shape[0]),)
            if "linear_fc1.weight" in form:
                yield tuple(
                    LayerPlace(f"{prefix}{form}{half}", *index_and_dims, block.shape[0] // 2)
                    for half in ("_w", "_v")
                )


def _list_expert_names(name: str, expert: int | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each name of an expert's matrix, and the index in it if it has all experts."""
    if expert is None:
        yield name, ()
        return
    before, _, matrix = name.partition("experts.")
    yield f"{before}experts.experts.{matrix}", (expert,)
    yield f"{before}experts.experts.{expert}.{matrix}", ()
    yield f"{before}experts.local_experts.{expert}.{matrix}", ()
    yield f"{before}experts.{matrix}{expert}", ()
    yield f"{before}experts.{matrix}", (expert,)


def _find_shape_problem(place: LayerPlace, block: MegatronBlock, shapes: Shapes) -> Iterator[str]:
    """Yield an error text if the stored tensor has another shape than the block."""
    shape, depth = shapes[place.key], len(place.index)
    expected_shape = (*place.dims, place.rows, *block.shape[1:])
    is_padded = block.names[0] in (WORDS, OUTPUT) and shape[depth] >= place.rows
    unpadded_shape = (*shape[:depth], place.rows, *shape[depth + 1 :]) if is_padded else shape
    if unpadded_shape != expected_shape:
        yield f"{place.key} {shape} must be {expected_shape}"


def _build_blocks(
    table: Table, shapes: Shapes, prefix: str = "", hf_prefix: str = ""
) -> list[MegatronBlock]:
    """Build the blocks of (Megatron-Core, Hugging Face names) pairs that are in `shapes`."""
    blocks = []
    for names, hf_names in table:
        parts = [f"{hf_prefix}{name}" for name in hf_names.split()]
        if parts[0] in shapes:
            rows = tuple(TensorPart(name, 0, shapes[name][0]) for name in parts)
            shape = (sum(part.stop for part in rows), *shapes[parts[0]][1:])
            names_in_layer = tuple(f"{prefix}{name}" for name in names.split())
            blocks.append(MegatronBlock(names_in_layer, rows, shape))
    return blocks


def _build_layer_blocks(
    hf_prefix: str, config: DecoderConfig, shapes: Shapes
) -> list[MegatronBlock]:
    """Build the blocks of the layer at `hf_prefix`; `shapes` are those of Hugging Face tensors."""
    is_moe = f"{hf_prefix}mlp.gate.weight" in shapes
    norm, q_or_qkv = "input_layernorm.weight", "linear_q_proj" if config.mla else "linear_qkv"
    norms = [norm, f"self_attention.{q_or_qkv}.layer_norm_weight"]
    mlp_norms = ["pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"]
    table = (
        (" ".join(norms if config.mla else norms[::-1]), norm),
        (" ".join(mlp_norms if is_moe else mlp_norms[::-1]), "post_attention_layernorm.weight"),
    )
    attention = MLA if config.mla else GROUPED
    blocks = _build_blocks(table, shapes, hf_prefix=hf_prefix)
    blocks += _build_blocks(attention, shapes, "self_attention.", f"{hf_prefix}self_attn.")
    blocks += [] if config.mla else [_build_qkv_block(hf_prefix, config, shapes)]
    if not is_moe:
        return blocks + _build_blocks(MLP, shapes, "mlp.", f"{hf_prefix}mlp.")
    assert config.moe is not None, "the layer has a router"
    blocks += _build_blocks(ROUTER, shapes, "mlp.", f"{hf_prefix}mlp.")
    for shared in ("shared_expert", "shared_experts"):
        blocks += _build_blocks(MLP, shapes, "mlp.shared_experts.", f"{hf_prefix}mlp.{shared}.")
    for e in range(config.moe.num_experts):
        expert_blocks = _build_blocks(MLP, shapes, "mlp.experts.", f"{hf_prefix}mlp.experts.{e}.")
        blocks += [replace(block, expert=e) for block in expert_blocks]
    return blocks


def _build_qkv_block(hf_prefix: str, config: DecoderConfig, shapes: Shapes) -> MegatronBlock:
    """Build the QKV block of the layer at `hf_prefix`; `shapes` are of Hugging Face tensors."""
    q, k, v = (f"{hf_prefix}self_attn.{name}_proj.weight" for name in "qkv")
    d, groups = config.head_dim, config.num_kv_heads
    per_group = config.num_heads // groups * d
    parts = []
    for g in range(groups):
        parts.append(TensorPart(q, g * per_group, (g + 1) * per_group))
        parts += [TensorPart(name, g * d, (g + 1) * d) for name in (k, v)]
    rows = sum(part.stop - part.start for part in parts)
    return MegatronBlock(("self_attention.linear_qkv.weight",), tuple(parts), (rows, shapes[q][1]))


def build_optional_head(config: DecoderConfig, shapes: Shapes) -> MegatronBlock | None:
    """Return the tied output layer's block if Megatron-Core's `shapes` have it, otherwise None."""
    if HEAD not in map_hf_copies(config) or OUTPUT not in shapes:
        return None
    shape = (config.vocab_size, config.dim)
    return MegatronBlock((OUTPUT,), (TensorPart(HEAD, 0, shape[0]),), shape)
