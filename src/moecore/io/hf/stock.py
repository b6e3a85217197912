"""The file tensors of each tensor of a transformers model, by transformers' conversion rules.

transformers renames, stacks, splits and permutes tensors while it loads a directory, and reverts
these changes while it saves. `trace_loading_rules` runs the rules on meta tensors. Each file tensor
has an address range in one storage on meta, so offset and strides of a result identify elements of
a file. Copies that the rules make (`cat`, `stack`, `clone`) have an address range and a list of
inputs.
"""

from __future__ import annotations

import bisect
import copy
import itertools
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from moecore.base.fields import format_name
from moecore.base.torch_private import DispatchMode
from moecore.families.transformers.experts import find_experts_adapter, get_used_parameters
from moecore.io.hf.config_fields import check_layers
from moecore.io.hf.files import format_error_with_source
from moecore.io.hf.names import list_routed_pieces
from moecore.io.hf.pieces import FileRecipe, FileView, TensorPiece, ViewDim

Shapes = Mapping[str, tuple[int, ...]]
Box = tuple[tuple[int, int], ...]  # (start, length) per dim
IRREGULAR = "transformers moves its values in no regular way"
MAX_MODULES = 1 << 17  # of a built model; more modules take minutes
FIRST_ADDRESS = 1 << 40  # tensors that are not traced have smaller addresses


def find_transformers_class(model_class: type) -> Any:
    """Return the transformers class that `model_class` is or derives from, or None."""
    for cls in model_class.__mro__:
        if cls.__module__.startswith("transformers.models.") and hasattr(cls, "base_model_prefix"):
            return cls
    return None


def build_meta_model(
    hf_config: Mapping[str, Any], model: nn.Module | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module | None:
    """Build the transformers model of a config.json on meta; None for an unknown class.

    The class is `model`'s if both have the same model_type, otherwise config.json names it.
    """
    import transformers

    model_config: Any = getattr(model, "config", None)
    model_type, kind = hf_config.get("model_type"), model and find_transformers_class(type(model))
    is_known = isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING
    if not is_known and not hasattr(model_config, "to_dict"):
        return None
    config_class = transformers.CONFIG_MAPPING[model_type] if is_known else type(model_config)
    check_layers(hf_config)
    try:
        config = config_class.from_dict(
            copy.deepcopy(dict(hf_config))
        )  # which changes nested values
        if kind is None or model_type != model_config.model_type:
            named = None if model else hf_config.get("architectures")
            named = getattr(transformers, str(named[0]), None) if named else None
            causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), kind)
            kind = named if hasattr(named, "base_model_prefix") else causal
        with torch.device("meta"), warnings.catch_warnings(), _limit_modules():
            warnings.simplefilter("ignore")  # of empty tensors: nothing is initialised on meta
            reader = kind and kind._from_config(config, dtype=dtype)
    except Exception as error:  # of many kinds, some of them no ValueError
        raise ValueError(
            f"config.json must be one that transformers reads: {format_error_with_source(error)}"
        ) from None
    if reader is not None and not any(map(find_experts_adapter, model.modules() if model else ())):
        for experts in filter(find_experts_adapter, reader.modules()):
            for name, tensor in get_used_parameters(experts).items():
                experts.register_parameter(name, tensor)
    return reader


