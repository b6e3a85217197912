"""ModuleCut: what of a module tensor parallel ranks have parts of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Shard

from moecore.base.peft_layers import lora_base, lora_pairs
from moecore.base.torch_private import StridedShard

# Rows of a matrix: of each kind the number of heads, and of rows of a head; kind above kind.
Stack = tuple[tuple[int, int], ...]


def local_rows(stack: Stack, rank: int, tp: int) -> Iterator[slice]:
    """Yield the rows of a rank's heads of each kind. Heads fewer than ranks are shared."""
    # Example: 4 heads of 8 rows above 1 of 8. Rank 1 of 2 has rows 16:32 and 32:40.
    start = 0
    for heads, size in stack:
        num_local, first = max(1, heads // tp), rank * heads // tp
        yield slice(start + first * size, start + (first + num_local) * size)
        start += heads * size


@dataclass(frozen=True, slots=True)
class ModuleCut:
    """What of a module a rank has a part of, by name."""

    columns: tuple[str, ...]  # linears, of whose outputs a rank has some
    row: str  # the linear that reads these, and whose outputs are added
    halves: tuple[str, ...] = ()  # columns of gates above as many others: a rank has some of both
    params_by_head: tuple[str, ...] = ()  # parameters, by head
    norms: tuple[str, ...] = ()  # that compare all heads
    # Linears of so few key or value heads that ranks share them -> elements of a head. Whole; a
    # rank takes the one head that its query heads read.
    shared: Mapping[str, int] | None = None
    num_shared: int = 0  # key and value heads, where they are fewer than ranks
    # Linears with rows of queries above those of keys and of values -> number of heads and elements
    # of a head of each. Whole; a rank multiplies with the rows of its heads.
    stacks: Mapping[str, Stack] | None = None
    # Columns with such rows, cut all the same: a rank has as many rows as the others, of whichever
    # kind, and gets the outputs of its heads.
    travel: Mapping[str, Stack] = field(default_factory=dict)
    # Modules with whole parameters, of which a rank reads the rows of its heads.
    read: Mapping[str, Stack] = field(default_factory=dict)
    # Gated norms of groups that several ranks share -> elements of a group.
    groups: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)  # attributes -> their number on a rank
    # Whole buffers, of which a rank reads its heads' part -> the dim of heads.
    buffers: Mapping[str, int] | None = None


def named_linears(module: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears of a module by name, those in peft's LoRA too."""
    linears = dict[str, nn.Linear]()
    for name, child in module.named_children():
        base = lora_base(child) or child
        if type(base) is nn.Linear:
            linears[name] = base
        elif base is child:
            linears |= {f"{name}.{inner}": part for inner, part in named_linears(child).items()}
    return linears


def linears_of(module: nn.Module) -> list[Any]:
    """Return a linear, or what makes its outputs in peft's LoRA: the base and all B."""
    base = lora_base(module)
    return [module] if base is None else [base, *(b for _, b in lora_pairs(module))]


def adapters(module: nn.Module) -> dict[str, list[tuple[nn.Linear, nn.Linear]]]:
    """Return A and B of each adapter of the linears of a module, by the linear's name."""
    layers = {name: module.get_submodule(name) for name in named_linears(module)}
    return {n: lora_pairs(m) for n, m in layers.items() if lora_base(m) is not None}


def owner_of(module: nn.Module, name: str) -> tuple[Any, str]:
    """Return whose attribute a name with dots is, and the last part of it."""
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def cut_placements(
    module: nn.Module, module_cut: ModuleCut
) -> Iterator[tuple[tuple[nn.Module, str], Placement]]:
    """Yield parameters that are cut, with their placements."""
    linears, adapted = named_linears(module), adapters(module)
    halves = StridedShard(0, split_factor=2)
    columns = {
        name: halves if name in module_cut.halves else Shard(0) for name in module_cut.columns
    }
    for name, placement in columns.items():
        yield (linears[name], "weight"), placement
        yield (linears[name], "bias"), placement
    yield (linears[module_cut.row], "weight"), Shard(1)
    # y = W x + s B A x: of columns a rank has rows of B and all of A, of a row the reverse.
    for name in adapted.keys() & {*module_cut.columns, module_cut.row}:
        for pair in adapted[name]:
            yield (pair[name != module_cut.row], "weight"), columns.get(name, Shard(1))
    for name in module_cut.params_by_head:
        owner, attribute = owner_of(module, name)
        shape = getattr(owner, attribute).shape
        yield (owner, attribute), Shard(next(dim for dim, n in enumerate(shape) if n > 1))
