"""Replaces each MoE block of a model by a MoELayer with the same parameters.

An adapter is a function `(block, model) -> MoELayer`. moecore has adapters of Hugging Face models;
`parallelize_moe(..., adapters={MyBlock: my_adapter})` adds one for a user's own block. Adapters
call `adopt`, which builds a layer on meta and assigns the block's parameters to it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from moecore.base.torch_private import DispatchMode, list_module_hooks, tree_leaves
from moecore.moe.layer import RoutedLayer
from moecore.parallel.model.family import Adapter

CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
RECORDING = "transformers.utils.output_capturing"  # `record_logits` keeps hooks of this module

MAX_NAMES = 6  # of the tensors in one error
# Operators that read a tensor's shape, dtype and device but not its values.
SHAPE_READERS = ("_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
VALUE_READERS = ("_local_scalar_dense", "equal", "is_nonzero")  # their result is no tensor

FindAdapter = Callable[[nn.Module], Adapter | None]
GetRefusalReason = Callable[[nn.Module], str | None]


def replace_blocks(
    model: nn.Module,
    adapters: Mapping[type, Adapter],
    find_adapter: FindAdapter,
    get_refusal_reason: GetRefusalReason,
) -> dict[str, RoutedLayer]:
    """Replace each MoE block in place by its adapter's layer; return all MoE layers by name.

    `adapters` maps exact block classes to the user's adapters; `find_adapter` returns moecore's
    adapters. MoE blocks without an adapter raise errors; `get_refusal_reason` returns their text.
    """
    adapters_of = _find_blocks(
        model, lambda block: adapters.get(type(block)) or find_adapter(block), get_refusal_reason
    )
    adapted_types = {type(model.get_submodule(name)) for name in adapters_of}
    for cls in adapters:
        if cls not in adapted_types:
            warnings.warn(
                f"adapter of {cls.__name__} is not used: no block is of this very class",
                stacklevel=6,
            )
    # All adapters before any swap: one may raise.
    swaps = {
        model.get_submodule(n): _make_layer(n, model, adapter) for n, adapter in adapters_of.items()
    }
    for parent in list(model.modules()):
        for child, module in parent._modules.items():
            if module in swaps:
                parent._modules[child] = swaps[module]
    return {n: m for n, m in model.named_modules() if isinstance(m, RoutedLayer)}


def _find_blocks(
    model: nn.Module, find_adapter: FindAdapter, get_refusal_reason: GetRefusalReason
) -> dict[str, Adapter]:
    """Return {qualified name: adapter} of each MoE block; see `replace_blocks` for its errors."""
    adapters_of: dict[str, Adapter] = {}
    unknown: dict[str, str] = {}  # name -> class
    dense: dict[str, str] = {}
    adapted_prefixes: list[str] = []

    for name, module in model.named_modules():
        if any(name.startswith(outer) for outer in adapted_prefixes):
            continue
        adapter = find_adapter(module)
        if isinstance(module, RoutedLayer) or adapter:
            adapted_prefixes.append(f"{name}." if name else "")
            if adapter:
                adapters_of[name] = adapter
        elif any(isinstance(m, RoutedLayer) or find_adapter(m) for m in module.children()):
            continue  # a block whose experts are swapped alone
        elif get_refusal_reason(module) is not None:
            raise NotImplementedError(
                f"MoE block {name} ({type(module).__name__}) must have stacked matrices that "
                f"moecore can take: {get_refusal_reason(module)}; pass an adapter, see "
                "docs/extending.md"
            )
        elif any(name in ("experts", "expert") for name, _ in module.named_children()):
            unknown[name or "the model"] = type(module).__name__
        elif _is_dense_router_block(module):
            dense[name or "the model"] = type(module).__name__
    if unknown:
        raise ValueError(
            f"MoE {_format_blocks(unknown)} must have an adapter: pass parallelize_moe(..., "
            f"adapters={{{next(iter(unknown.values()))}: fn(block, model) -> MoELayer}}), "
            "see docs/extending.md"
        )
    _refuse_unknown_siblings(dense, adapted_prefixes)
    if dense:
        verb = "looks" if len(dense) == 1 else "look"
        warnings.warn(
            f"{_format_blocks(dense)} {verb} like a router and a list of experts without an "
            "adapter, so every rank computes all of them: pass parallelize_moe(..., "
            "adapters={...}), see docs/extending.md",
            stacklevel=7,
        )
    if "" in adapters_of:
        raise ValueError(
            "model (a MoE block itself) must be held by a parent module to be swapped: wrap it in "
            "nn.Sequential, or build a MoELayer"
        )
    return adapters_of


def _refuse_unknown_siblings(
    unadapted_blocks: Mapping[str, str], adapted_prefixes: Sequence[str]
) -> None:
    """Raise ValueError if a list of layers has adapted and `unadapted_blocks` {name: class}."""
    paths = [name.rstrip(".").split(".") for name in adapted_prefixes]
    for name, class_name in unadapted_blocks.items():
        path = name.split(".")
        # The outermost entry of a list that holds the look-alike and no known block.
        places = [i for i, part in enumerate(path) if part.isdecimal()]
        i = next((i for i in places if not any(k[: i + 1] == path[: i + 1] for k in paths)), None)
        beside = [k for k in paths if i is not None and k[:i] == path[:i] and k[i].isdecimal()]
        if beside:
            raise ValueError(
                f"MoE block {name} ({class_name}) must have an adapter, as {'.'.join(beside[0])} "
                f"of the same list has: pass parallelize_moe(..., adapters={{{class_name}: "
                "fn(block, model) -> MoELayer}), see docs/extending.md"
            )


def _make_layer(name: str, model: nn.Module, adapter: Adapter) -> RoutedLayer:
    """Return the MoE layer to which `adapter` converts the block `name`; the model is unchanged."""
    block = model.get_submodule(name)
    in_state_dict = {id(tensor) for tensor in block.state_dict(keep_vars=True).values()}
    block_tensors: dict[str, Tensor] = dict(block.named_parameters())
    block_tensors |= {n: b for n, b in block.named_buffers() if id(b) in in_state_dict}
    recorder = OriginRecorder(block_tensors)
    with recorder:
        layer = adapter(block, model)
    if not isinstance(layer, RoutedLayer):
        raise ValueError(
            f"adapter of {name} ({type(block).__name__}) must return a MoELayer, not a "
            f"{type(layer).__name__}: for a block that keeps its router, put the stacked experts "
            "in a class of their own and register for it an adapter that returns RoutedExperts, "
            'see "Experts only" in docs/extending.md'
        )
    if missing := _list_unused_tensors(block, layer, block_tensors, recorder):
        raise ValueError(
            f"adapter of {name} ({type(block).__name__}) must pass every parameter and buffer of "
            f"its block to the {type(layer).__name__}, which lacks {', '.join(missing[:MAX_NAMES])}"
            f"{_format_remaining(missing, MAX_NAMES)}: pass them to adopt, or delete them from the "
            "block before parallelize_moe if the model needs none of them"
        )
    layer_modules = set(layer.modules())
    for path, module in block.named_modules(prefix=name):
        hooks = [] if module in layer_modules else list_module_hooks(module)
        if any(getattr(hook, "__module__", None) != RECORDING for hook in hooks):
            raise ValueError(
                f"{path} must have no hooks, because a MoELayer takes its place: remove them, or "
                "register them after parallelize_moe"
            )
    layer.train(block.training)
    # Children in the order of the block, because optimizer state dicts are positional.
    order = [child for child in block._modules if child in layer._modules]
    for child in [*order, *(n for n in layer._modules if n not in order)]:
        layer._modules[child] = layer._modules.pop(child)
    return layer


def _is_dense_router_block(module: nn.Module) -> bool:
    """Whether a module's child names and shapes look like a router and feed-forward experts."""
    # Either a child named router or gate with a matrix [E, D], E >= 2, and a ModuleList of E
    # modules of one class and of equal shapes: the first matrix reads D and the last matrix writes
    # D. Or a child named router and stacks of E such matrices.
    for name, child in module.named_children():
        if "router" in name or "gate" in name or "gating" in name:
            siblings = [m for m in module.children() if m is not child]
            if any(
                _has_experts(siblings, *s, may_be_stacked="router" in name)
                for s in _list_shapes(child, 2)
            ):
                return True
    return False


