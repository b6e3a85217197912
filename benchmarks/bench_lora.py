"""LoRA on a transformers model with frozen weights: time and memory of a step.

    torchrun --nproc-per-node 1 -m benchmarks.bench_lora --preset qwen3-30b-a3b --batch-size 2
    torchrun --nproc-per-node 2 -m benchmarks.bench_lora --precision blockwise --fp8-base
    torchrun --nproc-per-node 1 -m benchmarks.bench_lora --precision nf4 --checkpointing \
        --rank 8 --moments bfloat16 --limit-gib 24
    torchrun --nproc-per-node 1 -m benchmarks.bench_lora --preset gpt-oss-20b --precision mxfp4 \
        --rank 32 --seq-len 2048 --document-len 512
    torchrun --nproc-per-node 1 -m benchmarks.bench_lora --variant peft --preset gpt-oss-20b

The model has the preset's sizes, random weights in bf16 (fp32 on CPUs) and peft adapters on all
linears but routers and head, and on both matrices of all experts, which AdamW trains in fp32. All
ranks share the experts. Every step has the same random tokens, so the loss falls. A step lasts from
the end of the step before to its own end, on the slowest rank; the median counts. With
`--document-len` each row has several documents, which attention keeps separate. Rank 0 prints a
line; `--results` appends a row to <folder>/<day>-<gpu>.jsonl.

Variant "peft" is the same model without moecore, on one rank: transformers' grouped_mm and
attention, peft's adapters, torch's fused AdamW.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.bench_hf import MAX_NORM, get_compute_dtype, make_row
from benchmarks.hf_configs import make_hf_config
from benchmarks.records import append_rows, results_path
from moecore import (
    DenseOptions,
    DispatchOptions,
    FSDPOptions,
    Meshes,
    NVLinkOptions,
    ParallelConfig,
    Precision,
    TrainStep,
    build_meshes,
    parallelize_moe,
)
from moecore.base.options.fsdp import Strategy
from moecore.base.options.memory import MemoryOptions
from moecore.base.options.names import MomentDtype
from moecore.families import use_causal_attention
from moecore.families.transformers.lora import LoRAOptions, add_adapters
from moecore.families.transformers.stock import enable_activation_checkpointing
from moecore.io import init_adapters, init_hf
from moecore.models import preset
from moecore.precision import store_experts_in_fp8
from moecore.recipes.metrics import Moment
from moecore.train import AdamW

Row = dict[str, Any]


def main() -> int:
    """Train on the ranks of torchrun, and report."""
    args = parse_arguments()
    if "WORLD_SIZE" not in os.environ:
        print("bench_lora: error: start it with torchrun --nproc-per-node N -m", file=sys.stderr)
        return 2
    if args.variant == "peft" and os.environ["WORLD_SIZE"] != "1":
        print("bench_lora: error: --variant peft needs --nproc-per-node 1", file=sys.stderr)
        return 2
    meshes = build_meshes(ParallelConfig(ep=int(os.environ["WORLD_SIZE"])))
    try:
        row = describe(args) | train(args, meshes)
    except torch.OutOfMemoryError as error:
        raise SystemExit(f"bench_lora: {str(error).partition('. ')[0]}") from None
    if dist.get_rank() == 0:
        print(format_row(row), flush=True)
        if args.results is not None:
            append_rows(args.results, "benchmarks.bench_lora", [row])
    dist.barrier()
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--variant", choices=["moecore", "peft"], default="moecore")
    add("--preset", default="qwen3-30b-a3b", help="of `make_hf_config`")
    add("--layers", type=int, help="cut it to so many (None = all)")
    add("--batch-size", type=int, default=1, help="sequences per rank")
    add("--seq-len", type=int, default=4096)
    add("--document-len", type=int, help="tokens of a document (None = one document per row)")
    add("--rank", type=int, default=16, help="of the adapters")
    choices = ["auto", "blockwise", "nf4", "mxfp4"]
    add("--precision", choices=choices, help="of products or frozen experts (None = bf16)")
    add("--frozen-dense", action="store_true", help="also store frozen linears in 4 bits")
    add("--fp8-base", action="store_true", help="store frozen experts in FP8 alone")
    add("--experts-strategy", choices=get_args(Strategy), default="optim_grads_params")
    add("--recompute", nargs="*", default=(), help="parts of MemoryOptions.recompute")
    add("--offload-frozen", action="store_true", help="keep 4-bit experts in host memory")
    add("--checkpointing", action="store_true", help="recompute each layer, as transformers does")
    add("--eager", dest="compile", action="store_false", help="without torch.compile")
    add("--moments", choices=get_args(MomentDtype), default="float32", help="AdamW's moments")
    add("--limit-gib", type=float, help="of the allocator's memory, in which all must fit")
    add("--warm-up", type=int, default=4, help="steps that do not count")
    add("--timed", type=int, default=8, help="steps that do")
    add("--lr", type=float, default=2e-4)
    add("--row-factor", type=float, default=2.0, help="of nvlink, on GPUs")
    add("--results", type=results_path, help="folder for the records")
    parser.set_defaults(tp=1)  # which `make_row` reads
    return parser.parse_args()


def describe(args: argparse.Namespace) -> Row:
    """Return the fields that distinguish two rows."""
    names = ("preset", "batch_size", "seq_len", "rank", "precision", "fp8_base", "checkpointing")
    return {
        "op": "lora",
        "variant": args.variant,
        "document_len": args.document_len,
        "layers": args.layers or preset(args.preset).num_layers,
        "num_gpus": dist.get_world_size(),
        **{name: getattr(args, name) for name in names},
        "experts_strategy": args.experts_strategy,
        "recompute": list(args.recompute),
        "compile": args.compile,
        "frozen_dense": args.frozen_dense,
        "offload_frozen": args.offload_frozen,
        "moments": args.moments,
        "limit_gib": args.limit_gib,
    }


def build(args: argparse.Namespace, meshes: Meshes) -> Any:
    """Return the parallelized model with adapters and random weights."""
    model = build_adapted_model(args, meshes)
    use_causal_attention(model)
    if args.checkpointing:
        enable_activation_checkpointing(model)
    parallelize_moe(
        model,
        meshes,
        dispatch=DispatchOptions(
            nvlink=NVLinkOptions(row_factor=args.row_factor)
        ),  # the GPUs of a host take it
        precision=Precision(frozen=args.precision, frozen_dense=True)
        if args.frozen_dense
        else args.precision,
        dense=DenseOptions(compile=args.compile),
        memory=MemoryOptions(recompute=tuple(args.recompute), offload_frozen=args.offload_frozen),
        fsdp=FSDPOptions(
            param_dtype=get_compute_dtype(meshes),
            dense_strategy="optim",
            experts_strategy=args.experts_strategy,
        ),
    )
    model.to_empty(device=meshes.device_type)
    init_hf(model)
    init_adapters(model)
    if args.fp8_base:
        store_experts_in_fp8(model)
        if meshes.device_type == "cuda":
            torch.cuda.empty_cache()
    return model


def build_plain(args: argparse.Namespace, meshes: Meshes) -> Any:
    """Return the model of transformers and peft with random weights."""
    model = build_adapted_model(args, meshes)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.to_empty(device=meshes.device_type)
    init_hf(model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.zero_()
    return model


def build_adapted_model(args: argparse.Namespace, meshes: Meshes) -> Any:
    """Return the transformers model with adapters on the meta device."""
    from transformers import AutoModelForCausalLM

    config, dtype = make_hf_config(args.preset, args.layers), get_compute_dtype(meshes)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return add_adapters(base, LoRAOptions(rank=args.rank, alpha=2 * args.rank))


def make_batch(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the arguments of a forward, with random tokens; no label crosses documents."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape, vocabulary = (args.batch_size, args.seq_len), preset(args.preset).vocab_size
    tokens_BT = torch.randint(0, vocabulary, shape, generator=generator).to(device)
    batch: dict[str, Any] = {"input_ids": tokens_BT, "labels": tokens_BT, "use_cache": False}
    if (length := args.document_len) is None:
        return batch
    positions_T = torch.arange(args.seq_len, device=device) % length
    batch["labels"] = torch.where(positions_T == 0, -100, tokens_BT)
    if args.variant == "peft":  # transformers finds documents by their positions
        return batch | {"position_ids": positions_T.expand(shape)}
    starts = [row * args.seq_len + i for row in range(shape[0]) for i in range(0, shape[1], length)]
    ends = torch.tensor([*starts, tokens_BT.numel()], dtype=torch.int32, device=device)
    return batch | {"cu_seq_lens_q": ends, "max_length_q": min(length, args.seq_len)}


def train(args: argparse.Namespace, meshes: Meshes) -> Row:
    """Return the losses and times of the steps."""
    device = torch.device(meshes.device_type)
    if args.limit_gib is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(args.limit_gib * 2**30 / total)
    is_plain = args.variant == "peft"
    model = (build_plain if is_plain else build)(args, meshes)
    loaded = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    model.train()
    trained = [param for param in model.parameters() if param.requires_grad]
    if is_plain:
        optimizer: Any = torch.optim.AdamW(trained, lr=args.lr, fused=True)
        step = None
    else:
        optimizer = AdamW(trained, lr=args.lr, moment_dtype=getattr(torch, args.moments))
        step = TrainStep(model, optimizer, max_norm=MAX_NORM)
    batch = make_batch(args, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    moments, losses = [], []
    for _ in range(args.warm_up + args.timed):
        with step.micro_batch() if step is not None else nullcontext():
            loss = model(**batch).loss
            loss.backward()
        if step is None:
            nn.utils.clip_grad_norm_(trained, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        else:
            step.finish()
        losses.append(loss.detach())
        moments.append(Moment(device))
    moments[-1].wait_for_gpu()
    if step is not None:
        step.close()
    numbers = {"trained": sum(param.numel() for param in trained), "loaded_gib": loaded}
    return numbers | make_row(args, moments, torch.stack(losses), device)


def format_row(row: Row) -> str:
    """Return the row as a line."""
    return (
        f"{row['variant']}, {row['layers']} layers, rank {row['rank']}, "
        f"{row['precision'] or 'no FP8'}: "
        f"{row['tokens_per_second_per_gpu']:.0f} tokens/s/GPU, {row['step_ms']:.1f} ms, "
        f"{row['peak_gib']:.1f} GiB (loading {row['loaded_gib']:.1f}), "
        f"{row['trained'] / 1e6:.1f} M trained, "
        f"loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}"
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without destructors, see moecore/recipes/launch.py
