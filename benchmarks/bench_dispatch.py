"""Dispatch and combine over NVLink against NCCL, and the whole expert-parallel layer.

    torchrun --nproc-per-node 8 -m benchmarks.bench_dispatch --out DIR
    torchrun --nproc-per-node 8 -m benchmarks.bench_dispatch --sweep

Rows for each expert-parallel degree; all of them for the first of `--ep`, and for the others only
even routing, all SMs and the first shape:

    dispatch          from tokens to ExpertInput; per number of SMs. Baseline `nccl`: one
    combine           all_to_all_single of the expanded rows (one per token and choice, already
                      sorted), in the same rounds
    ep_sum_combine    combine that also adds the expert rows of each source row, as in the layer;
                      against `combine` of the same dispatcher, which gets the sums
    ep_layer_fwd_bwd  the whole layer; nvlink against alltoall. nvlink-none has no
                      overlap_weight_grads; nvlink-fp8 and alltoall-fp8 have DispatchOptions.fp8
    ep_experts_fwd_bwd  its experts alone, on the received rows; without the sums over expert rows
                      and their adjoints if the dispatcher computes them
    ep_exposed        the first less the second, round by round: exposed communication, index,
                      router and balance

A tiny all-reduce before each timed call lets all ranks start together; the slowest rank of each
round counts. `gbps` counts the bytes that the busiest rank sends or receives. `peak` is memory
above weights, input and the exchange's buffers, which all layers share; the buffers are printed.

With `--fp8-dispatch` FP8 represents all tokens exactly, and every dispatcher must return the same.
Zero bits lower the power of products, so these shapes have separate names.

`--sweep` instead tries divisions of the programs, on the first shape (`dispatch_sweep.py`).
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
    compile_kernels,
    fill_holes,
    make_layout,
    make_nccl_call,
    make_nvlink,
    make_placement,
    make_routing,
    summarize_times,
    time_in_turn,
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
from moecore.moe.records import (
    Dispatcher,
    ExpertInput,
    Routing,
    UnsummedRows,
    convert_to_summed_input,
)
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
    """Yield rows of dispatch and combine alone, and with `sums` of `ep_sum_combine`."""
    place, routing = make_placement(shape, meshes), make_routing(shape, skewed=skewed)
    x_TD = torch.randn(shape.tokens, shape.dim, device="cuda", dtype=torch.bfloat16)
    x_TD = round_tokens(x_TD) if fp8 else x_TD
    tokens = (x_TD, routing)
    calls: dict[str, Call] = {"nccl": make_nccl_call(place, routing, x_TD)}
    others = {"alltoall": AllToAllDispatcher(place)}
    nvlinks = {
        f"nvlink-{n}" if n else "nvlink": make_nvlink(place, programs=n or None) for n in num_sms
    }
    if fp8:
        nvlinks["nvlink-fp8"] = make_nvlink(place, fp8=True)
        others["alltoall-fp8"] = AllToAllDispatcher(place, fp8=True)
    gathered: dict[str, Tensor] = {}
    for name, dispatcher in (others | nvlinks).items():
        inp = dispatcher.dispatch(x_TD, routing)
        home_TD = dispatcher.combine(fill_holes(inp.rows.widen(), inp.index.slots_SK), inp.plan)
        gathered[name] = home_TD.clone()
        calls[f"dispatch {name}"] = lambda d=dispatcher: d.dispatch(x_TD, routing)
        calls[f"combine {name}"] = lambda d=dispatcher, i=inp: d.combine(i.rows.widen(), i.plan)
    for name, home_TD in gathered.items():
        assert torch.equal(home_TD, gathered["alltoall"]), f"{name} differs: no numbers"
    if sums:
        calls["ep_sum_combine nvlink"] = make_sum_combine(
            nvlinks["nvlink"], others["alltoall"], tokens
        )
    timings = {name: summarize_times(times) for name, times in time_in_turn(calls, rounds).items()}
    moved = _count_busiest_rows(place, routing) * shape.dim * x_TD.element_size()
    for key, timing in timings.items():
        op, _, name = key.partition(" ")
        if name.startswith(("nvlink", "alltoall")):
            syncs = harness.count_syncs(calls[key], device=x_TD.device)
            baseline = f"combine {name}" if op == "ep_sum_combine" else "nccl"
            ms = timings[baseline].ms
            fields = records.make_timing_fields(timing, baseline=baseline.split()[0], ms=ms)
            yield fields | dict(op=op, backend=name, gbps=moved / timing.ms / 1e6, syncs=syncs)
    for dispatcher in nvlinks.values():
        dispatcher.exchanges.close()


def round_tokens(x_TD: Tensor) -> Tensor:
    """Return the tokens rounded to values that FP8 represents exactly."""
    return Rows.from_bytes(pack_rows(x_TD), x_TD.shape[1], x_TD.dtype).widen()


def make_sum_combine(
    nvlink: Dispatcher, alltoall: Dispatcher, tokens: tuple[Tensor, Routing]
) -> Call:
    """Return a call of combine on expert rows, after a check of its result."""
    inp = nvlink.dispatch(*tokens)
    other = convert_to_summed_input(alltoall.dispatch(*tokens))
    sums = sum_rows(gather_rows(other.rows.values, *_get_index(other)), *_get_index(other))
    rows = UnsummedRows(gather_rows(inp.rows.values, *_get_index(inp)))
    home_TD = nvlink.combine(rows, inp.plan)
    assert torch.equal(home_TD, alltoall.combine(sums, other.plan)), "sums differ: no numbers"
    return lambda: nvlink.combine(rows, inp.plan)


def _get_index(inp: ExpertInput) -> tuple[Tensor, Tensor, Tensor]:
    return inp.index.row_ids_R, inp.index.slots_SK, inp.index.num_rows


def _count_busiest_rows(place: ExpertPlacement, routing: Routing) -> int:
    """Return the most rows that one rank sends to, or receives from, other ranks."""
    owner_TK = routing.expert_ids_TK // place.num_local
    blocks = torch.arange(place.ep, device=owner_TK.device)
    sent_P = (owner_TK[:, :, None] == blocks).any(1).sum(0)
    sent_G = sent_P.repeat_interleave(place.etp)
    all_ranks = [torch.empty_like(sent_G) for _ in range(place.group.size())]
    dist.all_gather(all_ranks, sent_G, group=place.group)
    sent_GG = torch.stack(all_ranks).fill_diagonal_(0)
    return int(torch.maximum(sent_GG.sum(0), sent_GG.sum(1)).max())


def make_layer(shape: Shape, meshes: Meshes) -> MoELayer:
    """Return this rank's shard of a bf16 layer with random weights and a replicated router."""
    config = MoEConfig(
        dim=shape.dim, hidden_dim=shape.hidden_dim, num_experts=shape.num_experts, top_k=shape.top_k
    )
    layer = MoELayer(config, device="meta", dtype=torch.bfloat16)
    layer.get_part("experts").shard_parameters(meshes.expert["ep", "etp"])
    layer.to_empty(device="cuda")
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in _local_weights(layer):
            weight.normal_(0, 0.02)
    layer.get_part("experts").set_backend("triton")
    return layer


