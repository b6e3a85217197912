"""Shapes, routings, timing and precompiled kernels for the benchmarks of expert parallelism.

All functions run on every rank of torchrun, with one GPU per rank.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from moecore.base.options.dispatch import NVLinkOptions
from moecore.kernels.common import count_sms
from moecore.kernels.exchange import operations as exchange
from moecore.kernels.exchange.buffer import NUM_WORDS, ExchangeLayout, SymmetricBuffer
from moecore.moe.dispatch.exchange_pool import ExchangePool, split_programs
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.placement import ExpertPlacement
from moecore.moe.records import Routing
from moecore.parallel.mesh import Meshes

Call = Callable[[], Any]

CYCLES_PER_SECOND = 2e9  # of a GPU that sleeps, at most
LEAD_SECONDS, MOST_LEAD_SECONDS = 1e-3, 25e-3  # in which the host queues a call
WARM_UP = 3  # rounds that do not count


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One MoE layer and the tokens of one rank."""

    name: str
    tokens: int
    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int

    @property
    def flops(self) -> int:
        """FLOP of forward and backward of one rank's tokens."""
        return 18 * self.tokens * self.top_k * self.dim * self.hidden_dim


SHAPES = {
    "dsv3": Shape(name="dsv3", tokens=4096, dim=7168, hidden_dim=2048, num_experts=256, top_k=8),
    "qwen3-30b": Shape(
        name="qwen3-30b", tokens=16384, dim=2048, hidden_dim=768, num_experts=128, top_k=8
    ),
    "tiny": Shape(name="tiny", tokens=256, dim=256, hidden_dim=128, num_experts=16, top_k=4),
}


def make_placement(shape: Shape, meshes: Meshes) -> ExpertPlacement:
    """Return the placement of experts on ranks."""
    assert meshes.dispatch_group is not None
    ep, etp = meshes.parallel.ep, meshes.parallel.etp
    return ExpertPlacement(
        group=meshes.dispatch_group, num_experts=shape.num_experts, ep=ep, etp=etp
    )


def make_nvlink(
    place: ExpertPlacement,
    options: NVLinkOptions | None = None,
    *,
    programs: int | None = None,
    fp8: bool = False,
) -> NVLinkDispatcher:
    """Return an nvlink dispatcher with new exchange buffers."""
    options = options or NVLinkOptions(row_factor=None)
    how: dict[str, Any] = dict(options=options, num_programs=programs, fp8=fp8)
    exchanges = ExchangePool(place.group, ep=place.ep, **how)
    exchanges.watch = "skips"  # by `check`
    return NVLinkDispatcher(place, exchanges)


def make_layout(shape: Shape, num_ranks: int, programs: int) -> ExchangeLayout:
    """Return the layout of `make_nvlink` for bf16 tokens; 0 programs = one per SM."""
    programs = programs or count_sms(torch.device("cuda"))
    return ExchangeLayout(
        num_ranks=num_ranks,
        max_tokens=shape.tokens,
        row_bytes=shape.dim * torch.bfloat16.itemsize,
        top_k=shape.top_k,
        **split_programs(programs),
    )


def make_routing(shape: Shape, *, skewed: bool = False) -> Routing:
    """Return random choices of experts; skewed choices prefer the first experts."""
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    scores_TE = torch.rand(shape.tokens, shape.num_experts, generator=generator, device="cuda")
    if skewed:
        scores_TE += torch.linspace(1, 0, shape.num_experts, device="cuda") ** 4
    weights_TK, ids_TK = scores_TE.topk(shape.top_k, dim=1)
    ids_TK = ids_TK.to(torch.int32)
    return Routing(
        expert_ids_TK=ids_TK, weights_TK=weights_TK, logits_TE=scores_TE, chosen_ids_TK=ids_TK
    )


def fill_holes(rows_SD: Tensor, slots_SK: Tensor) -> Tensor:
    """Return the rows with NaN in holes, which must not be read."""
    return rows_SD.masked_fill((slots_SK < 0).all(1, keepdim=True), float("nan"))