@contextmanager
def _limit_modules() -> Iterator[None]:
    """Return a context in which registering more than `MAX_MODULES` modules raises ValueError."""
    # A config.json may set any number of layers or experts.
    number = itertools.count(1)

    def count(*_: Any) -> None:
        """Raise ValueError if more than `MAX_MODULES` modules are registered."""
        if next(number) > MAX_MODULES:
            raise ValueError(f"it has more than {MAX_MODULES} modules")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def get_shapes(state_dict: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a state dict's tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in state_dict.items()}


def compute_published_shapes(meta_model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that `save_pretrained` would write, by name."""
    from transformers.core_model_loading import revert_weight_conversion

    return get_shapes(revert_weight_conversion(meta_model, meta_model.state_dict()))


def rename_expert_shapes(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes with transformers' fused names in place of moecore's expert names."""
    hf_shapes = dict[str, tuple[int, ...]]()
    for name, shape in shapes.items():
        prefix, _, _ = name.rpartition(".mlp.")
        is_native = f"{prefix}.mlp.experts.w1" in shapes  # of a layer with moecore's names
        pieces = list_routed_pieces(name, shape, "fused") if is_native else ()
        hf_shapes |= {pieces[0].name: pieces[0].shape} if pieces else {name: shape}
    return hf_shapes


def plan_stock_tensors(
    meta_model: nn.Module | None, model_shapes: Shapes, *file_shapes: Shapes
) -> dict[str, FileRecipe]:
    """Return each model tensor's recipe; NotImplementedError if files lack some of its elements.

    `meta_model` None = files have the model's names. The first `file_shapes` that fit are used.
    """
    if meta_model is None:
        return {name: FileRecipe.from_tensor(name, shape) for name, shape in model_shapes.items()}
    names = dict(zip(model_shapes, rename_expert_shapes(model_shapes), strict=True))
    targets = get_shapes(meta_model.state_dict())
    recipes, refused = dict[str, FileRecipe](), dict[str, str]()
    for shapes in file_shapes:
        remaining = {names[name] for name in model_shapes if name not in recipes} & targets.keys()
        traced = trace_loading_rules(meta_model, shapes, remaining) if remaining else {}
        for name, shape in model_shapes.items():
            outcome = traced.get(names[name], "")
            if isinstance(outcome, str):
                refused[name] = outcome
            elif math.prod(shape) != math.prod(targets[names[name]]):  # the reader compares them
                file_name = outcome[0].name if len(outcome) == 1 else names[name]
                recipes[name] = FileRecipe.from_tensor(file_name, shape)
            elif name not in recipes:
                pieces = [_split_gate_up(piece, targets[names[name]], shape) for piece in outcome]
                recipes[name] = FileRecipe(shape, tuple(pieces))
    for name, shape in model_shapes.items():
        if refused.get(name) and name not in recipes:
            kind = type(meta_model).__name__
            raise NotImplementedError(
                f"{format_name(name)} {shape} of {kind} must be made of tensors that files hold, "
                f"but {refused[name]:.200}: load it by {kind}.from_pretrained, and save it by "
                "save_pretrained"
            )
        recipes.setdefault(name, FileRecipe.from_tensor(name, shape))
    return {name: recipes[name] for name in model_shapes}


def plan_written_tensors(
    meta_model: nn.Module | None, model_shapes: Shapes, layout: str
) -> dict[str, FileRecipe]:
    """Return recipes for export: `state_dict`'s names if `layout` is "fused", or published ones."""
    if meta_model is None:
        return plan_stock_tensors(None, model_shapes)
    files = (
        get_shapes(meta_model.state_dict())
        if layout == "fused"
        else compute_published_shapes(meta_model)
    )
    return plan_stock_tensors(meta_model, model_shapes, files)


def trace_loading_rules(
    meta_model: nn.Module, file_shapes: Shapes, names: Collection[str]
) -> dict[str, tuple[TensorPiece, ...] | str]:
    """Run transformers' loading rules on meta; return {name: pieces of files, or error text}."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    trace_mode, model, state = _TraceMode(), cast(Any, meta_model), meta_model.state_dict()
    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    rules_by_target = dict[str, Any]()
    outcomes = dict[str, Tensor | str]()
    # As transformers.core_model_loading.convert_and_load_state_dict_in_model goes through files.
    for name in sorted(file_shapes, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        if target not in state and name in state:
            target, pattern = name, None
        if target not in state:
            continue
        if pattern is None:
            outcomes.setdefault(target, trace_mode.allocate_range(file_shapes[name], name))
        else:
            rule = rules_by_target.setdefault(target, copy.deepcopy(by_pattern[pattern]))
            rule.add_tensor(
                target, name, pattern, trace_mode.allocate_range(file_shapes[name], name)
            )
    for target, rule in rules_by_target.items():
        try:
            with trace_mode:
                values = rule.convert(target, model=model, config=model.config)
        except Exception as error:  # of any kind: the rules are not ours
            outcomes.setdefault(target, f"{type(error).__name__}: {error}")
            continue
        for name, value in values.items():
            outcomes.setdefault(name, value[0] if isinstance(value, list) else value)
    return {
        name: _read_pieces(trace_mode, outcomes[name], state[name].shape, file_shapes)
        for name in names & outcomes.keys()
    }


def _read_pieces(
    trace_mode: _TraceMode, outcome: Tensor | str, shape: Sequence[int], file_shapes: Shapes
) -> tuple[TensorPiece, ...] | str:
    """Return the pieces of a traced tensor, of `shape` in the model, or an error text."""
    if isinstance(outcome, str):
        return outcome
    try:
        if outcome.shape == shape:
            return tuple(_make_piece(link, file_shapes) for link in trace_mode.list_links(outcome))
        if name := trace_mode.find_range(outcome).file:  # the loader compares the shapes
            return (TensorPiece(name, (), tuple(shape)),)
        return f"{tuple(outcome.shape)} must be {tuple(shape)}"
    except _Untraceable as error:
        return str(error)


def _make_piece(link: _Link, file_shapes: Shapes) -> TensorPiece:
    """Convert a box of a traced tensor, with its view of a file tensor, to a `TensorPiece`."""
    box, name, view, offset = link
    region, file = tuple(slice(start, start + length) for start, length in box), file_shapes[name]
    if not offset and view.is_contiguous() and view.numel() == math.prod(file):
        return TensorPiece(name, region, file)
    starts, dims = _locate_view(view, offset, file)
    file_view = FileView(file, tuple(starts), tuple(dims))
    return TensorPiece(name, region, tuple(length for _, length in box), file_view)


def _locate_view(
    view: Tensor, offset: int, shape: Sequence[int]
) -> tuple[list[int], list[ViewDim]]:
    """Return (first indices, `ViewDim`s) of a view, from `offset` on, of a tensor of `shape`."""
    # Example: [3, 4] transposed has sizes (4, 3), strides (1, 4): [0, 0], [(1, 4, 1), (0, 3, 1)].
    rows = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    starts = [offset // row % max(1, n) for row, n in zip(rows, shape, strict=True)]
    dims = list[ViewDim]()
    for n, stride in zip(view.shape, view.stride(), strict=True):
        group = list[ViewDim]()  # dims of the tensor that this dim of the view flattens
        while n > 1:
            d = next((d for d, row in enumerate(rows) if row <= stride < row * shape[d]), None)
            if d is None or stride % rows[d]:
                raise _Untraceable(IRREGULAR)
            step = stride // rows[d]
            inside = n if starts[d] + (n - 1) * step < shape[d] else shape[d] // step
            if inside < n and (starts[d] or shape[d] % step or n % inside):
                raise _Untraceable(IRREGULAR)
            group.insert(0, (d, inside, step))
            n, stride = n // inside, rows[d] * shape[d]
        dims += group
    return starts, dims


def _split_gate_up(
    piece: TensorPiece, shape: Sequence[int], split_shape: Sequence[int]
) -> TensorPiece:
    """Convert a piece of gate and up, stacked in dim 1 (`shape`), to a piece of `split_shape`."""
    if len(split_shape) == len(shape) or not piece.region:
        return piece
    d = next(d for d in range(len(shape)) if shape[d] != split_shape[d])
    region, half = list(cast(tuple[slice, ...], piece.region)), split_shape[d + 1]
    rows = region[d]
    if rows.stop - rows.start == shape[d]:
        region[d : d + 1] = [slice(0, split_shape[d]), slice(0, half)]
    else:
        at, rest = divmod(rows.start, half)
        assert not rest and rows.stop - rows.start == half, "gate and up are merged as halves"
        region[d : d + 1] = [slice(at, at + 1), slice(0, half)]
    return TensorPiece(piece.name, tuple(region), piece.shape, piece.view)


class _Untraceable(ValueError):
    """Raised if no strided view of a file describes a traced tensor's values."""


class _Link(NamedTuple):
    """A box of a traced tensor, and the strided view of the file tensor that has its values."""

    box: Box
    file: str
    view: Tensor
    offset: int


@dataclass(frozen=True, slots=True)
class _Range:
    """The address range of a file tensor, or of a copy with its input tensors."""

    first: int
    shape: tuple[int, ...]
    file: str = ""
    parts: tuple[tuple[tuple[int, ...], Tensor], ...] = ()


class _TraceMode(DispatchMode):
    """Torch dispatch mode that records which file tensors have the elements of meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._memory = torch.empty(1 << 61, dtype=torch.uint8, device="meta")
        self._ranges, self._firsts, self._next = list[_Range](), list[int](), FIRST_ADDRESS

    def allocate_range(self, shape: Sequence[int], file_name: str = "", inputs: Any = ()) -> Tensor:
        """Return a meta tensor at unused addresses: a file's tensor, or a copy of `inputs`."""
        self._ranges.append(_Range(self._next, tuple(shape), file_name, tuple(inputs)))
        self._firsts.append(self._next)
        strides = torch.empty(shape, dtype=torch.uint8, device="meta").stride()
        placed = self._memory.as_strided(shape, strides, self._next)
        self._next += max(1, math.prod(shape))
        return placed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        op = func.overloadpacket
        x: Any = args[0] if args else None
        is_same_shape = isinstance(x, Tensor) and isinstance(out, Tensor) and out.shape == x.shape
        if is_same_shape and out.is_floating_point() and out.dtype != x.dtype:  # a cast, as in load
            return x
        if op is torch.ops.aten.clone:
            return self.allocate_range(out.shape, inputs=[((0,) * out.ndim, args[0])])
        if op not in (torch.ops.aten.cat, torch.ops.aten.stack):
            return out
        dim = (args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)) % out.ndim
        tensors = [t.unsqueeze(dim) if op is torch.ops.aten.stack else t for t in args[0]]
        starts = itertools.accumulate((t.shape[dim] for t in tensors[:-1]), initial=0)
        at = [tuple(start if d == dim else 0 for d in range(out.ndim)) for start in starts]
        return self.allocate_range(out.shape, inputs=zip(at, tensors, strict=True))

    def find_range(self, view: Tensor) -> _Range:
        """Return the address range in which a tensor starts, or raise `_Untraceable`."""
        i = bisect.bisect_right(self._firsts, view.storage_offset()) - 1
        if i < 0:
            raise _Untraceable("transformers computes its values")
        return self._ranges[i]

    def list_links(self, view: Tensor) -> Iterator[_Link]:
        """Yield each box of a traced tensor, with the view of the file tensor that has its values.

        The boxes cover the traced tensor. Values without such a view raise `_Untraceable`.
        """
        owner, full_box = self.find_range(view), tuple((0, n) for n in view.shape)
        offset = int(view.storage_offset()) - owner.first
        if owner.file:
            yield _Link(full_box, owner.file, view, offset)
            return
        if offset or not view.is_contiguous() or view.numel() != math.prod(owner.shape):
            raise _Untraceable(IRREGULAR)
        for at, part in owner.parts:
            for link in self.list_links(part):
                box = tuple((a + b, n) for a, (b, n) in zip(at, link.box, strict=True))
                if view.shape != owner.shape:  # a reshaped copy: only all of it has a view
                    if math.prod(n for _, n in box) != view.numel():
                        raise _Untraceable(IRREGULAR)
                    box = full_box
                yield link._replace(box=box)
