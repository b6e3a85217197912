"""Clones over real GPUs: bits of the references, stress, graphs, no sync, late ranks.

    python -m pytest -m gpu tests/moe/test_clones_gpu.py

One rank per GPU of the host, or four on its only one, spawned once.
"""

import random
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecore import CloneOptions, MoELayer
from moecore.kernels.exchange.clones import ClonePlaces
from moecore.moe.clones import Cloner
from moecore.moe.dispatch.exchange_pool import ExchangePool
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from tests.helpers.errors import error_of
from tests.helpers.ranks import ranks_fixture
from tests.helpers.waits import syncs_are_errors
from tests.kernels.exchange.oracles import bring_home_ref, fetch_ref
from tests.moe.test_nvlink_gpu import (
    NUM_RANKS,
    captured,
    foldings,
    make_layer,
    nvlink_of,
    place_of,
    pytestmark,
    step,
)

__all__ = ["pytestmark"]

ROUNDS = 2000
SHAPE = (33, 24)  # of an expert's row
NUM_LOCAL, NUM_CLONES = 3, 2


def pool_of(ep: int, etp: int, **options: Any) -> ExchangePool:
    return nvlink_of(place_of(ep, etp), **options).exchanges


def places_of(ep: int, etp: int, seed: int) -> ClonePlaces:
    """The same plan on all ranks, with empty places."""
    drawn, found = random.Random(seed), []
    for n in range(ep * NUM_CLONES):
        others = [x for x in range(ep * NUM_LOCAL) if x // NUM_LOCAL != n // NUM_CLONES]
        found.append(drawn.choice([-1, *others]))
    experts_N = torch.tensor(found, dtype=torch.int32).pin_memory().cuda(non_blocking=True)
    return ClonePlaces(experts_N=experts_N, num_clones=NUM_CLONES, num_local=NUM_LOCAL, etp=etp)


def drawn(rank: int, seed: int, dtype: torch.dtype) -> Tensor:
    """What a rank has of its experts and clones, on any rank that asks."""
    generator = torch.Generator("cuda").manual_seed(seed * NUM_RANKS + rank)
    shape = (NUM_LOCAL + NUM_CLONES, *SHAPE)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def stress() -> dict[str, Any]:
    """Folding -> how many of `ROUNDS` had other bits than the references."""
    found = {}
    for name, (ep, etp) in foldings().items():
        pool, wrong = pool_of(ep, etp), torch.zeros((), dtype=torch.int64, device="cuda")
        group = pool.group
        me, mine = dist.get_rank(group), random.Random(dist.get_rank())
        exchange = pool.get_clone_exchange(wrong.device)
        for seed in range(ROUNDS):
            dtype = (torch.float32, torch.bfloat16)[seed % 2]
            places = places_of(ep, etp, seed)
            everyone = [drawn(r, seed, dtype) for r in range(me % etp, ep * etp, etp)]
            if mine.random() < 0.3:
                torch.cuda._sleep(mine.randint(1, 400_000))
            ours = drawn(me, seed, dtype)
            (there,) = exchange.fetch_clone_weights([ours[:NUM_LOCAL].contiguous()], places)
            (home,) = exchange.add_clone_grads_([ours], places)
            block = me // etp
            wrong += ~same(there, fetch_ref([t[:NUM_LOCAL] for t in everyone], places)[block])
            wrong += ~same(home, bring_home_ref(everyone, places)[block])
            rank = torch.full((1, 5), me, device="cuda")
            wrong += (
                exchange.all_gather_row(rank)[:, 0] != torch.arange(ep * etp, device="cuda")
            ).any()
        pool.wait_and_raise_errors()
        dist.all_reduce(wrong)
        found[name] = int(wrong)
        pool.close()
    return found


def same(ours: Tensor, theirs: Tensor) -> Tensor:
    return (ours.view(torch.int16) == theirs.contiguous().view(torch.int16)).all()


def pieces() -> bool:
    """An expert that travels in several pieces."""
    pool = pool_of(NUM_RANKS, 1)
    places, me = places_of(NUM_RANKS, 1, 5), dist.get_rank()
    everyone = []
    for rank in range(NUM_RANKS):
        generator = torch.Generator("cuda").manual_seed(rank)
        shape = (NUM_LOCAL + NUM_CLONES, 5 << 20)
        everyone.append(torch.randn(shape, generator=generator, device="cuda"))
    exchange = pool.get_clone_exchange(everyone[0].device)
    right = fetch_ref([t[:NUM_LOCAL] for t in everyone], places)[me]
    home = bring_home_ref(everyone, places)[me]
    (there,) = exchange.fetch_clone_weights([everyone[me][:NUM_LOCAL].contiguous()], places)
    is_right = bool(same(there, right))
    (ours,) = exchange.add_clone_grads_([everyone[me]], places)
    return is_right and bool(same(ours, home))


def cloned_layer() -> tuple[MoELayer, ExchangePool]:
    """Return a layer in which hot experts have clones."""
    options = CloneOptions(per_rank=NUM_CLONES, min_share=0.0)
    base = place_of(NUM_RANKS, 1)
    layer = make_layer(base)
    place = replace(base, num_clones=NUM_CLONES)
    ours = nvlink_of(place, row_factor=float(2 * NUM_RANKS))
    layer.dispatcher = NVLinkDispatcher(place, ours.exchanges)
    layer.cloner = Cloner(place, base.group, options, ours.exchanges)
    return layer, ours.exchanges


def layers() -> dict[str, Any]:
    """Whether replays have the bits of eager steps, none of which syncs; and errors."""
    cloned, pool = cloned_layer()
    plain = make_layer(place_of(NUM_RANKS, 1))
    plain.dispatcher = nvlink_of(place_of(NUM_RANKS, 1), row_factor=float(2 * NUM_RANKS))
    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16)
    graph, found = captured(lambda: step(cloned, x))
    cloned.cloner.drop_step_counts()  # type: ignore[union-attr]
    good, errors = True, []
    for seed in range(10):
        torch.manual_seed(seed * NUM_RANKS + dist.get_rank())
        x.normal_().add_(seed % 3)  # the same experts are hot on all ranks
        graph.replay()
        replayed = [t.clone() for t in found]
        torch.cuda.synchronize()
        with syncs_are_errors():
            eager = step(cloned, x)
        good = good and all(torch.equal(a, b) for a, b in zip(replayed, eager, strict=True))
        for a, b in zip(eager, step(plain, x), strict=True):
            errors.append(float((a - b).float().norm() / b.float().norm()))
    counted = cloned.cloner.get_counts(x.device)  # type: ignore[union-attr]
    dist.all_reduce(counted)
    pool.wait_and_raise_errors()
    return {"good": good, "errors": max(errors), "counted": counted.tolist()}


