import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from moecore.packing import (
    CorpusError,
    CorpusLoader,
    CorpusOptions,
    CorpusSource,
    JsonLines,
    MegatronDocuments,
)
from moecore.packing.corpus.megatron import DTYPES

ROWS = CorpusOptions(row_tokens=64, partitions=1)
# Sequences [1 2 3], [258], [] and [7 8] of uint16; documents are sequences 0 .. 1, 2 and 3.
BIN = bytes.fromhex("0100 0200 0300 0201 0700 0800")
IDX = bytes.fromhex(
    "4d4d4944494458 0000"  # MMIDIDX
    "0100000000000000"  # version
    "08"  # uint16
    "0400000000000000 0400000000000000"  # sequences, documents + 1
    "03000000 01000000 00000000 02000000"
    "0000000000000000 0600000000000000 0800000000000000 0800000000000000"
    "0000000000000000 0200000000000000 0300000000000000 0400000000000000"
)


def written(folder: Path, *, idx: bytes = IDX, bin_: bytes = BIN) -> Path:
    (folder / "a.idx").write_bytes(idx)
    (folder / "a.bin").write_bytes(bin_)
    return folder / "a"


def indexed(documents: list[list[int]], dtype: int) -> tuple[bytes, bytes]:
    """An indexed dataset of one sequence per document: .idx and .bin."""
    sizes = np.array([len(document) for document in documents])
    starts = (sizes.cumsum() - sizes) * np.dtype(DTYPES[dtype]).itemsize
    idx = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, dtype, len(sizes), len(sizes) + 1)
    idx += sizes.astype("<i4").tobytes() + starts.astype("<i8").tobytes()
    idx += np.arange(len(sizes) + 1).astype("<i8").tobytes()
    return idx, np.concatenate(documents).astype(DTYPES[dtype]).tobytes()


def test_an_indexed_dataset_by_hand(tmp_path: Path) -> None:
    for documents in (
        (found := MegatronDocuments(written(tmp_path))),
        pickle.loads(pickle.dumps(found)),
    ):
        assert [document.tolist() for document in documents] == [[1, 2, 3, 258], [], [7, 8]]
    assert indexed([[1, 2], [3]], 8) == (
        bytes.fromhex(
            "4d4d4944494458 0000 0100000000000000 08 0200000000000000 0300000000000000"
            "02000000 01000000 0000000000000000 0400000000000000"
            "0000000000000000 0100000000000000 0200000000000000"
        ),
        bytes.fromhex("0100 0200 0300"),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_ids(dtype: int, tmp_path: Path) -> None:
    idx, bin_ = indexed([[5], [100, 0, 127]], dtype)
    documents = MegatronDocuments(written(tmp_path, idx=idx, bin_=bin_))
    assert [document.tolist() for document in documents] == [[5], [100, 0, 127]]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"idx": b""}, r"a\.idx \(magic b'\\x00.*must be an index of Megatron of version 1"),
        ({"idx": IDX.replace(b"\x01", b"\x02", 1)}, r"version 2, dtype 8\) must be an index"),
        ({"idx": IDX[:17] + b"\x07" + IDX[18:]}, r"dtype 7\) must be an index.*of \[1, 2, 3"),
        ({"idx": IDX[:-1]}, r"a\.idx \(113 bytes\) must have 114 for 4 sequences and 3 documents"),
        ({"idx": IDX[:-8] + bytes(8)}, r"a\.idx must have documents that ascend from sequence 0"),
        ({"idx": IDX[:90] + bytes([9]) + IDX[91:]}, r"a\.idx must have documents that ascend from"),
        (
            {"idx": IDX[:34] + b"\xff" * 4 + IDX[38:]},
            r"a\.idx \(-1\) must have sizes and starts of",
        ),
        ({"idx": IDX[:58] + b"\xfe" + b"\xff" * 7 + IDX[66:]}, r"a\.idx \(-2\) must have sizes"),
        ({"bin_": BIN[:-2]}, r"a\.bin \(10 bytes\) must have 12, as .*a\.idx has it: copy"),
    ],
)
def test_a_broken_indexed_dataset_is_one_line(files, message, tmp_path) -> None:
    with pytest.raises(ValueError, match=message):
        MegatronDocuments(written(tmp_path, **files))


