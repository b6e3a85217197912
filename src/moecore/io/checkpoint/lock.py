"""The lock of a run: the job whose lock is in the directory may write to it.

    root/.lock/owner     JSON: host, machine, pid, started, since, token

A lock is written under a temporary name and renamed. A rename onto a non-empty directory fails, so
exactly one of two jobs succeeds, and every readable lock has an owner. A save requires the same
atomic rename of its file system.

An owner on this machine (the same boot and pid namespace) is dead if its pid does not exist or
belongs to a process with another start time. A live owner is never replaced. An owner touches its
file every `BEAT_SECONDS`. On another machine, it is dead after `STALE_SECONDS` without a touch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moecore.io.checkpoint.files import (
    find_leftovers,
    read_file_beginning,
    remove_leftovers,
    write_new_file,
)
from moecore.io.checkpoint.object_storage import AnyPath, RemotePath

LOCK, OWNER = ".lock", "owner"
REMOTE_OWNER = ".owner"  # the owner object on object storage, which a downloaded run ignores
_LOCK_NAME = re.compile(r"\.lock-([0-9a-f]{8}|[0-9a-f]{16})")  # of drafts and of dead locks
BEAT_SECONDS = 10.0
STALE_SECONDS = 120.0
_ATTEMPTS = 5  # others may release or take over meanwhile
_OWNER_BYTES = 4096


class RunLock:
    """The lock of a run directory, under which one job writes; process exit also releases it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.owner_text = b""
        self._finalizer: weakref.finalize[..., RunLock] | None = None  # runs at exit at the latest

    def acquire(self) -> None:
        """Create the lock, or check that this object has it; OSError if another job has it."""
        if self._finalizer is not None:
            if _read_owner(self.root)[1] != self.owner_text:
                raise OSError(
                    f"root ({self.root}) must be written to by one job, but another one took it "
                    f"over while this one stood still for {STALE_SECONDS:.0f} s: end one of them"
                )
            return
        text = json.dumps(_describe_this_process())
        for _ in range(_ATTEMPTS):
            draft = self.root / f"{LOCK}-{uuid.uuid4().hex[:8]}"
            try:
                draft_time = _write_draft(draft, text)
                if _try_rename(draft, self.root / LOCK):
                    break
                _remove_dead_lock(self.root, draft_time)
            except FileNotFoundError:  # a release also removes the drafts of other locks
                continue
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        else:
            raise OSError(f"path ({self.root / LOCK}) must name its owner: remove it")
        self.owner_text, stop = text.encode(), threading.Event()
        args = (self.root, self.owner_text, stop)  # not the object, which may end before the thread
        self._finalizer = weakref.finalize(self, _release_lock, *args, os.getpid())
        threading.Thread(
            target=_touch_owner_regularly, args=args, name="moecore-lock", daemon=True
        ).start()

    def release(self) -> None:
        """Release the lock if this object has it."""
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None


class RemoteLock:
    """The lock of a run on object storage: only the job that acquired the lock last may publish.

    An object store has no atomic rename, so `acquire` of a second job succeeds. The second job
    replaces the owner object, and later saves of the first job raise OSError.
    """

    def __init__(self, root: RemotePath) -> None:
        self.root = root
        self.owner_text = b""

    def acquire(self) -> None:
        """Write the owner object; a second call checks that no other job has replaced it."""
        if self.owner_text:
            require_owner(self.root, self.owner_text)
            return
        text = json.dumps(_describe_this_process()).encode()
        (self.root / REMOTE_OWNER).write(text)
        self.owner_text = text

    def release(self) -> None:
        """Do nothing, because the next job replaces the owner object."""


def make_lock(root: AnyPath) -> RunLock | RemoteLock:
    """Return the lock of a run, which is not acquired yet."""
    return RemoteLock(root) if isinstance(root, RemotePath) else RunLock(root)


def require_owner(root: AnyPath, text: bytes) -> None:
    """Raise OSError unless the run's owner object contains `text`; b"" allows any owner."""
    owner, current, _ = _read_owner(root)
    if text and current != text:
        owner_text = f"pid {owner.get('pid')} on {owner.get('host')} since {owner.get('since')}"
        raise OSError(
            f"root ({root}) must be written to by one job, but {owner_text!r:.160} took it over: "
            "end one of them"
        )


def _touch_owner_regularly(root: Path, text: bytes, stop_event: threading.Event) -> None:
    """Until `stop_event`, update the owner file's mtime regularly if its content is `text`."""
    while not stop_event.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError, ValueError):  # such as when the root was removed
            if _read_owner(root)[1] == text:
                os.utime(root / LOCK / OWNER)


