"""The tensors of a DCP directory, parsed from its `.metadata` without running code.

`.metadata` is a pickle. The unpickler of this file imports no modules: it replaces the classes that
DCP and Megatron-Core write by `_MetadataRecord`, and builds only `torch.Size` and dtypes. Error
texts are truncated, because a few bytes of a pickle can expand to unlimited nesting.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
import reprlib
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickletools import genops
from typing import Any, BinaryIO

import torch

from moecore.io.checkpoint.files import (
    MAX_TABLE,
    check_file_size,
    open_regular_file,
    read_regular_file,
)
from moecore.io.checkpoint.manifest import DTYPE_NAMES

METADATA = ".metadata"
MAX_OPTIONS, MAX_OPTIONS_FILE = 16 << 20, 1 << 30
RECORDS = frozenset(
    {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_StorageInfo"),
        *("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"),
        *("MCoreMetadata", "MCoreSavePlan", "PosixPath", "PurePosixPath"),
    }
)
HOMES = ("torch.distributed.", "megatron.core.", "pathlib")
# Opcodes of a pickle. The elements of a list follow its opcode.
GETS = ("GET", "BINGET", "LONG_BINGET")  # push an earlier object again
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_LIST": "a list"}
Block = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


@dataclass(frozen=True, slots=True)
class DCPChunk:
    """A block of a tensor, and the byte range of a file in which `torch.save` wrote it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class DCPTensor:
    """Shape, dtype and chunks of a stored tensor; the chunks cover each element once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[DCPChunk, ...]


class _MetadataRecord:
    """A stand-in for an unpickled object of any class: constructor arguments and state."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """Return an attribute of the unpickled state; None if it is missing."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Unpickler(pickle.Unpickler):
    """Unpickler that builds only records, sizes and dtypes; any other name raises."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class that stands for a name in the pickle, or raise UnpicklingError."""
        if name in RECORDS and module.startswith(HOMES):
            return type(name, (_MetadataRecord,), {})
        if module == "torch":
            value = vars(torch).get(name)  # getattr would import torch.onnx and its like
            if value is torch.Size or isinstance(value, torch.dtype | torch.layout):
                return value
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _MetadataRecord
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"{module}.{name} is no class of a DCP directory")


def read_metadata(path: Path) -> dict[str, DCPTensor]:
    """Parse `.metadata` of a DCP directory; return its tensors by name, or raise ValueError."""
    try:
        raw = read_regular_file(path / METADATA, follow_symlinks=True, max_bytes=MAX_TABLE)
    except FileNotFoundError:
        raise ValueError(f"path ({path / METADATA}) must exist: it is not there") from None
    try:
        for opcode, number, _ in genops(raw):
            if opcode.name.endswith("PUT") and isinstance(number, int) and number >= len(raw):
                raise _MetadataError(f"its memo has {number} entries, more than it has bytes")
        return _parse_tensors(path, _Unpickler(io.BytesIO(raw)).load())
    except Exception as error:  # of any kind, because the bytes may be damaged
        message = str(error) or type(error).__name__
    message = " ".join(message.split())  # names may have line breaks
    raise ValueError(
        f"path ({path / METADATA}) must be that of a whole DCP directory: {message[:300]}: copy "
        "it again"
    )


def read_options(path: Path, names: Collection[str]) -> dict[str, Any]:
    """Return {name: plain value} for the names in a `torch.save` file, without running code."""
    try:
        descriptor = open_regular_file(path, follow_symlinks=True)
    except OSError:
        return {}
    with open(descriptor, "rb") as stream:
        check_file_size(path, os.fstat(descriptor).st_size, MAX_OPTIONS_FILE)
        raw = _read_pickles(path, stream)
    codes = list[tuple[str, Any]]()
    try:
        for part in raw:
            memo = dict[Any, tuple[str, Any]]()
            for code, value, _ in genops(part):
                if code.name.endswith(("PUT", "MEMOIZE")):
                    memo[len(memo) if value is None else value] = codes[-1]
                else:
                    codes.append(memo[value] if code.name in GETS else (code.name, value))
    except (ValueError, LookupError):
        return {}
    return {
        str(name): CONSTANTS.get(code, value)
        for (_, name), (code, value) in itertools.pairwise(codes)
        if isinstance(name, str) and name in names
    }


def _read_pickles(path: Path, stream: BinaryIO) -> list[bytes]:
    """Return the bytes of each pickle in a `torch.save` file; [] for another format."""
    try:
        with zipfile.ZipFile(stream) as file:
            pickles = [info for info in file.infolist() if info.filename.endswith("/data.pkl")]
            size = sum(info.file_size for info in pickles)  # unpacked; zipfile reads no more
            if size <= MAX_OPTIONS:
                return [file.read(info) for info in pickles]
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return []
    check_file_size(path / "data.pkl", size, MAX_OPTIONS)
    return []


class _MetadataError(Exception):
    """Raised for invalid metadata; the text is the reason."""


