r"""Memory saved by a forward, and the time of forward and backward, by memory options.

    python -m benchmarks.bench_memory --preset qwen3-30b-a3b --layers 6 --seq-len 4096 \
        --results benchmarks/results/memory

One process runs a decoder on random tokens: fp32 weights, bf16 compute on a GPU, no optimizer. All
options run on the same model, alternating, or one after the other with --compile, and the median of
each counts. Two numbers of sequences give the bytes that a layer saves per token, from the
difference of the memory after the blocks' forwards. Losses and gradient norms must agree with the
first option.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.records import append_rows, results_path
from moecore import FSDPOptions, ParallelConfig, build_meshes, parallelize_moe
from moecore.base.options.memory import MemoryOptions
from moecore.models import Decoder, DecoderConfig, preset
from moecore.moe.experts import Experts
from moecore.parallel.fsdp.units import find_blocks
from moecore.parallel.model.parallel_state import reshard_units
from moecore.train.graphs.regions import compile_blocks, find_compiled_modules
from moecore.train.memory.apply import apply_memory_options
from moecore.train.memory.compiled import make_inductor_options

Row = dict[str, Any]
UP = ("norm", "activation", "mla_up_proj")
OPTIONS: dict[str, tuple[str, ...] | str] = {
    "nothing": (),
    "norm": ("norm",),
    "gemm_last": "gemm_last",
    "gemm_last+qkv": ("norm", "activation", "rope", "qkv_proj"),
    "norm+activation+up": UP,
    "gemm_last+up": (*UP, "rope"),
    "up": ("mla_up_proj",),
    "gemm_last+fc1": ("norm", "activation", "rope", "expert_fc1"),
    "moe": ("norm", "rope", "moe"),
    "all but attention": ("norm", "rope", "qkv_proj", "mla_up_proj", "mlp", "moe"),
}


def main() -> int:
    """Run the options and report."""
    args = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(0)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rows = measure(args, build(args, device), device)
    for row in rows:
        print(format_row(row, rows[0]), flush=True)
    if args.results is not None:
        append_rows(args.results, "benchmarks.bench_memory", rows)
    return 0


def parse_arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--preset", default="qwen3-30b-a3b")
    add("--layers", type=int, help="cut it to so many (None = all)")
    add("--num-experts", type=int, help="cut its experts to so many (None = all)")
    add("--dense-layers", type=int, help="cut its first dense layers to so many (None = all)")
    add("--batch-size", type=int, default=2, help="sequences; half as many are measured too")
    add("--seq-len", type=int, default=4096)
    add("--rounds", type=int, default=6, help="that count, after one that does not")
    add("--options", nargs="+", default=list(OPTIONS), choices=OPTIONS)
    add("--compile", action="store_true", help="torch.compile around the MoE layers")
    add("--results", type=results_path, help="folder for the records")
    return parser.parse_args()


def config_of(args: argparse.Namespace) -> DecoderConfig:
    """Return the preset's config with the selected number of layers."""
    config = dataclasses.replace(preset(args.preset), num_mtp_layers=0, mtp_loss_coef=0.0)
    if args.layers is not None:
        dense = tuple(i for i in config.dense_layers if i < args.layers)
        config = dataclasses.replace(config, num_layers=args.layers, dense_layers=dense)
    if args.dense_layers is not None:
        config = dataclasses.replace(config, dense_layers=tuple(range(args.dense_layers)))
    if args.num_experts is not None:
        moe = dataclasses.replace(config.moe, num_experts=args.num_experts)
        config = dataclasses.replace(config, moe=moe)
    return config


def build(args: argparse.Namespace, device: torch.device) -> Decoder:
    """Return the model with random weights."""
    model = Decoder(config_of(args), device="meta")
    dtype = torch.bfloat16 if device.type == "cuda" else None
    meshes = build_meshes(ParallelConfig(), device.type)
    options = FSDPOptions(param_dtype=dtype)
    parallelize_moe(model, meshes, fsdp=options)
    model.to_empty(device=device)
    model.init_weights()
    return model


