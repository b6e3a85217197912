"""Checkpoints in the memory of hosts: servers outlive ranks, and a lost host loses no checkpoint.

Each simulated host has its own server and folder. A host is lost when both are gone.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from moecore.io import Saver, latest, load, prune, save, verify
from moecore.io.checkpoint import host_memory
from moecore.io.checkpoint.host_memory import (
    DOMAIN_VARIABLE,
    HOST_VARIABLE,
    alternate_domains,
    connect_host_memory,
    find_complete,
)
from moecore.io.checkpoint.object_storage import RemotePath, make_path
from tests.helpers.ranks import run_ranks
from tests.io.checkpoint.kills import build, fill, loaded_step


def folder_of(host: str) -> Path:
    return Path(f"/dev/shm/moecore-{os.getuid()}-{host}")


def lose(host: str) -> None:
    """End a host: its server ends without its folder, and a restarted host is empty."""
    shutil.rmtree(folder_of(host))


@pytest.fixture
def names() -> Iterator[list[str]]:
    """Names of three hosts, to which a test may add; they are lost at the end."""
    names = [f"host{i}-{uuid.uuid4().hex[:8]}" for i in range(3)]
    yield names
    for name in names:
        with suppress(FileNotFoundError):
            lose(name)


@pytest.fixture
def connect(names: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that connects this process, on the first of some hosts, to the hosts."""

    def connect(*hosts: str, num_copies: int = 2) -> None:
        ring = tuple(host_memory._start_server(host, "127.0.0.1") for host in hosts or names)
        monkeypatch.setattr(host_memory, "_hosts", host_memory._Hosts(ring, num_copies))

    return connect


@pytest.fixture
def url(connect: Callable[..., None]) -> RemotePath:
    """A run with its first checkpoint; this process is on the first of three hosts."""
    connect()
    url = make_path("hostmemory://job")
    save(url, 1, *build(1.0), {"step": 1})
    return url


def test_a_run_in_memory_is_saved_pruned_and_loaded(connect: Callable[..., None]) -> None:
    connect()
    url = "hostmemory://a run/of two words"
    assert latest(url) is None and find_complete(make_path(url)) is None
    model, optimizer = build(0.0)
    with Saver(url, model, optimizer, keep=2) as saver:
        for step in (1, 2, 3):
            fill(model, optimizer, float(step))
            path = saver.save(step, {"step": step}, wait=step == 2)
            fill(model, optimizer, -7.0)
    assert path == latest(url) == find_complete(make_path(url)) and loaded_step(make_path(url)) == 3
    assert verify(path).facts.step == 3
    assert [path.name for path in prune(url, 1)] == ["step-000002"]
    assert (
        sorted(p.name for p in make_path(url).iterdir()) == [".owner", "latest", "step-000003"][1:]
    )
    RemotePath(url).remove_all()
    assert latest(url) is None


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_host_loses_no_checkpoint(
    lost: int, url: RemotePath, names: list[str], connect: Callable[..., None]
) -> None:
    copies = [len(list(folder_of(name).rglob("*.safetensors"))) for name in names]
    assert copies == [1, 1, 0]  # of the only rank, which is on the first host
    lose(names[lost])
    connect()  # the job starts again: the lost host has a new, empty server
    assert not any(folder_of(names[lost]).rglob("*.safetensors"))
    assert find_complete(url) == latest(url) and loaded_step(url) == 1
    save(url, 2, *build(2.0), {"step": 2})
    lose(names[lost])
    connect(*(name for name in names if name != names[lost]))  # and goes on with two hosts
    assert find_complete(url) == latest(url) and loaded_step(url) == 2


def test_without_all_files_there_is_no_checkpoint(
    url: RemotePath, names: list[str], connect: Callable[..., None]
) -> None:
    lose(names[0]), lose(names[1])
    connect()
    assert latest(url) is not None and find_complete(url) is None


def test_a_host_that_was_away_does_not_bring_back_an_older_latest(
    url: RemotePath, names: list[str], connect: Callable[..., None]
) -> None:
    connect(*names[1:])
    save(url, 2, *build(2.0), {"step": 2})
    connect()
    assert loaded_step(url) == 2


