"""Starts the ranks of a job on this host, as torchrun would, and ends them by signals."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing import connection, resource_tracker
from types import FrameType
from typing import Any, NoReturn


def exit_at_interrupt() -> None:
    """Make SIGINT end this process, unless SIGINT has a handler or is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))


class StopRequest:
    """A record of the first SIGINT or SIGTERM in this process: its `number`, or 0."""

    def __init__(self) -> None:
        self.number = 0

    def record(self, signal_number: int, _: FrameType | None = None) -> None:
        """Store a signal, or exit at a second SIGINT."""
        if self.number and signal_number == signal.SIGINT:
            os._exit(128 + signal_number)
        self.number = self.number or signal_number


@contextmanager
def record_stop_signals() -> Iterator[StopRequest]:
    """Return a context whose `StopRequest` records SIGINT and SIGTERM, if in the main thread."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    with _handle_signals({signal.SIGTERM: request.record, signal.SIGINT: request.record}):
        yield request


@contextmanager
def _handle_signals(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Return a context that sets these signal handlers; an ignored SIGINT stays ignored."""
    before = {number: signal.getsignal(number) for number in handlers}
    if before[signal.SIGINT] is signal.SIG_IGN:  # of a background job
        before.pop(signal.SIGINT)
    try:  # a signal may arrive as soon as the first handler is set
        for number in before:
            signal.signal(number, handlers[number])
        yield
    finally:
        for number, old_handler in before.items():
            signal.signal(number, old_handler)


if multiprocessing.parent_process() is not None:
    exit_at_interrupt()  # a rank; torch takes seconds to import

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.multiprocessing.spawn import ProcessContext  # noqa: E402

END_S = 10  # for a rank to end after SIGTERM
STOP_CODES = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)  # of ranks that end by themselves


class Terminated(BaseException):
    """Raised in the launcher at SIGTERM."""


def launch(run_rank: Callable[[Any], int], args: Any, world_size: int) -> int:
    """Run `run_rank(args)` in `world_size` processes in torchrun's environment; wait for them.

    No rank outlives this process. SIGTERM and Ctrl-C are forwarded to the ranks. After one signal,
    ranks in training save a checkpoint; after a second signal, ranks end at once. `run_rank` is a
    module-level function that returns an exit code. `args` must pickle.

    Returns:
        0, the first exit code of a rank that is not 0, or 128 + the signal.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is here, not in rank 0
        WORLD_SIZE=str(world_size),
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start_resource_tracker()
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    ranks = torch.multiprocessing.spawn(
        _start_rank, (run_rank, args), nprocs=world_size, join=False
    )
    handlers = {signal.SIGTERM: _raise_terminated, signal.SIGINT: signal.default_int_handler}
    with ExitStack() as ends:
        ends.callback(_end_ranks, ranks)
        try:
            ends.enter_context(_handle_signals(handlers))
            return _wait_for_ranks(ranks)
        except KeyboardInterrupt:
            return _stop_ranks(ranks, signal.SIGINT)
        except Terminated:
            return _stop_ranks(ranks, signal.SIGTERM)


def start_resource_tracker() -> None:
    """Start the process that removes semaphores of ended ranks, without a warning for each rank.

    `exit_rank` leaves the semaphores of data workers to this process.
    """
    ignored = "ignore::UserWarning:multiprocessing.resource_tracker"
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = f"{before},{ignored}" if before else ignored
    resource_tracker.ensure_running()
    if before is None:
        del os.environ["PYTHONWARNINGS"]
    else:
        os.environ["PYTHONWARNINGS"] = before


def _wait_for_ranks(ranks: ProcessContext) -> int:
    """Wait for all ranks or the first failure; return the exit status of the job.

    If a signal has ended a rank, the other ranks can save nothing and are killed.
    """
    try:
        while ranks.sentinels:
            for sentinel in connection.wait([*ranks.sentinels]):
                rank = ranks.sentinels[sentinel]
                ranks.processes[rank].join()  # its sentinel is ready before its exit code
                if ranks.processes[rank].exitcode < 0:
                    return _kill_ranks(ranks, rank)
            ranks.join()
    except torch.multiprocessing.ProcessExitedException as error:
        return error.exit_code if error.exit_code > 0 else _kill_ranks(ranks, error.error_index)
    except torch.multiprocessing.ProcessRaisedException:
        # A rank that left has printed why; the others raise when they miss it.
        for process, trace in zip(ranks.processes, ranks.error_files, strict=True):
            if process.exitcode > 0 and not os.path.exists(trace):
                return int(process.exitcode)
        raise
    return 0


def _kill_ranks(ranks: ProcessContext, rank: int) -> int:
    """Print which signal has ended a rank, and kill the other ranks; return 1."""
    number = signal.Signals(-ranks.processes[rank].exitcode)
    cause = ": the host may have too little memory" if number == signal.SIGKILL else ""
    print(f"moecore: error: rank {rank} ended by {number.name}{cause}", file=sys.stderr)
    for process in ranks.processes:
        process.kill()
    return 1


def _stop_ranks(ranks: ProcessContext, signal_number: int) -> int:
    """Wait for ranks to save, or a second signal; return 128 + the signal, 0 = all finished."""
    for process in ranks.processes:
        process.terminate()  # SIGTERM: a terminal has sent SIGINT to all processes already
    try:
        alive = {process.sentinel: process for process in ranks.processes}
        while alive:
            ends = [alive.pop(sentinel) for sentinel in connection.wait(list(alive))]
            for process in ends:
                process.join()
            if any(process.exitcode not in STOP_CODES for process in ends):
                break  # the others may wait for it
    except (KeyboardInterrupt, Terminated):
        pass
    is_finished = all(process.exitcode == 0 for process in ranks.processes)
    return 0 if is_finished else 128 + signal_number


def _end_ranks(ranks: ProcessContext) -> None:
    """Terminate all ranks, and kill ranks that still run 10 seconds later."""
    for process in ranks.processes:
        process.terminate()
    for process in ranks.processes:
        process.join(END_S)
        process.kill()
        process.join()


def _raise_terminated(*_: object) -> None:
    raise Terminated


def _start_rank(rank: int, run_rank: Callable[[Any], int], args: Any) -> None:
    """Run `run_rank(args)` as a rank in this child process, and exit with its status."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    exit_rank(run_rank(args))


def _end_with_launcher() -> None:
    # torch ends ranks by SIGINT, which may be ignored.
    launcher = multiprocessing.parent_process()
    assert launcher is not None, "ranks are children"
    connection.wait([launcher.sentinel])
    os._exit(1)


def check_environment() -> None:
    """Raise ValueError unless the environment has the variables that torchrun sets for a rank."""
    for name, default in (("RANK", ""), ("WORLD_SIZE", ""), ("LOCAL_RANK", "0")):
        value = os.environ.get(name, default)
        if not value.isdecimal():
            raise ValueError(
                f"{name} ({value!r}) must be a whole number where the environment has RANK: start "
                "with torchrun, or unset RANK"
            )
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if int(rank) >= int(world_size):
        raise ValueError(f"RANK ({rank}) must be < WORLD_SIZE ({world_size})")


def exit_rank(code: int) -> NoReturn:
    """Exit this process with status `code`; skip destructors, which may abort in gloo's threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
