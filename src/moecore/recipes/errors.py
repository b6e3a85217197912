"""Errors of a run in one line each, and checks of options before a run starts."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moecore.moe.dispatch.exchange import ExchangeError
from moecore.packing import CorpusError
from moecore.packing.collate import get_length_multiple
from moecore.packing.corpus.scheduled_batch import TILE
from moecore.parallel.mesh import ParallelConfig
from moecore.recipes.options import RunConfig

ARGUMENT_ERRORS = (ValueError, NotImplementedError, OSError)


class DivergedError(RuntimeError):
    """Losses that are not finite, on every rank."""


class RewardError(RuntimeError):
    """A reward function failed, or did not return a finite number for each completion."""


RUN_ERRORS = (
    *(torch.OutOfMemoryError, MemoryError, ExchangeError, OSError),
    *(CorpusError, DivergedError, RewardError),
)
RANK_0_PRINTS_S = 10
SAVES_MEMORY = "add --recompute, shard by optim_grads_params, lower --row-factor"


def print_error(error: Exception | str, code: int = 2) -> int:
    """Print an error in one line and return `code`, the exit status."""
    print(f"moecore: error: {error}", file=sys.stderr, flush=True)
    return code


def print_rank_error(error: Exception, rank: int) -> int:
    """Print an error that all ranks have, if possible on rank 0 only; return exit status 2.

    An OSError, such as a missing file, may be on one rank only and is printed at once.
    """
    if not isinstance(error, OSError):
        sleep_unless_rank_0(rank)
    return print_error(error)


def sleep_unless_rank_0(rank: int) -> None:
    """Sleep 10 s on ranks above 0 under torchrun or `launch`, which end them once rank 0 exits."""
    if rank > 0 and "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        time.sleep(RANK_0_PRINTS_S)


def print_run_error(error: Exception, args: Any, *, saves_memory: str = SAVES_MEMORY) -> int:
    """Print why a run ended on this rank and a remedy; return 2 if memory ran out, otherwise 1.

    Every rank has the OSError of a failed save and losses that are not finite: rank 0 prints.
    `saves_memory` is the remedy for memory.
    """
    rank, line = int(os.environ["RANK"]), str(error)
    restart = "start again" + (" from the last checkpoint" if args.checkpoint_every else "")
    if isinstance(error, OSError | DivergedError):
        sleep_unless_rank_0(rank)
    if isinstance(error, OSError):
        line = (
            f"--run-dir ({args.run_dir}) must be writable, with space for checkpoints: {error}: "
            f"mend it and {restart}"
        )
    elif isinstance(error, ExchangeError) and error.row_factor is None:
        line = f"rank {rank}: {error}: {restart}"
    elif isinstance(error, ExchangeError) and error.row_factor is not None:
        min_factor = math.ceil(100 * error.row_factor) / 100
        row_factor = None if args.nvlink is None else args.nvlink.row_factor
        line = (
            f"rank {rank}: --row-factor ({row_factor}) must be >= {min_factor} for its expert rows "
            f"of one layer: {restart} with --row-factor {min_factor} or more"
        )
    elif isinstance(error, torch.OutOfMemoryError):
        line = (
            f"rank {rank}: {line.partition('. ')[0]}: lower --batch-size (and raise --grad-accum), "
            f"{saves_memory}, or use more GPUs"
        )
    elif isinstance(error, MemoryError):
        line = f"rank {rank}: this machine has too little memory for it ({line or 'MemoryError'})"
    is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return print_error(line, 2 if is_memory else 1)


@contextmanager
def silence_background_errors() -> Iterator[None]:
    """Return a context in which background threads print no error: `Saver.check` raises it."""

    def is_no_error(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    logger, hook = logging.getLogger("moecore.io"), threading.excepthook
    logger.addFilter(is_no_error)
    threading.excepthook = lambda e: None if issubclass(e.exc_type, OSError) else hook(e)
    try:
        yield
    finally:
        logger.removeFilter(is_no_error)
        threading.excepthook = hook


def check_seq_len(args: RunConfig, parallel: ParallelConfig) -> None:
    """Raise ValueError for a --seq-len that cp and tp ranks cannot share equally."""
    cp, tp = parallel.cp, parallel.tp
    multiple = cp * math.lcm(2, tp) if cp > 1 else tp
    if args.seq_len % multiple:
        raise ValueError(
            f"--seq-len ({args.seq_len}) must be a multiple of {multiple} with --cp {cp} and "
            f"--tp {tp}: use {-(-args.seq_len // multiple) * multiple}"
        )


def check_graph(args: RunConfig, dynamic_cp: int | None = None) -> None:
    """Raise ValueError for --cuda-graph with pipeline stages, or with --dynamic-cp (not None)."""
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
    """Raise ValueError for options that --dynamic-cp, whose value is `max_tokens`, excludes."""
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
