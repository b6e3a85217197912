"""Paths of objects: fsspec URLs such as s3://bucket/run, with the pathlib methods that io calls.

An object store has no rename and no directories, and its listings may lag. A checkpoint therefore
reads each object by its name. Listings are only used to find objects to delete, and the steps of a
run without the object `latest`. An object appears when its upload is complete.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from moecore.base import get_install_command
from moecore.base.text import format_error_line


@dataclass(frozen=True, slots=True)
class RemotePath(os.PathLike[str]):
    """The fsspec URL of an object or of a prefix of objects, without a slash at the end.

    Methods raise FileNotFoundError for a missing object or bucket, and OSError for other problems.
    """

    url: str

    def __fspath__(self) -> str:
        return self.url

    __str__ = __fspath__

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The part of the URL after the last slash."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The URL without the last slash and the name."""
        return RemotePath(self.url.rpartition("/")[0])

    def is_dir(self) -> bool:
        """Return True, because each prefix may have objects."""
        return True

    def is_file(self) -> bool:
        """Whether an object of this name exists."""
        try:
            return bool(self.call("info")["type"] == "file")
        except FileNotFoundError:
            return False

    exists = is_file

    def iterdir(self) -> list[RemotePath]:
        """Return the paths that the store lists directly below this prefix."""
        names = list[str]()
        with suppress(FileNotFoundError):
            names = self.call("ls", detail=False)
        return [self / name.rstrip("/").rpartition("/")[2] for name in sorted(names)]

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes `begin` to `end` (exclusive) of the object by one range request."""
        data: bytes = self.call("cat_file", start=begin, end=end)
        return data

    def write(self, data: bytes) -> None:
        """Create or replace the object by one request."""
        self.call("pipe_file", data)

    def unlink(self) -> None:
        """Delete the object, if it exists."""
        with suppress(FileNotFoundError):
            self.call("rm_file")

    def remove_all(self) -> None:
        """Delete all listed objects below this prefix."""
        with suppress(FileNotFoundError):
            self.call("rm", recursive=True)

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the fsspec file system on this path; errors name the URL."""
        try:
            system, path = _find_file_system(self.url)
            return getattr(system, method)(path, *args, **options)
        except Exception as error:  # of any class: clients of stores define their own
            kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
            reason = format_error_line(f"{type(error).__name__}: {error}", 300)
            raise kind(f"path ({self.url}) could not be accessed: {reason}") from error


AnyPath: TypeAlias = Path | RemotePath


def make_path(path: str | os.PathLike[str]) -> AnyPath:
    """Return a `RemotePath` for a URL, otherwise a `Path`; ValueError if fsspec cannot open it."""
    url = os.fspath(path)
    if "://" not in url:
        if isinstance(path, PurePath) and re.match("(s3|gs|gcs|abfs|az|memory):/", url):
            raise ValueError(f"path ({url}) must be a str: pathlib removes a slash of URLs")
        return Path(path)
    try:
        if not url.partition("://")[2].strip("/"):
            raise ValueError("it names no bucket or prefix")
        _find_file_system(url)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"path ({url}) must be of a file system that fsspec opens, but "
            f"{format_error_line(str(error), 200)}: {get_install_command('storage')}"
        ) from None
    return RemotePath(url.rstrip("/"))


def _find_file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, which fsspec caches, and the path in it."""
    from fsspec.core import url_to_fs

    options = {"auto_mkdir": True} if url.startswith(("file:", "local:")) else {}
    system, path = url_to_fs(url, use_listings_cache=False, **options)
    return system, path


class RemoteFile:
    """Reads byte ranges of an object. If `is_new`, uploads an object, visible after `commit`."""

    piece_bytes = 16 * 2**20  # of one request

    def __init__(self, path: RemotePath, *, is_new: bool = False) -> None:
        self._path = path
        self._upload: Any = path.call("open", "wb") if is_new else None

    def get_size(self) -> int:
        """Return the size of the object in bytes."""
        return int(self._path.call("info")["size"])

    def read_into(self, target: memoryview, begin: int) -> int:
        """Read from byte `begin` into `target`; return the number of read bytes, 0 at the end."""
        data = self._path.read(begin, begin + len(target))
        target[: len(data)] = data
        return len(data)

    def write(self, data: memoryview) -> int:
        """Append bytes and return their number."""
        self._upload.write(data)
        return len(data)

    def commit(self) -> None:
        """Complete the upload."""
        self._upload.close()
        self._upload = None

    def close(self) -> None:
        """Abort the upload unless it is complete."""
        upload, self._upload = self._upload, None
        with suppress(Exception):  # the error of the upload is raised already
            upload.discard()
            upload.closed = True  # otherwise garbage collection completes the upload