def make_nccl_call(place: ExpertPlacement, routing: Routing, x_TD: Tensor) -> Call:
    """Return a call: an all-to-all of one row per choice, with known splits and sorted rows."""
    owner_N = routing.expert_ids_TK.flatten() // place.num_local
    sent_P = torch.bincount(owner_N, minlength=place.ep)
    received_P = torch.empty_like(sent_P)
    dist.all_to_all_single(received_P, sent_P, group=place.group)
    rows_ND = x_TD.repeat_interleave(routing.expert_ids_TK.shape[1], 0)
    out = x_TD.new_empty(int(received_P.sum()), x_TD.shape[1])
    splits = (received_P.tolist(), sent_P.tolist())
    return lambda: dist.all_to_all_single(out, rows_ND, *splits, group=place.group)


def time_in_turn(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Return the slowest rank's milliseconds by call and round; calls alternate.

    Times are of the device: it sleeps for twice the time that the host took to queue the call in
    the warm-up rounds, so that no call waits for the host.
    """
    flush = torch.ones(harness.FLUSH_BYTES // 4, device="cuda")
    token = torch.zeros(1, device="cuda")
    spans: dict[str, list[Any]] = {name: [] for name in calls}
    lead = dict.fromkeys(calls, LEAD_SECONDS)
    for i, (name, call) in itertools.product(range(-WARM_UP, rounds), calls.items()):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.sum()
        torch.cuda._sleep(int(lead[name] * CYCLES_PER_SECOND))
        dist.all_reduce(token)
        queued = time.perf_counter()
        start.record()
        call()
        stop.record()
        queued = time.perf_counter() - queued
        torch.cuda.synchronize()
        if i >= 0:
            spans[name].append(start.elapsed_time(stop))
        elif i > -WARM_UP:  # the first one compiles
            lead[name] = min(max(lead[name], 2 * queued), MOST_LEAD_SECONDS)
    times = torch.tensor(list(spans.values()), device="cuda")
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return dict(zip(calls, times.tolist(), strict=True))


def summarize_times(times: Sequence[float]) -> harness.Timing:
    """Return median and percentiles."""
    ms, p20, p80 = (harness.percentile(times, share) for share in (0.5, 0.2, 0.8))
    return harness.Timing(ms=ms, p20=p20, p80=p80, repeats=len(times))


def compile_kernels(layouts: Iterable[tuple[ExchangeLayout, int, bool]]) -> None:
    """Compile the exchange's kernels, each on one rank, into the cache that all ranks share.

    Args:
        layouts: with the number of experts per rank, and whether a whole layer uses them.
    """
    jobs = [job for layout, e, layer in layouts for job in _list_kernel_calls(layout, e, layer)]
    with _compile_only():
        for job in jobs[dist.get_rank() :: dist.get_world_size()]:
            job()
    dist.barrier()


def _list_kernel_calls(layout: ExchangeLayout, num_local: int, layer: bool) -> list[Call]:
    """Return one call per kernel of an exchange. Compiling reads no value of the tensors."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    buffer = SymmetricBuffer(
        layout=layout,
        rank=dist.get_rank(),
        bases=empty(4, layout.num_ranks, dtype=torch.int64),
        state=empty(NUM_WORDS),
        report=torch.zeros(NUM_WORDS, dtype=torch.int32, pin_memory=True),
        timeout_ns=round(NVLinkOptions().timeout_s * 1e9),
    )
    x, marks = empty(16, layout.row_bytes // 2, dtype=torch.bfloat16), empty(16)
    ids, weights = empty(16, layout.top_k), empty(16, layout.top_k, dtype=torch.float32)
    choices = (weights[:, 0].contiguous(), ids)
    sizes = dict(num_local_experts=num_local, etp=1)
    jobs = [
        lambda: exchange.dispatch_rows_and_choices(buffer, x, ids, weights, **sizes),
        lambda: exchange.combine_rows(buffer, x, marks, marks, marks[:, None]),
    ]
    if layer:
        jobs += [
            lambda: exchange.combine_rows(buffer, x, marks, marks, ids),
            lambda: exchange.combine_rows(buffer, x, marks, marks, ids, choices),
            lambda: exchange.combine_rows(
                buffer, x, marks, marks, marks[:, None], choices, has_sums=True
            ),
            lambda: exchange.dispatch_rows(buffer, x, marks, marks, ids, 16),
        ]
    return jobs


@contextmanager
def _compile_only() -> Iterator[None]:
    """Return a context in which launches only compile."""
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launch
