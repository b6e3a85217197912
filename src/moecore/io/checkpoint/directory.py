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
    open_file,
    read_file_beginning,
    read_regular_file,
    remove_checkpoint,
    sync_directory,
    write_new_file,
)
from moecore.io.checkpoint.lock import hold_lock
from moecore.io.checkpoint.manifest import MANIFEST, Manifest, parse_manifest
from moecore.io.checkpoint.object_storage import AnyPath, RemotePath, make_path

POINTER = "latest"
MEMORY_ID = "memory-id"  # the file that names the run's checkpoints in the memory of hosts
CHECKPOINTS = "checkpoints"  # the directory of a training run that `save` gets
# Exactly the names that `make_step_path` makes: step-0000006 would be a second name of step 6.
_STEP = r"step-([0-9]{6}|[1-9][0-9]{6,17})"
_STEP_NAME = re.compile(_STEP)
_POINTER_TEXT = re.compile(rf"(?P<name>{_STEP}) (?P<digest>[0-9a-f]{{64}})\n")

Step = Annotated[int, Bound(">=", 0), Bound("<", 10**18)]  # that a directory can be named after
Keep = Annotated[Count, "the newest must stay"]

logger = logging.getLogger("moecore.io")


def latest(root: str | os.PathLike[str]) -> AnyPath | None:
    """Return the newest complete checkpoint of the run `root`; None without checkpoints.

    The newest checkpoint is the target of the pointer file. If the pointer file or its target is
    missing, the newest checkpoint is the complete directory with the highest step.

    Raises:
        ValueError: if the pointer file, or the manifest that the pointer file names, is damaged.
        OSError: if `root` is a URL and the store does not answer.
    """
    check_arguments(latest, locals())
    root = make_path(root)
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


def find_checkpoint_root(path: AnyPath) -> AnyPath:
    """Return the directory with a run's checkpoints: `path`, or its subdirectory "checkpoints"."""
    below = path / CHECKPOINTS
    has_steps = (path / POINTER).exists() or bool(find_complete_checkpoints(path))
    return below if below.is_dir() and not has_steps else path


def set_latest(path: str | os.PathLike[str]) -> None:
    """Set the pointer file `latest` to a complete checkpoint, for example to roll a run back.

    Later checkpoints remain until a save of the same step replaces them or `prune` removes them.
    A training command then resumes from this checkpoint, not from one in host memory.

    Raises:
        ValueError: if the directory is not a complete checkpoint.
        OSError: if another job writes to the run.
    """
    check_arguments(set_latest, locals())
    path = make_path(path)
    if parse_step(path) is None or not is_complete(path):
        raise ValueError(f"path ({path}) must be a whole checkpoint, with a {MANIFEST}")
    with hold_lock(path.parent):
        manifest = read_regular_file(path / MANIFEST, max_bytes=MAX_TABLE)
        with contextlib.suppress(FileNotFoundError):
            (path.parent / MEMORY_ID).unlink()
        if isinstance(path, RemotePath):
            (path.parent / POINTER).write(format_pointer(path.name, manifest))
            return
        _write_pointer(path.parent, path.name, manifest).replace(path.parent / POINTER)
        sync_directory(path.parent)


def prune(root: str | os.PathLike[str], keep: Keep) -> list[AnyPath]:
    """Delete all complete checkpoints of a run except the newest `keep`; return the deleted paths.

    The target of `latest` always remains. Steps after the target (the run was rolled back) are
    deleted first, then the lowest steps. Files that a killed job left are also deleted.

    Example: if the run has 100 200 210 300 400 and latest is 210, keep=2 leaves 200 210.

    Args:
        root: the run's directory, as in `save`. If a step is a symlink, only the link is deleted.
        keep: the number of checkpoints that remain, >= 1.

    Raises:
        ValueError: if `keep` is wrong or the pointer file is damaged; no checkpoint is deleted.
        OSError: if another job writes to the run; or, after the other checkpoints are deleted, if
            a checkpoint cannot be deleted.
    """
    check_arguments(prune, locals())
    path = make_path(root)
    if isinstance(path, Path) and not find_prunable_checkpoints(path, keep):
        return []
    with hold_lock(path):
        return _remove_prunable_checkpoints(path, keep)


def _remove_prunable_checkpoints(root: AnyPath, keep: int) -> list[AnyPath]:
    """Delete all prunable checkpoints and return their paths; the caller has the run's lock."""
    removed, problems = [], []
    for path in find_prunable_checkpoints(root, keep):
        try:
            if isinstance(path, RemotePath):
                (path / MANIFEST).unlink()  # first, so that no complete step lacks files
                path.remove_all()
            else:
                remove_checkpoint(path)
        except OSError as error:
            problems.append(str(error))
        else:
            removed.append(path)
    if isinstance(root, RemotePath):  # incomplete steps of jobs that died
        newest = _find_newest_step(root) or 0
        for path in root.iterdir():
            step = parse_step(path)
            if step is not None and step < newest and not is_complete(path):
                path.remove_all()
    if problems:
        raise OSError(
            f"{problems[0]} ({len(problems)} old checkpoints could not be removed, "
            f"{len(removed)} were removed)"
        )
    return removed


