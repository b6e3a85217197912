"""The directories of a run: complete checkpoints, drafts, and the publication of a draft.

    root/
      .step-000200.tmp-5f3c0a12/   a draft: incomplete, or left by a killed job
      step-000100/                 complete
        moecore.json               the manifest, written last
        rank-00000.safetensors     tensors, one file for each rank that wrote any
      latest                       name of the newest one, and the SHA-256 of its manifest
      .lock/                       while a job may write; see `lock.py`

A draft is never read. When all its files are on disk, one rename completes it, and the pointer file
`latest` is replaced. A kill at any moment therefore leaves the previous checkpoint loadable. No
function here communicates. A save calls the writing functions on the rank with the lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import uuid
from pathlib import Path
from typing import Annotated

from moecore.base.fields import Bound, Count, check_arguments
from moecore.io.checkpoint.files import (
    MAX_TABLE,
    open_regular_file,
    read_file_beginning,
    read_regular_file,
    remove_checkpoint,
    remove_leftovers,
    sync_directory,
    write_new_file,
)
from moecore.io.checkpoint.lock import hold_lock
from moecore.io.checkpoint.manifest import MANIFEST, Manifest

POINTER = "latest"
CHECKPOINTS = "checkpoints"  # the directory of a training run that `save` gets
# Exactly the names that `make_step_path` makes: step-0000006 would be a second name of step 6.
_STEP = r"step-([0-9]{6}|[1-9][0-9]{6,17})"
_STEP_NAME = re.compile(_STEP)
_POINTER_TEXT = re.compile(rf"(?P<name>{_STEP}) (?P<digest>[0-9a-f]{{64}})\n")

Step = Annotated[int, Bound(">=", 0), Bound("<", 10**18)]  # that a directory can be named after
Keep = Annotated[Count, "the newest must stay"]

logger = logging.getLogger("moecore.io")


def latest(root: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of the run directory `root`; None without checkpoints.

    The newest checkpoint is the target of the pointer file. If the pointer file or its target is
    missing, the newest checkpoint is the complete directory with the highest step.

    Raises:
        ValueError: if the pointer file is damaged, or the manifest that it names.
    """
    check_arguments(latest, locals())
    root = Path(root)
    # Twice, because a save may have replaced and pruned the named checkpoint.
    named = _find_pointer_target(root) or _find_pointer_target(root)
    if named is not None:
        return named
    directories = find_complete_checkpoints(root)
    pointer = _read_pointer(root)
    if pointer is not None and directories:
        logger.warning(
            "%s names %s, which is gone: taking %s, the highest step that is there",
            root / POINTER,
            pointer[0],
            directories[-1].name,
        )
    return directories[-1] if directories else None


def find_checkpoint_root(path: Path) -> Path:
    """Return the directory with a run's checkpoints: `path`, or its subdirectory "checkpoints"."""
    below = path / CHECKPOINTS
    has_steps = (path / POINTER).exists() or bool(find_complete_checkpoints(path))
    return below if below.is_dir() and not has_steps else path


def set_latest(path: str | os.PathLike[str]) -> None:
    """Set the pointer file `latest` to a complete checkpoint, for example to roll a run back.

    Later checkpoints remain until a save of the same step replaces them or `prune` removes them.

    Raises:
        ValueError: if the directory is not a complete checkpoint.
        OSError: if another job writes to the run.
    """
    check_arguments(set_latest, locals())
    path = Path(path)
    if _parse_step(path) is None or not is_complete(path):
        raise ValueError(f"path ({path}) must be a whole checkpoint, with a {MANIFEST}")
    with hold_lock(path.parent):
        manifest = read_regular_file(path / MANIFEST, max_bytes=MAX_TABLE)
        _write_pointer(path.parent, path.name, manifest).replace(path.parent / POINTER)
        sync_directory(path.parent)


