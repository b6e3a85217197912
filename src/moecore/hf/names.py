"""Native decoder <-> Hugging Face: the same numbers under other names, bit for bit both ways.

Legend: E experts, D model dim, F hidden dim of an expert.

`hf_plan` has the Hugging Face tensors of which each native tensor is made; nothing is read, so
a reader of files can follow it one tensor at a time. `from_hf` and `to_hf` follow it on whole state
dicts of plain tensors. Only MoE layers and multi-token prediction differ in names:

| native | "fused" | "per_expert" | "mixtral" |
| --- | --- | --- | --- |
| mlp.router.weight | mlp.gate.weight | mlp.gate.weight | block_sparse_moe.gate.weight |
| mlp.experts.w1[3, 0] | ...gate_up_proj[3, :F] | ...3.gate_proj.weight | ...3.w1.weight |
| mlp.experts.w1[3, 1] | ...gate_up_proj[3, F:] | ...3.up_proj.weight | ...3.w3.weight |
| mlp.experts.w2[3] | ...down_proj[3] | ...3.down_proj.weight | ...3.w2.weight |

"fused" is what transformers >= 5 holds in memory; the other two are what is published: Mixtral's,
and that of everybody else. DeepSeek-V3 keeps multi-token prediction behind its last layer
(mtp.0 is model.layers.61), with copies of embedding and head.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from moecore.models.config import DecoderConfig
from moecore.models.decoder import Decoder

HFLayout = Literal["fused", "per_expert", "mixtral"]
Region = tuple[int | slice, ...]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
EXPERT_NAMES = {"per_expert": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}
DENSE_NAMES = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
EXPERT_BIAS = ("router.expert_bias", "gate.e_score_correction_bias")  # DeepSeek-V3


@dataclass(frozen=True, slots=True)
class Piece:
    """One Hugging Face tensor and the part of a native tensor that it is.

    Attributes:
        name: Hugging Face name.
        region: index into the native tensor; () = all of it.
        shape: of the Hugging Face tensor, with the elements of the region in the same order.
    """

    name: str
    region: Region
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one native tensor is made.

    Attributes:
        shape: of the native tensor.
        pieces: what it is made of; their regions do not overlap and cover it.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def assemble(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return the native tensor: a view of its only piece, or a new tensor.

        Args:
            state: Hugging Face tensors by name; only this recipe's are read, one after the other.

        Raises:
            ValueError: naming a piece of the wrong shape or dtype.
        """
        if len(self.pieces) == 1:
            return _read(state, self.pieces[0]).view(self.shape)
        whole: Tensor | None = None
        for piece in self.pieces:
            part = _read(state, piece)
            if whole is None:
                whole = part.new_empty(self.shape)
            if part.dtype != whole.dtype:
                raise ValueError(
                    f"{piece.name} ({part.dtype}) must have the dtype of {self.pieces[0].name} "
                    f"({whole.dtype}): convert one of them"
                )
            whole[piece.region] = part
        assert whole is not None, "a recipe has pieces"
        return whole


def hf_plan(config: DecoderConfig, layout: HFLayout) -> dict[str, Recipe]:
    """Return native name -> how it is made of Hugging Face tensors, in model order.

    Args:
        config: the decoder.
        layout: names and shapes on the Hugging Face side.

    Returns:
        A recipe for every parameter and buffer of `Decoder(config).state_dict()`.

    Raises:
        ValueError: for an unknown layout.
        NotImplementedError: when the layout has no name for a tensor of this decoder.
    """
    if layout not in get_args(HFLayout):
        choices = ", ".join(repr(c) for c in get_args(HFLayout))
        raise ValueError(f"layout ({layout!r}) must be one of {choices}: choose one")
    shapes = {n: tuple(t.shape) for n, t in Decoder(config, device="meta").state_dict().items()}
    return {n: Recipe(shape, _pieces(n, shape, config, layout)) for n, shape in shapes.items()}


