"""Megatron's indexed datasets as they are: documents of token ids in PREFIX.bin and PREFIX.idx.

The index, little-endian, without gaps (N sequences, n documents):

    9 bytes        "MMIDIDX" and two zero bytes
    uint64         version, 1
    uint8          dtype of the ids: a key of `DTYPES`
    uint64         N
    uint64         n + 1
    int32  [N]     ids of each sequence
    int64  [N]     the byte of PREFIX.bin at which it begins
    int64  [n + 1] the sequence with which each document begins, and N

What follows (modes of multimodal sequences) is not read. Both files are mapped into memory.

Source: megatron/core/datasets/indexed_dataset.py of Megatron-LM.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from moecore.base.fields import check_arguments

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats


class MegatronDocuments:
    """The documents of an indexed dataset: `documents[i]` is an array of the ids of document i.

    Args:
        prefix: path of both files without .bin and .idx.

    Raises:
        ValueError: for files that are missing, too short or of another layout.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        check_arguments(MegatronDocuments.__init__, locals())
        self._prefix = prefix
        index, self._ids = _mapped(f"{prefix}.idx"), _mapped(f"{prefix}.bin")
        magic, version, code, sequences, borders = HEADER.unpack(
            index[: HEADER.size].tobytes().ljust(HEADER.size, b"\0")
        )
        if (magic, version) != (MAGIC, 1) or code not in DTYPES:
            raise ValueError(
                f"{prefix}.idx (magic {magic!r}, version {version}, dtype {code}) must be an index "
                f"of Megatron of version 1 with token ids ({MAGIC!r}, dtype one of "
                f"{list(DTYPES)}): make it with preprocess_data.py"
            )
        self._dtype = np.dtype(DTYPES[code])
        ends = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences, 8 * borders]).tolist()
        if len(index) < ends[-1]:
            raise ValueError(
                f"{prefix}.idx ({len(index)} bytes) must have {ends[-1]} for {sequences} sequences "
                f"and {borders - 1} documents: copy it again"
            )
        self._sizes = np.frombuffer(index, "<i4", sequences, ends[0])
        self._starts = np.frombuffer(index, "<i8", sequences, ends[1])
        self._borders = np.frombuffer(index, "<i8", borders, ends[2])
        is_whole = borders > 0 and (self._borders[0], self._borders[-1]) == (0, sequences)
        if not is_whole or (self._borders[1:] < self._borders[:-1]).any():
            raise ValueError(
                f"{prefix}.idx must have documents that ascend from sequence 0 to {sequences}: "
                "make it anew"
            )
        least = min(self._sizes.min(initial=0), self._starts.min(initial=0))
        if least < 0:
            raise ValueError(
                f"{prefix}.idx ({least}) must have sizes and starts of sequences >= 0: make it anew"
            )
        sizes = self._sizes.astype(np.int64) * self._dtype.itemsize
        stop = int((self._starts + sizes).max(initial=0))
        if len(self._ids) < stop:
            raise ValueError(
                f"{prefix}.bin ({len(self._ids)} bytes) must have {stop}, as {prefix}.idx has it: "
                "copy it again"
            )

    def __len__(self) -> int:
        return len(self._borders) - 1

    def __getitem__(self, document: int) -> np.ndarray[Any, Any]:
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {len(self)}")
        first, stop = self._borders[document : document + 2].tolist()
        parts = [self._sequence(number) for number in range(first, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self._dtype), *parts])

    def __reduce__(self) -> tuple[Any, ...]:
        return MegatronDocuments, (self._prefix,)  # a process maps the files itself

    def _sequence(self, number: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(
            self._ids, self._dtype, int(self._sizes[number]), int(self._starts[number])
        )


def _mapped(path: str) -> np.ndarray[Any, Any]:
    """Return the bytes of a file."""
    try:
        if not Path(path).stat().st_size:
            return np.empty(0, np.uint8)
        return np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise ValueError(
            f"{path} must be a readable file: {error.strerror}: give the prefix of a .bin and a "
            ".idx"
        ) from None
