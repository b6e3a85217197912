"""Who orthogonalises which matrix, and which pieces travel for it.

A matrix that one rank holds whole stays there. Every other matrix gets one owner: its pieces come
together there and the result goes back, each in one all-to-all of all matrices of a round.

    gradient pieces, by owner -> all-to-all -> whole matrices -> all-to-all -> pieces, by holder

The plan is a function of layouts alone, so all ranks make the same one without communication.
Copies (HSDP, parameters that tp ranks replicate) get one result: the owner's, so they stay equal to
the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moecore.train.optim.matrices import MatrixLayout, MatrixPart

ROUND_NUMEL = 1 << 28  # elements of a rank's share of one exchange
Index = slice | Tensor


class MatrixBlock(NamedTuple):
    """Where matrices of one shape lie in a [batch, rows, columns] tensor."""

    place: int  # of that tensor, in a list of such
    batch: Index
    rows: Index
    columns: Index
    shape: tuple[int, int, int]
    part: int  # its number, which decides about the learning rate

    @property
    def is_view(self) -> bool:
        """Whether what is read shares memory with its tensor."""
        return not any(isinstance(i, Tensor) for i in (self.batch, self.rows, self.columns))

    def read(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return what lies there; see `is_view`."""
        found = tensors[self.place]
        for dim, index in enumerate((self.batch, self.rows, self.columns)):
            if isinstance(index, Tensor):
                found = found.index_select(dim, index)
            else:
                found = found[(slice(None),) * dim + (index,)]
        return found

    def write(self, tensors: Sequence[Tensor], values: Tensor) -> None:
        """Copy values to where they belong."""
        target = tensors[self.place]
        indices = (self.batch, self.rows, self.columns)
        if self.is_view:
            target[indices].copy_(values)
            return
        every = (_as_tensor(i, n, target) for i, n in zip(indices, target.shape, strict=True))
        batch, rows, columns = every
        target[batch[:, None, None], rows[:, None], columns] = values.to(target.dtype)


@dataclass(frozen=True, slots=True)
class Round:
    """One exchange, as one rank sees it; lists of blocks go by the other rank in the group."""

    params: list[int]  # places of the parameters that take part
    owned: list[tuple[int, int, int]]  # [n, rows, columns] of what this rank orthogonalises
    sends: list[list[MatrixBlock]]  # blocks of parameters that owners get
    receives: list[list[MatrixBlock]]  # blocks of `owned` that come from others
    returns: list[list[MatrixBlock]]  # blocks of `owned` that go back, to every copy
    results: list[list[MatrixBlock]]  # blocks of parameters that come back

    def exchange(
        self, like: Tensor, sources: Sequence[Tensor], *, back: bool, group: dist.ProcessGroup
    ) -> Tensor:
        """Return what comes from all ranks, flat, in the dtype and device of `like`. Collective."""
        # Sources are tensors of all parameters, or, on the way back, the matrices of `owned`.
        out, into = (self.returns, self.results) if back else (self.sends, self.receives)
        pieces = [block.read(sources).reshape(-1) for blocks in out for block in blocks]
        sent = torch.cat(pieces) if pieces else like.new_empty(0)
        out_sizes, in_sizes = _sizes(out), _sizes(into)
        received = like.new_empty(sum(in_sizes))
        dist.all_to_all_single(received, sent, in_sizes, out_sizes, group=group)
        return received

    def unpack(self, received: Tensor, *, back: bool) -> Iterator[tuple[MatrixBlock, Tensor]]:
        """Yield the blocks of what came, and their values."""
        blocks = [b for one in (self.results if back else self.receives) for b in one]
        sizes = [prod(block.shape) for block in blocks]
        for block, values in zip(blocks, received.split(sizes), strict=True):
            yield block, values.view(block.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixPlan:
    """How one rank takes part in a step of some parameters."""

    alone: dict[int, list[MatrixBlock]]  # place -> own blocks, of matrices on one rank each
    rounds: list[tuple[dist.ProcessGroup, Round]]  # of the others
    outputs: MatrixPlan | None = None  # the same blocks and rounds of one number per output


def make_plan(
    params: Sequence[Tensor],
    layouts: Sequence[MatrixLayout],
    group_of: Callable[[tuple[int, ...]], dist.ProcessGroup],
    outputs: Sequence[Tensor] | None = None,
) -> MatrixPlan:
    """Return the plan of a step; `group_of` gives the process group of ranks, in their order.

    `outputs` are what parameters have per output (`MatrixLayout.of_outputs`); it goes where the
    matrices go.
    """
    members = _members(params, layouts)
    shared: dict[tuple[int, ...], list[_Member]] = {}
    for member in members:
        if not member.holding.is_alone:
            shared.setdefault(member.holding.ranks, []).append(member)
    rounds = []
    for ranks, group_members in shared.items():
        group, rank = group_of(ranks), ranks.index(dist.get_rank())
        owners = _assign(group_members, len(ranks))
        for some in _rounds(group_members, len(ranks)):
            rounds.append((group, [member.place for member in some], (owners, rank)))

    def plan_of(found: list[_Member]) -> MatrixPlan:
        alone = {m.place: found[m.place].blocks_alone() for m in members if m.holding.is_alone}
        travel = [(g, _round([found[i] for i in some], *own)) for g, some, own in rounds]
        return MatrixPlan(alone=alone, rounds=travel)

    if outputs is None:
        return plan_of(members)
    beside = _members(outputs, [layout.of_outputs() for layout in layouts])
    return replace(plan_of(members), outputs=plan_of(beside))


def _members(tensors: Sequence[Tensor], layouts: Sequence[MatrixLayout]) -> list[_Member]:
    holdings: dict[object, _Holding] = {}  # tensors of one layout share theirs
    found = []
    for place, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True)):
        key: object = (tensor.shape, layout)
        if isinstance(tensor, DTensor):
            key = (key, tensor.device_mesh, tensor.placements)
        if key not in holdings:
            holdings[key] = _Holding(tensor, layout)
        found.append(_Member(place, holdings[key], tensor.device))
    return found