def _local_weights(layer: MoELayer) -> list[Tensor]:
    """Return this rank's shards of all parameters."""
    return [p.to_local() if isinstance(p, DTensor) else p for p in layer.parameters()]


def bench_layer(
    shape: Shape, meshes: Meshes, factor: float, rounds: int, *, without_overlap: bool, fp8: bool
) -> Iterator[dict[str, Any]]:
    """Yield rows of the whole layer and of its experts alone, forward and backward."""
    place, layer = make_placement(shape, meshes), make_layer(shape, meshes)
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    tokens = dict(generator=generator, device="cuda", dtype=torch.bfloat16)
    x_TD = torch.randn(shape.tokens, shape.dim, **tokens)
    x_TD = (round_tokens(x_TD) if fp8 else x_TD).requires_grad_()
    dy_TD = torch.randn(shape.tokens, shape.dim, **tokens)
    nvlinks = {"nvlink": make_nvlink(place, NVLinkOptions(row_factor=factor))}
    if without_overlap:
        options = NVLinkOptions(overlap_weight_grads=False, row_factor=factor)
        nvlinks["nvlink-none"] = make_nvlink(place, options)
    if fp8:
        options = NVLinkOptions(row_factor=factor)
        nvlinks["nvlink-fp8"] = make_nvlink(place, options, fp8=True)
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
        nvlink.exchanges.wait_and_raise_errors()
        for ours, right in zip(found[name], found["alltoall"], strict=True):
            error = float((ours.float() - right.float()).norm() / right.float().norm())
            assert error < AGREEMENT, f"{name} differs from alltoall by {error:.3g}: no numbers"
    del found
    calls: dict[str, Call] = {name: lambda n=name: step(n) for name in dispatchers}
    alone = {f"experts {n}": make_experts_call(layer, d, x_TD) for n, d in dispatchers.items()}
    times = time_in_turn(calls | alone, rounds)
    del alone
    for name, call in calls.items():
        layer.dispatcher = dispatchers[name]
        memory = measure_memory(layer, call, x_TD)
        yield from make_layer_rows(shape, times, name, memory)
    for name, nvlink in nvlinks.items():
        buffers = nvlink.exchanges.get_exchange(x_TD, shape.top_k).layout.num_bytes
        if dist.get_rank() == 0:
            print(
                f"buffers of {name}, shared by all layers: {records.format_bytes(buffers)}",
                flush=True,
            )
        nvlink.exchanges.close()


