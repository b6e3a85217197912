"""Storage of torch.distributed.checkpoint (DCP): shard files and a manifest, without pickles.

DCP's default planners decide which rank writes which block (replicas once) and which blocks a rank
reads (resharding). The planners here add support for several blocks per rank.
"""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from moecore.base.params import compute_global_indices, find_runs
from moecore.base.torch_private import get_local_tensor
from moecore.io.checkpoint.directory import publish
from moecore.io.checkpoint.manifest import (
    Manifest,
    ManifestChunk,
    ManifestFacts,
    StoredFile,
    StoredTensor,
    make_manifest,
)
from moecore.io.checkpoint.shard_file import (
    CHUNK_BYTES,
    Meter,
    ShardReader,
    ShardWriter,
    compute_layout,
)

Plan = TypeVar("Plan")


class _DCPStorage:
    """Methods without an effect, which DCP requires of a storage writer and a storage reader."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def prepare_local_plan(self, plan: Plan) -> Plan:
        return plan

    def prepare_global_plan(self, plans: list[Plan]) -> list[Plan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # a path is never enough to choose it


class Writer(_DCPStorage, StorageWriter):
    """DCP storage writer: ranks write shard files into `draft`, rank 0 makes it a checkpoint.

    Args:
        draft: temporary directory of the save.
        rank: of this process, for the name of its file.
        facts: metadata for the manifest.
        keep: number of the newest checkpoints that stay; 0 = all.
        meter: counts the written bytes.
    """

    def __init__(
        self, draft: Path, rank: int, facts: ManifestFacts, *, keep: int, meter: Meter
    ) -> None:
        self._draft, self._facts, self._keep = draft, facts, keep
        self._file, self._meter = f"rank-{rank:05d}.safetensors", meter

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: DCP requires this method, and the draft directory already exists."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's planned blocks (slices of tensors) into its shard file.

        The returned future is complete; its result has the position of each block, for `finish`.
        """
        items = _assign_keys(plan.items)
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._write_shard_file(items, planner) if items else [])
        return future

    def _write_shard_file(
        self, items: dict[str, WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        """Write key -> block into one safetensors file; return a DCP WriteResult for each block."""
        blocks, chunks = {}, {}
        for key, item in items.items():
            data = item.tensor_data
            assert data is not None, "everything saved is a tensor"
            offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
            blocks[key] = data.properties.dtype, sizes
            chunks[key] = ManifestChunk(file=self._file, key=key, offsets=offsets, sizes=sizes)
        layout = compute_layout(blocks)
        tensors = {key: planner.resolve_data(items[key]) for key in layout.begins}
        pinned = any(isinstance(t, Tensor) and t.is_cuda for t in tensors.values())
        self._meter.expect(layout.size)
        path = self._draft / self._file
        with ShardWriter(path, layout.header, pinned=pinned, meter=self._meter) as file:
            for key, tensor in tensors.items():
                assert isinstance(tensor, Tensor)
                assert (tensor.dtype, tuple(tensor.shape)) == blocks[key], f"{key} has changed"
                file.add(tensor)
            stored_file = file.finish()
        return [
            WriteResult(item.index, size_in_bytes=0, storage_data=(chunks[key], stored_file))
            for key, item in items.items()
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest from the results of all ranks, and publish. DCP calls it on rank 0.

        `metadata` has shape and dtype of all tensors, `results` each rank's list of `write_data`.
        """
        chunks: dict[str, list[ManifestChunk]] = {}
        files: dict[str, StoredFile] = {}
        for result in itertools.chain.from_iterable(results):
            chunk, file = result.storage_data
            files[chunk.file] = file
            chunks.setdefault(result.index.fqn, []).append(chunk)
        tensors = {
            name: StoredTensor(
                shape=tuple(entry.size),
                dtype=entry.properties.dtype,
                chunks=tuple(chunks.get(name, ())),
            )
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        publish(self._draft, make_manifest(self._facts, files, tensors), keep=self._keep)


def _assign_keys(items: list[WriteItem]) -> dict[str, WriteItem]:
    """Return safetensors key -> write item; the blocks of tensor "a" have keys "a", "a#1", ...."""
    blocks: dict[str, WriteItem] = {}
    for item in items:
        assert item.tensor_data is not None, "everything saved is a tensor"
        if item.tensor_data.chunk.sizes.numel() == 0:
            continue
        key, count = item.index.fqn, 1
        while key in blocks:
            key, count = f"{item.index.fqn}#{count}", count + 1
        blocks[key] = item
    return blocks


Blocks = dict[torch.Size, tuple[slice, ...]]  # offset in the tensor -> place in a rank's part


def _find_blocks(tensor: Any) -> Blocks:
    """Return global offset -> slices of the local tensor, per contiguous block of a DTensor shard.

    The result is {} for a shard that is one block, and for a tensor that is not a DTensor.
    """
    # Gate and up in one dim: DCP takes the part for one block. Example: [8] over tp=2, placed
    # _StridedShard(0, split_factor=2): rank 1 has rows 2 3 6 7, {2: [0:2], 6: [2:4]}.
    if not isinstance(tensor, DTensor):
        return {}
    dims = []
    for index in compute_global_indices(tensor):
        runs = list(find_runs(index))
        ends = itertools.accumulate(length for _, length in runs)
        dims.append([(at, slice(end - n, end)) for (at, n), end in zip(runs, ends, strict=True)])
    if math.prod(map(len, dims)) < 2:
        return {}
    return {
        torch.Size(at for at, _ in block): tuple(place for _, place in block)
        for block in itertools.product(*dims)
    }


def _make_chunk_metadata(offset: torch.Size, place: tuple[slice, ...]) -> ChunkStorageMetadata:
    """Return DCP's metadata (global offset, sizes) of a block; `place` slices the local tensor."""
    return ChunkStorageMetadata(offset, torch.Size(part.stop - part.start for part in place))


class LocalSavePlanner(dcp.DefaultSavePlanner):
    """DCP save planner for shards with several blocks; it writes the tensors in `local_tensors`.

    `local_tensors` maps names to local tensors, such as the host copies of a background save.
    """

    def __init__(self, local_tensors: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._locals = local_tensors
        self._blocks: dict[str, Blocks] = {}

    def create_local_plan(self) -> SavePlan:
        """Return the blocks that this rank may write; a strided shard has several blocks."""
        plan = super().create_local_plan()
        self._blocks = {name: _find_blocks(tensor) for name, tensor in self.state_dict.items()}
        items = [block for item in plan.items for block in self._split_item(item)]
        self.plan: SavePlan = replace(plan, items=items)
        return self.plan

    def _split_item(self, item: WriteItem) -> Iterator[WriteItem]:
        """Yield one DCP write item per block of a shard; the item itself if it is one block."""
        blocks, data = self._blocks[item.index.fqn], item.tensor_data
        if not blocks or data is None:
            yield item
            return
        for offsets, place in blocks.items():
            index = MetadataIndex(item.index.fqn, offsets)
            data = replace(data, chunk=_make_chunk_metadata(offsets, place))
            yield replace(item, index=index, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the view of this rank's local tensor that the block `index` consists of."""
        local, blocks = self._locals[index.fqn], self._blocks[index.fqn]
        return local[blocks[_get_offset(index)]] if blocks else local


class BlockLoadPlanner(dcp.DefaultLoadPlanner):
    """DCP load planner for shards with several blocks of one tensor (_StridedShard)."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._blocks: dict[str, Blocks] = {}

    def create_local_plan(self) -> LoadPlan:
        """Return the reads that fill this rank's shards; a strided shard needs several reads."""
        plan = super().create_local_plan()
        all_blocks = {name: _find_blocks(tensor) for name, tensor in self.state_dict.items()}
        self._blocks = {name: blocks for name, blocks in all_blocks.items() if blocks}
        items = [item for item in plan.items if item.dest_index.fqn not in self._blocks]
        for name, blocks in self._blocks.items():
            assert self.metadata is not None, "what `super` has read"
            chunks = [_make_chunk_metadata(at, place) for at, place in blocks.items()]
            entry: Any = self.metadata.state_dict_metadata[name]
            items += create_read_items_for_chunk_list(name, entry, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the view of this rank's local tensor into which DCP reads the block `index`."""
        if index.fqn not in self._blocks:
            return super().lookup_tensor(index)
        place = self._blocks[index.fqn][_get_offset(index)]
        return get_local_tensor(self.state_dict[index.fqn])[place]


def _get_offset(index: MetadataIndex) -> torch.Size:
    """Return the global offset of a block, which every index of a block has."""
    assert index.offset is not None, "blocks have one"
    return index.offset


class Reader(_DCPStorage, StorageReader):
    """DCP storage reader: reads slices of the shard files in the checkpoint directory `path`.

    `manifest` is the directory's. `meter` counts the bytes of the requested slices.
    """

    def __init__(self, path: Path, manifest: Manifest, meter: Meter) -> None:
        self._path, self._manifest, self._meter = path, manifest, meter
        self._chunks = {
            MetadataIndex(name, chunk.offsets): (chunk, tensor.dtype)
            for name, tensor in manifest.tensors.items()
            for chunk in tensor.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Convert shapes, dtypes and chunks of the manifest's tensors to DCP's Metadata."""
        entries: dict[str, Any] = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=tensor.dtype),
                size=torch.Size(tensor.shape),
                chunks=[
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                    for chunk in tensor.chunks
                ],
            )
            for name, tensor in self._manifest.tensors.items()
        }
        return Metadata(entries)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: DCP requires this method, and the manifest is already read."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the planned slices directly into the tensors to load; return a completed future."""
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            chunk, dtype = self._chunks[item.storage_index]
            by_file.setdefault(chunk.file, []).append((item, chunk, dtype))
            self._meter.expect(math.prod(item.lengths) * dtype.itemsize)
        buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu")
        for file, requests in by_file.items():
            layout = compute_layout(self._manifest.list_file_entries(file))
            with ShardReader(self._path / file, layout, buffer, self._meter) as shard:
                # In file order: one pass forward over the disk.
                for item, chunk, dtype in sorted(requests, key=lambda r: layout.begins[r[1].key]):
                    target = planner.resolve_tensor(item).detach()
                    shard.read(chunk.key, dtype, chunk.sizes, item.storage_offsets, target)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def run_dcp_call(verb: str, path: Path, action: Callable[[], object]) -> None:
    """Run a DCP call; raise OSError ("could not `verb` `path`") if a rank or collective failed."""
    try:
        if not dist.is_initialized():
            # A plain model in one process is what the caller has, not an oversight. No
            # catch_warnings: it changes what belongs to all threads, and this may be a second one.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        with torch.device("cpu"):  # torch's DTensor creates index tensors on the default device
            action()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise OSError(f"path ({path}): rank {rank} could not {verb} it: {cause!r}") from error
    except RuntimeError as error:  # a rank's own errors come as the above, so a collective failed
        if not dist.is_initialized():
            raise
        reason = str(error).partition("\n")[0]
        raise OSError(
            f"path ({path}): ranks could not {verb} it together, one may have ended: {reason}"
        ) from error
