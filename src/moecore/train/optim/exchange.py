"""Plan of Muon's exchanges: the owner rank of each matrix, and the pieces that ranks send.

A matrix that one rank stores completely is orthogonalised there. Every other matrix has one owner
rank. All ranks send their pieces of the matrix to the owner, and the owner returns pieces of the
result. All matrices of a round share one all-to-all in each direction.

    gradient pieces, by owner -> all-to-all -> full matrices -> all-to-all -> pieces, by holder

The plan depends only on parameter shards, so all ranks compute the same plan without communication.
Replicas (HSDP, parameters that tp ranks replicate) all receive the owner's result, so they stay
bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moecore.base.params import chunk_by_size
from moecore.train.optim.matrices import MatrixLayout, MatrixPart

ROUND_NUMEL = 1 << 28  # elements of a rank's share of one exchange
Index = slice | Tensor


class MatrixBlock(NamedTuple):
    """Indices of a block of matrices in `tensors[place]`, of shape [batch, rows, columns]."""

    place: int  # index of the tensor in a list of tensors
    batch: Index
    rows: Index
    columns: Index
    shape: tuple[int, int, int]  # of the indexed values
    part: int  # index of the `MatrixLayout` part, which determines the learning rate

    @property
    def is_view(self) -> bool:
        """Whether `read_from` returns a view of the tensor."""
        return not any(isinstance(i, Tensor) for i in (self.batch, self.rows, self.columns))

    def read_from(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return this block of `tensors[self.place]`: a view if `is_view`, otherwise a copy."""
        values = tensors[self.place]
        for dim, index in enumerate((self.batch, self.rows, self.columns)):
            if isinstance(index, Tensor):
                values = values.index_select(dim, index)
            else:
                values = values[(slice(None),) * dim + (index,)]
        return values

    def write_to(self, tensors: Sequence[Tensor], values: Tensor) -> None:
        """Copy `values`, which have the block's shape, into the block of `tensors[self.place]`."""
        target = tensors[self.place]
        indices = (self.batch, self.rows, self.columns)
        if self.is_view:
            target[indices].copy_(values)
            return
        batch, rows, columns = (
            torch.arange(*index.indices(size), device=target.device)
            if isinstance(index, slice)
            else index
            for index, size in zip(indices, target.shape, strict=True)
        )
        target[batch[:, None, None], rows[:, None], columns] = values.to(target.dtype)


