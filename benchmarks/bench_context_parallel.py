"""Attention and training steps over context parallel ranks: time, and the share of communication.

    torchrun --nproc-per-node 2 -m benchmarks.bench_context_parallel --part attention
    torchrun --nproc-per-node 2 -m benchmarks.bench_context_parallel --part step
    torchrun --nproc-per-node 1 -m benchmarks.bench_context_parallel --part step

"attention": forward and backward of one layer's attention, for each exchange, against

    compute   the same call on the same rank, with local memory instead of received tensors
    travel    the transfers of the call alone, in the same order
    alone     all tokens on one GPU

    lost      call - compute, of the same rounds
    covered   1 - (time in which only communication runs) / travel, from a trace of the call, on the
              rank where it is least: others wait for that one

Calls alternate. A time is the slowest rank's, the median over rounds. `covered` needs no difference
of long times; `lost` also counts the slowdown of kernels by communication.

"step": a step of a few layers with AdamW; all ranks are cp ranks and also share the experts.
`benchmarks.bench_longest` finds the longest context of one GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.records import append_rows, results_path
from benchmarks.trace import break_down, trace_kernels
from moecore import (
    DispatchOptions,
    FSDPOptions,
    Meshes,
    NVLinkOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.attention.context_parallel import ring
from moecore.attention.context_parallel.local_tokens import ContextParallel, LocalTokens
from moecore.attention.function import attend
from moecore.attention.sequence import Sequence
from moecore.base.options.context import ContextOptions
from moecore.models import Decoder, preset
from moecore.moe.dispatch import collectives
from moecore.moe.forced_routing import force_even_load
from moecore.train import AdamW

Call = Callable[[], Any]
Row = dict[str, Any]
MODULE = "benchmarks.bench_context_parallel"
LEAD_CYCLES = 10_000_000  # about 5 ms in which the host queues a call


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Sizes of an attention layer's heads, with or without key/value latents.

    Attributes:
        queries, keys: numbers of heads.
        dim, value_dim: dims of a head.
        latent_dim: dim of a key/value latent; 0 = no latents.
        rotary_dim: dim of a latent layer's rotary key, shared by all heads.
        ways: exchanges to measure.
    """

    queries: int
    keys: int
    dim: int
    value_dim: int
    latent_dim: int = 0
    rotary_dim: int = 0
    ways: tuple[str, ...] = ("p2p", "allgather", "a2a", "a2a+p2p")


HEADS = {
    "qwen3-30b-a3b": Heads(queries=32, keys=4, dim=128, value_dim=128),
    "deepseek-v3, tp 8": Heads(
        queries=16,
        keys=16,
        dim=192,
        value_dim=128,
        latent_dim=512,
        rotary_dim=64,
        ways=("allgather",),
    ),
}


