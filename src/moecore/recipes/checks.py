"""Checks of options that do not fit each other, before a run starts."""

from __future__ import annotations

import math

import torch

from moecore.models import DecoderConfig
from moecore.packing.collate import get_length_multiple
from moecore.packing.corpus.scheduled_batch import TILE
from moecore.parallel.mesh import ParallelConfig
from moecore.recipes.files import host_bytes
from moecore.recipes.options import RunConfig


def check_rows(args: RunConfig, parallel: ParallelConfig) -> None:
    """Raise ValueError for rows that cp and tp ranks cannot share."""
    cp, tp = parallel.cp, parallel.tp
    multiple = cp * math.lcm(2, tp) if cp > 1 else tp
    if args.seq_len % multiple:
        raise ValueError(
            f"--seq-len ({args.seq_len}) must be a multiple of {multiple} with --cp {cp} and "
            f"--tp {tp}: use {-(-args.seq_len // multiple) * multiple}"
        )


def check_graph(args: RunConfig, dynamic_cp: int | None = None) -> None:
    """Raise ValueError for options whose steps no graph holds."""
    pp = args.degree("pp")
    for name, other, reason in (
        (f"--pp {pp}", pp > 1, "wait for other ranks"),
        (f"--dynamic-cp {dynamic_cp}", dynamic_cp is not None, "have shapes of their own"),
    ):
        if args.cuda_graph and other:
            raise ValueError(
                f"--cuda-graph must not go with {name}, whose micro-batches {reason}: drop it"
            )


def check_dynamic_cp(args: RunConfig, max_tokens: int, parallel: ParallelConfig) -> None:
    """Raise ValueError for what other options do not fit."""
    name, p = f"--dynamic-cp ({max_tokens})", parallel
    if p.cp > 1:
        raise ValueError(
            f"{name} must go with --cp ({p.cp}) = 1, because each micro-batch has its own cp: drop "
            "one of them"
        )
    multiple, ranks = math.lcm(2, p.tp), p.dp_replicate * p.dp_shard
    if TILE % p.tp or max_tokens < 1 or max_tokens % multiple:
        raise ValueError(
            f"{name} must be a multiple of {multiple} with --tp ({p.tp}), a power of two: round it"
        )
    largest = ranks & -ranks
    if args.seq_len % get_length_multiple(largest):
        raise ValueError(
            f"--seq-len ({args.seq_len}) must be a multiple of {get_length_multiple(largest)}, two "
            f"chunks of each of {largest} data ranks, with {name}: round it up"
        )
    if args.seq_len > largest * max_tokens:
        raise ValueError(
            f"{name} must be >= what each of {largest} data ranks holds of --seq-len "
            f"({args.seq_len}): raise it, or lower --seq-len"
        )


def check_memory(args: RunConfig, config: DecoderConfig, device: torch.device) -> None:
    """Raise ValueError for a step that cannot fit: a host would fill its memory for minutes."""
    need, memory = least_bytes(args, config, device), memory_bytes(device)
    if need > memory:
        raise ValueError(
            f"--batch-size ({args.batch_size}) x --seq-len ({args.seq_len}) x --grad-accum "
            f"({args.grad_accum}) must fit into memory ({memory / 2**30:.0f} GiB), but a step "
            f"needs more than {need / 2**30:.0f} GiB: lower --batch-size"
        )


def least_bytes(args: RunConfig, config: DecoderConfig, device: torch.device) -> int:
    """Return the memory that a step takes at least, however it is computed.

    A step's tokens and labels are int64, and each layer keeps its input for backward.
    """
    tokens = args.batch_size * args.seq_len
    rows = tokens // args.degree("tp") // args.degree("cp")
    layers = config.num_layers // args.degree("pp")
    activations: int = rows * layers * config.dim * args.compute_dtype(device).itemsize
    inputs: int = 2 * 8 * args.grad_accum * tokens
    return inputs + activations


def memory_bytes(device: torch.device) -> int:
    """Return the memory of a GPU, or of this host."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_bytes()
