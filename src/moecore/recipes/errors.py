"""Errors that end a run, and their one-line messages with a remedy."""

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

ARGUMENT_ERRORS = (ValueError, NotImplementedError, OSError)


class DivergedError(RuntimeError):
    """Raised on all ranks if nan, inf or spikes persist, or a replayed step is not bit-equal."""


class RewardError(RuntimeError):
    """Raised if a reward function fails, or returns no finite number for a completion."""


RUN_ERRORS = (
    *(torch.OutOfMemoryError, MemoryError, ExchangeError, OSError),
    *(CorpusError, DivergedError, RewardError),
)
RANK_0_PRINTS_S = 10
SAVES_MEMORY = "add --recompute, shard by optim_grads_params, lower --row-factor"


def print_error(error: Exception | str, exit_code: int = 2) -> int:
    """Print an error in one line on stderr and return the exit status `exit_code`."""
    print(f"moecore: error: {error}", file=sys.stderr, flush=True)
    return exit_code


def print_rank_error(error: Exception, rank: int) -> int:
    """Print an error that all ranks raise, usually only on rank 0; return exit status 2."""
    if not isinstance(error, OSError):  # such as a missing file, which may be on one rank only
        sleep_unless_rank_0(rank)
    return print_error(error)


def sleep_unless_rank_0(rank: int) -> None:
    """Sleep 10 s on ranks above 0, so that only rank 0 prints before the launcher ends all."""
    if rank > 0 and "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        time.sleep(RANK_0_PRINTS_S)


def print_run_error(error: Exception, args: Any, *, saves_memory: str = SAVES_MEMORY) -> int:
    """Print an error that ends a run, and a remedy; return 2 for out of memory, otherwise 1."""
    rank, line = int(os.environ["RANK"]), str(error)
    restart = "start again" + (" from the last checkpoint" if args.checkpoint_every else "")
    if isinstance(error, OSError | DivergedError | RewardError):  # usually on all ranks
        sleep_unless_rank_0(rank)
    if isinstance(error, OSError):
        place = f"--run-dir ({args.run_dir})"
        if args.checkpoint_dir is not None:
            place = f"--checkpoint-dir ({args.checkpoint_dir})"
        line = (
            f"{place} must be writable, with space for checkpoints: {error}: mend it and {restart}"
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
    """Return a context that does not print errors of background saves; `Saver.check` raises them.

    The context hides ERROR records of the logger "moecore.io" and OSErrors that end a thread.
    """
    logger, hook = logging.getLogger("moecore.io"), threading.excepthook
    logger.addFilter(is_no_error := lambda record: record.levelno < logging.ERROR)
    threading.excepthook = lambda e: None if issubclass(e.exc_type, OSError) else hook(e)
    try:
        yield
    finally:
        logger.removeFilter(is_no_error)
        threading.excepthook = hook
