"""Plan of Muon's exchanges: the owner rank of each matrix, and the pieces that ranks send.

A matrix that one rank stores completely is orthogonalised there. Every other matrix has one owner
rank. All ranks send their pieces of the matrix to the owner, and the owner returns pieces of the
result. All matrices of a round share one all-to-all in each direction.

    gradient pieces, by owner -> all-to-all -> full matrices -> all-to-all -> pieces, by holder

The plan depends only on layouts, so all ranks compute the same plan without communication. Replicas
(HSDP, parameters that tp ranks replicate) all receive the owner's result, so they stay bitwise
equal.
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
    """Indices of a block of matrices in one of several [batch, rows, columns] tensors."""

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
        """Return the block of `tensors[self.place]`: a view if `is_view`, otherwise a copy."""
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
        pairs = zip(indices, target.shape, strict=True)
        batch, rows, columns = (_expand_index(i, size, target) for i, size in pairs)
        target[batch[:, None, None], rows[:, None], columns] = values.to(target.dtype)


@dataclass(frozen=True, slots=True)
class ExchangeRound:
    """This rank's part of two all-to-alls: matrices to their owner ranks, and results back.

    `sends[r]`, `receives[r]`, `returns[r]` and `results[r]` are exchanged with group rank r.
    """

    params: list[int]  # indices of the exchanged parameters
    owned: list[tuple[int, int, int]]  # [n, rows, columns] that this rank orthogonalises
    sends: list[list[MatrixBlock]]  # blocks of parameters, sent to owners
    receives: list[list[MatrixBlock]]  # blocks of `owned`, received from holders
    returns: list[list[MatrixBlock]]  # blocks of `owned`, sent back to every replica
    results: list[list[MatrixBlock]]  # blocks of parameters, received from owners

    def run_all_to_all(
        self, like: Tensor, sources: Sequence[Tensor], *, is_return: bool, group: dist.ProcessGroup
    ) -> Tensor:
        """Run one all-to-all; return received values, 1D with the dtype of `like`. Collective.

        Without `is_return`, ranks send blocks of `sources`, one tensor per parameter, to owners.
        With `is_return`, owners send blocks of `sources`, one tensor per entry of `owned`, back.
        """
        out, into = (self.returns, self.results) if is_return else (self.sends, self.receives)
        pieces = [block.read_from(sources).reshape(-1) for blocks in out for block in blocks]
        send_buffer = torch.cat(pieces) if pieces else like.new_empty(0)
        out_sizes, in_sizes = _count_elements_by_rank(out), _count_elements_by_rank(into)
        recv_buffer = like.new_empty(sum(in_sizes))
        dist.all_to_all_single(recv_buffer, send_buffer, in_sizes, out_sizes, group=group)
        return recv_buffer

    def unpack_blocks(
        self, recv_buffer: Tensor, *, is_return: bool
    ) -> Iterator[tuple[MatrixBlock, Tensor]]:
        """Split the result of `run_all_to_all` for this `is_return`; yield (block, values)."""
        blocks = list(chain.from_iterable(self.results if is_return else self.receives))
        sizes = [prod(block.shape) for block in blocks]
        for block, values in zip(blocks, recv_buffer.split(sizes), strict=True):
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
        """Return this rank's plan of parameters or NorMuon's means, with the same owners."""
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
    """Return the planned tensor of each tensor; `layouts[i]` is the layout of `tensors[i]`."""
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
        numbers = range(len(layout.shapes))
        self.full_masks = [self._find_ranks_with_full_matrix(number) for number in numbers]
        self.is_local = all(
            bool((self._count_ranks_by_matrix(number) == 1).all() and (mask.sum(0) == 1).all())
            for number, mask in enumerate(self.full_masks)
        )

    def _count_ranks_by_matrix(self, section_idx: int) -> Tensor:
        """Return int64 [batch]: how many ranks store elements of each matrix of a section."""
        counts = torch.zeros(self.layout.batch, dtype=torch.int64, device="cpu")
        for parts in self.rank_parts:
            part = parts[section_idx]
            if part.rows.numel() and part.columns.numel():
                counts[part.batch] += 1
        return counts

    def _find_ranks_with_full_matrix(self, section_idx: int) -> Tensor:
        """Return bool [ranks, batch]: whether a rank stores the full matrix, for a section."""
        mask = torch.zeros(len(self.ranks), self.layout.batch, dtype=torch.bool, device="cpu")
        for rank, parts in enumerate(self.rank_parts):
            part = parts[section_idx]
            if (part.rows.numel(), part.columns.numel()) == self.layout.shapes[section_idx]:
                mask[rank, part.batch] = True
        return mask


class _PlannedTensor(NamedTuple):
    """A tensor of a plan: its index in the list of tensors, its shards, and its device."""

    place: int
    shards: _MatrixShards
    device: torch.device

    def make_block(self, part: MatrixPart, section_idx: int, mask: Tensor) -> MatrixBlock | None:
        """Return the block of the tensor with the rows and columns of `part`; None = empty.

        `section_idx` is the index of the section. `mask` selects matrices of the local
        batch.
        """
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
    """Return the block with these int64 indices per dim; None if a dim is empty.

    `tensor_idx` is the index of the tensor in a list, and `section_idx` the index of the layout's
    section.
    """
    shape = (batch_idxs.numel(), row_idxs.numel(), column_idxs.numel())
    if 0 in shape:
        return None
    at = [_compress_index(index, device) for index in (batch_idxs, row_idxs, column_idxs)]
    return MatrixBlock(tensor_idx, at[0], at[1], at[2], shape, section_idx)


Owners = dict[tuple[int, int], Tensor]  # (place of the parameter, part) -> int64 [batch]


def _assign_owners(tensors: list[_PlannedTensor], num_ranks: int) -> Owners:
    """Return (tensor index, section) -> int64 [batch], each matrix's owner as a group rank.

    Owners balance the cost of Newton-Schulz over `num_ranks` ranks. The result is equal on all
    ranks.
    """
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
    """Return the exchange of `tensors` with the owners of their matrices, as seen by `rank`.

    `owners` is the result of `_assign_owners`. `rank` is a group rank.
    """
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


def _compress_index(index: Tensor, device: torch.device) -> Index:
    """Return an index as a slice if its steps are equal, otherwise as a tensor on `device`."""
    first, step = int(index[0]), int(index[1] - index[0]) if index.numel() > 1 else 1
    if step > 0 and torch.equal(index, torch.arange(index.numel(), device="cpu") * step + first):
        return slice(first, int(index[-1]) + 1, step)
    return index.to(device)


def _expand_index(index: Index, dim_size: int, like: Tensor) -> Tensor:
    """Return a slice or index tensor of a dim of `dim_size` as a tensor on the device of `like`."""
    if isinstance(index, Tensor):
        return index
    return torch.arange(*index.indices(dim_size), device=like.device)


def _count_elements_by_rank(rank_blocks: list[list[MatrixBlock]]) -> list[int]:
    """Return the number of elements of each rank's blocks."""
    return [sum(prod(block.shape) for block in blocks) for blocks in rank_blocks]