def test_an_upload_is_visible_when_it_is_complete(
    names: list[str], connect: Callable[..., None]
) -> None:
    connect()
    path = make_path("hostmemory://job/file")
    upload = path.call("open", "wb")
    upload.write(b"begin")
    assert not path.exists() and list(path.parent.iterdir()) == []
    upload.write(memoryview(b" and end"))
    upload.close()
    assert path.read(6, 100) == b"and end" and path.read(13, 20) == b"" and path.read(0, 2) == b"be"
    again = path.call("open", "wb")
    again.write(b"other")
    again.discard()
    assert path.read(0, 5) == b"begin"
    path.unlink()
    assert not any(p for name in names for p in folder_of(name).rglob("*file*"))


def test_a_host_that_does_not_answer_fails_a_save_and_not_a_load(
    url: RemotePath, names: list[str], connect: Callable[..., None]
) -> None:
    lose(names[1])
    address = host_memory._get_hosts().ring[1]
    end = time.monotonic() + 20
    with pytest.raises(OSError, match="does not answer"):
        while time.monotonic() < end:  # the server notices within a second
            with suppress(FileNotFoundError):
                address.request("GET", "/-?list")
            time.sleep(0.05)
    with pytest.raises(OSError, match=f"host {names[1]} does not answer"):
        save(url, 2, *build(2.0), {"step": 2})
    assert loaded_step(url) == 1


@pytest.mark.parametrize("path", ["/../secret", "/a/../../b", "/.", "/a//b"])
def test_names_outside_of_the_folder_are_refused(
    path: str, names: list[str], connect: Callable[..., None]
) -> None:
    connect()
    for method in ("GET", "DELETE", "PUT"):
        with pytest.raises(OSError, match="not a name"):
            host_memory._get_hosts().ring[0].request(method, path, b"")


def test_an_idle_server_ends_and_frees_the_memory(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "IDLE_SECONDS", 0.5)
    host = host_memory._start_server(names[0], "127.0.0.1")
    assert host_memory._start_server(names[0], "127.0.0.1") == host  # found, not started again
    host.request("PUT", "/job/file?upload=1", b"data")
    end = time.monotonic() + 20
    while folder_of(names[0]).exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not folder_of(names[0]).exists()


def test_hosts_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_hosts", None)
    with pytest.raises(OSError, match=r"call connect_host_memory\(\) before"):
        latest("hostmemory://job")
    with pytest.raises(ValueError, match="num_copies"):
        connect_host_memory(0)


def save_on_ranks(rank: int, device: torch.device, names: list[str]) -> list[int]:
    os.environ[HOST_VARIABLE], os.environ["LOCAL_RANK"] = names[rank], "0"
    connect_host_memory()
    model, optimizer = build(5.0)
    save("hostmemory://job", 5, model, optimizer, {"step": 5})
    return [len(list(folder_of(name).rglob("*.safetensors"))) for name in names]


def save_in_domains(rank: int, device: torch.device, names: list[str]) -> list[int]:
    os.environ[DOMAIN_VARIABLE] = "first half" if rank < len(names) / 2 else "second half"
    return save_on_ranks(rank, device, names)


def load_on_ranks(rank: int, device: torch.device, names: list[str]) -> float:
    os.environ[HOST_VARIABLE], os.environ["LOCAL_RANK"] = names[rank], "0"
    connect_host_memory()
    model, optimizer = build(0.0)
    path = find_complete(make_path("hostmemory://job"))
    assert path is not None and load(path, model, optimizer)["step"] == 5
    return next(model.parameters()).detach().flatten()[0].item()


def test_the_ranks_of_fewer_hosts_continue(names: list[str]) -> None:
    saved = run_ranks(3, save_on_ranks, names)
    assert saved == [2, 2, 2]  # each rank's file, on its host and on the next one
    lose(names[1])
    want = next(build(5.0)[0].parameters()).detach().flatten()[0].item()
    assert run_ranks(2, load_on_ranks, [names[0], names[2]]) == want


def test_a_lost_domain_loses_no_checkpoint(names: list[str]) -> None:
    names.append(f"host3-{uuid.uuid4().hex[:8]}")
    assert run_ranks(4, save_in_domains, names) == [2, 2, 2, 2]
    lose(names[0]), lose(names[1])
    want = next(build(5.0)[0].parameters()).detach().flatten()[0].item()
    assert run_ranks(2, load_on_ranks, names[2:]) == want


def test_the_ring_alternates_between_domains() -> None:
    assert alternate_domains({"a": "x", "b": "x", "c": "y", "d": "y"}) == ["a", "c", "b", "d"]
    assert alternate_domains({"b": "b", "a": "a", "c": "c"}) == ["a", "b", "c"]
    assert alternate_domains({"a": "x", "b": "x", "c": "x", "d": "y"}) == ["a", "d", "b", "c"]
