"""A step whose rows did not fit is run again from its inputs, with the room that they need.

    run() -> needed room of all ranks -> none: done
                                      -> drop the step, restore random numbers, grow, run again

Rooms are those of expert rows (`NVLinkOptions.row_factor`) and of pages (`StashOptions.factor`).
What finds no room is cut off on the device, so the step goes on, on wrong values that nobody uses.
Behind the first layer that overflows choices may be others than those of the step run again, so
that may need another run; rooms only grow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.streams import wait_on_host
from moecore.moe.lanes import generators, set_generators
from moecore.moe.room import Room, larger
from moecore.moe.state import MoEState

logger = logging.getLogger("moecore.train.rerun")
T = TypeVar("T")


class Reruns:
    """Runs steps until their rows have room.

    Made on every rank: one all-reduce tells whether any rank has a room that may be too small.

    Args:
        states: of the models.
        device: of the models.
    """

    def __init__(self, states: Sequence[MoEState], device: torch.device) -> None:
        self._states, self._device = states, device
        self._rooms = [room for state in states for room in state.rooms]
        may_be_small = any(room is not None and room.may_be_small for room in self._rooms)
        flag = torch.tensor(float(may_be_small), device=device)
        if dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        self._asks = bool(flag.item())

    def run(self, run: Callable[[], T], drop: Callable[[], None]) -> T:
        """Return what a run of a step's micro-batches returns, all of whose rows had room.

        Where rooms may be too small one all-reduce and one host sync per run, over and on all
        ranks; in CUDA graphs, which wait for nothing, none.

        Args:
            run: all forwards and backwards of a step.
            drop: undoes a run.
        """
        if not self._asks or any(state.is_graphed for state in self._states):
            return run()
        rewinders = [tape.rewinder() for state in self._states for tape in state.tapes]
        while True:
            before = generators()
            with ExitStack() as stack:
                for room in self._rooms:
                    if room is not None:
                        stack.enter_context(room.asked_later())
                found = run()
            factors = self._needed()
            if not any(factors):
                return found
            drop()
            for rewind in rewinders:
                rewind()
            set_generators(before)
            for room, factor in zip(self._rooms, factors, strict=True):
                if room is not None:
                    _grow(room, factor)

    def is_short(self) -> Tensor | None:
        """Return whether rows of this rank had no room, a bool on the device; None = all had.

        No host sync.
        """
        if not self._asks:
            return None
        found = [room.needed_factor().to(self._device) for room in self._rooms if room is not None]
        return torch.stack(found).amax() > 0 if found else torch.zeros((), device=self._device) > 0

    def end_step(self) -> None:
        """Let the rows of the next step be counted anew. No host sync."""
        for room in self._rooms:
            if room is not None and self._asks:
                room.clear_state()

    def _needed(self) -> list[float]:
        """Return the least factor that any rank needed of each room, 0 = it had enough."""
        zero = torch.zeros((), device=self._device)
        found = torch.stack(
            [zero if room is None else room.needed_factor().to(zero) for room in self._rooms]
        )
        if dist.is_initialized():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        wait_on_host()
        factors: list[float] = found.tolist()
        return factors


def _grow(room: Room, factor: float) -> None:
    now = larger(factor)
    if factor and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "%s (%s) was too small: the step runs again with %s", room.option, room.factor, now
        )
    room.grow(now if factor else None)
