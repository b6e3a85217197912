"""Pairs: the forward of one micro-batch and the backward of another alternate, to hide exchanges.

    forward     attention, router, start dispatch | experts, start combine    | attention, ...
    backward    ... experts, start combine        | attention, start dispatch | experts, ...

`Pairs.run_pair` receives a forward and a backward, and returns the forward's value when both have
ended. Each side runs in its own thread, and only the side that holds the baton runs. When a side
has started an exchange (`run_exchanges`), it hands the baton over, so the other side computes
during the exchange. The first side waits for its exchange after the baton has returned. When a side
ends, the other side holds the baton until its own end.

A side whose host needs numbers of other ranks (`read_numbers`) hands the baton over too. It gets
the baton back when the other side's backward leaves an MoE layer (`give_back_at_gradient`), or
before the other side starts its next exchange. The device therefore computes while the host waits.
The next exchange starts during that compute, on a stream that does not wait for it. The other side
launches the rest of its compute after this start, so that a slow host does not delay the exchange.

The baton is handed over only at exchanges, at `read_numbers` and at gradients of layers' inputs.
The order of all collectives therefore depends only on the two calls, never on time: ranks that run
the same pairs have the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import Lock, Thread
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from moecore.base.streams import HostCopyOfTensor, is_dry_run

T = TypeVar("T")


class PairedModel(Protocol):
    """A model in which one micro-batch's forward and another's backward run alternately."""

    def alternate_passes(self) -> AbstractContextManager[None]:
        """Return a context in which one forward alternates with one backward of the model."""

    def unshard_pass(self, is_backward: bool) -> None:
        """Unshard the parameters in use by the backward or, if not `is_backward`, the forward."""


class Pairs:
    """Alternates a forward and another micro-batch's backward in two threads, to hide exchanges."""

    def __init__(self, models: Sequence[PairedModel]) -> None:
        self.can_alternate = True  # whether some layer has exchanges, at which they alternate
        self._models = models
        self._pair: _Pair | None = None
        self._early_stream: torch.cuda.Stream | None = None

    @property
    def running_pair(self) -> _Pair | None:
        """The forward and backward that run now, or None; always None under torch.compile."""
        return None if torch.compiler.is_compiling() else self._pair

    def run_pair(self, forward: Callable[[], T], backward: Callable[[], None]) -> T:
        """Run `forward` and `backward` alternately; return the result of `forward`.

        The forward starts first, in this thread. The backward runs in a second thread, without
        contexts of this thread such as autocast. The first error of the two is raised.
        """
        # In a dry run or without exchanges, the backward runs after the forward. The recorded peak
        # memory of a dry run is then an upper bound.
        if is_dry_run() or not self.can_alternate:
            value = forward()
            backward()
            return value
        if self._pair is not None:
            raise RuntimeError("a pair of forward and backward must not run within another one")
        # Both sides compute on the caller's stream. A second compute stream would not end earlier,
        # because exchanges run sequentially on their communicator's stream. With one stream,
        # tensors that both sides use need no events, and memory is freed as without pairs.
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        with ExitStack() as stack:
            for model in self._models:
                stack.enter_context(model.alternate_passes())
            pair = self._pair = _Pair(self._models)
            # The backward occupies autograd's thread of the device, so the forward must call
            # autograd in its own thread (`set_multithreading_enabled(False)`).
            thread = Thread(target=pair.run_backward, args=(backward, stream), daemon=True)
            try:
                thread.start()
                result = pair.run_forward(forward)
                thread.join()
            finally:
                self._pair = None
            if pair.error is not None:
                raise pair.error
            value, rng_states = result
            set_rng_states(rng_states)
            return value

    def give_back_at_gradient(self, x: Tensor) -> None:
        """When the gradient of `x` arrives, let a thread that has yielded early run."""
        if x.requires_grad and not torch.compiler.is_compiling():
            x.register_hook(self._give_back_baton)

    def _give_back_baton(self, _: Tensor) -> None:
        if self._pair is not None:
            self._pair.give_back_baton()

    @contextmanager
    def launch_on_side_stream(self, *, waits_for_current: bool = False) -> Iterator[None]:
        """Return a context on a side stream, which waits for the current if `waits_for_current`."""
        if not torch.cuda.is_initialized():
            yield
            return
        if self._early_stream is None:
            self._early_stream = torch.cuda.Stream()
        if waits_for_current:
            self._early_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._early_stream):
            yield