def main() -> int:
    """Measure and report."""
    args = parse_arguments()
    rank, world = (int(os.environ.get(name, d)) for name, d in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    meshes = build_meshes(ParallelConfig(cp=world, ep=world), args.device)
    for row in {"attention": measure_all_attention, "step": measure_steps}[args.part](args, meshes):
        if rank == 0:
            print("  ".join(f"{name} {_round(value)}" for name, value in row.items()), flush=True)
        if rank == 0 and args.results is not None:
            append_rows(args.results, MODULE, [row], num_gpus=world)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--part", choices=("attention", "step"), required=True)
    add("--tokens", type=int, nargs="+", help="of a row")
    add("--heads", nargs="+", default=list(HEADS), choices=HEADS, help="of the attention")
    add("--seconds", type=float, default=12.0, help="for the rounds of one number of tokens")
    add("--preset", default="qwen3-30b-a3b", help="of the step")
    add("--layers", type=int, default=4)
    add("--way", default="auto", help="of the step")
    add("--steps", type=int, default=3, help="that count, after two")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--results", type=results_path, help="folder or .jsonl file of records")
    args = parser.parse_args()
    defaults = {"attention": (32, 64, 128, 256), "step": (64, 128)}
    args.tokens = args.tokens or [n << 10 for n in defaults[args.part]]
    return args


def _round(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def measure_all_attention(args: argparse.Namespace, _: Meshes) -> Iterator[Row]:
    """Yield a row per number of tokens, kind of heads, cp and exchange; collective."""
    contexts = {
        (cp, way): make_context(cp, way)
        for cp, way in itertools.product((2, 4, 8), ("p2p", "allgather", "a2a", "a2a+p2p"))
        if cp <= dist.get_world_size() and (cp > 2 or way != "a2a+p2p")
    }
    for tokens, name in itertools.product(args.tokens, args.heads):
        heads = HEADS[name]
        for row in measure_attention(args, heads, tokens, contexts):
            yield {"op": "context_parallel", "heads": name, "tokens": tokens} | row


def measure_attention(
    args: argparse.Namespace,
    heads: Heads,
    tokens: int,
    contexts: dict[tuple[int, str], ContextParallel],
) -> list[Row]:
    """Return a row per cp and exchange of the heads; their calls alternate."""
    ours = {
        (cp, way): context
        for (cp, way), context in contexts.items()
        if way in heads.ways and (way != "a2a" or heads.keys % cp == 0)
    }
    own = {key: attention(heads, tokens, cp, args.device) for key, cp in ours.items()}
    travels = {key: record_transfers(call) for key, call in own.items()}
    calls: dict[Any, Call] = {"alone": attention(heads, tokens, None, args.device)}
    for key, call in own.items():
        calls |= {(*key, "call"): call, (*key, "compute"): without_exchanges(call)}
        calls[(*key, "travel")] = travels[key].run
    times = time_in_turn(calls, args)
    ms = {key: statistics.median(values) for key, values in times.items()}
    if not ours:
        return [{"cp": 1, "ms": ms["alone"], "rounds": len(times["alone"])}]
    rows = []
    for (cp, way), call in own.items():
        here, travel_ms = (cp, way), ms[cp, way, "travel"]
        pairs = zip(times[*here, "call"], times[*here, "compute"], strict=True)
        lost = statistics.median(a - b for a, b in pairs)
        exposed = measure_exposed(call, args, num_steps=3 if ms[*here, "call"] < 500 else 1)
        row: Row = {"cp": cp, "way": way, "ms": ms[*here, "call"], "alone_ms": ms["alone"]}
        row |= {"compute_ms": ms[*here, "compute"], "travel_ms": travel_ms, "lost_ms": lost}
        row |= {"measure_exposed": exposed, "sent_bytes": travels[here].sent_bytes}
        row["speedup"] = row["alone_ms"] / row["ms"]
        row["covered"] = None if exposed is None else 1 - exposed / travel_ms
        rows.append(row | {"rounds": len(times["alone"])})
    return rows


def make_context(cp: int, way: str) -> ContextParallel:
    """Return the group of `cp` neighbouring ranks with this rank; collective over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    firsts = range(0, world, cp)
    group = _make_group([range(first, first + cp) for first in firsts], rank)
    if way != "a2a+p2p":
        return ContextParallel(
            group, **{"a2a": dict(a2a=group), "p2p": dict(ring=group)}.get(way, {})
        )
    pairs = _make_group([range(i, i + 2) for i in range(0, world, 2)], rank)
    rings = [range(first + i, first + cp, 2) for first in firsts for i in range(2)]
    return ContextParallel(group, a2a=pairs, ring=_make_group(rings, rank))


def _make_group(parts: list[range], rank: int) -> dist.ProcessGroup:
    """Create a process group per part and return the one with `rank`; collective over all ranks."""
    groups = [dist.new_group(list(part)) for part in parts]
    return next(g for g, part in zip(groups, parts, strict=True) if rank in part)


def attention(heads: Heads, tokens: int, cp: ContextParallel | None, device: str) -> Call:
    """Return a call: forward and backward of this rank's tokens, or without cp of all tokens."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    own = tokens if cp is None else tokens // cp.size
    held = None if cp is None else LocalTokens(cp, (1, tokens))
    sequence, scale = Sequence(local_tokens=held), heads.dim**-0.5

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    q, do = make(1, own, heads.queries, heads.dim), make(1, own, heads.queries, heads.value_dim)
    if heads.latent_dim:
        latents = make(1, own, heads.latent_dim + heads.rotary_dim)
        kept = heads.dim - heads.rotary_dim
        weight = make(heads.keys * (kept + heads.value_dim), heads.latent_dim)
        weight *= heads.latent_dim**-0.5
        leaves = [q, latents, weight]
    else:
        leaves = [q, *(make(1, own, heads.keys, n) for n in (heads.dim, heads.value_dim))]
    leaves = [x.requires_grad_() for x in leaves]

    def call() -> None:
        k, v = _from_latents(heads, held, *leaves[1:]) if heads.latent_dim else leaves[1:]
        torch.autograd.grad(attend(leaves[0], k, v, sequence, scale=scale), leaves, do)

    return call


def _from_latents(
    heads: Heads, held: LocalTokens | None, latents: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return keys and values of all tokens from gathered latents, like `models/mla.py`."""
    whole = latents if held is None else held.gather(latents)
    c, k_shared = whole.split((heads.latent_dim, heads.rotary_dim), dim=-1)
    kept = heads.dim - heads.rotary_dim
    kv = F.linear(c, weight).unflatten(-1, (heads.keys, -1))
    k, v = kv.split((kept, heads.value_dim), dim=-1)
    k_shared = k_shared[:, :, None].expand(*k.shape[:-1], heads.rotary_dim)
    return torch.cat((k, k_shared), dim=-1), v


@contextmanager
def replace_exchanges(exchange: Call, gather: Call, send_on: Call) -> Iterator[None]:
    """Return a context in which attention communicates through the given functions."""
    with (
        patch.object(dist, "all_to_all_single", exchange),
        patch.object(collectives, "all_gather_single", gather),
        patch.object(ring, "_send_to_next", send_on),
    ):
        yield


class _Done:
    """Handle of a communication that has finished."""

    def wait(self) -> None:
        pass


@cache
def _make_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


def without_exchanges(call: Call) -> Call:
    """Return the call with local memory instead of received tensors."""

    def receive(out: Tensor, _: Tensor, **__: Any) -> _Done:
        out.set_(_make_buffer(tuple(out.shape), out.dtype, out.device))
        return _Done()

    def silent() -> None:
        with replace_exchanges(receive, receive, lambda x, _: ring._RingTransfer(x, x, [])):
            call()

    return silent


class Transfers:
    """Recorded transfers of a call, which can be run again."""

    def __init__(self) -> None:
        self.sends: list[Call] = []
        self.sent_bytes = 0

    def run(self) -> None:
        """Run all transfers, one after the other."""
        for send in self.sends:
            send()

    def num_bytes(self) -> int:
        """Return the bytes that this rank sent."""
        return self.sent_bytes

    def add(self, send: Call, num_bytes: int, group: dist.ProcessGroup | None = None) -> None:
        """Record a transfer of `num_bytes` to each other rank of `group`, or to one rank."""
        self.sends.append(send)
        self.sent_bytes += num_bytes * (1 if group is None else group.size() - 1)


def record_transfers(call: Call) -> Transfers:
    """Run the call once and return its transfers; collective."""
    travel = Transfers()
    exchange = dist.all_to_all_single
    gather = collectives.all_gather_single
    send_on = ring._send_to_next

    def exchanged(out: Tensor, x: Tensor, **options: Any) -> Any:
        again, group = (torch.empty_like(out), x.detach().clone()), options["group"]
        travel.add(lambda: exchange(*again, group=group), x.nbytes // group.size(), group)
        return exchange(out, x, **options)

    def gathered(out: Tensor, x: Tensor, **options: Any) -> Any:
        again, group = (torch.empty_like(out), x.detach().clone()), options["group"]
        travel.add(lambda: gather(*again, group=group), x.nbytes, group)
        return gather(out, x, **options)

    def sent_on(x: Tensor, group: dist.ProcessGroup) -> Any:
        again = x.detach().clone()
        travel.add(lambda: send_on(again, group).wait_for_tensor(), x.nbytes)
        return send_on(x, group)

    with replace_exchanges(exchanged, gathered, sent_on):
        call()
    return travel


def time_in_turn(calls: dict[Any, Call], args: argparse.Namespace) -> dict[Any, list[float]]:
    """Return the slowest rank's milliseconds by call and round, for as many rounds as fit."""
    rounds = torch.zeros((), device=args.device)
    for _ in range(2):  # the first one may build kernels
        began = time.perf_counter()
        for call in calls.values():
            time_call(call, args.device)
        rounds.fill_(args.seconds / (time.perf_counter() - began))
        dist.all_reduce(rounds, op=dist.ReduceOp.MIN)
        if rounds < 3:
            break
    spans: dict[Any, list[float]] = {name: [] for name in calls}
    for _ in range(min(max(int(rounds), 2), 15)):
        for name, call in calls.items():
            spans[name].append(time_call(call, args.device))
    times = torch.tensor(list(spans.values()), device=args.device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return dict(zip(calls, times.tolist(), strict=True))


def time_call(call: Call, device: str) -> float:
    """Return the milliseconds of a call that all ranks start together."""
    token = torch.zeros(1, device=device)
    if device != "cuda":
        dist.all_reduce(token)
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(LEAD_CYCLES)
    dist.all_reduce(token)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def measure_exposed(call: Call, args: argparse.Namespace, *, num_steps: int) -> float | None:
    """Return the milliseconds of a call in which only communication runs, least of all ranks."""
    if args.device != "cuda":
        return None
    token = torch.zeros(1, device=args.device)

    def aligned() -> None:
        dist.all_reduce(token)
        call()

    dist.barrier()
    kernels = trace_kernels(aligned, num_steps=num_steps)
    ours = [k for k in kernels if "AllReduce" not in k.name]  # which wait for the other ranks
    found = break_down(ours, num_steps=num_steps)
    least = torch.tensor(found.exposed, device=args.device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return float(least)


def measure_steps(args: argparse.Namespace, meshes: Meshes) -> Iterator[Row]:
    """Yield a row per number of tokens; collective."""
    on_gpu, world = args.device == "cuda", dist.get_world_size()
    config = preset(args.preset)
    config = dataclasses.replace(config, num_layers=args.layers, max_seq_len=max(args.tokens))
    model = Decoder(config, device="meta")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    fsdp = FSDPOptions(param_dtype=dtype, dense_strategy="optim")
    over_ranks: dict[str, Any] = {}
    if world > 1:
        # Even routing needs no more room; the first forward is not the longest.
        room = NVLinkOptions(max_tokens=max(args.tokens) // world, row_factor=1.05)
        over_ranks["context"] = ContextOptions(way=args.way)
        over_ranks["dispatch"] = DispatchOptions(nvlink=room)
    parallelize_moe(model, meshes, fsdp=fsdp, **over_ranks)
    model.to_empty(device=args.device)
    model.init_weights()
    force_even_load(model)
    step = TrainStep(model, AdamW(model.parameters(), lr=1e-6), max_norm=1.0)
    for tokens in sorted(args.tokens):
        row = {"op": "context_parallel_step", "preset": args.preset, "layers": args.layers}
        row |= {"tokens": tokens, "cp": world, "ep": world, "way": args.way}
        fits = nullcontext() if world > 1 else record_out_of_memory(row)
        with fits:
            row |= measure_step(args, step, model, tokens)
        yield row
    step.close()


@contextmanager
def record_out_of_memory(row: Row) -> Iterator[None]:
    """Return a context that records in `row` that a step ran out of memory; for one rank."""
    try:
        yield
    except torch.OutOfMemoryError:
        row |= {"step_ms": None, "tokens_per_s": None, "peak_gib": None}


def measure_step(args: argparse.Namespace, step: TrainStep, model: Decoder, tokens: int) -> Row:
    """Return the times and the memory of steps with one row of `tokens` tokens."""
    g = torch.Generator().manual_seed(0)
    row = torch.randint(0, model.config.vocab_size, (1, tokens), generator=g).to(args.device)
    labels, on_gpu = row.roll(-1, 1), args.device == "cuda"

    def run() -> None:
        with step.micro_batch():
            model(row, labels).backward()
        step.finish()

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    run(), run()
    token = torch.zeros(1, device=args.device)
    seconds = []
    for _ in range(args.steps):
        dist.all_reduce(token)
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(seconds, device=args.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    median = float(slowest.median())
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return {"step_ms": median * 1e3, "tokens_per_s": tokens / median, "peak_gib": peak}


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without destructors, see moecore/recipes/launch.py