def _release_lock(root: Path, text: bytes, stop_event: threading.Event, pid: int) -> None:
    """Stop the heartbeat; delete the lock if its owner file is `text` and `pid` is this process."""
    stop_event.set()
    if pid != os.getpid():  # a fork of the process that acquired the lock
        return
    with contextlib.suppress(OSError, ValueError):
        if _read_owner(root)[1] == text:
            (root / LOCK).rename(root / f"{LOCK}-{uuid.uuid4().hex[:8]}")
            for path in root.glob(f"{LOCK}-*"):
                if _LOCK_NAME.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def hold_lock(root: AnyPath) -> Iterator[None]:
    """Return a context with the run's lock; OSError if another job has the lock.

    On object storage the context takes no lock, because a new lock ends a running job's saves.
    """
    if isinstance(root, RemotePath):
        yield
        return
    owner = _read_owner(root)[0]
    process = _describe_this_process()
    lock = RunLock(root)
    if not all(owner.get(name) == process[name] for name in ("machine", "pid", "started")):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _write_draft(draft: Path, text: str) -> float:
    """Create the directory `draft` with the owner file `text`; return the file's mtime (s)."""
    try:
        draft.mkdir(parents=True)
        write_new_file(draft / OWNER, text)
        return (draft / OWNER).stat().st_mtime
    except FileNotFoundError:
        raise
    except OSError as error:
        raise OSError(f"root ({draft.parent}) could not be locked: {error}") from error


def _remove_dead_lock(root: Path, current_time: float) -> None:
    """Delete a dead owner's lock and leftovers; OSError if the owner is alive."""
    owner, text, touched = _read_owner(root)
    if not text:
        return  # released meanwhile
    if not _is_owner_dead(owner, current_time - touched):
        owner_text = f"pid {owner.get('pid')} on {owner.get('host')} since {owner.get('since')}"
        raise OSError(
            f"root ({root}) must be written to by one job, but {owner_text!r:.160} holds {LOCK}: "
            "close its Saver, end that job, or save to another directory (a job that died on "
            f"another host is taken over after {STALE_SECONDS:.0f} s)"
        )
    # The name follows from the dead lock's text, and stays until the new lock is released. So of
    # two jobs that find the same dead lock, the slower one cannot rename that of the faster one.
    name = f"{LOCK}-{hashlib.sha256(text).hexdigest()[:16]}"
    if _try_rename(root / LOCK, root / name):
        remove_leftovers(root)  # so a stopped owner cannot publish the draft that it was writing


def _is_owner_dead(owner: dict[str, Any], idle_seconds: float) -> bool:
    """Whether a lock's owner has ended, or is on another host without a heartbeat for too long."""
    if owner.get("machine") and owner.get("machine") == _read_machine_id():
        start_ticks = _read_start_ticks(owner.get("pid"))
        return start_ticks is None or start_ticks != owner.get("started")
    return idle_seconds > STALE_SECONDS


def find_abandoned_drafts(root: AnyPath) -> list[Path]:
    """Return a job's leftovers (`find_leftovers`) if it ended without releasing its lock."""
    if isinstance(root, RemotePath):
        return []  # each pruning deletes incomplete steps
    owner, text, touched = _read_owner(root)
    return find_leftovers(root) if text and _is_owner_dead(owner, time.time() - touched) else []


def _try_rename(source: Path, target: Path) -> bool:
    """Rename a directory; return False if `target` is not empty or `source` is missing."""
    try:
        source.rename(target)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise OSError(f"path ({target}) must be a lock's directory: remove the file") from None
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _read_owner(root: AnyPath) -> tuple[dict[str, Any], bytes, float]:
    """Return the owner file as JSON ({} if invalid), as bytes (b"" if missing), and its mtime."""
    is_remote = isinstance(root, RemotePath)
    path = root / REMOTE_OWNER if is_remote else root / LOCK / OWNER
    try:
        text = read_file_beginning(path, _OWNER_BYTES)
        touched = path.stat().st_mtime if isinstance(path, Path) else 0.0
    except (FileNotFoundError, NotADirectoryError):
        return {}, b"", 0.0
    try:
        owner = json.loads(text)
    except (ValueError, RecursionError):
        owner = {}
    return (owner if isinstance(owner, dict) else {}), text or b"\n", touched


def _describe_this_process() -> dict[str, Any]:
    """Return the owner file's JSON for this process: host, machine, pid and start time."""
    return {
        "host": socket.gethostname(),
        "machine": _read_machine_id(),
        "pid": os.getpid(),
        "started": _read_start_ticks(os.getpid()),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "token": uuid.uuid4().hex,
    }


def _read_machine_id() -> str:
    """Return an id of this machine, its boot id and pid namespace; "" without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _read_start_ticks(pid: object) -> str | None:
    """Return the start time of the process `pid` in ticks since boot; None if it has ended."""
    if not isinstance(pid, int) or isinstance(pid, bool):
        return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
