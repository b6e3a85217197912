"""Parts of a block for `MemoryOptions`, identified by structure and names of modules.

A norm is identified by the name of its class. Attention and MLPs are modules with projections of
known names (`precision/apply.py`), in moecore's decoder, transformers and torchtitan.
"""

from collections.abc import Iterator, Set
from typing import Literal, NamedTuple

from torch import nn

from moecore.base.options.memory import Recomputed
from moecore.base.params import clean_name
from moecore.moe.experts import Experts
from moecore.moe.layer import RoutedLayer
from moecore.moe.shared_experts import SharedExpert
from moecore.precision.apply import ATTENTION, MLP, ROUTED_NAMES, SHARED_NAMES

Kind = Literal["norm", "attention", "mlp", "shared_experts", "experts", "moe"]
OUTPUT = {"o_proj", "out_proj", "wo"}
UP = {"q_b_proj", "kv_b_proj", "wq_b", "wkv_b"}
QKV = {"q_proj", "k_proj", "v_proj", "qkv_proj", "wq", "wk", "wv"}


class BlockPart(NamedTuple):
    """A module of a transformer block that `MemoryOptions` can select, with its name and kind."""

    name: str
    kind: Kind
    module: nn.Module


class PartRecompute(NamedTuple):
    """Recomputation of a block's part: the options that select it, and the recomputed matmuls."""

    parts: Set[Recomputed]  # values of `MemoryOptions.recompute`; empty = not recomputed
    products: tuple[str, ...] = ()  # submodules whose products are recomputed; "" = the part


def find_parts(block: nn.Module) -> Iterator[BlockPart]:
    """Yield the parts of a block that options can select, outer parts first."""
    for path, module in block.named_modules():
        name = clean_name(path)
        kind = _find_part_kind(name, module)
        if kind is not None:
            yield BlockPart(name, kind, module)


def find_part_recompute(part: BlockPart, options: Set[Recomputed]) -> PartRecompute:
    """Return how backward recomputes a part; `options` are values of `MemoryOptions.recompute`."""
    _, kind, module = part
    if kind in ("norm", "moe"):
        return PartRecompute(options & {kind})
    if kind in ("mlp", "shared_experts"):
        return PartRecompute(options & {kind, "activation"}, ("",) if kind in options else ())
    if kind != "attention":
        return PartRecompute(set())
    children = {name for name, _ in module.named_children()}
    up, qkv = UP & children, QKV & children
    projections: dict[Recomputed, set[str]] = {"mla_up_proj": up | qkv} if up else {"qkv_proj": qkv}
    names = {name for option in options & set(projections) for name in projections[option]}
    has = {option for option in projections if projections[option]}
    return PartRecompute(options & {"rope", *has}, tuple(sorted(names)))


def _find_part_kind(module_name: str, module: nn.Module) -> Kind | None:
    """Return the kind of the module with this name in its block; None = it is no part."""
    if isinstance(module, Experts):
        return "experts"
    if isinstance(module, RoutedLayer):
        return "moe"
    if ROUTED_NAMES & set(module_name.split(".")):
        return None
    children = {n for n, child in module.named_children() if hasattr(child, "weight")}
    if not children and type(module).__name__.endswith("Norm"):
        return "norm"
    if children & OUTPUT and children & ATTENTION - OUTPUT:
        # A linear recurrence has a short convolution.
        is_recurrence = any(isinstance(child, nn.Conv1d) for child in module.modules())
        return None if is_recurrence else "attention"
    if isinstance(module, SharedExpert):
        return "shared_experts"
    if len(children & MLP) >= 2:
        return "shared_experts" if SHARED_NAMES & set(module_name.split(".")) else "mlp"
    return None
