"""The store through which the ranks of a launcher find each other, with equal world sizes.

Backends connect ranks in pairs. If ranks have different values of WORLD_SIZE, gloo repeats this
for longer than its timeout, and NCCL waits. The store needs no peers, so it compares the values.
"""

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# Keys of the store: rank 0's world size, the error text, and what ranks have done.
SIZE, PROBLEM = "world size", "problem"
COMPARISON, DEPARTURES, END = "comparison", "departures", "end"
COUNTER = " ranks"  # suffix of a key: the counter of the ranks that wait for the key


def join_store(timeout: timedelta | None) -> tuple[dist.Store, int, int]:
    """Return the launcher's store, this rank and the world size; ValueError if sizes differ."""
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    store: dist.Store
    store, rank, world_size = next(dist.rendezvous("env://", **options))
    if timeout is not None:
        store.set_timeout(timeout)
    _check_world_size(dist.PrefixStore("moecore", store), rank, world_size)
    return dist.PrefixStore("default_pg", store), rank, world_size


def _check_world_size(store: dist.Store, rank: int, world_size: int) -> None:
    """Raise a ValueError on every rank if a rank has another world size than rank 0."""
    if rank == 0:
        store.set(SIZE, str(world_size))
    first = int(store.get(SIZE))
    if world_size != first:
        sizes = f"{world_size} on rank {rank}, {first} on rank 0"
        fix = "start ranks with torchrun, which sets this variable"
        store.set(PROBLEM, f"WORLD_SIZE ({sizes}) must be the same on all ranks: {fix}")
    _wait_for_ranks(store, COMPARISON, first)
    if store.check([PROBLEM]):
        problem = store.get(PROBLEM).decode()
        with suppress(dist.DistError):  # rank 0 has the store, so it ends last
            _wait_for_ranks(store, END, first)
        raise ValueError(problem)
    # A launcher's store may serve the next start of ranks, whose number may be another one.
    if store.add(DEPARTURES, 1) == first:
        for key in (SIZE, COMPARISON, COMPARISON + COUNTER, DEPARTURES):
            store.delete_key(key)


def _wait_for_ranks(store: dist.Store, key: str, num_ranks: int) -> None:
    """Wait until `num_ranks` ranks have called this function with this key."""
    if store.add(key + COUNTER, 1) == num_ranks:
        store.set(key, "")
    store.wait([key])
