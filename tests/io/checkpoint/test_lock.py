import os
import signal
import time
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from moecore.cli import main
from moecore.io import Saver, latest, prune, save, set_latest, verify
from moecore.io.checkpoint import directory, lock
from moecore.io.checkpoint.lock import LOCK, OWNER
from tests.io.checkpoint.kills import FORKS, all_is_whole, build, contend, loaded_step

REFUSED = r"must be written to by one job, but 'pid \d+ on .* since .*' holds \.lock: close its"


def hold(root: Path, ready: Any, kind: str) -> None:
    """Another job: has saved, holds the lock, and is killed or ends."""
    saver = Saver(root, *build(1.0))
    saver.save(1, {"step": 1}, wait=True)
    (root / ".step-000002.tmp-killed").mkdir()
    ready.set()
    if kind == "exit":
        return  # without close: the lock ends with the process
    time.sleep(600)  # killed before


def other_job(root: Path, kind: str = "live") -> Any:
    ready = FORKS.Event()
    job = FORKS.Process(target=hold, args=(root, ready, kind))
    job.start()
    assert ready.wait(300)
    return job


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_second_job_is_refused_and_takes_over_when_the_first_is_dead(tmp_path: Path) -> None:
    job, before = other_job(tmp_path), entries(tmp_path)
    for action in (
        lambda: Saver(tmp_path, *build(2.0)),
        lambda: save(tmp_path, 2, *build(2.0), {"step": 2}),
        lambda: set_latest(tmp_path / "step-000001"),
    ):
        with pytest.raises(OSError, match=REFUSED) as info:
            action()
        assert "\n" not in str(info.value) and f"pid {job.pid} on" in str(info.value)
    assert entries(tmp_path) == before
    os.kill(job.pid, signal.SIGSTOP)  # for as long as it likes: it may go on
    owner = tmp_path / LOCK / OWNER
    os.utime(owner, (0, 0))
    with pytest.raises(OSError, match=REFUSED):
        Saver(tmp_path, *build(2.0))
    job.kill()
    job.join()
    with Saver(tmp_path, *build(2.0)) as saver:
        assert ".step-000002.tmp-killed" not in entries(tmp_path)
        saver.save(2, {"step": 2}, wait=False)
    assert entries(tmp_path) == ["latest", "step-000001", "step-000002"]
    assert loaded_step(tmp_path) == 2


def test_prune_names_the_drafts_of_a_dead_job(tmp_path, capsys):
    job = other_job(tmp_path)
    job.kill()
    job.join()
    users = [".lock-notes", ".lock-1234567", ".step-notes", ".latest-good"]
    for name in users:
        (tmp_path / name).mkdir()
    copytree(tmp_path / "step-000001", tmp_path / "step-000000")
    command = ["checkpoint", "prune", str(tmp_path), "--keep", "1"]
    before = entries(tmp_path)
    gone = ["step-000000", ".step-000002.tmp-killed"]
    for options, verb in ((["--dry-run"], "would remove"), ([], "removed")):
        assert entries(tmp_path) == before and main(command + options) == 0
        assert capsys.readouterr().out == "".join(f"{verb} {tmp_path / name}\n" for name in gone)
    assert entries(tmp_path) == sorted([*users, "latest", "step-000001"])
    with Saver(tmp_path, *build(2.0)) as saver:
        saver.save(2, {"step": 2}, wait=True)
    assert entries(tmp_path) == sorted([*users, "latest", "step-000001", "step-000002"])


