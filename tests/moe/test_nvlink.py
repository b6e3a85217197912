"""The nvlink dispatcher without GPUs: rules, errors, and autograd over emulated exchanges."""

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_flatten, tree_unflatten

from moecore import (
    DispatchOptions,
    ExchangeError,
    MoEConfig,
    MoELayer,
    NVLinkOptions,
    ParallelConfig,
    PipelineConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.memory import MemoryOptions, StashOptions
from moecore.base.torch_private import get_local_tensor
from moecore.kernels.exchange.buffer import ERROR_WORD, NEEDED_WORD
from moecore.kernels.experts.contract import Refetch, UnsummedInput
from moecore.kernels.rows.record import Rows
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.exchange_pool import ExchangePool, split_programs
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.dispatch.peer_memory import find_peer_store_problem
from moecore.moe.placement import ExpertPlacement
from moecore.moe.records import Routing
from moecore.parallel.fsdp.plan import ShardPlan
from moecore.parallel.model import phases
from moecore.parallel.model.parallel_state import get_capacity, get_parallel_state
from moecore.parallel.model.phases import choose_dispatcher
from moecore.parallel.pipeline.orders import PAIRING
from tests.helpers.errors import error_of
from tests.helpers.ranks import ranks_fixture
from tests.helpers.saved import list_saved
from tests.moe.dispatchers import (
    MAX_TOKENS,
    PLAIN,
    by_stores,
    equal,
    gradients,
    local_tokens,
    make_layer,
    placed,
)
from tests.moe.emulated_exchange import EmulatedExchange, EmulatedExchangePool
from tests.moe.rounded import RoundedDispatcher


@pytest.fixture
def group(no_group_left: None) -> Iterator[dist.ProcessGroup]:
    """Four ranks of which this process is number 1; nothing communicates."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD


def pool_of(group, *, fp8=False, is_required=True, **options) -> EmulatedExchangePool:
    options = dict(max_tokens=8, timeout_s=2.0) | options
    how: Any = dict(options=NVLinkOptions(**options), fp8=fp8, is_required=is_required)
    return EmulatedExchangePool(group, ep=4, **how)


def routing_of(dtype: torch.dtype = torch.float32) -> Routing:
    """Return a routing of three tokens, whose weights have a dtype."""
    ids_TK = torch.zeros(3, 2, dtype=torch.int32)
    weights_TK = torch.zeros(3, 2, dtype=dtype)
    return Routing(expert_ids_TK=ids_TK, weights_TK=weights_TK, chosen_ids_TK=ids_TK)


def dispatcher_of(exchanges: EmulatedExchangePool) -> NVLinkDispatcher:
    place = ExpertPlacement(group=exchanges.group, num_experts=8, ep=4, etp=1)
    return NVLinkDispatcher(place, exchanges)


def exchange_of(exchanges: EmulatedExchangePool) -> EmulatedExchange:
    made = exchanges.get_exchange(torch.zeros(3, 16), 2)
    assert isinstance(made, EmulatedExchange)
    return made


def test_asking_for_it_where_it_can_not_work_is_one_line(group: dist.ProcessGroup) -> None:
    meshes = build_meshes(ParallelConfig(ep=4), "cpu")
    model = nn.Sequential(MoELayer(MoEConfig(dim=32, hidden_dim=64, num_experts=8, top_k=2)))
    message = r"DispatchOptions.name \('nvlink'\) must go with device_type \('cp"
    with pytest.raises(ValueError, match=message) as e:
        parallelize_moe(model, meshes, dispatch="nvlink")
    assert "\n" not in str(e.value) and "use 'alltoall'" in str(e.value)
    assert find_peer_store_problem(group, "cpu") is not None


def test_pairs_over_it_are_none(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    allow_nvlink(monkeypatch)
    model = nn.Sequential(MoELayer(MoEConfig(dim=32, hidden_dim=64, num_experts=8, top_k=2)))
    pairs = PipelineConfig(schedule="overlapped")
    with pytest.warns(UserWarning, match="not used: 'nvlink' has no exchange to compute beside"):
        parallelize_moe(
            model, build_meshes(ParallelConfig(ep=4), "cpu"), dispatch="nvlink", pipeline=pairs
        )
    step = TrainStep(model, num_micro_batches=2)
    with step.micro_batches():
        assert all(layer.dispatcher.pairs is None for layer in model)
        order: list[int] = []
        step.side_by_side(partial(order.append, 0), partial(order.append, 1))
    assert order == [0, 1]


def allow_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "find_peer_store_problem", lambda group, device_type: None)
    monkeypatch.setattr(phases, "find_local_peer_problem", lambda num_ranks, device_type: None)


def test_auto_says_what_it_chose_and_why(no_group_left, caplog) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    meshes = build_meshes(ParallelConfig(ep=4), "cpu")
    config = MoEConfig(dim=32, hidden_dim=64, num_experts=8, top_k=2)
    model = nn.Sequential(*(MoELayer(config, device="meta") for _ in range(2)))
    with caplog.at_level(logging.INFO, logger="moecore"):
        parallelize_moe(model, meshes)
    assert all(isinstance(layer.dispatcher, AllToAllDispatcher) for layer in model)
    (line,) = [r.getMessage() for r in caplog.records if "dispatcher" in r.getMessage()]
    assert (
        line
        == "dispatcher 'auto' is 'alltoall': 'nvlink' must go with device_type ('cpu') = 'cuda'"
    )


@pytest.mark.parametrize(
    ("asked", "schedule", "given", "chosen"),
    [
        ("auto", None, {"nvlink": NVLinkOptions()}, "nvlink"),
        ("auto", None, {"nvlink": NVLinkOptions(row_factor=1.5)}, "nvlink"),
        ("auto", None, {"stash": StashOptions()}, "nvlink"),
        ("auto", None, {}, "nvlink"),
        ("auto", "1f1b", {"nvlink": NVLinkOptions()}, "nvlink"),
        ("auto", "overlapped", {"nvlink": NVLinkOptions()}, "nvlink"),
        ("auto", "dualpipe-v", {"nvlink": NVLinkOptions()}, "nvlink"),
        ("alltoall", "overlapped", {}, "alltoall"),
        ("nvlink", "overlapped", {}, "nvlink"),
    ],
)
def test_auto_takes_nvlink_with_any_schedule(
    asked: Any,
    schedule: str | None,
    given: dict[str, Any],
    chosen: str,
    no_group_left: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    allow_nvlink(monkeypatch)
    meshes: Any = SimpleNamespace(
        dispatch_group=dist.group.WORLD, device_type="cuda", parallel=ParallelConfig(ep=4)
    )
    pipeline = None if schedule is None else SimpleNamespace(schedule=schedule)
    with caplog.at_level(logging.INFO, logger="moecore"):
        request: Any = SimpleNamespace(
            meshes=meshes,
            dispatch=DispatchOptions(name=asked, nvlink=given.get("nvlink")),
            pipeline=pipeline,
            memory=MemoryOptions(stash=given.get("stash")),
        )
        name, reason = choose_dispatcher(request)
        nothing: Any = dict.fromkeys(("layers", "linears", "params", "units", "blocks"), ())
        plan = ShardPlan(
            model="",
            device_type="cuda",
            parallel=meshes.parallel,
            dispatcher=name,
            dispatcher_reason=reason,
            **nothing,
        )
        found: Any = SimpleNamespace(plan=plan, request=request)
        phases.resolve_dispatcher(nn.Module(), found)
        assert found.plan.dispatcher == chosen
    lines = [r.getMessage() for r in caplog.records]
    if asked != "auto":
        assert not lines
    else:
        why = "peer access among all GPUs of the group"
        why += "" if given else "; alltoall outside of forward_backward() and CUDA graphs"
        if schedule in PAIRING:
            why += f"; pairs of schedule {schedule!r} take no turns over it"
        assert lines == [f"dispatcher 'auto' is 'nvlink': {why}"]


def test_options_for_another_dispatcher_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Options.nvlink \(NVLinkOptions.*\) must go with name"):
        DispatchOptions(name="alltoall", nvlink=NVLinkOptions())


@pytest.mark.parametrize(("programs", "push"), [(2, 1), (3, 1), (4, 1), (24, 10), (132, 66)])
def test_some_programs_push_and_at_least_one_receives(programs: int, push: int) -> None:
    sizes = split_programs(programs)
    assert 0 < sizes["num_push"] == push < programs
    assert sizes["num_push"] + sizes["num_receive"] == programs


def test_tokens_on_a_cpu_are_refused(group: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match=r"device of the tokens \(cpu\) must be a GPU"):
        ExchangePool(group, ep=4).get_exchange(torch.zeros(3, 16), 2)


def test_more_tokens_than_room_are_refused_before_anything_is_sent(group) -> None:
    exchanges = pool_of(group)
    made = exchanges.get_exchange(torch.zeros(8, 16), 2)
    assert exchanges.get_exchange(torch.zeros(0, 16), 2) is made, "one exchange for all layers"
    assert exchanges.get_exchange(torch.zeros(8, 16), 3) is not made
    assert exchanges.get_exchange(torch.zeros(8, 32, dtype=torch.bfloat16), 2) is made, (
        "as many bytes"
    )
    with pytest.raises(ValueError, match=r"number of tokens \(9\) must be <= .*exchange \(8\)"):
        exchanges.get_exchange(torch.zeros(9, 16), 2)
    exchanges.close()
    assert exchanges.get_exchange(torch.zeros(8, 16), 2) is not made


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (1 + 3 * 2, "rank 3 must come to a dispatch"),
        (1 + 1, "rank 0 must come to a combine"),
    ],
)
def test_a_late_rank_is_an_error_until_closed(code, what, group) -> None:
    exchanges = pool_of(group)

    def get() -> Any:
        return exchanges.get_exchange(torch.zeros(3, 16), 2)

    made = get()
    assert get() is made and exchanges.all_exchanges == (made,)
    exchanges.wait_and_raise_errors()
    made.buffer.report[ERROR_WORD] = code
    message = what + r".*timeout_s \(2 s\), but rank 1 waited"
    for use in (
        get,
        exchanges.raise_reported_errors,
        exchanges.wait_and_raise_errors,
        exchanges.close,
    ):
        with pytest.raises(ExchangeError, match=message):
            use()
    assert get() is not made and len(exchanges.all_exchanges) == 1


def test_too_many_rows_are_an_error_that_names_the_factor(group: dist.ProcessGroup) -> None:
    exchanges = pool_of(group, row_factor=1.25)
    exchange = exchange_of(exchanges)
    assert exchange.balanced_rows == 4 * 8 * 2 // 4
    offsets = exchange.limit_rows(torch.tensor([9, 24], dtype=torch.int32), 20)
    assert offsets.tolist() == [9, 20] and int(exchange.buffer.state[NEEDED_WORD]) == 24
    message = r"row_factor \(1.25\) must be >= 1.5 .*24 .*rank 1"
    with pytest.raises(ExchangeError, match=message) as error:
        exchanges.wait_and_raise_errors()
    assert error.value.row_factor == 1.5
    exchanges.wait_and_raise_errors()


def test_the_end_of_a_step_raises_what_went_wrong_in_the_exchanges_of_the_model(group, monkeypatch):
    """Late ranks and overflows, from the owner that all layers share; nothing has moved then."""
    allow_nvlink(monkeypatch)
    monkeypatch.setattr(phases, "ExchangePool", EmulatedExchangePool)
    meshes = build_meshes(ParallelConfig(ep=4), "cpu")
    config = MoEConfig(dim=32, hidden_dim=64, num_experts=8, top_k=2)
    model = nn.Sequential(*(MoELayer(config, device="meta") for _ in range(2)))
    options = NVLinkOptions(max_tokens=8, row_factor=1.25, timeout_s=2.0)
    parallelize_moe(model, meshes, dispatch=DispatchOptions(name="nvlink", nvlink=options))
    capacity, exchanges = get_capacity(model), get_parallel_state(model).exchanges  # type: ignore[union-attr]
    assert exchanges is not None and exchanges.options is options
    assert all(layer.dispatcher.exchanges is exchanges for layer in model)
    capacity.wait_and_raise_errors()
    exchange = exchanges.get_exchange(torch.zeros(3, 32), 2)
    capacity.wait_and_raise_errors()
    ends = (
        capacity.raise_reported_errors,
        capacity.wait_and_raise_errors,
        partial(capacity.end_step, skips=False),
    )
    for end in ends:
        exchange.limit_rows(torch.tensor([9, 24], dtype=torch.int32), 20)
        with pytest.raises(RuntimeError, match=r"must be >= 1.5 for the 24 expert rows of rank 1"):
            end()
        capacity.wait_and_raise_errors()
    exchange.buffer.report[ERROR_WORD] = 1 + 3 * 2
    for end in (*ends, partial(capacity.end_step, skips=True)):
        with pytest.raises(RuntimeError, match=r"rank 3 must come to a dispatch .*\(2 s\)"):
            end()


LAYOUTS = {"ep4": (4, 1), "ep2-etp2": (2, 2)}
COUNTS = (5, 0, 11, 3), (7, 20, 1, 0)
FULL_FACTOR = 4.0  # the worst case of 12 experts on 4 ranks and K = 3


def sharded_layer(layout: str, **options: Any) -> tuple[MoELayer, list[str]]:
    """Return a layer over emulated exchanges, and the list of operations that it runs."""
    meshes, place = placed(*LAYOUTS[layout])
    layer = make_layer(PLAIN)
    layer.get_part("experts").shard_parameters(meshes.expert["ep", "etp"])
    layer.dispatcher = dispatcher = by_stores(place, **options)
    exchange = dispatcher.exchanges.get_exchange(torch.zeros(0, PLAIN.dim), PLAIN.top_k)
    assert isinstance(exchange, EmulatedExchange)
    return layer, exchange.operations


class PassThrough(torch.autograd.Function):
    """The node that FSDP2 puts at a module's inputs: unused gradients come back as zeros."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def pass_through(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    leaves, spec = tree_flatten(args)
    where = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.requires_grad]
    for i, t in zip(where, PassThrough.apply(*(leaves[i] for i in where)), strict=True):
        leaves[i] = t
    return tree_unflatten(leaves, spec)


