"""A step whose expert rows did not fit is run again from its inputs, with the room that it needs.

    run() -> needed room of all ranks -> None: done
                                      -> drop the step, restore random numbers, grow, run again

Rows past a room are cut on the device (`kernels/exchange/limit_rows.py`), so the step goes on, on
wrong values that nobody uses. Behind the first layer that overflows choices may be others than
those of the step run again, so that may need another run; the room only grows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

import torch
import torch.distributed as dist

from moecore.moe.dispatch.exchange import ExchangeError, ExchangePool
from moecore.moe.lanes import generators, set_generators
from moecore.moe.state import MoEState

logger = logging.getLogger("moecore.rerun")
T = TypeVar("T")
SLACK = 1.05  # of the room of the next run


def run_until_rows_fit(
    run: Callable[[], T], states: Sequence[MoEState], drop: Callable[[], None]
) -> T:
    """Return what a run of a step's micro-batches returns, all of whose rows had room.

    One all-reduce and one host sync per run, over and on all ranks, where room may be too small.

    Args:
        run: all forwards and backwards of a step.
        states: of the models.
        drop: undoes a run.

    Raises:
        ExchangeError: on every rank, when a tape that gives or takes choices has had the forwards.
    """
    pools = [s.exchanges for s in states if s.exchanges is not None and s.exchanges.may_rerun]
    if not pools:
        return run()
    is_replayed = any(state.is_replayed for state in states)
    while True:
        before = generators()
        with ExitStack() as stack:
            for pool in pools:
                stack.enter_context(pool.asked_later())
            found = run()
        factor, was_replayed = _needed_factor(pools, is_replayed)
        if factor == 0:
            return found
        was, now = pools[0].options.row_factor, math.ceil(factor * SLACK * 100) / 100
        drop()
        if was_replayed:
            raise ExchangeError(
                f"NVLinkOptions.row_factor ({was}) must be >= {factor:.4g} for a step whose routes "
                "are recorded or replayed, which cannot run again: raise it",
                factor,
            )
        set_generators(before)
        if dist.get_rank() == 0:
            logger.warning(
                "NVLinkOptions.row_factor (%s) was too small: the step runs again with %s",
                was,
                now,
            )
        for pool in pools:
            pool.grow(now)


def _needed_factor(pools: Sequence[ExchangePool], is_replayed: bool) -> tuple[float, bool]:
    """Return the least row factor that any rank needed, 0 = none; and whether any was replayed."""
    found = [exchange.needed_factor() for pool in pools for exchange in pool.entries]
    device = found[0].device if found else _device()
    mine = torch.tensor([0.0, float(is_replayed)], device=device)
    most = torch.stack([mine[0], *found]).amax()
    both = torch.stack([most, mine[1]])
    dist.all_reduce(both, dist.ReduceOp.MAX)
    factor, was_replayed = both.tolist()
    return factor, bool(was_replayed)


def _device() -> torch.device:
    """Return where a stage without MoE layers has numbers for the others."""
    return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