@dataclass(frozen=True, slots=True)
class ExchangeRound:
    """This rank's part of two all-to-alls: matrices to the ranks that step them, and updates back.

    Group rank r is sent `sends[r]` and `returns[r]`; it sends `receives[r]` and `results[r]`.
    """

    params: list[int]  # indices of the exchanged parameters
    owned: list[tuple[int, int, int]]  # [n, rows, columns] that this rank orthogonalises
    sends: list[list[MatrixBlock]]  # blocks of parameters, sent to owners
    receives: list[list[MatrixBlock]]  # blocks of `owned`, received from holders
    returns: list[list[MatrixBlock]]  # blocks of `owned`, sent back to every replica
    results: list[list[MatrixBlock]]  # blocks of parameters, received from owners

    def send_to_owners(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
        """Send blocks of `tensors`, one per parameter; return full local matrices. Collective."""
        like = tensors[self.params[0]]
        owned = [like.new_empty(shape) for shape in self.owned]
        for block, values in _exchange_blocks(tensors, self.sends, self.receives, like, group):
            block.write_to(owned, values)
        return owned

    def return_from_owners(
        self, owned: Sequence[Tensor], like: Tensor, group: dist.ProcessGroup
    ) -> Iterator[tuple[MatrixBlock, Tensor]]:
        """Send the updates `owned` to their blocks' ranks; yield (block, update). Collective."""
        return _exchange_blocks(owned, self.returns, self.results, like, group)


def _exchange_blocks(
    sources: Sequence[Tensor],
    sends: list[list[MatrixBlock]],
    receives: list[list[MatrixBlock]],
    like: Tensor,
    group: dist.ProcessGroup,
) -> Iterator[tuple[MatrixBlock, Tensor]]:
    """Run one all-to-all of blocks of `sources`; yield received blocks with the dtype of `like`."""
    pieces = [block.read_from(sources).reshape(-1) for blocks in sends for block in blocks]
    send_buffer = torch.cat(pieces) if pieces else like.new_empty(0)
    sizes = [prod(block.shape) for blocks in receives for block in blocks]
    recv_buffer = like.new_empty(sum(sizes))
    in_sizes, out_sizes = _count_elements_by_rank(receives), _count_elements_by_rank(sends)
    dist.all_to_all_single(recv_buffer, send_buffer, in_sizes, out_sizes, group=group)
    del pieces, send_buffer
    for block, values in zip(chain.from_iterable(receives), recv_buffer.split(sizes), strict=True):
        yield block, values.view(block.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixPlan:
    """The matrices that this rank orthogonalises in a Muon step, and the exchanges that it runs."""

    local_blocks: dict[int, list[MatrixBlock]]  # parameter index -> blocks of unsharded matrices
    rounds: list[tuple[dist.ProcessGroup, ExchangeRound]]  # exchanges of sharded matrices
    outputs: MatrixPlan | None = None  # plan of the tensors with one number per output


def make_matrix_plan(
    params: Sequence[Tensor],
    layouts: Sequence[MatrixLayout],
    get_group: Callable[[tuple[int, ...]], dist.ProcessGroup],
    output_means: Sequence[Tensor] | None = None,
) -> MatrixPlan:
    """Return this rank's plan of a Muon step, without communication.

    `layouts[i]` is the matrix layout of `params[i]`. `get_group` returns the process group of
    global ranks. `output_means` are NorMuon's mean squares, which are exchanged with their
    matrices; None without `beta2`.
    """
    members = _list_planned_tensors(params, layouts)
    shared: dict[tuple[int, ...], list[_PlannedTensor]] = {}
    for member in members:
        if not member.shards.is_local:
            shared.setdefault(member.shards.ranks, []).append(member)
    rounds = []
    for ranks, group_members in shared.items():
        group, rank = get_group(ranks), ranks.index(dist.get_rank())
        owners = _assign_owners(group_members, len(ranks))
        max_numel = ROUND_NUMEL * len(ranks)
        for round_members in chunk_by_size(group_members, lambda m: m.shards.numel, max_numel):
            rounds.append((group, [member.place for member in round_members], (owners, rank)))

    def make_rank_plan(tensor_members: list[_PlannedTensor]) -> MatrixPlan:
        places = [member.place for member in members if member.shards.is_local]
        local_blocks = {place: tensor_members[place].list_local_blocks() for place in places}
        exchanges = []
        for group, places, assignment in rounds:
            round_members = [tensor_members[place] for place in places]
            exchanges.append((group, _make_round(round_members, *assignment)))
        return MatrixPlan(local_blocks=local_blocks, rounds=exchanges)

    if output_means is None:
        return make_rank_plan(members)
    output_layouts = [layout.make_output_layout() for layout in layouts]
    output_members = _list_planned_tensors(output_means, output_layouts)
    return replace(make_rank_plan(members), outputs=make_rank_plan(output_members))


def _list_planned_tensors(
    tensors: Sequence[Tensor], layouts: Sequence[MatrixLayout]
) -> list[_PlannedTensor]:
    shards_by_layout: dict[object, _MatrixShards] = {}  # tensors of one layout share theirs
    members = []
    for place, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True)):
        key: object = (tensor.shape, layout)
        if isinstance(tensor, DTensor):
            key = (key, tensor.device_mesh, tensor.placements)
        if key not in shards_by_layout:
            shards_by_layout[key] = _MatrixShards(tensor, layout)
        members.append(_PlannedTensor(place, shards_by_layout[key], tensor.device))
    return members


class _MatrixShards:
    """Which elements of a parameter's matrices each rank of its mesh stores.

    Lists have the order of `ranks`, the global ranks. `is_local` = no matrix is sharded.
    """

    def __init__(self, param: Tensor, layout: MatrixLayout) -> None:
        self.layout, self.numel = layout, param.numel()
        if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
            self.ranks: tuple[int, ...] = (0,)
            self.rank_parts, self.is_local = [layout.list_parts(param)], True
            return
        mesh = param.device_mesh.mesh
        coordinates = {int(mesh[tuple(c)]): tuple(c.tolist()) for c in (mesh >= 0).nonzero()}
        self.ranks = tuple(sorted(coordinates))
        # Coordinates on replicated mesh dims: ranks with equal coordinates have one full copy.
        replicated = [i for i, p in enumerate(param.placements) if p.is_replicate()]
        self.replica_of = [tuple(coordinates[rank][i] for i in replicated) for rank in self.ranks]
        self.rank_parts = [layout.list_parts(param, coordinates[rank]) for rank in self.ranks]
        self.full_masks, self.is_local = list[Tensor](), True
        for section_idx, matrix_shape in enumerate(layout.shapes):
            # Per matrix: how many ranks store elements of it, and which ranks store all of it.
            num_ranks = torch.zeros(layout.batch, dtype=torch.int64, device="cpu")
            mask = torch.zeros(len(self.ranks), layout.batch, dtype=torch.bool, device="cpu")
            for rank, parts in enumerate(self.rank_parts):
                part = parts[section_idx]
                part_shape = (part.rows.numel(), part.columns.numel())
                if 0 not in part_shape:
                    num_ranks[part.batch] += 1
                if part_shape == matrix_shape:
                    mask[rank, part.batch] = True
            self.full_masks.append(mask)
            self.is_local &= bool((num_ranks == 1).all() and (mask.sum(0) == 1).all())


