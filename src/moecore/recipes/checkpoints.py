"""Where a run's checkpoints are: a directory or URL, and the memory of its hosts.

The file `memory-id` in the directory of the checkpoints names the checkpoints in memory. Without
this file, such as in a new directory or after `set_latest`, a run begins without checkpoints in
memory.
"""

import uuid
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from moecore.io import Saver, connect_host_memory, latest
from moecore.io.checkpoint.directory import CHECKPOINTS, MEMORY_ID, parse_step
from moecore.io.checkpoint.files import read_regular_file
from moecore.io.checkpoint.host_memory import SCHEME, find_complete
from moecore.io.checkpoint.object_storage import AnyPath, RemotePath, make_path
from moecore.io.checkpoint.ranks import run_on_first_rank
from moecore.recipes.files import name_option_in_errors
from moecore.recipes.options import RunConfig


def get_checkpoint_dir(args: RunConfig) -> AnyPath:
    """Return the path of a run's checkpoints; ValueError for a URL that fsspec does not open."""
    with name_option_in_errors("--checkpoint-dir"):
        return make_path(args.checkpoint_dir or args.run_dir / CHECKPOINTS)


def connect_memory(args: RunConfig) -> AnyPath | None:
    """Return the root of the run's checkpoints in host memory; None = disabled. Collective."""
    if not args.memory_checkpoint_every:
        return None
    connect_host_memory()
    path = get_checkpoint_dir(args) / MEMORY_ID

    def read_or_create_id() -> str:
        with suppress(FileNotFoundError):
            return read_regular_file(path, max_bytes=32).decode("ascii")
        new_id = uuid.uuid4().hex
        if isinstance(path, RemotePath):
            path.write(new_id.encode())
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(new_id)
        return new_id

    return make_path(f"{SCHEME}://{run_on_first_rank(read_or_create_id)}")


def find_newest_checkpoint(args: RunConfig) -> AnyPath | None:
    """Return the newest checkpoint of a run, in memory or in its directory. Collective.

    Older and incomplete checkpoints in memory are deleted, so the run can save their steps again.
    """
    memory = connect_memory(args)

    def find() -> AnyPath | None:
        newest = latest(get_checkpoint_dir(args))
        in_memory = None if memory is None else find_complete(memory)
        if in_memory is not None and (newest is None or _get_step(in_memory) >= _get_step(newest)):
            return in_memory
        if isinstance(memory, RemotePath):
            memory.remove_all()
        return newest

    # On one rank: a slow file system may show another one, or none, to another rank.
    return run_on_first_rank(find)


def read_latest_step(args: RunConfig) -> int:
    """Return the step of a run's newest checkpoint; 0 = no checkpoint. Collective."""
    newest = find_newest_checkpoint(args)
    return 0 if newest is None else _get_step(newest)


def _get_step(path: AnyPath) -> int:
    """Return the step that a checkpoint's directory is named after."""
    step = parse_step(path)
    assert step is not None, "latest returns paths of steps"
    return step


def open_memory_saver(args: RunConfig, job: Any) -> AbstractContextManager[Saver | None]:
    """Return a context with the `Saver` of checkpoints in host memory; None = off. Collective."""
    memory = connect_memory(args)
    if memory is None:
        return nullcontext()
    return Saver(memory, job.model, job.optimizers, keep=1, config=job.config)


def clear_memory(args: RunConfig) -> None:
    """Delete the checkpoints in memory of a run that has finished. Collective."""
    memory = connect_memory(args)
    if isinstance(memory, RemotePath):
        run_on_first_rank(memory.remove_all)
