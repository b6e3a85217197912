"""Storage of torch.distributed.checkpoint (DCP): shard files and a manifest, without pickles.

DCP's default planners decide which rank writes a block and which blocks a rank reads. The planners
in this file add support for shards that consist of several blocks of a tensor.
"""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
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

from moecore.base.params import compute_global_indices, find_consecutive_runs
from moecore.base.torch_private import get_local_tensor
from moecore.io.checkpoint.drafts import Draft, publish
from moecore.io.checkpoint.manifest import (
    Manifest,
    ManifestChunk,
    ManifestFacts,
    StoredFile,
    StoredTensor,
    make_manifest,
)
from moecore.io.checkpoint.object_storage import AnyPath, RemotePath
from moecore.io.checkpoint.shard_file import (
    CHUNK_BYTES,
    Meter,
    ShardReader,
    ShardWriter,
    compute_layout,
)

Plan = TypeVar("Plan")
_REMOTE_READERS = 8  # concurrent range requests of a rank, because each takes many milliseconds


class _DCPStorage:
    """Methods that DCP requires of a storage writer or reader, and that have no effect here."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def set_up_storage_reader(
        self, metadata: Any, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Do nothing."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: Plan) -> Plan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[Plan]) -> list[Plan]:
        """Return the plans unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False, so that DCP does not select this storage by a path."""
        return False


class Writer(_DCPStorage, StorageWriter):
    """DCP storage writer: each rank writes one shard file of `draft`; rank 0 publishes the draft.

    `facts` is the manifest's metadata. After publication, only the newest `keep` checkpoints remain
    (0 = all). `meter` counts the written bytes.
    """

    def __init__(
        self, draft: Draft, rank: int, facts: ManifestFacts, *, keep: int, meter: Meter
    ) -> None:
        self._draft, self._facts, self._keep = draft, facts, keep
        self._path, self._meter = draft.make_file_path(rank), meter

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's planned blocks into its shard file; return a completed future."""
        items = _assign_keys(plan.items)
        future: Future[list[WriteResult]] = Future()
        if not items:
            future.set_result([])
            return future
        blocks, chunks = {}, {}
        for key, item in items.items():
            data = item.tensor_data
            assert data is not None, "everything saved is a tensor"
            offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
            blocks[key] = data.properties.dtype, sizes
            chunks[key] = ManifestChunk(file=self._path.name, key=key, offsets=offsets, sizes=sizes)
        layout = compute_layout(blocks)
        tensors = {key: planner.resolve_data(items[key]) for key in layout.begins}
        pinned = any(isinstance(t, Tensor) and t.is_cuda for t in tensors.values())
        self._meter.expect(layout.size)
        with ShardWriter(self._path, layout.header, pinned=pinned, meter=self._meter) as file:
            for key, tensor in tensors.items():
                assert isinstance(tensor, Tensor)
                assert (tensor.dtype, tuple(tensor.shape)) == blocks[key], f"{key} has changed"
                file.add(tensor)
            stored_file = file.finish()
        results = [
            WriteResult(item.index, size_in_bytes=0, storage_data=(chunks[key], stored_file))
            for key, item in items.items()
        ]
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: write the manifest from all ranks' `write_data` results, and publish."""
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
    """Return key -> write item of each block; the blocks of tensor "a" are "a", "a#1", ..."""
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


Blocks = dict[Any, tuple[slice, ...]]  # global offset -> slices of the local tensor


def _find_blocks(tensor: Any) -> Blocks:
    """Return global offset -> slices of each block of a shard; {} for at most one block."""
    # DCP supports only one block per shard. Example: [8] over tp=2 with _StridedShard(0,
    # split_factor=2): rank 1 has rows 2 3 6 7, which are the blocks {2: [0:2], 6: [2:4]}.
    if not isinstance(tensor, DTensor):
        return {}
    dims = []
    for index in compute_global_indices(tensor):
        runs = list(find_consecutive_runs(index))
        ends = itertools.accumulate(length for _, length in runs)
        dims.append([(at, slice(end - n, end)) for (at, n), end in zip(runs, ends, strict=True)])
    if math.prod(map(len, dims)) < 2:
        return {}
    return {
        torch.Size(at for at, _ in block): tuple(place for _, place in block)
        for block in itertools.product(*dims)
    }


def _make_chunk_metadata(offset: torch.Size, slices: tuple[slice, ...]) -> ChunkStorageMetadata:
    """Return DCP's metadata of the block at a global offset and `slices` of the shard."""
    return ChunkStorageMetadata(offset, torch.Size(part.stop - part.start for part in slices))


