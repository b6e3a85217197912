"""A step whose forwards run beside backwards, with and without pairs, alternating in one run.

    torchrun --nproc-per-node 2 -m benchmarks.bench_pairs --results
    python -m benchmarks.bench_pairs --link-gbps 25 --results    one GPU, delayed copies
    python -m benchmarks.bench_pairs --link-gbps 25 --graph --results

All variants run the same micro-batches of one model in the same order, each forward before the
backward of the micro-batch before it. There is no optimizer. A step's time is the slowest rank's
mean over some steps, the median of all rounds. Dispatchers alternate in one model. Variants:

    in turn           the forward and then the backward
    pairs             both layer by layer
    shared apart      in turn, with shared experts on a separate stream (`overlap_shared`)

"shared apart" runs with `--shared-model`, against "in turn". A step of `PROFILED` micro-batches is
profiled between its first forward and its last backward: `exchange_ms` sums the kernels that move
tokens between ranks, and `beside` is the share of their time in which a computing kernel runs too,
on this rank.

On one GPU an exchange is a copy of the same bytes on a separate stream, and a kernel that waits as
long as a link of that bandwidth would take. With `--graph` attention and routers are CUDA graphs,
so that the host launches less.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import synchronize
from benchmarks.records import RESULTS, append_rows, results_path
from benchmarks.trace import COMMUNICATION, break_down, measure_covered, trace_kernels
from moecore import (
    DenseOptions,
    FSDPOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.models import Decoder, preset
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.placement import ExpertPlacement
from moecore.moe.records import Dispatcher
from moecore.parallel.model.parallel_state import get_moe_state
from moecore.planning.report import Kernel, find_kernel_category

EXCHANGES = ("nvlink dispatch", "copies to peers")  # categories; and of NCCL:
ALL_TO_ALL = "SendRecv"
WAITING = "spin_kernel"  # that of `DelayedLink`
PROFILED = 4
Pair = Callable[[TrainStep, Callable[[], Tensor], Callable[[], None]], Tensor]
Around = Callable[[Callable[[], None]], Any]


def main() -> int:
    """Print and record a row per batch size, dispatcher and variant; on each rank of torchrun."""
    args = _parse_arguments()
    if "WORLD_SIZE" not in os.environ and args.link_gbps is None:
        print("bench_pairs: error: start it with torchrun --nproc-per-node 2 -m", file=sys.stderr)
        return 2
    device = start_group()
    most = args.batch_sizes[-1:]
    _measure_model(args, args.model, args.layers, args.batch_sizes, device)
    if args.shared_model != "none":
        _measure_model(args, args.shared_model, args.shared_layers, most, device, shares=True)
    dist.barrier()
    return 0


def _measure_model(
    args: argparse.Namespace,
    name: str,
    num_layers: int,
    batch_sizes: Sequence[int],
    device: torch.device,
    *,
    shares: bool = False,
) -> None:
    """Print and record the rows of one model, per batch size, dispatcher and variant."""
    gc.collect()  # the model before
    if device.type == "cuda":
        torch.cuda.empty_cache()
    model = _make_model(args, name, num_layers, device)
    dispatchers = _list_dispatchers(model, args)
    step = TrainStep(model, num_micro_batches=args.micro_batches)
    for batch_size in batch_sizes:
        tokens = _make_tokens(args, name, batch_size, device)
        for dispatcher, by_layer in dispatchers.items():
            for layer, one in zip(get_moe_state(model).layers.values(), by_layer, strict=True):
                layer.dispatcher = one
            variants = _make_variants(device, shares=shares)
            what = {"model": name, "layers": num_layers, "dispatcher": dispatcher}
            rows = [what | row for row in measure(step, model, tokens, variants, args)]
            if dist.get_rank() == 0:
                print("\n".join(json.dumps(row) for row in rows), flush=True)
                print(*_format_rows(rows), sep="\n", flush=True)
                if args.results is not None:
                    world = dist.get_world_size()
                    append_rows(args.results, "benchmarks.bench_pairs", rows, num_gpus=world)
        step.close()  # the next batch size makes buffers of its own


def _format_rows(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line per row."""
    first = rows[0]
    lines = [f"{first['model']}, {first['dispatcher']}, batch {first['batch_size']}"]
    for row in rows:
        shown = [f"{row['step_ms']:8.1f} ms", f"{row['step_ms'] / first['step_ms']:6.3f}"]
        for key in ("beside", "exchange_ms", "exposed_ms", "idle_ms", "peak_gib"):
            shown += [f"{key} {row[key]:.3f}"] if key in row else []
        lines.append("  ".join([f"    {row['provider']:14}", *shown]))
    return lines


