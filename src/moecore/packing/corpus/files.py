"""JsonLines: a JSONL file that is read by line, with line offsets in memory.

Each line of a JSONL file is parsed once when the file is opened, so that a broken line is found
before the first step. Parsing takes about 10 seconds per gigabyte and core. The cores of this host,
divided by its ranks, parse files above `PART` bytes in parallel.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import stat
import weakref
import zlib
from array import array
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np

from moecore.base.fields import check_arguments, quote
from moecore.base.progress import track_progress
from moecore.packing.documents import Integers

MAX_CHARS = 300  # characters of a path, a name or another library's error in a message


def shorten_text(text: object) -> str:
    """Return a text as one line of at most `MAX_CHARS` characters; "..." replaces the middle."""
    line = " ".join(str(text).split())
    half = (MAX_CHARS - 3) // 2
    return line if len(line) <= MAX_CHARS else f"{line[:half]}...{line[-half:]}"


class SizedFile:
    """A regular file, read with `os.pread`: a memory map of a file that shrinks raises SIGBUS.

    `size` is the number of bytes that the file must have; None = any number. A ValueError is raised
    if the file cannot be opened or read, is not regular, or has become shorter.
    """

    def __init__(self, path: str | os.PathLike[str], size: int | None = None) -> None:
        self.path, self.short_path = os.fspath(path), shorten_text(os.fspath(path))
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

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return the bytes [offset, offset + num_bytes); ValueError if the file is shorter."""
        parts: list[bytes] = []
        try:
            while num_bytes > 0 and (part := os.pread(self._descriptor, num_bytes, offset)):
                parts.append(part)
                offset, num_bytes = offset + len(part), num_bytes - len(part)
        except OSError as error:
            raise ValueError(f"{self.short_path} must be readable: {error.strerror}") from None
        if num_bytes > 0:
            current_size = os.fstat(self._descriptor).st_size
            raise ValueError(
                f"{self.short_path} ({current_size} bytes) must have {self.size}, as when it was "
                "opened: do not change the files of a run"
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        return SizedFile, (self.path, self.size)  # another process opens the file itself


CHUNK = 1 << 24  # bytes of a JSONL file that are read together
PART = 1 << 28  # bytes that one process parses in one task
# What `str.isspace` accepts, and zero-width characters: byte order mark, word joiner, U+200B.
BLANKS = (
    "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007"
    "\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000\ufeff\u2060\u200b"
)


class JsonLines:
    """The objects of a JSONL file in UTF-8: `lines[i]` is the i-th object, empty lines excluded.

    Opening a file parses all lines, and stores 8 bytes per line. A line of only blanks, such as a
    carriage return, spaces or a byte order mark, is empty.

    Attributes:
        num_empty: the number of empty lines.
        num_invalid: the number of skipped lines that are not documents.
        fingerprint: a digest of the contents of all documents in their order.

    Args:
        path: a regular file.
        field: a field that each object must have, with a string or a list; None = any object.
        skip_invalid: True = skip lines that are not such objects; False = raise an error.

    Raises:
        ValueError: if the file cannot be read, has no document or (without `skip_invalid`) an
            invalid line, or has changed when an item is read.
    """

    def __init__(
        self, path: str | os.PathLike[str], field: str | None = None, *, skip_invalid: bool = False
    ) -> None:
        check_arguments(JsonLines.__init__, locals())
        self._file = SizedFile(path)
        parts = _parse_file(self._file, field)
        counts = [len(part.starts) for part in parts]
        firsts = np.cumsum([0, *counts])[:-1].tolist()
        starts = [np.frombuffer(part.starts, np.int64) for part in parts]
        self._starts = np.concatenate([*starts, np.array([self._file.size])])
        empty = _concatenate_line_numbers([part.empty for part in parts], firsts)
        invalid = _concatenate_line_numbers([part.invalid for part in parts], firsts)
        self.num_empty, self.num_invalid = len(empty), len(invalid)
        if self.num_invalid and not skip_invalid:
            line = int(invalid[0])
            start, stop = self._starts[line : line + 2].tolist()
            text = self._file.read(start, min(stop - start, 200)).decode(errors="replace")
            form = "a JSON object" if field is None else f"a JSON object with {quote(field)}"
            raise ValueError(
                f"{self._file.short_path} line {line + 1} must be {form}, not "
                f"{quote(text.strip(BLANKS))} (broken lines: {self.num_invalid}, empty lines: "
                f"{self.num_empty}): mend it, replace it by an empty line, which keeps the "
                "number of lines, or set another field, or skip_invalid"
            )
        skipped_lines = np.sort(np.concatenate([empty, invalid]))
        # The number of documents before each skipped line.
        self._documents_before = skipped_lines - np.arange(len(skipped_lines))
        self._count = sum(counts) - len(skipped_lines)
        if not self._count:
            raise ValueError(
                f"{self._file.short_path} ({self.num_empty} empty and {self.num_invalid} broken "
                "lines) must have at least one line that is a document: leave it out"
            )
        digest = hashlib.sha256(b"".join(part.checksums for part in parts))
        self.fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a document, a JSON object; skipped lines have no index."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        line = self._find_line_idx(index)
        start, stop = self._starts[line : line + 2].tolist()
        document = _parse_line(self._file.read(start, stop - start))
        if not isinstance(document, dict):
            raise ValueError(
                f"{self.location(index)} must be the JSON object that it was when the file was "
                "opened: do not change the files of a run"
            )
        return document

    def location(self, index: int) -> str:
        """Return the file and the line of a document as text, for error messages."""
        return f"{self._file.short_path} line {self._find_line_idx(index) + 1}"

    def _find_line_idx(self, document_idx: int) -> int:
        """Return the line number, from 0, of a document. Some lines have no document."""
        num_gaps = np.searchsorted(self._documents_before, document_idx, side="right")
        return document_idx + int(num_gaps)


class _LineRange(NamedTuple):
    """The lines that begin in a range of bytes; the range's first line has number 0."""

    starts: array[int]  # the byte at which each line begins
    empty: array[int]  # numbers of empty lines
    invalid: array[int]  # numbers of lines that are not documents
    checksums: array[int]  # CRC-32 of each document's line


def _concatenate_line_numbers(
    range_line_numbers: list[array[int]], range_first_lines: list[int]
) -> Integers:
    """Return int64 line numbers in the file, from numbers in ranges with these first lines."""
    pairs = zip(range_line_numbers, range_first_lines, strict=True)
    return np.concatenate([np.frombuffer(part, np.int64) + first for part, first in pairs])


def _parse_file(file: SizedFile, field: str | None) -> list[_LineRange]:
    """Parse ranges of `PART` bytes of a file in processes; return each range's lines, in order."""
    tasks = [(file, start, field) for start in range(0, file.size, PART)] or [(file, 0, field)]
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    cores = len(os.sched_getaffinity(0)) // max(1, int(ranks) if ranks.isdecimal() else 1)
    processes, label = min(cores, len(tasks)), f"reading {file.short_path}"
    if processes < 2 or multiprocessing.current_process().daemon:  # a daemon has no children
        return [_parse_file_part(task) for task in track_progress(tasks, label, unit="parts")]
    context = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            parts = pool.map(_parse_file_part, tasks)
            return list(track_progress(parts, label, total=len(tasks), unit="parts"))
    except BrokenProcessPool:
        raise ValueError(
            f"{file.short_path} must be parsed by {processes} processes, one of which was killed: "
            "free memory of the host"
        ) from None


def _parse_file_part(task: tuple[SizedFile, int, str | None]) -> _LineRange:
    """Return the lines that begin in the `PART` bytes of a task (file, first byte, field)."""
    file, first, field = task
    part = _LineRange(array("q"), array("q"), array("q"), array("I"))
    for i, (start, line) in enumerate(_iterate_lines(file, first, min(first + PART, file.size))):
        part.starts.append(start)
        content = _parse_line(line)
        if content is _EMPTY:
            part.empty.append(i)
        elif isinstance(content, dict) and (
            field is None or isinstance(content.get(field), str | list)
        ):
            part.checksums.append(zlib.crc32(line.rstrip(b"\r")))
        else:
            part.invalid.append(i)
    return part


def _iterate_lines(file: SizedFile, first_byte: int, stop_byte: int) -> Iterator[tuple[int, bytes]]:
    """Yield (first byte, bytes without line end) of lines that begin in [first_byte, stop_byte)."""
    start, fragments = first_byte, list[bytes]()  # the incomplete line
    is_inside = first_byte > 0 and file.read(first_byte - 1, 1) != b"\n"  # the previous part's line
    for position in range(first_byte, file.size, CHUNK):
        if start >= stop_byte:
            return
        *ends, rest = file.read(position, min(CHUNK, file.size - position)).split(b"\n")
        for end in ends:
            line = b"".join([*fragments, end])
            fragments.clear()
            if start >= stop_byte:
                return
            if not is_inside:
                yield start, line
            start, is_inside = start + len(line) + 1, False
        fragments.append(rest)
    if start < stop_byte and not is_inside and start < file.size:
        yield start, b"".join(fragments)


_EMPTY = object()


def _parse_line(line: bytes) -> Any:
    """Return the JSON value of a line; `_EMPTY` for a line of blanks, None if invalid."""
    try:
        text = line.decode().strip(BLANKS)
        return json.loads(text) if text else _EMPTY
    except (ValueError, RecursionError):  # UTF-8, JSON, integers of more than 4,300 digits
        return None
