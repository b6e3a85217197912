"""Pieces: the correspondence of a model's sharded tensors and Hugging Face tensors.

Each tensor of a model consists of pieces (`TensorPiece`), which `plan_hf_tensors` lists for the
native decoder and `plan_stock_tensors` for transformers models.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moecore.base.params import compute_global_indices, find_consecutive_runs
from moecore.base.torch_private import get_local_tensor

Region = tuple[int | slice, ...]
ViewDim = tuple[int, int, int]  # dim of a file tensor, length, step
Runs = tuple[tuple[int, int], ...]  # of neighbouring indices: (first, length)
ShardRuns = tuple[Runs, ...]  # global indices of a shard, per dim


@dataclass(frozen=True, slots=True)
class FileView:
    """A strided view of a file tensor: its shape, the view's first indices, and the view's dims."""

    file_shape: tuple[int, ...]
    starts: tuple[int, ...]  # the view's first index in each dim of the file tensor
    dims: tuple[ViewDim, ...]  # of the view

    def apply(self, file_tensor: Tensor) -> Tensor:
        """Return this view of a contiguous file tensor; both share memory."""
        offset = sum(a * s for a, s in zip(self.starts, file_tensor.stride(), strict=True))
        offset += int(file_tensor.storage_offset())
        strides = [step * file_tensor.stride(d) for d, _, step in self.dims]
        return file_tensor.as_strided([n for _, n, _ in self.dims], strides, offset)


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A region of a model tensor, and the Hugging Face tensor that stores the region."""

    name: str  # of the Hugging Face tensor
    region: Region  # of the model tensor; () = all elements
    shape: tuple[int, ...]  # of the region in the file
    view: FileView | None = None  # of the file tensor; None = all elements in their order

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the file."""
        return self.shape if self.view is None else self.view.file_shape

    def locate(self, file_tensor: Tensor) -> Tensor:
        """Return the view of a contiguous file tensor that stores the region."""
        return file_tensor if self.view is None else self.view.apply(file_tensor)

    def get_box(self, model_shape: Sequence[int]) -> tuple[slice, ...]:
        """Return the region as one slice per dim of the model tensor with this `model_shape`."""
        region = (slice(r, r + 1) if isinstance(r, int) else r for r in self.region)
        return (*region, *(slice(0, n) for n in model_shape[len(self.region) :]))


@dataclass(frozen=True, slots=True)
class FileRecipe:
    """How files store a model tensor of shape `shape`: disjoint `TensorPiece`s of file tensors."""

    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]

    @classmethod
    def from_tensor(cls, name: str, shape: tuple[int, ...]) -> FileRecipe:
        """Return the recipe of a tensor that files store unchanged under `name`."""
        return cls(shape, (TensorPiece(name, (), shape),))


def map_file_shapes(recipes: Mapping[str, FileRecipe]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all file tensors of the recipes, by name."""
    return {p.name: p.file_shape for recipe in recipes.values() for p in recipe.pieces}


@dataclass(frozen=True, slots=True)
class PieceOverlap:
    """The elements that both a `TensorPiece` and a rank's shard have, as slices of each."""

    source: tuple[slice, ...]  # of the piece
    target: tuple[slice, ...]  # of the shard


def get_detached_shard(tensor: Tensor) -> Tensor:
    """Return this rank's local tensor of a parameter, detached, without a copy."""
    return get_local_tensor(tensor).detach()


def iterate_shard_boxes(
    tensors: Mapping[str, Tensor],
    recipes: Mapping[str, FileRecipe],
    dtypes: Mapping[str, torch.dtype],
    max_bytes: int,
) -> Iterator[tuple[TensorPiece, Tensor, PieceOverlap]]:
    """Yield the boxes of file tensors, each at most `max_bytes` or one row, that fill shards."""
    for name, recipe in recipes.items():
        local = get_detached_shard(tensors[name])
        shard_runs = find_shard_runs(compute_global_indices(tensors[name]))
        for piece in recipe.pieces if local.numel() else ():
            max_numel = max_bytes // dtypes[piece.name].itemsize
            for overlap in find_overlaps(shard_runs, piece, recipe.shape, max_numel=max_numel):
                yield piece, tensors[name], overlap


