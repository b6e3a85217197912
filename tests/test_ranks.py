import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import run_ranks


def look(rank: int, device: torch.device) -> list[tuple[int, str | None, int]]:
    found: list[tuple[int, str | None, int]] = [(0, None, 0)] * dist.get_world_size()
    dist.all_gather_object(found, (rank, os.environ.get("MOECORE_TEST"), hash("w13")))
    return found


def fail(rank: int, device: torch.device, bad: int) -> None:
    if rank == bad:
        raise ValueError(f"rank {rank} is bad")
    time.sleep(600)  # stopped before; in a collective, its own error may come first


@pytest.mark.parametrize("environ", ["one", "another"])
def test_ranks_know_the_environment_and_one_hashes_otherwise(environ, monkeypatch) -> None:
    monkeypatch.setenv("MOECORE_TEST", environ)
    ranks, environs, hashes = zip(*run_ranks(3, look), strict=True)
    assert ranks == (0, 1, 2) and set(environs) == {environ} and hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_failing_rank_stops_all_with_its_traceback(bad: int) -> None:
    with pytest.raises(Exception, match=rf"Process {bad} terminated(?s:.*)rank {bad} is bad"):
        run_ranks(2, fail, bad)


def all_operations(rank: int, device: torch.device) -> dict[str, Any]:
    """Run each operation of a group of three ranks, and of two of them in another order."""
    n, ops = dist.get_world_size(), dist.ReduceOp
    generator = torch.Generator().manual_seed(rank)
    pair = dist.new_group([2, 0])

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-50, 50, shape, generator=generator).double()

    found: dict[str, Any] = {}
    for op in (ops.SUM, ops.MAX, ops.MIN, ops.PRODUCT):
        dist.all_reduce(x := numbers(2, 3), op)
        dist.reduce(y := numbers(3), 1, op)
        dist.reduce_scatter_tensor(z := numbers(2), numbers(2 * n), op)
        found[f"reduced {op}"] = [x, y if rank == 1 else None, z]
    dist.broadcast(x := numbers(4).bool(), src=2)
    dist.all_gather(parts := [numbers(2) for _ in range(n)], numbers(2))
    dist.all_gather_into_tensor(whole := numbers(n * 2, 3), numbers(2, 3))
    dist.scatter(mine := numbers(2), [numbers(2) for _ in range(n)] if rank == 1 else None, src=1)
    dist.gather(numbers(2), here := [numbers(2) for _ in range(n)] if rank == 0 else None, dst=0)
    found["moved"] = [x, parts, whole, mine, here]
    sizes = [[1, 0, 2], [0, 3, 1], [2, 2, 0]]  # rows from a rank to another
    received = numbers(sum(row[rank] for row in sizes), 2)
    sent = numbers(sum(sizes[rank]), 2)
    dist.all_to_all_single(received, sent, [row[rank] for row in sizes], sizes[rank])
    found["all to all"] = [received]
    after, before = (rank + 1) % n, (rank - 1) % n
    works = [dist.isend(numbers(2, 2), after), dist.isend(numbers(1), after)]
    works += [dist.irecv(first := numbers(2, 2), before), dist.irecv(second := numbers(1), before)]
    for work in reversed(works):
        work.wait()
    found["messages"] = [first, second]
    if rank != 1:
        dist.all_gather_object(objects := [None, None], {"rank": rank}, group=pair)
        found["objects"] = objects
    everything: list[Any] = [None] * n
    dist.all_gather_object(everything, found)
    return everything


def test_shared_memory_moves_and_sums_what_gloo_does() -> None:
    want, got = run_ranks(3, all_operations, over_gloo=True), run_ranks(3, all_operations)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def read_before_it_ends(rank: int, device: torch.device) -> list[list[float]]:
    x = torch.ones(2)
    works = [dist.all_reduce(x, async_op=True)]
    time.sleep(0.1)  # the other one has begun it, too
    early = x.tolist()
    others = [torch.full((2,), float(i)) for i in range(9)]
    works += [dist.all_reduce(y, async_op=True) for y in others]
    for work in reversed(works):
        work.wait()
    return [early, x.tolist(), *(y.tolist() for y in others)]


def test_a_result_is_not_there_before_it_is_waited_for() -> None:
    early, *sums = run_ranks(2, read_before_it_ends)
    assert early == [1.0, 1.0], "what a rank reads without wait() is wrong in every run"
    assert sums == [[2.0, 2.0], *([2.0 * i, 2.0 * i] for i in range(9))]
