"""A world whose other ranks do not exist: meshes, plans and steps of one rank, on one machine."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from moecore.base.fields import Count, CountOrZero, check_arguments
from moecore.base.torch_names import clear_sharding_caches


@contextmanager
def fake_world(world_size: Count, rank: CountOrZero = 0) -> Iterator[None]:
    """Within, this process is one rank of a world, whose collectives return at once.

    What a collective would bring is whatever its output held, so numbers mean nothing; shapes,
    sizes and who owns what are those of the real world.

    Args:
        world_size: ranks.
        rank: which one this is.

    Raises:
        ValueError: where a process group is there already, or for a rank that the world lacks.
    """
    check_arguments(fake_world, locals())
    if dist.is_initialized():
        raise ValueError(
            f"the default process group ({dist.get_world_size()} ranks) must not be there for a "
            "fake world: plan in a process of its own"
        )
    if rank >= world_size:
        raise ValueError(f"rank ({rank}) must be < world_size ({world_size}): pass a smaller one")
    clear_sharding_caches()  # of meshes with the same sizes, whose groups are gone
    store, hook = dist.HashStore(), sys.excepthook
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # each group puts its rank before the lines of errors
        clear_sharding_caches()


@contextmanager
def quiet() -> Iterator[None]:
    """Within, nobody is warned of what a plan is not asked about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def new_garbage() -> Iterator[None]:
    """Within, garbage is collected among new objects alone: modules are many, and none of it."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
