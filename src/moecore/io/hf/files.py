"""HFFiles: the tensors of a Hugging Face directory, read by box. It counts the bytes.

    config.json
    model.safetensors                      one shard, or
    model.safetensors.index.json           {"weight_map": {tensor: shard}}
    model-00001-of-00002.safetensors ...

Opening reads only headers. No file is unpickled: .bin and .pt files are refused.
"""

from __future__ import annotations

import json
import math
import os
import traceback
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moecore.base.fields import format_name, quote
from moecore.base.text import format_error_line
from moecore.io.checkpoint.files import (
    MAX_CONFIG,
    MAX_TABLE,
    open_regular,
    read_regular,
    refuse_problems,
)
from moecore.io.checkpoint.manifest import DTYPES, MAX_DEPTH, is_nested_deeper

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
BLOCK_BYTES = 16 << 20  # of a read that also reads values outside of a box
RUN_BYTES = 1 << 16  # neighbours of this size in a box are read by themselves
Box = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class FileTensor:
    """File name, dtype and shape of a tensor, from the header of its safetensors file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * self.dtype.itemsize


def find_common_boxes(box: Box, chunks: Iterable[Any]) -> Iterator[tuple[Any, Box, Box]]:
    """Yield (chunk, slices in the chunk, slices in the box) for each chunk that overlaps a box.

    `box` has a slice per dim of the full tensor; a chunk has `offsets` and `sizes`.
    """
    for chunk in chunks:
        sides = list(zip(box, chunk.offsets, chunk.sizes, strict=True))
        spans = [(max(s.start, o), min(s.stop, o + n)) for s, o, n in sides]
        if all(start < stop for start, stop in spans):
            of_chunk = (slice(a - o, b - o) for (a, b), o in zip(spans, chunk.offsets, strict=True))
            of_box = (slice(a - s.start, b - s.start) for (a, b), s in zip(spans, box, strict=True))
            yield chunk, tuple(of_chunk), tuple(of_box)


class BoxReader(Protocol):
    """Protocol: reads boxes (a slice with start and stop per dim) of stored tensors."""

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of the stored tensor `name` as a new CPU tensor."""


class HFFiles:
    """Reads tensors of a Hugging Face directory by box, and counts the bytes. A context manager.

    `tensors` are the headers from `read_headers`; None reads them.
    """

    def __init__(
        self, path: str | os.PathLike[str], tensors: Mapping[str, FileTensor] | None = None
    ) -> None:
        self.path = Path(path)
        self.tensors = dict(read_headers(self.path) if tensors is None else tensors)
        self.bytes_read = 0
        self._open: dict[str, _TensorFile] = {}

    def read(self, name: str, box: Box) -> Tensor:
        """Read a box (a slice with start and stop per dim) of a tensor as a new CPU tensor."""
        entry = self.tensors[name]
        if entry.file not in self._open:
            self._open[entry.file] = _TensorFile(self.path / entry.file)
        value = self._open[entry.file].read(name, entry, box)
        self.bytes_read += value.numel() * value.element_size()
        return value

    def count_bytes(self, names: Iterable[str]) -> int:
        """Return the total bytes of these stored tensors."""
        return sum(self.tensors[name].nbytes for name in names)

    def __enter__(self) -> HFFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.clear()


