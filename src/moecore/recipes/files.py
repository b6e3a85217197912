"""Reads files, models of the hub and data sets that a user names; errors name option and path."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moecore.io.checkpoint.files import open_regular_file
from moecore.packing.corpus.files import shorten_text

MAX_LINE_BYTES = 16 << 20  # a line of metrics has 1 MB for 50,000 experts
SIZELESS_BYTES = 1 << 20  # read of a file that reports a size of 0, such as those of /proc


def read_text(path: Path, option: str, *, max_bytes: int | None = None) -> str:
    """Return a regular file's UTF-8 text; ValueErrors name flag `option` and the path."""
    name = format_option(option, path)
    host_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = host_memory if max_bytes is None else max_bytes
    try:
        with open(open_regular_file(path, follow_symlinks=True), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(size or SIZELESS_BYTES) if size <= limit else b""
    except OSError as error:
        raise ValueError(f"{name} must be a readable file: {error.strerror}") from None
    except ValueError:  # a FIFO gives its text once, to one rank
        if path.is_dir():
            raise ValueError(f"{name} must be a file, not a directory: name a file in it") from None
        raise ValueError(f"{name} must be a plain file: write its text into one") from None
    if size > limit:
        raise ValueError(f"{name} must have <= {limit} bytes, not {size}: use a smaller file")
    try:
        return (content or b"").decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} must be UTF-8: {error.reason} at byte {error.start}: convert it"
        ) from None


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, if it exists; stop after a line that is longer than 16 MiB."""
    if not path.exists():
        return
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            yield line.removesuffix(b"\n")
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                return  # a file that a crash has filled up with zeros may have many gigabytes


def parse_step_line(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line with an integer "step"; None = the line is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_of_step = isinstance(record, dict) and type(record.get("step")) is int
    return record if is_of_step else None


def replace_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace a file, or create it, by a file with `lines`."""
    draft = path.with_suffix(".tmp")
    draft.unlink(missing_ok=True)
    with draft.open("x") as file:  # never through a link
        file.writelines(f"{line}\n" for line in lines)
    draft.replace(path)


@contextmanager
def name_option_in_errors(option: str) -> Iterator[None]:
    """Return a context in which errors about a path are ValueErrors that name the flag `option`."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        name = format_option(option, error.filename)
        raise ValueError(f"{name} must be a readable file: {error.strerror}") from None
    except ValueError as error:
        if not str(error).startswith("path ("):
            raise
        raise ValueError(option + str(error).removeprefix("path")) from None


def format_option(option: str, path: str | Path) -> str:
    """Return "OPTION (PATH)", with which errors about the path of an option begin."""
    return f"{option} ({format_path(path)})"


def format_path(path: str | Path) -> str:
    """Return a path in one line of at most 200 characters."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(path))
    return text if len(text) <= 200 else f"{text[:98]}...{text[-99:]}"


HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
UNUSED_FILES = ("original/*", "metal/*", "*.pth", "*.gguf", "*.onnx")  # weights in other formats


def find_config(path: Path, option: str = "--hf-config") -> Path:
    """Return `path`, or if it is a name of the hub, the downloaded config.json."""
    if path.exists() or not HUB_ID.fullmatch(str(path)):
        return path
    from transformers.utils import cached_file

    try:
        return Path(str(cached_file(str(path), "config.json")))
    except Exception as error:  # of any kind, of networks and of the hub
        raise ValueError(
            f"{option} ({path}) must be a config.json, its directory, or a model of the hub that "
            f"is in the cache or can be downloaded: {shorten_text(error)}"
        ) from None


def find_model_directory(path: Path, option: str = "--model") -> Path:
    """Return `path`, or if it is a name of the hub, the directory, downloaded once per host."""
    if path.exists() or not HUB_ID.fullmatch(str(path)):
        return path
    import huggingface_hub as hub
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import WeakFileLock

    name, cache = str(path), Path(hub.constants.HF_HUB_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(cache / f".{name.replace('/', '--')}.lock"):
            try:
                location = hub.snapshot_download(
                    name, local_files_only=True, ignore_patterns=[*UNUSED_FILES]
                )
            except LocalEntryNotFoundError:
                location = hub.snapshot_download(name, ignore_patterns=[*UNUSED_FILES])
    except Exception as error:  # of any kind, of networks and of the hub
        raise ValueError(
            f"{option} ({name}) must be a directory, or a model of the hub that is in the cache "
            f"({cache}) or can be downloaded: {shorten_text(error)}"
        ) from None
    return Path(location)


HUB = "hf:"
DIRECTORY_FILES = ("state.json", "dataset_dict.json")  # of save_to_disk


def is_dataset(path: str) -> bool:
    """Return whether the package `datasets` reads a path: hf:NAME, .parquet or a directory."""
    is_directory = any(os.path.lexists(Path(path) / file) for file in DIRECTORY_FILES)
    return path.startswith(HUB) or path.endswith(".parquet") or is_directory


def open_dataset(
    path: str, option: str, *, split: str = "train", config: str = "", stream: bool = False
) -> Any:
    """Return the rows of hf:NAME, a .parquet file, or a directory of `save_to_disk`.

    `config` and `stream` are only for hf:NAME. `stream` reads rows without storing files. A
    .parquet file ignores `split`. ValueErrors name the flag `option`.
    """
    name = format_option(option, path)
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{name} must have datasets installed: pip install datasets") from None
    location = path.removeprefix(HUB)
    try:
        if path.startswith(HUB):
            return datasets.load_dataset(location, config or None, split=split, streaming=stream)
        if path.endswith(".parquet"):
            return datasets.load_dataset("parquet", data_files=path, split="train")
        dataset = datasets.load_from_disk(path)
        return dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
    except Exception as error:
        raise ValueError(f"{name} must be a data set that loads: {shorten_text(error)}") from None
