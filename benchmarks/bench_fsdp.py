"""A step of training under FSDP2, moecore's units and Megatron-FSDP, alternating in one run.

    torchrun --nproc-per-node 2 -m benchmarks.bench_fsdp --model qwen3-8b --layers 8 --results
    torchrun --nproc-per-node 2 -m benchmarks.bench_fsdp --model qwen3-30b-a3b --layers 3 --results
    torchrun --nproc-per-node 2 -m benchmarks.bench_fsdp --model qwen3-30b-a3b --layers 3 \
        --variants moecore moecore-nccl-ub --results

All variants compute in bf16, keep fp32 weights, reduce gradients in fp32, free blocks between
forward and backward, and step with torch's fused AdamW without weight decay. They start with the
same weights (rounded to bf16 for Megatron-FSDP) and get the same tokens. Megatron-FSDP shards the
plain model with blocks as units and routers in fp32; it needs the package `megatron-fsdp`, NCCL and
ep 1.

In every round each variant runs some steps, in another order. A step is forward, backward and
optimizer. Its time is the slowest rank's mean over the steps of a round, the median of all rounds.
All models exist at once: `peak_gib` is a variant's memory between steps plus its peak in a step,
without the other variants, on the rank with the most.

The variant moecore-nccl-ub sets `FSDPOptions.nccl_ub`. On GPUs another step of each variant is
profiled: rows have the name, the CUDA blocks and the time of the longest NCCL kernel of the
all-gathers and of the reduce-scatters. A block occupies an SM.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from tests.parallel.fsdp.fsdp2 import parallelize_with_fsdp2
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.bench_pairs import start_group
from benchmarks.harness import synchronize
from benchmarks.records import RESULTS, append_rows, results_path
from moecore import FSDPOptions, ParallelConfig, build_meshes, parallelize_moe
from moecore.models import Decoder, DecoderConfig, preset
from moecore.models.block import Block
from moecore.moe.router import Router

TOKENS = 64  # ids that occur, so that a few steps learn something
Made = tuple[nn.Module, torch.optim.Optimizer]
DENSE = {
    "qwen3-8b": DecoderConfig(
        vocab_size=151_936,
        dim=4096,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        qk_norm="head",
        rope_theta=1_000_000.0,
        max_seq_len=40_960,
        mlp_hidden_dim=12_288,
    ),
    "tiny-dense": replace(preset("tiny-qwen3"), moe=None, mlp_hidden_dim=64),
}


def main() -> int:
    """Print and record a row per batch size and variant; on each rank of torchrun."""
    args = _parse_arguments()
    try:
        _check_arguments(args)
    except ValueError as error:
        print(f"bench_fsdp: error: {error}", file=sys.stderr)
        return 2
    device = start_group()
    runs = [Run(name, args, device) for name in args.variants]
    for batch_size in args.batch_sizes:
        times = measure(runs, batch_size, args)
        rows = [describe(run, batch_size, times[run.name], args) for run in runs]
        if dist.get_rank() == 0:
            print("\n".join(_format_row(row, rows[0]) for row in rows), flush=True)
            if args.results is not None:
                world = dist.get_world_size()
                append_rows(args.results, "benchmarks.bench_fsdp", rows, num_gpus=world)
    dist.barrier()
    return 0


class Run:
    """A sharded model with its optimizer.

    Attributes:
        held: its bytes between steps.
        peak: its most bytes since the last reset.
        losses: of this rank since the last reset.
    """

    def __init__(self, name: str, args: argparse.Namespace, device: torch.device) -> None:
        before = _get_allocated(device)
        self.name, self.device, self.held, self.peak = name, device, 0, 0
        self.model, self.optimizer = MAKERS[name](args, device)
        self.losses: list[Tensor] = []
        self.vocab_size, self.seq_len, self.number = make_config(args).vocab_size, args.seq_len, 0
        self.run_turn(batch_size=1, steps=1)  # makes the optimizer's state
        gc.collect()  # of the model before it was sharded
        self.held = _get_allocated(device) - before

    def reset(self) -> None:
        """Clear the losses and the peak."""
        self.losses, self.peak = [], 0

    def run_turn(self, *, batch_size: int, steps: int) -> float:
        """Return seconds per step on this rank."""
        before = _get_allocated(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize(self.device)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.losses.append(self._step(batch_size))
        synchronize(self.device)
        seconds = (time.perf_counter() - start) / steps
        if self.device.type == "cuda":
            most = torch.cuda.max_memory_allocated() - before + self.held
            self.peak = max(self.peak, most)
        return seconds

    def _step(self, batch_size: int) -> Tensor:
        self.number += 1
        g = torch.Generator().manual_seed(1000 * self.number + dist.get_rank())
        size = (batch_size, self.seq_len + 1)
        tokens_BT = torch.randint(0, min(TOKENS, self.vocab_size), size, generator=g)
        tokens_BT = tokens_BT.to(self.device)
        loss: Tensor = self.model(tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def make_config(args: argparse.Namespace) -> DecoderConfig:
    """Return the decoder's config."""
    config = DENSE.get(args.model) or preset(args.model)
    layers = args.layers or config.num_layers
    return replace(config, num_layers=layers)