def recompute_and_accumulate() -> dict[str, Any]:
    layer, operations = sharded_layer("ep2-etp2")
    xs = local_tokens(*COUNTS)
    plain, in_flight = gradients(layer, xs), list(operations)
    operations.clear()
    gradients(layer, xs, recompute=True)
    recomputed = list(operations)
    late, late_operations = sharded_layer("ep2-etp2", overlap_weight_grads=False)
    light, light_operations = sharded_layer("ep2-etp2", keep_rows=False)
    return {
        "in flight": in_flight,
        "recomputed": recomputed,
        "hooked": equal(plain, with_hook(layer, pass_through, xs)),
        "FC1 twice": equal(plain, recomputed_fc1(layer, xs)),
        "late": (equal(plain, gradients(late, xs)), list(late_operations)),
        "light": (equal(plain, gradients(light, xs)), list(light_operations)),
        "light, recomputed": equal(plain, gradients(light, xs, recompute=True)),
        "saved rows": [saved_rows(one, xs[0]) for one in (layer, light)],
        "frozen": frozen_input(layer, late, xs[0]),
        "changed": changed_gradient(layer, xs[0]),
    }


def fp8() -> dict[str, Any]:
    """Return by case whether FP8 tokens have the bits of rounded tokens, and what is saved."""
    xs = local_tokens(*COUNTS)
    found: dict[str, Any] = {}
    for layout in LAYOUTS:
        rounded, _ = sharded_layer(layout)
        rounded.dispatcher = RoundedDispatcher(rounded.dispatcher)
        expected = gradients(rounded, xs)
        exact, _ = sharded_layer(layout)
        found[f"{layout}, rounded"] = not equal(expected, gradients(exact, xs))
        for options in (
            {},
            dict(overlap_weight_grads=False),
            dict(row_factor=FULL_FACTOR),
            dict(keep_rows=False),
        ):
            layer, operations = sharded_layer(layout, fp8=True, **options)
            name = f"{layout}, {options}"
            found[name] = equal(expected, gradients(layer, xs))
            found[f"{name}, over"] = sorted(set(operations))
            found[f"{name}, recomputed"] = equal(expected, gradients(layer, xs, recompute=True))
    keeps, _ = sharded_layer("ep4", fp8=True)
    lets_go, _ = sharded_layer("ep4", fp8=True, keep_rows=False)
    found["saved"] = [
        (saved_rows(layer, xs[0], fp8=True), saved_rows(layer, xs[0])) for layer in (keeps, lets_go)
    ]
    return found


