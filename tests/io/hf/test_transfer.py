import os
import pickle
import random
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecore import ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.io import receive_weights, send_weights, share_bucket, stream_weights
from moecore.io.hf import transfer
from moecore.io.hf.buckets import WeightBucket, WeightMeta
from moecore.models import Decoder, preset
from tests.helpers.ranks import forks

CPU = torch.device("cpu")
END = (torch.tensor([2]), torch.tensor([91, 93], dtype=torch.uint8))  # "[]"


def group(store: Any, rank: int, seconds: float = 30) -> Any:
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=seconds))


def in_thread(action: Callable[[Any], None], store: Any) -> threading.Thread:
    thread = threading.Thread(target=action, args=(store,))
    thread.start()
    return thread


class Training:
    """A tiny decoder, a stream of it, and steps."""

    def __init__(self) -> None:
        self.model = Decoder(preset("tiny-deepseek-v3"))
        self.model.init_weights(seed=3)
        parallelize_moe(self.model, build_meshes(ParallelConfig(), "cpu"))
        self.stream = stream_weights(self.model, bucket_bytes=100_000)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = TrainStep(self.model, optimizer)

    def train(self) -> bool:
        tokens = torch.arange(24).view(2, 12)
        with self.step.micro_batch():
            self.model(tokens[:, :-1], tokens[:, 1:]).backward()
        return bool(self.step.finish().norm.finite)


def test_an_engine_gets_the_bits_and_then_what_changed(no_group_left: None) -> None:
    training, store = Training(), dist.HashStore()
    passes: list[dict[str, Tensor]] = []

    def engine(store: Any) -> None:
        mine = group(store, 1)
        for _ in range(2):
            passes.append({n: t.clone() for n, t in receive_weights(mine, CPU)})

    thread, ours = in_thread(engine, store), group(store, 0)
    want = dict(training.stream)
    send_weights(training.stream, ours)
    with torch.no_grad():
        training.model.get_parameter("model.norm.weight").add_(1)
    send_weights(training.stream.changed_since(training.stream.version), ours)
    thread.join()
    assert passes[0].keys() == want.keys()
    assert all(torch.equal(passes[0][name], tensor) for name, tensor in want.items())
    assert list(passes[1]) == ["model.norm.weight"]
    assert torch.equal(passes[1]["model.norm.weight"], want["model.norm.weight"] + 1)


@pytest.mark.parametrize("fault", ["gone", "late"])
def test_a_receiver_that_fails_ends_the_pass_alone(no_group_left: None, fault: str) -> None:
    training, store = Training(), dist.HashStore()
    released = threading.Event()

    def engine(store: Any) -> None:
        mine = group(store, 1)
        next(receive_weights(mine, CPU))
        if fault == "late":
            released.wait()

    thread, ours = in_thread(engine, store), group(store, 0, seconds=1)
    try:
        # More than a socket takes: what it takes is sent, whoever reads it.
        with pytest.raises(RuntimeError, match=r"ranks \(2\) of a group for weights must") as error:
            for _ in range(100):
                send_weights(training.stream, ours)
    finally:
        released.set()
        thread.join()
    assert "\n" not in str(error.value) and training.train()
    assert dict(training.stream)  # a new pass may begin


@pytest.mark.parametrize("version", ["x", None, 3, torch.zeros(2), {}])
def test_what_is_no_version_is_one_line(no_group_left: None, version: Any) -> None:
    with pytest.raises(ValueError, match=r"^version \(.*\) must be a WeightsVersion: pass a Weig"):
        Training().stream.changed_since(version)


class Replay:
    """A group whose rank 0 sends these tensors, one after the other."""

    def __init__(self, *sent: Tensor) -> None:
        self.sent = list(sent)

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        sent = self.sent.pop(0)
        assert sent.shape == tensor.shape and sent.dtype == tensor.dtype
        tensor.copy_(sent)
        return self

    def wait(self) -> None:
        pass

    def size(self) -> int:
        return 2


def received(header: bytes, *more: Tensor, size: int | None = None) -> list[tuple[str, Tensor]]:
    text = torch.frombuffer(bytearray(header or b" "), dtype=torch.uint8)
    number = torch.tensor([len(header) if size is None else size])
    return list(receive_weights(Replay(number, text, *more), CPU))


