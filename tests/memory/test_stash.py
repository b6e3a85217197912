"""Rows in pages come back as they were, cost what is in use, and are free again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from moecore.kernels.rows.free_list import FREE_WORD, HOST_FREE_WORD, WANTED_WORD
from moecore.memory import offload as offload_module
from moecore.memory.stash import Stash
from tests.memory.blocks import LateStreams
from tests.memory.test_offload import ORDERS, assert_equal, gradients
from tests.memory.towers import Tower, make_tower, stashed

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def group(no_group_left: None) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield


def is_full(stash: Stash) -> bool:
    """Whether all pages of all pools are free."""
    return all(
        pool.state[FREE_WORD] == pool.pages.shape[0]
        and pool.state[HOST_FREE_WORD] == pool.host_pages.shape[0]
        and pool.state[WANTED_WORD] == 0
        for pool in stash.pages.pools.values()
    )


@pytest.mark.parametrize("late", [False, True], ids=["", "late copies"])
@pytest.mark.parametrize("run", ORDERS, ids=lambda run: run.__name__)
def test_gradients_have_the_bits_of_those_without(
    run: Callable[[Tower], None], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late copies come to memory of NaN, which rows that are not in use still are then."""
    if late:
        monkeypatch.setattr(offload_module, "Streams", LateStreams)
    model = make_tower(3)
    want = gradients(model, run)
    stash = stashed(model)
    for _ in range(2):
        assert_equal(gradients(model, run), want)
        assert stash.out_bytes > 0 and is_full(stash)
    stash.check()
    assert len(stash.pages.pools) == 2, "X and H"