def _has_experts(
    modules: list[nn.Module], num_experts: int, dim: int, *, may_be_stacked: bool
) -> bool:
    """Whether `modules` have a list, or 3-D stacks, of MLPs with `dim` inputs and outputs."""
    if num_experts < 2:
        return False
    for experts in modules:
        if isinstance(experts, nn.ModuleList) and len(experts) == num_experts:
            shapes = [(type(e), *_list_shapes(e, 2)) for e in experts]
            if shapes.count(shapes[0]) == num_experts and _is_feed_forward(shapes[0][1:], dim):
                return True
    stacks = [s for m in modules if not isinstance(m, CONVOLUTIONS) for s in _list_shapes(m, 3)]
    return may_be_stacked and _is_feed_forward([s[1:] for s in stacks if s[0] == num_experts], dim)


def _is_feed_forward(matrices: Sequence[Any], dim: int) -> bool:
    """Whether the first of several matrices [out, in] has `dim` inputs, the last `dim` outputs."""
    return len(matrices) > 1 and matrices[0][1] == dim == matrices[-1][0]


def _list_shapes(module: nn.Module, ndim: int) -> list[tuple[int, ...]]:
    """Return the shapes of a module's parameters that have `ndim` dims, in registration order."""
    return [tuple(p.shape) for p in module.parameters() if p.ndim == ndim]