def measure(args: argparse.Namespace, model: Decoder, device: torch.device) -> list[Row]:
    """Return a row per option."""
    generator = torch.Generator().manual_seed(0)
    shape = (args.batch_size, args.seq_len)
    tokens_BT = torch.randint(0, model.config.vocab_size, shape, generator=generator).to(device)
    rows: dict[str, Row] = {
        name: {"op": "memory", "variant": name, **describe(args), "times_ms": []}
        for name in args.options
    }
    turns = [(i, name) for i in range(1 + args.rounds) for name in rows]
    if args.compile:  # which takes longer than a round
        turns.sort(key=lambda turn: args.options.index(turn[1]))
    for i, name in turns:
        row = rows[name]
        if i == 0 or not args.compile:
            set_options(model, OPTIONS[name], is_compiled=args.compile)
        if i == 0:
            torch.compiler.reset()
            row["kept_bytes_per_token_and_layer"] = measure_saved(model, tokens_BT)
        found = forward_backward(model, tokens_BT)
        row |= {key: found[key] for key in ("loss", "grad_norm", "peak_gib")}
        if i:
            row["times_ms"].append(found["ms"])
    for row in rows.values():
        row["ms"] = statistics.median(row["times_ms"])
    return list(rows.values())


def describe(args: argparse.Namespace) -> Row:
    """Return the fields that distinguish two rows, besides the option."""
    names = ("preset", "layers", "num_experts", "dense_layers", "batch_size", "seq_len", "compile")
    return {name: getattr(args, name) for name in names}


def set_options(model: Decoder, parts: Any, *, is_compiled: bool) -> None:
    """Set the memory options of the model, after removing the previous ones."""
    for module in model.modules():
        for name in ("forward", "attend"):
            vars(module).pop(name, None)
        if isinstance(module, Experts):
            module.recompute_fc1 = "expert_fc1" in parts
    blocks, compiled = find_blocks(model), set[nn.Module]()
    memory = MemoryOptions(recompute=parts)
    if is_compiled:
        compile_blocks(blocks, dynamic=False, options=make_inductor_options(blocks, memory))
        compiled = {module for block in blocks for module in find_compiled_modules(block)}
    apply_memory_options(blocks, memory, model.lm_head.weight.device, compiled_modules=compiled)


def measure_saved(model: Decoder, tokens_BT: Tensor) -> float:
    """Return the bytes that a layer saves per token (see the module's docstring)."""
    found: list[int] = []
    hook = model.lm_head.register_forward_pre_hook(lambda *_: found.append(get_allocated()))
    for num in (len(tokens_BT) // 2, len(tokens_BT)):
        reshard_units(model)  # no backward has
        before = get_allocated()
        model(tokens_BT[:num], tokens_BT[:num])
        found[-1] -= before
    hook.remove()
    tokens = (len(tokens_BT) - len(tokens_BT) // 2) * tokens_BT.shape[1]
    return (found[1] - found[0]) / tokens / model.config.num_layers


def forward_backward(model: Decoder, tokens_BT: Tensor) -> Row:
    """Return loss, gradient norm, peak memory and time of one forward and backward."""
    for param in model.parameters():
        param.grad = None
    is_gpu = tokens_BT.is_cuda
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
    loss = model(tokens_BT, tokens_BT)
    loss.backward()
    if is_gpu:
        end.record()
    peak = torch.cuda.max_memory_allocated() / 2**30 if is_gpu else 0.0
    squares = [p.grad.to_local().double().square().sum() for p in model.parameters()]  # type: ignore[union-attr]
    return {
        "loss": loss.item(),
        "grad_norm": torch.stack(squares).sum().sqrt().item(),
        "ms": start.elapsed_time(end) if is_gpu else 0.0,
        "peak_gib": peak,
    }


def get_allocated() -> int:
    """Return the allocated bytes; 0 on a CPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def format_row(row: Row, first: Row) -> str:
    """Return a line with the row and its ratios to the first option."""
    kept, base = row["kept_bytes_per_token_and_layer"], first["kept_bytes_per_token_and_layer"]
    return (
        f"{row['variant']:<20}{kept:>9.0f} B/token/layer {kept / max(base, 1):>6.3f}  "
        f"{row['ms']:>8.1f} ms {row['ms'] / max(first['ms'], 1e-9):>6.3f}  "
        f"{row['peak_gib']:>6.1f} GiB  loss {row['loss']:.6f}  norm {row['grad_norm']:.9f}"
    )


if __name__ == "__main__":
    sys.exit(main())
