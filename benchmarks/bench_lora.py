"""LoRA on a transformers model with frozen weights: time and memory of a step.

    torchrun --nproc-per-node 1 -m benchmarks.bench_lora --preset qwen3-30b-a3b --batch-size 2
    torchrun --nproc-per-node 2 -m benchmarks.bench_lora --precision blockwise --fp8-base
    torchrun --nproc-per-node 1 -m benchmarks.bench_lora --precision nf4 --checkpointing \
        --rank 8 --moments bfloat16 --limit-gib 24
    torchrun --nproc-per-node 1 -m benchmarks.bench_lora --preset gpt-oss-20b --precision mxfp4 \
        --rank 32 --seq-len 2048 --document-len 512
    torchrun --nproc-per-node 1 -m benchmarks.bench_lora --variant peft --preset gpt-oss-20b
    torchrun --nproc-per-node 1 -m benchmarks.bench_lora --rank 0 --preset moonlight-16b-a3b \
        --moments float8_e4m3fn --checkpointing --seq-len 8192 --document-len 1024

The model has the preset's sizes, random weights in bf16 (fp32 on CPUs) and peft adapters on all
linears but routers and head, and on both matrices of all experts, which AdamW trains in fp32. With
`--rank 0` AdamW trains all weights instead: in bf16, with remainders of fp32 masters and gradients
in bf16. All ranks share the experts. Every step has the same random tokens, so the loss falls. A
step lasts from the end of the step before to its own end, on the slowest rank; the median counts.
With `--document-len` each row has several documents, which attention keeps separate. Several
lengths are measured one after the other, on the weights that the length before has trained. Rank 0
prints a line per length; `--results` appends rows to <folder>/<day>-<gpu>.jsonl.

Processes that start at the same time build their models concurrently on the host. A process then
allocates GPU memory and trains when no other process builds a model or trains.

Variant "peft" is the same model without moecore, on one rank: transformers' grouped_mm and
attention, peft's adapters, torch's fused AdamW.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import os
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
from moecore.base.options.precision import FrozenFormat
from moecore.families import use_causal_attention
from moecore.families.transformers.lora_options import LoRAOptions, add_adapters
from moecore.families.transformers.stock import enable_activation_checkpointing
from moecore.io import init_adapters, init_hf
from moecore.models import preset
from moecore.precision import store_experts_in_fp8
from moecore.recipes.metrics import Moment
from moecore.train import AdamW

Row = dict[str, Any]
LOCK = Path(tempfile.gettempdir()) / "moecore-bench-lora.lock"


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
    with LOCK.open("w") as lock:
        try:
            rows = train(args, meshes, lock)
        except torch.OutOfMemoryError as error:
            raise SystemExit(f"bench_lora: {str(error).partition('. ')[0]}") from None
        gc.collect()
        torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        print(*map(format_row, rows), sep="\n", flush=True)
        if args.results is not None:
            append_rows(args.results, "benchmarks.bench_lora", rows)
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
    help_text = "tokens of a document, one measurement each (0 = one document per row)"
    add("--document-len", type=int, nargs="+", default=[0], help=help_text)
    add("--rank", type=int, default=16, help="of the adapters (0 = train all weights)")
    choices = ["auto", "blockwise", *get_args(FrozenFormat)]
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


def describe(args: argparse.Namespace, document_len: int) -> Row:
    """Return the fields that distinguish two rows."""
    names = ("preset", "batch_size", "seq_len", "rank", "precision", "fp8_base", "checkpointing")
    return {
        "op": "lora" if args.rank else "sft",
        "variant": args.variant,
        "document_len": document_len or None,
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


def make_precision(args: argparse.Namespace) -> Precision | None:
    """Return the precision of the products; with --fp8-base only those of experts are in FP8."""
    if args.precision in get_args(FrozenFormat):
        return Precision(frozen=args.precision, frozen_dense=args.frozen_dense)
    precision = Precision.of(args.precision)
    if precision is not None and args.fp8_base:
        return replace(precision, roles=("experts",))
    return precision


def build(args: argparse.Namespace, meshes: Meshes) -> Any:
    """Return the parallelized model with adapters on the meta device."""
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
        precision=make_precision(args),
        dense=DenseOptions(compile=args.compile),
        memory=MemoryOptions(recompute=tuple(args.recompute), offload_frozen=args.offload_frozen),
        fsdp=FSDPOptions(
            param_dtype=get_compute_dtype(meshes),
            reduce_dtype=torch.float32 if args.rank else get_compute_dtype(meshes),
            dense_strategy="optim",
            experts_strategy=args.experts_strategy,
        ),
    )
    return model


def build_plain(args: argparse.Namespace, meshes: Meshes) -> Any:
    """Return the model of transformers and peft on the meta device."""
    model = build_adapted_model(args, meshes)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def initialise(args: argparse.Namespace, model: Any, device: torch.device) -> None:
    """Allocate random weights, and adapters whose B is zero."""
    model.to_empty(device=device)
    init_hf(model)
    if args.variant == "peft":
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_B" in name:
                    param.zero_()
    elif args.rank:
        init_adapters(model)
    if args.fp8_base:
        store_experts_in_fp8(model)
        torch.cuda.empty_cache()


def build_adapted_model(args: argparse.Namespace, meshes: Meshes) -> Any:
    """Return the transformers model on the meta device, with adapters if they have a rank."""
    from transformers import AutoModelForCausalLM

    config, dtype = make_hf_config(args.preset, args.layers), get_compute_dtype(meshes)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if not args.rank:
            return base
        return add_adapters(base, LoRAOptions(rank=args.rank, alpha=2 * args.rank))


def make_batch(args: argparse.Namespace, length: int, device: torch.device) -> dict[str, Any]:
    """Return the arguments of a forward, with random tokens; no label crosses documents."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape, vocabulary = (args.batch_size, args.seq_len), preset(args.preset).vocab_size
    tokens_BT = torch.randint(0, vocabulary, shape, generator=generator).to(device)
    batch: dict[str, Any] = {"input_ids": tokens_BT, "labels": tokens_BT, "use_cache": False}
    if not length:
        return batch
    positions_T = torch.arange(args.seq_len, device=device) % length
    batch["labels"] = torch.where(positions_T == 0, -100, tokens_BT)
    if args.variant == "peft":  # transformers finds documents by their positions
        return batch | {"position_ids": positions_T.expand(shape)}
    starts = [row * args.seq_len + i for row in range(shape[0]) for i in range(0, shape[1], length)]
    ends = torch.tensor([*starts, tokens_BT.numel()], dtype=torch.int32, device=device)
    return batch | {"cu_seq_lens_q": ends, "max_length_q": min(length, args.seq_len)}


