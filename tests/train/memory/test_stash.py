import gc
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from moecore import (
    DispatchOptions,
    ExchangeError,
    MemoryOptions,
    MoEConfig,
    MoELayer,
    NVLinkOptions,
    ParallelConfig,
    StashOptions,
    build_meshes,
    parallelize_moe,
)
from moecore.base.saved_tensors import find_used_rows, is_packing, mark_used_rows, use_packer
from moecore.kernels.common import cdiv
from moecore.kernels.rows.free_list import DEMAND_WORD, FREE_WORD, HOST_FREE_WORD, PEAK_WORD
from moecore.kernels.rows.index import build_index
from moecore.kernels.rows.record import Rows
from moecore.moe.experts import _declare_used_rows
from moecore.moe.records import BalancedRows, ExpertInput
from moecore.parallel.model import phases
from moecore.parallel.model.parallel_state import get_capacity
from moecore.train.memory import stash as stash_module
from moecore.train.memory import storages
from moecore.train.memory import streams as streams_module
from moecore.train.memory.apply import apply_memory_options, apply_stash
from moecore.train.memory.offload import Offload
from moecore.train.memory.stash import Stash
from moecore.train.memory.streams import CopyStream
from tests.moe.emulated_exchange import EmulatedExchangePool
from tests.train.memory.blocks import LateStreams, counting_bytes
from tests.train.memory.test_offload import (
    ORDERS,
    assert_equal,
    batch,
    gradients,
    in_order,
    last_first,
    one,
)
from tests.train.memory.towers import DIM, HIDDEN, MAX_TOKENS, TOP_K, Tower, make_tower, stashed

TOKENS = 48  # of `batch(0)`


