"""The manifest of a checkpoint: one line of JSON with metadata, tensors, files and digests.

A save writes the manifest last. A manifest that deviates from the format is not read.

    format, step, world_size    integers
    meshes                      [{mesh dim: size}] of the saved model's DTensors
    versions                    moecore, torch, python
    config, scheduler, extra    the caller's JSON, without tensors; config, scheduler may be null
    optimizer_class             name of its class, or of several one for each group: "A, B", or null
    optimizer                   [{params: [name], hyperparameter: value}], or null
    files                       file name -> {size in bytes, sha256 of the file}
    tensors                     name -> {shape, dtype, chunks: [{file, key, offsets, sizes}]}
    sha256                      of this line without this entry

The text must equal the output of Python's `json` byte for byte, so one flipped bit anywhere is
detected: in a value by the digest, elsewhere by the comparison. The digest is no
signature, so every field is checked as if it were forged.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

import torch
from typing_extensions import override

from moecore.base.fields import (
    Bound,
    CheckedRecord,
    FieldErrors,
    Passes,
    check_arguments,
    format_name,
)
from moecore.io.checkpoint.files import MAX_TABLE, read_regular_file
from moecore.io.checkpoint.object_storage import make_path

MANIFEST = "moecore.json"
FORMAT = 3
# With the id of an attempt on object storage, where two attempts may write the same step.
FILE_NAME = re.compile(r"rank-[0-9]{5,9}(-[0-9a-f]{16})?\.safetensors")
SHA256 = re.compile(r"[0-9a-f]{64}")
DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16",
    torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
MAX_DEPTH = 100  # of JSON, whose readers recurse
_MAX_BYTES = 2**62
Size = Annotated[int, Bound(">=", 0), Bound("<", _MAX_BYTES)]


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and SHA256.fullmatch(value) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile(CheckedRecord):
    """Size in bytes and SHA-256 (hex) of a shard file."""

    size: Annotated[Size, Bound(">=", 1)]
    sha256: Annotated[str, Passes(_is_digest, "64 hex digits")]


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestChunk:
    """A block of a tensor: shard file, key in the file, and the block's offset and size per dim."""

    file: str
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Shape and dtype of a stored tensor, and its chunks, which form a grid."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[ManifestChunk, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestFacts(CheckedRecord):
    """Metadata of a checkpoint as JSON values: step, config, optimizer groups and others."""

    step: Size
    world_size: Annotated[Size, Bound(">=", 1)]
    meshes: list[dict[str, Size]] = field(default_factory=list)
    versions: dict[str, str]
    config: dict[str, Any] | None
    optimizer_class: str | None = None
    optimizer: list[dict[str, Any]] | None = None
    scheduler: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @override
    def _find_field_errors(self) -> FieldErrors:
        groups, kind = self.optimizer, self.optimizer_class
        for group in groups or ():
            names = group.get("params")
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                yield "optimizer", "have groups with a list of names as params: name them"
        if groups is None or kind is None:
            if groups is not kind:
                yield "optimizer_class", "be a string beside groups, and None without: pass both"
        elif kind.count(", ") + 1 not in (1, len(groups)):
            yield "optimizer_class", "be one class, or one for each group: name them"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A valid manifest: metadata, shard files and tensors by name, and its JSON text."""

    facts: ManifestFacts
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]
    text: str

    @property
    def num_bytes(self) -> int:
        """Total bytes of all shard files."""
        return sum(file.size for file in self.files.values())

    def list_file_entries(self, file: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return key -> (dtype, shape) of each chunk in the shard file `file`."""
        return {
            chunk.key: (tensor.dtype, chunk.sizes)
            for tensor in self.tensors.values()
            for chunk in tensor.chunks
            if chunk.file == file
        }


