"""`ModulePlan`: how tensor parallelism (tp) shards the parameters of one module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Shard

from moecore.base.peft_layers import find_lora_base, list_lora_pairs
from moecore.base.torch_private import StridedShard

# Sections of a matrix's rows, such as queries, keys, values: (heads, rows per head) of each.
Stack = tuple[tuple[int, int], ...]


def iterate_local_rows(sections: Stack, rank: int, tp: int) -> Iterator[slice]:
    """Yield a slice of rows, this rank's heads, per section (heads, rows per head) of a matrix."""
    # If a section has fewer heads than `tp`, several ranks have the same head.
    # Example: 4 heads of 8 rows, then 1 head of 8 rows. Rank 1 of 2 has rows 16:32 and 32:40.
    start = 0
    for heads, size in sections:
        num_local, first = max(1, heads // tp), rank * heads // tp
        yield slice(start + first * size, start + (first + num_local) * size)
        start += heads * size


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """How tp shards a module: the names of linears and parameters by kind of sharding."""

    columns: tuple[str, ...]  # column-parallel linears; a rank computes a part of the outputs
    row: str  # the row-parallel linear that reads these outputs; its outputs are all-reduced
    # Column-parallel linears whose first half of rows are gates and second half ups of an MLP.
    halves: tuple[str, ...] = ()
    params_by_head: tuple[str, ...] = ()  # parameters that are sharded by heads
    norms: tuple[str, ...] = ()  # norms over the columns of all heads, which are all-gathered first
    # {name: elements of a head} of replicated linears with fewer key or value heads than ranks. A
    # rank uses the one head that its query heads read.
    shared: Mapping[str, int] | None = None
    num_shared: int = 0  # key or value heads if there are fewer than ranks, otherwise 0
    # Replicated linears of queries, keys and values in one matrix; a rank reads rows of its heads.
    stacks: Mapping[str, Stack] | None = None
    # Column-parallel linears with several sections. All ranks have equally many rows, and exchange
    # outputs so that a rank receives the outputs of its heads.
    head_exchanges: Mapping[str, Stack] = field(default_factory=dict)
    # Modules with replicated parameters; a rank reads the rows of its heads.
    local_reads: Mapping[str, Stack] = field(default_factory=dict)
    # {name: elements of a group} of gated norms whose groups span several ranks.
    groups: Mapping[str, int] = field(default_factory=dict)
    # {attribute: number on a rank} of attributes that count heads or columns.
    counts: Mapping[str, int] = field(default_factory=dict)
    buffers: Mapping[str, int] | None = None  # {name: dim of heads} of replicated buffers


def get_linears(module: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears in a module by dotted name; a LoRA layer counts as its base linear."""
    linears = dict[str, nn.Linear]()
    for name, child in module.named_children():
        base = find_lora_base(child) or child
        if type(base) is nn.Linear:
            linears[name] = base
        elif base is child:
            linears |= {f"{name}.{inner}": part for inner, part in get_linears(child).items()}
    return linears


def list_output_linears(module: nn.Module) -> list[Any]:
    """Return [module]; for a LoRA layer its base linear and the B matrix of each adapter."""
    base = find_lora_base(module)
    return [module] if base is None else [base, *(b for _, b in list_lora_pairs(module))]


def list_lora_adapters(module: nn.Module) -> dict[str, list[tuple[nn.Linear, nn.Linear]]]:
    """Return for each linear with LoRA, by name, the (A, B) of its LoRA adapters."""
    layers = {name: module.get_submodule(name) for name in get_linears(module)}
    return {n: list_lora_pairs(m) for n, m in layers.items() if find_lora_base(m) is not None}


def find_owner(module: nn.Module, name: str) -> tuple[Any, str]:
    """Return the submodule that has the attribute with a dotted name, and the attribute's name."""
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def list_placements(
    module: nn.Module, plan: ModulePlan
) -> Iterator[tuple[tuple[nn.Module, str], Placement]]:
    """Yield ((submodule, parameter name), placement) of each parameter that tp shards."""
    linears, adapted = get_linears(module), list_lora_adapters(module)
    halves = StridedShard(0, split_factor=2)
    columns = {name: halves if name in plan.halves else Shard(0) for name in plan.columns}
    for name, placement in columns.items():
        yield (linears[name], "weight"), placement
        yield (linears[name], "bias"), placement
    yield (linears[plan.row], "weight"), Shard(1)
    # y = W x + s B A x: a column-parallel linear shards the rows of B and replicates A. A
    # row-parallel linear shards the columns of A and replicates B.
    for name in adapted.keys() & {*plan.columns, plan.row}:
        for pair in adapted[name]:
            yield (pair[name != plan.row], "weight"), columns.get(name, Shard(1))
    for name in plan.params_by_head:
        owner, attribute = find_owner(module, name)
        shape = getattr(owner, attribute).shape
        yield (owner, attribute), Shard(next(dim for dim, n in enumerate(shape) if n > 1))