class _Holding:
    """What each rank of a mesh holds of a parameter's matrices; lists go by `ranks`, ascending."""

    def __init__(self, param: Tensor, layout: MatrixLayout) -> None:
        self.layout, self.numel = layout, param.numel()
        if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
            self.ranks: tuple[int, ...] = (0,)
            self.held, self.is_alone = [layout.parts(param)], True
            return
        mesh = param.device_mesh.mesh
        found = {int(mesh[tuple(c)]): tuple(c.tolist()) for c in (mesh >= 0).nonzero()}
        self.ranks = tuple(sorted(found))
        # What ranks that hold copies of each other differ in.
        replicated = [i for i, p in enumerate(param.placements) if p.is_replicate()]
        self.copy_of = [tuple(found[rank][i] for i in replicated) for rank in self.ranks]
        self.held = [layout.parts(param, found[rank]) for rank in self.ranks]
        # Per part, bool [ranks, batch]: who holds all of a matrix.
        self.whole_on = [self._whole_on(number) for number in range(len(layout.shapes))]
        self.is_alone = all(
            bool((self._touched_by(number) == 1).all() and (whole.sum(0) == 1).all())
            for number, whole in enumerate(self.whole_on)
        )

    def _touched_by(self, number: int) -> Tensor:
        """Return by how many ranks each matrix of a part is held, whole or not."""
        counts = torch.zeros(self.layout.batch, dtype=torch.int64)
        for parts in self.held:
            part = parts[number]
            if part.rows.numel() and part.columns.numel():
                counts[part.batch] += 1
        return counts

    def _whole_on(self, number: int) -> Tensor:
        found = torch.zeros(len(self.ranks), self.layout.batch, dtype=torch.bool)
        for rank, parts in enumerate(self.held):
            part = parts[number]
            if (part.rows.numel(), part.columns.numel()) == self.layout.shapes[number]:
                found[rank, part.batch] = True
        return found


class _Member(NamedTuple):
    """A parameter of a plan: its place, what ranks hold of it, and its device."""

    place: int
    holding: _Holding
    device: torch.device

    def block(self, part: MatrixPart, number: int, chosen: Tensor) -> MatrixBlock | None:
        """Return the block of the chosen (bool) matrices in a rank's own tensor, or None."""
        (batch,) = chosen.nonzero(as_tuple=True)
        return _block(self.place, batch, part.rows, part.columns, number, self.device)

    def blocks_alone(self) -> list[MatrixBlock]:
        """Return the blocks of all that this rank holds."""
        ranks, held = self.holding.ranks, self.holding.held
        mine = held[ranks.index(dist.get_rank())] if len(ranks) > 1 else held[0]
        found = [self.block(p, i, torch.ones_like(p.batch) > 0) for i, p in enumerate(mine)]
        return [block for block in found if block is not None]


