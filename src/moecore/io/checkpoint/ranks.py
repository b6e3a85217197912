"""Rank numbers, the process group of checkpoints, and actions on rank 0 that raise on all ranks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from moecore.base.failures import make_sendable
from moecore.base.rank_checks import Group, gather_objects
from moecore.base.torch_private import get_default_timeout
from moecore.io.checkpoint.object_storage import AnyPath
from moecore.parallel.pipeline.stage_replicas import AllStages

T = TypeVar("T")


class ControlGroup:
    """A gloo group of all ranks for saves, `group`; None without torch.distributed. Collective."""

    def __init__(self) -> None:
        self.group: Group = None
        if dist.is_initialized() and dist.get_backend() != "fake":
            self.group = dist.new_group(backend="gloo", timeout=get_default_timeout())
        self._finalizer = weakref.finalize(self, _destroy_group, self.group)
        self._finalizer.atexit = False

    def close(self) -> None:
        """Destroy the group; a second call has no effect."""
        self._finalizer()


def _destroy_group(group: Group) -> None:
    """Destroy a process group, unless all groups are already destroyed."""
    if group is not None:
        with contextlib.suppress(ValueError, AssertionError):  # it is destroyed
            dist.destroy_process_group(group)


def get_rank_and_world() -> tuple[int, int]:
    """Return this rank and the number of ranks; 0 and 1 without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def is_first_rank() -> bool:
    """Whether this is rank 0, or the only process."""
    return get_rank_and_world()[0] == 0


def is_first_of_stage(stages: AllStages) -> bool:
    """Whether this rank is the first rank of its pipeline stage."""
    return dist.get_rank() % (dist.get_world_size() // stages.pp) == 0


def run_on_first_rank(action: Callable[[], T], group: Group = None) -> T:
    """Run an action on rank 0; return its result or raise its error on every rank. Collective."""
    if not dist.is_initialized():
        return action()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = make_sendable(error)
    dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def check_same_path(path: AnyPath) -> None:
    """Raise ValueError if paths differ, or only some ranks see the path. Collective."""
    answers = gather_objects((path.name, path.is_dir()))
    if len({name for name, _ in answers}) > 1:
        raise ValueError(
            f"path ({path.name}) must be the same on every rank, but rank 0 has {answers[0][0]}: "
            "let one rank look for the latest and broadcast it"
        )
    seen = [is_visible for _, is_visible in answers]
    if any(seen) and not all(seen):
        raise ValueError(
            f"path ({path}) must be visible to every rank, but rank {seen.index(False)} does not "
            "see it: use a shared file system"
        )


def check_draft_is_visible(draft: AnyPath, group: Group = None) -> None:
    """Raise ValueError if a rank does not see `draft`, which rank 0 created. Collective."""
    seen = gather_objects(draft.is_dir(), group)
    if not all(seen):
        raise ValueError(
            f"root ({draft.parent}) must be one directory for all ranks, but rank "
            f"{seen.index(False)} does not see what rank 0 made there: use a shared file system"
        )
