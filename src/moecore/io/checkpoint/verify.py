"""Whether the files of a checkpoint are those that its manifest describes; all ranks share it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from moecore.base.fields import check_arguments
from moecore.io.checkpoint.manifest import Manifest, read_manifest
from moecore.io.checkpoint.meter import Meter, Progress
from moecore.io.checkpoint.ranks import gather, on_first_rank
from moecore.io.checkpoint.shard_file import check_file, layout_of

Verify = Literal["full", "sizes"]
_THREADS = 4


def verify(
    path: str | os.PathLike[str], how: Verify = "full", *, progress: Progress | None = None
) -> Manifest:
    """Check a checkpoint and return its manifest; nothing is loaded. Collective.

    Args:
        path: its directory.
        how: "full" hashes every byte, each file on one rank; "sizes" looks at sizes and headers.
        progress: called with (bytes done, bytes expected) of this rank.

    Raises:
        ValueError: on every rank, naming the first damaged file.
        OSError: when a rank could not read.
    """
    check_arguments(verify, locals())
    manifest = on_first_rank(lambda: read_manifest(Path(path)))
    verify_files(Path(path), manifest, how, Meter(progress))
    return manifest


def verify_files(path: Path, manifest: Manifest, how: Verify, meter: Meter) -> None:
    """Raise on every rank when a file is damaged; see `verify`."""
    names = sorted(manifest.files)
    if dist.is_initialized():
        names = names[dist.get_rank() :: dist.get_world_size()]
    if how == "full":
        meter.expect(sum(manifest.files[name].size for name in names))

    def check(name: str) -> Exception | None:
        layout = layout_of(manifest.entries_of(name))
        try:
            problem = check_file(
                path / name, layout, manifest.files[name], full=how == "full", meter=meter
            )
        except OSError as error:
            return OSError(f"path ({path / name}) could not be read to verify it: {error}")
        if problem is None:
            return None
        return ValueError(
            f"path ({path / name}) must be as it was saved, but {problem}: load another checkpoint"
        )

    # Hashing runs without the interpreter's lock, so files go side by side.
    with ThreadPoolExecutor(min(_THREADS, max(1, len(names)))) as pool:
        mine = next((error for error in pool.map(check, names) if error is not None), None)
    for error in gather(mine):
        if error is not None:
            raise error
