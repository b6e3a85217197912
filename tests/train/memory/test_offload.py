import copy
import gc
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moecore import BalanceConfig, MoEConfig
from moecore.base.options.memory import MemoryOptions
from moecore.base.saved_tensors import UsedRows, mark_used_rows, use_packer
from moecore.base.torch_private import get_storage_key
from moecore.kernels.experts.contract import UnsummedInput
from moecore.kernels.rows.index import build_index
from moecore.kernels.rows.record import Rows
from moecore.models import Decoder, preset
from moecore.moe.experts import Experts
from moecore.moe.param_reader import ParamReader
from moecore.moe.records import ExpertInput
from moecore.train.memory import storages
from moecore.train.memory.apply import apply_memory_options
from moecore.train.memory.offload import Offload
from tests.train.memory import blocks

CPU, BF16 = torch.device("cpu"), torch.bfloat16
Model = blocks.Plain | Decoder


def make(name: str) -> Model:
    if name == "plain":
        return blocks.Plain(3)
    config = preset(name)
    moe = replace(config.moe, balance=BalanceConfig())  # auxiliary losses refuse retained graphs
    return Decoder(replace(config, moe=moe))


@cache
def batch(number: int, length: int = 24) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 64, (2, length), generator=g)
    return tokens, tokens.roll(-1, 1)


def one(model: Model) -> None:
    model(*batch(0)).backward()


def in_order(model: Model) -> None:
    first, second = model(*batch(0)), model(*batch(1, 31))
    first.backward()
    second.backward()


def last_first(model: Model) -> None:
    first, second = model(*batch(0)), model(*batch(1, 31))
    second.backward()
    first.backward()


def twice(model: Model) -> None:
    loss = model(*batch(0))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def with_dropped(model: Model) -> None:
    first, second = model(*batch(0)), model(*batch(1))
    del first
    second.backward()


def with_evaluation(model: Model) -> None:
    first = model(*batch(0))
    with torch.no_grad():
        model(*batch(1))
    with torch.inference_mode():
        model(*batch(1))
    evaluated = model(*batch(2))  # with a graph that nobody uses
    first.backward()
    del evaluated


def after_an_error(model: Model) -> None:
    class Failed(Exception):
        pass

    def fail(module: nn.Module, args: object) -> None:
        raise Failed

    inner = list(model.layers[1].modules())[-1]
    hook = inner.register_forward_pre_hook(fail)
    with pytest.raises(Failed):
        model(*batch(1))
    hook.remove()
    model(*batch(0)).backward()


ORDERS: list[Callable[[Model], None]] = [one, in_order, last_first, twice]
ORDERS += [with_dropped, with_evaluation, after_an_error]


def gradients(model: Model, run: Callable[[Model], None]) -> dict[str, Tensor]:
    model.zero_grad()
    run(model)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys() and want
    for name, grad in want.items():
        assert torch.equal(found[name], grad), name


@pytest.mark.parametrize("run", [None, *ORDERS], ids=lambda run: getattr(run, "__name__", "early"))
@pytest.mark.parametrize("name", ["plain", "tiny-qwen3", "tiny-deepseek-v3"])
def test_gradients_have_the_bits_of_those_without(name, run, monkeypatch) -> None:
    """Also where copies end as late as somebody waits for them."""
    if is_late := run is not None:
        monkeypatch.setattr(storages, "CopyStreams", blocks.LateStreams)
    model, run = make(name), run or one
    want = gradients(model, run)
    for parts in (blocks.part_of, blocks.part_or_block):
        offload = blocks.offloaded(model, parts)
        assert_equal(gradients(model, run), want)
        host_bytes = offload.host_bytes
        assert offload.out_bytes > 0 == offload._pool.used_bytes
        assert run is not one or offload.out_bytes == offload.back_bytes
        assert_equal(gradients(model, run), want)
        assert run is not one or offload.host_bytes == host_bytes, "of earlier steps"
        assert not is_late or all(map(any, offload._streams.queues))
        offload.close()
        assert "forward" not in model.layers[0].__dict__ and offload.host_bytes == 0