def _format_blocks(classes: Mapping[str, str]) -> str:
    """Return text such as "blocks a.mlp (Moe) and 3 more" for {block name: class name}."""
    name, class_name = next(iter(classes.items()))
    word = "block" if len(classes) == 1 else "blocks"
    return f"{word} {name} ({class_name}){_format_remaining(list(classes))}"


def _format_remaining(names: list[str], num_listed: int = 1) -> str:
    """Return " and n more" for the names after the first `num_listed`; "" if there are none."""
    return f" and {len(names) - num_listed} more" if len(names) > num_listed else ""


class OriginRecorder(DispatchMode):
    """A dispatch mode that records from which parameters and buffers a tensor is computed.

    `host_reads` names the parameters and buffers that Python has read, such as by `item()`.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        # A weak reference keeps the key of a freed storage from being used again.
        # {storage: [(begin, end, names)]}: byte ranges, and the tensors they were computed from.
        self._origins: dict[StorageWeakRef, list[tuple[int, int, frozenset[str]]]] = {}
        self.host_reads: frozenset[str] = frozenset()
        for name, tensor in tensors.items():
            self._add_origin(tensor, frozenset([name]))

    def find_origins(self, pytree: Any) -> frozenset[str]:
        """Return the names of the parameters and buffers from which `pytree` was computed."""
        origins = (self._find_tensor_origins(tensor) for tensor in _iterate_tensors(pytree))
        return frozenset[str]().union(*origins)

    @override
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        result = func(*args, **keywords)
        operator = str(getattr(func, "overloadpacket", func)).rpartition(".")[2]
        if operator.endswith(SHAPE_READERS):
            return result
        if names := self.find_origins((args, keywords)):
            if operator in VALUE_READERS:
                self.host_reads |= names
            # Operators on lists write to their first argument and return nothing.
            changed = args[0] if operator.endswith("_") else ()
            for tensor in _iterate_tensors((result, changed)):
                self._add_origin(tensor, names)
        return result

    def _add_origin(self, tensor: Tensor, names: frozenset[str]) -> None:
        if not names <= self._find_tensor_origins(tensor):
            key = StorageWeakRef(tensor.untyped_storage())
            self._origins.setdefault(key, []).append((*_get_byte_range(tensor), names))

    def _find_tensor_origins(self, tensor: Tensor) -> frozenset[str]:
        origins = self._origins.get(StorageWeakRef(tensor.untyped_storage()), ())
        begin, end = _get_byte_range(tensor)
        overlaps = (names for start, stop, names in origins if start < end and begin < stop)
        return frozenset[str]().union(*overlaps)


def _list_unused_tensors(
    block: nn.Module,
    layer: nn.Module,
    block_tensors: Mapping[str, Tensor],
    recorder: OriginRecorder,
) -> list[str]:
    """Return the names of block tensors from which no tensor of the layer was computed."""
    # Exceptions: empty tensors, and buffers whose values Python has read, such as a factor that the
    # adapter wrote into the layer's config.
    placed = recorder.find_origins([*layer.parameters(), *layer.buffers()])
    layer_tensors = {id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
    read = recorder.host_reads - {name for name, _ in block.named_parameters()}
    return [
        name
        for name, tensor in block_tensors.items()
        if tensor.numel() and id(tensor) not in layer_tensors and name not in placed | read
    ]


def _iterate_tensors(pytree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(pytree) if isinstance(leaf, Tensor))


def _get_byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the byte offsets in its storage at which a tensor begins and ends (exclusive)."""
    begin = int(tensor.storage_offset())
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    length = int(last) + 1 if tensor.numel() else 0
    return begin * tensor.element_size(), (begin + length) * tensor.element_size()
