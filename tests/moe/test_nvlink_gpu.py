"""The nvlink dispatcher over real GPUs: alltoall's bits, stress, graphs, no sync, late ranks.

One rank per GPU of the host, or four on its only one, spawned once. Experts are a few row moves
without a sum over columns, so that every bit of forward and gradients can be compared.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecore import MoEConfig, MoELayer, ParallelConfig, build_meshes
from moecore.base.options.dispatch import NVLinkOptions
from moecore.base.rank_checks import gather_objects
from moecore.base.torch_private import get_local_tensor
from moecore.kernels.common import has_hopper_kernels
from moecore.kernels.rows.move import gather_rows, sum_rows
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.dispatch.exchange_pool import ExchangePool
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.dispatch.peer_memory import find_peer_store_problem
from moecore.moe.placement import ExpertPlacement
from moecore.moe.records import (
    Dispatcher,
    ExpertInput,
    Routing,
    UnsummedRows,
    convert_to_summed_input,
)
from tests.helpers.errors import error_of
from tests.helpers.ranks import gpu_of_rank, num_gpu_ranks, ranks_fixture
from tests.moe.rounded import RoundedDispatcher

NUM_RANKS = num_gpu_ranks()
pytestmark = pytest.mark.gpu

ROUNDS, MOST_TOKENS, EXPERTS_PER_RANK = 2000, 384, 4
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Shape:
    dim: int
    top_k: int
    dtype: torch.dtype = torch.bfloat16


SHAPES = {
    "bf16": Shape(256, 4),
    "long rows, K > e": Shape(7168, 6),
    "fp32, one choice": Shape(72, 1, torch.float32),
}
MAIN = SHAPES["bf16"]


@dataclass(frozen=True)
class Batch:
    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    dy_TD: Tensor


def foldings() -> dict[str, tuple[int, int]]:
    """Name -> (ep, etp) for all GPUs of this host."""
    found = {"ep": (NUM_RANKS, 1)}
    if NUM_RANKS % 4 == 0:
        found |= {"ep x etp": (NUM_RANKS // 2, 2), "half the ranks": (NUM_RANKS // 2, 1)}
    return found


@cache
def place_of(ep: int, etp: int) -> ExpertPlacement:
    group = build_meshes(ParallelConfig(ep=ep, etp=etp), "cuda").dispatch_group
    assert group is not None
    return ExpertPlacement(group=group, num_experts=ep * EXPERTS_PER_RANK, ep=ep, etp=etp)


def nvlink_of(place: ExpertPlacement, *, fp8: bool = False, **options: Any) -> NVLinkDispatcher:
    options = dict(max_tokens=MOST_TOKENS, timeout_s=TIMEOUT_S, row_factor=None) | options
    exchanges = ExchangePool(place.group, ep=place.ep, options=NVLinkOptions(**options), fp8=fp8)
    exchanges.watch = "skips"  # by `check`
    return NVLinkDispatcher(place, exchanges)


def batch_of(place: ExpertPlacement, shape: Shape, num_tokens: int, seed: int) -> Batch:
    """Random tokens; skewed choices of which a tenth is dropped. No host sync."""
    seed = seed * NUM_RANKS + dist.get_rank()
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device="cuda")

    T, E, K = num_tokens, place.num_experts, shape.top_k
    popular_E = torch.linspace(0, seed % 3, E, device="cuda")
    ids_TK = (draw(T, E) + popular_E).topk(K, dim=1).indices.to(torch.int32)
    ids_TK = ids_TK.masked_fill(draw(T, K) > 1.28, -1)
    return Batch(
        x_TD=draw(T, shape.dim).to(shape.dtype),
        ids_TK=ids_TK,
        weights_TK=draw(T, K),
        dy_TD=draw(T, shape.dim).to(shape.dtype),
    )


class FirstColumn(torch.autograd.Function):
    """Experts that multiply the first column by the weight, whichever way rows and gradients come.

    Gradients of the rows go home before backward ends, where the dispatcher can do that.
    """

    @staticmethod
    def forward(ctx: Any, inp: ExpertInput, grad_handle_RD: Tensor, weights_R: Tensor) -> Tensor:
        rows_RD = gather_rows(
            inp.rows.widen(), inp.index.row_ids_R, inp.index.slots_SK, inp.index.num_rows
        )
        ctx.inp = inp
        ctx.save_for_backward(rows_RD, weights_R)
        return first_column(rows_RD, weights_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy_RD,), inp = grads, ctx.inp
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            found = torch.autograd.grad(first_column(*leaves), leaves, dy_RD)
        if inp.unsummed.sender is not None:
            inp.unsummed.sender.start_sending(
                *found, inp.index.row_ids_R, inp.index.slots_SK, inp.index.num_rows
            )
        return None, *found


def first_column(rows_RD: Tensor, weights_R: Tensor) -> Tensor:
    first_R1 = (rows_RD[:, :1] * weights_R[:, None]).to(rows_RD.dtype)
    return torch.cat([first_R1, rows_RD[:, 1:]], dim=1)


def run(dispatcher: Dispatcher, batch: Batch, *, sums: bool = False) -> list[Tensor]:
    """Return y, dx and dweights of experts that multiply the first column by the weight.

    With `sums` the experts add their rows even where the dispatcher could.
    """
    x_TD = batch.x_TD.detach().requires_grad_()
    weights_TK = batch.weights_TK.detach().requires_grad_()
    routing = Routing(
        expert_ids_TK=batch.ids_TK,
        weights_TK=weights_TK,
        logits_TE=batch.weights_TK,
        chosen_ids_TK=batch.ids_TK,
    )
    inp = dispatcher.dispatch(x_TD, routing)
    inp = convert_to_summed_input(inp) if sums else inp
    where = (inp.index.row_ids_R, inp.index.slots_SK, inp.index.num_rows)
    y: Tensor | UnsummedRows
    if inp.unsummed is not None:
        y = UnsummedRows(FirstColumn.apply(inp, inp.unsummed.grad_handle_RD, inp.index.weights_R))
    else:
        y = sum_rows(
            first_column(gather_rows(inp.rows.values, *where), inp.index.weights_R), *where
        )
    y_TD = dispatcher.combine(y, inp.plan)
    return [y_TD, *torch.autograd.grad(y_TD, (x_TD, weights_TK), batch.dy_TD)]


def differ(ours: list[Tensor], others: list[Tensor]) -> Tensor:
    """Return on the device whether any bit differs."""
    return torch.stack([(a != b).any() for a, b in zip(ours, others, strict=True)]).any()


def same_bits() -> dict[str, bool]:
    """Every folding and shape, in the same buffers several times over."""
    found = {}
    for name, degrees in foldings().items():
        place = place_of(*degrees)
        other = AllToAllDispatcher(place)
        for shape_name, shape in SHAPES.items():
            ours, bad = nvlink_of(place), torch.zeros((), dtype=torch.bool, device="cuda")
            for i, num_tokens in enumerate((MOST_TOKENS, 1, 0, 37)):
                num_tokens = 0 if (i + dist.get_rank()) % 4 == 3 else num_tokens
                batch = batch_of(place, shape, num_tokens, i)
                expected = run(other, batch)
                bad |= differ(run(ours, batch), expected)
                if shape is MAIN:
                    bad |= differ(run(ours, batch, sums=True), expected)
            ours.exchanges.wait_and_raise_errors()
            ours.exchanges.close()
            found[f"{name}, {shape_name}"] = not bool(bad)
    return found


def fp8() -> dict[str, Any]:
    """Whether tokens as FP8 have alltoall's bits of rounded tokens, and a layer over them."""
    found: dict[str, Any] = {}
    for name, degrees in foldings().items():
        place = place_of(*degrees)
        rounded = RoundedDispatcher(AllToAllDispatcher(place))
        for shape in (MAIN, SHAPES["long rows, K > e"], Shape(80, 1, torch.float32)):
            ours, bad = nvlink_of(place, fp8=True), []
            for i, num_tokens in enumerate((MOST_TOKENS, 1, 0, 37)):
                num_tokens = 0 if (i + dist.get_rank()) % 4 == 3 else num_tokens
                batch = batch_of(place, shape, num_tokens, i)
                expected = run(rounded, batch)
                bad += [differ(run(ours, batch, sums=sums), expected) for sums in (False, True)]
            ours.exchanges.wait_and_raise_errors()
            ours.exchanges.close()
            found[f"{name}, {shape}"] = not bool(torch.stack(bad).any())
    found["replayed"] = replay(nvlink_of(place_of(NUM_RANKS, 1), fp8=True))
    return found | fp8_layers()