def test_a_lock_ends_with_its_process_or_object(tmp_path: Path) -> None:
    job = other_job(tmp_path, "exit")
    job.join()
    saver = Saver(tmp_path, *build(2.0))
    with pytest.raises(OSError, match=REFUSED):
        save(tmp_path, 3, *build(3.0))
    set_latest(tmp_path / "step-000001")  # of this job: a run that is rolled back
    del saver
    with pytest.raises(KeyError), Saver(tmp_path, *build(2.0)):
        raise KeyError
    save(tmp_path, 3, *build(3.0))
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("text", [None, "", "{", "[1]", '{"pid": "x"}', "\xff"])
def test_another_machine_s_lock_is_stale_without_a_heartbeat(tmp_path, text, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(lock, "_read_machine_id", lambda: "another boot")
        saver = Saver(tmp_path, *build(1.0))
    owner = tmp_path / LOCK / OWNER
    if text is not None:
        owner.write_bytes(text.encode("latin-1"))
    with pytest.raises(OSError, match=r"pid .* holds \.lock.* is taken over after 120 s\)"):
        save(tmp_path, 1, *build(1.0))
    then = time.time() - lock.STALE_SECONDS
    os.utime(owner, (then + 30, then + 30))
    with pytest.raises(OSError, match=r"holds \.lock"):
        save(tmp_path, 1, *build(1.0))
    os.utime(owner, (then - 30, then - 30))
    with Saver(tmp_path, *build(1.0)) as other:
        with pytest.raises(OSError, match="another one took it over while this one stood still"):
            saver.save(1, wait=False)
        saver.close()
        other.save(1, {"step": 1}, wait=True)
    assert entries(tmp_path) == ["latest", "step-000001"]


def test_the_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    with Saver(tmp_path, *build(1.0)):
        owner = tmp_path / LOCK / OWNER
        os.utime(owner, (0, 0))
        end = time.monotonic() + 120
        while owner.stat().st_mtime < time.time() - 60:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_dead_lock_is_taken_by_one_of_two(tmp_path, monkeypatch):
    """Both find it dead; the slower one must not take the lock of the faster one for it."""
    job = other_job(tmp_path)
    job.kill()
    job.join()
    renamed, savers = lock._try_rename, []

    def slow(source: Path, target: Path) -> bool:
        if source.name == LOCK and not savers:
            monkeypatch.setattr(lock, "_try_rename", renamed)
            savers.append(Saver(tmp_path, *build(2.0)))  # the faster one
        return renamed(source, target)

    monkeypatch.setattr(lock, "_try_rename", slow)
    with pytest.raises(OSError, match=REFUSED):
        Saver(tmp_path, *build(2.0))
    savers[0].save(2, {"step": 2}, wait=True)
    savers[0].close()
    assert loaded_step(tmp_path) == 2


@pytest.mark.parametrize("kind", ["file", "link", "fifo"])
def test_what_is_no_lock_is_refused(tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    root = tmp_path / "root"
    root.mkdir()
    if kind == "file":
        (root / LOCK).write_text("x")
    elif kind == "link":
        (root / LOCK).symlink_to(outside)
    else:
        (root / LOCK).mkdir()
        os.mkfifo(root / LOCK / OWNER)
    with pytest.raises((OSError, ValueError), match=r"\.lock.*\) must be a .*: remove") as info:
        save(root, 1, *build(1.0))
    assert "\n" not in str(info.value) and entries(root) == [LOCK] and entries(outside) == []


def test_a_reader_beside_two_writers_sees_whole_checkpoints(tmp_path: Path) -> None:
    root, go = tmp_path / "root", FORKS.Event()
    save(root, 0, *build(0.0, 8), {"step": 0})
    jobs = [FORKS.Process(target=contend, args=(root, value, 25, go)) for value in (1, 2)]
    for job in jobs:
        job.start()
    go.set()
    polls = 0
    while any(job.is_alive() for job in jobs):
        polls += all_is_whole(root)  # raises where the files of two would look like damage
    assert [job.exitcode for job in jobs] == [0, 0] and polls > 5
    # One of them may have found the lock taken every time.
    told = [line for path in tmp_path.glob("saved-*") for line in path.read_text().split()]
    assert len(told) == len(set(told)), "no step was saved twice"
    newest = latest(root)
    assert newest is not None and newest.name == max(told) and verify(newest)
    assert entries(root) == ["latest", newest.name]


def test_a_shard_that_went_missing_is_not_published(tmp_path, monkeypatch):
    """As when a cleaner of temporary files goes through the draft."""
    save(tmp_path, 1, *build(1.0), {"step": 1})
    write_new_file = directory.write_new_file
    for spoil in ("unlink", "cut", "link"):

        def cleaned(path: Path, text: str, spoil: str = spoil) -> None:
            shard = path.parent / "rank-00000.safetensors"
            if shard.is_file():
                data = shard.read_bytes()
                shard.unlink()
                if spoil == "cut":
                    shard.write_bytes(data[:-1])
                elif spoil == "link":
                    shard.symlink_to(tmp_path / "step-000001" / shard.name)
            write_new_file(path, text)

        monkeypatch.setattr(directory, "write_new_file", cleaned)
        with pytest.raises(OSError, match=r"rank 0 could not write it: .*rank-00000"):
            save(tmp_path, 2, *build(2.0), {"step": 2}, keep=1)
    monkeypatch.undo()
    assert loaded_step(tmp_path) == 1 and entries(tmp_path) == ["latest", "step-000001"]


def test_prune_of_a_step_that_is_a_link_removes_the_link(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for step in (1, 2, 3):
        save(root, step, *build(float(step)), {"step": step})
    (root / "step-000001").rename(tmp_path / "elsewhere")
    (root / "step-000001").symlink_to(tmp_path / "elsewhere")
    assert [path.name for path in prune(root, 1)] == ["step-000001", "step-000002"]
    assert entries(root) == ["latest", "step-000003"]
    verify(tmp_path / "elsewhere")


def test_a_checkpoint_that_is_replaced_while_latest_looks(tmp_path, monkeypatch, caplog):
    """The pointer is read, then another save replaces it and prunes what it named."""
    for step in (1, 2, 9):
        save(tmp_path, step, *build(float(step)), {"step": step})
    set_latest(tmp_path / "step-000002")
    read = directory._read_pointer

    def slow(root: Path) -> tuple[str, str] | None:
        found = read(root)
        monkeypatch.setattr(directory, "_read_pointer", read)
        set_latest(tmp_path / "step-000001")
        directory.remove_checkpoint(tmp_path / "step-000002")
        return found

    monkeypatch.setattr(directory, "_read_pointer", slow)
    assert latest(tmp_path) == tmp_path / "step-000001" and "which is gone" not in caplog.text


def test_a_step_without_a_manifest_is_replaced(tmp_path: Path) -> None:
    """`latest` names it with the digest of a manifest that is gone."""
    save(tmp_path, 1, *build(1.0), {"step": 1})
    path = save(tmp_path, 2, *build(2.0), {"step": 2})
    (path / "moecore.json").unlink()
    rename, seen = Path.rename, []

    def watched(source: Path, target: Path) -> Path:
        result = rename(source, target)
        if Path(target).name == path.name:
            seen.append(latest(tmp_path))  # between the two renames
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", watched)
        save(tmp_path, 2, *build(2.5), {"step": 2})
    assert seen == [path]
