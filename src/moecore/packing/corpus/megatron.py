"""MegatronDocuments: Megatron's indexed datasets, PREFIX.bin and PREFIX.idx.

The layout of PREFIX.idx is little-endian, with N sequences and n documents:

    9 bytes        "MMIDIDX" and two zero bytes
    uint64         version, 1
    uint8          dtype of the ids: a key of `DTYPES`
    uint64         N
    uint64         n + 1
    int32  [N]     ids of each sequence
    int64  [N]     the byte of PREFIX.bin at which the sequence begins
    int64  [n + 1] the sequence with which each document begins, and N

Modes of multimodal sequences follow, and are not read.

Source: megatron/core/datasets/indexed_dataset.py of Megatron-LM.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from moecore.base.fields import check_arguments
from moecore.packing.corpus.files import SizedFile, shorten_text

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
BLOCK = 1 << 20  # entries of the index that are checked together
SAMPLES, SAMPLE_BYTES = 256, 4096  # of PREFIX.bin, in the fingerprint


class MegatronDocuments:
    """The documents of a Megatron indexed dataset: `documents[i]` is an array of token ids.

    Opening reads PREFIX.idx once. Documents are read from PREFIX.bin when they are used.

    Attributes:
        fingerprint: a digest of the index and of 256 samples of PREFIX.bin, 1 MiB in all.

    Args:
        prefix: the path of both files without .bin and .idx.

    Raises:
        ValueError: if a file is missing, of another format or too short (also in a later read).
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        check_arguments(MegatronDocuments.__init__, locals())
        self._prefix = shorten_text(os.fspath(prefix))
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
        self._check_document_starts(sequences, borders, digest)
        self._check_sequences(sequences, digest)
        for start in np.linspace(0, self._ids.size, SAMPLES, endpoint=False).astype(int).tolist():
            digest.update(self._ids.read(start, min(SAMPLE_BYTES, self._ids.size - start)))
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, document: int) -> np.ndarray[Any, Any]:
        """Return the token ids of a document, the concatenated ids of its sequences."""
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {len(self)}")
        first, stop = self._read_index_entries(self._borders, "<i8", document, 2).tolist()
        sizes = self._read_index_entries(self._sizes, "<i4", first, stop - first).tolist()
        starts = self._read_index_entries(self._starts, "<i8", first, stop - first).tolist()
        parts = [
            np.frombuffer(self._ids.read(start, size * self._dtype.itemsize), self._dtype)
            for start, size in zip(starts, sizes, strict=True)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self._dtype), *parts])

    def location(self, document: int) -> str:
        """Return the file and the number of a document as text, for error messages."""
        return f"{self._prefix}.bin document {document}"

    def _read_index_entries(
        self, array_offset: int, dtype: str, first_entry: int, num_entries: int
    ) -> np.ndarray[Any, Any]:
        """Return entries, from `first_entry` on, of the array at a byte offset in PREFIX.idx."""
        width = np.dtype(dtype).itemsize
        return np.frombuffer(
            self._index.read(array_offset + first_entry * width, num_entries * width), dtype
        )

    def _check_document_starts(self, num_sequences: int, num_starts: int, digest: Any) -> None:
        """Raise a ValueError unless starts ascend from 0 to `num_sequences`; update `digest`."""
        last = 0
        for first, count in _split_into_blocks(num_starts):
            block = self._read_index_entries(self._borders, "<i8", first, count)
            digest.update(block)
            if (not first and block[0]) or block[0] < last or (block[1:] < block[:-1]).any():
                last = -1
                break
            last = int(block[-1])
        if not num_starts or last != num_sequences:
            relation = f"must have documents that ascend from sequence 0 to {num_sequences}"
            raise ValueError(f"{self._prefix}.idx {relation}: make it anew")

    def _check_sequences(self, num_sequences: int, digest: Any) -> None:
        """Raise a ValueError unless all `num_sequences` are inside PREFIX.bin; update `digest`."""
        stop = 0
        for first, count in _split_into_blocks(num_sequences):
            sizes = self._read_index_entries(self._sizes, "<i4", first, count)
            starts = self._read_index_entries(self._starts, "<i8", first, count)
            digest.update(sizes)
            digest.update(starts)
            minimum = min(sizes.min(), starts.min())
            if minimum < 0:
                relation = "must have sizes and starts of sequences >= 0: make it anew"
                raise ValueError(f"{self._prefix}.idx ({minimum}) {relation}")
            # uint64: the largest start and the largest size together exceed int64.
            ends = starts.astype(np.uint64) + sizes.astype(np.uint64) * self._dtype.itemsize
            stop = max(stop, int(ends.max()))
        if self._ids.size < stop:
            raise ValueError(
                f"{self._prefix}.bin ({self._ids.size} bytes) must have {stop}, as "
                f"{self._prefix}.idx has it: copy it again"
            )


def _split_into_blocks(num_entries: int) -> Iterator[tuple[int, int]]:
    """Yield (first entry, number of entries) for blocks of an array with `num_entries` entries."""
    for first in range(0, num_entries, BLOCK):
        yield first, min(BLOCK, num_entries - first)
