"""Reads boxes (rectangular parts) of the tensors in a Hugging Face directory.

    config.json
    model.safetensors                      one shard, or
    model.safetensors.index.json           {"weight_map": {tensor: shard}}
    model-00001-of-00002.safetensors ...

Opening a directory reads only headers. No file is unpickled: .bin and .pt files are an error.
"""

from __future__ import annotations

import json
import math
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moecore.base.fields import format_name, quote
from moecore.base.text import format_error_line
from moecore.io.checkpoint.files import (
    MAX_CONFIG,
    MAX_TABLE,
    open_regular_file,
    read_regular_file,
    refuse_problems,
)
from moecore.io.checkpoint.manifest import DTYPES, MAX_DEPTH, is_nested_deeper
from moecore.io.checkpoint.shard_file import CHUNK_BYTES, Meter, ShardReader

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
Box = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class FileTensor:
    """File name, dtype and shape of a tensor, from the header of its safetensors file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def find_common_boxes(box: Box, chunks: Iterable[Any]) -> Iterator[tuple[Any, Box, Box]]:
    """Yield (chunk, slices in the chunk, slices in `box`) for each chunk that overlaps a box."""
    for chunk in chunks:
        sides = list(zip(box, chunk.offsets, chunk.sizes, strict=True))
        spans = [(max(s.start, o), min(s.stop, o + n)) for s, o, n in sides]
        if all(start < stop for start, stop in spans):
            of_chunk = (slice(a - o, b - o) for (a, b), o in zip(spans, chunk.offsets, strict=True))
            of_box = (slice(a - s.start, b - s.start) for (a, b), s in zip(spans, box, strict=True))
            yield chunk, tuple(of_chunk), tuple(of_box)


def split_rows(
    shape: Sequence[int], max_numel: int, first: int = 0, stop: int | None = None
) -> Iterator[Box]:
    """Yield boxes of at most `max_numel` elements, or one row, for the rows `first` to `stop`."""
    if not shape:
        yield ()
        return
    stop = shape[0] if stop is None else min(stop, shape[0])
    step = max(1, max_numel // max(1, math.prod(shape[1:])))
    for start in range(first, stop, step):
        yield (slice(start, min(start + step, stop)), *(slice(0, n) for n in shape[1:]))


class BoxReader(Protocol):
    """Protocol of objects that read boxes (a slice with start and stop per dim) of tensors."""

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box (one slice per dim) of the stored tensor `name`, as a new CPU tensor."""


class HFFiles:
    """Reads boxes (slices) of a Hugging Face directory's tensors; `tensors` None = read headers."""

    def __init__(
        self, path: str | os.PathLike[str], tensors: Mapping[str, FileTensor] | None = None
    ) -> None:
        self.path = Path(path)
        self.tensors = dict(read_headers(self.path) if tensors is None else tensors)
        self.bytes_read = 0
        self._readers: dict[str, ShardReader] = {}
        self._stack = ExitStack()
        self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu")

    def read(self, name: str, box: Box) -> Tensor:
        """Read a box (a slice with start and stop per dim) of a tensor into a new CPU tensor."""
        entry = self.tensors[name]
        value = torch.empty([s.stop - s.start for s in box], dtype=entry.dtype, device="cpu")
        offsets = [part.start for part in box]
        self._open_reader(entry.file).read(name, entry.dtype, entry.shape, offsets, value)
        self.bytes_read += value.nbytes
        return value

    def _open_reader(self, file: str) -> ShardReader:
        """Return the reader of a file; OSError if its header no longer lists `tensors`."""
        if file in self._readers:
            return self._readers[file]
        path, begins = self.path / file, dict[str, int]()
        with open(open_regular_file(path, follow_symlinks=True), "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = stream.read(size) if size <= MAX_TABLE else b""
        try:
            entries = json.loads(header)
            for name, tensor in self.tensors.items():
                if tensor.file != file:
                    continue
                start, stop = entries[name]["data_offsets"]
                layout = DTYPES[entries[name]["dtype"]], tuple(entries[name]["shape"]), stop - start
                if layout != (tensor.dtype, tensor.shape, tensor.nbytes):
                    raise ValueError(f"{format_name(name)} is another tensor")
                begins[name] = 8 + size + start
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise OSError(
                f"path ({path}) must be as its header said: {format_error(error):.200}: it has "
                "changed meanwhile"
            ) from None
        # Not a memory map: SIGBUS would end this process if the file became shorter.
        reader = ShardReader(path, begins, self._buffer, Meter(), follow_symlinks=True)
        self._readers[file] = self._stack.enter_context(reader)
        return reader

    def count_bytes(self, names: Iterable[str]) -> int:
        """Return the total bytes of the stored tensors with these names."""
        return sum(self.tensors[name].nbytes for name in names)

    def __enter__(self) -> HFFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._readers.clear()
        self._stack.close()


def read_headers(path: Path) -> dict[str, FileTensor]:
    """Return all tensors' headers by name; ValueError if a shard is missing or differs."""
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
    """Return tensor name -> file name from the index; None for a single file without an index."""
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
    """Return the object in a JSON file of at most `max_bytes`, or raise ValueError."""
    try:
        data = read_regular_file(file, follow_symlinks=True, max_bytes=max_bytes)
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
    """Return the tensors in the header of a safetensors file by name, or raise ValueError."""
    try:
        shard = safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(
            f"path ({file}) must be a whole safetensors file: {format_error(error)}: copy it again"
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


def format_error(error: BaseException) -> str:
    """Return the text of an error without line breaks, truncated."""
    return format_error_line(str(error), 1000)


def format_error_with_source(error: BaseException) -> str:
    """Return the text of an error, with the line of transformers' code that raised the error."""
    # The text of Python's errors does not name a config field, but the source line does.
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line for frame in frames if "/transformers/models/" in frame.filename]
    return f"{format_error(error):.200}" + (f" in `{lines[-1]:.100}`" if lines else "")
