"""The parameters of a model that Muon steps, as matrices.

    assignment = assign_matrices(model)      # after parallelize_moe; print(assignment)

A parameter is viewed as [batch, rows, columns]: one matrix, or one per expert. A `MatrixCut`
divides a stored matrix into several: gate and up, or queries, keys and values. The class of a
parameter's module decides: experts and their layout, shared experts, latent projections, routers,
linears.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from moecore.base.fields import CheckedRecord, Count, FieldErrors, OneOf, check_arguments
from moecore.base.params import clean_name, compute_global_indices
from moecore.models.backbone import Embedding
from moecore.moe.experts import Experts
from moecore.moe.router import Router
from moecore.moe.shared_experts import Latent, SharedExpert
from moecore.parallel.model.parallel_state import find_staged_module

HEADS = frozenset(("lm_head", "output", "score", "embed_out"))
ROUTERS = frozenset(("gate", "router"))  # last parts of names of transformers' own routers
VECTOR, BIAS, EMBEDDING, HEAD = "a vector", "a bias", "an embedding", "a head"  # reasons
ROUTER = "router"
FUSED = ("qkv", "query_key_value", "c_attn")  # parts of names


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixCut(CheckedRecord):
    """Several matrices that are stored in one, concatenated along its rows or columns.

    The dim consists of `repeats` equal groups, each divided into pieces of `sizes`. Matrix i is the
    concatenation of the i-th piece of every group. Example, 4 query heads, 2 key and 2 value heads
    of dim 8: if all queries are first, sizes=(32, 16, 16). With 2 groups of 2 queries, 1 key and 1
    value, sizes=(16, 8, 8), repeats=2.

    Attributes:
        dim: 0 = rows, 1 = columns.
        sizes: sizes of the pieces of a group, along `dim`.
        repeats: number of groups.
    """

    dim: Annotated[int, OneOf((0, 1))] = 0
    sizes: tuple[Count, ...]
    repeats: Count = 1

    @property
    def length(self) -> int:
        """Size of the dim that is divided."""
        return sum(self.sizes) * self.repeats


class MatrixPart(NamedTuple):
    """Indices (int64) of a shard in the local tensor and in the full matrices of a section."""

    batch: Tensor  # which matrices, in local order
    rows: Tensor  # indices in the rank's local tensor
    matrix_rows: Tensor  # the indices of the same rows in the full matrix
    columns: Tensor  # as `rows`
    matrix_columns: Tensor  # as `matrix_rows`


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixLayout(CheckedRecord):
    """View of a parameter as [batch, rows, columns]; `sections` divides each matrix into several.

    If `transposed`, columns are the outputs of the linear, otherwise rows are.
    """

    batch: Count
    rows: Count
    columns: Count
    sections: MatrixCut | None = None
    transposed: bool = False

    def _find_field_errors(self) -> FieldErrors:
        if self.sections is not None:
            name = ("rows", "columns")[self.sections.dim]
            if self.sections.length != (length := getattr(self, name)):
                yield "sections", f"have sum(sizes) * repeats = {name} ({length}): correct it"

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, columns) of each matrix into which `sections` divides; one entry without it."""
        if self.sections is None:
            return [(self.rows, self.columns)]
        sizes = [size * self.sections.repeats for size in self.sections.sizes]
        if self.sections.dim == 0:
            return [(size, self.columns) for size in sizes]
        return [(self.rows, size) for size in sizes]

    def make_output_layout(self) -> Self:
        """Return the layout of one element per output: [batch, rows, 1] or [batch, 1, columns]."""
        if self.sections is not None and self.sections.dim != int(self.transposed):
            raise ValueError(
                f"MatrixCut.dim ({self.sections.dim}) must be {int(self.transposed)}, that of "
                "outputs, with beta2, so that an output is of one matrix: drop beta2 or the "
                "MatrixCut"
            )
        return replace(self, rows=1) if self.transposed else replace(self, columns=1)

    def view_as_matrices(self, local_shard: Tensor) -> Tensor:
        """View a local shard as [batch, rows, columns]; columns are its last dim. Shares memory."""
        first, *middle, last = local_shard.shape
        if local_shard.ndim == 2:
            return local_shard[None]
        return local_shard.view(first, math.prod(middle), last)

    def list_parts(
        self, param: Tensor, coordinate: Sequence[int] | None = None
    ) -> list[MatrixPart]:
        """Return a `MatrixPart` per section, of the rank at `coordinate` (None = this rank)."""
        indices = compute_global_indices(param, coordinate)
        if len(indices) == 2:
            indices = [torch.arange(1, device="cpu"), *indices]
        if len(indices) == 4:  # gate and up in a dim of their own
            indices[1:3] = [(indices[1][:, None] * param.shape[2] + indices[2]).flatten()]
        batch, *dims = indices
        places = (torch.arange(index.numel(), device="cpu") for index in dims)
        axes = [[pair] * len(self.shapes) for pair in zip(places, dims, strict=True)]
        if self.sections is not None:
            cut_dim, sizes = self.sections.dim, self.sections.sizes
            run, place = dims[cut_dim] // sum(sizes), dims[cut_dim] % sum(sizes)
            start, axes[cut_dim] = 0, []
            for size in sizes:  # (indices in the local tensor, in the section's matrix)
                (local,) = ((place >= start) & (place < start + size)).nonzero(as_tuple=True)
                axes[cut_dim].append((local, run[local] * size + place[local] - start))
                start += size
        return [MatrixPart(batch, *rows, *columns) for rows, columns in zip(*axes, strict=True)]