def find_shard_runs(indices: Sequence[Tensor]) -> ShardRuns:
    """Convert each dim's global indices of a shard to (first index, length) of consecutive runs."""
    return tuple(tuple(find_consecutive_runs(index)) for index in indices)


def find_overlaps(
    shard_runs: ShardRuns, piece: TensorPiece, shape: Sequence[int], *, max_numel: int = 1 << 62
) -> Iterator[PieceOverlap]:
    """Yield the disjoint boxes in which a rank's shard and a piece of a model tensor overlap.

    `shard_runs` is from `find_shard_runs`, and `shape` is the shape of the unsharded tensor. A box
    has at most `max_numel` elements, or one index of dim 0.
    """
    # Example: [E=4, 2, F=4, D=1] sharded over F, this rank has columns 2 and 3 (runs per dim: (0,
    # 4), (0, 2), (2, 2), (0, 1)); the piece "fused" is [4, 8, 1]. The boxes are [0:4, 2:4, 0:1] ->
    # [0:4, 0:1, 0:2, 0:1] and [0:4, 6:8, 0:1] -> [0:4, 1:2, 0:2, 0:1].
    per_dim: list[list[tuple[int, int, int]]] = []  # runs of (in the region, in the shard, length)
    sizes: list[int] = []
    for local_runs, part in zip(shard_runs, piece.get_box(shape), strict=True):
        common = list(_find_common_runs(local_runs, part))
        if not common:
            return
        per_dim.append(common)
        sizes.append(part.stop - part.start)
    groups = _group_region_dims(sizes, piece.shape)
    for d in {d for group in groups for d in group[:-1]}:
        per_dim[d] = [(a + i, b + i, 1) for a, b, n in per_dim[d] for i in range(n)]
    row = math.prod(sum(n for *_, n in runs) for runs in per_dim[1:])
    if per_dim and (not groups or groups[0][-1] == 0):
        size = max(1, max_numel // max(row, 1))
        per_dim[0] = [
            (a + i, b + i, min(size, n - i)) for a, b, n in per_dim[0] for i in range(0, n, size)
        ]
    for runs in itertools.product(*per_dim):
        source = []
        for group in groups:
            start = 0  # in the dim of the piece to which the file flattens the region dims `group`
            for d in group:
                start = start * sizes[d] + runs[d][0]
            source.append(slice(start, start + runs[group[-1]][2]))
        yield PieceOverlap(tuple(source), tuple(slice(b, b + n) for _, b, n in runs))


def _group_region_dims(region_shape: list[int], piece_shape: Sequence[int]) -> list[list[int]]:
    """Return the region's dims that each dim of a piece flattens: [2, 3], [6] -> [[0, 1]]."""
    groups: list[list[int]] = []
    d = 0
    for size in piece_shape:
        while d < len(region_shape) and region_shape[d] == 1 != size:
            d += 1
        group, product = [d], region_shape[d]
        while product < size:
            d += 1
            group.append(d)
            product *= region_shape[d]
        assert product == size, "a piece has the elements of its region"
        groups.append(group)
        d += 1
    return groups


def _find_common_runs(runs: Runs, piece_range: slice) -> Iterator[tuple[int, int, int]]:
    """Yield (start in `piece_range`, start in the shard, length) of each overlap of both."""
    at = 0
    for first, length in runs:
        start, stop = max(first, piece_range.start), min(first + length, piece_range.stop)
        if start < stop:
            yield start - piece_range.start, at + start - first, stop - start
        at += length


def select_shard(tensor: Tensor, indices: list[Tensor]) -> Tensor:
    """Return the elements of an unsharded tensor at a shard's global `indices` (1-D, per dim)."""
    for dim, index in enumerate(indices):
        if index.numel() != tensor.shape[dim]:
            tensor = tensor.index_select(dim, index.to(tensor.device))
    return tensor


def unshard_tensor(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor of a DTensor (collective), or a plain tensor unchanged."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
