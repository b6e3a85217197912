from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from moecore.kernels.rows.free_list import DEMAND_WORD, FREE_WORD, MISSED_WORD
from moecore.train.memory.stash import DispatchPages, Stash
from tests.train.memory import test_offload_gpu as offload_gpu
from tests.train.memory.test_offload_gpu import (
    assert_equal,
    capture,
    check_replays,
    host_never_waits,
    peak,
)
from tests.train.memory.towers import RoomyDispatcher, Tower, make_tower, stashed

pytestmark = pytest.mark.gpu

TOKENS, DIM, HIDDEN, TOP_K = 4096, 512, 1024, 2
PAUSE = 20_000_000  # cycles: 10 ms, longer than all copies of a layer
X_BYTES = RoomyDispatcher.room * TOKENS * DIM * 2
H_BYTES = RoomyDispatcher.room * TOKENS * TOP_K * 2 * HIDDEN * 2


def make(num_layers: int) -> Tower:
    model = make_tower(num_layers, "roomy", sizes=dict(dim=DIM, hidden_dim=HIDDEN))
    model.embedding.requires_grad_(False)  # whose gradient is not reproducible
    return model.to("cuda", torch.bfloat16)


def stash_of(model: Tower) -> Stash:
    return stashed(model, page_rows=64, factor=2.0)


tokens = partial(offload_gpu.tokens, length=TOKENS)
gradients = partial(offload_gpu.gradients, length=TOKENS)


def check_all_free(stash: Stash) -> None:
    stash.wait_and_raise_errors()
    pool = stash.pages.pool
    words = pool.state.tolist()
    assert (words[FREE_WORD], words[DEMAND_WORD]) == (pool.pages.shape[0], 0)
    assert words[MISSED_WORD] == 0
    assert pool.free_ids.sort().values.tolist() == list(range(pool.pages.shape[0]))


@pytest.mark.parametrize("which", ["none", "copy_rows_in", "copy_rows_out", "compute"])
def test_late_copies_and_late_compute_give_equal_gradients(which, monkeypatch) -> None:
    model = make(4)
    want, stash = gradients(model, (0, 1)), stash_of(model)

    def late(method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            torch.cuda._sleep(PAUSE)
            method(*args)

        return call

    if which.startswith("copy"):
        monkeypatch.setattr(DispatchPages, which, late(getattr(DispatchPages, which)))
    if which == "compute":
        for layer in model.layers:
            layer.norm.register_forward_pre_hook(lambda *_: torch.cuda._sleep(PAUSE))
            layer.norm.register_full_backward_hook(lambda *_: torch.cuda._sleep(PAUSE))
    for _ in range(3):
        assert_equal(gradients(model, (0, 1)), want)
    check_all_free(stash)


def held(model: Tower) -> int:
    """Return the bytes that lie between forward and backward."""
    gradients(model)
    torch.cuda.synchronize()
    before, loss = torch.cuda.memory_allocated(), model(*tokens(0))
    after = torch.cuda.memory_allocated()
    loss.backward()
    return after - before


def test_one_layer_has_memory_of_the_worst_case() -> None:
    """The others' rows are in pages, which are there before and after."""
    model = make(6)
    without, stash, with_pages = held(model), stash_of(model), held(model)
    saved = 5 * (X_BYTES + H_BYTES)
    assert without - with_pages >= 0.97 * saved
    actual = 6 * (X_BYTES + H_BYTES) / RoomyDispatcher.room
    assert stash.pages.pool.pages.nbytes <= 2.01 * actual, "the factor"


def test_the_peak_grows_by_less_than_the_worst_case() -> None:
    """By what else a layer keeps: the router's, and the block's norm."""
    peaks = {}
    for num_layers in (2, 6):
        model = make(num_layers)
        without = peak(model, TOKENS)
        stash_of(model)
        peaks[num_layers] = without, peak(model, TOKENS)
    (small, few), (large, many) = peaks[2], peaks[6]
    assert large - small >= 4 * (X_BYTES + H_BYTES)
    assert many - few <= large - small - 0.97 * 4 * (X_BYTES + H_BYTES)


def test_the_host_never_waits() -> None:
    model = make(3)
    stash_of(model)
    gradients(model)
    with host_never_waits():
        gradients(model)


def test_replays_of_a_graph_compute_what_eager_code_does() -> None:
    """Also after an eager forward without backward, and while one's rows are in pages.

    None that is alive may meet a capture: torch adds up its gradients on another stream.
    """
    model = make(4)
    stash = stash_of(model)
    model(*tokens(2))
    check_replays(make(4), model, TOKENS, after=lambda: check_all_free(stash))


def pool_bytes(graph: torch.cuda.CUDAGraph) -> int:
    """Return the bytes of the segments that belong to a graph's memory pool, and no others."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if s["segment_pool_id"] == graph.pool())


def test_a_graph_shares_the_memory_of_the_worst_case() -> None:
    """With pages, a graph's pool grows by less per layer than the rows of a layer."""
    sizes = {}
    for how in ("plain", "pages"):
        for num_layers in (2, 6):
            model = make(num_layers)
            if how == "pages":
                stash_of(model)
            inputs = tuple(t.clone() for t in tokens(0))
            gradients(model)
            graph = capture(model, inputs)
            sizes[how, num_layers] = pool_bytes(graph)
            graph.reset()
            del graph, model
    grown = {how: sizes[how, 6] - sizes[how, 2] for how in ("plain", "pages")}
    assert grown["plain"] - grown["pages"] >= 0.9 * 4 * (X_BYTES + H_BYTES)