@pytest.fixture
def group(no_group_left: None) -> None:
    """This process is the only rank; holes are the tokens that it could have had besides."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def all_free(stash: Stash) -> bool:
    pool = stash.pages.pool
    return pool is None or bool(
        pool.state[FREE_WORD] == pool.pages.shape[0]
        and pool.state[HOST_FREE_WORD] == pool.host_pages.shape[0]
        and pool.state[DEMAND_WORD] == 0
    )


def widths(stash: Stash) -> list[tuple[int, bool]]:
    """Bytes of a row of each matrix of a layer, and whether a list has its rows in use."""
    (kind,) = {kind.layout.widths: kind for kind in stash.pages._kinds.values()}.values()
    return list(zip(kind.layout.widths, kind.layout.has_list, strict=True))


def wanted(stash: Stash) -> int:
    """Pages that tables have, or lack."""
    return int(stash.pages.pool.state[DEMAND_WORD])


@pytest.mark.parametrize("run", [None, *ORDERS], ids=lambda run: getattr(run, "__name__", "early"))
def test_gradients_have_the_bits_of_those_without(group, run, monkeypatch) -> None:
    """Late copies come to memory of NaN, which rows that are not in use still are then."""
    if run is not None:
        monkeypatch.setattr(storages, "CopyStreams", LateStreams)
    model, run = make_tower(3), run or one
    want, stash = gradients(model, run), stashed(model)
    for _ in range(2):
        assert_equal(gradients(model, run), want)
        assert stash.out_bytes > 0 and all_free(stash)
    stash.wait_and_raise_errors()
    assert widths(stash) == [(4 * DIM, True), (4 * 2 * HIDDEN, False)], "X and H"


CASES: dict[str, tuple[dict[str, Any], int]] = {  # options of a tower, and widths in pages
    "one choice: as many expert rows as source rows": (dict(sizes=dict(top_k=1)), 2),
    "as many columns in X as in H": (dict(sizes=dict(hidden_dim=8)), 2),
    "a row factor": (dict(row_factor=0.9), 2),
    "rows that are sent again": (dict(keep_rows=False), 1),
    "exact rows, whose source rows have holes": (dict(row_factor="exact"), 1),
    "tokens as FP8": (dict(fp8=True), 2),
    "a padded capacity": (dict(how="padded"), 2),
    "a padded capacity, tokens as FP8": (dict(how="padded", fp8=True), 2),
    "differentiable rows among holes": (dict(how="roomy"), 2),
    "one expert row per source row, tokens as FP8": (dict(sizes=dict(top_k=1), fp8=True), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_with_other_options(group: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages, "CopyStreams", LateStreams)
    options, num_widths = CASES[name]
    model = make_tower(3, **options)
    want, stash = gradients(model, in_order), stashed(model)
    assert_equal(gradients(model, in_order), want)
    assert len(widths(stash)) == num_widths and all_free(stash)
    for block in model.layers:
        block.moe.get_part("experts").set_backend("auto", recompute_fc1=True)
    stash.pages.clear()
    assert_equal(gradients(model, in_order), want)
    has_x = stash.pages.pool is not None
    assert has_x == (name != "rows that are sent again")
    assert not has_x or all(has_list for _, has_list in widths(stash)), "X; H is computed again"


def test_what_lies_between_forward_and_backward_is_what_came(group: None) -> None:
    """One buffer of the worst case, and pages, tables and lists: 5% more than the actual rows."""
    sizes, page = dict(dim=128, hidden_dim=64), 8
    model = make_tower(6, sizes=sizes)
    stash = stashed(model, page_rows=page)
    one(model)  # makes the pools
    row_bytes = 4 * 128
    source, expert = MAX_TOKENS * row_bytes, MAX_TOKENS * TOP_K * row_bytes
    with counting_bytes() as made:
        loss = model(*batch(0))
    alive = made.list_live()
    assert alive.count(source) == alive.count(expert) == 1, "of the last layer"
    places = [copy.piece for copy in stash._copies.values()]
    tables = {place.dispatch.table for place in places if place is not None}
    assert len(tables) == 5, "one per layer"
    pool = stash.pages.pool
    assert pool is not None and pool.page_bytes == page * row_bytes
    held = sum(table.nbytes for table in tables) + wanted(stash) * pool.page_bytes
    actual = 5 * TOKENS * (1 + TOP_K) * row_bytes
    assert actual <= held <= 1.05 * actual
    assert wanted(stash) == 5 * (cdiv(TOKENS, page) + cdiv(TOKENS * TOP_K, page))
    loss.backward()
    assert all_free(stash)


@pytest.mark.parametrize(
    "options", [dict(factor=1e30), dict(host_bytes=2**62), dict(page_rows=1, host_bytes=2**45)]
)
def test_more_pages_than_ids_are_refused(options: dict[str, Any], group: None) -> None:
    model = make_tower(2)
    stashed(model, **options)
    with pytest.raises(ValueError, match=r"^StashOptions\.factor .* fewer than 2\^31 pages of"):
        one(model)


@pytest.mark.parametrize("length", [6, 9])
def test_matrices_are_told_apart(length: int) -> None:
    """By their lengths; where these are one, source rows by their storage, or nothing is known."""
    ids_SK = torch.tensor([[0], [-1], [1], [-1], [0], [1]], dtype=torch.int32)
    how: dict[str, Any] = dict(first_expert=0, num_local_experts=2, max_pairs=length)
    index = build_index(ids_SK, torch.ones(6, 1), **how)
    packed, h = torch.zeros(6, 20, dtype=torch.uint8), torch.zeros(length, 4)
    x = packed[:, :16].view(torch.float32)
    inp = ExpertInput(Rows(x), index, None, balanced=BalancedRows(3, 4))
    for is_quantised in (False, True):
        with _declare_used_rows(inp, is_quantised=is_quantised):
            of_x, of_h = find_used_rows(x), find_used_rows(h)
            others = (ids_SK, torch.zeros(4, length).T, torch.zeros(length + 1, 4)[:length])
            assert [find_used_rows(other) for other in others] == [None] * 3
            made = find_used_rows(torch.zeros(6, 2, dtype=torch.float8_e4m3fn))
        assert of_x is not None and of_x.slots is index.slots_SK and of_x.balanced == 3
        if length == 6 and is_quantised:
            assert of_h is None and made is None
        else:
            assert of_h is not None and of_h.slots is None and of_h.balanced == 4
            assert int(of_h.num_rows) == 4
    inp = replace(inp, balanced=None)
    with _declare_used_rows(inp, is_quantised=False):
        assert find_used_rows(x) is None and find_used_rows(h) is None


def test_nobody_is_asked_about_what_has_no_counted_rows() -> None:
    """Which would take the host microseconds per tensor that a layer saves."""
    x, asked = torch.ones(3, requires_grad=True), list[Tensor]()
    with use_packer(asked.append, only_used_rows=True):
        x.exp()
        assert not asked and is_packing()
        with mark_used_rows():
            x.exp()
        assert len(asked) == 1
        with use_packer(lambda tensor: None):
            x.exp()
        assert len(asked) == 2
    assert not is_packing()


@pytest.mark.parametrize("run", [in_order, last_first], ids=lambda run: run.__name__)
def test_other_parts_may_be_offloaded(group: None, run: Callable[[Tower], None]) -> None:
    """Norms and what a block keeps besides; of its MoE layer all but what lies in pages."""
    model = make_tower(4)
    want, stash = gradients(model, run), stashed(model)
    offload = Offload(torch.device("cpu"), min_bytes=1)
    norms = {block.norm: "norm" for block in model.layers}
    offload.attach(list(model.layers), (norms | dict.fromkeys(model.layers, "rest")).get)
    alone = stash.out_bytes
    for _ in range(2):
        assert_equal(gradients(model, run), want)
    assert stash.out_bytes > alone and offload.out_bytes > 0
    assert all_free(stash) and offload._pool.used_bytes == 0


def test_forwards_in_flight_share_a_buffer_of_the_worst_case(group: None) -> None:
    model = make_tower(3)
    stash = stashed(model)
    in_order(model)
    with counting_bytes() as made:
        losses = [model(*batch(number)) for number in range(3)]
    alive = made.list_live()
    assert alive.count(4 * DIM * MAX_TOKENS) == alive.count(4 * 2 * HIDDEN * MAX_TOKENS * 2) == 1
    for loss in losses:
        loss.backward()
    stash.wait_and_raise_errors()
    assert all_free(stash)


def test_pages_are_free_after_an_error_in_backward(group: None) -> None:
    model = make_tower(4)
    stash = stashed(model)

    def fail(grad: Tensor) -> None:
        raise ArithmeticError

    x: list[Tensor] = []
    model.layers[1].register_forward_hook(lambda *args: x.append(args[2]))
    loss = model(*batch(0))
    x.pop().register_hook(fail)
    with pytest.raises(ArithmeticError):
        loss.backward()
    del loss
    assert all_free(stash)


def test_too_few_pages_are_an_error_that_names_the_factor(group: None) -> None:
    model = make_tower(4)
    want, stash = gradients(model, one), stashed(model, factor=0.2)
    found = gradients(model, one)
    assert any(grad.isnan().any() for grad in found.values()), "never wrong numbers"
    with pytest.raises(ExchangeError, match=r"factor \(0.2\) must be >= (\d.\d+) for the 90") as e:
        stash.raise_reported_errors()
    stash.raise_reported_errors()  # once
    assert all_free(stash) and "\n" not in str(e.value)
    stash.detach()
    least = e.value.stash_factor
    assert least is not None and f">= {least:g} for" in str(e.value) and e.value.row_factor is None
    stash = stashed(model, factor=least)
    assert_equal(gradients(model, one), want)
    stash.wait_and_raise_errors()
    stash.detach()
    stash = stashed(model, factor=0.8 * least)
    one(model)
    with pytest.raises(ExchangeError):
        stash.wait_and_raise_errors()


def test_pages_of_the_host_are_taken_when_no_other_is_left(group: None) -> None:
    model = make_tower(4)
    want = gradients(model, in_order)
    stash = stashed(model, factor=0.2, host_bytes=100_000)
    assert_equal(gradients(model, in_order), want)
    stash.wait_and_raise_errors()
    pool = stash.pages.pool
    assert pool is not None and pool.state[PEAK_WORD] > pool.pages.shape[0]
    assert 99_000 < pool.host_pages.nbytes <= 100_000 and all_free(stash)


def counted(function: Callable[..., None], counts: Counter[str]) -> Callable[..., None]:
    def call(*args: Any, **how: Any) -> None:
        counts[function.__name__] += 1
        function(*args, **how)

    return call


class CountedStream:
    """Stands for a stream; counts what is recorded and waited for on all of them."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts

    def record_event(self) -> object:
        self.counts["events"] += 1
        return object()

    def wait_event(self, event: object) -> None:
        self.counts["waits"] += 1


