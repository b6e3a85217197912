"""Which directories of a run are whole checkpoints, and how a new one becomes whole.

    root/
      .step-000200.tmp-5f3c0a12/   a draft: being written, or left behind by a kill
      step-000100/                 whole
        moecore.json               the marker, written last
        .metadata, __0_0.distcp    tensors, in the format of torch.distributed.checkpoint
      latest                       the name of the newest one

A draft is never read. It becomes whole by one rename, after everything in it is on disk, and is
announced by replacing the pointer file; so a kill at any moment leaves the previous one loadable.

No function here communicates: a save calls those that write on one rank.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

MARKER = "moecore.json"
POINTER = "latest"
FORMAT = 1
_STEP_NAME = re.compile(r"step-(\d{6,})")


def latest(root: str | os.PathLike[str]) -> Path | None:
    """Return the newest whole checkpoint under `root`, or None when there is none.

    That is the one the pointer file names. Without a usable pointer it is the whole directory of
    the highest step.

    Args:
        root: what `save` got; need not exist.
    """
    root = Path(root)
    try:
        named = root / (root / POINTER).read_text().strip()
    except FileNotFoundError:
        named = None
    if named is not None and _step_of(named) is not None and is_whole(named):
        return named
    whole = whole_directories(root)
    return whole[-1] if whole else None


def whole_directories(root: Path) -> list[Path]:
    """Return all whole checkpoints under `root`, in rising order of their steps."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _step_of(path) is not None and is_whole(path)]
    return sorted(found, key=lambda path: _step_of(path) or 0)


def is_whole(path: Path) -> bool:
    """Whether everything of this checkpoint was written."""
    return (path / MARKER).is_file()


def read_marker(path: Path) -> dict[str, Any]:
    """Return what the marker says.

    Raises:
        ValueError: when the directory is not a whole checkpoint of a format that is known.
    """
    try:
        marker = json.loads((path / MARKER).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"path ({path}) must be a whole checkpoint, with a {MARKER}: use latest(root)"
        ) from None
    except ValueError as error:
        raise ValueError(f"path ({path / MARKER}) must be JSON: {error}") from None
    found = marker.get("format") if isinstance(marker, dict) else None
    if found != FORMAT:
        raise ValueError(
            f"path ({path}) has checkpoint format ({found!r}), which must be {FORMAT}: load it "
            "with the moecore that wrote it"
        )
    return marker


def new_draft(root: Path, step: int) -> Path:
    """Make an empty draft directory, after removing those that killed saves left behind.

    Raises:
        ValueError: when the newest checkpoint is this step already.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = root / _name_of(step)
    if latest(root) == final:
        raise ValueError(f"step ({step}) must not be saved already: delete {final} to save it anew")
    for leftover in root.glob(".step-*"):
        shutil.rmtree(leftover)
    draft = root / f".{final.name}.tmp-{uuid.uuid4().hex[:8]}"
    draft.mkdir()
    return draft


def publish(draft: Path, step: int, marker: dict[str, Any], *, keep: int) -> Path:
    """Make a written draft the newest checkpoint, and return its directory.

    Args:
        draft: from `new_draft`; all files but the marker are there and on disk.
        step: its step.
        marker: what the marker says besides the format.
        keep: how many of the newest checkpoints stay; 0 = all.
    """
    root, final = draft.parent, draft.parent / _name_of(step)
    _write(draft / MARKER, json.dumps({"format": FORMAT, **marker}))
    _sync(draft)
    if final.exists():  # of a run that was rolled back: the pointer names another one
        _remove(final)
    draft.rename(final)
    _sync(root)
    pointer = root / f".{POINTER}.tmp"
    _write(pointer, final.name)
    pointer.replace(root / POINTER)
    _sync(root)
    if keep:
        for old in whole_directories(root)[:-keep]:
            if old != final:
                _remove(old)
    return final


def _name_of(step: int) -> str:
    return f"step-{step:06d}"


def _step_of(path: Path) -> int | None:
    match = _STEP_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def _remove(path: Path) -> None:
    """Delete a checkpoint that must not look whole when it is half deleted."""
    hidden = path.with_name(f".{path.name}.old-{uuid.uuid4().hex[:8]}")
    path.rename(hidden)
    shutil.rmtree(hidden)


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Put the names in a directory on disk; a file's own fsync does not."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