Choice = Literal["muon", "adamw"]
Overrides = Annotated[
    tuple[tuple[str, Choice | MatrixCut], ...],
    'pass a tuple of pairs, like (("*.router.weight", "adamw"),)',
]


class Decision(NamedTuple):
    """A parameter, its `MatrixLayout` if Muon steps it (None = AdamW steps it), and the reason."""

    param: nn.Parameter
    layout: MatrixLayout | None
    reason: str


@dataclass(frozen=True, eq=False, slots=True)
class MatrixAssignment:
    """The optimizer of each trained parameter, Muon or AdamW; its `str` is a table.

    Attributes:
        decisions: each name -> the parameter, its `MatrixLayout` (None = AdamW), and the reason.
        is_stage: whether the model is a pipeline stage, which may have no matrices.
    """

    decisions: dict[str, Decision]
    is_stage: bool = False

    @property
    def matrices(self) -> dict[nn.Parameter, MatrixLayout]:
        """Parameter -> `MatrixLayout`, for all parameters that Muon steps."""
        return {d.param: d.layout for d in self.decisions.values() if d.layout is not None}

    @property
    def adamw_params(self) -> list[nn.Parameter]:
        """The parameters that AdamW steps."""
        return [d.param for d in self.decisions.values() if d.layout is None]

    def __str__(self) -> str:
        lines = []
        for name, (param, layout, reason) in self.decisions.items():
            if layout is None:
                lines.append(f"adamw  {name} {list(param.shape)}: {reason}")
            else:
                shapes = " + ".join(f"{rows} x {columns}" for rows, columns in layout.shapes)
                lines.append(f"muon   {name}: {layout.batch} x ({shapes}), {reason}")
        return "\n".join(lines)