def fp8_layers() -> dict[str, Any]:
    """Kept and sent again the same bits; against wide rows a rounding of other products."""
    place, room = place_of(NUM_RANKS, 1), dict(row_factor=3.0)
    kept, again, wide = (make_layer(place) for _ in range(3))
    kept.dispatcher = nvlink_of(place, fp8=True, **room)
    again.dispatcher = nvlink_of(place, fp8=True, keep_rows=False, **room)
    wide.dispatcher = RoundedDispatcher(nvlink_of(place, **room))
    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16)
    ours, others, wides = (step(layer, x) for layer in (kept, again, wide))
    for layer in (kept, again):
        layer.dispatcher.exchanges.wait_and_raise_errors()  # type: ignore[attr-defined]
    return {"sent again": not bool(differ(ours, others)), "errors": distances(ours, wides)}


def stress() -> dict[str, Any]:
    """Return how many of `ROUNDS` differed from alltoall, and the seconds that it took.

    Gradients go home by copies in every other one.
    """
    place = place_of(NUM_RANKS, 1)
    both = (nvlink_of(place), nvlink_of(place, overlap_weight_grads=False))
    other, mine = AllToAllDispatcher(place), random.Random(dist.get_rank())
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    start = time.perf_counter()
    for i in range(ROUNDS):
        num_tokens = 0 if mine.random() < 0.2 else mine.randint(1, MOST_TOKENS)
        batch = batch_of(place, MAIN, num_tokens, i)
        if mine.random() < 0.3:
            torch.cuda._sleep(mine.randint(1, 400_000))
        if mine.random() < 0.02:
            time.sleep(mine.random() * 0.01)
        wrong += differ(run(both[i % 2], batch), run(other, batch))
    for ours in both:
        ours.exchanges.wait_and_raise_errors()
    seconds = time.perf_counter() - start
    dist.all_reduce(wrong)
    return {"wrong": int(wrong), "seconds": seconds}


