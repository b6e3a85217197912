"""Search of the best division of an exchange's programs: `bench_dispatch --sweep`.

It prints a table and writes no records. All divisions run in the same rounds over one buffer, whose
regions and state do not depend on them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.dispatch_cases import (
    Call,
    Shape,
    compile_kernels,
    fill_holes,
    make_layout,
    make_nccl_call,
    make_placement,
    make_routing,
    summarize_times,
    time_in_turn,
)
from moecore.base.options.dispatch import NVLinkOptions
from moecore.kernels.exchange.buffer import ExchangeLayout, SymmetricBuffer
from moecore.moe.dispatch.exchange import Exchange
from moecore.moe.dispatch.exchange_pool import ExchangePool
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.dispatch.peer_memory import make_exchange_buffer
from moecore.parallel.mesh import Meshes

SHARES = (1 / 3, 5 / 12, 1 / 2)
ROUNDS = (8, 16, 32)
NUM_WARPS = (16,)
OPS = ("dispatch", "combine")


def list_divisions(usual: ExchangeLayout) -> list[ExchangeLayout]:
    """Return the default layout and distinct others with as many programs."""
    programs, found = usual.num_push + usual.num_receive, [usual]
    seen = {(usual.num_push, usual.chunk, usual.num_warps)}
    for share, rounds, warps in itertools.product(SHARES, ROUNDS, NUM_WARPS):
        push = round(programs * share)
        sizes = dict(num_push=push, num_receive=programs - push, rounds=rounds, num_warps=warps)
        layout = replace(usual, **sizes)
        key = (push, layout.chunk, warps)
        if key not in seen:
            seen.add(key)
            found.append(layout)
    return found


class FixedExchangePool(ExchangePool):
    """A pool that returns the same exchange for all tokens."""

    exchange: Exchange

    def get(self, x_TD: Tensor, top_k: int) -> Exchange:
        return self.exchange


def sweep(shape: Shape, meshes: Meshes, programs: tuple[int, ...], rounds: int) -> Iterator[str]:
    """Yield the lines of the table; `*` marks the dispatcher's default.

    Args:
        shape: sizes of the layer and of a rank's tokens.
        meshes: of all ranks.
        programs: numbers of SMs, 0 = all; "of all" compares with the default division of the
            first.
        rounds: timed rounds.
    """
    place, routing = make_placement(shape, meshes), make_routing(shape)
    usual = {n: make_layout(shape, place.group.size(), n) for n in programs}
    tried = [(n, layout) for n, first in usual.items() for layout in list_divisions(first)]
    compile_kernels([(layout, place.num_local, False) for _, layout in tried])
    x_TD = torch.randn(shape.tokens, shape.dim, device="cuda", dtype=torch.bfloat16)
    largest = max((layout for _, layout in tried), key=lambda layout: layout.num_bytes)
    buffer = make_exchange_buffer(largest, place.group, x_TD.device, NVLinkOptions().timeout_s)

    calls: dict[str, Call] = {"nccl": make_nccl_call(place, routing, x_TD)}
    homes, used = [], []
    for i, (_, layout) in enumerate(tried):
        dispatcher = _dispatcher(layout, buffer, meshes, shape)
        inp = dispatcher.dispatch(x_TD, routing)
        homes.append(dispatcher.combine(fill_holes(inp.rows.values, inp.index.slots_SK), inp.plan))
        used.append(int(inp.num_rows))
        assert torch.equal(homes[0], homes[-1]) and used[0] == used[-1], f"{layout} differs"
        calls[f"dispatch {i}"] = lambda d=dispatcher: d.dispatch(x_TD, routing)
        calls[f"combine {i}"] = lambda d=dispatcher, n=inp: d.combine(n.rows.values, n.plan)
    times = {
        name: summarize_times(values).ms for name, values in time_in_turn(calls, rounds).items()
    }
    dist.barrier(place.group)  # no rank frees what another one still writes

    yield f"{shape.name}, EP{place.ep}: ms and ratio to NCCL ({times['nccl']:.3f} ms)"
    yield "  SMs  push rounds chunk warps   dispatch         of all   combine          of all"
    for i, (n, layout) in enumerate(tried):
        shown = f"{layout.num_push + layout.num_receive:5} {layout.num_push:5} {layout.rounds:6}"
        shown += f" {layout.chunk:5} {layout.num_warps:5}"
        for op in OPS:
            ms = times[f"{op} {i}"]
            shown += f"   {ms:.3f} ({ms / times['nccl']:.3f})    {times[f'{op} 0'] / ms:6.3f}"
        yield shown + ("  *" if layout == usual[n] else "")


def _dispatcher(
    layout: ExchangeLayout, buffer: SymmetricBuffer, meshes: Meshes, shape: Shape
) -> NVLinkDispatcher:
    """Return a dispatcher over the buffer with the layout's division of programs."""
    place, options = make_placement(shape, meshes), NVLinkOptions(row_factor=None)
    owner = FixedExchangePool(place.group, ep=place.ep, options=options)
    balanced = layout.source_rows * layout.top_k // place.ep
    part = replace(buffer, layout=layout)
    owner.exchange = Exchange(part, place.group, options, balanced_rows=balanced)
    return NVLinkDispatcher(place, owner)
