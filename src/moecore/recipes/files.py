"""Files that a user names: regular, readable and small enough, or one line with option and path."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moecore.io.checkpoint.files import open_regular

MAX_TEXT_BYTES = 1 << 30  # of a config, a template or a vocabulary
# Libraries map files of these kinds or read parts of them, so their size has no limit.
DATA_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".idx", ".arrow", ".jsonl")
SIZELESS_BYTES = 1 << 20  # read of a file that reports a size of 0, such as those of /proc


def read_file(path: Path, option: str, *, max_bytes: int | None = None) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: of the file. Symbolic links are followed.
        option: the command-line option that names the path, for errors.
        max_bytes: limit of the size; None = the memory of this host.

    Raises:
        ValueError: names option and path, for a file that is missing, too large or not readable,
            and for a directory, FIFO, socket or device. The call waits for none of them.
    """
    name = named(option, path)
    limit = host_bytes() if max_bytes is None else max_bytes
    try:
        with open(open_regular(path, follow=True), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(size or SIZELESS_BYTES) if size <= limit else b""
    except OSError as error:
        raise ValueError(f"{name} must be a readable file: {error.strerror}") from None
    except ValueError:  # a FIFO gives its text once, to one rank
        raise ValueError(f"{name} must be a plain file: write its text into one") from None
    if size > limit:
        raise ValueError(f"{name} must have <= {limit} bytes, not {size}: use a smaller file")
    return content or b""


def read_text(path: Path, option: str, *, max_bytes: int | None = None) -> str:
    """Return the text of a regular file in UTF-8; see `read_file`."""
    content = read_file(path, option, max_bytes=max_bytes)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{named(option, path)} must be UTF-8: {error.reason} at byte {error.start}: convert it"
        ) from None


def check_directory(path: Path, option: str) -> None:
    """Raise ValueError for a file on which a library that reads the directory would wait.

    transformers and datasets open the files of a directory by themselves. Opening a FIFO waits for
    a writer, and a text file is read into memory as a whole.
    """
    try:
        entries = [Path(entry) for entry in os.scandir(path)]
        for folder in [entry for entry in entries if entry.is_dir()]:
            entries += [Path(entry) for entry in os.scandir(folder)]
        for file in entries:
            _check_entry(file, f"{named(option, path)} must have", file.relative_to(path))
    except OSError as error:
        raise ValueError(
            f"{named(option, path)} must be a readable directory: {error.strerror}"
        ) from None


def _check_entry(file: Path, must_have: str, inner: Path) -> None:
    if not file.exists():  # a link to nothing, which is as if it were not there
        return
    status = file.stat()
    if stat.S_ISDIR(status.st_mode):
        return
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{must_have} a plain file as {shown_path(inner)}: move it away")
    if status.st_size > MAX_TEXT_BYTES and file.suffix not in DATA_SUFFIXES:
        raise ValueError(
            f"{must_have} {shown_path(inner)} of <= {MAX_TEXT_BYTES} bytes, not {status.st_size}: "
            "move it away"
        )


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Let the errors of a moecore call name the option that the path was given with."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        name = named(option, error.filename)
        raise ValueError(f"{name} must be a readable file: {error.strerror}") from None
    except ValueError as error:
        if not str(error).startswith("path ("):
            raise
        raise ValueError(option + str(error).removeprefix("path")) from None


def named(option: str, path: str | Path) -> str:
    """Return how errors name an option and its path."""
    return f"{option} ({shown_path(path)})"


def shown_path(path: str | Path) -> str:
    """Return a path in one line of at most 200 characters."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(path))
    return text if len(text) <= 200 else f"{text[:98]}...{text[-99:]}"


def host_bytes() -> int:
    """Return the memory of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