def replays() -> bool:
    """Two layers in one graph; tokens and routing change between replays."""
    return replay(nvlink_of(place_of(NUM_RANKS, 1), row_factor=3.0))


def replay(ours: NVLinkDispatcher) -> bool:
    place = ours.placement
    static = [batch_of(place, MAIN, 200, seed) for seed in (0, 1)]
    graph, found = captured(lambda: [t for batch in static for t in run(ours, batch)])
    good = True
    for i in range(6):
        for j, batch in enumerate(static):
            fresh = batch_of(place, MAIN, 200, 10 * i + j)
            for name in ("x_TD", "ids_TK", "weights_TK", "dy_TD"):
                getattr(batch, name).copy_(getattr(fresh, name))
        graph.replay()
        replayed = [t.clone() for t in found]
        eager = [t for batch in static for t in run(ours, batch)]
        good = good and not bool(differ(replayed, eager))
    ours.exchanges.wait_and_raise_errors()
    return good


def absent_rank() -> tuple[str, float]:
    """The last rank stays away from one dispatch; return rank 0's error and its seconds."""
    place = place_of(NUM_RANKS, 1)
    ours = nvlink_of(place, timeout_s=1.0)
    batch = batch_of(place, MAIN, 50, 0)
    run(ours, batch)
    ours.exchanges.wait_and_raise_errors()
    dist.barrier()
    message, start = "", time.perf_counter()
    if dist.get_rank() != NUM_RANKS - 1:
        try:
            run(ours, batch)
            run(ours, batch)  # waits no more, for nobody
            ours.exchanges.wait_and_raise_errors()
        except RuntimeError as error:
            message = str(error)
    seconds = time.perf_counter() - start
    dist.barrier()  # nobody frees what another rank still writes
    return message, seconds


def overflow() -> list[str]:
    """Every token wants rank 0's experts; return each rank's error."""
    place = place_of(NUM_RANKS, 1)
    ours = nvlink_of(place, row_factor=1.0)
    batch = batch_of(place, MAIN, MOST_TOKENS, 0)
    batch.ids_TK.copy_(torch.arange(MAIN.top_k, device="cuda").expand_as(batch.ids_TK))
    run(ours, batch)
    return gather_objects(error_of(ours.exchanges.wait_and_raise_errors))


def make_layer(place: ExpertPlacement) -> MoELayer:
    """Return a layer with the fastest experts, the same every time."""
    meshes = build_meshes(ParallelConfig(ep=NUM_RANKS), "cuda")
    config = MoEConfig(dim=256, hidden_dim=128, num_experts=place.num_experts, top_k=4)
    torch.manual_seed(0)
    layer = MoELayer(config, device="cuda", dtype=torch.bfloat16)
    layer.get_part("experts").shard_parameters(meshes.expert["ep", "etp"])
    backend = "triton" if has_hopper_kernels(gpu_of_rank(dist.get_rank())) else "torch"
    layer.get_part("experts").set_backend(backend)
    return layer


def step(layer: MoELayer, x: Tensor) -> list[Tensor]:
    """Return a layer's output and all gradients, on this rank."""
    leaf = x.detach().requires_grad_()
    y = layer(leaf)
    grads = torch.autograd.grad(y, [leaf, *layer.parameters()], torch.cos(x.detach()))
    return [get_local_tensor(t) for t in (y, *grads)]


