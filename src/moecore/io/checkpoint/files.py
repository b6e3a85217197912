"""Files of a run: a symlink, a FIFO or a device in their place is refused.

A name that can be predicted may be planted. New files are made with O_EXCL, and a read checks the
kind of a file before its first byte.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import uuid
from pathlib import Path


def open_regular(path: Path, *, follow: bool = False) -> int:
    """Return a descriptor of a regular file; `follow` allows symlinks, as in download caches."""
    # O_NONBLOCK: opening a FIFO without a writer would wait.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    if not follow and path.is_symlink():
        raise ValueError(f"path ({path}) must be a regular file, not a symlink: copy the file here")
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"path ({path}) must be a regular file: remove what is in its place")
    return descriptor


def read_regular(path: Path, *, follow: bool = False, most: int = -1) -> bytes:
    """Return the bytes of a regular file, the first `most` of them if given; see `open_regular`."""
    with open(open_regular(path, follow=follow), "rb") as file:
        return file.read(most)


def write_new(path: Path, text: str) -> None:
    """Write an ASCII file that must not exist, and put it on disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(directory: Path) -> None:
    """Put the names in a directory on disk; a file's own fsync does not."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a directory or a link to one, which must not look whole when it is half deleted."""
    hidden = path.with_name(f".step-{uuid.uuid4().hex[:8]}.old")
    path.rename(hidden)
    if hidden.is_symlink():
        hidden.unlink()
    else:
        shutil.rmtree(hidden)


def remove_leftovers(root: Path) -> None:
    """Delete what killed saves left behind. What cannot be deleted stays, under another name."""
    for leftover in (*root.glob(".step-*"), *root.glob(".latest-*")):
        with contextlib.suppress(OSError):
            remove(leftover) if leftover.is_dir() else leftover.unlink()