def make_manifest(
    facts: ManifestFacts, files: Mapping[str, StoredFile], tensors: Mapping[str, StoredTensor]
) -> Manifest:
    """Build a manifest; ValueError if a value, file or tensor violates the manifest's format."""
    values = asdict(facts) | {
        "format": FORMAT,
        "files": {name: asdict(file) for name, file in files.items()},
        "tensors": {
            name: {
                "shape": tensor.shape,
                "dtype": DTYPE_NAMES[tensor.dtype],
                "chunks": [asdict(chunk) for chunk in tensor.chunks],
            }
            for name, tensor in tensors.items()
        },
    }
    return parse_manifest(_dump_json(values | {"sha256": _compute_digest(values)}) + "\n")


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of a checkpoint, from its directory or URL.

    Raises:
        ValueError: if the directory is not a complete checkpoint, or the manifest is damaged.
        OSError: if the manifest cannot be read.
    """
    check_arguments(read_manifest, locals())
    path = make_path(path)
    try:
        data = read_regular_file(path / MANIFEST, max_bytes=MAX_TABLE)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"path ({path}) must be a whole checkpoint, with a {MANIFEST}: use latest(root)"
        ) from None
    try:
        return parse_manifest(data.decode("ascii"))
    except UnicodeDecodeError as error:
        problem = f"is not ASCII at byte {error.start}"
    except ValueError as error:
        problem = str(error)
    raise ValueError(
        f"path ({path / MANIFEST}) must be a whole manifest: {problem}: load another checkpoint"
    )


def parse_manifest(text: str) -> Manifest:
    """Parse the JSON text of a manifest; raise ValueError with the first problem."""
    _require(
        len(text) <= MAX_TABLE,
        f"its size ({len(text)} bytes) must be <= {MAX_TABLE}: save on fewer ranks",
    )
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    _require(not is_nested_deeper(values, MAX_DEPTH), "it nests too deep")
    _require(isinstance(values, dict), "it is no JSON object")
    _require(
        values.get("format") == FORMAT,
        f"format ({values.get('format')!r:.40}) must be {FORMAT}, or that of another moecore",
    )
    facts = {field.name for field in fields(ManifestFacts)}
    odd = values.keys() ^ (facts | {"format", "files", "tensors", "sha256"})
    _require(not odd, f"its entries differ by {sorted(odd)!r:.200}")
    digest = values.pop("sha256")
    _require(digest == _compute_digest(values), "its digest does not match, so it is damaged")
    _require(
        text == _dump_json(values | {"sha256": digest}) + "\n", "its text is not what was written"
    )
    return Manifest(
        facts=ManifestFacts(**{name: values[name] for name in facts}),
        files=_parse_files(values["files"]),
        tensors=_parse_tensors(values["tensors"], values["files"]),
        text=text,
    )


def is_nested_deeper(value: Any, max_depth: int) -> bool:
    """Whether lists and dicts are nested more than `max_depth` times in a JSON value."""
    level = [value]
    while level and max_depth >= 0:
        level = [v for v in level if isinstance(v, dict | list | tuple)]
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
        max_depth -= 1
    return bool(level)


def _parse_files(files_json: Any) -> dict[str, StoredFile]:
    """Convert the manifest's JSON value "files" to records by file name, or raise ValueError."""
    _require(isinstance(files_json, dict), "files must be an object")
    for name, file in files_json.items():
        _require(
            FILE_NAME.fullmatch(name) is not None,
            f"files: {name!r:.80} must be rank-<number>.safetensors",
        )
        _require_keys(file, {"size", "sha256"}, f"files: {name}")
    return {name: StoredFile(**file) for name, file in files_json.items()}


