"""Files that are read by byte position, and errors that quote long names and texts."""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Iterator

LONGEST = 300  # characters of a path, a name or another library's error in a message


def cut(text: object, max_chars: int = LONGEST) -> str:
    """Return a text as one line of at most `max_chars` characters; its middle is left out."""
    line = " ".join(str(text).split())
    half = (max_chars - 3) // 2
    return line if len(line) <= max_chars else f"{line[:half]}...{line[-half:]}"


class SizedFile:
    """A regular file that is read with `os.pread` and must keep the size it has when opened.

    A memory-mapped file that another process truncates would end this process by SIGBUS.

    Args:
        path: of the file; symbolic links are followed.
        size: bytes that the file must have; None = any number.

    Raises:
        ValueError: when the file cannot be opened, is not regular or has another size. `read`
            raises it when the file has become shorter or the system cannot read it.
    """

    def __init__(self, path: str | os.PathLike[str], size: int | None = None) -> None:
        self.path, self.short_path = os.fspath(path), cut(os.fspath(path))
        try:
            # O_NONBLOCK: opening a FIFO without a writer would wait.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(
                f"{self.short_path} must be a readable file: {error.strerror}"
            ) from None
        weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{self.short_path} must be a plain file: write its content into one")
        self.size = status.st_size
        if size not in (None, self.size):
            raise ValueError(
                f"{self.short_path} ({self.size} bytes) must have {size}, as when it was first "
                "opened: do not change the files of a run"
            )

    def read(self, start: int, count: int) -> bytes:
        """Return `count` bytes from byte `start` on."""
        parts: list[bytes] = []
        try:
            while count > 0 and (part := os.pread(self._descriptor, count, start)):
                parts.append(part)
                start, count = start + len(part), count - len(part)
        except OSError as error:
            raise ValueError(f"{self.short_path} must be readable: {error.strerror}") from None
        if count > 0:
            current_size = os.fstat(self._descriptor).st_size
            raise ValueError(
                f"{self.short_path} ({current_size} bytes) must have {self.size}, as when it was "
                "opened: do not change the files of a run"
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def blocks(self, start: int, stop: int, size: int) -> Iterator[bytes]:
        """Yield the bytes `start` .. `stop` in blocks of `size`."""
        for first in range(start, stop, size):
            yield self.read(first, min(size, stop - first))

    def __reduce__(self) -> tuple[object, ...]:
        return SizedFile, (self.path, self.size)  # another process opens the file itself