class _Side:
    """The state of one of two alternating threads: the forward or the backward."""

    __slots__ = ("is_backward", "is_early", "is_running", "turn")

    def __init__(self, *, is_backward: bool) -> None:
        self.is_backward, self.is_running = is_backward, True
        self.is_early = False  # whether the other side's `give_back_baton` gives it the baton
        self.turn = Lock()  # the other side releases it to give this side the baton
        self.turn.acquire()


class _OtherFailed(Exception):  # an Exception: modules call their always_call hooks after it
    """Ends the forward or the backward, because the other thread has raised an exception."""


class _Pair:
    """A forward and a backward in two threads, only one of which runs at a time."""

    def __init__(self, models: Sequence[PairedModel]) -> None:
        self.error: BaseException | None = None  # the first exception of either side
        self._models = models
        self._forward, self._backward = _Side(is_backward=False), _Side(is_backward=True)
        self._other = {self._forward: self._backward, self._backward: self._forward}
        self._holder = self._forward
        self._state_lock = Lock()  # guards `_holder`, `is_running` and `error`

    def run_forward(self, forward: Callable[[], T]) -> Any:
        """Run the forward; return (value, final RNG states), or None if the forward has raised."""
        try:
            return forward(), get_rng_states()
        except BaseException as error:
            self._set_error(error)
            return None
        finally:
            self._end_side(self._forward)

    def run_backward(self, backward: Callable[[], None], stream: torch.cuda.Stream | None) -> None:
        """Wait until the forward's thread yields, then run the backward on `stream`; None = CPU."""
        side = self._backward
        side.turn.acquire()
        try:
            if self.error is None:
                with ExitStack() as stack:
                    if stream is not None:  # None = there is no GPU
                        stack.enter_context(torch.cuda.device(stream.device))
                        stack.enter_context(torch.cuda.stream(stream))
                    backward()
        except BaseException as error:
            self._set_error(error)
        finally:
            self._end_side(side)

    def give_back_baton(self) -> None:
        """If the other thread has yielded early, let it run until it has started an exchange."""
        if self._other[self._holder].is_early:
            self.hand_over_baton()

    def hand_over_baton(self, *, is_early: bool = False) -> None:
        """Let the other thread run until it yields or ends; `is_early`: until it gives back."""
        side = self._holder
        other = self._other[side]
        with self._state_lock:
            if self.error is not None:
                raise _OtherFailed
            if not other.is_running:
                return
            # Activation checkpointing sets the generators in backward, so each side has its states.
            rng_states = get_rng_states()
            side.is_early = is_early
            self._holder = other
            other.turn.release()
        side.turn.acquire()
        side.is_early = False
        if self.error is not None:
            raise _OtherFailed
        set_rng_states(rng_states)
        for model in self._models:
            model.unshard_pass(side.is_backward)

    def _set_error(self, error: BaseException) -> None:
        with self._state_lock:
            self.error = self.error or error

    def _end_side(self, side: _Side) -> None:
        other = self._other[side]
        with self._state_lock:
            side.is_running = False
            if self._holder is side and other.is_running:  # not so after an interrupt
                self._holder = other
                other.turn.release()


def run_exchanges(
    start_collectives: Sequence[Callable[..., Any]],
    pairs: Pairs | None = None,
    *,
    may_overlap: bool = False,
) -> None:
    """Start independent collectives and wait for them; meanwhile another micro-batch computes.

    Each function, called with `async_op=True`, starts a collective and returns its `Work`. `pairs`
    alternates two micro-batches; None = only this one. With `may_overlap`, the collectives must not
    read results of work launched after the last `read_numbers`, and must write memory allocated
    inside `Pairs.launch_on_side_stream`.
    """
    pair = None if pairs is None else pairs.running_pair
    if pairs is None or pair is None:
        for start in start_collectives:
            start()
        return
    pair.give_back_baton()
    with pairs.launch_on_side_stream() if may_overlap else nullcontext():
        works = [start(async_op=True) for start in start_collectives]
    pair.hand_over_baton()
    for work in works:
        work.wait()


def read_numbers(collective: Callable[..., Any], output: Tensor, pairs: Pairs | None = None) -> Any:
    """Run a collective that writes `output`; return `output` as a nested list. Host sync."""
    pair = None if pairs is None else pairs.running_pair
    if pairs is None or pair is None:
        collective()
        return output.tolist()
    work = collective(async_op=True)
    with pairs.launch_on_side_stream(waits_for_current=True):
        work.wait()
        on_host = HostCopyOfTensor(output)
    pair.hand_over_baton(is_early=True)
    return on_host.read().tolist()


def get_rng_states() -> list[Tensor]:
    """Return the states of torch's random number generators on the CPU and the current GPU."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def set_rng_states(states: Sequence[Tensor]) -> None:
    """Restore the states that `get_rng_states` returned."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
