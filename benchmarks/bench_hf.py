r"""A transformers model in an FSDP2 loop, before and after parallelize_moe, with the same weights.

    torchrun --nproc-per-node 4 -m benchmarks.bench_hf --preset qwen3-30b-a3b --layers 24 \
        --batch-size 2 --seq-len 4096 --row-factor 2

    transformers    each layer compiled and an FSDP2 unit; experts by transformers' grouped_mm
    moecore         parallelize_moe(model, meshes, ...), blocks compiled, experts over all ranks,
                    with the model's own head and loss
    moecore+loss    the same, head and loss in chunks: the default
    ...+auto        the same with that precision: products of routed experts in FP8
    ...+blockwise   the same, products of attention in FP8 too
    ...+head        the same, products of the head in FP8 too
    ...+graph       the same, forward and backward as one CUDA graph, with `use_causal_attention`;
                    GPUs only

All variants train a model of the preset's sizes on random tokens, with AdamW, fp32
weights and bf16 compute (fp32 on CPUs), one after the other in one run, with randomly initialised
routers. A step lasts from the end of the step before to its own end, on the slowest rank; the
median counts. A variant that runs out of memory ends the run. The losses of one step must agree,
because the weights are equal. Rank 0 prints a table; `--results` appends a row per variant to
<folder>/<day>-<gpu>.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.hf_configs import make_hf_config
from benchmarks.records import append_rows, results_path
from benchmarks.trace import make_trace_fields, trace
from moecore import (
    DenseOptions,
    DispatchOptions,
    FSDPOptions,
    Meshes,
    NVLinkOptions,
    ParallelConfig,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.memory import MemoryOptions
from moecore.base.options.precision import Precision, PrecisionName
from moecore.families import use_causal_attention
from moecore.families.transformers.stock import enable_activation_checkpointing
from moecore.io import init_hf
from moecore.models import DecoderConfig, flops_per_token, preset
from moecore.recipes.metrics import Moment
from moecore.train import AdamW, GraphedForwardBackward

Row = dict[str, Any]
MAX_NORM = 1.0


def main() -> int:
    """Run the variants on the ranks of torchrun, and report."""
    args = parse_arguments()
    if "WORLD_SIZE" not in os.environ:
        print("bench_hf: error: start it with torchrun --nproc-per-node N -m", file=sys.stderr)
        return 2
    if args.tp > 1 and "transformers" in args.variants:
        print("bench_hf: error: --tp > 1 needs --variants of moecore", file=sys.stderr)
        return 2
    config = preset(args.preset)
    if args.layers is not None:
        config = dataclasses.replace(config, num_layers=args.layers)
    meshes = build_meshes(ParallelConfig(tp=args.tp, ep=int(os.environ["WORLD_SIZE"])))
    rows = []
    for name in args.variants:
        row = {"op": "hf", "variant": name} | describe(args, config) | run(name, args, meshes)
        rows.append(row)
        if dist.get_rank() == 0:
            print(format_row(row, rows[0]), flush=True)
    if dist.get_rank() == 0 and args.results is not None:
        append_rows(args.results, "benchmarks.bench_hf", rows)
    dist.barrier()
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--preset", default="qwen3-30b-a3b", help="of `make_hf_config`")
    add("--layers", type=int, help="cut it to so many (None = all)")
    add("--batch-size", type=int, default=2, help="sequences per data rank")
    add("--tp", type=int, default=1, help="tensor parallel ranks; not of variant transformers")
    add("--seq-len", type=int, default=4096)
    add("--warm-up", type=int, default=4, help="steps that do not count")
    add("--timed", type=int, default=8, help="steps that do")
    add("--checkpointing", action="store_true", help="recompute each layer, as transformers does")
    add("--trace", action="store_true", help="profile one more step of moecore's variants")
    add("--lr", type=float, default=1e-5)
    add("--row-factor", type=float, default=2.0, help="of nvlink, on GPUs")
    add("--variants", nargs="+", default=DEFAULT_VARIANTS, choices=VARIANTS)
    add("--results", type=results_path, help="folder for the records")
    return parser.parse_args()


def describe(args: argparse.Namespace, config: DecoderConfig) -> Row:
    """Return the fields that distinguish two rows, besides the variant."""
    return {
        "preset": args.preset,
        "layers": config.num_layers,
        "num_gpus": dist.get_world_size(),
        "tp": args.tp,
        "batch_size": args.batch_size,
        "seq_len": args.seq_len,
        "row_factor": args.row_factor,
        "checkpointing": args.checkpointing,
        "flops_per_token": flops_per_token(config, args.seq_len),
    }


def build_plain(args: argparse.Namespace, config: Any, meshes: Meshes) -> Any:
    """Return the transformers model with compiled layers as FSDP2 units."""
    model = make_meta_model(config, checkpointing=args.checkpointing)
    policy = MixedPrecisionPolicy(get_compute_dtype(meshes), torch.float32)
    for layer in model.base_model.layers:
        layer.compile(dynamic=False)
        fully_shard(layer, mesh=meshes.dense_fsdp, mp_policy=policy)
    fully_shard(model, mesh=meshes.dense_fsdp, mp_policy=policy)
    return model


def build_parallel(
    args: argparse.Namespace,
    config: Any,
    meshes: Meshes,
    *,
    chunked: bool,
    causal: bool = False,
    precision: Precision | PrecisionName | None = None,
) -> Any:
    """Return the transformers model after parallelize_moe."""
    model = make_meta_model(config, checkpointing=args.checkpointing)
    if causal:
        use_causal_attention(model)
    parallelize_moe(
        model,
        meshes,
        dispatch=DispatchOptions(
            nvlink=NVLinkOptions(row_factor=args.row_factor)
        ),  # the GPUs of a host take it
        dense=DenseOptions(compile=True),
        precision=precision,
        memory=MemoryOptions(fused_loss=chunked),
        fsdp=FSDPOptions(
            param_dtype=get_compute_dtype(meshes),
            dense_strategy="optim",
            experts_strategy="optim_grads_params",
        ),
    )
    return model


AUTO_AND_HEAD = dataclasses.replace(Precision.of("auto"), fp8_head=True)
BLOCKWISE_AND_HEAD = dataclasses.replace(Precision.of("blockwise"), fp8_head=True)
Build = Callable[[argparse.Namespace, Any, Meshes], Any]
VARIANTS: dict[str, Build] = {
    "transformers": build_plain,
    "moecore": partial(build_parallel, chunked=False),
    "moecore+loss": partial(build_parallel, chunked=True),
    "moecore+loss+auto": partial(build_parallel, chunked=True, precision="auto"),
    "moecore+loss+blockwise": partial(build_parallel, chunked=True, precision="blockwise"),
    "moecore+loss+auto+head": partial(build_parallel, chunked=True, precision=AUTO_AND_HEAD),
    "moecore+loss+blockwise+head": partial(
        build_parallel, chunked=True, precision=BLOCKWISE_AND_HEAD
    ),
    "moecore+graph": partial(build_parallel, chunked=False, causal=True),
    "moecore+loss+graph": partial(build_parallel, chunked=True, causal=True),
}
DEFAULT_VARIANTS = ["transformers", "moecore", "moecore+loss"]


def make_meta_model(config: Any, *, checkpointing: bool) -> Any:
    """Return the transformers model in fp32 on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if checkpointing:
        enable_activation_checkpointing(model)
    return model


