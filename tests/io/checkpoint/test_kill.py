import errno
import os
import resource
import shutil
from pathlib import Path

import pytest

from moecore.io import Saver, latest, load, save
from moecore.io.checkpoint import directory, lock
from tests.io.checkpoint.kills import CRASH_EXIT, build, in_child, kill_at_random, loaded_step


@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False], ids=["sync", "background"])
def test_kill_at_random_moments(tmp_path: Path, wait: bool) -> None:
    left = kill_at_random(tmp_path / "root", 2, world=4, width=64, wait=wait, seed=9)
    assert len(left) == 2


# What a save does on rank 0, in order; a save may do each of them more than once.
CRASH_POINTS = {
    "draft": (Path, "mkdir"),
    "write": (directory, "write_new_file"),
    "lock": (lock, "write_new_file"),
    "bytes": (os, "write"),
    "fsync": (os, "fsync"),
    "sync": (directory, "sync_directory"),
    "rename": (Path, "rename"),
    "replace": (Path, "replace"),
    "remove": (shutil, "rmtree"),
}


def save_and_crash(root: Path, step: int, point: str, nth: int) -> None:
    """Save, and die before the nth call of a point."""
    owner, name = CRASH_POINTS[point]
    original, calls = getattr(owner, name), 0

    def crashing(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == nth:
            os._exit(CRASH_EXIT)
        return original(*args, **kwargs)

    setattr(owner, name, crashing)
    save(root, step, *build(float(step)), {"step": step}, keep=1)


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_crash_before_every_file_operation(tmp_path: Path, point: str) -> None:
    """A crash after an operation leaves what a crash before the next operation leaves."""
    step, nth = 1, 1
    save(tmp_path, step, *build(1.0), {"step": 1})
    while in_child(save_and_crash, tmp_path, step + 1, point, nth) == CRASH_EXIT:
        left = loaded_step(tmp_path)
        assert left in (step, step + 1)
        step, nth = left, nth + 1
    assert nth > 1 or point == "remove"
    assert loaded_step(tmp_path) == step + 1
    assert len(directory.find_complete_checkpoints(tmp_path)) == 1 and not list(tmp_path.glob(".*"))


def limit_files(num_bytes: int) -> None:
    """No file of this process may grow past it, as on a full disk (EFBIG instead of ENOSPC)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def fails_then_recovers(root: Path, room: int, *, wait: bool) -> None:
    saver = Saver(root, *build(2.0))
    limit_files(room)
    with pytest.raises(OSError, match=r"rank 0 could not write it: OSError.27, .File too large"):
        saver.save(2, {"step": 2}, wait=wait)
        saver.close()
    assert not list(root.glob(".step-*")), "the draft must not fill the disk"
    assert loaded_step(root) == 1
    limit_files(resource.RLIM_INFINITY)
    saver.close()
    save(root, 3, *build(3.0), {"step": 3})


@pytest.mark.parametrize("room", [0, 100, 4096, 150_000])
@pytest.mark.parametrize("wait", [True, False], ids=["sync", "background"])
def test_full_disk_leaves_the_save_before(tmp_path: Path, room: int, wait: bool) -> None:
    save(tmp_path, 1, *build(1.0), {"step": 1})
    assert in_child(fails_then_recovers, tmp_path, room, wait=wait) == 0
    assert loaded_step(tmp_path) == 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_write_error_in_the_middle(tmp_path, number, monkeypatch):
    save(tmp_path, 1, *build(1.0), {"step": 1})
    write, calls = os.write, []

    def failing(descriptor: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) > 3:
            raise OSError(number, os.strerror(number))
        return write(descriptor, data[:100])  # a short write first

    monkeypatch.setattr(os, "write", failing)
    with pytest.raises(OSError, match=os.strerror(number)):
        save(tmp_path, 2, *build(2.0), {"step": 2})
    assert calls[0] - calls[1] == 100 or calls[1] - calls[2] == 100
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-000001"] and loaded_step(tmp_path) == 1


def test_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a read-only file system says; permissions would not stop root, who may run this."""
    save(tmp_path, 1, *build(1.0), {"step": 1})

    def read_only(*args: object, ignore_errors: bool = False, **kwargs: object) -> None:
        if not ignore_errors:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", read_only)
        with pytest.raises(OSError, match="Read-only file system"):
            save(tmp_path, 2, *build(2.0), {"step": 2})
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", read_only)
        save(tmp_path, 2, *build(2.0), {"step": 2}, keep=1)  # an old one that stays is no failure
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", read_only)
        with pytest.raises(OSError, match=r"could not be locked: .*Read-only file system"):
            save(tmp_path, 3, *build(3.0), {"step": 3})
    assert loaded_step(tmp_path) == 2
    path = latest(tmp_path)
    assert path is not None and path.name == "step-000002" and load(path, *build(0.0))["step"] == 2
