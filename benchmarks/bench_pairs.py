r"""A step whose forwards run beside backwards, with and without pairs, taking turns in one run.

    torchrun --nproc-per-node 2 -m benchmarks.bench_pairs --results
    python -m benchmarks.bench_pairs --link-gbps 100 --results    one GPU, delayed copies

Both variants run the same micro-batches of one model in the same order, each forward one ahead of
its backward: "in turn" the forward and then the backward, "pairs" both layer by layer. There is no
optimizer. A step's time is that of the slowest rank, over the steps of a turn, the median of all
rounds. `exchange_ms` sums the kernels that move tokens between ranks in one profiled step;
`beside` is the part of their time in which a kernel that computes runs too, on this rank.

On one GPU an exchange is a copy of the same bytes on a stream of its own, and a kernel that waits
as long as a link of that bandwidth would take.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.records import RESULTS, append_rows
from benchmarks.trace import COMMUNICATION, break_down, covered, kernels_of
from moecore import FSDPOptions, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.models import Decoder, preset
from moecore.moe.dispatch.alltoall import AllToAllDispatcher
from moecore.moe.placement import ExpertPlacement
from moecore.parallel.attached import moe_state
from moecore.planning.report import Kernel, category_of

EXCHANGE = "SendRecv"  # NCCL's kernel of an all-to-all
WAITING = "spin_kernel"  # that of `DelayedLink`
Pair = Callable[[TrainStep, Callable[[], Tensor], Callable[[], None]], Tensor]


def main() -> int:
    """Print and record a row per batch size and variant; on each rank of torchrun."""
    args = _arguments()
    if "WORLD_SIZE" not in os.environ and args.link_gbps is None:
        print("bench_pairs: error: start it with torchrun --nproc-per-node 2 -m", file=sys.stderr)
        return 2
    device = _start()
    model = _model(args, device)
    step = TrainStep(model, num_micro_batches=args.micro_batches)
    for batch_size in args.batch_sizes:
        tokens = _tokens(args, batch_size, device)
        rows = measure(step, model, tokens, args)
        if dist.get_rank() == 0:
            print("\n".join(json.dumps(row) for row in rows), flush=True)
            if args.results is not None:
                world = dist.get_world_size()
                append_rows(args.results, "benchmarks.bench_pairs", rows, num_gpus=world)
    dist.barrier()
    return 0


class DelayedLink:
    """Stands for `dist.all_to_all_single` on one GPU; the exchanges of a group wait in line.

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
        """Let tokens of each layer travel from this rank to itself, for the rest of the process."""
        dist.all_to_all_single = self
        world = dist.group.WORLD
        assert world is not None
        for layer in moe_state(model).layers.values():
            experts = layer.config.num_experts
            place = ExpertPlacement(group=world, num_experts=experts, ep=1, etp=1)
            layer.dispatcher = AllToAllDispatcher(place)


def _in_turn(
    _step: TrainStep, forward: Callable[[], Tensor], backward: Callable[[], None]
) -> Tensor:
    found = forward()
    backward()
    return found


PAIRS: dict[str, Pair] = {"in turn": _in_turn, "pairs": TrainStep.side_by_side}


def run(step: TrainStep, model: nn.Module, tokens: list[Tensor], pair: Pair) -> Tensor:
    """Run all micro-batches of a step and drop it; return the sum of their losses."""
    forwards = [partial(_loss, model, batch, len(tokens)) for batch in tokens]
    with step.micro_batches():
        losses = [forwards[0]()]
        for forward in forwards[1:]:
            losses.append(pair(step, forward, losses[-1].backward))
        losses[-1].backward()
    step.drop()
    return torch.stack([loss.detach() for loss in losses]).sum()


def _loss(model: nn.Module, tokens_BT: Tensor, number: int) -> Tensor:
    loss: Tensor = model(tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous())
    return loss / number