def test_a_layer_takes_three_launches_and_four_events(group, monkeypatch) -> None:
    """Pages and a copy; a copy back, which returns pages. An event each way and direction.

    The pages of what comes back last are returned alone.
    """
    model, counts = make_tower(5), Counter[str]()
    for name in ("take_pages_for_rows", "stash_or_restore_rows", "return_pages"):
        monkeypatch.setattr(stash_module, name, counted(getattr(stash_module, name), counts))
    stash = stashed(model)
    streams, here = stash._streams, CountedStream(counts)
    monkeypatch.setattr(streams_module, "get_current_stream", lambda device: here)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(CopyStream, "use_next_stream", lambda self: nullcontext())
    for copies in (streams.out, streams.back):
        copies._turns = [CountedStream(counts)]  # type: ignore[list-item]
    want = gradients(model, one)
    counts.clear()
    assert_equal(gradients(model, one), want)
    n = 4  # the last layer's rows stay
    assert counts == {
        "take_pages_for_rows": n,
        "stash_or_restore_rows": 2 * n,
        "return_pages": 1,
        "events": 4 * n + 1,
        "waits": 4 * n,
    }


@pytest.mark.parametrize("page_rows", [1, 4])
def test_layers_of_other_widths_share_the_pages_of_the_first(page_rows: int) -> None:
    model = make_tower(3, "roomy")
    torch.manual_seed(1)
    wide = MoELayer(MoEConfig(dim=DIM, hidden_dim=4 * HIDDEN, num_experts=4, top_k=TOP_K))
    wide.dispatcher = model.layers[1].moe.dispatcher
    model.layers[1].moe = wide
    want = gradients(model, in_order)
    stash = stashed(model, page_rows=page_rows, factor=9.0)
    if page_rows == 1:
        with pytest.raises(ValueError, match=r"page_rows \(1\) must be >= 4 for rows of 512 bytes"):
            one(model)
        return
    assert_equal(gradients(model, in_order), want)
    assert len(stash.pages._kinds) == 4 and all_free(stash), "two widths, two batches"


