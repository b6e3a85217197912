"""One line per failed run: what is wrong, and what helps."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time

import torch

from moecore.moe.dispatch.symmetric import ExchangeError

ARGUMENT_ERRORS = (ValueError, NotImplementedError, OSError)
RUN_ERRORS = (torch.OutOfMemoryError, ExchangeError)
RANK_0_PRINTS_S = 60


def print_error(error: Exception, code: int = 2) -> int:
    print(f"train.py: error: {error}", file=sys.stderr, flush=True)
    return code


def print_rank_error(error: Exception, rank: int) -> int:
    """Print once what all ranks found, as they have the same arguments; return the exit code.

    The first rank to end takes the others with it, so they leave rank 0 the time to print. What
    only this rank found, it prints itself: at once if a file is missing here.
    """
    if rank > 0 and not isinstance(error, OSError):
        time.sleep(RANK_0_PRINTS_S)
    return print_error(error)


def print_run_error(error: torch.OutOfMemoryError | ExchangeError, args: argparse.Namespace) -> int:
    """Print in one line what ended a run on this rank and what helps; return the exit code."""
    rank = int(os.environ["RANK"])
    if isinstance(error, ExchangeError):
        return print_error(exchange_advice(error, args, rank), code=1)
    return print_error(memory_advice(error, rank))


def memory_advice(error: torch.OutOfMemoryError, rank: int) -> RuntimeError:
    """Return the error as one line with what helps."""
    reason = str(error).partition(". ")[0]
    return RuntimeError(
        f"rank {rank}: {reason}: lower --batch-size (and raise --grad-accum), add --recompute-fc1, "
        "drop --gather-once and --keep-experts, lower --capacity-factor, or use more GPUs"
    )


def exchange_advice(error: ExchangeError, args: argparse.Namespace, rank: int) -> RuntimeError:
    """Return the error as one line with what helps."""
    again = "start again" + (" from the last checkpoint" if args.checkpoint_every else "")
    if error.capacity_factor is None:
        return RuntimeError(f"rank {rank}: {error}: {again}")
    enough = math.ceil(100 * error.capacity_factor) / 100
    return RuntimeError(
        f"rank {rank}: --capacity-factor ({args.capacity_factor}) must be >= {enough} for its "
        f"expert rows of one layer: {again} with --capacity-factor {enough} or more"
    )