def _block(
    place: int, batch: Tensor, rows: Tensor, columns: Tensor, part: int, device: torch.device
) -> MatrixBlock | None:
    shape = (batch.numel(), rows.numel(), columns.numel())
    if 0 in shape:
        return None
    at = [_index(index, device) for index in (batch, rows, columns)]
    return MatrixBlock(place, at[0], at[1], at[2], shape, part)


def _rounds(members: list[_Member], num_ranks: int) -> Iterator[list[_Member]]:
    """Yield parameters that travel together."""
    some: list[_Member] = []
    numel = 0
    for member in members:
        if some and numel + member.holding.numel > ROUND_NUMEL * num_ranks:
            yield some
            some, numel = [], 0
        some.append(member)
        numel += member.holding.numel
    yield some


Owners = dict[tuple[int, int], Tensor]  # (place of the parameter, part) -> int64 [batch]


def _assign(members: list[_Member], num_ranks: int) -> Owners:
    """Choose the owner of each matrix, the same on all ranks."""
    loads = [0] * num_ranks
    owners: Owners = {}
    every = list(range(num_ranks))
    queue = []
    for order, member in enumerate(members):
        layout = member.holding.layout
        for part, shape in enumerate(layout.shapes):
            owners[member.place, part] = torch.zeros(layout.batch, dtype=torch.int64)
            short, long = sorted(shape)
            cost = short * short * (2 * long + short)  # of Newton-Schulz
            for i, whole in enumerate(member.holding.whole_on[part].T):
                choice = whole.nonzero().flatten().tolist() or every
                queue.append((len(choice) > 1, -cost, order, part, i, choice))
    # Those with one choice come first, then the longest, each to the rank with the least so far.
    for _, cost, order, part, i, choice in sorted(queue):
        owner = min(choice, key=lambda rank: (loads[rank], rank))
        loads[owner] -= cost
        owners[members[order].place, part][i] = owner
    return owners


def _round(members: list[_Member], owners: Owners, rank: int) -> Round:
    """Return a round as one rank sees it; both ends list their blocks in the order of parts."""
    num_ranks = len(members[0].holding.ranks)
    lists: Iterator[list[list[MatrixBlock]]] = ([[] for _ in range(num_ranks)] for _ in range(4))
    sends, receives, returns, results = lists
    found = Round([], [], sends, receives, returns, results)
    for member in members:
        found.params.append(member.place)
        held, copy_of = member.holding.held, member.holding.copy_of
        for number, shape in enumerate(member.holding.layout.shapes):
            owner_of = owners[member.place, number]
            mine = held[rank][number]
            for owner in range(num_ranks):
                block = member.block(mine, number, owner_of[mine.batch] == owner)
                if block is not None:
                    found.results[owner].append(block)
                    if copy_of[owner] == copy_of[rank]:
                        found.sends[owner].append(block)
            (own,) = (owner_of == rank).nonzero(as_tuple=True)
            if not own.numel():
                continue
            place = len(found.owned)
            found.owned.append((own.numel(), *shape))
            for holder in range(num_ranks):
                part = held[holder][number]
                places = torch.searchsorted(own, part.batch[owner_of[part.batch] == rank])
                block = _block(place, places, part.of_rows, part.of_columns, number, member.device)
                if block is not None:
                    found.returns[holder].append(block)
                    if copy_of[holder] == copy_of[rank]:
                        found.receives[holder].append(block)
    return found


def _index(index: Tensor, device: torch.device) -> Index:
    """Return an index as a slice where its steps are equal."""
    first, step = int(index[0]), int(index[1] - index[0]) if index.numel() > 1 else 1
    if step > 0 and torch.equal(index, torch.arange(index.numel()) * step + first):
        return slice(first, int(index[-1]) + 1, step)
    return index.to(device)


def _as_tensor(index: Index, size: int, like: Tensor) -> Tensor:
    if isinstance(index, Tensor):
        return index
    return torch.arange(*index.indices(size), device=like.device)


def _sizes(of_ranks: list[list[MatrixBlock]]) -> list[int]:
    return [sum(prod(block.shape) for block in blocks) for blocks in of_ranks]
