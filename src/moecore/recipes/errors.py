"""One line per failed run: what is wrong, and what helps."""

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
from moecore.recipes.rewards import RewardError

ARGUMENT_ERRORS = (ValueError, NotImplementedError, OSError)


class DivergedError(RuntimeError):
    """Losses that are not finite, on every rank."""


RUN_ERRORS = (
    *(torch.OutOfMemoryError, ExchangeError, OSError, CorpusError, DivergedError),
    RewardError,
)
RANK_0_PRINTS_S = 10
SAVES_MEMORY = "add --recompute, shard by optim_grads_params, lower --row-factor"


def print_error(error: Exception, code: int = 2) -> int:
    """Print an error in one line and return the exit code."""
    print(f"moecore: error: {error}", file=sys.stderr, flush=True)
    return code


def print_rank_error(error: Exception, rank: int) -> int:
    """Print what all ranks found, as they have the same arguments; return the exit code.

    An OSError may be of one rank only, such as a file that is missing on its host, and is printed
    at once.
    """
    if not isinstance(error, OSError):
        leave_to_rank_0(rank)
    return print_error(error)


def leave_to_rank_0(rank: int) -> None:
    """Wait on other ranks than 0 where torchrun or `launch` ends them once rank 0 has printed.

    Ranks that an agent does not end, such as those of srun, print and end by themselves.
    """
    if rank > 0 and "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        time.sleep(RANK_0_PRINTS_S)


def print_run_error(
    error: Exception,
    args: Any,
    *,
    saves_memory: str = SAVES_MEMORY,
) -> int:
    """Print in one line what ended a run on this rank and what helps; return the exit code.

    Every rank has the OSError of a failed save and losses that are not finite, and rank 0 those of
    its report: rank 0 prints.
    """
    rank = int(os.environ["RANK"])
    if isinstance(error, CorpusError | RewardError):  # of this rank alone
        return print_error(error, code=1)
    if isinstance(error, ExchangeError):
        return print_error(exchange_advice(error, args, rank), code=1)
    if isinstance(error, OSError | DivergedError):
        leave_to_rank_0(rank)
        advice = disk_advice(error, args) if isinstance(error, OSError) else error
        return print_error(advice, code=1)
    if isinstance(error, torch.OutOfMemoryError):
        error = memory_advice(error, rank, saves_memory)
    return print_error(error)


def memory_advice(
    error: torch.OutOfMemoryError, rank: int, saves_memory: str = SAVES_MEMORY
) -> RuntimeError:
    """Return the error as one line with what helps."""
    reason = str(error).partition(". ")[0]
    return RuntimeError(
        f"rank {rank}: {reason}: lower --batch-size (and raise --grad-accum), {saves_memory}, or "
        "use more GPUs"
    )


def exchange_advice(error: ExchangeError, args: Any, rank: int) -> RuntimeError:
    """Return the error as one line with what helps."""
    if error.row_factor is None:
        return RuntimeError(f"rank {rank}: {error}: {restart_advice(args)}")
    enough = math.ceil(100 * error.row_factor) / 100
    row_factor = None if args.nvlink is None else args.nvlink.row_factor
    return RuntimeError(
        f"rank {rank}: --row-factor ({row_factor}) must be >= {enough} for its "
        f"expert rows of one layer: {restart_advice(args)} with --row-factor {enough} or more"
    )


def disk_advice(error: OSError, args: Any) -> RuntimeError:
    """Return the error as one line with what helps."""
    return RuntimeError(
        f"--run-dir ({args.run_dir}) must be writable, with space for checkpoints: {error}: "
        f"mend it and {restart_advice(args)}"
    )


def restart_advice(args: Any) -> str:
    """Return from where to start again."""
    return "start again" + (" from the last checkpoint" if args.checkpoint_every else "")


@contextmanager
def silence_background_errors() -> Iterator[None]:
    """Print no error of a background thread: `Saver.check` and TensorBoard raise the same one."""

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