def measure(
    step: TrainStep, model: nn.Module, tokens: list[Tensor], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a row per variant; collective."""
    steps = {name: partial(run, step, model, tokens, pair) for name, pair in PAIRS.items()}
    losses = {name: [one() for _ in range(args.warm_up)][-1].item() for name, one in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for n in range(args.rounds):
        for name in list(steps)[:: 1 if n % 2 else -1]:
            times[name].append(_seconds(steps[name], args.steps, tokens[0].device))
    return [
        {
            "op": "lanes_step",
            "provider": name,
            "model": args.model,
            "layers": args.layers,
            "ep": args.ep,
            "dispatcher": args.dispatcher,
            "link_gbps": args.link_gbps,
            "micro_batches": args.micro_batches,
            "batch_size": tokens[0].shape[0],
            "seq_len": args.seq_len,
            "step_ms": statistics.median(times[name]) * 1e3,
            "fastest_ms": min(times[name]) * 1e3,
            "slowest_ms": max(times[name]) * 1e3,
            "loss": losses[name],
        }
        | _traced(one, tokens[0].device)
        for name, one in steps.items()
    ]


def _seconds(one: Callable[[], Tensor], number: int, device: torch.device) -> float:
    """Return seconds per step of the slowest rank."""
    _wait(device)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(number):
        one()
    _wait(device)
    took = torch.tensor((time.perf_counter() - start) / number, device=device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def _traced(one: Callable[[], Tensor], device: torch.device) -> dict[str, float]:
    """Return where exchanges of a step are, and its most memory."""
    if device.type != "cuda":
        one()
        return {}
    torch.cuda.reset_peak_memory_stats()
    kernels = [
        replace(k, name="nccl " + EXCHANGE) if WAITING in k.name else k for k in kernels_of(one)
    ]
    found = break_down(kernels)
    exchanges = [k for k in kernels if EXCHANGE in k.name]
    computing = [k for k in kernels if category_of(k.name) not in COMMUNICATION]
    return {
        "exchange_ms": covered(exchanges) / 1e3,
        "beside": beside(exchanges, computing),
        "exposed_ms": found.exposed,
        "idle_ms": found.idle,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def beside(exchanges: list[Kernel], computing: list[Kernel]) -> float:
    """Return the share of the time of exchanges in which something computes.

    Example, us: an exchange from 2 to 6, products from 0 to 3 and from 5 to 8: 0.5.
    """
    whole = covered(exchanges)
    both = whole + covered(computing) - covered([*exchanges, *computing])
    return both / whole if whole else 0.0


def _model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    config = replace(preset(args.model), num_layers=args.layers)
    model = Decoder(config, device="meta")
    meshes = build_meshes(ParallelConfig(ep=args.ep), device.type)
    options = FSDPOptions(param_dtype=torch.bfloat16, dense_strategy="optim")
    parallelize_moe(model, meshes, dispatcher=args.dispatcher, fsdp=options)
    model.to_empty(device=device)
    model.init_weights()
    if args.link_gbps is not None:
        DelayedLink(args.link_gbps).connect(model)
    return model


def _tokens(args: argparse.Namespace, batch_size: int, device: torch.device) -> list[Tensor]:
    g = torch.Generator().manual_seed(dist.get_rank())
    size = (args.micro_batches, batch_size, args.seq_len + 1)
    tokens = torch.randint(0, preset(args.model).vocab_size, size, generator=g)
    return list(tokens.to(device))


def _start() -> torch.device:
    """Start the process group of torchrun."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    alone = dict(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group("cpu:gloo,cuda:nccl", **({} if "RANK" in os.environ else alone))
    return device


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", default="qwen3-30b-a3b", help="a preset")
    add("--layers", type=int, default=4)
    add("--ep", type=int, default=2)
    add("--dispatcher", default="alltoall", choices=["alltoall", "allgather"])
    add("--link-gbps", type=float, help="one GPU: exchanges take as long as over such a link")
    add("--seq-len", type=int, default=4096)
    add("--batch-sizes", type=int, nargs="+", default=[1, 2], help="rows per rank")
    add("--micro-batches", type=int, default=4)
    add("--warm-up", type=int, default=2, help="steps of each variant that do not count")
    add("--steps", type=int, default=3, help="of a turn")
    add("--rounds", type=int, default=5, help="turns of each variant")
    add("--results", type=Path, nargs="?", const=RESULTS)
    args = parser.parse_args()
    if args.link_gbps is not None:
        args.ep, args.dispatcher = 1, "alltoall"
    return args


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without destructors, see examples/launch.py
