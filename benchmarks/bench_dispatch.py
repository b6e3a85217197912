"""Dispatch and combine over NVLink against NCCL, and the whole expert-parallel layer.

    torchrun --nproc-per-node 8 -m benchmarks.bench_dispatch --out DIR
    torchrun --nproc-per-node 8 -m benchmarks.bench_dispatch --sweep

Rows of one expert-parallel degree each; the first of `--ep` in full, the others short (even routing
and all SMs, the first shape):

    dispatch          tokens in, ExpertInput ready; per number of SMs. Baseline `nccl`: one
    combine           all_to_all_single of the expanded rows (one per token and choice, already
                      sorted), in the same rounds
    ep_sum_combine    combine that also adds the expert rows of each source row, as in the layer;
                      against `combine` of the same dispatcher, which gets the sums
    ep_layer_fwd_bwd  the whole layer; nvlink against the same layer with alltoall. nvlink-none has
                      no overlap_weight_grads; nvlink-fp8 and alltoall-fp8 have DispatchOptions.fp8
    ep_experts_fwd_bwd  its experts alone, on the rows that they received; without the sums over
                      expert rows and their adjoints where the dispatcher has them
    ep_exposed        the first less the second, round by round: all that is not experts, which is
                      communication that nothing hides, index, router and balance

Before each timed call a tiny all-reduce lets all ranks start at once; of each round the slowest
rank counts. `gbps` is of what the busiest rank sends or gets. `peak` is above
weights, input and the exchange's own buffers, which all layers share and which are printed.

With `--fp8-dispatch` all tokens are such that FP8 carries them as they are: every dispatcher must
give the same. Bits that are zero cost a product less power, so these shapes have a name of their
own.

`--sweep` tries how the programs are divided instead, on the first shape (`dispatch_sweep.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks import harness, records
from benchmarks.dispatch_cases import (
    SHAPES,
    Call,
    Shape,
    compile_ahead,
    layout_of,
    nccl_call,
    nvlink_of,
    place_of,
    poisoned,
    routing_of,
    time_in_turn,
    timing_of,
)
from benchmarks.dispatch_sweep import sweep
from benchmarks.records import Environment, Row
from moecore import MoEConfig, MoELayer, NVLinkOptions, ParallelConfig, build_meshes
from moecore.kernels.experts.contract import UnsummedInput
from moecore.kernels.rows.move import gather_rows, sum_rows
from moecore.kernels.rows.packed import pack_rows
from moecore.kernels.rows.record import Rows
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.micro_batch import MicroBatch
from moecore.moe.placement import ExpertPlacement
from moecore.moe.records import Dispatcher, ExpertInput, Routing, UnsummedRows
from moecore.parallel.mesh import Meshes

ROUTINGS = ["even", "skewed"]
AGREEMENT = 0.02  # of the layer over nvlink with the layer over alltoall, relative


def bench_moves(
    shape: Shape,
    meshes: Meshes,
    num_sms: Iterable[int],
    rounds: int,
    *,
    skewed: bool,
    sums: bool,
    fp8: bool,
) -> Iterator[dict[str, Any]]:
    """Yield rows of dispatch and combine alone; with `sums` also of `ep_sum_combine`."""
    place, routing = place_of(shape, meshes), routing_of(shape, skewed=skewed)
    x_TD = torch.randn(shape.tokens, shape.dim, device="cuda", dtype=torch.bfloat16)
    x_TD = rounded(x_TD) if fp8 else x_TD
    tokens = (x_TD, routing)
    calls: dict[str, Call] = {"nccl": nccl_call(place, routing, x_TD)}
    others = {"alltoall": AllToAllDispatcher(place)}
    nvlinks = {
        f"nvlink-{n}" if n else "nvlink": nvlink_of(place, programs=n or None) for n in num_sms
    }
    if fp8:
        nvlinks["nvlink-fp8"] = nvlink_of(place, fp8=True)
        others["alltoall-fp8"] = AllToAllDispatcher(place, fp8=True)
    gathered: dict[str, Tensor] = {}
    for name, dispatcher in (others | nvlinks).items():
        inp = dispatcher.dispatch(x_TD, routing)
        home_TD = dispatcher.combine(poisoned(inp.rows.widen(), inp.index.slots_SK), inp.plan)
        gathered[name] = home_TD.clone()
        calls[f"dispatch {name}"] = lambda d=dispatcher: d.dispatch(x_TD, routing)
        calls[f"combine {name}"] = lambda d=dispatcher, i=inp: d.combine(i.rows.widen(), i.plan)
    for name, home_TD in gathered.items():
        assert torch.equal(home_TD, gathered["alltoall"]), f"{name} differs: no numbers"
    if sums:
        calls["ep_sum_combine nvlink"] = sum_combine_call(
            nvlinks["nvlink"], others["alltoall"], tokens
        )
    timings = {name: timing_of(times) for name, times in time_in_turn(calls, rounds).items()}
    moved = _busiest_rows(place, routing) * shape.dim * x_TD.element_size()
    for key, timing in timings.items():
        op, _, name = key.partition(" ")
        if name.startswith(("nvlink", "alltoall")):
            syncs = harness.count_syncs(calls[key], device=x_TD.device)
            baseline = f"combine {name}" if op == "ep_sum_combine" else "nccl"
            ms = timings[baseline].ms
            fields = records.timing_fields(timing, baseline=baseline.split()[0], ms=ms)
            yield fields | dict(op=op, backend=name, gbps=moved / timing.ms / 1e6, syncs=syncs)
    for dispatcher in nvlinks.values():
        dispatcher.exchanges.close()


def rounded(x_TD: Tensor) -> Tensor:
    """Return tokens that travel as FP8 without another rounding."""
    return Rows.from_bytes(pack_rows(x_TD), x_TD.shape[1], x_TD.dtype).widen()


def sum_combine_call(
    nvlink: Dispatcher, alltoall: Dispatcher, tokens: tuple[Tensor, Routing]
) -> Call:
    """Return a combine of expert rows, whose result is checked."""
    inp, other = nvlink.dispatch(*tokens), alltoall.dispatch(*tokens)
    sums = sum_rows(gather_rows(other.rows.widen(), *_where(other)), *_where(other))
    rows = UnsummedRows(gather_rows(inp.rows.values, *_where(inp)))
    home_TD = nvlink.combine(rows, inp.plan)
    assert torch.equal(home_TD, alltoall.combine(sums, other.plan)), "sums differ: no numbers"
    return lambda: nvlink.combine(rows, inp.plan)


def _where(inp: ExpertInput) -> tuple[Tensor, Tensor, Tensor]:
    return inp.index.row_ids_R, inp.index.slots_SK, inp.index.num_rows


def _busiest_rows(place: ExpertPlacement, routing: Routing) -> int:
    """Return the most rows that one rank sends to others, or gets from them."""
    owner_TK = routing.expert_ids_TK // place.num_local
    blocks = torch.arange(place.ep, device=owner_TK.device)
    sent_P = (owner_TK[:, :, None] == blocks).any(1).sum(0)
    sent_G = sent_P.repeat_interleave(place.etp)
    all_ranks = [torch.empty_like(sent_G) for _ in range(place.group.size())]
    dist.all_gather(all_ranks, sent_G, group=place.group)
    sent_GG = torch.stack(all_ranks).fill_diagonal_(0)
    return int(torch.maximum(sent_GG.sum(0), sent_GG.sum(1)).max())


def make_layer(shape: Shape, meshes: Meshes) -> MoELayer:
    """Return this rank's shard of a bf16 layer with random weights; the router is the same."""
    config = MoEConfig(
        dim=shape.dim, hidden_dim=shape.hidden_dim, num_experts=shape.num_experts, top_k=shape.top_k
    )
    layer = MoELayer(config, device="meta", dtype=torch.bfloat16)
    layer.get_part("experts").shard(meshes.expert["ep", "etp"])
    layer.to_empty(device="cuda")
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in _local_weights(layer):
            weight.normal_(0, 0.02)
    layer.get_part("experts").set_backend("triton")
    return layer