def prune(root: str | os.PathLike[str], keep: Keep) -> list[Path]:
    """Delete all complete checkpoints of a run except the newest; return the deleted paths.

    The target of `latest` always remains. Steps after it, of a run that was rolled back, are
    deleted first, then the lowest steps. Leftovers of a job that died with the lock are deleted.

    Example: if the run has 100 200 210 300 400 and latest is 210, keep=2 leaves 200 210.

    Args:
        root: the run's directory, as in `save`. If a step is a symlink, only the link is deleted.
        keep: the number of checkpoints that remain, >= 1.

    Raises:
        ValueError: if `keep` is wrong or the pointer file is damaged; no checkpoint is deleted.
        OSError: if another job writes to the run; or, after the other checkpoints are deleted, if
            a checkpoint cannot be deleted.
    """
    if not find_prunable_checkpoints(root, keep):
        return []
    with hold_lock(Path(root)):
        return _remove_prunable_checkpoints(Path(root), keep)


def _remove_prunable_checkpoints(root: Path, keep: int) -> list[Path]:
    """Delete and return `find_prunable_checkpoints`; the caller has the run's lock."""
    removed, problems = [], []
    for path in find_prunable_checkpoints(root, keep):
        try:
            remove_checkpoint(path)
        except OSError as error:
            problems.append(str(error))
        else:
            removed.append(path)
    if problems:
        raise OSError(
            f"{problems[0]} ({len(problems)} old checkpoints could not be removed, "
            f"{len(removed)} were removed)"
        )
    return removed


def find_prunable_checkpoints(root: str | os.PathLike[str], keep: Keep) -> list[Path]:
    """Return the checkpoints that `prune` would delete, without deleting them."""
    check_arguments(find_prunable_checkpoints, locals())
    newest = latest(root)
    if newest is None:
        return []
    last = _parse_step(newest) or 0
    order = [path for path in find_complete_checkpoints(Path(root)) if path != newest]
    order.sort(key=lambda path: (_parse_step(path) or 0) <= last)  # later steps first
    num_old = max(0, len(order) - (keep - 1))
    # A checkpoint that stays may be a symlink to an older one, whose files it needs.
    targets = [path.resolve() for path in (newest, *order[num_old:])]
    return [
        path
        for path in order[:num_old]
        if not any(target.is_relative_to(path.resolve()) for target in targets)
    ]


def is_published(root: Path, step: int) -> bool:
    """Whether the pointer file `latest` names this step and its checkpoint is complete."""
    try:
        named = _read_pointer(root)
    except (OSError, ValueError):
        return False
    final = make_step_path(root, step)
    return named is not None and named[0] == final.name and is_complete(final)


def check_run_is_new(root: Path) -> None:
    """Raise ValueError if a directory already has checkpoints or drafts."""
    if not root.is_dir():
        return
    for name in sorted(path.name for path in root.iterdir()):
        if name == POINTER or name.startswith((".step-", "step-")):
            raise ValueError(
                f"root ({root}) must be no run yet, but holds {name}: choose another directory"
            )


def find_complete_checkpoints(root: Path) -> list[Path]:
    """Return the paths of a run's complete checkpoints, sorted by step."""
    if not root.is_dir():
        return []
    paths = [path for path in root.iterdir() if _parse_step(path) is not None and is_complete(path)]
    return sorted(paths, key=lambda path: _parse_step(path) or 0)


def is_complete(path: Path) -> bool:
    """Whether a step directory has a manifest, the file that a save writes last."""
    return (path / MANIFEST).is_file()


def make_step_path(root: Path, step: int) -> Path:
    """Return the path of a step's checkpoint directory, such as root/step-000123."""
    return root / f"step-{step:06d}"


def create_draft(root: Path, step: int) -> Path:
    """Create and return a step's draft directory; ValueError if the run has the step already."""
    root.mkdir(parents=True, exist_ok=True)
    final = make_step_path(root, step)
    _require_new_step(final)
    remove_leftovers(root)
    draft = root / f".{final.name}.tmp-{uuid.uuid4().hex[:8]}"
    draft.mkdir()
    return draft


