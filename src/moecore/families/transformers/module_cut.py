"""ModuleCut: what of a module tensor parallel ranks have parts of, and what they exchange for it.

Legend: T tokens, N outputs of a linear.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

from moecore.base.peft_layers import lora_base, lora_pairs
from moecore.base.regions import once
from moecore.base.torch_names import StridedShard, is_silent
from moecore.families.transformers.linear_attention import refuse_shortcut
from moecore.models.tensor_parallel import TensorParallel
from moecore.moe.dispatch.collectives import exchanged


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Neighbouring rows of a matrix, as many for each head."""

    heads: int
    size: int  # rows of a head

    def own(self, tp: int) -> int:
        """Return the number of rows that a rank needs."""
        return max(1, self.heads // tp) * self.size


Parts = tuple[HeadRows, ...]  # one below the other


@dataclass(frozen=True, slots=True)
class ModuleCut:
    """What of a module a rank has a part of, by name."""

    columns: tuple[str, ...]  # linears, of whose outputs a rank has some
    row: str  # the linear that reads these, and whose outputs are added
    halves: tuple[str, ...] = ()  # columns of gates above as many others: a rank has some of both
    # Columns of several parts, each of all heads: a rank computes as many outputs as the others,
    # and gets those of its heads.
    parts: Mapping[str, Parts] = field(default_factory=dict)
    # Modules with whole parameters, of which a rank reads the rows of its heads.
    read: Mapping[str, Parts] = field(default_factory=dict)
    own: tuple[str, ...] = ()  # parameters, by head
    # Gated norms of groups that several ranks share -> elements of a group.
    groups: Mapping[str, int] = field(default_factory=dict)
    norms: tuple[str, ...] = ()  # that compare all heads
    # Linears of so few key or value heads that ranks share them -> elements of a head. Whole; a
    # rank takes the one head that its query heads read.
    shared: Mapping[str, int] | None = None
    counts: Mapping[str, int] = field(default_factory=dict)  # attributes -> their number on a rank
    # Whole buffers, of which a rank reads its heads' part -> the dim of heads.
    buffers: Mapping[str, int] | None = None


def linears_of(module: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears of a module by name, those in peft's LoRA too."""
    found = dict[str, nn.Linear]()
    for name, child in module.named_children():
        base = lora_base(child) or child
        if type(base) is nn.Linear:
            found[name] = base
        elif base is child:
            found |= {f"{name}.{inner}": linear for inner, linear in linears_of(child).items()}
    return found


def adapted_of(module: nn.Module) -> dict[str, list[tuple[nn.Linear, nn.Linear]]]:
    """Return A and B of each adapter of the linears of a module, by the linear's name."""
    layers = {name: module.get_submodule(name) for name in linears_of(module)}
    return {n: lora_pairs(m) for n, m in layers.items() if lora_base(m) is not None}


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
        owner, attribute = _owner_of(module, name)
        shape = getattr(owner, attribute).shape
        yield (owner, attribute), Shard(next(dim for dim, n in enumerate(shape) if n > 1))


def _owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


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
    for name, parts in cut.parts.items():
        module.get_submodule(name).register_forward_hook(PartExchange(tp, parts))
    if cut.read:
        refuse_shortcut(module)
    for name, parts in cut.read.items():
        part = module.get_submodule(name)
        _read_by(part, {n: partial(_own_rows, tp, n, parts) for n in part._parameters})
    for name, size in cut.groups.items():
        norm = module.get_submodule(name)
        norm.forward = partial(_group_norm, tp, size, norm)  # type: ignore[method-assign]
    for name, number in cut.counts.items():
        setattr(*_owner_of(module, name), number)
    if cut.buffers:
        _read_by(module, {n: partial(_own_part, tp, n, dim) for n, dim in cut.buffers.items()})


def _read_by(module: nn.Module, getters: Mapping[str, Callable[[nn.Module], Any]]) -> None:
    """Let a module's code read attributes in another way."""
    whole, own = type(module), {name: property(getter) for name, getter in getters.items()}
    module.__class__ = type(whole.__name__, (whole,), own | {"__module__": whole.__module__})


def _own_part(tp: TensorParallel, name: str, dim: int, module: nn.Module) -> Tensor:
    buffer = module._buffers[name]
    assert buffer is not None, "it has a number per head"
    return buffer.chunk(tp.size, dim)[tp.rank]


def _rows_of(parts: Parts, rank: int, tp: int) -> Iterator[tuple[int, int]]:
    """Yield first and last row, exclusive, of a rank's heads in each part."""
    start = 0
    for part in parts:
        first = start + part.heads * rank // tp * part.size  # heads fewer than ranks are shared
        yield first, first + part.own(tp)
        start += part.heads * part.size


def _own_rows(tp: TensorParallel, name: str, parts: Parts, module: nn.Module) -> Tensor | None:
    param = module._parameters[name]
    if param is None or isinstance(param, DTensor):  # outside of forward, where it is initialised
        return param
    return torch.cat([param[a:b] for a, b in _rows_of(parts, tp.rank, tp.size)])


class PartExchange:
    """A hook of a linear: outputs of the rows that a rank has in, those of its heads out.

    Example: heads 0 and 1, with a row of q and two rows of v each, on two ranks. The linear has
    rows q0 q1 v0 v0 v1 v1. Ranks compute q0 q1 v0 and v0 v1 v1, and get q0 v0 v0 and q1 v1 v1.
    """

    def __init__(self, tp: TensorParallel, parts: Parts) -> None:
        self._group, ranks = tp.group, range(tp.size)
        self._made = sum(part.heads * part.size for part in parts) // tp.size

        def common(maker: int, taker: int) -> list[tuple[int, int]]:
            """Of what one rank makes, the columns that another one takes: starts and ends."""
            start = maker * self._made
            shifted = [(a - start, b - start) for a, b in _rows_of(parts, taker, tp.size)]
            within = [(max(a, 0), min(b, self._made)) for a, b in shifted]
            return [(a, b) for a, b in within if a < b]

        self._sent = [common(tp.rank, taker) for taker in ranks]
        self._received = [common(maker, tp.rank) for maker in ranks]

    def __call__(self, _linear: nn.Module, _args: Any, y: Tensor) -> Tensor:
        """Return [..., outputs of a rank's heads]; backward adds what ranks did with one output."""
        return once(exchanged, y, self._there, self._back)  # type: ignore[no-any-return]

    def _there(self, y: Tensor) -> Tensor:
        y_TN = y.flatten(0, -2)
        pieces = [[y_TN[:, a:b] for a, b in to] for to in self._sent]
        own = self._swapped(pieces, self._received)
        return torch.cat(own, 1).unflatten(0, y.shape[:-1])

    def _back(self, grad: Tensor) -> Tensor:
        grad_TN = grad.flatten(0, -2)
        widths = [b - a for maker in self._received for a, b in maker]
        pieces = iter(grad_TN.split(widths, 1))
        back = self._swapped([[next(pieces) for _ in to] for to in self._received], self._sent)
        dtype = torch.promote_types(grad.dtype, torch.float32)  # of sums over ranks
        summed_TN = grad_TN.new_zeros(len(grad_TN), self._made, dtype=dtype)
        for (a, b), piece in zip(itertools.chain(*self._sent), back, strict=True):
            summed_TN[:, a:b] += piece
        return summed_TN.to(grad.dtype).unflatten(0, grad.shape[:-1])

    def _swapped(
        self, pieces: list[list[Tensor]], expected: list[list[tuple[int, int]]]
    ) -> list[Tensor]:
        """Send each rank its pieces, [T, columns]; return what ranks send, of expected columns."""
        sent = torch.cat([piece.flatten() for to in pieces for piece in to])
        T = next(len(piece) for to in pieces for piece in to)
        receives = [sum(T * (b - a) for a, b in maker) for maker in expected]
        received = sent.new_empty(sum(receives))
        if not is_silent(sent):
            sends = [sum(piece.numel() for piece in to) for to in pieces]
            dist.all_to_all_single(received, sent, receives, sends, group=self._group)
        widths = [b - a for maker in expected for a, b in maker]
        parts = received.split([T * width for width in widths])
        return [part.view(T, width) for part, width in zip(parts, widths, strict=True)]


def gated_norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, mean: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return weight * h / sqrt(mean(h^2) + eps) of h = x * silu(gate), in fp32 up to the weight."""
    h = x.float() if gate is None else x.float() * F.silu(gate.float())
    return weight * (h * torch.rsqrt(mean(h.pow(2)) + eps)).to(x.dtype)


def _group_norm(
    tp: TensorParallel, size: int, norm: Any, hidden_states: Tensor, gate: Tensor | None = None
) -> Tensor:
    """Return a gated norm's columns of a rank, whose group of `size` is that of several ranks."""

    def mean(squares: Tensor) -> Tensor:
        ranks = size // squares.shape[-1]
        sums = tp.gather_last(squares.sum(-1, keepdim=True))
        return sums.unflatten(-1, (-1, ranks))[..., tp.rank // ranks, :].sum(-1, True) / size

    return gated_norm(hidden_states, gate, norm.weight, norm.variance_epsilon, mean)


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