def _local_weights(layer: MoELayer) -> list[Tensor]:
    """Return this rank's parts of all parameters."""
    return [p.to_local() if isinstance(p, DTensor) else p for p in layer.parameters()]


def bench_layer(
    shape: Shape, meshes: Meshes, factor: float, rounds: int, *, without_overlap: bool, fp8: bool
) -> Iterator[dict[str, Any]]:
    """Yield rows of the whole layer and of its experts alone, forward and backward."""
    place, layer = place_of(shape, meshes), make_layer(shape, meshes)
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    tokens = dict(generator=generator, device="cuda", dtype=torch.bfloat16)
    x_TD = torch.randn(shape.tokens, shape.dim, **tokens)
    x_TD = (rounded(x_TD) if fp8 else x_TD).requires_grad_()
    dy_TD = torch.randn(shape.tokens, shape.dim, **tokens)
    nvlinks = {"nvlink": nvlink_of(place, NVLinkOptions(row_factor=factor))}
    if without_overlap:
        options = NVLinkOptions(overlap_weight_grads=False, row_factor=factor)
        nvlinks["nvlink-none"] = nvlink_of(place, options)
    if fp8:
        options = NVLinkOptions(row_factor=factor)
        nvlinks["nvlink-fp8"] = nvlink_of(place, options, fp8=True)
    dispatchers: dict[str, Dispatcher] = {**nvlinks, "alltoall": AllToAllDispatcher(place)}
    if fp8:
        dispatchers["alltoall-fp8"] = AllToAllDispatcher(place, fp8=True)

    def step(name: str) -> Tensor:
        layer.dispatcher = dispatchers[name]
        layer.zero_grad()
        x_TD.grad = None
        y_TD = layer(x_TD)
        y_TD.backward(dy_TD)
        return y_TD.detach()

    found = {name: (step(name), x_TD.grad) for name in dispatchers}
    for name, nvlink in nvlinks.items():
        nvlink.exchanges.check()
        for ours, right in zip(found[name], found["alltoall"], strict=True):
            error = float((ours.float() - right.float()).norm() / right.float().norm())
            assert error < AGREEMENT, f"{name} differs from alltoall by {error:.3g}: no numbers"
    del found
    calls: dict[str, Call] = {name: lambda n=name: step(n) for name in dispatchers}
    alone = {f"experts {n}": experts_call(layer, d, x_TD) for n, d in dispatchers.items()}
    times = time_in_turn(calls | alone, rounds)
    del alone
    for name, call in calls.items():
        layer.dispatcher = dispatchers[name]
        memory = memory_fields(layer, call, x_TD)
        yield from layer_rows(shape, times, name, memory)
    for name, nvlink in nvlinks.items():
        buffers = nvlink.exchanges.get_exchange(x_TD, shape.top_k).layout.num_bytes
        if dist.get_rank() == 0:
            print(f"buffers of {name}, shared by all layers: {records.size(buffers)}", flush=True)
        nvlink.exchanges.close()


