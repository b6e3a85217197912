"""Files that are read by byte position, and errors that quote long names and texts."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import stat
import struct
import weakref
import zlib
from array import array
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np

from moecore.base.fields import check_arguments, quote
from moecore.base.progress import track
from moecore.packing.documents import Integers

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


CHUNK = 1 << 24  # bytes that are read together
PART = 1 << 28  # bytes that one process parses in one task
# All that `str.isspace` accepts, and marks without a width: byte order mark, word joiner, U+200B.
BLANKS = (
    "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007"
    "\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000\ufeff\u2060\u200b"
)


def strip_line(line: str) -> str:
    """Return a line without blanks at its ends; "" for a line that has no content."""
    return line.strip(BLANKS)


class JsonLines:
    """The objects of a JSONL file: `lines[i]` is the i-th object. Empty lines are not counted.

    Opening reads and parses the whole file. A line takes 8 bytes of memory. A line that holds only
    blanks, such as a carriage return, spaces or a byte order mark, is empty.

    Attributes:
        num_empty: lines without content.
        num_invalid: lines that are not documents and are skipped.
        fingerprint: a digest of the content of all documents in their order. Empty and skipped
            lines do not change it.

    Args:
        path: a regular file in UTF-8.
        field: a field that each object must have, with a string or a list; None = any object.
        skip_invalid: True leaves out the lines that are not such objects. False refuses the file.

    Raises:
        ValueError: when the file cannot be read, has no documents or has a broken line. Reading an
            item raises it when the file has changed since it was opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        field: str | None = None,
        *,
        skip_invalid: bool = False,
    ) -> None:
        check_arguments(JsonLines.__init__, locals())
        self._file = SizedFile(path)
        parts = _parse_file(self._file, field)
        counts = [len(part.starts) for part in parts]
        firsts = np.cumsum([0, *counts])[:-1].tolist()
        starts = [np.frombuffer(part.starts, np.int64) for part in parts]
        self._starts = np.concatenate([*starts, np.array([self._file.size])])
        empty = _concatenate([part.empty for part in parts], firsts)
        invalid = _concatenate([part.invalid for part in parts], firsts)
        self.num_empty, self.num_invalid = len(empty), len(invalid)
        if self.num_invalid and not skip_invalid:
            self._refuse(int(invalid[0]), field)
        skipped_lines = np.sort(np.concatenate([empty, invalid]))
        self._before = skipped_lines - np.arange(
            len(skipped_lines)
        )  # documents before each skipped line
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
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        line = self._line(index)
        start, stop = self._starts[line : line + 2].tolist()
        content = self._file.read(start, stop - start)
        try:
            document = _parse(content)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise ValueError(
                f"{self.location(index)} must be the JSON object that it was when the file was "
                "opened: do not change the files of a run"
            )
        return document

    def location(self, index: int) -> str:
        """Return the file and the line of a document, for error messages."""
        return f"{self._file.short_path} line {self._line(index) + 1}"

    def _line(self, index: int) -> int:
        return index + int(np.searchsorted(self._before, index, side="right"))

    def _refuse(self, line: int, field: str | None) -> None:
        start, stop = self._starts[line : line + 2].tolist()
        text = self._file.read(start, min(stop - start, 200)).decode(errors="replace")
        expected_form = "a JSON object" if field is None else f"a JSON object with {quote(field)}"
        raise ValueError(
            f"{self._file.short_path} line {line + 1} must be {expected_form}, not "
            f"{quote(strip_line(text))} (broken lines: {self.num_invalid}, empty lines: "
            f"{self.num_empty}): mend it, replace it by an empty line, which keeps the "
            "number of lines, or set skip_invalid"
        )


class _LineRange(NamedTuple):
    """The lines that begin in a range of bytes; line numbers count from the first of them."""

    starts: array[int]  # byte at which each line begins
    empty: array[int]  # numbers of lines without content
    invalid: array[int]  # numbers of lines that are not documents
    checksums: array[int]  # of the content of each document


