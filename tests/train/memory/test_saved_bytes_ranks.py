from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moecore import MoEConfig, NVLinkOptions
from moecore.base.options.memory import MemoryOptions, StashOptions
from moecore.base.saved_tensors import use_packer
from moecore.moe.dispatch.allgather import AllGatherDispatcher
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.forced_routing import force_even_load
from moecore.moe.layer import MoELayer
from moecore.moe.placement import ExpertPlacement
from moecore.moe.records import Dispatcher
from moecore.train.memory.saved_bytes import SavedBytes, count_saved_bytes
from tests.helpers.ranks import ranks_fixture
from tests.moe.emulated_exchange import EmulatedExchangePool
from tests.train.memory.test_saved_bytes import Saved

WORLD, T, D, K = 2, 96, 128, 2
CONFIG = MoEConfig(dim=D, hidden_dim=64, num_experts=8, top_k=K)


def nvlink(place: ExpertPlacement, *, fp8: bool = False, **options: Any) -> Dispatcher:
    given = NVLinkOptions(**dict(max_tokens=T, row_factor=None) | options)
    pool = EmulatedExchangePool(place.group, ep=place.ep, options=given, fp8=fp8)
    pool.watch = "skips"
    return NVLinkDispatcher(place, pool)


DISPATCHERS: dict[str, Callable[[ExpertPlacement], Dispatcher]] = {
    "allgather": AllGatherDispatcher,
    "alltoall": AllToAllDispatcher,
    "alltoall, fp8": lambda place: AllToAllDispatcher(place, fp8=True),
    "nvlink": nvlink,
    "nvlink, sent again": lambda place: nvlink(place, keep_rows=False),
    "nvlink, half the room": lambda place: nvlink(place, row_factor=1.0),
    "nvlink, exact": lambda place: nvlink(place, row_factor="exact"),
    "nvlink, fp8": lambda place: nvlink(place, fp8=True),
}


def worker(rank: int, device: torch.device) -> dict[str, tuple[SavedBytes, int, int]]:
    """Return by dispatcher what was predicted, what a forward kept, and what pages save."""
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("ep", "etp"))
    place = ExpertPlacement(group=dist.group.WORLD, num_experts=8, ep=WORLD, etp=1)  # type: ignore[arg-type]
    found = {}
    for name, make in DISPATCHERS.items():
        layer = MoELayer(CONFIG)
        force_even_load(layer)
        layer.experts.shard_parameters(mesh)
        layer.dispatcher = make(place)
        x = torch.randn(T, D, requires_grad=True)
        given = x.detach().to("meta").requires_grad_()
        how: dict[str, Any] = dict(options=MemoryOptions(), device_type="cpu")
        (kept,) = count_saved_bytes(layer, [layer], lambda copy, x=given: copy(x), **how).blocks
        how["options"] = MemoryOptions(stash=StashOptions(page_rows=2))
        (stashed,) = count_saved_bytes(layer, [layer], lambda copy, x=given: copy(x), **how).blocks
        saved = Saved(layer)
        with use_packer(saved):
            y = layer(x)
        found[name] = (kept, saved.num_bytes, kept.num_bytes - stashed.num_bytes)
        y.sum().backward()
    return found


ran = ranks_fixture(WORLD, worker)


@pytest.mark.parametrize("name", DISPATCHERS)
def test_a_rank_keeps_what_was_predicted(ran: Any, name: str) -> None:
    kept, num_bytes, _ = ran[name]
    if "alltoall" in name:  # random choices go to 0.79 of two ranks' tokens, even ones to 0.75
        assert kept.num_bytes == pytest.approx(num_bytes, rel=0.03) and kept.num_bytes > num_bytes
    else:
        assert kept.num_bytes == num_bytes


def test_rows_that_are_sent_again_are_not_kept(ran: Any) -> None:
    rows = WORLD * T * D * 4
    assert ran["nvlink"][0].num_bytes - ran["nvlink, sent again"][0].num_bytes == rows


def test_pages_are_those_of_even_loads(ran: Any) -> None:
    """Of X the rows that random choices send, of H half the room; C is D here."""
    holes, of_h = 2 * (T - round(T * (1 - 6 / 28))), WORLD * T * K // 2
    expected = {"nvlink": holes + of_h, "nvlink, sent again": of_h, "nvlink, exact": holes}
    for name, rows in (expected | {"alltoall": 0}).items():
        assert ran[name][2] == rows * D * 4, name