def _make_maker(
    build: Callable[..., nn.Module], **options: Any
) -> Callable[[argparse.Namespace, torch.device], Made]:
    """Return a function that makes a model sharded by `build` and its optimizer.

    `options` are fields of `FSDPOptions`.
    """

    def make(args: argparse.Namespace, device: torch.device) -> Made:
        model = Decoder(make_config(args), device="meta")
        meshes = build_meshes(ParallelConfig(ep=args.ep), device.type)
        build(model, meshes, fsdp=FSDPOptions(param_dtype=torch.bfloat16, **options))
        model.to_empty(device=device)
        model.init_weights()
        return model, _make_adamw(model, args.lr)

    return make


def _megatron(args: argparse.Namespace, device: torch.device) -> Made:
    """Return the model sharded by Megatron-FSDP and its optimizer."""
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard

    model = Decoder(make_config(args), device=device).bfloat16()  # its dtype is that of compute
    for module in model.modules():
        if isinstance(module, Router):
            module.float()
    mesh = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=("shard", "tp"))
    sharded, optimizer = fully_shard(
        model,
        _make_adamw(model, args.lr),
        device_mesh=mesh,
        expt_device_mesh=mesh,  # parameters with ".experts." in their names
        dp_shard_dim="shard",
        tp_dim="tp",
        fsdp_unit_modules=[Block],
        zero_dp_strategy="optim_grads_params",
        mixed_precision_policy=MixedPrecisionPolicy(
            main_params_dtype=torch.float32,
            main_grads_dtype=torch.float32,
            grad_comm_dtype=torch.float32,
        ),
        fsdp_double_buffer=args.double_buffer,
        preproc_state_dict_for_dcp_ckpt=False,
    )
    for state in optimizer.state.values():
        state["step"].zero_()  # it has stepped without gradients to make its state
    return sharded, optimizer


MAKERS: dict[str, Callable[[argparse.Namespace, torch.device], Made]] = {
    "fsdp2": _make_maker(parallelize_with_fsdp2),
    "moecore": _make_maker(parallelize_moe),
    "megatron-fsdp": _megatron,
    "moecore-nccl-ub": _make_maker(parallelize_moe, nccl_ub=True),
}
DEFAULT = ["fsdp2", "moecore", "megatron-fsdp"]
COLLECTIVES = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter"}


def _make_adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)


