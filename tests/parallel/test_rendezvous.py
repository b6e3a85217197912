from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from moecore.parallel.rendezvous import _check_world_size
from tests.helpers.errors import error_of


def outcomes(store: dist.Store, sizes: list[int]) -> list[str]:
    """Return the error of each rank; rank i has the world size `sizes[i]`."""

    def check(rank: int) -> str:
        return error_of(lambda: _check_world_size(store, rank, sizes[rank]))

    with ThreadPoolExecutor(len(sizes)) as pool:
        return list(pool.map(check, range(len(sizes))))


@pytest.fixture
def store() -> dist.Store:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=30))
    return store


def test_starts_of_other_numbers_of_ranks_share_a_store(store: dist.Store) -> None:
    for number in (2, 5, 5, 1, 3):
        assert outcomes(store, [number] * number) == ["no error"] * number


@pytest.mark.parametrize("sizes", [[3, 2, 3], [3, 3, 4]])
def test_every_rank_raises_the_same_line(store: dist.Store, sizes: list[int]) -> None:
    line, *others = outcomes(store, sizes)
    assert others == [line] * 2 and line.startswith("WORLD_SIZE (") and " 3 on rank 0)" in line