def _parse_tensors(tensors_json: Any, files_json: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Convert the JSON value "tensors"; ValueError unless "files" has the chunks' files."""
    _require(isinstance(tensors_json, dict), "tensors must be an object")
    seen: set[tuple[str, str]] = set()
    tensors = {}
    for name, value in tensors_json.items():
        label = f"tensor {name!r:.120}"
        _require_keys(value, {"shape", "dtype", "chunks"}, label)
        _require(isinstance(value["dtype"], str) and value["dtype"] in DTYPES, f"{label}: dtype")
        shape, dtype = _parse_sizes(value["shape"], label), DTYPES[value["dtype"]]
        # Dims of size 0 count as 1, because the strides of such a tensor must not overflow.
        num_bytes = math.prod(max(1, n) for n in shape) * dtype.itemsize
        _require(num_bytes < _MAX_BYTES, f"{label}: its shape is too large")
        _require(isinstance(value["chunks"], list), f"{label}: chunks must be a list")
        chunks = tuple(
            _parse_chunk(chunk, len(shape), files_json, label) for chunk in value["chunks"]
        )
        check_chunk_grid(name, shape, chunks)
        for chunk in chunks:
            place = (chunk.file, chunk.key)
            _require(place not in seen, f"{label}: {place!r:.200} is used twice")
            seen.add(place)
        tensors[name] = StoredTensor(shape=shape, dtype=dtype, chunks=chunks)
    _require(
        {file for file, _ in seen} == files_json.keys(), "files: every one must hold some tensor"
    )
    return tensors


def _parse_chunk(
    chunk_json: Any, num_dims: int, files_json: Mapping[str, Any], prefix: str
) -> ManifestChunk:
    """Convert a chunk's JSON value to a record; ValueErrors begin with `prefix`."""
    _require_keys(chunk_json, {"file", "key", "offsets", "sizes"}, f"{prefix}: a chunk")
    file, key = chunk_json["file"], chunk_json["key"]
    _require(
        isinstance(file, str) and file in files_json, f"{prefix}: its file must be one of files"
    )
    _require(isinstance(key, str) and key != "__metadata__", f"{prefix}: a chunk's key")
    offsets = _parse_sizes(chunk_json["offsets"], prefix)
    sizes = _parse_sizes(chunk_json["sizes"], prefix)
    _require(
        len(offsets) == len(sizes) == num_dims, f"{prefix}: a chunk has another number of dims"
    )
    return ManifestChunk(file=file, key=key, offsets=offsets, sizes=sizes)


def check_chunk_grid(name: str, shape: Sequence[int], chunks: Sequence[ManifestChunk]) -> None:
    """Raise ValueError unless a tensor's chunks form a grid that covers each element once."""
    # Example: shape (4, 6) with blocks (2, 6) at (0, 0), (2, 3) at (2, 0) and (2, 3) at (2, 3) is
    # an error: a cut of dim 1 at 3 must go through all rows. DTensor shards always form a grid.
    label = f"tensor {name!r:.120}"
    if math.prod(shape) == 0:
        _require(not chunks, f"{label} is empty and must have no chunks")
        return
    cells = 1
    for dim, size in enumerate(shape):
        spans = sorted({(chunk.offsets[dim], chunk.sizes[dim]) for chunk in chunks})
        end = 0
        for begin, length in spans:
            _require(begin == end and length > 0, f"{label}: its chunks leave a gap or overlap")
            end = begin + length
        _require(end == size, f"{label}: its chunks end at {end} of {size} in dim {dim}")
        cells *= len(spans)
    distinct = len({chunk.offsets for chunk in chunks})
    _require(
        cells == distinct == len(chunks),
        f"{label}: its {len(chunks)} chunks must be the {cells} cells of a grid",
    )


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise NotImplementedError if safetensors does not support the dtype of a tensor."""
    if dtype not in DTYPE_NAMES:
        raise NotImplementedError(
            f"tensor {format_name(name)} ({dtype}) must have a dtype of safetensors to be saved: "
            "store a view"
        )


def _dump_json(values: Mapping[str, Any]) -> str:
    """Convert the manifest's values to JSON text with sorted keys."""
    return json.dumps(values, sort_keys=True)


def _compute_digest(values: Mapping[str, Any]) -> str:
    """Return the hex SHA-256 of the manifest's values as JSON."""
    return hashlib.sha256(_dump_json(values).encode()).hexdigest()


def _parse_sizes(value: Any, prefix: str) -> tuple[int, ...]:
    """Convert a JSON list of sizes to a tuple; ValueErrors begin with `prefix`."""
    _require(
        isinstance(value, list) and all(map(_is_count, value)), f"{prefix}: sizes must be counts"
    )
    _require(len(value) <= 64, f"{prefix}: it has too many dims")
    return tuple(value)


def _is_count(value: Any) -> bool:
    """Whether a JSON value is an integer from 0 to 2**62 - 1."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and 0 <= value < _MAX_BYTES


def _require_keys(value: Any, keys: Iterable[str], prefix: str) -> None:
    """Raise ValueError that begins with `prefix` unless a value is a dict with these keys."""
    _require(
        isinstance(value, dict) and value.keys() == set(keys), f"{prefix} must have {list(keys)}"
    )


def _require(is_valid: bool, problem: str) -> None:
    """Raise ValueError with the text `problem` unless `is_valid`."""
    if not is_valid:
        raise ValueError(problem)