ENTRY = '["x", "float32", [2]]'
HEADERS = [
    b"", b"\xff", b"{", b"{}", b"3", b"null", b'"x"', b"[" * 5000, b"[3]", b"[[]]", b"[{}]",
    b'["abc"]', b'[["x", "float32"]]', b'[["x", "float32", [2], 1]]', b'[[1, "float32", [2]]]',
    b'[["x", 1, [2]]]', b'[["x", [], [2]]]', b'[["x", "float32", {}]]', b'[["x", "float32", 2]]',
    b'[["x", "load", [2]]]', b'[["x", "__class__", [2]]]', b'[["x", "torch.float32", [2]]]',
    b'[["x", "complex64", [2]]]', b'[["x", "float32", [-1]]]', b'[["x", "float32", [2.0]]]',
    b'[["x", "float32", [true]]]', b'[["x", "float32", ["2"]]]', b'[["x", "float32", [null]]]',
    b'[["x", "float32", [1e400]]]', b'[["x", "float32", [NaN]]]',
    b'[["x", "float32", [99999999999999999999]]]', b'[["x", "float32", [1099511627776]]]',
    b'[["x", "float32", [1048576, 1048576]]]', b'[["x", "float32", [0, 1048576, 1048576]]]',
    f'[["x", "float32", {[1] * 65}]]'.encode(), f"[{ENTRY}, {ENTRY}]".encode(),
    b'[["' + b"x" * 10**6 + b'\\n", "load", []]]',
]  # fmt: skip


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_a_header_that_nobody_sends_is_one_line(header: bytes) -> None:
    with pytest.raises(ValueError, match=r"^the header of a bucket of weights must be") as info:
        received(header)
    assert "\n" not in str(info.value) and len(str(info.value)) < 400


@pytest.mark.parametrize("size", [-1, -(2**63), 2**63 - 1, 2**27])
def test_a_header_of_another_size_is_one_line(size: int) -> None:
    with pytest.raises(ValueError, match=r"its size \(-?\d+\) must be 1 to 67108864 bytes: call"):
        received(f"[{ENTRY}]".encode(), size=size)


def test_spoiled_headers_are_one_line_or_a_bucket() -> None:
    generator = random.Random(3)
    whole = f'[{ENTRY}, ["model.y\\u00e9", "bfloat16", [3, 4]], ["", "bool", []]]'.encode()
    assert [name for name, _ in received(whole, torch.zeros(64, dtype=torch.uint8), *END)] == [
        "x",
        "model.y\u00e9",
        "",
    ]
    for _ in range(2000):
        spoiled = bytearray(whole)
        for _ in range(generator.randint(1, 3)):
            place = generator.randrange(len(spoiled))
            spoiled[place : place + generator.randint(0, 2)] = generator.choice(
                [b"", b"9", b"-", b"[", b"]", b'"', b",", b"\xff", b"e", b" "]
            )
        try:
            transfer._parse_metas(bytes(spoiled))
        except ValueError as error:
            assert str(error).startswith("the header of a bucket") and "\n" not in str(error)


def test_a_bucket_without_memory_is_one_line() -> None:
    header = b'[["x", "float32", [274877906000]]]'  # 1 TB
    with patch.object(torch, "empty", wraps=torch.empty) as empty:
        empty.side_effect = [
            torch.empty(len(header), dtype=torch.uint8),
            RuntimeError("no\nmemory"),
        ]
        message = r"\(1099511624000 bytes\) must fit in the m.* cpu: "
        with pytest.raises(RuntimeError, match=message):
            received(header)


def train_or_iterate(rank: int, folder: Path, *, opens: bool) -> None:
    """Rank 0 iterates a pass and rank 1 trains; `opens` = after it has begun the pass, too."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(0, 8))
    training, error = Training(), ""
    try:
        if rank == 0:
            list(training.stream)
        else:
            left = iter(training.stream)
            if opens:
                next(left)
            training.train()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    (folder / f"error{rank}").write_text(error)
    os._exit(0)  # its connections end now, whatever gloo's threads do


def test_a_rank_that_trains_beside_a_pass_is_one_line_on_both(tmp_path: Path) -> None:
    """Both cases at one time: the gloo groups of each wait for their timeout."""
    folders = {opens: tmp_path / str(opens) for opens in (False, True)}
    for folder in folders.values():
        folder.mkdir()
    ranks = [
        forks().Process(target=train_or_iterate, args=(rank, folder), kwargs=dict(opens=opens))
        for opens, folder in folders.items()
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0] * 4  # gloo would abort the process
    for file in (folder / f"error{rank}" for folder in folders.values() for rank in range(2)):
        error = file.read_text()
        assert error.startswith("RankError: ") and "\n" not in error
        assert "rank 0 runs a pass of a w" in error or "rank 0 a pass of a weight stream" in error


def test_weights_on_a_cpu_have_no_handle() -> None:
    bucket = WeightBucket.empty([WeightMeta("x", torch.float32, (3,))], CPU)
    assert pickle.loads(pickle.dumps(bucket.metas)) == bucket.metas
    with pytest.raises(ValueError, match=r"device of the bucket \(cpu\) must be a GPU"):
        share_bucket(bucket)