def overlapped_layer() -> dict[str, bool]:
    """Whether a layer's outputs and gradients are the same bits, whatever overlaps.

    Eager, and replayed from a graph; and with rows that come again instead of being kept.
    """
    place, room = place_of(NUM_RANKS, 1), dict(row_factor=float(2 * NUM_RANKS))
    late, early, light = (make_layer(place) for _ in range(3))
    late.dispatcher = nvlink_of(place, overlap_weight_grads=False, **room)
    early.dispatcher = nvlink_of(place, **room)
    light.dispatcher = nvlink_of(place, keep_rows=False, **room)
    layers = dict(early=early, light=light)
    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16)
    graphs = {name: captured(lambda one=layer: step(one, x)) for name, layer in layers.items()}
    never = torch.zeros((), dtype=torch.bool, device="cuda")
    differs = {name: [never, never] for name in layers}
    for _ in range(20):
        x.normal_()
        expected = step(late, x)
        for name, layer in layers.items():
            graph, found = graphs[name]
            graph.replay()
            replayed = [t.clone() for t in found]
            for i, ours in enumerate((step(layer, x), replayed)):
                differs[name][i] = differs[name][i] | differ(ours, expected)
    for layer in (late, *layers.values()):
        layer.dispatcher.exchanges.wait_and_raise_errors()  # type: ignore[attr-defined]
    return {name: not bool(eager | replayed) for name, (eager, replayed) in differs.items()}


def captured(run_step: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """Return a graph of a step and what it writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run_step()
    torch.cuda.current_stream().wait_stream(side)
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = run_step()
    return graph, found


def whole_layer() -> list[float]:
    """Return how far output and gradients of a layer are from those over alltoall."""
    place = place_of(NUM_RANKS, 1)
    layer, results = make_layer(place), []
    x = torch.randn(300 + dist.get_rank(), 256, device="cuda", dtype=torch.bfloat16)
    for dispatcher in (nvlink_of(place), AllToAllDispatcher(place)):
        layer.dispatcher = dispatcher
        results.append(step(layer, x))
    return distances(*results)


def distances(ours: list[Tensor], others: list[Tensor]) -> list[float]:
    pairs = zip(ours, others, strict=True)
    return [float((a - b).float().norm() / b.float().norm()) for a, b in pairs]


def worker(rank: int, device: torch.device) -> dict[str, Any]:
    problem = find_peer_store_problem(dist.group.WORLD, "cuda")  # type: ignore[arg-type]
    assert problem is None, f"dispatcher ('nvlink') {problem}"
    layers = (whole_layer, overlapped_layer)
    parts = (same_bits, fp8, replays, *layers, stress, overflow, absent_rank)
    found: dict[str, Any] = {}
    for part in parts:
        start = time.perf_counter()
        found[part.__name__] = part()
        if rank == 0:
            print(f"{part.__name__}: {time.perf_counter() - start:.1f} s, {found[part.__name__]}")
    return found


results = ranks_fixture(NUM_RANKS, worker, device_type="cuda")


def test_equals_alltoall_bit_for_bit(results: dict[str, Any]) -> None:
    found = results["same_bits"]
    assert len(found) == len(foldings()) * len(SHAPES)
    assert all(found.values()), found


def test_tokens_as_fp8_have_the_bits_of_rounded_tokens(results: dict[str, Any]) -> None:
    found = dict(results["fp8"])
    errors = found.pop("errors")
    assert len(errors) == 5 and all(error < 5e-3 for error in errors), errors
    assert len(found) == 3 * len(foldings()) + 2 and all(found.values()), found


def test_stress_with_delays_has_no_wrong_bit(results: dict[str, Any]) -> None:
    assert results["stress"]["wrong"] == 0


def test_replayed_graph_equals_eager_though_the_routing_changes(results: dict[str, Any]) -> None:
    assert results["replays"]


def test_whole_layer_agrees_with_alltoall(results: dict[str, Any]) -> None:
    """Products may be tiled otherwise for another room: a rounding, not more."""
    found = results["whole_layer"]
    assert len(found) >= 5 and all(error < 5e-3 for error in found), found


def test_whatever_overlaps_a_layer_has_the_same_bits(results: dict[str, Any]) -> None:
    assert results["overlapped_layer"] == dict(early=True, light=True)


def test_an_absent_rank_is_named_within_the_timeout(results: dict[str, Any]) -> None:
    message, seconds = results["absent_rank"]
    assert f"rank {NUM_RANKS - 1} must come to a" in message and "rank 0 waited" in message
    assert seconds < 10


def test_overflow_names_rank_and_factor(results: dict[str, Any]) -> None:
    first, *others = results["overflow"]
    assert f"must be >= {NUM_RANKS:.4g} for the" in first and "rank 0" in first
    assert set(others) <= {"no error"}