def make_experts_call(layer: MoELayer, dispatcher: Dispatcher, x_TD: Tensor) -> Call:
    """Return a call: forward and backward of the experts on rows from the dispatcher."""
    experts = layer.get_part("experts")
    with torch.no_grad():
        inp = dispatcher.dispatch(x_TD.detach(), layer.get_part("router")(x_TD, MicroBatch()))
    rows = inp.rows.widen()
    inp = dataclasses.replace(inp, rows=Rows(rows))
    if inp.unsummed is not None:
        rows = inp.unsummed.grad_handle_RD
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


def measure_memory(layer: MoELayer, step: Call, x_TD: Tensor) -> dict[str, Any]:
    """Return the syncs and bytes of a step, and the bytes that its forward saves."""
    fields = dict(
        syncs=harness.count_syncs(step, device=x_TD.device),
        peak_bytes=harness.measure_peak(step, device=x_TD.device),
    )
    forward = functools.partial(layer, x_TD)
    saved = harness.measure_saved(forward, parameters=_local_weights(layer), inputs=[x_TD])
    return fields | dict(saved_bytes=saved.hook_bytes)


def make_layer_rows(
    shape: Shape, times: dict[str, list[float]], name: str, memory: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one dispatcher."""
    whole, experts = summarize_times(times[name]), summarize_times(times[f"experts {name}"])
    other = summarize_times(times["alltoall"])
    timing = records.make_timing_fields(whole, baseline="alltoall", ms=other.ms)
    yield (
        timing
        | memory
        | dict(op="ep_layer_fwd_bwd", backend=name, tflops=shape.flops / whole.ms / 1e9)
    )
    yield records.make_timing_fields(experts) | dict(
        op="ep_experts_fwd_bwd", backend=name, tflops=shape.flops / experts.ms / 1e9
    )
    pairs = zip(times[name], times[f"experts {name}"], strict=True)
    exposed = summarize_times([a - b for a, b in pairs])
    timing = records.make_timing_fields(exposed, baseline="layer", ms=whole.ms)
    yield timing | dict(op="ep_exposed", backend=name)


def report(args: argparse.Namespace, rows: Iterator[dict[str, Any]], **fields: Any) -> None:
    """Run all measurements on every rank; print and write the rows on rank 0."""
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
    compile_kernels(
        (
            dataclasses.replace(make_layout(s, ep, n), sums_slot=not n),
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


def _format_command(out: Path | None, world: int) -> str:
    """Return the command line without the folder of the records."""
    typed = [word for word in sys.argv[1:] if word not in ("--out", str(out), f"--out={out}")]
    module = ["-m", "benchmarks.bench_dispatch"]
    return shlex.join(["torchrun", "--nproc-per-node", str(world), *module, *typed])


def main() -> None:
    """Run the selected measurements on the ranks of torchrun."""
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
    gpus, command = f"{world} x {here.gpu}", _format_command(args.out, world)
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