def _concatenate(numbers: list[array[int]], firsts: list[int]) -> Integers:
    """Return the line numbers of all parts, counted from the start of the file."""
    pairs = zip(numbers, firsts, strict=True)
    return np.concatenate([np.frombuffer(of_part, np.int64) + first for of_part, first in pairs])


def _parse_file(file: SizedFile, field: str | None) -> list[_LineRange]:
    """Return the lines of a file, in parts."""
    tasks = [(file, start, field) for start in range(0, file.size, PART)] or [(file, 0, field)]
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    cores = len(os.sched_getaffinity(0)) // max(1, int(ranks) if ranks.isdecimal() else 1)
    processes, label = min(cores, len(tasks)), f"reading {file.short_path}"
    if processes < 2 or multiprocessing.current_process().daemon:  # a daemon has no children
        return [_parse_part(task) for task in track(tasks, label, unit="parts")]
    context = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            parts = pool.map(_parse_part, tasks)
            return list(track(parts, label, total=len(tasks), unit="parts"))
    except BrokenProcessPool:
        raise ValueError(
            f"{file.short_path} must be parsed by {processes} processes, one of which was killed: "
            "free memory of the host"
        ) from None


def _parse_part(task: tuple[SizedFile, int, str | None]) -> _LineRange:
    """Parse the lines that begin in the `PART` bytes from a position on."""
    file, first, field = task
    part = _LineRange(array("q"), array("q"), array("q"), array("I"))
    for number, (start, line) in enumerate(_lines(file, first, min(first + PART, file.size))):
        part.starts.append(start)
        try:
            content = _parse(line)
        except (ValueError, RecursionError):  # UTF-8, JSON, integers of more than 4,300 digits
            content = None
        if content is _EMPTY:
            part.empty.append(number)
        elif not isinstance(content, dict) or not (
            field is None or isinstance(content.get(field), str | list)
        ):
            part.invalid.append(number)
        else:
            part.checksums.append(zlib.crc32(line.rstrip(b"\r")))
    return part