def publish(draft: Path, manifest: Manifest, *, keep: int) -> None:
    """Write the manifest into a draft, rename the draft to its step, and point `latest` to it.

    Only the newest `keep` checkpoints remain (0 = all).
    """
    root, final = draft.parent, make_step_path(draft.parent, manifest.facts.step)
    write_new_file(draft / MANIFEST, manifest.text)
    sync_directory(draft)
    _require_new_step(final)
    _check_shard_files(draft, manifest)
    # Before the rename, so that a full disk leaves the previous checkpoint as the latest.
    pointer = _write_pointer(root, final.name, manifest.text.encode("ascii"))
    if os.path.lexists(final):  # of a run that was rolled back, or incomplete
        with contextlib.suppress(ValueError):
            named = _read_pointer(root)
            if named is not None and named[0] == final.name:  # its digest is the old manifest's
                (root / POINTER).unlink()
        remove_checkpoint(final)
    draft.rename(final)
    sync_directory(root)
    pointer.replace(root / POINTER)
    sync_directory(root)
    try:
        if keep:
            _remove_prunable_checkpoints(root, keep)
    except OSError as error:  # the new one is safe, so the save has not failed
        logger.warning("old checkpoints under %s could not be removed: %s", root, error)


def _check_shard_files(draft: Path, manifest: Manifest) -> None:
    """Raise OSError if the directory `draft` lacks a shard file or the file has a wrong size."""
    for name, file in manifest.files.items():
        try:
            # Opening makes a network file system ask its server.
            descriptor = open_regular_file(draft / name)
        except (FileNotFoundError, ValueError):
            raise OSError(f"{name} was written and is no longer there") from None
        size = os.fstat(descriptor).st_size
        os.close(descriptor)
        if size != file.size:
            raise OSError(f"{name} must have the {file.size} bytes that were written, not {size}")


def _require_new_step(final: Path) -> None:
    """Raise ValueError if the run has the step of the directory `final`, or a later step."""
    step, newest = _parse_step(final) or 0, None
    try:
        newest = _find_newest_step(final.parent)
    except ValueError as error:  # a run must be able to save although an older save is damaged
        logger.warning("%s", error)
    if newest is not None and newest > step:
        raise ValueError(
            f"step ({step}) must be > {newest}, the latest saved under {final.parent}: call "
            "set_latest first to roll the run back, or choose another directory"
        )
    if is_complete(final) and newest in (None, step):
        raise ValueError(f"step ({step}) must not be saved already: delete {final} to save it anew")


def _find_pointer_target(root: Path) -> Path | None:
    """Return the checkpoint that `latest` names, None without one; ValueError if it is damaged."""
    named = _read_pointer(root)
    if named is None:
        return None
    name, digest = named
    try:
        manifest = read_regular_file(root / name / MANIFEST, max_bytes=MAX_TABLE)
    except FileNotFoundError:
        return None
    if hashlib.sha256(manifest).hexdigest() != digest:
        raise ValueError(
            f"path ({root / POINTER}) must hold the sha256 of {name}/{MANIFEST}, so one of "
            "both is damaged: load an older checkpoint by its path, or use set_latest"
        )
    return root / name


def _read_pointer(root: Path) -> tuple[str, str] | None:
    """Return the checkpoint name and manifest SHA-256 in the file `latest`; None without a file."""
    try:
        text = read_file_beginning(root / POINTER, 200).decode("ascii", errors="replace")
    except FileNotFoundError:
        return None
    match = _POINTER_TEXT.fullmatch(text)
    if match is None:
        raise ValueError(
            f"path ({root / POINTER}) must be '<checkpoint> <sha256 of its manifest>' but is "
            f"{text!r:.120}: delete it to take the highest step, or use set_latest"
        )
    return match["name"], match["digest"]


def _find_newest_step(root: Path) -> int | None:
    """Return the newest checkpoint's step without reading a manifest; None without checkpoints."""
    named = _read_pointer(root)
    if named is not None and is_complete(root / named[0]):
        return _parse_step(root / named[0])
    directories = find_complete_checkpoints(root)
    return _parse_step(directories[-1]) if directories else None


def _parse_step(path: Path) -> int | None:
    """Return the step number in a checkpoint directory's name; None for other names."""
    match = _STEP_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def _write_pointer(root: Path, name: str, manifest: bytes) -> Path:
    """Write a temporary pointer file with `name` and the SHA-256 of `manifest`; return its path."""
    pointer = root / f".{POINTER}-{uuid.uuid4().hex[:8]}"
    try:
        write_new_file(pointer, f"{name} {hashlib.sha256(manifest).hexdigest()}\n")
    except OSError:
        pointer.unlink(missing_ok=True)
        raise
    return pointer