def test_what_is_asked_for_is_there_already() -> None:
    """All parts of all layers but the last travel, each once, and come back a layer ahead."""
    model = blocks.Plain(4)
    offload = blocks.offloaded(model)
    one(model)
    D, T = 16, 48
    # Per layer: norm's input and 2 statistics, twice; MLPs of widths D and 4 D: input, h, gelu(h).
    of_layer = 4 * T * (2 * (D + 2) + (D + 2 * D) + (D + 2 * 4 * D))
    assert offload.out_bytes == offload.back_bytes == offload.candidate_bytes == 3 * of_layer
    assert offload.late_bytes == 0


def peak(model: blocks.Plain, offload: Offload | None) -> int:
    tokens = batch(0, 64)
    for _ in range(2):  # gradients and host memory are there
        model(*tokens).backward()
    with blocks.counting_bytes(offload) as bytes_:
        model(*tokens).backward()
    return bytes_.peak


def test_the_peak_is_one_layer_whatever_the_number_of_layers() -> None:
    peaks, without = {}, {}
    for num_layers in (1, 2, 4, 8, 16):
        model = blocks.Plain(num_layers)
        without[num_layers] = peak(model, None)
        peaks[num_layers] = peak(model, blocks.offloaded(model))
    assert without[16] - without[8] == 8 * (without[2] - without[1]) > 0
    assert set(peaks.values()) == {without[1]}, "that of a model with one layer"


def all_at_once(model: blocks.Plain, batches: list[tuple[Tensor, Tensor]]) -> None:
    losses = deque(model(*each) for each in batches)
    while losses:
        losses.popleft().backward()


def test_chunks_in_flight_are_away() -> None:
    """A forward more costs what lies outside of parts, and its last layer leaves too."""
    model, peaks, want = blocks.Plain(2), {}, {}
    offload, batches = Offload(CPU, min_bytes=1), [batch(i) for i in range(8)]
    for number in (4, 8):
        with blocks.counting_bytes() as bytes_:
            want[number] = gradients(model, lambda m, n=number: all_at_once(m, batches[:n]))
        peaks[number] = bytes_.peak
    offload.attach(list(model.layers), blocks.part_of)
    for number in (4, 8):
        for _ in range(2):  # host memory is there
            with blocks.counting_bytes(offload) as bytes_:
                found = gradients(
                    model, lambda m, n=number: blocks.in_chunks(m, offload, batches[:n])
                )
            assert_equal(found, want[number])
        peaks[-number] = bytes_.peak
    assert offload.late_bytes == offload._pool.used_bytes == 0
    assert offload.candidate_bytes == offload.out_bytes == offload.back_bytes
    of_forward = offload.out_bytes // (2 * (4 + 8))
    assert of_forward == 2 * 4 * 48 * (2 * (16 + 2) + 3 * 16 + 9 * 16), "of both layers"
    assert (peaks[8] - peaks[4]) - (peaks[-8] - peaks[-4]) == 4 * of_forward