def assign_matrices(model: nn.Module, overrides: Overrides = ()) -> MatrixAssignment:
    """Return which trained parameters of a model Muon steps, and as which matrices.

    Args:
        model: parallelized or plain. The result refers to its current parameter objects.
        overrides: pairs of an `fnmatch` pattern for parameter names, and "muon", "adamw", or a
            `MatrixCut` of the rows or columns. The first matching pattern is used.

    Raises:
        ValueError: for a pattern that matches no trained parameter, or an override that its
            parameter does not support.
    """
    check_arguments(assign_matrices, locals())
    modules = {clean_name(path): module for path, module in model.named_modules()}
    choices: dict[nn.Parameter, list[tuple[MatrixLayout | None, str]]] = {}  # several if tied
    for path, module in modules.items():
        parent = modules[path.rpartition(".")[0]]
        for leaf, param in module.named_parameters(recurse=False):
            if param.requires_grad:
                choice = _choose_layout(path, module, parent, leaf)
                choices.setdefault(param, []).append(choice)
    decisions = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            clean = clean_name(name)
            # One use that AdamW steps (an embedding, tied to a head) decides for all.
            layout, reason = min(choices[param], key=lambda choice: choice[0] is not None)
            override = next((c for pattern, c in overrides if fnmatchcase(clean, pattern)), None)
            decisions[clean] = _apply_override(clean, Decision(param, layout, reason), override)
    staged, stages = find_staged_module(model)
    names = {*decisions}
    if stages is not None:
        (prefix,) = (f"{name}." if name else "" for name, m in modules.items() if m is staged)
        names |= {prefix + name for name in stages.num_holders}
    for pattern, _ in overrides:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"overrides ({pattern!r}) must match a trained parameter: correct the pattern"
            )
    return MatrixAssignment(decisions, is_stage=stages is not None)


def _apply_override(
    param_name: str, decision: Decision, override: Choice | MatrixCut | None
) -> Decision:
    """Return `decision` changed by the user's choice; ValueError if it has no matrix."""
    param, layout, _ = decision
    if override is None or (override == "muon" and layout is not None):
        return decision
    if override == "adamw":
        return Decision(param, None, "overridden")
    full_layout = layout or _make_full_layout(param)
    if full_layout is None:
        raise ValueError(
            f"overrides ({override!r}) must be 'adamw' for {param_name} {tuple(param.shape)}, "
            "which is no matrix: correct the pattern"
        )
    sections = override if isinstance(override, MatrixCut) else full_layout.sections
    return Decision(param, replace(full_layout, sections=sections), "overridden")


def _choose_layout(
    module_path: str, module: nn.Module, parent: nn.Module, param_name: str
) -> tuple[MatrixLayout | None, str]:
    """Return the layout of a parameter of `module` (None = AdamW), and its kind or the reason."""
    param, last = getattr(module, param_name), module_path.rpartition(".")[2]
    if isinstance(module, Experts):
        return _make_expert_layout(module, param_name)
    is_thin = 1 in param.shape
    if param.ndim < 2 or (is_thin and param.ndim > 2):
        return None, VECTOR
    if isinstance(module, nn.Embedding | Embedding) or "embed" in last:
        return None, EMBEDDING
    if getattr(module, "is_fsdp_head", False) or last in HEADS:
        return None, HEAD
    if "lora_" in module_path or "lora_" in param_name:
        return None, "a low-rank factor"
    if isinstance(module, SharedExpert):
        return _make_shared_expert_layout(module, param_name)
    if is_thin:
        return None, "a linear of one output" if isinstance(module, nn.Linear) else VECTOR
    if isinstance(module, Router) or (last in ROUTERS and param.ndim == 2):
        return _make_full_layout(param), ROUTER
    if isinstance(module, Latent):
        return _make_full_layout(param), "latent projection"
    if isinstance(module, nn.Linear):
        return _make_linear_layout(module, parent, last)
    return None, f"{type(module).__name__} is not known to multiply by it"


def _make_full_layout(param: Tensor) -> MatrixLayout | None:
    if param.ndim not in (2, 3):
        return None
    batch, rows, columns = (1, *param.shape)[-3:]
    return MatrixLayout(batch=batch, rows=rows, columns=columns)


