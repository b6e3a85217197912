"""What a DCP directory holds, read out of its `.metadata` without running any of it.

`.metadata` is a pickle. Here it is read by an unpickler that imports nothing: the few classes that
DCP and Megatron-Core write become inert records, `torch.Size` and dtypes become themselves, and any
other name is an error. What comes out is checked field by field before it is used.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moecore.checkpoint.files import read_regular
from moecore.checkpoint.manifest import DTYPE_NAMES

METADATA = ".metadata"
RECORDS = frozenset(
    {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_StorageInfo"),
        *("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"),
        *("MCoreMetadata", "MCoreSavePlan", "PosixPath", "PurePosixPath"),
    }
)
HOMES = ("torch.distributed.", "megatron.core.", "pathlib")


@dataclass(frozen=True, slots=True)
class DCPChunk:
    """A block of a tensor and where its bytes are.

    Attributes:
        offsets: in the tensor.
        sizes: of the block.
        file: name in the directory.
        start: of the bytes in the file; they are what `torch.save` writes for the block.
        length: of the bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class DCPTensor:
    """A tensor of the directory; its chunks are all of it, each element once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[DCPChunk, ...]


class _Record:
    """Stands for an object of a class that is not imported; keeps what would have filled it."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """Return an attribute that was stored, or None."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Unpickler(pickle.Unpickler):
    """Builds records, sizes and dtypes; any other name raises."""

    def find_class(self, module: str, name: str) -> Any:
        if name in RECORDS and module.startswith(HOMES):
            return type(name, (_Record,), {})
        if module == "torch":
            found = getattr(torch, name, None)
            if found is torch.Size or isinstance(found, torch.dtype | torch.layout):
                return found
        if (module, name) == ("torch.serialization", "_get_layout"):
            return str
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"{module}.{name} is no class of a DCP directory")


def read_metadata(path: Path) -> dict[str, DCPTensor]:
    """Return the tensors of a DCP directory by name; other objects in it are left out.

    Raises:
        ValueError: when `.metadata` is missing or is not that of a whole directory.
    """
    try:
        raw = read_regular(path / METADATA, follow=True)
    except FileNotFoundError:
        raise ValueError(f"path ({path / METADATA}) must exist: it is not there") from None
    try:
        metadata = _Unpickler(io.BytesIO(raw)).load()
        return _tensors(path, metadata)
    except _WrongError as error:
        message = str(error)
    except Exception as error:  # of any kind: bytes that are no pickle raise what they like
        message = " ".join(str(error).split()) or type(error).__name__
    raise ValueError(
        f"path ({path / METADATA}) must be that of a whole DCP directory: {message[:300]}: copy "
        "it again"
    )


class _WrongError(Exception):
    """Metadata that cannot be used; the text says why."""


def _tensors(path: Path, metadata: Any) -> dict[str, DCPTensor]:
    stored = _expect(metadata, "state_dict_metadata", dict)
    places: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, info in _expect(metadata, "storage_data", dict).items():
        offset = index.get("offset")
        places[index.get("fqn"), () if offset is None else tuple(offset)] = info
    found = {}
    for name, entry in stored.items():
        if type(entry).__name__ == "TensorStorageMetadata":
            found[name] = _tensor(path, name, entry, places)
    return found


def _tensor(path: Path, name: str, entry: Any, places: dict[Any, Any]) -> DCPTensor:
    shape = _counts(name, entry.get("size"))
    dtype = _expect(entry, "properties", _Record).state[0]
    if not isinstance(name, str) or dtype not in DTYPE_NAMES:
        raise _WrongError(f"{name!r:.80} has the dtype {dtype!r:.80}")
    chunks = []
    for chunk in _expect(entry, "chunks", list):
        offsets, sizes = (_counts(name, chunk.get(n)) for n in ("offsets", "sizes"))
        ends = [o + n for o, n in zip(offsets, sizes, strict=True)]
        if len(offsets) != len(shape) or any(a > b for a, b in zip(ends, shape, strict=True)):
            raise _WrongError(f"{name} {shape} has a chunk {sizes} at {offsets}")
        if math.prod(sizes):
            info = places.get((name, offsets))
            if not isinstance(info, _Record):
                raise _WrongError(f"the chunk of {name} at {offsets} is in no file")
            chunks.append(DCPChunk(offsets, sizes, *_place(path, name, info)))
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise _WrongError(f"{name} {shape} has chunks that are not all of it, each element once")
    return DCPTensor(shape, dtype, tuple(chunks))


def _place(path: Path, name: str, info: _Record) -> tuple[str, int, int]:
    """The file, first byte and length of a chunk; they must be there."""
    file, start, length = (info.get(n) for n in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or Path(file).name != file:
        raise _WrongError(f"{name} is in {file!r:.80}, which is no file of the directory")
    if not (path / file).is_file():
        raise _WrongError(f"{file} is missing")
    start, length = _counts(name, (start, length))
    if start + length > (path / file).stat().st_size:
        raise _WrongError(f"{file} ends before {name}")
    if info.get("transform_descriptors"):
        raise _WrongError(f"{name} is compressed ({info.get('transform_descriptors')!r:.80})")
    return file, start, length


def _expect(record: Any, name: str, kind: type) -> Any:
    value = record.get(name) if isinstance(record, _Record) else None
    if not isinstance(value, kind):
        raise _WrongError(f"{name} ({type(value).__name__}) must be a {kind.__name__}")
    return value


def _counts(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(n) is int and n >= 0 for n in values):
        raise _WrongError(f"{name} has the sizes {values!r:.80}")
    return tuple(values)