class _TensorFile:
    """A safetensors file that is read with `preadv`; OSError if the file has changed.

    If another process truncated a memory-mapped file, SIGBUS would end this process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = open_regular(path, follow=True)
        weakref.finalize(self, os.close, self._descriptor)
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._read_into(size, 0)
        self._data_start = 8 + int(size)
        if not 0 <= size <= MAX_TABLE:
            self._refuse("its header has another length")
        header = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._read_into(header, 8)
        try:
            self._entries = dict(json.loads(bytes(header.numpy())))
        except (ValueError, TypeError, RecursionError):
            self._refuse("its header is no JSON object")

    def read(self, name: str, template: FileTensor, box: Box) -> Tensor:
        """Read the slice `box` of a tensor as a new CPU tensor.

        `template` has the dtype and the full shape that the tensor must have.
        """
        try:
            entry = self._entries[name]
            start, stop = entry["data_offsets"]
            actual = DTYPES[entry["dtype"]], tuple(entry["shape"]), stop - start
        except (KeyError, TypeError, ValueError):
            self._refuse(f"it has no {format_name(name)}")
        if actual != (template.dtype, template.shape, template.nbytes):
            self._refuse(f"{format_name(name)} is another tensor")
        sizes = [part.stop - part.start for part in box]
        value = torch.empty(sizes, dtype=template.dtype, device="cpu")
        if value.numel():
            self._read_box(value, self._data_start + start, template.shape, box)
        return value

    def _read_box(self, out: Tensor, start: int, shape: tuple[int, ...], box: Box) -> None:
        """Read the slice `box` of a tensor into `out`.

        The full tensor has the shape `shape`, and its bytes begin at `start` in the file.
        """
        inner = [slice(0, size) for size in shape[1:]]
        row_bytes = math.prod(shape[1:]) * out.itemsize
        first = box[0].start if box else 0
        if list(box[1:]) == inner:
            self._read_into(out, start + first * row_bytes)
        elif row_bytes > BLOCK_BYTES or (list(box[2:]) == inner[1:] and out[0].nbytes >= RUN_BYTES):
            for i, row in enumerate(out, first):
                self._read_box(row, start + i * row_bytes, shape[1:], box[1:])
        else:
            for part in out.split(BLOCK_BYTES // row_bytes):
                rows = part.new_empty(len(part), *shape[1:])
                self._read_into(rows, start + first * row_bytes)
                part.copy_(rows[(slice(None), *box[1:])])
                first += len(part)

    def _read_into(self, out: Tensor, start: int) -> None:
        """Fill a contiguous tensor with the bytes of the file from `start` on."""
        array: Any = out.view(-1).view(torch.uint8).numpy()
        buffer = memoryview(array)
        while buffer:
            count = os.preadv(self._descriptor, [buffer], start)
            if not count:
                self._refuse("it has become shorter")
            buffer, start = buffer[count:], start + count

    def _refuse(self, reason: str) -> NoReturn:
        """Raise an OSError: the file has changed since its header was read, for this reason."""
        raise OSError(
            f"path ({self._path}) must be as its header said: {reason}: it has changed meanwhile"
        )


def read_headers(path: Path) -> dict[str, FileTensor]:
    """Return name -> file, dtype and shape per tensor; ValueError if files or index disagree."""
    if not path.is_dir():
        raise ValueError(f"path ({path}) must be a Hugging Face directory: it is not there")
    weight_map = read_index(path)
    shards = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE]
    tensors: dict[str, FileTensor] = {}
    problems = [f"{shard} is missing" for shard in shards if not (path / shard).is_file()]
    refuse_problems(f"path ({path}) must hold every shard", problems, "copy it again")
    for shard in shards:
        for name, entry in read_file_header(path / shard).items():
            if name in tensors:
                problems.append(f"{name} is in {tensors[name].file} and in {shard}")
            tensors[name] = entry
    if weight_map is not None:
        for name, shard in weight_map.items():
            if name not in tensors or tensors[name].file != shard:
                problems.append(f"{name} is not in {shard}")
        problems += [f"{name} is not in the index" for name in tensors if name not in weight_map]
    refuse_problems(f"path ({path / INDEX}) must agree with its shards", problems, "copy it again")
    return tensors


def read_index(path: Path) -> dict[str, str] | None:
    """Return tensor name -> file name from the index; None for a single file without index.

    ValueError if the directory has neither, only pickles, or an invalid index.
    """
    if not (path / INDEX).is_file():
        if (path / SINGLE).is_file():
            return None
        pickles = sorted(p.name for p in path.iterdir() if p.suffix in PICKLES)
        if pickles:
            raise ValueError(
                f"path ({path / pickles[0]}) must be safetensors, because unpickling a file runs "
                "code in it: convert it with transformers' save_pretrained"
            )
        raise ValueError(f"path ({path}) must hold {SINGLE} or {INDEX}: it has neither")
    weight_map = read_json(path / INDEX, max_bytes=MAX_TABLE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        raise ValueError(f"path ({path / INDEX}) must have a weight_map of strings: copy it again")
    for shard in set(weight_map.values()):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ValueError(
                f"path ({path / INDEX}) names the shard ({quote(shard)}), which must be a "
                ".safetensors file in the directory itself"
            )
    return weight_map


def read_json(file: Path, *, max_bytes: int = MAX_CONFIG) -> dict[str, Any]:
    """Read a JSON file of at most `max_bytes` bytes; return its object or raise ValueError."""
    try:
        data = read_regular(file, follow=True, max_bytes=max_bytes)
    except FileNotFoundError:
        raise ValueError(f"path ({file}) must exist: it is not there") from None
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"path ({file}) must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"path ({file}) must be a JSON object, not a {type(value).__name__}")
    if is_nested_deeper(value, MAX_DEPTH):
        raise ValueError(f"path ({file}) must nest at most {MAX_DEPTH} times: correct it")
    return value


def read_file_header(file: Path) -> dict[str, FileTensor]:
    """Return name -> `FileTensor` from the header of one safetensors file, or raise ValueError."""
    try:
        shard = safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(
            f"path ({file}) must be a whole safetensors file: {format_one_line(error)}: copy it "
            "again"
        ) from None
    tensors: dict[str, FileTensor] = {}
    for name in shard.keys():  # noqa: SIM118 (not a mapping)
        entry = shard.get_slice(name)
        dtype = entry.get_dtype()
        if dtype not in DTYPES:
            raise ValueError(
                f"path ({file}) has {format_name(name)} of dtype ({dtype}), which must be one of "
                f"{', '.join(DTYPES)}: convert it"
            )
        tensors[name] = FileTensor(file.name, DTYPES[dtype], tuple(entry.get_shape()))
    return tensors


def format_one_line(error: BaseException) -> str:
    """Return the text of an error without line breaks, truncated."""
    return format_error_line(str(error), 1000)


def format_with_source(error: BaseException) -> str:
    """Return the text of an error, with the line of transformers' code that raised the error."""
    # Python's own errors name no field of a config, but the source line does.
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line for frame in frames if "/transformers/models/" in frame.filename]
    return f"{format_one_line(error):.200}" + (f" in `{lines[-1]:.100}`" if lines else "")
