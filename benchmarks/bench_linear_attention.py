r"""A linear attention layer, forward and backward: a gated delta net of Qwen3-Next's size.

    python -m benchmarks.bench_linear_attention
    torchrun --nproc-per-node 2 -m benchmarks.bench_linear_attention

The layer is transformers' own. In one process:

    rows, eager      one sequence, by transformers' functions of plain PyTorch
    rows, package    the same, by what transformers calls where packages are installed
    documents        packed documents of skewed lengths, after `use_causal_attention`
    one by one       the same documents, each in a call of its own by "rows, package"

On several ranks, each of which holds its part of one sequence:

    over ranks       states go from piece to piece
    alone            the whole sequence on one GPU, by "rows, package"

Calls take turns. A time is that of the slowest rank, the median over rounds, in milliseconds.
"""

from __future__ import annotations

import argparse
import inspect
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.bench_attention import lengths_of
from benchmarks.records import append_rows, results_path
from moecore.attention.context_parallel.local_tokens import ContextParallel, LocalTokens
from moecore.attention.sequence import Sequence, make_packed_sequence
from moecore.families.transformers.linear_attention import SEQUENCE, accept_sequences

MODULE = "benchmarks.bench_linear_attention"
PLAIN = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
Call = Callable[[], Any]


def main() -> int:
    """Measure and report."""
    args = parse()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    layer = make_layer(args.small).to(device, torch.bfloat16 if device.type == "cuda" else None)
    accept_sequences(layer)
    for T in args.tokens:
        calls = alone_calls(layer, T, device) if world == 1 else rank_calls(layer, T, device)
        for name, ms in time_calls(calls, args.rounds, device).items():
            row = dict(op="gated_delta_net", shape=f"{T} tokens", backend=name, ms=round(ms, 3))
            if not dist.is_initialized() or dist.get_rank() == 0:
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                if args.results is not None:
                    append_rows(args.results, MODULE, [row], num_gpus=world)
    if world > 1:
        dist.destroy_process_group()
    return 0


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[4096, 16384, 65536], help="of the row")
    add("--rounds", type=int, default=10)
    add("--small", action="store_true", help="two heads, for a CPU")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--results", type=results_path, help="folder or .jsonl file of records")
    return parser.parse_args()


def make_layer(small: bool) -> nn.Module:
    """Return a layer with the sizes of Qwen3-Next-80B-A3B, random."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    heads = dict(linear_num_key_heads=1, linear_num_value_heads=2) if small else {}
    torch.manual_seed(0)
    return Qwen3NextGatedDeltaNet(Qwen3NextConfig(**heads), 0)


def inputs(layer: Any, num_tokens: int, device: torch.device) -> Tensor:
    g = torch.Generator(device).manual_seed(1)
    x = torch.randn(1, num_tokens, layer.hidden_size, generator=g, device=device)
    return x.to(layer.out_proj.weight.dtype)


def call_of(layer: nn.Module, x_1TD: Tensor, sequence: Sequence) -> Call:
    """Return a forward and backward of the layer."""

    def call() -> None:
        leaf = x_1TD.detach().requires_grad_()
        y = layer(leaf, **{SEQUENCE: sequence})
        torch.autograd.grad(y, [leaf, *layer.parameters()], x_1TD)

    return call


def alone_calls(layer: nn.Module, T: int, device: torch.device) -> dict[str, Call]:
    """Return the calls of one process."""
    x = inputs(layer, T, device)
    borders = torch.tensor([0, *lengths_of(T)]).cumsum(0).int()
    documents = make_packed_sequence(borders, None, (1, T), device)
    single = [
        call_of(layer, x[:, a:b].contiguous(), Sequence()) for a, b in pairwise(borders.tolist())
    ]

    def eager() -> None:
        with plain_functions(layer):
            call_of(layer, x, Sequence())()

    return {
        "rows, eager": eager,
        "rows, package": call_of(layer, x, Sequence()),
        "documents": call_of(layer, x, documents),
        "one by one": lambda: [call() for call in single],
    }


def rank_calls(layer: nn.Module, T: int, device: torch.device) -> dict[str, Call]:
    """Return the calls of several ranks; collective."""
    assert dist.group.WORLD is not None
    x = inputs(layer, T, device)
    held = LocalTokens(ContextParallel(dist.group.WORLD), (1, T))
    return {
        "over ranks": call_of(layer, held.slice_local(x), Sequence(local_tokens=held)),
        "alone": call_of(layer, x, Sequence()),
    }


@contextmanager
def plain_functions(layer: nn.Module) -> Iterator[None]:
    """Within, the layer calls transformers' functions of plain PyTorch."""
    of_file = inspect.unwrap(type(layer).forward).__globals__
    with patch.dict(of_file, {name: inspect.unwrap(of_file[name]) for name in PLAIN}):
        yield


def time_calls(calls: dict[str, Call], rounds: int, device: torch.device) -> dict[str, float]:
    """Return milliseconds of each call; they take turns, after two rounds that do not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(2 + rounds):
        for name, call in calls.items():
            wait(device)
            start = time.perf_counter()
            call()
            wait(device, ranks=False)
            if turn >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    found = torch.tensor([statistics.median(values) for values in times.values()], device=device)
    if dist.is_initialized():
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return dict(zip(calls, found.tolist(), strict=True))


def wait(device: torch.device, ranks: bool = True) -> None:
    """Wait for the device and, by default, for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    if ranks and dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    raise SystemExit(main())