def with_hook(layer: MoELayer, hook: Any, xs: list[Tensor]) -> list[Tensor]:
    handle = layer.get_part("experts").register_forward_pre_hook(hook)
    found = gradients(layer, xs)
    handle.remove()
    return found


def recomputed_fc1(layer: MoELayer, xs: list[Tensor]) -> list[Tensor]:
    experts = layer.get_part("experts")
    before, experts.recompute_fc1 = experts.recompute_fc1, True
    found = gradients(layer, xs)
    experts.recompute_fc1 = before
    return found


def frozen_input(layer: MoELayer, other: MoELayer, x: Tensor) -> bool:
    """Whether tokens without a gradient leave the weights the same ones."""
    found = []
    for one in (layer, other):
        one.zero_grad()
        one(x.detach()).sum().backward()
        found.append([get_local_tensor(p.grad) for p in one.parameters()])
    return equal(*found)  # type: ignore[arg-type]


def saved_rows(layer: MoELayer, x: Tensor, *, fp8: bool = False) -> int:
    """Return how many tensors of source rows the forward keeps, as FP8 or wide."""
    rows = (4 * MAX_TOKENS, PLAIN.dim)
    saved = list_saved(lambda: layer(x.detach().requires_grad_()))
    return sum(t.shape == rows and (t.dtype == torch.float8_e4m3fn) == fp8 for t in saved)


