"""Files of a run; a symlink, a FIFO or a device in place of a file is refused.

Another user could create a file with a predictable name. New files are therefore created with
O_EXCL, and a read checks the file type first.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import uuid
from collections.abc import Sequence
from pathlib import Path

from moecore.base.text import format_error_line
from moecore.io.checkpoint.object_storage import AnyPath, RemoteFile, RemotePath

# Largest files that are parsed. 1 GiB holds 6 million blocks: the model and the moments of
# 1,200 parameters over 1,600 ranks. A config.json of a published model has 0.1 MB. Objects of
# Python may take 25 times the bytes of their JSON ("[],[],"), so 10 MiB become 250 MB at most.
MAX_TABLE, MAX_CONFIG = 1 << 30, 10 << 20
MAX_LINES, MAX_CHARS = 10, 600  # problems listed in one error, and characters of each
# Only names that a save makes: other hidden files of a run belong to the user.
_LEFTOVER = re.compile(r"\.step-[0-9]+\.tmp-\w+|\.step-[0-9a-f]{8}\.old|\.latest-[0-9a-f]{8}")


def open_regular_file(path: Path, *, follow_symlinks: bool = False) -> int:
    """Return a descriptor, which the caller closes; ValueError for a FIFO, device or symlink."""
    # O_NONBLOCK: opening a FIFO without a writer would wait.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_symlinks else os.O_NOFOLLOW)
    if not follow_symlinks and path.is_symlink():
        raise ValueError(f"path ({path}) must be a regular file, not a symlink: copy the file here")
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"path ({path}) must be a regular file: remove what is in its place")
    return descriptor


class LocalFile:
    """Reads byte ranges of a local file, or appends to a new file, by a file descriptor."""

    piece_bytes = 2**20  # hashed at a time, while it is in a core's cache

    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor

    def get_size(self) -> int:
        """Return the size of the file in bytes."""
        return os.fstat(self._fd).st_size

    def read_into(self, target: memoryview, begin: int) -> int:
        """Read from byte `begin` into `target`; return the number of read bytes, 0 at the end."""
        return os.preadv(self._fd, [target], begin)

    def write(self, data: memoryview) -> int:
        """Append `data` or its beginning; return the number of written bytes."""
        return os.write(self._fd, data)

    def commit(self) -> None:
        """Fsync the file."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def open_file(
    path: AnyPath, *, is_new: bool = False, follow_symlinks: bool = False
) -> LocalFile | RemoteFile:
    """Open a regular file to read, or create a file if `is_new`; the caller closes the file."""
    if isinstance(path, RemotePath):
        return RemoteFile(path, is_new=is_new)
    if is_new:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        return LocalFile(os.open(path, flags, 0o644))
    return LocalFile(open_regular_file(path, follow_symlinks=follow_symlinks))


def read_regular_file(path: AnyPath, *, max_bytes: int, follow_symlinks: bool = False) -> bytes:
    """Return a file's content; ValueError if it exceeds `max_bytes` or is not a regular file."""
    if isinstance(path, RemotePath):
        data = path.read(0, max_bytes + 1)
        check_file_size(path, len(data), max_bytes)
        return data
    with open(open_regular_file(path, follow_symlinks=follow_symlinks), "rb") as file:
        size = os.fstat(file.fileno()).st_size  # of a sparse file, too
        check_file_size(path, size, max_bytes)
        data = file.read(max_bytes + 1)
    check_file_size(path, len(data), max_bytes)  # it may have grown
    return data


def check_file_size(path: AnyPath, num_bytes: int, max_bytes: int) -> None:
    """Raise ValueError if `num_bytes`, the size of the file at `path`, is above `max_bytes`."""
    if num_bytes > max_bytes:
        raise ValueError(
            f"path ({path}) must have at most {max_bytes} bytes, but has {num_bytes}: it is "
            "damaged, or no such file, so copy it again"
        )


def read_file_beginning(path: AnyPath, max_bytes: int) -> bytes:
    """Return the first `max_bytes` bytes of a file; ValueError if it is not a regular file."""
    if isinstance(path, RemotePath):
        return path.read(0, max_bytes)
    with open(open_regular_file(path), "rb") as file:
        return file.read(max_bytes)


def write_new_file(path: Path, text: str) -> None:
    """Create an ASCII file, write the text and fsync it; raise FileExistsError if it exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Fsync a directory, so that the names of its files are on disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint, or the symlink to it; OSError if an entry cannot be deleted."""
    hidden = _make_hidden_path(path)
    entries = _list_deletable_entries(path)
    try:
        path.rename(hidden)
        _delete_path(hidden)
    except OSError as error:
        problem = f"path ({path}) could not be removed: {error.strerror or error}"
        if hidden.is_dir() and _list_deletable_entries(hidden) == entries:
            hidden.rename(path)
        elif os.path.lexists(hidden):
            problem += f", and what is left of it is {hidden.name}"
        raise OSError(problem) from error


def _make_hidden_path(path: Path) -> Path:
    """Return a new hidden path in the same directory, to which a path is renamed for deletion."""
    return path.with_name(f".step-{uuid.uuid4().hex[:8]}.old")


def _delete_path(path: Path) -> None:
    """Delete a directory with its content, or a symlink without its target."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def _list_deletable_entries(path: Path) -> list[str]:
    """Return all relative paths below a directory; OSError if some may not be deleted.

    Deletion needs permission to write in each directory that is not empty. The result is [] for a
    symlink, which is deleted without its target.
    """
    if path.is_symlink():
        return []
    paths = []
    for folder, folders, files in os.walk(path):
        if (folders or files) and not os.access(folder, os.W_OK | os.X_OK):
            raise OSError(f"path ({path}) could not be removed: {folder} may not be changed")
        paths += [os.path.join(os.path.relpath(folder, path), name) for name in folders + files]
    return sorted(paths)


def find_leftovers(root: Path) -> list[Path]:
    """Return drafts, half-deleted checkpoints and pointer files that killed saves left in a run."""
    return [path for path in sorted(root.glob(".*")) if _LEFTOVER.fullmatch(path.name)]


def remove_leftovers(root: Path) -> None:
    """Delete the files of `find_leftovers`, except files that cannot be deleted."""
    # Never under its own name: a stopped job could go on and publish its draft.
    for leftover in find_leftovers(root):
        with contextlib.suppress(OSError):
            if leftover.is_dir():
                hidden = _make_hidden_path(leftover)
                leftover.rename(hidden)
                _delete_path(hidden)
            else:
                leftover.unlink()


def join_problems(problems: Sequence[str]) -> str:
    """Join at most `MAX_LINES` error texts in one line, then append the number of omitted texts."""
    first = "; ".join(format_error_line(problem, MAX_CHARS) for problem in problems[:MAX_LINES])
    remaining = len(problems) - MAX_LINES
    return first if remaining <= 0 else f"{first} (and {remaining} more)"


def refuse_problems(subject: str, problems: Sequence[str], fix: str) -> None:
    """Raise a one-line ValueError with all three arguments if `problems` is not empty."""
    if problems:
        raise ValueError(f"{subject}: {join_problems(problems)}: {fix}")