def absent_rank() -> str:
    """The last rank stays away from one transfer; return rank 0's error."""
    pool = pool_of(NUM_RANKS, 1, timeout_s=1.0)
    places, rows = places_of(NUM_RANKS, 1, 0), torch.zeros(NUM_LOCAL, *SHAPE, device="cuda")
    exchange, message = pool.get_clone_exchange(rows.device), ""
    exchange.fetch_clone_weights([rows], places)
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() != NUM_RANKS - 1:
        exchange.fetch_clone_weights([rows], places)
        exchange.fetch_clone_weights([rows], places)  # waits no more, for nobody
        torch.cuda.synchronize()
        message = error_of(lambda: pool.get_clone_exchange(rows.device))
    dist.barrier()  # nobody frees what another rank still writes
    return message


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    return {"stress": stress(), "pieces": pieces(), "layers": layers(), "absent": absent_rank()}


found = ranks_fixture(NUM_RANKS, worker, device_type="cuda")


def test_no_round_differs_from_the_references(found: dict[str, Any]) -> None:
    assert not any(found["stress"].values()), found["stress"]


def test_long_rows_travel_in_pieces(found: dict[str, Any]) -> None:
    assert found["pieces"]


def test_a_graph_holds_clones_and_nothing_waits_on_the_host(found: dict[str, Any]) -> None:
    layers = found["layers"]
    assert layers["good"]
    number, forwards = layers["counted"]
    assert number > 0 and forwards == 20 * NUM_RANKS, "replays count, too"
    assert layers["errors"] < 2**-7


def test_a_rank_that_does_not_come_is_named(found: dict[str, Any]) -> None:
    late = NUM_RANKS - 1
    assert f"rank {late} must come to a transfer of clones' weights within" in found["absent"]