def _lines(file: SizedFile, first: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yield start and bytes, without the line end, of the lines that begin in a range."""
    start, fragments = first, list[bytes]()  # of the line that is not complete
    is_inside = first > 0 and file.read(first - 1, 1) != b"\n"  # of a line of the part before
    for block in file.blocks(first, file.size, CHUNK):
        if start >= stop:
            return
        *ends, rest = block.split(b"\n")
        for end in ends:
            line = b"".join([*fragments, end])
            fragments.clear()
            if start >= stop:
                return
            if not is_inside:
                yield start, line
            start, is_inside = start + len(line) + 1, False
        fragments.append(rest)
    if start < stop and not is_inside and start < file.size:
        yield start, b"".join(fragments)


_EMPTY = object()


def _parse(line: bytes) -> Any:
    """Return the JSON value of a line, or `_EMPTY`."""
    text = strip_line(line.decode())
    return json.loads(text) if text else _EMPTY


MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
BLOCK = 1 << 20  # entries of the index that are checked together
SAMPLES, SAMPLE_BYTES = 256, 4096  # of PREFIX.bin, in the fingerprint


class MegatronDocuments:
    """The documents of an indexed dataset: `documents[i]` is an array of the ids of document i.

    Opening reads the whole index once. Documents are read by `os.pread`.

    Attributes:
        fingerprint: a digest of the index and of 1 MiB of PREFIX.bin, in 256 samples.

    Args:
        prefix: path of both files without .bin and .idx.

    Raises:
        ValueError: for files that are missing, too short or of another layout. Reading a document
            raises it when a file has become shorter.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        check_arguments(MegatronDocuments.__init__, locals())
        self._prefix = cut(os.fspath(prefix))
        self._index, self._ids = SizedFile(f"{prefix}.idx"), SizedFile(f"{prefix}.bin")
        header = self._index.read(0, min(HEADER.size, self._index.size))
        magic, version, code, sequences, borders = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
        if (magic, version) != (MAGIC, 1) or code not in DTYPES:
            raise ValueError(
                f"{self._prefix}.idx (magic {magic!r}, version {version}, dtype {code}) must be an "
                f"index of Megatron of version 1 with token ids ({MAGIC!r}, dtype one of "
                f"{list(DTYPES)}): make it with preprocess_data.py"
            )
        self._dtype = np.dtype(DTYPES[code])
        self._sizes = HEADER.size
        self._starts = self._sizes + 4 * sequences
        self._borders = self._starts + 8 * sequences
        end = self._borders + 8 * borders
        if self._index.size < end:
            raise ValueError(
                f"{self._prefix}.idx ({self._index.size} bytes) must have {end} for {sequences} "
                f"sequences and {borders - 1} documents: copy it again"
            )
        self._count: int = borders - 1
        digest = hashlib.blake2b(header, digest_size=8)
        self._check_borders(sequences, borders, digest)
        self._check_sequences(sequences, digest)
        for start in np.linspace(0, self._ids.size, SAMPLES, endpoint=False).astype(int).tolist():
            digest.update(self._ids.read(start, min(SAMPLE_BYTES, self._ids.size - start)))
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, document: int) -> np.ndarray[Any, Any]:
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {len(self)}")
        first, stop = self._entries(self._borders, "<i8", document, 2).tolist()
        sizes = self._entries(self._sizes, "<i4", first, stop - first).tolist()
        starts = self._entries(self._starts, "<i8", first, stop - first).tolist()
        parts = [
            np.frombuffer(self._ids.read(start, size * self._dtype.itemsize), self._dtype)
            for start, size in zip(starts, sizes, strict=True)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self._dtype), *parts])

    def location(self, document: int) -> str:
        """Return the file and the number of a document, for error messages."""
        return f"{self._prefix}.bin document {document}"

    def _entries(self, start: int, dtype: str, first: int, count: int) -> np.ndarray[Any, Any]:
        """Return entries of one of the three arrays of the index."""
        width = np.dtype(dtype).itemsize
        return np.frombuffer(self._index.read(start + first * width, count * width), dtype)

    def _check_borders(self, sequences: int, borders: int, digest: Any) -> None:
        """Raise unless documents ascend from sequence 0 to the last one."""
        last = 0
        for first, count in _blocks(borders):
            block = self._entries(self._borders, "<i8", first, count)
            digest.update(block)
            if (not first and block[0]) or block[0] < last or (block[1:] < block[:-1]).any():
                last = -1
                break
            last = int(block[-1])
        if not borders or last != sequences:
            raise ValueError(
                f"{self._prefix}.idx must have documents that ascend from sequence 0 to "
                f"{sequences}: make it anew"
            )

    def _check_sequences(self, sequences: int, digest: Any) -> None:
        """Raise unless each sequence lies inside of PREFIX.bin."""
        stop = 0
        for first, count in _blocks(sequences):
            sizes = self._entries(self._sizes, "<i4", first, count)
            starts = self._entries(self._starts, "<i8", first, count)
            digest.update(sizes)
            digest.update(starts)
            minimum = min(sizes.min(), starts.min())
            if minimum < 0:
                raise ValueError(
                    f"{self._prefix}.idx ({minimum}) must have sizes and starts of sequences >= 0: "
                    "make it anew"
                )
            # uint64: the largest start and the largest size together exceed int64.
            ends = starts.astype(np.uint64) + sizes.astype(np.uint64) * self._dtype.itemsize
            stop = max(stop, int(ends.max()))
        if self._ids.size < stop:
            raise ValueError(
                f"{self._prefix}.bin ({self._ids.size} bytes) must have {stop}, as "
                f"{self._prefix}.idx has it: copy it again"
            )


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    """Yield first entry and number of entries of each block of an array."""
    for first in range(0, count, BLOCK):
        yield first, min(BLOCK, count - first)
