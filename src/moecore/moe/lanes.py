"""Lanes: the forward of one micro-batch runs beside the backward of another.

    forward     attention, router, start to send | experts, start to send home | attention, ...
    backward    .. experts, start to send home   | attention, start to send    | experts, ...

Both run in threads of their own, and one of them at a time: that which holds the baton. It hands
the baton over where it has started an exchange of tokens (`exchange`), so that the exchange runs
beside what the other one computes, and waits for the exchange when the baton has come back. When
one ends, the other one keeps the baton.

Where the host needs numbers of other ranks (`numbers_of`), it hands the baton over, too, and gets
it back before the other one starts its next exchange. So the device has work while the host waits,
and what is sent then starts beside that work: on a stream that has not waited for it (`ahead`).

Note "order": the baton goes over at exchanges and numbers alone. So the order of all collectives
follows from the two calls, never from time: ranks that run the same pairs have the same order.

Note "streams": both compute on the stream of the caller. Exchanges run on the stream of their
communicator, one after the other. A second stream of compute would not end earlier, because what
stands behind an exchange waits for all exchanges before it. With one, tensors that both read or add
to (parameters, gradients, buffers) need no events, and memory is freed as without lanes.

Note "threads": autograd has one thread of a device, which the backward holds until it ends. So the
forward must call no autograd but in its own thread (`set_multithreading_enabled(False)`).

Note "dry runs": one side runs behind the other, in one thread, and exchanges are waited for. So
what is held at once is that of a forward to its end, never less than a pair's.

Note "random numbers": activation checkpointing sets the generators in backward. Each side finds
them as it has left them, and the forward decides their state at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import Lock, Thread
from typing import Any, TypeVar

import torch
from torch import Tensor

from moecore.base.streams import is_dry

T = TypeVar("T")


class Lanes:
    """Runs pairs of a forward and a backward.

    Args:
        resume: are called whenever one of them goes on after the other; True = the backward.
    """

    def __init__(self, resume: Sequence[Callable[[bool], None]]) -> None:
        self._resume = resume
        self._pair: _LanePair | None = None
        self._ahead: torch.cuda.Stream | None = None

    @property
    def are_open(self) -> bool:
        """Whether a pair runs; no tracer may look into one."""
        return self._pair is not None and not torch.compiler.is_compiling()

    def run(self, forward: Callable[[], T], backward: Callable[[], None]) -> T:
        """Return what the forward returns, when both have ended.

        The forward begins, in this thread. The backward runs in another one, without contexts that
        are of a thread, such as autocast. An exception in one ends the other one at its next
        exchange.

        Args:
            forward: without a backward in it.
            backward: `torch.autograd.backward`, or what calls it, of a graph that exists.

        Raises:
            RuntimeError: within another pair.
            Exception: that of the forward or of the backward.
        """
        if is_dry():  # which is of this thread
            value = forward()
            backward()
            return value
        if self._pair is not None:
            raise RuntimeError("a pair of forward and backward must not run within another one")
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        pair = self._pair = _LanePair(self._resume)
        thread = Thread(target=pair.run_backward, args=(backward, stream), daemon=True)
        try:
            thread.start()
            found = pair.run_forward(forward)
            thread.join()
        finally:
            self._pair = None
        if pair.error is not None:
            raise pair.error
        value, numbers = found
        set_generators(numbers)
        return value

    def hand_over(self, *, is_early: bool = False) -> None:
        """Let the other one run until it hands the baton over, or ends.

        Args:
            is_early: get the baton back before the other one starts an exchange.
        """
        assert self._pair is not None
        self._pair.hand_over(is_early=is_early)

    def give_back(self) -> None:
        """Let the other one run first if it has handed over early. Before an exchange."""
        assert self._pair is not None
        self._pair.give_back()

    @contextmanager
    def ahead(self, *, waits: bool = False) -> Iterator[None]:
        """Within, collectives wait for what was queued when it was last opened with `waits`."""
        if not torch.cuda.is_initialized():
            yield
            return
        if self._ahead is None:
            self._ahead = torch.cuda.Stream()
        if waits:
            self._ahead.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._ahead):
            yield


class _Side:
    """The forward or the backward.

    Attributes:
        is_early: whether it wants the baton before the other one starts an exchange.
        is_running: whether it has not ended.
        turn: is free when its turn comes.
    """

    __slots__ = ("is_backward", "is_early", "is_running", "turn")

    def __init__(self, *, is_backward: bool) -> None:
        self.is_backward, self.is_running, self.turn = is_backward, True, Lock()
        self.is_early = False
        self.turn.acquire()


class _OtherFailed(Exception):  # behind which modules call their hooks
    """Ends one side of a pair because of an exception in the other one."""


class _LanePair:
    """A forward and a backward that take turns.

    Attributes:
        error: the first exception of the two.
    """

    def __init__(self, resume: Sequence[Callable[[bool], None]]) -> None:
        self.error: BaseException | None = None
        self._resume = resume
        self._forward, self._backward = _Side(is_backward=False), _Side(is_backward=True)
        self._holder = self._forward
        self._changing = Lock()  # who holds the baton, and who runs

    def run_forward(self, forward: Callable[[], T]) -> Any:
        """Return what the forward returns and the generators behind it; None where it fails."""
        try:
            return forward(), generators()
        except BaseException as error:
            self._fail(error)
            return None
        finally:
            self._end(self._forward)

    def run_backward(self, backward: Callable[[], None], stream: torch.cuda.Stream | None) -> None:
        """Run the backward, when its first turn comes."""
        side = self._backward
        side.turn.acquire()
        try:
            if self.error is None:
                with _queueing_on(stream):
                    backward()
        except BaseException as error:
            self._fail(error)
        finally:
            self._end(side)

    def give_back(self) -> None:
        """As of `Lanes`."""
        if self._other(self._holder).is_early:
            self.hand_over()

    def hand_over(self, *, is_early: bool = False) -> None:
        """As of `Lanes`. Whoever calls it holds the baton."""
        side = self._holder
        other = self._other(side)
        with self._changing:
            self._check()
            if not other.is_running:
                return
            numbers = generators()
            side.is_early = is_early
            self._holder = other
            other.turn.release()
        side.turn.acquire()
        side.is_early = False
        self._check()
        set_generators(numbers)
        for resume in self._resume:
            resume(side.is_backward)

    def _other(self, side: _Side) -> _Side:
        return self._forward if side is self._backward else self._backward

    def _check(self) -> None:
        if self.error is not None:
            raise _OtherFailed

    def _fail(self, error: BaseException) -> None:
        with self._changing:
            self.error = self.error or error

    def _end(self, side: _Side) -> None:
        other = self._other(side)
        with self._changing:
            side.is_running = False
            if self._holder is side and other.is_running:  # it is not after an interrupt
                self._holder = other
                other.turn.release()


def exchange(
    starts: Sequence[Callable[..., Any]], lanes: Lanes | None = None, *, is_ahead: bool = False
) -> None:
    """Run collectives that do not depend on each other.

    Args:
        starts: they start one each, take `async_op` and return its work.
        lanes: who runs until they are waited for; None = nobody.
        is_ahead: they read nothing that was queued after the last `numbers_of`, and write memory
            of `Lanes.ahead`.
    """
    if lanes is None or not lanes.are_open:
        for start in starts:
            start()
        return
    lanes.give_back()
    with lanes.ahead() if is_ahead else nullcontext():
        works = [start(async_op=True) for start in starts]
    lanes.hand_over()
    for work in works:
        work.wait()


def numbers_of(start: Callable[..., Any], numbers: Tensor, lanes: Lanes | None = None) -> Any:
    """Return numbers that a collective writes, as a list on the host.

    Args:
        start: as of `exchange`.
        lanes: who runs until the host has them; None = nobody.
    """
    if lanes is None or not lanes.are_open:
        start()
        return numbers.tolist()
    work = start(async_op=True)
    with lanes.ahead(waits=True):
        work.wait()
        on_host = torch.empty_like(numbers, device="cpu", pin_memory=numbers.is_cuda)
        on_host.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.current_stream().record_event() if numbers.is_cuda else None
    lanes.hand_over(is_early=True)
    if arrived is not None:
        arrived.synchronize()
    return on_host.tolist()


@contextmanager
def _queueing_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Within, this thread queues work on a stream of another thread; None = there is no GPU."""
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def generators() -> list[Tensor]:
    """Return the states of the random number generators of the host and of the device."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def set_generators(states: Sequence[Tensor]) -> None:
    """Set the states that `generators` has returned."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