def experts_call(layer: MoELayer, dispatcher: Dispatcher, x_TD: Tensor) -> Call:
    """Return forward and backward of the experts on the rows that the dispatcher brings."""
    experts = layer.get_part("experts")
    with torch.no_grad():
        inp = dispatcher.dispatch(x_TD.detach(), layer.get_part("router")(x_TD, MicroBatch()))
    rows = inp.rows.widen()
    inp = dataclasses.replace(inp, rows=Rows(rows))
    if inp.unsummed is not None:
        rows = inp.unsummed.handle_RD
        inp = dataclasses.replace(inp, unsummed=UnsummedInput(rows))  # nothing travels
    leaves = (rows.requires_grad_(), inp.index.weights_R.requires_grad_())
    dy = torch.randn(rows.shape, dtype=rows.dtype, device=rows.device)

    def call() -> None:
        experts.zero_grad()
        for leaf in leaves:
            leaf.grad = None
        y = experts(inp)
        (y.y_RD if isinstance(y, UnsummedRows) else y).backward(dy)

    return call


def memory_fields(layer: MoELayer, step: Call, x_TD: Tensor) -> dict[str, Any]:
    """Return syncs and bytes of a step, and what its forward keeps."""
    fields = dict(
        syncs=harness.count_syncs(step, device=x_TD.device),
        peak_bytes=harness.measure_peak(step, device=x_TD.device),
    )
    forward = functools.partial(layer, x_TD)
    saved = harness.measure_saved(forward, parameters=_local_weights(layer), inputs=[x_TD])
    return fields | dict(saved_bytes=saved.hook_bytes)