def changed_gradient(layer: MoELayer, x: Tensor) -> str:
    """Return the error of a backward whose expert rows' gradient changes after it was sent."""

    def scale(_: nn.Module, args: tuple[Any, ...]) -> None:
        args[0].unsummed.grad_handle_RD.register_hook(lambda grad: grad * 2)

    hook = layer.get_part("experts").register_forward_pre_hook(scale)
    error = error_of(lambda: gradients(layer, [x]))
    hook.remove()
    return error


def room() -> dict[str, Any]:
    """Compare dispatches with space for all rows, with enough, and with too little."""
    x = local_tokens((MAX_TOKENS,) * 4)[0]
    whole, _ = sharded_layer("ep4")
    roomy, _ = sharded_layer("ep4", row_factor=2.0)
    tight, _ = sharded_layer("ep4", row_factor=0.3)
    same = equal(gradients(whole, [x]), gradients(roomy, [x]))
    rows = []
    for layer in (whole, roomy, tight):
        inp = layer.dispatcher.dispatch(x, layer.router(x))
        rows.append((inp.index.row_ids_R.numel(), int(inp.index.offsets_e[-1])))
    exchanges = tight.dispatcher.exchanges  # type: ignore[attr-defined]
    message = error_of(exchanges.raise_reported_errors)
    needed = int(rows[0][1])
    return {"same": same, "rows": rows, "message": message, "needed": needed}


