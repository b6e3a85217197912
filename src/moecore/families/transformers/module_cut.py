"""ModuleCut: what of a module tensor parallel ranks have parts of, and what they exchange for it.

Legend: T tokens, N outputs of a linear.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

from moecore.base.peft_layers import lora_base, lora_pairs
from moecore.base.torch_names import StridedShard
from moecore.models.tensor_parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class ModuleCut:
    """What of a module a rank has a part of, by name."""

    columns: tuple[str, ...]  # linears, of whose outputs a rank has some
    row: str  # the linear that reads these, and whose outputs are added
    halves: tuple[str, ...] = ()  # columns of gates above as many others: a rank has some of both
    own: tuple[str, ...] = ()  # the module's own parameters, by head
    norms: tuple[str, ...] = ()  # that compare all heads
    # Linears of so few key or value heads that ranks share them -> elements of a head. Whole; a
    # rank takes the one head that its query heads read.
    shared: Mapping[str, int] | None = None
    counts: tuple[str, ...] = ()  # attributes with the number of heads
    # Whole buffers, of which a rank reads its heads' part -> the dim of heads.
    buffers: Mapping[str, int] | None = None


def linears_of(module: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears of a module by name, those in peft's LoRA too."""
    parts = {n: lora_base(m) or m for n, m in module.named_children()}
    return {n: m for n, m in parts.items() if type(m) is nn.Linear}


def adapted_of(module: nn.Module) -> dict[str, list[tuple[nn.Linear, nn.Linear]]]:
    """Return A and B of each adapter of the linears of a module, by the linear's name."""
    return {n: lora_pairs(m) for n, m in module.named_children() if lora_base(m) is not None}


def placements_of(
    module: nn.Module, cut: ModuleCut
) -> Iterator[tuple[tuple[nn.Module, str], Placement]]:
    """Yield parameters that are cut, with their placements."""
    linears, adapted = linears_of(module), adapted_of(module)
    halves = StridedShard(0, split_factor=2)
    columns = {name: halves if name in cut.halves else Shard(0) for name in cut.columns}
    for name, placement in columns.items():
        yield (linears[name], "weight"), placement
        yield (linears[name], "bias"), placement
    yield (linears[cut.row], "weight"), Shard(1)
    # y = W x + s B A x: of columns a rank has rows of B and all of A, of a row the reverse.
    for name in adapted.keys() & {*cut.columns, cut.row}:
        for pair in adapted[name]:
            yield (pair[name != cut.row], "weight"), columns.get(name, Shard(1))
    for name in cut.own:
        yield (module, name), Shard(0)


def apply_cut(tp: TensorParallel, module: Any, cut: ModuleCut) -> None:
    """Let the parts of a module exchange what a rank's part of the weights does not give."""
    row: Any = module.get_submodule(cut.row)
    if row.bias is None:
        row.register_forward_hook(partial(_add, tp))
    else:
        row.__class__, row.tp = BiasedRow, tp
    for name in cut.norms:
        norm = module.get_submodule(name)
        norm.register_forward_pre_hook(partial(_gather_columns, tp))
        norm.register_forward_hook(partial(_own_columns, tp))
    for name, head_dim in (cut.shared or {}).items():
        linear = module.get_submodule(name)
        head = tp.rank * (linear.out_features // head_dim) // tp.size
        linear.register_forward_hook(partial(_own_head, head, head_dim))
    if cut.shared and hasattr(module, "num_key_value_groups"):
        kv_heads = module.k_proj.out_features // cut.shared["k_proj"]
        module.num_key_value_groups = module.num_key_value_groups * kv_heads // tp.size
    for name in cut.counts:
        setattr(module, name, getattr(module, name) // tp.size)
    if cut.buffers:
        whole: type = type(module)
        own = {n: property(partial(_own_part, tp, n, dim)) for n, dim in cut.buffers.items()}
        module.__class__ = type(whole.__name__, (whole,), own | {"__module__": whole.__module__})


def _own_part(tp: TensorParallel, name: str, dim: int, module: nn.Module) -> Tensor:
    buffer = module._buffers[name]
    assert buffer is not None, "it has a number per head"
    return buffer.chunk(tp.size, dim)[tp.rank]


class BiasedRow(nn.Linear):
    """A linear with some columns of its weight: y = sum over ranks of x @ weight^T, and bias."""

    tp: TensorParallel

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., N], equal on all ranks. Collective."""
        return self.tp.sum_shared(F.linear(input, self.weight)) + self.bias


def _add(tp: TensorParallel, _linear: nn.Module, _args: Any, y: Tensor) -> Tensor:
    return tp.sum_shared(y)


def _gather_columns(tp: TensorParallel, _norm: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *rest = args
    return tp.gather_last(x), *rest


def _own_columns(tp: TensorParallel, _norm: nn.Module, _args: Any, y: Tensor) -> Tensor:
    return y.chunk(tp.size, dim=-1)[tp.rank]


def _own_head(head: int, head_dim: int, _linear: nn.Module, _args: Any, y: Tensor) -> Tensor:
    return y.narrow(-1, head * head_dim, head_dim)