def measure(runs: list[Run], batch_size: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the slowest rank's seconds per step in each round, per variant."""
    for run in runs:
        run.reset()
        run.run_turn(batch_size=batch_size, steps=args.warm_up)
    times: dict[str, list[float]] = {run.name: [] for run in runs}
    for n in range(args.rounds):
        first = n % len(runs)
        for run in runs[first:] + runs[:first]:
            seconds = run.run_turn(batch_size=batch_size, steps=args.steps)
            times[run.name].append(_reduce_max(seconds, run.device))
    return times


def describe(
    run: Run, batch_size: int, seconds: list[float], args: argparse.Namespace
) -> dict[str, Any]:
    """Return the row of a variant; collective."""
    step, launches = statistics.median(seconds), profile_collectives(run, batch_size)
    return {
        "op": "fsdp_step",
        "provider": run.name,
        "model": args.model,
        "layers": make_config(args).num_layers,
        "ep": args.ep,
        "ranks": dist.get_world_size(),
        "batch_size": batch_size,
        "seq_len": args.seq_len,
        "double_buffer": args.double_buffer,
        "step_ms": step * 1e3,
        "fastest_ms": min(seconds) * 1e3,
        "slowest_ms": max(seconds) * 1e3,
        "tokens_per_second_per_gpu": batch_size * args.seq_len / step,
        "peak_gib": _reduce_max(run.peak, run.device) / 2**30,
        "held_gib": _reduce_max(run.held, run.device) / 2**30,
        "first_loss": run.losses[0].item(),
        "last_loss": run.losses[-1].item(),
        **launches,
    }


def profile_collectives(run: Run, batch_size: int) -> dict[str, Any]:
    """Return name, CUDA blocks and time of the longest NCCL kernel of each collective of a step.

    A CPU has none of these fields. Collective.
    """
    if run.device.type != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run.run_turn(batch_size=batch_size, steps=1)
    run.losses.pop()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        with open(f"{folder}/trace.json") as file:
            return find_longest_launches(json.load(file)["traceEvents"])


def find_longest_launches(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return name, CUDA blocks and microseconds of the longest kernel of each collective."""
    fields: dict[str, Any] = {}
    for name, word in COLLECTIVES.items():
        of_nccl = (e for e in events if e.get("cat") == "kernel" and e["name"].startswith("nccl"))
        kernels = [e for e in of_nccl if word in e["name"]]
        if kernels:
            longest = max(kernels, key=lambda event: event["dur"])
            blocks = math.prod(longest["args"]["grid"])
            fields |= {f"{name}_kernel": longest["name"].partition("(")[0]}
            fields |= {f"{name}_blocks": blocks, f"{name}_us": longest["dur"]}
    return fields


def _format_row(row: dict[str, Any], base: dict[str, Any]) -> str:
    short = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
    ratio = row["step_ms"] / base["step_ms"]
    return f"{json.dumps(short)}\n    {ratio:.3f} of the time of {base['provider']}"


def _check_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for arguments that cannot be combined."""
    if "megatron-fsdp" in args.variants and (args.ep != 1 or not torch.cuda.is_available()):
        raise ValueError(
            f"--variants (megatron-fsdp) must run on GPUs, with --ep ({args.ep}) 1: "
            "use --variants fsdp2 moecore"
        )
    if "WORLD_SIZE" not in os.environ:
        raise ValueError("WORLD_SIZE must be set: start it with torchrun --nproc-per-node N -m")
    if "moecore-nccl-ub" in args.variants and not torch.cuda.is_available():
        raise ValueError("--variants (moecore-nccl-ub) must run on GPUs: use --variants moecore")
    config = make_config(args)
    if args.seq_len > config.max_seq_len:
        raise ValueError(f"--seq-len ({args.seq_len}) must be <= {config.max_seq_len}: shorten it")


def _reduce_max(number: float, device: torch.device) -> float:
    """Return the maximum over all ranks."""
    found = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def _get_allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--variants", nargs="+", default=DEFAULT, choices=list(MAKERS))
    add("--model", default="qwen3-30b-a3b", help=f"a preset, or one of {', '.join(DENSE)}")
    add("--layers", type=int, help="of the model; default: all")
    add("--ep", type=int, default=1)
    add("--seq-len", type=int, default=4096)
    add("--batch-sizes", type=int, nargs="+", default=[1, 2, 4], help="rows per rank")
    add("--warm-up", type=int, default=5, help="steps of each variant that do not count")
    add("--steps", type=int, default=5, help="of a turn")
    add("--rounds", type=int, default=5, help="turns of each variant")
    add("--lr", type=float, default=1e-4)
    add("--double-buffer", action="store_true", help="Megatron-FSDP's fsdp_double_buffer")
    add("--results", type=results_path, nargs="?", const=str(RESULTS))
    return parser.parse_args()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without destructors, see moecore/recipes/launch.py
