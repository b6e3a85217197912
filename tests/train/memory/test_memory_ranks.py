from collections import Counter
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecore import (
    DispatchOptions,
    FSDPOptions,
    MemoryOptions,
    Meshes,
    NVLinkOptions,
    ParallelConfig,
    StashOptions,
    build_meshes,
    parallelize_moe,
)
from moecore.kernels.rows.free_list import DEMAND_WORD
from moecore.models import Decoder, preset
from moecore.parallel.model import phases
from moecore.parallel.model.parallel_state import get_parallel_state
from moecore.train.memory.offload import Offload
from moecore.train.memory.stash import Stash
from tests.helpers.grids import beside
from tests.helpers.ranks import ranks_fixture
from tests.moe.emulated_exchange import EmulatedExchangePool

WORLD = 6
LAYOUTS = {
    "tp2 x dp3, ep2 x edp3": dict(dp_shard=3, tp=2, ep=2, edp_shard=3),
    "dp6, etp2 x edp3": dict(dp_shard=6, etp=2, edp_shard=3),
}
PRESETS = ("tiny-shared", "tiny-deepseek-v3")
REPEATED = ("norm", "activation", "rope", "mlp", "shared_experts", "expert_fc1")
OPTIONS = {
    "all kept": MemoryOptions(),
    "gemm_last": MemoryOptions(recompute="gemm_last"),
    "products again": MemoryOptions(recompute=REPEATED),
    "offloaded": MemoryOptions(recompute="gemm_last", offload=("attention", "experts", "rest")),
}
# By day each layout has one of the models.
WHERE = [
    (a, b) for shift in (0, 1) for a, b in zip(LAYOUTS, (*PRESETS, *PRESETS)[shift:], strict=False)
]
CASES = [(*where, option) for where in WHERE for option in [*OPTIONS][1:]]
STASH = MemoryOptions(recompute=("norm",), stash=StashOptions(page_rows=4, factor=6.0))
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_reduce")


def gradients(name, layout, memory, **options) -> tuple[dict[str, Tensor], Any]:
    """Return this rank's gradients after two steps' backwards, and the calls of collectives."""
    model = Decoder(preset(name), device="meta")
    meshes = meshes_of(layout)
    made: list[Offload] = []

    def offload(*args: Any, **kwargs: Any) -> Offload:
        made.append(Offload(*args, **kwargs, min_bytes=1))
        return made[0]

    with patch("moecore.train.memory.apply.Offload", offload):
        fsdp = FSDPOptions(dense_strategy="optim_grads_params")
        parallelize_moe(model, meshes, memory=memory, fsdp=fsdp, **options)
    model.to_empty(device="cpu")
    model.init_weights()
    rank = meshes.dense["dp_shard"].get_local_rank()
    calls: Counter[str] = Counter()
    with patch.multiple(dist, **{n: counted(getattr(dist, n), calls) for n in COLLECTIVES}):
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + rank)
            tokens = torch.randint(0, 100, (2, 24), generator=generator)
            model(tokens, tokens).backward()
    assert all(one.back_bytes == one.out_bytes > 0 for one in made)
    assert len(made) == bool(memory.offload)
    stash = get_parallel_state(model).stash  # type: ignore[union-attr]
    if memory.stash is not None:
        assert isinstance(stash, Stash) and stash.out_bytes > 0
        stash.wait_and_raise_errors()
        assert stash.pages.pool is not None and stash.pages.pool.state[DEMAND_WORD] == 0
    found = {n: p.grad.to_local().clone() for n, p in model.named_parameters()}  # type: ignore[union-attr]
    return found, calls


@cache
def meshes_of(layout: str) -> Meshes:
    return build_meshes(ParallelConfig(**LAYOUTS[layout]), "cpu")


def in_pages(layout: str) -> list[str]:
    """Return the gradients of a model over emulated exchanges that differ with a stash."""
    found: list[dict[str, Tensor]] = []
    with (
        patch.object(phases, "find_peer_store_problem", lambda *_: None),
        patch.object(phases, "find_local_peer_problem", lambda *_: None),
        patch.object(phases, "ExchangePool", EmulatedExchangePool),
    ):
        for memory in (MemoryOptions(), STASH):
            nvlink = NVLinkOptions(max_tokens=48, row_factor=None)
            dispatch = DispatchOptions(name="nvlink", nvlink=nvlink)
            grads, _ = gradients("tiny-shared", layout, memory, dispatch=dispatch)
            found.append(grads)
    return [name for name in found[0] if not torch.equal(found[0][name], found[1][name])]


def counted(function: Any, calls: Counter[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[function.__name__] += 1
        return function(*args, **kwargs)

    return call


def worker(rank: int, device: torch.device, cases: list[tuple[str, ...]]) -> dict[str, Any]:
    """Compare on every rank; return what differs on any, by case."""
    problems: dict[str, Any] = {}
    for layout in LAYOUTS:
        for name in {n: None for where, n, _ in cases if where == layout}:
            want, calls = gradients(name, layout, OPTIONS["all kept"])
            assert calls
            for option in (o for *where, o in cases if where == [layout, name]):
                got, others = gradients(name, layout, OPTIONS[option])
                different = [n for n in want if not torch.equal(got[n], want[n])]
                if others != calls:
                    different.append(f"{others} instead of {calls}")
                everywhere: list[Any] = [None] * WORLD
                dist.all_gather_object(everywhere, different)
                problems[f"{layout}/{name}/{option}"] = [p for one in everywhere for p in one]
        everywhere = [None] * WORLD
        dist.all_gather_object(everywhere, in_pages(layout))
        problems[f"{layout}/in pages"] = [p for one in everywhere for p in one]
    return problems


ran = ranks_fixture(WORLD, worker, "layout", "name", "option")


@pytest.mark.parametrize(
    ("layout", "name", "option"), beside(CASES, CASES[len(CASES) // 2 :], several=True)
)
def test_bits_and_collectives(ran: Any, layout: str, name: str, option: str) -> None:
    assert ran[f"{layout}/{name}/{option}"] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_of_rows_in_pages(ran: Any, layout: str) -> None:
    assert ran[f"{layout}/in pages"] == []