class DelayedLink:
    """Replacement of `dist.all_to_all_single` on one GPU; the exchanges of a group run in sequence.

    Args:
        gbps: 1e9 bytes per second.
    """

    def __init__(self, gbps: float) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):  # the first one warms up
            start.record()
            torch.cuda._sleep(10_000_000)
            end.record()
        end.synchronize()
        self._cycles_per_byte = 1e10 / start.elapsed_time(end) / (gbps * 1e9)
        self._streams: dict[Any, torch.cuda.Stream] = {}

    def __call__(
        self, out: Tensor, sent: Tensor, *, group: Any, async_op: bool = False, **_splits: Any
    ) -> torch.cuda.Event | None:
        stream = self._streams.setdefault(group, torch.cuda.Stream())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out.copy_(sent)
            torch.cuda._sleep(int(sent.nbytes * self._cycles_per_byte))
        for tensor in (out, sent):
            tensor.record_stream(stream)
        done = stream.record_event()
        if async_op:
            return done  # `wait` is that of a work
        done.wait()
        return None

    def connect(self, model: nn.Module) -> None:
        """Make each layer send its tokens from this rank to itself, for the rest of the process."""
        dist.all_to_all_single = self
        world = dist.group.WORLD
        assert world is not None
        for layer in get_moe_state(model).layers.values():
            experts = layer.config.num_experts
            place = ExpertPlacement(group=world, num_experts=experts, ep=1, etp=1)
            layer.dispatcher = AllToAllDispatcher(place)


def _run_in_turn(
    _step: TrainStep, forward: Callable[[], Tensor], backward: Callable[[], None]
) -> Tensor:
    """Run a forward and then a backward; return the forward's loss."""
    found = forward()
    backward()
    return found


class Variant:
    """A way to run a step: its pairs of forward and backward, and the stream of shared experts."""

    def __init__(self, pair: Pair, stream: torch.cuda.Stream | None = None) -> None:
        self._pair, self._stream = pair, stream

    def run(
        self,
        step: TrainStep,
        model: nn.Module,
        tokens: list[Tensor],
        around: Around = lambda pairs: pairs(),
    ) -> Tensor:
        """Run all micro-batches, drop the step, and return the sum of their losses.

        `around` runs everything except the first forward and the last backward.
        """
        for layer in get_moe_state(model).layers.values():
            layer.shared_stream = self._stream
        forwards = [partial(_compute_loss, model, batch, len(tokens)) for batch in tokens]
        losses: list[Tensor] = []

        def pairs() -> None:
            for forward in forwards[1:]:
                losses.append(self._pair(step, forward, losses[-1].backward))

        with step.micro_batches():
            losses.append(forwards[0]())
            around(pairs)
            losses[-1].backward()
        step.drop()
        return torch.stack([loss.detach() for loss in losses]).sum()


def _make_variants(device: torch.device, *, shares: bool) -> dict[str, Variant]:
    """Return the variants by name; with `shares` those of shared experts."""
    found = {"in turn": Variant(_run_in_turn)}
    if not shares:
        return found | {"pairs": Variant(TrainStep.side_by_side)}
    stream = torch.cuda.Stream() if device.type == "cuda" else None
    return found | {"shared apart": Variant(_run_in_turn, stream)}


def _compute_loss(model: nn.Module, tokens_BT: Tensor, number: int) -> Tensor:
    loss: Tensor = model(tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous())
    return loss / number


