"""A linear attention layer, forward and backward, with the sizes of Qwen3-Next or of Kimi Linear.

    python -m benchmarks.bench_linear_attention
    python -m benchmarks.bench_linear_attention --layer kimi_delta_attention
    torchrun --nproc-per-node 2 -m benchmarks.bench_linear_attention

The layer is transformers' own. In one process:

    rows, eager      one sequence, with transformers' functions of plain PyTorch
    rows, package    the same with the packages that transformers calls if they are installed
    rows, kernels    the same sequence as one packed document, after `use_causal_attention`
    documents        packed documents of skewed lengths, after `use_causal_attention`
    one by one       the same documents, one call of "rows, package" per document

Without a package, Kimi delta attention allocates 64 k numbers per token and head. Its calls of
transformers' functions are therefore only measured up to 4,096 tokens.

On several ranks, each with a part of one sequence:

    over ranks       states are passed from part to part
    alone            the whole sequence on one GPU, as "rows, kernels"

With `--emulated-ranks N`, one process computes the part of one of N ranks and sends nothing, so a
time is without communication ("one of N ranks"), and outputs have no meaning.

Calls alternate. A time is the slowest rank's, the median over rounds, in milliseconds.
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

from benchmarks.bench_attention import make_lengths
from benchmarks.records import append_rows, results_path
from moecore.attention.context_parallel.local_tokens import ContextParallel, LocalTokens
from moecore.attention.sequence import Sequence, make_packed_sequence
from moecore.families.transformers.linear_attention import SEQUENCE, accept_sequence_argument

MODULE = "benchmarks.bench_linear_attention"
PLAIN = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "causal_conv1d_fn")
MAX_PLAIN_TOKENS = {"gated_delta_net": 65536, "kimi_delta_attention": 4096}
Call = Callable[[], Any]


def main() -> int:
    """Measure and report."""
    args = parse_arguments()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    elif (num_ranks := args.emulated_ranks) > 1:
        dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=num_ranks)
    dtype = torch.bfloat16 if device.type == "cuda" else None
    layer = make_layer(args.layer, args.small).to(device, dtype)
    accept_sequence_argument(layer)
    for T in args.tokens:
        if not dist.is_initialized():
            is_short = MAX_PLAIN_TOKENS[args.layer] >= T
            calls = make_alone_calls(layer, T, device, has_plain=is_short)
        else:
            name = "over ranks" if world > 1 else f"one of {args.emulated_ranks} ranks"
            calls = make_rank_calls(name, layer, T, device)
        for name, ms in time_calls(calls, args.rounds, device).items():
            row = dict(op=args.layer, shape=f"{T} tokens", backend=name, ms=round(ms, 3))
            if world == 1 or dist.get_rank() == 0:
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                if args.results is not None:
                    append_rows(args.results, MODULE, [row], num_gpus=world)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--layer", choices=list(MAX_PLAIN_TOKENS), default="gated_delta_net")
    add("--tokens", type=int, nargs="+", default=[4096, 16384, 65536], help="of the row")
    add("--rounds", type=int, default=10)
    add("--emulated-ranks", type=int, default=1)
    add("--small", action="store_true", help="two heads, for a CPU")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--results", type=results_path, help="folder or .jsonl file of records")
    return parser.parse_args()


def make_layer(kind: str, small: bool) -> nn.Module:
    """Return a layer with random weights: Qwen3-Next-80B-A3B's or Kimi-Linear-48B-A3B's sizes."""
    from transformers import KimiLinearConfig, Qwen3NextConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import (
        KimiLinearDeltaAttention,
        KimiLinearPreTrainedModel,
    )
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    heads = dict(linear_num_key_heads=1, linear_num_value_heads=2) if small else {}
    torch.manual_seed(0)
    if kind == "kimi_delta_attention":
        config = KimiLinearConfig(**dict(linear_num_heads=2) if small else {})
        layer = KimiLinearDeltaAttention(config, 0)
        layer.apply(KimiLinearPreTrainedModel(config)._init_weights)
        return layer
    return Qwen3NextGatedDeltaNet(Qwen3NextConfig(**heads), 0)


def make_inputs(layer: Any, num_tokens: int, device: torch.device) -> Tensor:
    g = torch.Generator(device).manual_seed(1)
    x = torch.randn(1, num_tokens, layer.hidden_size, generator=g, device=device)
    return x.to(next(layer.parameters()).dtype)


def make_row(num_tokens: int, device: torch.device) -> Sequence:
    """Return a row with one packed document."""
    borders = torch.tensor([0, num_tokens], dtype=torch.int32)
    return make_packed_sequence(borders, None, (1, num_tokens), device)


def make_call(layer: nn.Module, x_1TD: Tensor, sequence: Sequence) -> Call:
    """Return a call that runs forward and backward of the layer."""

    def call() -> None:
        leaf = x_1TD.detach().requires_grad_()
        y = layer(leaf, **{SEQUENCE: sequence})
        torch.autograd.grad(y, [leaf, *layer.parameters()], x_1TD)

    return call


def make_alone_calls(
    layer: nn.Module, T: int, device: torch.device, *, has_plain: bool = True
) -> dict[str, Call]:
    """Return the calls of a single process by name; those of transformers only if `has_plain`."""
    x = make_inputs(layer, T, device)
    borders = torch.tensor([0, *make_lengths(T)]).cumsum(0).int()
    documents = make_packed_sequence(borders, None, (1, T), device)
    single = [
        make_call(layer, x[:, a:b].contiguous(), Sequence()) for a, b in pairwise(borders.tolist())
    ]

    def eager() -> None:
        with use_plain_functions(layer):
            make_call(layer, x, Sequence())()

    calls: dict[str, Call] = {
        "rows, kernels": make_call(layer, x, make_row(T, device)),
        "documents": make_call(layer, x, documents),
    }
    if has_plain:
        calls["rows, eager"] = eager
        calls["rows, package"] = make_call(layer, x, Sequence())
        calls["one by one"] = lambda: [call() for call in single]
    return calls


def make_rank_calls(name: str, layer: nn.Module, T: int, device: torch.device) -> dict[str, Call]:
    """Return the call of one of several ranks, which is called `name`, and "alone"; collective."""
    assert dist.group.WORLD is not None
    x = make_inputs(layer, T, device)
    held = LocalTokens(ContextParallel(dist.group.WORLD), (1, T))
    return {
        name: make_call(layer, held.slice_local(x), Sequence(local_tokens=held)),
        "alone": make_call(layer, x, make_row(T, device)),
    }


@contextmanager
def use_plain_functions(layer: nn.Module) -> Iterator[None]:
    """Return a context in which the layer calls transformers' functions of plain PyTorch."""
    of_file = inspect.unwrap(type(layer).forward).__globals__
    plain = {name: inspect.unwrap(of_file[name]) for name in PLAIN if name in of_file}
    with patch.dict(of_file, plain):
        yield


def time_calls(
    calls: dict[str, Call], rounds: int, device: torch.device, *, warm_up: int = 2
) -> dict[str, float]:
    """Return the milliseconds of each call; the calls alternate, after `warm_up` rounds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warm_up + rounds):
        for name, call in calls.items():
            wait(device)
            start = time.perf_counter()
            call()
            wait(device, ranks=False)
            if turn >= warm_up:
                times[name].append(1e3 * (time.perf_counter() - start))
    found = torch.tensor([statistics.median(values) for values in times.values()], device=device)
    if dist.is_initialized():
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return dict(zip(calls, found.tolist(), strict=True))


def wait(device: torch.device, ranks: bool = True) -> None:
    """Wait for the device and, if `ranks`, for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    if ranks and dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    raise SystemExit(main())
