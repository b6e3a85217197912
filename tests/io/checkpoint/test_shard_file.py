import hashlib
import os
import random
import threading
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moecore.io.checkpoint import shard_file
from moecore.io.checkpoint import shard_file as sf
from moecore.io.checkpoint.manifest import DTYPE_NAMES


@pytest.fixture(params=[256, 2**24], ids=["small-chunks", "real-chunks"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """With chunks of 256 bytes all ways of splitting are taken by small tensors."""
    monkeypatch.setattr(shard_file, "CHUNK_BYTES", request.param)
    monkeypatch.setattr(shard_file, "DIRECT_BYTES", request.param // 16)
    monkeypatch.setattr(shard_file, "RUN_BYTES", request.param // 64)
    return request.param


def write(path: Path, tensors: dict[str, Tensor]) -> shard_file.StoredFile:
    layout = sf.compute_layout({name: (t.dtype, t.shape) for name, t in tensors.items()})
    with sf.ShardWriter(path, layout.header, pinned=False, meter=sf.Meter()) as file:
        for name in layout.begins:
            file.add(tensors[name])
        stored = file.finish()
    assert stored.size == layout.size == path.stat().st_size
    return stored


def samples() -> dict[str, Tensor]:
    torch.manual_seed(0)
    tensors = {str(dtype): torch.randn(11, 7).to(dtype) for dtype in floats()}
    tensors |= {"big": torch.randn(40, 3, 9), "scalar": torch.tensor(3), "one": torch.ones(1)}
    tensors |= {"strided": torch.randn(30, 20).t(), "rows": torch.randn(20, 64)[:, ::3]}
    tensors |= {"middle": torch.randn(4, 30, 8)[:, 3:17], "bool": torch.rand(9) > 0.5}
    tensors["expanded"] = torch.randn(1, 50).expand(6, 50)
    return tensors


def floats() -> Iterator[torch.dtype]:
    return (d for d in DTYPE_NAMES if d.is_floating_point and d != torch.float8_e8m0fnu)


def test_the_library_reads_what_is_written(tmp_path: Path, chunk: int) -> None:
    tensors = samples()
    stored = write(tmp_path / "file", tensors)
    assert stored.sha256 == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].float(), tensor.float()), name


def test_bytes_are_those_of_the_library(tmp_path: Path) -> None:
    """Other tools hash and compare such files; every dtype lies in the same place."""
    for dtype in DTYPE_NAMES:
        tensor = torch.arange(12, dtype=torch.uint8).view(-1)[: 12 - 12 % dtype.itemsize]
        raw = torch.cat([tensor] * 8).view(dtype) if dtype != torch.bool else torch.ones(8) > 0
        write(tmp_path / "ours", {"x": raw})
        save_file({"x": raw}, tmp_path / "theirs", metadata={"format": "pt"})
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes(), dtype
        (tmp_path / "ours").unlink()


def test_pieces_are_the_tensor_in_order(chunk: int) -> None:
    for name, tensor in samples().items():
        parts = list(sf.iterate_chunks(tensor))
        assert all(part.nbytes <= chunk for part in parts), name
        flat = torch.cat([part.reshape(-1).float() for part in parts])
        assert torch.equal(flat, tensor.reshape(-1).float()), name


@pytest.mark.parametrize("shape", [(), (13,), (9, 14), (5, 6, 7), (3, 4, 5, 6), (64, 300)])
def test_slices(tmp_path: Path, chunk: int, shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape)
    write(tmp_path / "file", {"a": torch.zeros(5, dtype=torch.float64), "x": whole})
    layout = sf.compute_layout({"a": (torch.float64, (5,)), "x": (torch.float32, shape)})
    dice = random.Random(len(shape))
    buffer = torch.empty(shard_file.CHUNK_BYTES, dtype=torch.uint8)
    with sf.ShardReader(tmp_path / "file", layout.begins, buffer, sf.Meter()) as file:
        for _ in range(60):
            cuts = [sorted(dice.choices(range(n + 1), k=2)) for n in shape]
            offsets, sizes = [a for a, _ in cuts], [b - a for a, b in cuts]
            wanted = whole[tuple(slice(a, b) for a, b in cuts)]
            for out in targets(sizes):
                file.read("x", torch.float32, shape, offsets, out)
                assert torch.equal(out, wanted.to(out.dtype))


def targets(sizes: list[int]) -> Iterator[Tensor]:
    """Contiguous, strided and of another dtype; NaN where nothing is written."""
    yield torch.full(sizes, float("nan"))
    if sizes:
        yield torch.full([*sizes[:-1], sizes[-1] * 2], float("nan"))[..., ::2]
    yield torch.full(sizes, float("nan"), dtype=torch.float64)


def test_only_the_slice_is_read(tmp_path: Path) -> None:
    """Half of the rows: half of the bytes. A narrow block of columns: not much more than it."""
    whole = torch.randn(64, 2**17)
    write(tmp_path / "file", {"x": whole})
    layout = sf.compute_layout({"x": (torch.float32, whole.shape)})
    buffer = torch.empty(shard_file.CHUNK_BYTES, dtype=torch.uint8)
    for rows, columns in ((32, 2**17), (64, 2**16), (64, 2**15)):
        read: list[int] = []
        with sf.ShardReader(tmp_path / "file", layout.begins, buffer, sf.Meter()) as file:
            fill = file._read_bytes
            file._read_bytes = lambda t, *a, f=fill, r=read: (r.append(len(t)), f(t, *a))[1]  # type: ignore
            out = torch.empty(rows, columns)
            file.read("x", torch.float32, whole.shape, (0, 0), out)
        assert torch.equal(out, whole[:rows, :columns])
        runs_are_short = columns * 4 < shard_file.RUN_BYTES
        assert sum(read) <= out.nbytes * (4 if runs_are_short else 2)
        assert runs_are_short or columns == 2**16 or sum(read) == out.nbytes


def test_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    write(tmp_path / "file", {"x": torch.ones(1000)})
    layout = sf.compute_layout({"x": (torch.float32, (1000,))})
    buffer = torch.empty(1 << 16, dtype=torch.uint8)
    with sf.ShardReader(tmp_path / "file", layout.begins, buffer, sf.Meter()) as file:
        (tmp_path / "file").write_bytes(b"short")
        with pytest.raises(OSError, match="it was cut meanwhile"):
            file.read("x", torch.float32, (1000,), (0,), torch.empty(1000))


def test_a_failed_header_leaves_nothing_open(tmp_path, monkeypatch):
    def no_space(*_: object) -> int:
        raise OSError(28, "No space left on device")

    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_space)
        with pytest.raises(OSError, match="No space left"):
            shard_file.ShardWriter(tmp_path / "x", b"head", pinned=False, meter=sf.Meter())
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_wider_dtypes_come_first() -> None:
    kinds = {"b": torch.uint8, "a": torch.uint8, "z": torch.float64, "c": torch.bfloat16}
    layout = sf.compute_layout({name: (dtype, (3,)) for name, dtype in kinds.items()})
    assert list(layout.begins) == ["z", "c", "a", "b"]
    assert len(layout.header) % 8 == 0 and layout.begins["z"] == len(layout.header)
    assert [b - a for a, b in pairwise(layout.begins.values())] == [24, 6, 3]


def test_memory_of_a_save_is_one_chunk(tmp_path: Path) -> None:
    """Torch's memory does not show in tracemalloc; numpy's and Python's copies would."""
    tensor = torch.zeros(24, 2**19).t()  # 48 MB that are not contiguous
    tracemalloc.start()
    write(tmp_path / "file", {"x": tensor})
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert max(part.nbytes for part in sf.iterate_chunks(tensor)) <= shard_file.CHUNK_BYTES