def get_compute_dtype(meshes: Meshes) -> torch.dtype:
    return torch.bfloat16 if meshes.device_type == "cuda" else torch.float32


def run(name: str, args: argparse.Namespace, meshes: Meshes) -> Row:
    """Build a variant, time its steps and free it; collective."""
    try:
        return train(name, args, meshes)
    except torch.OutOfMemoryError as error:
        # All ranks have the same sizes, but not the same routing: end the run where one can not.
        raise SystemExit(f"{name}: {str(error).partition('. ')[0]}") from None
    finally:
        gc.collect()
        if meshes.device_type == "cuda":
            torch.cuda.empty_cache()


def train(name: str, args: argparse.Namespace, meshes: Meshes) -> Row:
    """Return the losses and times of one variant."""
    device = torch.device(meshes.device_type)
    model = VARIANTS[name](args, make_hf_config(args.preset, args.layers), meshes)
    model.to_empty(device=device)
    init_hf(model)
    model.train()
    plain = name == "transformers"
    own = AdamW if not plain else partial(torch.optim.AdamW, fused=True)
    optimizer = own(model.parameters(), lr=args.lr)
    step = None if plain else TrainStep(model, optimizer, max_norm=MAX_NORM)
    forward_backward = make_forward_backward(name, model, step)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator().manual_seed(meshes.data_rank)

    def train_step() -> Tensor:
        shape = (args.batch_size, args.seq_len)
        tokens_BT = torch.randint(0, model.config.vocab_size, shape, generator=generator)
        if device.type == "cuda":
            tokens_BT = tokens_BT.pin_memory()
        loss = forward_backward(tokens_BT.to(device, non_blocking=True))
        if step is None:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        else:
            step.finish()
        return loss

    moments, losses = [], []
    for _ in range(args.warm_up + args.timed):
        losses.append(train_step())
        moments.append(Moment(device))
    moments[-1].wait_for_gpu()
    row = make_row(args, moments, torch.stack(losses), device)
    if args.trace and device.type == "cuda":
        row |= make_trace_fields(trace(train_step))
    if step is not None:
        step.close()
    return row


def make_forward_backward(
    name: str, model: nn.Module, step: TrainStep | None
) -> Callable[[Tensor], Tensor]:
    """Return a call that runs forward and backward and returns the loss."""

    def forward_backward(tokens_BT: Tensor) -> Tensor:
        with step.micro_batch() if step is not None else nullcontext():
            loss = model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
            loss.backward()
        return loss.detach()

    if name.endswith("+graph"):
        return GraphedForwardBackward(forward_backward, model)
    return forward_backward


def make_row(
    args: argparse.Namespace, moments: list[Moment], losses: Tensor, device: torch.device
) -> Row:
    """Return the record of one variant; collective."""
    times = [before.seconds_until(end) for before, end in pairwise(moments)][-args.timed :]
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(losses)
    step_s = statistics.median(slowest.tolist())
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {
        "step_ms": step_s * 1e3,
        "tokens_per_second_per_gpu": args.batch_size * args.seq_len / args.tp / step_s,
        "peak_gib": peak,
        "losses": [round(x, 5) for x in (losses / dist.get_world_size()).tolist()],
    }


def format_row(row: Row, first: Row) -> str:
    """Return a line with the row and its times relative to the first variant."""
    rate = row["tokens_per_second_per_gpu"]
    tflops = rate * row["flops_per_token"] / 1e12
    times = rate / first["tokens_per_second_per_gpu"]
    apart = max(abs(a - b) for a, b in zip(row["losses"], first["losses"], strict=True))
    return (
        f"{row['variant']:<19}{rate:>9.0f} tokens/s/GPU {times:>6.2f} x {tflops:>6.0f} TFLOP/s "
        f"{row['peak_gib']:>6.1f} GiB  loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}, "
        f"apart {apart:.4f}"
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without destructors, see moecore/recipes/launch.py