def layer_rows(
    shape: Shape, times: dict[str, list[float]], name: str, memory: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one dispatcher."""
    whole, experts = timing_of(times[name]), timing_of(times[f"experts {name}"])
    other = timing_of(times["alltoall"])
    timing = records.timing_fields(whole, baseline="alltoall", ms=other.ms)
    yield (
        timing
        | memory
        | dict(op="ep_layer_fwd_bwd", backend=name, tflops=shape.flops / whole.ms / 1e9)
    )
    yield records.timing_fields(experts) | dict(
        op="ep_experts_fwd_bwd", backend=name, tflops=shape.flops / experts.ms / 1e9
    )
    pairs = zip(times[name], times[f"experts {name}"], strict=True)
    exposed = timing_of([a - b for a, b in pairs])
    timing = records.timing_fields(exposed, baseline="layer", ms=whole.ms)
    yield timing | dict(op="ep_exposed", backend=name)


def report(args: argparse.Namespace, rows: Iterator[dict[str, Any]], **fields: Any) -> None:
    """Print and write what rank 0 sees; every rank has run it."""
    for row in rows:
        made = Row(**(fields | row))
        if dist.get_rank() == 0:
            print(records.describe(made), flush=True)
            records.append(args.out, args.environment, made)


def bench_degree(args: argparse.Namespace, ep: int, *, short: bool) -> None:
    """Measure one expert-parallel degree."""
    meshes = build_meshes(ParallelConfig(ep=ep), "cuda")
    shapes = [SHAPES[name] for name in (args.shapes[:1] if short else args.shapes)]
    num_sms, routings = ([0], ["even"]) if short else (args.num_sms, args.routings)
    layer, fp8 = not args.no_layer, args.fp8_dispatch and not short
    compile_ahead(
        (
            dataclasses.replace(layout_of(s, ep, n), sums_slot=not n),
            s.num_experts // ep,
            layer and not n,
        )
        for s in shapes
        for n in num_sms
    )
    for shape in shapes:
        label = f"{shape.name}-ep{ep}" + ("-fp8-exact" if fp8 else "")
        for routing in routings:
            with torch.no_grad():
                which = dict(skewed=routing == "skewed", sums=layer and 0 in num_sms, fp8=fp8)
                rows = bench_moves(shape, meshes, num_sms, args.rounds, **which)
                report(args, rows, shape=label, routing=routing)
        if layer:
            which = dict(without_overlap=args.without_overlap and not short, fp8=fp8)
            rows = bench_layer(shape, meshes, args.row_factor, args.layer_rounds, **which)
            report(args, rows, shape=label, routing="learned")


def _command(out: Path | None, world: int) -> str:
    """Return what was typed, without where the records go."""
    typed = [word for word in sys.argv[1:] if word not in ("--out", str(out), f"--out={out}")]
    module = ["-m", "benchmarks.bench_dispatch"]
    return shlex.join(["torchrun", "--nproc-per-node", str(world), *module, *typed])


def main() -> None:
    """Run what was asked for on the ranks of torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=records.results_path, help="folder of the records; not with --sweep"
    )
    parser.add_argument("--shapes", nargs="+", default=["dsv3", "qwen3-30b"], choices=SHAPES)
    parser.add_argument("--num-sms", nargs="+", type=int, default=[0, 24], help="0 = all")
    parser.add_argument("--routings", nargs="+", default=ROUTINGS, choices=ROUTINGS)
    parser.add_argument("--ep", nargs="+", type=int, help="first in full; default: all ranks")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layer-rounds", type=int, default=10)
    parser.add_argument("--row-factor", type=float, default=2.0, help="of the layer")
    parser.add_argument("--without-overlap", action="store_true", help="a dispatcher more")
    parser.add_argument("--fp8-dispatch", action="store_true", help="a dispatcher more")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--no-layer", action="store_true")
    args = parser.parse_args()
    if args.out is None and not args.sweep:
        parser.error("--out must be given without --sweep")
    if not torch.cuda.is_available() or "WORLD_SIZE" not in os.environ:
        parser.error("it needs GPUs: start it with torchrun --nproc-per-node N -m")
    build_meshes(ParallelConfig(), "cuda")  # starts the process group
    world = dist.get_world_size()
    here = Environment.here()
    gpus, command = f"{world} x {here.gpu}", _command(args.out, world)
    args.environment = dataclasses.replace(here, gpu=gpus, command=command)
    degrees = args.ep or [world]
    if args.sweep:
        meshes = build_meshes(ParallelConfig(ep=degrees[0]), "cuda")
        with torch.no_grad():
            for line in sweep(SHAPES[args.shapes[0]], meshes, args.num_sms, args.rounds):
                if dist.get_rank() == 0:
                    print(line, flush=True)
    else:
        for i, ep in enumerate(degrees):
            bench_degree(args, ep, short=i > 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