def test_a_graph_has_tables_of_its_own(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What eager code returns while one is captured waits; what a graph has left it takes back."""
    model = make_tower(3)
    stash = stashed(model)
    one(model)
    loss, held = model(*batch(0)), wanted(stash)
    with monkeypatch.context() as patch:
        patch.setattr(stash._streams, "is_capturing", lambda: True)
        del loss
        captured = model(*batch(0))
        places = [copy.piece for copy in stash._copies.values() if copy.piece is not None]
        tables = {place.dispatch.table: place.dispatch.layout.num_entries for place in places}
        assert wanted(stash) == 2 * held, "nothing was returned"
    del captured  # its replays return nothing
    one(model)
    one(model)
    assert len(tables) == 2 and wanted(stash) == held
    assert wanted(stash) == sum(int((table[:n] >= 0).sum()) for table, n in tables.items())
    monkeypatch.setattr(stash._streams, "is_capturing", lambda: True)
    one(model)  # in the same tables
    assert all_free(stash)
    stash.pages.clear()
    with pytest.raises(RuntimeError, match="must be made before a CUDA graph is captured"):
        model(*batch(0))


def test_eager_rows_do_not_go_into_a_graph(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the last layer, which wait for the next forward."""
    model = make_tower(3)
    want, stash = gradients(model, one), stashed(model)
    one(model)
    model.zero_grad()
    loss, of_two_layers = model(*batch(0)), wanted(stash)
    with monkeypatch.context() as patch:
        patch.setattr(stash._streams, "is_capturing", lambda: True)
        captured = model(*batch(0))
        assert wanted(stash) == 2 * of_two_layers
        again = model(*batch(0))  # of the same graph
        assert wanted(stash) == 3 * of_two_layers + of_two_layers // 2
        del captured, again
    model(*batch(0))
    assert wanted(stash) == 3 * of_two_layers // 2
    loss.backward()
    assert_equal({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, want)
    assert all_free(stash) and all(not of_graph for _, of_graph in stash._resting)


def test_a_dropped_graph_is_gone_at_once(group: None) -> None:
    """An operation that keeps its own output must not keep itself."""
    model = make_tower(2)
    stash = stashed(model)
    gc.collect()
    gc.disable()
    try:
        loss = model(*batch(0))
        assert not all_free(stash)
        del loss
        assert all_free(stash)
    finally:
        gc.enable()


@pytest.mark.usefixtures("no_group_left")
def test_the_end_of_a_step_raises_what_was_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    monkeypatch.setattr(phases, "find_peer_store_problem", lambda group, device_type: None)
    monkeypatch.setattr(phases, "find_local_peer_problem", lambda num_ranks, device_type: None)
    monkeypatch.setattr(phases, "ExchangePool", EmulatedExchangePool)
    # The other rank sends the same; a fake group of torch 2.11 leaves the output as it was.
    monkeypatch.setattr(dist, "all_to_all_single", lambda out, x, group: out.copy_(x))
    config = MoEConfig(dim=16, hidden_dim=8, num_experts=4, top_k=2)
    model = nn.Sequential(*(MoELayer(config, device="meta") for _ in range(3)))
    nvlink = NVLinkOptions(max_tokens=8, row_factor=None)
    dispatch = DispatchOptions(name="nvlink", nvlink=nvlink)
    memory = MemoryOptions(stash=StashOptions(page_rows=2, factor=0.01))
    parallelize_moe(
        model, build_meshes(ParallelConfig(ep=2), "cpu"), dispatch=dispatch, memory=memory
    )
    model.to_empty(device="cpu")
    for layer in model:
        layer.init_weights(key="")
    capacity = get_capacity(model)
    capacity.wait_and_raise_errors()
    for end in (capacity.raise_reported_errors, capacity.wait_and_raise_errors):
        model(torch.randn(8, 16)).sum().backward()
        with pytest.raises(ExchangeError, match=r"StashOptions.factor \(0.01\) must be >= "):
            end()
        capacity.wait_and_raise_errors()


def test_it_is_not_used_where_shapes_are_exact() -> None:
    model, options = Tower(2), MemoryOptions(stash=StashOptions())
    with pytest.warns(UserWarning, match="MemoryOptions.stash is not used: no MoE layer"):
        found = apply_stash(model.layers, options, torch.device("cpu"))
    assert found is None
    assert apply_memory_options(model.layers, options, torch.device("cpu")) is None


def test_experts_that_keep_other_rows_have_none_in_pages(group: None) -> None:
    options, cpu = MemoryOptions(stash=StashOptions()), torch.device("cpu")
    kept, other = make_tower(2), make_tower(2)
    for model, backend in ((kept, "torch"), (other, "sequential")):
        for block in model.layers:
            block.moe.get_part("experts").set_backend(backend)
    assert apply_stash(kept.layers, options, cpu) is not None
    with pytest.warns(UserWarning, match="MemoryOptions.stash is not used"):
        apply_stash(other.layers, options, cpu)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(offload=("experts",)), r"offload \(\('experts',\)\) must have no 'experts' beside"),
        (dict(recompute=("moe",)), r"recompute \(\('moe',\)\) must have no 'moe' beside stash"),
    ],
)
def test_what_goes_elsewhere_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as found:
        MemoryOptions(stash=StashOptions(), **options)
    assert "\n" not in str(found.value)