def exact() -> dict[str, Any]:
    """Rows that are counted first, when nearly all go to one rank: what is kept, and the bits."""
    x = local_tokens((MAX_TOKENS,) * 4)[0]
    whole, _ = sharded_layer("ep4")
    counted, _ = sharded_layer("ep4", row_factor="exact")
    for layer in (whole, counted):
        layer.router.weight.data[:2] = 4 * x.mean(0).sign()  # rank 0's experts
    same = equal(gradients(whole, [x]), gradients(counted, [x]))
    inp = counted.dispatcher.dispatch(x, counted.router(x))
    return {"same": same, "room": inp.index.row_ids_R.numel() - int(inp.index.num_rows)}


def disagreements() -> dict[str, str]:
    """By what is other on rank 2, the error on this rank; and the most tokens where nothing is."""
    group, is_odd = dist.group.WORLD, dist.get_rank() == 2
    assert group is not None
    found = {}
    for name, usual, other in (
        ("keep_rows", True, False),
        ("fp8", False, True),
        ("overlap_weight_grads", True, False),
        ("dim", 16, 32),
    ):
        chosen = {name: other if is_odd else usual}
        x = torch.zeros(3, chosen.pop("dim", 16))
        fp8 = chosen.pop("fp8", False)
        exchanges = ExchangePool(group, ep=4, options=NVLinkOptions(**chosen), fp8=fp8)
        found[name] = error_of(partial(exchanges._compare_options, x, 2, 132))
    most = ExchangePool(group, ep=4)._compare_options(torch.zeros(3 + dist.get_rank(), 16), 2, 132)
    return found | {"most": str(most)}


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    return {
        "steps": recompute_and_accumulate(),
        "room": room(),
        "exact": exact(),
        "fp8": fp8(),
        "disagreements": disagreements(),
    }


results = ranks_fixture(4, worker)


def test_operations_of_recomputation_and_of_micro_batches_in_flight(results) -> None:
    steps = results["steps"]
    assert steps["hooked"] and steps["FC1 twice"] and steps["frozen"]
    forward, backward = ["spread_choices", "reduce"], ["spread", "copies", "reduce"]
    assert steps["in flight"] == forward * 2 + backward * 2
    assert steps["recomputed"] == forward * 2 + (forward + backward) * 2
    assert steps["late"] == (True, forward * 2 + ["spread", "reduce"] * 2)
    assert steps["light"] == (True, forward * 2 + ["spread", *backward] * 2)
    assert steps["light, recomputed"] and steps["saved rows"] == [1, 0]