def test_a_chunk_that_fails_leaves_nothing() -> None:
    model = blocks.Plain(2)
    want, offload = gradients(model, one), blocks.offloaded(model)
    with pytest.raises(ZeroDivisionError), offload.offload_forward(offloads_last_block=True):
        loss = model(*batch(0)) / (1 // 0)
        loss.backward()
    assert offload.out_bytes > 0 == offload._pool.used_bytes and not offload._pending_free
    assert_equal(gradients(model, one), want)
    assert offload.late_bytes == offload._pool.used_bytes == 0


def test_a_fraction_is_met_in_all_layers_alike() -> None:
    for fraction in (0.0, 0.2, 0.5, 0.8, 1.0):
        model = blocks.Plain(6)
        offload = blocks.offloaded(model, fraction=fraction)
        one(model)
        largest = 4 * 48 * 64
        assert 0 <= fraction * offload.candidate_bytes - offload.out_bytes < largest
        assert offload.back_bytes == offload.out_bytes


def test_host_memory_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    model = make("plain")
    want = gradients(model, in_order)
    offload = blocks.offloaded(model, max_host_bytes=50_000)
    with caplog.at_level(logging.WARNING, "moecore.train.memory"):
        for _ in range(2):
            assert_equal(gradients(model, in_order), want)
    assert 0 < offload.host_bytes <= 50_000 < offload.candidate_bytes
    assert 0 < offload.out_bytes < offload.candidate_bytes
    (record,) = caplog.records
    assert "host memory" in record.message and "\n" not in record.message


def test_a_host_without_memory_is_an_error_of_one_line() -> None:
    model = blocks.Plain(2)
    offload = blocks.offloaded(model)

    def refuse(num_bytes: int) -> None:
        raise RuntimeError("can't allocate memory\nstack")

    offload._pool._slabs.allocate_slab = refuse
    with pytest.raises(RuntimeError, match="set max_host_bytes to what the host has") as found:
        one(model)
    assert "\n" not in str(found.value)


def layers_of(offload: Offload, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return what a layer that is not the last makes of x, offloaded and freed."""
    module = nn.Module()
    with offload.offload_layer(0, 3), offload.offload_part("part", module):
        y = function(x)
    with offload.offload_layer(1, 3), offload.offload_part("part", module):
        return y * 1.0


def test_views_of_a_storage_travel_once() -> None:
    x = torch.randn(8, 6, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        h = x.exp()  # saved, and so are its views
        a, b = h.chunk(2, dim=1)
        return a.t() @ b + h[1:7, 2:5].t() @ a[:6]

    function(x).sum().backward()
    want, x.grad = x.grad, None
    offload = Offload(CPU, min_bytes=0)
    y = layers_of(offload, function, x)
    assert offload.out_bytes == 8 * 6 * 4
    y.sum().backward()
    assert torch.equal(x.grad, want) and offload.back_bytes == offload.out_bytes


@pytest.mark.parametrize("when", ["within the part", "after it"])
def test_a_change_in_place_is_an_error_as_without(when: str) -> None:
    offload = Offload(CPU, min_bytes=0)
    x = torch.randn(4, 4, requires_grad=True)
    h = x * 1

    def function(x: Tensor) -> Tensor:
        y = h * h
        if when == "within the part":
            h.mul_(2)
        return y

    y = layers_of(offload, function, x)
    if when == "after it":
        h.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place since forward"):
        y.sum().backward()


def test_what_is_held_by_others_is_offloaded_once() -> None:
    """Weights never, a table that all layers read in the first layer of the first forward alone."""
    offload, table = Offload(CPU, min_bytes=0), torch.randn(4, 4)
    linear = nn.Linear(4, 4, bias=False)
    linear.register_buffer("scale", torch.randn(4, 4))
    out = []
    for _ in range(2):
        x = torch.randn(4, 4, requires_grad=True)
        for index in range(4):
            with offload.offload_layer(index, 4), offload.offload_part("part", linear):
                x = linear(x) * table * linear.scale
        x.sum().backward()
        out.append(offload.out_bytes)
    inputs = 3 * 64
    assert out[0] == inputs + 64  # of three layers, and the table
    assert out[1] - out[0] == inputs


class _Quantised(torch.autograd.Function):
    """x, of values that are kept in FP8 beside scales as bytes."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.to(torch.float8_e4m3fn), torch.arange(16, dtype=torch.uint8))
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        values, scales = ctx.saved_tensors
        return dy * values.float() * scales.float().view(4, 4)


def test_quantised_operands_travel() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    _Quantised.apply(x).sum().backward()
    want, x.grad = x.grad, None
    offload = Offload(CPU, min_bytes=0)
    y = layers_of(offload, _Quantised.apply, x)
    y.sum().backward()
    assert torch.equal(x.grad, want) and offload.back_bytes == 2 * 16


class _Counted(torch.autograd.Function):
    """Keeps a matrix of 8 rows, of which 3 are in use, as NaN beyond them."""

    @staticmethod
    def forward(ctx, x):
        h = x.repeat(2, 1)
        h[3:] = torch.nan
        ctx.save_for_backward(h, x)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        h, x = ctx.saved_tensors
        return dy * x + h[:3].sum()


def test_used_rows_travel_alone() -> None:
    def function(x: Tensor) -> Tensor:
        with mark_used_rows(UsedRows(8, torch.tensor(3, dtype=torch.int32))):
            return _Counted.apply(x)

    x = torch.randn(4, 4, requires_grad=True)
    function(x).sum().backward()
    want, x.grad = x.grad, None
    offload = Offload(CPU, min_bytes=0)
    layers_of(offload, function, x).sum().backward()  # makes host memory
    x.grad = None
    slabs = [slab.memory.fill_(7) for slab in offload._pool._slabs.slabs]
    y = layers_of(offload, function, x)
    written = sum(int((memory != 7).sum()) for memory in slabs)
    assert 0 < written <= 4 * 16 + 3 * 16, "x, and of h what is in use"
    y.sum().backward()
    assert torch.equal(x.grad, want)


def test_experts_with_room_for_more_rows_keep_those_in_use() -> None:
    """12 of 20 expert rows are in use; the source rows, of which there are 6, travel whole."""
    T, R, D, F = 6, 20, 8, 4
    experts = Experts(MoEConfig(dim=D, hidden_dim=F, num_experts=4, top_k=2), backend="torch")
    experts.init_weights(std=0.5, key="experts", seed=0)
    ids_TK = torch.tensor([[0, 1], [2, 3], [1, 2], [0, 3], [3, 1], [2, 0]], dtype=torch.int32)

    def run(offload: Offload | None) -> list[Tensor]:
        experts.zero_grad()
        weights_TK = torch.linspace(0.1, 1.0, 12).view(T, 2).requires_grad_()
        x_TD = torch.linspace(-1, 1, T * D).view(T, D)
        grad_handle_RD = torch.zeros(1, requires_grad=True).expand(R, D)
        index = build_index(ids_TK, weights_TK, first_expert=0, num_local_experts=4, max_pairs=R)
        inp = ExpertInput(Rows(x_TD), index, None, UnsummedInput(grad_handle_RD))
        if offload is None:
            y_RD = experts(inp).y_RD
        else:
            with offload.offload_layer(0, 3), offload.offload_part("experts", experts):
                y_RD = experts(inp).y_RD
            with offload.offload_layer(1, 3), offload.offload_part("experts", experts):
                pass
            (h,) = [c for c in offload._copies.values() if c.used_rows is not None]
            assert h.data is None and h.size == 4 * R * 2 * F
            assert h.used_rows.length == R and int(h.used_rows.num_rows) == 12
        (y_RD[:12] ** 2).sum().backward()
        return [weights_TK.grad, *(p.grad for p in experts.parameters())]

    want = run(None)
    for found, grad in zip(run(Offload(CPU, min_bytes=0)), want, strict=True):
        assert torch.equal(found, grad)


def test_what_is_made_of_weights_stays() -> None:
    """Quantised experts, which micro-batches share, belong to their reader."""
    reader, param = ParamReader(), nn.Parameter(torch.randn(4, 4))
    reader.start_micro_batch(is_last=False)
    asked = []
    with use_packer(asked.append), reader.exclude_from_activations():
        weight = reader.read(param)
        matrices = (torch.randn(4, 4), torch.randn(4))
        made = reader.get_quantised_weights("key", [param], lambda: matrices)
        x = torch.randn(4, 4, requires_grad=True)
        _ = (x * weight) @ made[0] + x * made[1]
    keys = {get_storage_key(tensor) for tensor in asked}
    assert get_storage_key(x) in keys and keys.isdisjoint(map(get_storage_key, (weight, *made)))


def test_small_tensors_and_other_devices_stay() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    for offload in (Offload(CPU, min_bytes=65), Offload(torch.device("meta"), min_bytes=0)):
        layers_of(offload, torch.exp, x).sum().backward()
        assert offload.candidate_bytes == 0


def test_device_memory_is_free_and_host_memory_goes_back_with_the_graph() -> None:
    offload = Offload(CPU, min_bytes=0)
    x = torch.randn(4, 4, requires_grad=True)
    saved = []

    def function(x: Tensor) -> Tensor:
        h = x.exp()
        saved.append(torch.multiprocessing.reductions.StorageWeakRef(h.untyped_storage()))
        return h.sin()

    y = layers_of(offload, function, x)
    assert saved[0].expired() and offload._pool.used_bytes > 0
    del y
    assert offload._pool.used_bytes == 0 and offload.host_bytes > 0


def test_other_hooks_and_recomputation_decide_themselves() -> None:
    model = make("plain")
    want = gradients(model, one)

    def checkpointed(model: Model) -> None:
        for layer in model.layers:
            inner = layer.mlps[1]
            forward = inner.forward
            inner.forward = lambda x, f=forward: torch.utils.checkpoint.checkpoint(
                f, x, use_reentrant=False
            )
        one(model)

    offload = blocks.offloaded(model)
    assert_equal(gradients(model, checkpointed), want)
    assert 0 < offload.out_bytes == offload.back_bytes and offload._pool.used_bytes == 0


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.usefixtures("no_group_left")
def test_gathered_weights_of_inner_units_are_right(reshard: bool) -> None:
    """FSDP2 gathers them after their block has begun, and may free them before it ends."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh, model = init_device_mesh("cpu", (1,)), make("plain")
    for layer in model.layers:
        fully_shard(layer.mlps[1], mesh=mesh, reshard_after_forward=reshard)
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)

    def run() -> dict[str, Tensor]:
        model.zero_grad()
        in_order(model)
        return {n: p.grad.to_local().clone() for n, p in model.named_parameters()}

    want = run()
    offload = blocks.offloaded(
        model, lambda m: "block" if isinstance(m, blocks.PlainBlock) else None
    )
    for _ in range(2):
        assert_equal(run(), want)
    assert offload.out_bytes > 0 and offload._pool.used_bytes == 0


def test_compiled_blocks_compute_the_same() -> None:
    model = make("plain")
    offload = blocks.offloaded(model)
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager", fullgraph=True)
    want = gradients(make("plain"), one)
    assert_equal(gradients(model, one), want)
    assert offload.out_bytes == 0, "a compiler decides what it keeps"


def test_a_copy_of_a_model_has_its_own() -> None:
    model = make("plain")
    want, offload = gradients(model, one), blocks.offloaded(model)
    twin = copy.deepcopy(model)
    assert_equal(gradients(twin, one), want)
    assert offload.out_bytes == 0
    assert_equal(gradients(model, one), want)
    assert offload.out_bytes > 0


def test_nothing_is_left_to_the_garbage_collector() -> None:
    model = make("tiny-qwen3")
    offload = blocks.offloaded(model)
    one(model)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(2):
            one(model)
            assert offload._pool.used_bytes == 0
        gc.collect()
        assert not any(type(found) is Tensor for found in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(fraction=1.5), r"fraction \(1.5\) must be"),
        (dict(min_bytes=-1), r"min_bytes \(-1\) must be"),
        (dict(max_host_bytes=0), r"max_host_bytes \(0\) must be"),
        ((0.5, 0.0), r"offload_fraction \(\(0.5, 0.0\)\) must be one number"),
        ((2.0,), r"offload_fraction \(\(2.0,\)\) must be a finite number"),
    ],
)
def test_bad_options_are_errors_of_one_line(options: Any, message: str) -> None:
    """Tuples are fractions, one a stage."""
    with pytest.raises(ValueError, match=message) as found:
        if isinstance(options, tuple):
            options = MemoryOptions(offload=("norm",), offload_fraction=options)
            apply_memory_options(make("plain").layers, options, CPU)
        Offload(CPU, **options)
    assert "\n" not in str(found.value)