def hf_copies(config: DecoderConfig) -> dict[str, str]:
    """Return names that checkpoints may hold besides the plan's -> the name of the same numbers.

    These are the head of a tied decoder, and what DeepSeek-V3 repeats for multi-token prediction.
    """
    head = EMBEDDING if config.tie_embeddings else HEAD
    copies = {HEAD: EMBEDDING} if config.tie_embeddings else {}
    for k in range(config.num_mtp_layers):
        prefix = f"model.layers.{config.num_layers + k}."
        copies[f"{prefix}embed_tokens.weight"] = EMBEDDING
        copies[f"{prefix}shared_head.head.weight"] = head
    return copies


def from_hf(state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Return the native state dict of a Hugging Face one, in the dtype of each tensor.

    Args:
        state: parameters and buffers of a whole model, in any layout; a lazy mapping is read one
            tensor at a time. Not changed.
        config: the decoder.

    Returns:
        What `Decoder(config).load_state_dict` takes. A tensor with one source is a view of it,
        others are new.

    Raises:
        ValueError: naming a tensor that is missing, left over (such as an expert too many), of the
            wrong shape, or a copy that differs from its original.
        NotImplementedError: for a quantised checkpoint.
    """
    names = set(state)  # looking a name up in a lazy mapping may read its tensor
    plan, copies = hf_plan(config, find_layout(names)), hf_copies(config)
    wanted = {piece.name for recipe in plan.values() for piece in recipe.pieces}
    _check_hf_names(names, wanted, copies.keys(), config)
    for copy, original in copies.items():
        if copy in names and not _same(state[copy], state[original]):
            raise ValueError(
                f"{copy} must equal {original}, because the decoder has one tensor for both: "
                "set tie_embeddings=False, or drop the copy"
            )
    return {name: recipe.assemble(state) for name, recipe in plan.items()}


def to_hf(
    state: Mapping[str, Tensor], config: DecoderConfig, *, layout: HFLayout
) -> dict[str, Tensor]:
    """Return the Hugging Face state dict of a native one, in the dtype of each tensor.

    Args:
        state: whole plain tensors by native name. Not changed.
        config: the decoder.
        layout: "fused" loads into transformers' modules; "per_expert" ("mixtral" for Mixtral) is
            what published checkpoints look like.

    Returns:
        Views of the native tensors. DeepSeek-V3's copies for multi-token prediction are included
        and share memory with their originals; a tied head is left out, as transformers saves it.

    Raises:
        ValueError: naming a tensor that is missing, left over or of the wrong shape.
        NotImplementedError: when the layout has no name for a tensor of this decoder.
    """
    plan = hf_plan(config, layout)
    for wrong, relation in (
        ([n for n in plan if n not in state], "must be in the native state dict"),
        ([n for n in state if n not in plan], "must be a tensor of this decoder"),
    ):
        if wrong:
            raise ValueError(f"{_first(wrong)} {relation}: give the config that the state is of")
    result: dict[str, Tensor] = {}
    for name, recipe in plan.items():
        _check_shape(name, state[name], recipe.shape)
        for piece in recipe.pieces:
            result[piece.name] = state[name][piece.region].reshape(piece.shape)
    for copy, original in hf_copies(config).items():
        if copy != HEAD:
            result[copy] = result[original]
    return result


def find_layout(names: Collection[str]) -> HFLayout:
    """Return the layout of a Hugging Face state dict with these names; "fused" without experts."""
    if any(".block_sparse_moe." in name for name in names):
        return "mixtral"
    if any(re.search(r"\.mlp\.experts\.\d+\.", name) for name in names):
        return "per_expert"
    return "fused"


def _pieces(
    name: str, shape: tuple[int, ...], config: DecoderConfig, layout: HFLayout
) -> tuple[Piece, ...]:
    """The sources of one native tensor."""
    path = _outer_name(name, config)
    prefix, _, part = path.partition(".mlp.")
    if not part or part in DENSE_NAMES:
        return (Piece(path, (), shape),)
    where = f"{prefix}.{'block_sparse_moe' if layout == 'mixtral' else 'mlp'}"
    if part == "router.weight":
        return (Piece(f"{where}.gate.weight", (), shape),)
    if part in ("experts.w1", "experts.w2") and len(shape) == (4 if part == "experts.w1" else 3):
        return _expert_pieces(f"{where}.experts", part, shape, layout)
    if layout != "mixtral" and part == EXPERT_BIAS[0]:
        return (Piece(f"{where}.{EXPERT_BIAS[1]}", (), shape),)
    if layout != "mixtral" and part.startswith("shared."):
        pieces = _shared_pieces(where, part, shape, config)
        if pieces:
            return pieces
    raise NotImplementedError(
        f"{name} {shape} must have a Hugging Face name in layout ({layout!r}), but Mixtral, OLMoE, "
        "Qwen3-MoE, Qwen2-MoE and DeepSeek-V3 have no such tensor: keep the native names, or "
        "choose another layout"
    )


def _outer_name(name: str, config: DecoderConfig) -> str:
    """The name outside of an MoE layer: multi-token prediction comes after the last layer."""
    found = re.match(r"mtp\.(\d+)\.(block\.)?(.*)", name)
    if found is None:
        return name
    k, in_block, rest = found.groups()
    if not in_block and rest == "norm.weight":
        rest = "shared_head.norm.weight"
    return f"model.layers.{config.num_layers + int(k)}.{rest}"


def _expert_pieces(
    where: str, part: str, shape: tuple[int, ...], layout: HFLayout
) -> tuple[Piece, ...]:
    """The sources of w1 [E, 2, F, D] or w2 [E, D, F]."""
    if layout == "fused":
        if part == "experts.w2":
            return (Piece(f"{where}.down_proj", (), shape),)
        E, _, F, D = shape
        return (Piece(f"{where}.gate_up_proj", (), (E, 2 * F, D)),)
    gate, up, down = EXPERT_NAMES[layout]
    roles = [(down, ())] if part == "experts.w2" else [(gate, (0,)), (up, (1,))]
    matrix = shape[-2:]
    return tuple(
        Piece(f"{where}.{e}.{role}.weight", (e, *region), matrix)
        for e in range(shape[0])
        for role, region in roles
    )


def _shared_pieces(
    where: str, part: str, shape: tuple[int, ...], config: DecoderConfig
) -> tuple[Piece, ...]:
    """The sources of a shared expert: with a gate those of Qwen2-MoE, without DeepSeek-V3's."""
    moe = config.moe
    assert moe is not None, "the tensor is part of an MoE layer"
    if not moe.gated or (moe.shared_gate and moe.num_shared_experts > 1):
        return ()  # one gate per expert has no name
    name = f"{where}.{'shared_expert' if moe.shared_gate else 'shared_experts'}"
    if part == "shared.gate":
        return (Piece(f"{name}_gate.weight", (), shape),)
    if part == "shared.w2":
        return (Piece(f"{name}.down_proj.weight", (), shape),)
    F_, D = shape[0] // 2, shape[1]
    return (
        Piece(f"{name}.gate_proj.weight", (slice(0, F_),), (F_, D)),
        Piece(f"{name}.up_proj.weight", (slice(F_, 2 * F_),), (F_, D)),
    )


def _check_hf_names(
    found: Collection[str], wanted: Collection[str], copies: Collection[str], config: DecoderConfig
) -> None:
    left_over = [n for n in sorted(found) if n not in wanted and n not in copies]
    quantised = [n for n in left_over if n.endswith("weight_scale_inv")]
    if quantised:
        raise NotImplementedError(
            f"{_first(quantised)} must not be there: the checkpoint is quantised, use load_hf, "
            "which dequantises files"
        )
    experts = 0 if config.moe is None else config.moe.num_experts
    sizes = f"num_layers={config.num_layers}, num_experts={experts}"
    sizes += f", num_mtp_layers={config.num_mtp_layers}"
    if left_over:
        raise ValueError(
            f"{_first(left_over)} must be a tensor of the decoder ({sizes}): correct the config, "
            "or drop it from the state dict"
        )
    missing = [n for n in sorted(wanted) if n not in found]
    if missing:
        raise ValueError(
            f"{_first(missing)} must be in the Hugging Face state dict of a decoder with {sizes}: "
            "correct the config, or give the whole checkpoint"
        )


def _read(state: Mapping[str, Tensor], piece: Piece) -> Tensor:
    tensor = state[piece.name]
    _check_shape(piece.name, tensor, piece.shape)
    return tensor


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} {tuple(tensor.shape)} must have the shape {shape} that the config gives: "
            "correct the config"
        )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.is_meta or torch.equal(a, b)


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