@pytest.mark.parametrize(("backend", "biased"), [("sequential", False), ("torch", True)])
def test_experts_that_keep_their_rows_refuse_to_have_them_sent_again(backend, biased) -> None:
    layer = MoELayer(MoEConfig(dim=16, hidden_dim=32, num_experts=4, top_k=2, fc2_bias=biased))
    layer.get_part("experts").set_backend(backend)
    x = torch.randn(3, 16)
    inp = layer.dispatcher.dispatch(x, layer.router(x))
    with pytest.raises(ValueError, match=r"keep_rows \(False\) must be True for experts"):
        unsummed = UnsummedInput(x, refetch=Refetch(Rows, (x,)))
        layer.get_part("experts")(replace(inp, unsummed=unsummed))


def test_a_gradient_that_changes_after_it_was_sent_is_an_error(results: dict[str, Any]) -> None:
    message = results["steps"]["changed"]
    assert "must not change after the experts' backward" in message
    assert message.endswith("remove the hook or use overlap_weight_grads=False")


def test_exact_rows_have_no_room_and_the_same_bits(results: dict[str, Any]) -> None:
    assert results["exact"] == dict(same=True, room=0)


def test_ranks_that_disagree_are_named_before_anything_is_sent(results: dict[str, Any]) -> None:
    found = dict(results["disagreements"])
    assert found.pop("most") == "6" and len(found) == 4
    for message in found.values():
        assert "of rank 2 (" in message and "must equal those of rank 0 (" in message
    assert "[16, 2, 0, 132, 1, 1, 1]) must equal" in found["fp8"]


def test_tokens_as_fp8_have_the_bits_of_rounded_tokens(results: dict[str, Any]) -> None:
    found = dict(results["fp8"])
    assert found.pop("saved") == [(1, 0), (0, 0)], "half the memory, or none"
    over = {name: found.pop(name) for name in list(found) if name.endswith("over")}
    for name, operations in over.items():
        copies = [] if "'overlap_weight_grads': False" in name else ["copies"]
        assert operations == [*copies, "reduce", "spread", "spread_choices"], name
    assert len(found) == 18 and all(found.values()), found


@pytest.mark.parametrize("dim", [24, 40])
def test_fp8_rows_of_odd_sizes_are_refused(dim: int, group: dist.ProcessGroup) -> None:
    dispatcher = dispatcher_of(pool_of(group, fp8=True, row_factor=None))
    message = rf"experts' rows \({dim}\) must be a multiple of 16 with DispatchOptions.fp8 \(True\)"
    with pytest.raises(ValueError, match=message):
        dispatcher.dispatch(torch.zeros(3, dim), routing_of())


def test_room_is_static_and_overflow_is_an_error(results: dict[str, Any]) -> None:
    found = results["room"]
    assert found["same"]
    (whole, used), (roomy, also), (tight, cut) = found["rows"]
    even = MAX_TOKENS * 3
    assert (whole, roomy, tight) == (4 * even, 2 * even, math.ceil(0.3 * even))
    assert used == also > cut == tight
    factor = found["needed"] / even
    assert (
        f"row_factor (0.3) must be >= {factor:.4g} for the {used} expert rows of rank 0"
        in (found["message"])
    )


@pytest.mark.parametrize(
    ("rows_TD", "dtype", "problem"),
    [
        (torch.zeros(3, 30), torch.float32, r"rows \(30 x torch.float32\) must be"),
        (torch.zeros(3, 32, dtype=torch.float64), torch.float32, r"rows \(32 x torch.float64\)"),
        (torch.zeros(3, 32), torch.bfloat16, r"weights_TK \(torch.bfloat16\) must be"),
    ],
)
def test_what_stores_can_not_carry_is_an_error_where_they_were_asked_for(
    rows_TD: Tensor, dtype: torch.dtype, problem: str, group: dist.ProcessGroup
) -> None:
    """And goes by all-to-all where they were not, as do steps that do not run again."""
    exchanges = pool_of(group, is_required=False)
    dispatcher, found = dispatcher_of(exchanges), []
    for exchanges.watch in ("reruns", "graph", "skips", None):
        assert dispatcher._is_sent_by_alltoall(rows_TD, routing_of(dtype))
        found.append(dispatcher._is_sent_by_alltoall(torch.zeros(3, 32), routing_of()))
    assert found == [False, False, True, True]
    exchanges.is_required = True
    with pytest.raises(ValueError, match=problem):
        dispatcher._is_sent_by_alltoall(rows_TD, routing_of(dtype))