def _make_expert_layout(experts: Experts, param_name: str) -> tuple[MatrixLayout | None, str]:
    layout, config, param = experts.layout, experts.config, getattr(experts, param_name)
    if param_name not in (layout.w1, layout.w2, layout.w3):
        return None, BIAS
    E, D, F = config.num_experts, config.expert_dim, config.hidden_dim
    outputs, inputs, sections = (D, F, None) if param_name == layout.w2 else (F, D, None)
    if param_name == layout.w1 and config.gated and not experts.is_separate:
        outputs, dim = 2 * F, int(layout.transposed)
        if layout.gate_up == "interleaved":
            sections = MatrixCut(dim=dim, sizes=(1, 1), repeats=F)
        else:
            sections = MatrixCut(dim=dim, sizes=(F, F))
    rows, columns = (inputs, outputs) if layout.transposed else (outputs, inputs)
    assert param.numel() == E * rows * columns
    matrix_layout = MatrixLayout(
        batch=E, rows=rows, columns=columns, sections=sections, transposed=layout.transposed
    )
    return matrix_layout, "routed experts"


def _make_shared_expert_layout(
    experts: SharedExpert, param_name: str
) -> tuple[MatrixLayout | None, str]:
    """Return a parameter's layout (None = AdamW), and its kind as text."""
    if param_name == "gate":
        return None, "gates of shared experts"
    rows, columns = getattr(experts, param_name).shape
    halves = param_name == "w1" and experts.config.gated
    sections = MatrixCut(sizes=(rows // 2, rows // 2)) if halves else None
    return MatrixLayout(batch=1, rows=rows, columns=columns, sections=sections), "shared experts"


def _make_linear_layout(
    linear: nn.Linear, parent: nn.Module, linear_name: str
) -> tuple[MatrixLayout | None, str]:
    """Return a linear's layout and kind; (None, reason) if the order of q, k and v is unknown."""
    rows, columns = linear.weight.shape
    sections = MatrixCut(sizes=(rows // 2, rows // 2)) if linear_name == "gate_up_proj" else None
    if any(word in linear_name for word in FUSED):
        sections = _find_fused_cut(parent, linear_name, rows)
        if sections is None:
            return None, "queries, keys and values in an unknown order: give a MatrixCut"
    return MatrixLayout(batch=1, rows=rows, columns=columns, sections=sections), "linear"


def _find_fused_cut(parent: Any, linear_name: str, num_rows: int) -> MatrixCut | None:
    """Return the cut of a linear of `parent` into q, k and v; None = unknown."""
    if linear_name == "qkv_proj" and hasattr(parent, "o_proj"):  # Phi-3
        queries = parent.o_proj.weight.shape[1]
        return MatrixCut(sizes=(queries, (num_rows - queries) // 2, (num_rows - queries) // 2))
    # With tp, attributes of linear attention are of a rank's heads, and `num_rows` is of all heads.
    if linear_name == "in_proj_qkv" and hasattr(parent, "key_dim"):  # Qwen3.5's linear attention
        sizes = (parent.key_dim, parent.key_dim, parent.value_dim)
        return MatrixCut(sizes=tuple(size * num_rows // sum(sizes) for size in sizes))
    if linear_name == "in_proj_qkvz" and hasattr(parent, "num_k_heads"):  # Qwen3-Next: output gate
        key = parent.head_k_dim
        value = parent.num_v_heads * parent.head_v_dim // parent.num_k_heads
        return MatrixCut(sizes=(key, key, value, value), repeats=num_rows // (2 * (key + value)))
    return None


def compute_lr_factor(layout: MatrixLayout, shape: tuple[int, int], adjust_lr_fn: str) -> float:
    """Return Muon's factor on lr for a matrix of `shape` (rows, columns), by `adjust_lr_fn`."""
    if adjust_lr_fn == "match_rms_adamw":
        return float(0.2 * max(shape) ** 0.5)
    outputs, inputs = reversed(shape) if layout.transposed else shape
    return float(max(1.0, outputs / inputs) ** 0.5)