class LocalSavePlanner(dcp.DefaultSavePlanner):
    """DCP save planner for shards of several blocks of a tensor; `local_tensors` has the values."""

    def __init__(self, local_tensors: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._locals = local_tensors
        self._blocks: dict[str, Blocks] = {}

    def create_local_plan(self) -> SavePlan:
        """Return the plan of the blocks that this rank may write."""
        plan = super().create_local_plan()
        self._blocks = {name: _find_blocks(tensor) for name, tensor in self.state_dict.items()}
        items = []
        for item in plan.items:
            blocks, data = self._blocks[item.index.fqn], item.tensor_data
            if not blocks or data is None:
                items.append(item)
                continue
            for offsets, place in blocks.items():
                index = MetadataIndex(item.index.fqn, offsets)
                data = replace(data, chunk=_make_chunk_metadata(offsets, place))
                items.append(replace(item, index=index, tensor_data=data))
        self.plan: SavePlan = replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the block `index` as a view of this rank's local tensor."""
        local, blocks = self._locals[index.fqn], self._blocks[index.fqn]
        return local[blocks[index.offset]] if blocks else local


class BlockLoadPlanner(dcp.DefaultLoadPlanner):
    """DCP load planner for shards that consist of several blocks of a tensor (_StridedShard)."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._blocks: dict[str, Blocks] = {}

    def create_local_plan(self) -> LoadPlan:
        """Return the plan of the reads that fill this rank's shards."""
        plan = super().create_local_plan()
        all_blocks = {name: _find_blocks(tensor) for name, tensor in self.state_dict.items()}
        self._blocks = {name: blocks for name, blocks in all_blocks.items() if blocks}
        items = [item for item in plan.items if item.dest_index.fqn not in self._blocks]
        for name, blocks in self._blocks.items():
            assert self.metadata is not None, "`super` has read it"
            chunks = [_make_chunk_metadata(at, place) for at, place in blocks.items()]
            entry: Any = self.metadata.state_dict_metadata[name]
            items += create_read_items_for_chunk_list(name, entry, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the view of this rank's local tensor into which DCP reads the block `index`."""
        if index.fqn not in self._blocks:
            return super().lookup_tensor(index)
        return get_local_tensor(self.state_dict[index.fqn])[self._blocks[index.fqn][index.offset]]


class Reader(_DCPStorage, StorageReader):
    """DCP storage reader of the checkpoint `path`; `meter` counts the read bytes."""

    def __init__(self, path: AnyPath, manifest: Manifest, meter: Meter) -> None:
        self._path, self._manifest, self._meter = path, manifest, meter
        self._chunks = {
            MetadataIndex(name, chunk.offsets): (chunk, tensor.dtype)
            for name, tensor in manifest.tensors.items()
            for chunk in tensor.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Convert the manifest's tensors to DCP's metadata."""
        return make_dcp_metadata(self._manifest.tensors)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the planned slices into the tensors to load; return a completed future."""
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            chunk, dtype = self._chunks[item.storage_index]
            by_file.setdefault(chunk.file, []).append((item, chunk, dtype))
            self._meter.expect(math.prod(item.lengths) * dtype.itemsize)
        for file, requests in by_file.items():
            begins = compute_layout(self._manifest.list_file_entries(file)).begins
            # In file order: one pass forward over the disk.
            requests.sort(key=lambda request: begins[request[1].key])
            reads = [(r, planner.resolve_tensor(r[0]).detach()) for r in requests]
            if isinstance(self._path, RemotePath):
                with ThreadPoolExecutor(_REMOTE_READERS) as pool:
                    parts = [reads[first::_REMOTE_READERS] for first in range(_REMOTE_READERS)]
                    list(pool.map(partial(self._read_slices, file, begins), parts))
            else:
                self._read_slices(file, begins, reads)
            for (item, *_), target in reads:
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_slices(
        self, file: str, begins: Mapping[str, int], reads: list[tuple[Any, Tensor]]
    ) -> None:
        """Read slices into targets; `reads` has ((DCP's read item, chunk, dtype), target)."""
        buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu")
        with ShardReader(self._path / file, begins, buffer, self._meter) as shard:
            for (item, chunk, dtype), target in reads:
                shard.read(chunk.key, dtype, chunk.sizes, item.storage_offsets, target)


def make_dcp_metadata(tensors: Mapping[str, Any]) -> Metadata:
    """Return DCP's metadata of records with shape, dtype, and chunks with offsets and sizes."""
    entries: dict[str, Any] = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=tensor.dtype),
            size=torch.Size(tensor.shape),
            chunks=[
                ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                for chunk in tensor.chunks
            ],
        )
        for name, tensor in tensors.items()
    }
    return Metadata(entries)


def run_dcp_call(verb: str, path: AnyPath, action: Callable[[], object]) -> None:
    """Run a DCP call; raise OSError ("could not `verb` `path`") if any rank or collective fails."""
    try:
        if not dist.is_initialized():
            # No catch_warnings: it changes the filters of all threads, and this may be a second.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        with torch.device("cpu"):  # torch's DTensor creates index tensors on the default device
            action()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise OSError(f"path ({path}): rank {rank} could not {verb} it: {cause!r}") from error
    except RuntimeError as error:  # a collective failed: errors of actions are CheckpointException
        if not dist.is_initialized():
            raise
        reason = str(error).partition("\n")[0]
        raise OSError(
            f"path ({path}): ranks could not {verb} it together, one may have ended: {reason}"
        ) from error
