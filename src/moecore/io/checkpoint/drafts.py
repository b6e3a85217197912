"""Attempts to save a step, and their publication, in a directory or on object storage.

    s3://bucket/run/
      step-000200/
        rank-00000-5f3c0a12d1e9b764.safetensors    of the attempt 5f3c0a12d1e9b764
        moecore.json                               the manifest, which names the files
      latest
      .owner                                       the job that may publish

A manifest makes a step on object storage complete. Two attempts at a step have different file
names, and a save deletes no files of another attempt at its step. Therefore a manifest of a stalled
job, which may arrive late, names files that exist. Pruning also deletes incomplete older steps.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from moecore.io.checkpoint.directory import (
    POINTER,
    check_shard_files,
    format_pointer,
    is_complete,
    make_step_path,
    prune_after_save,
    publish_directory,
    require_new_step,
)
from moecore.io.checkpoint.files import MAX_TABLE, read_regular_file, remove_leftovers
from moecore.io.checkpoint.lock import require_owner
from moecore.io.checkpoint.manifest import MANIFEST, Manifest
from moecore.io.checkpoint.object_storage import AnyPath, RemotePath


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """The shard files of one attempt to save a step, before their publication."""

    root: AnyPath
    folder: AnyPath  # a hidden directory, or the step's prefix on object storage
    suffix: str = ""  # of file names
    owner: bytes = b""  # the owner object that the job wrote on object storage

    def make_file_path(self, number: int) -> AnyPath:
        """Return the path of the shard file of rank `number`."""
        return self.folder / f"rank-{number:05d}{self.suffix}.safetensors"


def create_draft(root: AnyPath, step: int, owner: bytes = b"") -> Draft:
    """Create a draft; ValueError unless `step` is the newest. `owner`: the lock's `owner_text`."""
    if isinstance(root, Path):
        root.mkdir(parents=True, exist_ok=True)
    final, attempt = make_step_path(root, step), uuid.uuid4().hex
    require_new_step(final)
    if isinstance(root, RemotePath):
        return Draft(root=root, folder=final, suffix=f"-{attempt[:16]}", owner=owner)
    remove_leftovers(root)
    folder = root / f".{final.name}.tmp-{attempt[:8]}"
    folder.mkdir()
    return Draft(root=root, folder=folder)


def publish(draft: Draft, manifest: Manifest, *, keep: int) -> None:
    """Complete a draft, set `latest`, prune to `keep`; OSError if another job took over the run."""
    root, folder = draft.root, draft.folder
    if isinstance(folder, Path):
        publish_directory(folder, manifest, keep=keep)
        return
    data = manifest.text.encode("ascii")
    check_shard_files(folder, manifest)
    require_owner(root, draft.owner)
    require_new_step(folder)
    (folder / MANIFEST).write(data)
    require_owner(root, draft.owner)  # again, because an upload may take minutes
    (folder.parent / POINTER).write(format_pointer(folder.name, data))
    prune_after_save(root, keep)


def remove_draft(draft: Draft) -> None:
    """Delete the draft's shard files after an error, unless the step's manifest lists them."""
    folder = draft.folder
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with contextlib.suppress(OSError):  # remaining files are never read
        if is_complete(folder):
            manifest = read_regular_file(folder / MANIFEST, max_bytes=MAX_TABLE)
            if draft.suffix.encode() in manifest:
                return
        for path in folder.iterdir():
            if draft.suffix in path.name:
                path.unlink()
