"""What a dispatcher is: two verbs, one record, and the collectives that backends share.

Legend: T local tokens, D model dim, E experts, e local experts (E / ep), K experts per token,
S source rows held after dispatch, R expert rows (one per source row and local expert).

A token crosses the network at most once per rank and is never expanded in memory: `dispatch`
gives source rows and, per expert row, the index of the source row it reads.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import register_dataclass

from moecore._autograd import disable_dynamo
from moecore._compat import all_gather_single
from moecore.kernels.experts.expert_mlp import GradientSender, RowsAgain
from moecore.kernels.rows.packed import PACKED, unpack_rows
from moecore.moe.router import Routing


@dataclass(frozen=True, slots=True)
class ExpertInput:
    """All that the experts of one rank need, the same from every dispatcher.

    Attributes:
        rows_SD: source rows held by this rank (without EP: the tokens themselves, no copy). With
            `expert_rows_RD` maybe packed as FP8 with their scales (`kernels/rows/packed.py`), uint8
            [S, W]: experts widen what they gather, or start with `with_rows`.
        row_ids_R: int32, source row of each expert row; contiguous in expert order.
        weights_R: fp32, routing weight of each expert row; differentiable.
        slots_SK: int32, expert row of each source row's k-th choice; -1 where that expert lives on
            another rank or the choice was dropped.
        offsets_e: int32 running sum on the device: expert i owns rows
            [offsets_e[i - 1], offsets_e[i]).
        num_rows: 0-dim int32 on the device, `offsets_e[-1]`. R is a capacity: rows past num_rows
            have row id 0 and weight 0, and nothing computed from them may be used.
        plan: the dispatcher's own record for `combine`; nobody else opens it.
        expert_rows_RD: None, or from a dispatcher that adds expert rows itself: rows_SD[row_ids_R]
            as autograd knows it, without memory (stride 0, never read); rows_SD has no gradient
            then. Experts leave each expert row's gradient there and may return `UnsummedRows`;
            those that add their rows themselves start with `own_sums`.
        sender: None, or from a dispatcher that can send the gradients of expert_rows_RD and
            weights_R home while the experts compute those of their weights; using it is optional.
        again: None, or where backward gets rows_SD, which experts then do not keep.

    Example, two experts, K=2, routing [[0, 1], [1, -1]]: row_ids_R [0, 0, 1, 0],
    slots_SK [[0, 1], [2, -1]], offsets_e [1, 3], num_rows 3: expert 0 reads row 0, expert 1 rows 0
    and 1; the last is unused.
    """

    rows_SD: Tensor
    row_ids_R: Tensor
    weights_R: Tensor
    slots_SK: Tensor
    offsets_e: Tensor
    num_rows: Tensor
    plan: Any
    expert_rows_RD: Tensor | None = None
    sender: GradientSender | None = None
    again: RowsAgain | None = None

    @property
    def dtype(self) -> torch.dtype:
        """In which rows are multiplied."""
        rows = self.rows_SD if self.expert_rows_RD is None else self.expert_rows_RD
        return rows.dtype


@dataclass(frozen=True, slots=True)
class UnsummedRows:
    """What experts may return where the input has `expert_rows_RD`; `combine` adds.

    Attributes:
        y_RD: weighted output of each expert row; those past `num_rows` are uninitialised.
    """

    y_RD: Tensor


# FSDP2 finds the tensors of a module's inputs and outputs through pytree: without this it would
# free the experts' gathered parameters only at the end of the whole backward.
for _record in (ExpertInput, UnsummedRows):
    register_dataclass(_record, field_names=[f.name for f in fields(_record)], drop_field_names=[])


@disable_dynamo
def with_rows(inp: ExpertInput) -> ExpertInput:
    """Return the same input with wide rows_SD, for experts that need that."""
    if inp.expert_rows_RD is not None and inp.rows_SD.dtype == PACKED:
        rows_SD = unpack_rows(inp.rows_SD, inp.expert_rows_RD.shape[1], inp.dtype)
        return replace(inp, rows_SD=rows_SD)
    return inp


def own_sums(inp: ExpertInput) -> ExpertInput:
    """Return the same input with differentiable rows_SD, for experts that gather and sum."""
    inp = with_rows(inp)
    if inp.expert_rows_RD is None:
        return inp
    rows_SD = _SourceRows.apply(inp.expert_rows_RD, inp.rows_SD, inp.slots_SK)
    return replace(inp, rows_SD=rows_SD, expert_rows_RD=None, sender=None)


class _SourceRows(torch.autograd.Function):
    """rows_SD; a row's gradient goes to one of its expert rows, zeros to the others: same sum."""

    @staticmethod
    def forward(ctx: Any, expert_rows_RD: Tensor, rows_SD: Tensor, slots_SK: Tensor) -> Tensor:
        ctx.num_rows = expert_rows_RD.shape[0]
        ctx.save_for_backward(slots_SK)
        return rows_SD.view_as(rows_SD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (drows_SD,), R = grads, ctx.num_rows
        slots_S = ctx.saved_tensors[0].amax(1)
        slots_S = slots_S.where(slots_S >= 0, R)  # one row more, for source rows without a slot
        drows_RD = drows_SD.new_zeros(R + 1, drows_SD.shape[1])
        return drows_RD.index_copy_(0, slots_S.long(), drows_SD)[:R], None, None


class Dispatcher(Protocol):
    """Brings tokens to the ranks that own their experts, and their outputs home."""

    def dispatch(self, x_TD: Tensor, routing: Routing) -> ExpertInput:
        """Bring every token to each rank that owns at least one of its experts, once."""
        ...

    def combine(self, y_SD: Any, plan: Any) -> Tensor:
        """Send each partial sum home once and add over ranks in fp32; returns y_TD.

        y_SD is a tensor, or `UnsummedRows` where the experts' input had `expert_rows_RD`.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPlacement:
    """Which rank of a dispatch group owns which experts: a function of the mesh alone.

    Group rank g = ep_rank * etp + etp_rank. Every etp rank of an ep rank owns the same experts,
    1 / etp of each, so it needs the same tokens; adding over ranks in `combine` adds the parts.

    Attributes:
        group: the ep x etp ranks.
        num_experts: E of the whole layer.
        ep: number of expert blocks.
        etp: number of ranks that share a block.
    """

    group: dist.ProcessGroup
    num_experts: int
    ep: int
    etp: int

    @property
    def num_local(self) -> int:
        """Experts on each rank."""
        return self.num_experts // self.ep

    @property
    def first_local(self) -> int:
        """Global id of this rank's first expert."""
        return dist.get_rank(self.group) // self.etp * self.num_local

    def most_rows(self, routing: Routing) -> int:
        """Most expert rows of one rank, when every rank brings as many tokens as this one."""
        (T, K), e = routing.expert_ids_TK.shape, self.num_local
        return self.group.size() * min(T * min(K, e), e * routing.most_rows_per_expert)


class EqualSizes:
    """Refuses static shapes for ranks that bring different numbers of tokens.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._is_first = True

    def check(self, num_tokens: int, device: torch.device) -> None:
        """Compare with the other ranks; one tiny collective, and a host sync the first time only.

        At every forward: a rank that met its number before can not know that another did not, and
        collectives of unequal sizes hang, abort or mix rows up.

        Raises:
            ValueError: when the first numbers differ.
            RuntimeError: when later ones do; on CUDA the device asserts, before rows travel.
        """
        mine = torch.full((1,), num_tokens, device=device)
        numbers_G = _gather_from_ranks(mine, self.group)
        fix = "with CapacityConfig.pad (True): pad the batches, or set pad=False"
        if self._is_first:
            numbers = numbers_G.tolist()
            if len(set(numbers)) > 1:
                raise ValueError(
                    f"number of tokens ({numbers} by rank of the dispatch group) must be equal "
                    f"{fix}"
                )
            self._is_first = False
        else:
            torch._assert_async(
                (numbers_G == num_tokens).all(),
                f"number of tokens must be equal on all ranks of the dispatch group {fix}",
            )


class _GatherRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_C: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather_from_ranks(x_C, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _SumRanks.apply(grads[0], ctx.group), None


class _SumRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_S: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum_over_ranks(y_S, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _GatherRanks.apply(grads[0], ctx.group), None


def _gather_from_ranks(x_C: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x_C.new_empty((group.size() * x_C.shape[0], *x_C.shape[1:]))
    all_gather_single(out, x_C.contiguous(), group=group)
    return out


def _sum_over_ranks(y_S: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(y_S, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, y_S.contiguous(), group=group)
    parts_GC = received.unflatten(0, (group.size(), y_S.shape[0] // group.size()))
    dtype = torch.promote_types(y_S.dtype, torch.float32)
    return parts_GC.sum(0, dtype=dtype).to(y_S.dtype)


def gather_ranks(x_C: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the C rows of every rank, in rank order: [G * C, ...]. Backward is `sum_ranks`.

    Collective; every rank must bring the same number of rows.
    """
    return _GatherRanks.apply(x_C, group)


def sum_ranks(y_S: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks of the g-th C rows to rank g: [S / G, ...]. Backward is a gather.

    Added in fp32 and in rank order. An all-to-all carries as many bytes as a reduce-scatter, which
    would round after every addition of a 16-bit dtype. Collective.
    """
    return _SumRanks.apply(y_S, group)