def train(args: argparse.Namespace, meshes: Meshes, lock: IO[str]) -> list[Row]:
    """Return a row with the losses and times of the steps for each length of documents."""
    is_plain, device = args.variant == "peft", torch.device(meshes.device_type)
    take(lock, fcntl.LOCK_SH)
    model = (build_plain if is_plain else build)(args, meshes)
    take(lock, fcntl.LOCK_EX)
    if args.limit_gib is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(args.limit_gib * 2**30 / total)
    initialise(args, model, device)
    loaded = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    model.train()
    trained = [param for param in model.parameters() if param.requires_grad]
    if is_plain:
        optimizer: Any = torch.optim.AdamW(trained, lr=args.lr, fused=True)
        step = None
    else:
        optimizer = AdamW(
            trained,
            lr=args.lr,
            moment_dtype=getattr(torch, args.moments),
            master_remainder=not args.rank and get_compute_dtype(meshes) == torch.bfloat16,
        )
        step = TrainStep(model, optimizer, max_norm=MAX_NORM)
    numbers = {"trained": sum(param.numel() for param in trained), "loaded_gib": loaded}
    rows = []
    for length in args.document_len:
        moments, losses = run_steps(args, model, make_batch(args, length, device), optimizer, step)
        numbers |= make_row(args, moments, torch.stack(losses), device)
        rows.append(describe(args, length) | numbers)
    if step is not None:
        step.close()
    return rows


def take(lock: IO[str], kind: int) -> None:
    """Take the lock of all processes of this host, shared or exclusive; collective."""
    if dist.get_rank() == 0:
        fcntl.flock(lock, kind)
    dist.barrier()


def run_steps(
    args: argparse.Namespace,
    model: Any,
    batch: dict[str, Any],
    optimizer: Any,
    step: TrainStep | None,
) -> tuple[list[Moment], list[Tensor]]:
    """Run all steps of a batch; return the end of each step and its loss."""
    device = batch["input_ids"].device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    moments, losses = [], []
    for _ in range(args.warm_up + args.timed):
        with step.micro_batch() if step is not None else nullcontext():
            loss = model(**batch).loss
            loss.backward()
        if step is None:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        else:
            step.finish()
        losses.append(loss.detach())
        moments.append(Moment(device))
    moments[-1].wait_for_gpu()
    return moments, losses


def format_row(row: Row) -> str:
    """Return the row as a line."""
    return (
        f"{row['variant']}, {row['preset']}, {row['layers']} layers, rank {row['rank']}, "
        f"{row['precision'] or 'bf16'}, documents of {row['document_len'] or row['seq_len']}: "
        f"{row['tokens_per_second_per_gpu']:.0f} tokens/s/GPU, {row['step_ms']:.1f} ms, "
        f"{row['peak_gib']:.1f} GiB (loading {row['loaded_gib']:.1f}), "
        f"{row['trained'] / 1e6:.1f} M trained, "
        f"loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}"
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without destructors, see moecore/recipes/launch.py