class _PlannedTensor(NamedTuple):
    """A tensor of a plan: its index in the list of tensors, its shards, and its device."""

    place: int
    shards: _MatrixShards
    device: torch.device

    def make_block(self, part: MatrixPart, section_idx: int, mask: Tensor) -> MatrixBlock | None:
        """Return the block of the rows and columns of `part` in the matrices of `mask`."""
        (batch,) = mask.nonzero(as_tuple=True)
        return _make_block(self.place, batch, part.rows, part.columns, section_idx, self.device)

    def list_local_blocks(self) -> list[MatrixBlock]:
        """Return the blocks of this rank's local tensor, one per section that is not empty."""
        ranks, rank_parts = self.shards.ranks, self.shards.rank_parts
        parts = rank_parts[ranks.index(dist.get_rank())] if len(ranks) > 1 else rank_parts[0]
        blocks = [self.make_block(p, i, torch.ones_like(p.batch) > 0) for i, p in enumerate(parts)]
        return [block for block in blocks if block is not None]


def _make_block(
    tensor_idx: int,
    batch_idxs: Tensor,
    row_idxs: Tensor,
    column_idxs: Tensor,
    section_idx: int,
    device: torch.device,
) -> MatrixBlock | None:
    """Return the block with these int64 indices per dim; None if a dim is empty."""
    shape = (batch_idxs.numel(), row_idxs.numel(), column_idxs.numel())
    if 0 in shape:
        return None
    at: list[Index] = []
    for index in (batch_idxs, row_idxs, column_idxs):
        first, step = int(index[0]), int(index[1] - index[0]) if index.numel() > 1 else 1
        equal_steps = torch.arange(index.numel(), device="cpu") * step + first
        if step > 0 and torch.equal(index, equal_steps):
            at.append(slice(first, int(index[-1]) + 1, step))
        else:
            at.append(index.to(device))
    return MatrixBlock(tensor_idx, at[0], at[1], at[2], shape, section_idx)


Owners = dict[tuple[int, int], Tensor]  # (place of the parameter, part) -> int64 [batch]


def _assign_owners(tensors: list[_PlannedTensor], num_ranks: int) -> Owners:
    """Return each matrix's owner, as a group rank; owners have equal work of Newton-Schulz."""
    loads = [0] * num_ranks
    owners: Owners = {}
    every = list(range(num_ranks))
    queue = []
    for order, member in enumerate(tensors):
        layout = member.shards.layout
        for part, shape in enumerate(layout.shapes):
            owners[member.place, part] = torch.zeros(layout.batch, dtype=torch.int64, device="cpu")
            short, long = sorted(shape)
            cost = short * short * (2 * long + short)  # of Newton-Schulz
            for i, mask in enumerate(member.shards.full_masks[part].T):
                choice = mask.nonzero().flatten().tolist() or every
                queue.append((len(choice) > 1, -cost, order, part, i, choice))
    # Those with one choice come first, then the longest, each to the rank with the least so far.
    for _, cost, order, part, i, choice in sorted(queue):
        owner = min(choice, key=lambda rank: (loads[rank], rank))
        loads[owner] -= cost
        owners[tensors[order].place, part][i] = owner
    return owners


def _make_round(tensors: list[_PlannedTensor], owners: Owners, rank: int) -> ExchangeRound:
    """Return the exchange of `tensors` with the owners of their matrices, for group rank `rank`."""
    num_ranks = len(tensors[0].shards.ranks)
    lists: Iterator[list[list[MatrixBlock]]] = ([[] for _ in range(num_ranks)] for _ in range(4))
    sends, receives, returns, results = lists
    result = ExchangeRound([], [], sends, receives, returns, results)
    for member in tensors:
        result.params.append(member.place)
        rank_parts, replica_of = member.shards.rank_parts, member.shards.replica_of
        for number, shape in enumerate(member.shards.layout.shapes):
            owner_of = owners[member.place, number]
            local_part = rank_parts[rank][number]
            for owner in range(num_ranks):
                block = member.make_block(local_part, number, owner_of[local_part.batch] == owner)
                if block is not None:
                    result.results[owner].append(block)
                    if replica_of[owner] == replica_of[rank]:
                        result.sends[owner].append(block)
            (matrix_ids,) = (owner_of == rank).nonzero(as_tuple=True)
            if not matrix_ids.numel():
                continue
            place = len(result.owned)
            result.owned.append((matrix_ids.numel(), *shape))
            for holder in range(num_ranks):
                part = rank_parts[holder][number]
                places = torch.searchsorted(matrix_ids, part.batch[owner_of[part.batch] == rank])
                block = _make_block(
                    place, places, part.matrix_rows, part.matrix_columns, number, member.device
                )
                if block is not None:
                    result.returns[holder].append(block)
                    if replica_of[holder] == replica_of[rank]:
                        result.receives[holder].append(block)
    return result


def _count_elements_by_rank(rank_blocks: list[list[MatrixBlock]]) -> list[int]:
    return [sum(prod(block.shape) for block in blocks) for blocks in rank_blocks]
