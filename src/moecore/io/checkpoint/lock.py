"""Which job may write to a run: the one whose lock is in its directory.

    root/.lock/owner     JSON: host, machine, pid, started, since, token

A lock is written under another name and renamed. A rename onto a directory that holds a file fails,
so one of two jobs succeeds, and every lock that can be read has its owner. A save needs the same of
its file system.

An owner on this machine (the same boot and pid namespace) is dead when its pid is gone or belongs
to a process that started at another time. A live one is never replaced. On another machine it is
dead when it has not touched its file for `STALE_SECONDS`; it does so every `BEAT_SECONDS`.
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

from moecore.io.checkpoint.files import leftovers, read_beginning, remove_leftovers, write_new

LOCK, OWNER = ".lock", "owner"
_LOCK_NAME = re.compile(r"\.lock-([0-9a-f]{8}|[0-9a-f]{16})")  # of drafts and of dead locks
BEAT_SECONDS = 10.0
STALE_SECONDS = 120.0
_ATTEMPTS = 5  # others may release or take over meanwhile
_OWNER_BYTES = 4096


class RunLock:
    """The right to write to a run. It ends with `release`, with the object, or with the process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._text = b""
        self._end: weakref.finalize[..., RunLock] | None = None  # runs once, at exit at the latest

    def acquire(self) -> None:
        """Take the lock on one rank, or see that it is held still; an OSError names its owner."""
        if self._end is not None:
            if not _holds(self.root, self._text):
                raise OSError(
                    f"root ({self.root}) must be written to by one job, but another one took it "
                    f"over while this one stood still for {STALE_SECONDS:.0f} s: end one of them"
                )
            return
        text = json.dumps(_this_process())
        for _ in range(_ATTEMPTS):
            draft = self.root / f"{LOCK}-{uuid.uuid4().hex[:8]}"
            try:
                draft_time = _write_draft(draft, text)
                if _renamed(draft, self.root / LOCK):
                    self._keep(text.encode())
                    return
                _set_dead_aside(self.root, draft_time)
            except FileNotFoundError:  # a release also removes the drafts of other locks
                continue
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        raise OSError(f"path ({self.root / LOCK}) must name its owner: remove it")

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._end is not None:
            self._end()
            self._end = None

    def _keep(self, text: bytes) -> None:
        stop = threading.Event()
        self._text = text
        self._end = weakref.finalize(self, _release, self.root, text, stop, os.getpid())
        args = (self.root, text, stop)  # not the object, which may end while the thread runs
        threading.Thread(target=_beat, args=args, name="moecore-lock", daemon=True).start()


def _holds(root: Path, text: bytes) -> bool:
    return _read_owner(root)[1] == text


def _beat(root: Path, text: bytes, stop: threading.Event) -> None:
    while not stop.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError, ValueError):  # such as when the root was removed
            if _holds(root, text):
                os.utime(root / LOCK / OWNER)


def _release(root: Path, text: bytes, stop: threading.Event, pid: int) -> None:
    stop.set()
    if pid != os.getpid():  # of a process that was forked
        return
    with contextlib.suppress(OSError, ValueError):
        if _holds(root, text):
            (root / LOCK).rename(root / f"{LOCK}-{uuid.uuid4().hex[:8]}")
            for path in root.glob(f"{LOCK}-*"):
                if _LOCK_NAME.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the lock of a run, as `RunLock.acquire`, unless a `Saver` of this process does."""
    owner = _read_owner(root)[0]
    process = _this_process()
    lock = RunLock(root)
    if not all(owner.get(name) == process[name] for name in ("machine", "pid", "started")):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _write_draft(draft: Path, text: str) -> float:
    """Make a lock under another name; return what time it is for the file system."""
    try:
        draft.mkdir(parents=True)
        write_new(draft / OWNER, text)
        return (draft / OWNER).stat().st_mtime
    except FileNotFoundError:
        raise
    except OSError as error:
        raise OSError(f"root ({draft.parent}) could not be locked: {error}") from error


def _set_dead_aside(root: Path, current_time: float) -> None:
    """Make room where a lock's owner is dead; raise OSError where it is not."""
    owner, text, touched = _read_owner(root)
    if not text:
        return  # released meanwhile
    # Both times are the file system's, so clocks of hosts do not matter.
    if not _is_dead(owner, current_time - touched):
        owner_text = f"pid {owner.get('pid')} on {owner.get('host')} since {owner.get('since')}"
        raise OSError(
            f"root ({root}) must be written to by one job, but {owner_text!r:.160} holds {LOCK}: "
            "close its Saver, end that job, or save to another directory (a job that died on "
            f"another host is taken over after {STALE_SECONDS:.0f} s)"
        )
    # The name follows from the dead lock's text, and stays until the new lock is released. So of
    # two jobs that find the same dead lock, the slower one cannot rename that of the faster one.
    name = f"{LOCK}-{hashlib.sha256(text).hexdigest()[:16]}"
    if _renamed(root / LOCK, root / name):
        remove_leftovers(root)  # so a stopped owner cannot publish the draft that it was writing


def _is_dead(owner: dict[str, Any], idle_seconds: float) -> bool:
    if owner.get("machine") and owner.get("machine") == _machine():
        start_ticks = _start_ticks(owner.get("pid"))
        return start_ticks is None or start_ticks != owner.get("started")
    return idle_seconds > STALE_SECONDS


def leftovers_of_dead_job(root: Path) -> list[Path]:
    """Return the drafts that the next job removes because their job died with the lock."""
    owner, text, touched = _read_owner(root)
    return leftovers(root) if text and _is_dead(owner, time.time() - touched) else []


def _renamed(source: Path, target: Path) -> bool:
    """Rename a directory; False where another one is there, or the source is gone."""
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


def _read_owner(root: Path) -> tuple[dict[str, Any], bytes, float]:
    """Return the owner ({} = unreadable), its file's text (empty = no lock), and its last touch."""
    path = root / LOCK / OWNER
    try:
        text = read_beginning(path, _OWNER_BYTES)
        touched = path.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return {}, b"", 0.0
    try:
        owner = json.loads(text)
    except (ValueError, RecursionError):
        owner = {}
    return (owner if isinstance(owner, dict) else {}), text or b"\n", touched


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "started": _start_ticks(os.getpid()),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "token": uuid.uuid4().hex,
    }


def _machine() -> str:
    """Return the boot and pid namespace, in which a pid is one process; "" without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_ticks(pid: object) -> str | None:
    """Return when a process started, in ticks since boot; None where there is none."""
    if not isinstance(pid, int) or isinstance(pid, bool):
        return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