def measure(
    step: TrainStep,
    model: nn.Module,
    tokens: list[Tensor],
    variants: dict[str, Variant],
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Return a row per variant; collective."""
    steps = {name: partial(one.run, step, model, tokens) for name, one in variants.items()}
    losses = {name: [one() for _ in range(args.warm_up)][-1].item() for name, one in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for n in range(args.rounds):
        for name in list(steps)[:: 1 if n % 2 else -1]:
            times[name].append(time_steps(steps[name], args.steps, tokens[0].device))
    return [
        {
            "op": "pairs_step",
            "provider": name,
            "ep": args.ep,
            "link_gbps": args.link_gbps,
            "graph": args.graph,
            "micro_batches": args.micro_batches,
            "batch_size": tokens[0].shape[0],
            "seq_len": args.seq_len,
            "step_ms": statistics.median(times[name]) * 1e3,
            "fastest_ms": min(times[name]) * 1e3,
            "slowest_ms": max(times[name]) * 1e3,
            "loss": losses[name],
        }
        | _trace(partial(one.run, step, model, tokens[:PROFILED]), tokens[0].device)
        for name, one in variants.items()
    ]


def time_steps(one: Callable[[], Any], number: int, device: torch.device) -> float:
    """Return the seconds per step of the slowest rank."""
    synchronize(device)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(number):
        one()
    synchronize(device)
    took = torch.tensor((time.perf_counter() - start) / number, device=device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def _trace(one: Callable[..., Tensor], device: torch.device) -> dict[str, float]:
    """Return the overlap of the exchanges in a step's pairs, and the peak memory of the step."""
    if device.type != "cuda":
        one()
        return {}
    torch.cuda.reset_peak_memory_stats()
    kernels: list[Kernel] = []
    one(around=lambda pairs: kernels.extend(trace_kernels(pairs)))
    kernels = [replace(k, name="nccl " + ALL_TO_ALL) if WAITING in k.name else k for k in kernels]
    found = break_down(kernels)
    exchanges = [
        k for k in kernels if ALL_TO_ALL in k.name or find_kernel_category(k.name) in EXCHANGES
    ]
    computing = [k for k in kernels if find_kernel_category(k.name) not in COMMUNICATION]
    return {
        "wall_ms": found.wall,
        "exchange_ms": measure_covered(exchanges) / 1e3,
        "beside": compute_overlap(exchanges, computing),
        "exposed_ms": found.exposed,
        "idle_ms": found.idle,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def compute_overlap(exchanges: list[Kernel], computing: list[Kernel]) -> float:
    """Return the share of the time of exchanges in which a computing kernel runs.

    Example, us: an exchange from 2 to 6, products from 0 to 3 and from 5 to 8: 0.5.
    """
    whole = measure_covered(exchanges)
    both = whole + measure_covered(computing) - measure_covered([*exchanges, *computing])
    return both / whole if whole else 0.0


def _make_model(
    args: argparse.Namespace, name: str, num_layers: int, device: torch.device
) -> nn.Module:
    """Return the parallelized model, with delayed exchanges if `--link-gbps` is set."""
    config = replace(preset(name), num_layers=num_layers)
    model = Decoder(config, device="meta")
    meshes = build_meshes(ParallelConfig(ep=args.ep), device.type)
    options = FSDPOptions(param_dtype=torch.bfloat16, dense_strategy="optim")
    dispatcher = "nvlink" if "nvlink" in args.dispatchers else args.dispatchers[0]
    dense = DenseOptions(graph=args.graph)
    parallelize_moe(model, meshes, dispatch=dispatcher, fsdp=options, dense=dense)
    model.to_empty(device=device)
    model.init_weights()
    if args.link_gbps is not None:
        DelayedLink(args.link_gbps).connect(model)
    return model


def _list_dispatchers(model: nn.Module, args: argparse.Namespace) -> dict[str, list[Dispatcher]]:
    """Return the dispatchers of all layers by name: the model's own, and all-to-all."""
    own = [layer.dispatcher for layer in get_moe_state(model).layers.values()]
    if len(args.dispatchers) == 1:
        return {args.dispatchers[0]: own}
    return {"alltoall": [AllToAllDispatcher(one.placement) for one in own], "nvlink": own}


def _make_tokens(
    args: argparse.Namespace, name: str, batch_size: int, device: torch.device
) -> list[Tensor]:
    """Return the random tokens of each micro-batch of this rank."""
    g = torch.Generator().manual_seed(dist.get_rank())
    size = (args.micro_batches, batch_size, args.seq_len + 1)
    tokens = torch.randint(0, preset(name).vocab_size, size, generator=g)
    return list(tokens.to(device))


def start_group() -> torch.device:
    """Start the process group of torchrun."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    alone = dict(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group("cpu:gloo,cuda:nccl", **({} if "RANK" in os.environ else alone))
    return device


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", default="qwen3-30b-a3b", help="a preset")
    add("--layers", type=int, default=6)
    add("--shared-model", default="moonlight-16b-a3b", help='one with shared experts, or "none"')
    add("--shared-layers", type=int, default=4)
    add("--ep", type=int, default=2)
    on_gpus = ["alltoall", "nvlink"] if torch.cuda.is_available() else ["alltoall"]
    add("--dispatchers", nargs="+", default=on_gpus, choices=["alltoall", "nvlink"])
    add("--link-gbps", type=float, help="one GPU: exchanges take as long as over such a link")
    add("--graph", action="store_true", help="attention and routers are CUDA graphs")
    add("--seq-len", type=int, default=4096)
    add("--batch-sizes", type=int, nargs="+", default=[1, 2], help="rows per rank")
    add("--micro-batches", type=int, default=8)
    add("--warm-up", type=int, default=1, help="steps of each variant that do not count")
    add("--steps", type=int, default=1, help="of a turn")
    add("--rounds", type=int, default=3, help="turns of each variant")
    add("--results", type=results_path, nargs="?", const=str(RESULTS))
    args = parser.parse_args()
    if args.link_gbps is not None:
        args.ep, args.dispatchers, args.shared_model = 1, ["alltoall"], "none"
    return args


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without destructors, see moecore/recipes/launch.py
