"""Ranks of moecore train of which one is slow, sends late, stops, overflows, or prints late.

Rank 1 is slow or stops in a place, the environment's MOECORE_TEST_DELAY.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import torch.distributed as dist

from moecore.moe.dispatch.exchange import ExchangeError
from moecore.parallel.model.parallel_state import get_capacity
from moecore.recipes import errors, train
from moecore.recipes.corpus_training import CorpusTraining

DELAY_S = 0.6  # far above what a busy machine adds to a phase


def run_changed(args: object, change: Callable[[Any], None]) -> int:
    """Run a rank; `change` gets the job of rank 1 before its first step."""
    build = train.build_job

    def build_job(args: object) -> CorpusTraining:
        job = build(args)
        if dist.get_rank() == 1:
            change(job)
        return job

    train.build_job = build_job
    return train.run_rank(args)


def put_around(call: Callable[..., Any], job: Any) -> None:
    """Let `call` call the function of the place."""
    layer = job.model.layers[-1]
    owner, name = {
        "data": (job.batches, "next_batch"),
        "layer": (layer, "forward"),
        "forward and backward": (layer, "forward"),
        "optimizer": (job.optimizers[0], "step"),
        "link": (dist, "batch_isend_irecv"),
    }[os.environ["MOECORE_TEST_DELAY"]]
    setattr(owner, name, partial(call, getattr(owner, name)))


def call_late(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    time.sleep(DELAY_S)
    return function(*args, **kwargs)


def send_late(exchange: Callable[..., Any], ops: list[dist.P2POp]) -> Any:
    """Post what is received, and after a delay what is sent."""
    received = exchange(ops[1:])
    return [*call_late(exchange, ops[:1]), *received]


def run_delayed(args: object) -> int:
    """Be slow in every step."""
    call = send_late if os.environ["MOECORE_TEST_DELAY"] == "link" else call_late
    with redirect_stdout(sys.stderr):  # which a test reads
        return run_changed(args, partial(put_around, call))


def stop() -> None:
    while True:
        time.sleep(600)


def run_hanging(args: object) -> int:
    """Stop in the second step."""
    calls: list[int] = []

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            stop()
        return function(*args, **kwargs)

    return run_changed(args, partial(put_around, call))


class Overflowing:
    """Stands for a model's exchanges; the second poll finds what it was given."""

    capacity_factor, shortages, watch = None, (), None

    def __init__(self, error: Exception) -> None:
        self.error, self.polls = error, 0

    def raise_reported_errors(self, *, includes_shortages: bool) -> None:
        self.polls += 1
        if self.polls == 2:
            raise self.error

    wait_and_raise_errors = raise_reported_errors


def too_many_rows() -> ExchangeError:
    return ExchangeError("NVLinkOptions.row_factor (1.05) must be >= 1.361", 1.3605)


def overflow(job: Any, error: Exception) -> None:
    get_capacity(job.model).owners = (Overflowing(error),)


def run_overflowing(args: object) -> int:
    """Overflow in the second step, while the other rank is in a collective."""
    return run_changed(args, partial(overflow, error=too_many_rows()))


def run_with_late_word(args: object) -> int:
    """Print an error of rank 0 late."""
    print_error = errors.print_error

    def print_late(error: Exception) -> int:
        time.sleep(1.0)
        return print_error(error)

    if os.environ["RANK"] == "0":
        errors.print_error = print_late
    return train.run_rank(args)