def _parse_tensors(path: Path, metadata: Any) -> dict[str, DCPTensor]:
    """Convert unpickled metadata to tensors by name; raise `_MetadataError` if it is invalid."""
    entries = _require_attribute(metadata, "state_dict_metadata", dict)
    places: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, info in _require_attribute(metadata, "storage_data", dict).items():
        name, offset = index.get("fqn"), index.get("offset")
        key = name, () if offset is None else tuple(offset)
        if key in places:
            raise _MetadataError(f"{name} is stored twice at {key[1]}")
        places[key] = info
    tensors = {}
    for name, entry in entries.items():
        if type(entry).__name__ == "TensorStorageMetadata":
            tensors[name] = _parse_tensor(path, name, entry, places)
    return tensors


def _parse_tensor(path: Path, name: str, entry: Any, storage_records: dict[Any, Any]) -> DCPTensor:
    """Convert a tensor's metadata `entry`; raise `_MetadataError` if it is invalid."""
    shape = _require_counts(name, entry.get("size"))
    dtype = _require_attribute(entry, "properties", _MetadataRecord).state[0]
    if not isinstance(name, str) or dtype not in DTYPE_NAMES:
        raise _MetadataError(f"{reprlib.repr(name)} has the dtype {reprlib.repr(dtype)}")
    chunks = []
    for chunk in _require_attribute(entry, "chunks", list):
        offsets, sizes = (_require_counts(name, chunk.get(n)) for n in ("offsets", "sizes"))
        ends = [o + n for o, n in zip(offsets, sizes, strict=True)]
        if len(offsets) != len(shape) or any(a > b for a, b in zip(ends, shape, strict=True)):
            raise _MetadataError(f"{name} {shape} has a chunk {sizes} at {offsets}")
        if math.prod(sizes):
            info = storage_records.get((name, offsets))
            if not isinstance(info, _MetadataRecord):
                raise _MetadataError(f"the chunk of {name} at {offsets} is in no file")
            chunks.append(DCPChunk(offsets, sizes, *_locate_chunk(path, name, info)))
    blocks = [(chunk.offsets, chunk.sizes) for chunk in chunks]
    count = sum(math.prod(sizes) for _, sizes in blocks)
    if count != math.prod(shape) or (count and not _is_partition(blocks, shape)):
        raise _MetadataError(f"{name} {shape} has chunks that are not all of it, each element once")
    return DCPTensor(shape, dtype, tuple(chunks))


def _is_partition(blocks: Sequence[Block], shape: tuple[int, ...], dim: int = 0) -> bool:
    """Whether blocks (offsets, sizes) cover each element of `shape` once, from dim `dim` on."""
    # Example: [0:2, 0:1], [0:1, 1:3] and [1:2, 1:3] in (2, 3): dim 0 has the slabs 0:1 and 1:2, and
    # the first block is in both; in each slab dim 1 has the edges 0, 1 and 3 and one block between.
    if dim == len(shape):
        return len(blocks) == 1
    spans = [(offsets[dim], offsets[dim] + sizes[dim]) for offsets, sizes in blocks]
    edges = sorted({0, shape[dim], *itertools.chain(*spans)})
    number = {edge: i for i, edge in enumerate(edges)}
    slabs: list[list[Block]] = [[] for _ in edges[1:]]
    for block, (start, stop) in zip(blocks, spans, strict=True):
        for slab in slabs[number[start] : number[stop]]:
            slab.append(block)
    return all(_is_partition(slab, shape, dim + 1) for slab in slabs)


def _locate_chunk(path: Path, name: str, storage_record: _MetadataRecord) -> tuple[str, int, int]:
    """Return a chunk's (file name, first byte, bytes); `_MetadataError` if invalid or missing."""
    file, start, length = (storage_record.get(n) for n in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or Path(file).name != file:
        raise _MetadataError(
            f"{name} is in {reprlib.repr(file)}, which is no file of the directory"
        )
    if not (path / file).is_file():
        raise _MetadataError(f"{file} is missing")
    start, length = _require_counts(name, (start, length))
    if start + length > (path / file).stat().st_size:
        raise _MetadataError(f"{file} ends before {name}")
    if storage_record.get("transform_descriptors"):
        descriptors = reprlib.repr(storage_record.get("transform_descriptors"))
        raise _MetadataError(f"{name} is compressed ({descriptors})")
    return file, start, length


def _require_attribute(record: Any, name: str, expected_type: type) -> Any:
    """Return a record's attribute, or raise `_MetadataError` if its type is not `expected_type`."""
    value = record.get(name) if isinstance(record, _MetadataRecord) else None
    if not isinstance(value, expected_type):
        raise _MetadataError(f"{name} ({type(value).__name__}) must be a {expected_type.__name__}")
    return value


def _require_counts(name: str, values: Any) -> tuple[int, ...]:
    """Return a tensor's sizes or offsets `values`; `_MetadataError` unless integers >= 0."""
    if not isinstance(values, tuple) or not all(type(n) is int and n >= 0 for n in values):
        raise _MetadataError(f"{name} has the sizes {reprlib.repr(values)}")
    return tuple(values)
