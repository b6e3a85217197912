"""Documents of a JSONL file, read by line: where lines begin lies in memory, the file does not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from moecore.base.fields import check_arguments

CHUNK = 1 << 26  # bytes that are searched for line ends at a time


class JsonLines:
    """The objects of a JSONL file: `lines[i]` is that of line i, empty lines left out.

    Eight bytes of memory per line, of a read through the file when it is made.

    Args:
        path: a plain file in UTF-8.

    Raises:
        ValueError: for no readable file, or one without lines; when an item is read, for a line
            that is no JSON object.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_arguments(JsonLines.__init__, locals())
        self._path = Path(path)
        try:
            if not self._path.is_file() and self._path.exists():
                raise ValueError(f"{path} must be a plain file: write its lines into one")
            size = self._path.stat().st_size
            self._bytes: Any = np.memmap(path, np.uint8, mode="r") if size else b""
        except OSError as error:
            raise ValueError(f"{path} must be a readable file: {error.strerror}") from None
        ends = [
            first + np.flatnonzero(self._bytes[first : first + CHUNK] == ord("\n"))
            for first in range(0, size, CHUNK)
        ]
        starts = np.concatenate([np.zeros(1, np.int64), *(end + 1 for end in ends)])
        is_empty = np.diff(starts, append=size + 1) == 1
        self._starts = starts[~is_empty]
        if not len(self._starts):
            raise ValueError(f"{path} (empty) must have at least one line: leave it out")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"line {index} of {len(self)}")
        start = int(self._starts[index])
        stop = int(self._starts[index + 1]) if index + 1 < len(self) else len(self._bytes)
        try:
            found = json.loads(self._bytes[start:stop].tobytes())
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            number = 1 + int(np.count_nonzero(self._bytes[:start] == ord("\n")))
            raise ValueError(f"{self._path} line {number} must be a JSON object: mend or remove it")
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonLines, (self._path,)  # a process maps the file itself