@pytest.mark.parametrize("part", [1 << 28, 1, 17])
def test_lines_of_a_file(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moecore.packing.corpus.files.CHUNK", 7)
    monkeypatch.setattr("moecore.packing.corpus.files.PART", part)
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"text": "one"}\n\n{"text": "zwölf"}\r\n\n\n{"text": "last"}'.encode())
    for lines in (found := JsonLines(path)), pickle.loads(pickle.dumps(found)):
        assert [line["text"] for line in lines] == ["one", "zwölf", "last"]
    path.write_bytes(path.read_bytes() + b"\n")
    assert len(JsonLines(path)) == 3


@pytest.mark.parametrize(
    "blank",
    ["", "\r", "   ", "\t \r", "\ufeff", "\x0b\x0c", "\x85", "\xa0", "\u2028", "\u200b\u3000"],
)
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_lines_without_content_are_left_out(blank: str, end: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    text = (
        f'\ufeff{{"text": "a\u2028\x85"}}\r\n{blank}\n  {{"text": "b"}} \x85\n{blank}\n{blank}{end}'
    )
    path.write_bytes(text.encode())
    lines = JsonLines(path)
    assert [line["text"] for line in lines] == ["a\u2028\x85", "b"]
    assert lines.num_empty == 2 + (blank + end != "") and lines.num_invalid == 0
    assert lines.location(1) == f"{path} line 3"


BROKEN = [b'{"text": ', b"[1]", b"\xff", b"[" * 3000, b"null", b"9" * 5000, b'{"text": "a"} {}']


@pytest.mark.parametrize("line", [*BROKEN, b'{"body": "a"}', b'{"text": null}'])
@pytest.mark.parametrize("part", [1 << 28, 7])
def test_a_broken_line_is_found_when_the_file_is_opened(line, part, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("moecore.packing.corpus.files.PART", part)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": [2]}\n')
    message = r"a\.jsonl line 3 must be a JSON object with 'text', "
    with pytest.raises(ValueError, match=message) as e:
        JsonLines(path, "text")
    assert "(broken lines: 1, empty lines: 1): mend it, replace it by an empty" in str(e.value)
    assert "\n" not in str(e.value) and len(str(e.value)) < 500
    lines = JsonLines(path, "text", skip_invalid=True)
    assert list(lines) == [{"text": "one"}, {"text": [2]}] and lines.num_invalid == 1
    assert lines.location(1) == f"{path} line 4"
    path.write_bytes(b'{"text": "one"}\n\n\n{"text": [2]}\n')  # as the error advises
    assert JsonLines(path).fingerprint == lines.fingerprint


def test_a_fingerprint_is_of_the_documents_and_their_order(tmp_path: Path) -> None:
    path, found = tmp_path / "a.jsonl", set()
    for text in ('{"a": 1}\n{"a": 2}', '{"a": 2}\n{"a": 1}', '{"a": 1}\n{"a": 3}', '{"a": 1}'):
        for end in ("", "\n", "\r\n\r\n"):
            path.write_text(text + end, newline="")
            found.add(JsonLines(path).fingerprint)
    assert len(found) == 4
    found = set()
    for idx, bin_ in (
        (IDX, BIN),
        (IDX, BIN[::-1]),
        (IDX[:34] + bytes.fromhex("02000000 02000000") + IDX[42:], BIN),
    ):
        found.add(MegatronDocuments(written(tmp_path, idx=idx, bin_=bin_)).fingerprint)
    assert len(found) == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_shrinks_while_it_is_read_is_one_line(workers: int, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "ab"}\n' * 9)
    prefix = written(tmp_path)
    for documents, file in (
        (JsonLines(path), path),
        (MegatronDocuments(prefix), tmp_path / "a.bin"),
        (MegatronDocuments(prefix), tmp_path / "a.idx"),
    ):
        source = CorpusSource(name="web", documents=documents, tokenize=lambda d: [len(d)] * 99)
        content, loader = file.read_bytes(), CorpusLoader([source], ROWS, workers=workers)
        os.truncate(file, 1)
        message = rf"^web, .*: .*{file.name} \(1 bytes\) must have {len(content)}, as when it was"
        with pytest.raises(CorpusError, match=message):
            [next(loader) for _ in range(9)]
        file.write_bytes(content)


def test_a_file_without_lines_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n\n")
    for path, message in (
        (tmp_path / "a.jsonl", "must have at least one line"),
        (tmp_path / "b.jsonl", "must be a readable file: No such"),
        (tmp_path, "must be a plain file"),
    ):
        with pytest.raises(ValueError, match=message):
            JsonLines(path)
    with pytest.raises(ValueError, match=r"none\.idx must be a readable file: No such file"):
        MegatronDocuments(tmp_path / "none")