def find_prunable_checkpoints(root: str | os.PathLike[str], keep: Keep) -> list[AnyPath]:
    """Return the checkpoints that `prune` would delete, without deleting them."""
    check_arguments(find_prunable_checkpoints, locals())
    newest = latest(root)
    if newest is None:
        return []
    last = parse_step(newest) or 0
    order = [path for path in find_complete_checkpoints(make_path(root)) if path != newest]
    order.sort(key=lambda path: (parse_step(path) or 0) <= last)  # later steps first
    num_old = max(0, len(order) - (keep - 1))
    # A checkpoint that stays may be a symlink to an older one, whose files it needs.
    remaining = (newest, *order[num_old:])
    targets = [path.resolve() for path in remaining if isinstance(path, Path)]
    return [
        path
        for path in order[:num_old]
        if isinstance(path, RemotePath)
        or not any(target.is_relative_to(path.resolve()) for target in targets)
    ]


def is_published(root: AnyPath, step: int) -> bool:
    """Whether the pointer file `latest` names this step and its checkpoint is complete."""
    try:
        named = _read_pointer(root)
    except (OSError, ValueError):
        return False
    final = make_step_path(root, step)
    return named is not None and named[0] == final.name and is_complete(final)


def check_run_is_new(root: AnyPath) -> None:
    """Raise ValueError if a directory already has checkpoints or drafts."""
    if not root.is_dir():
        return
    for name in sorted(path.name for path in root.iterdir()):
        if name == POINTER or name.startswith((".step-", "step-")):
            raise ValueError(
                f"root ({root}) must be no run yet, but holds {name}: choose another directory"
            )


def find_complete_checkpoints(root: AnyPath) -> list[AnyPath]:
    """Return the paths of a run's complete checkpoints, sorted by step."""
    if not root.is_dir():
        return []
    paths = [path for path in root.iterdir() if parse_step(path) is not None and is_complete(path)]
    return sorted(paths, key=lambda path: parse_step(path) or 0)


def is_complete(path: AnyPath) -> bool:
    """Whether a step directory has a manifest, the file that a save writes last."""
    return (path / MANIFEST).is_file()


def make_step_path(root: AnyPath, step: int) -> AnyPath:
    """Return the path of a step's checkpoint directory, such as root/step-000123."""
    return root / f"step-{step:06d}"


def publish_directory(draft: Path, manifest: Manifest, *, keep: int) -> None:
    """Write a draft's manifest, rename the draft to its step, set `latest`, and prune to `keep`."""
    root = draft.parent
    final = root / make_step_path(root, manifest.facts.step).name
    write_new_file(draft / MANIFEST, manifest.text)
    sync_directory(draft)
    require_new_step(final)
    check_shard_files(draft, manifest)
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
    prune_after_save(root, keep)


def prune_after_save(root: AnyPath, keep: int) -> None:
    """Delete all checkpoints except the newest `keep` (0 = none is deleted); log an OSError."""
    try:
        if keep:
            _remove_prunable_checkpoints(root, keep)
    except OSError as error:  # the new one is safe, so the save has not failed
        logger.warning("old checkpoints under %s could not be removed: %s", root, error)


def check_shard_files(folder: AnyPath, manifest: Manifest) -> None:
    """Raise OSError if the draft `folder` lacks a shard file or the file has a wrong size."""
    for name, file in manifest.files.items():
        try:
            with contextlib.closing(open_file(folder / name)) as reader:
                size = reader.get_size()  # a network file system then asks its server
        except (FileNotFoundError, ValueError):
            raise OSError(f"{name} was written and is no longer there") from None
        if size != file.size:
            raise OSError(f"{name} must have the {file.size} bytes that were written, not {size}")


def require_new_step(final: AnyPath) -> None:
    """Raise ValueError if the run has the step of the directory `final`, or a later step."""
    step, newest = parse_step(final) or 0, None
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


def _find_pointer_target(root: AnyPath) -> AnyPath | None:
    """Return the checkpoint that `latest` names, None without one; ValueError if it is damaged."""
    named = _read_pointer(root)
    if named is None:
        return None
    name, digest = named
    try:
        manifest = read_regular_file(root / name / MANIFEST, max_bytes=MAX_TABLE)
    except FileNotFoundError:
        return None
    is_valid = hashlib.sha256(manifest).hexdigest() == digest
    if not is_valid and isinstance(root, RemotePath):
        # A stalled job may have written the pointer late, after another job saved the same step.
        with contextlib.suppress(ValueError):
            is_valid = bool(parse_manifest(manifest.decode("ascii")))
    if not is_valid:
        raise ValueError(
            f"path ({root / POINTER}) must hold the sha256 of {name}/{MANIFEST}, so one of "
            "both is damaged: load an older checkpoint by its path, or use set_latest"
        )
    return root / name


def _read_pointer(root: AnyPath) -> tuple[str, str] | None:
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


def _find_newest_step(root: AnyPath) -> int | None:
    """Return the newest checkpoint's step without reading a manifest; None without checkpoints."""
    named = _read_pointer(root)
    if named is not None and is_complete(root / named[0]):
        return parse_step(root / named[0])
    directories = find_complete_checkpoints(root)
    return parse_step(directories[-1]) if directories else None


def parse_step(path: AnyPath) -> int | None:
    """Return the step number in a checkpoint directory's name; None for other names."""
    match = _STEP_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def format_pointer(name: str, manifest: bytes) -> bytes:
    """Return the content of the pointer file to the checkpoint `name` with this manifest."""
    return f"{name} {hashlib.sha256(manifest).hexdigest()}\n".encode("ascii")


def _write_pointer(root: Path, name: str, manifest: bytes) -> Path:
    """Write a temporary pointer file with `name` and the SHA-256 of `manifest`; return its path."""
    pointer = root / f".{POINTER}-{uuid.uuid4().hex[:8]}"
    try:
        write_new_file(pointer, format_pointer(name, manifest).decode("ascii"))
    except OSError:
        pointer.unlink(missing_ok=True)
        raise
    return pointer
