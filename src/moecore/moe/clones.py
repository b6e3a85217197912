"""Clones of hot experts: ranks with few tokens compute a part of the tokens of busy ranks' experts.

    routing -> counts of all ranks -> plan (kernels/routing/clones.py) -> physical ids -> dispatch
    weights of cloned experts travel; Experts compute e + n experts
    gradients of clones travel home and are added, in the order of places for clones

Legend: E experts, e experts of a rank, c clones of a rank at most, n those of this forward, G ranks
of the dispatch group, T local tokens, K experts per token.

A clone lives for one forward and its backward. It is no parameter: checkpoints, optimizers and
norms know experts alone. Which experts are cloned is a function of all ranks' choices, so a forward
that backward repeats makes the same clones. One all-gather of E numbers and one host sync per
forward; one all-to-all per tensor of weights, forward and backward, where there are clones.

Backward keeps the clones, and not the experts beside them once more: they are joined again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moecore._fields import Bound, Count, check_fields
from moecore._torch import all_gather_single, is_recomputing, storage_key
from moecore.kernels.experts.contract import (
    ComputeGrad,
    ExpertWeights,
    GradSink,
    GradTarget,
    LowRankUpdate,
)
from moecore.kernels.routing.clones import physical_ids, plan_clones
from moecore.kernels.routing.counts import add_expert_counts
from moecore.memory.saved import Handle, packing
from moecore.moe.lanes import Lanes, exchange
from moecore.moe.placement import ExpertPlacement
from moecore.moe.records import ExpertInput, Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class CloneOptions:
    """Clones of hot experts on other ranks, planned anew in every forward.

    Attributes:
        per_rank: most clones that a rank holds in one layer; one clone costs the transfer of its
            expert's weights in forward, and of their gradients in backward.
        least: no clone gets fewer tokens than this share of a rank's mean, so ranks that are as
            close to it stay as they are.
    """

    per_rank: Count = 2
    least: Annotated[float, Bound(">=", 0), Bound("<", 1)] = 0.05

    def __post_init__(self) -> None:
        check_fields(self)


class Cloner:
    """Plans the clones of a layer's forwards.

    Args:
        placement: of the layer's experts, with room for clones.
        group: ranks of the dispatch group that have this rank's part of their experts, in order.
        options: how many clones, and when.

    Attributes:
        counted: clones on this rank, and forwards, since the last optimizer step.
    """

    def __init__(
        self, placement: ExpertPlacement, group: dist.ProcessGroup, options: CloneOptions
    ) -> None:
        self.options = options
        self.counted = (0, 0)
        self._placement, self._group = placement, group

    @torch.compiler.disable
    def place(self, routing: Routing, lanes: Lanes | None) -> tuple[Routing, Clones | None]:
        """Return the routing with its physical experts, and the clones that this forward needs.

        One all-gather and one host sync. On meta nobody has clones.

        Args:
            routing: of this rank's tokens.
            lanes: of the dispatcher.

        Returns:
            None where no rank has a clone.
        """
        p, ids_TK = self._placement, routing.expert_ids_TK
        if ids_TK.is_meta:
            return replace(routing, physical_TK=p.physical_ids(ids_TK)), None
        counts_GE = self._counts(ids_TK, lanes)
        rank = dist.get_rank(p.group)
        plan = plan_clones(
            counts_GE.sum(0, dtype=torch.int32),
            num_ranks=p.ep,
            num_clones=p.num_clones,
            least=self.options.least,
        )
        before_E = counts_GE[:rank].sum(0, dtype=torch.int32)
        sizes = dict(num_local=p.num_local, num_clones=p.num_clones)
        routing = replace(routing, physical_TK=physical_ids(ids_TK, before_E, plan, **sizes))
        experts = plan.experts_N.tolist()
        clones = None if max(experts) < 0 else Clones.of(experts, p, self._group, lanes)
        if torch.is_grad_enabled() and not is_recomputing():
            number, forwards = self.counted
            self.counted = number + (0 if clones is None else clones.num_here), forwards + 1
        return routing, clones

    def _counts(self, ids_TK: Tensor, lanes: Lanes | None) -> Tensor:
        """Return the tokens of each rank for each expert, int64 [G, E]."""
        p = self._placement
        mine_1E = torch.zeros(1, p.num_experts, dtype=torch.int64, device=ids_TK.device)
        add_expert_counts(mine_1E, ids_TK)
        counts_GE = mine_1E.new_empty(p.group.size(), p.num_experts)
        exchange([partial(all_gather_single, counts_GE, mine_1E, group=p.group)], lanes)
        return counts_GE

    def cut(self, inp: ExpertInput, clones: Clones | None) -> ExpertInput:
        """Return the experts' input without the places for clones that are empty on this rank."""
        number = self._placement.num_local + (0 if clones is None else clones.num_here)
        index = inp.index._replace(offsets_e=inp.index.offsets_e[:number])
        return replace(inp, index=index, clones=clones)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clones:
    """The clones of one forward of a layer, as one rank sees them.

    Attributes:
        group: ranks by expert block.
        lanes: that take turns while weights travel.
        sent: this rank's experts that are cloned, by destination and then by place, repeated.
        send_splits: how many of them go to each rank.
        receive_splits: how many come from each rank.
        order: which of those that came is in each place, in order.
    """

    group: dist.ProcessGroup
    lanes: Lanes | None
    sent: tuple[int, ...]
    send_splits: tuple[int, ...]
    receive_splits: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(
        cls,
        experts: Sequence[int],
        placement: ExpertPlacement,
        group: dist.ProcessGroup,
        lanes: Lanes | None = None,
    ) -> Clones:
        """Return a rank's view of a plan.

        Args:
            experts: the expert in each place for a clone, rank by rank; -1 = empty.
            placement: of the layer's experts.
            group: ranks by expert block.
            lanes: as of the record.

        Example, three ranks of two experts and two places each, experts [4, 3, -1, -1, 2, 0]:
        rank 0 sends its expert 0 to rank 2. Rank 0 gets 3 of rank 1 and then 4 of rank 2, so its
        order is [1, 0].
        """
        p, here = placement, dist.get_rank(group)
        ranks = range(p.ep)
        rows = [experts[q * p.num_clones : (q + 1) * p.num_clones] for q in ranks]
        owners = [[x // p.num_local for x in row if x >= 0] for row in rows]
        own = range(here * p.num_local, (here + 1) * p.num_local)
        mine = [[x - own.start for x in row if x in own] for row in rows]
        came = sorted(range(len(owners[here])), key=lambda place: owners[here][place])
        return cls(
            group=group,
            lanes=lanes,
            sent=tuple(x for row in mine for x in row),
            send_splits=tuple(map(len, mine)),
            receive_splits=tuple(owners[here].count(q) for q in ranks),
            order=tuple(came.index(place) for place in range(len(came))),
        )

    @property
    def num_here(self) -> int:
        """Clones on this rank, n."""
        return len(self.order)

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the clones' part of each tensor, [n, ...]. Collective over the group.

        Args:
            tensors: [e, ...], this rank's experts.
        """
        found = self._travel([t[list(self.sent)] for t in tensors], self.num_here, is_home=False)
        return found if self._is_in_order else [t[list(self.order)] for t in found]

    @torch.no_grad()
    def bring_home_(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Add the clones' gradients to those of their experts, in place; return these, [e, ...].

        Added in fp32 and rounded once. Collective over the group.

        Args:
            grads: [e + n, ...], this rank's experts and then its clones.
        """
        e = [grad.shape[0] - self.num_here for grad in grads]
        outward = [grad[number:] for grad, number in zip(grads, e, strict=True)]
        if not self._is_in_order:
            places = sorted(range(self.num_here), key=self.order.__getitem__)
            outward = [grad[places] for grad in outward]
        came = self._travel(outward, len(self.sent), is_home=True)
        home = [grad[:number] for grad, number in zip(grads, e, strict=True)]
        for own, others in zip(home, came, strict=True):
            for expert in sorted(set(self.sent)):
                wide = torch.promote_types(own.dtype, torch.float32)
                total = own[expert].to(wide)
                for part, of in zip(others, self.sent, strict=True):
                    if of == expert:
                        total = total + part
                own[expert] = total
        return home

    @property
    def _is_in_order(self) -> bool:
        return self.order == tuple(range(self.num_here))

    def _travel(self, sent: Sequence[Tensor], number: int, *, is_home: bool) -> list[Tensor]:
        """Return what comes: `number` rows for each tensor, as bytes travel."""
        splits = [list(self.receive_splits), list(self.send_splits)]
        receive, send = reversed(splits) if is_home else splits
        outs = [t.new_empty((number, *t.shape[1:])) for t in sent]
        how: dict[str, Any] = dict(
            output_split_sizes=receive, input_split_sizes=send, group=self.group
        )
        exchange(
            [
                partial(dist.all_to_all_single, _carried(out), _carried(t.contiguous()), **how)
                for out, t in zip(outs, sent, strict=True)
            ],
            self.lanes,
        )
        return outs


def _carried(tensor: Tensor) -> Tensor:
    """Return a tensor in a dtype that every communicator carries."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


@contextmanager
def with_clones(weights: ExpertWeights, clones: Clones | None) -> Iterator[ExpertWeights]:
    """Give the weights of e + n experts; within, what is saved of them is joined again.

    Args:
        weights: of this rank's experts.
        clones: of the forward; None = there are none, and the weights stay as they are.
    """
    if clones is None:
        yield weights
        return
    joined = _Joined(clones)
    extended = _extended(weights, joined)
    with packing(joined.pack):
        yield extended


class _Joined:
    """Tensors of experts and clones, and how to make them again."""

    def __init__(self, clones: Clones) -> None:
        self.clones = clones
        self._parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # the whole is held: its key

    def join(self, own: Tensor, clones: Tensor) -> Tensor:
        """Return [e + n, ...], a copy where there are clones on this rank."""
        if not clones.shape[0]:
            return own.view_as(own)
        whole = _cat(own, clones)
        self._parts[storage_key(whole)] = whole, own.detach(), clones
        return whole

    def pack(self, tensor: Tensor) -> Handle | None:
        """Return the handle of a tensor that was joined; None of others."""
        found = self._parts.get(storage_key(tensor))
        return None if found is None else _Again(tensor, *found[1:])


class _Again:
    """A view of a joined tensor, which is joined again."""

    __slots__ = ("_parts", "_view")

    def __init__(self, tensor: Tensor, own: Tensor, clones: Tensor) -> None:
        self._parts = own, clones
        self._view = tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self) -> Tensor:
        """Return the view of a new copy."""
        return _cat(*self._parts).as_strided(*self._view)


def _cat(own: Tensor, clones: Tensor) -> Tensor:
    return torch.cat([_carried(own), _carried(clones)]).view(own.dtype)


class _Extend(torch.autograd.Function):
    """Weights of experts -> of experts and clones; clones' gradients come home."""

    @staticmethod
    def forward(
        ctx: Any, joined: _Joined, how: tuple[_How, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.clones, ctx.how = joined.clones, how
        ctx.set_materialize_grads(False)
        n = joined.clones.num_here
        read = [t for t, h in zip(tensors, how, strict=True) if h.has_values]
        came = iter(joined.clones.fetch(read) if read else ())
        return tuple(
            joined.join(t, next(came))
            if h.has_values
            else t.new_empty(1).expand(t.shape[0] + n, *t.shape[1:])
            for t, h in zip(tensors, how, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        at_home = [h.sink is not None and h.sink.take() for h in ctx.how]
        own = {
            i: grad.clone()
            for i, (grad, is_home) in enumerate(zip(grads, at_home, strict=True))
            if grad is not None and not is_home
        }
        home = ctx.clones.bring_home_(list(own.values())) if own else ()
        found = dict(zip(own, home, strict=True))
        n = ctx.clones.num_here
        return (
            None,
            None,
            *(
                found.get(i, None if grad is None else grad[: grad.shape[0] - n])
                for i, grad in enumerate(grads)
            ),
        )


class _How(NamedTuple):
    """Of a tensor of weights.

    Attributes:
        has_values: whether products read it; False for what was quantised.
        sink: what may bring its gradient home in the experts' backward.
    """

    has_values: bool = True
    sink: _HomeSink | None = None


class _HomeSink:
    """Adds the clones' gradients to those of their experts, for the experts' own sink."""

    def __init__(self, sink: GradSink, clones: Clones, dtype: torch.dtype) -> None:
        self._sink, self._clones, self._dtype = sink, clones, dtype
        self._is_home = False

    def take(self) -> bool:
        """Return whether `put` ran in this backward: not under dispatch modes, for example."""
        is_home, self._is_home = self._is_home, False
        return is_home

    def put(self, compute: ComputeGrad, *operands: Any) -> Tensor | None:
        """As of `GradSink`; collective. Sums in fp32."""
        wide = torch.promote_types(self._dtype, torch.float32)
        total = compute(*operands, GradTarget(dtype=wide))
        (home,) = self._clones.bring_home_([total])
        self._is_home = True
        found = self._sink.put(_put, home, self._dtype)
        if found is None:
            return None
        return torch.cat([found, found.new_zeros(self._clones.num_here, *found.shape[1:])])

    def defer(self, compute: ComputeGrad, *operands: Any) -> bool:
        """Return False: what ranks do together they do in this backward."""
        return False


def _put(grad: Tensor, dtype: torch.dtype, target: GradTarget) -> Tensor:
    """Put a gradient that is there already at a target."""
    if target.scale != 1.0:
        grad = grad * target.scale
    if target.out is None:
        return grad.to(target.dtype or dtype)
    return target.out.add_(grad) if target.adds else target.out.copy_(grad)


def _extended(weights: ExpertWeights, joined: _Joined) -> ExpertWeights:
    """Return the weights of experts and clones. Collective."""
    clones, quantised = joined.clones, weights.quantised
    updates = [u for u in (weights.update1, weights.update2) if u is not None]
    matrices = [weights.w1_eCD, weights.w2_eDF]
    sinks = [
        None if sink is None else _HomeSink(sink, clones, matrix.dtype)
        for sink, matrix in zip(weights.sinks, matrices, strict=True)
    ]
    how = [_How(quantised is None, sink) for sink in sinks]
    others = [b for b in (weights.b1_eC, weights.b2_eD) if b is not None]
    others += [t for u in updates for t in (u.a_erI, u.b_eOr)]
    # Transposed matrices are views of contiguous memory: as that they travel, and are joined.
    is_view = [not m.is_contiguous() and h.has_values for m, h in zip(matrices, how, strict=True)]
    stored = [m.transpose(1, 2) if v else m for m, v in zip(matrices, is_view, strict=True)]
    how += [_How()] * len(others)
    found = iter(_Extend.apply(joined, tuple(how), *stored, *others))
    w1, w2 = (w.transpose(1, 2) if v else w for v, w in zip(is_view, found, strict=False))
    extended = replace(
        weights,
        w1_eCD=w1,
        w2_eDF=w2,
        b1_eC=None if weights.b1_eC is None else next(found),
        b2_eD=None if weights.b2_eD is None else next(found),
    )
    pairs = (weights.update1, weights.update2)
    update1, update2 = (u and LowRankUpdate(next(found), next(found)) for u in pairs)
    return replace(
        extended,
        update1=update1,
        update2=update2,
        sinks=(sinks[0], sinks[1]),
        quantised=None if quantised is None else _joined_leaves(quantised, joined),
    )


@torch.no_grad()
def _joined_leaves(
    quantised: tuple[tuple[Tensor, ...], tuple[Tensor, ...]], joined: _Joined
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return quantised matrices of experts and clones. Collective."""
    leaves = [leaf for matrix in quantised for leaf in matrix]
    came = joined.clones.fetch(leaves)
    found = [joined.join(own, there) for own, there in zip(leaves, came, strict=True)]
    first = len(quantised[0])
    return tuple(found[:first]), tuple(found[first:])
