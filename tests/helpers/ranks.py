"""Spawn ranks once, run many cases in them, and bring the results home.

A test file calls `run_ranks` in one module-scoped fixture, such as `ranks_fixture`; `worker` runs
on every rank and what it returns on rank 0 comes back. A failing rank stops all of them with its
traceback.

Note "starts": importing takes a rank longer than most cases, so CPU ranks are forks of a server
that has imported and done nothing else. The last one has a server of its own, an interpreter that
hashes strings otherwise: ranks that walk a set each in its own order are a bug that must show.
The workers of pytest-xdist share the two of the process that starts them.

Note "transport": groups of CPU ranks exchange tensors through shared memory (`shared_memory.py`),
or over gloo, where its sums or its errors are what a test is about.

Note "pollers": each gloo device has a thread that wakes up a hundred times a second, and each group
makes a device of its own, ten for a mesh. All groups of a CPU rank share one.

Ranks share GPUs where a host has fewer than ranks. Collectives are gloo's then, since NCCL wants a
GPU per rank; stores into peers' memory stay what they are. What needs NCCL, or a graph of its
collectives, has the mark `gpus(n)` with how many GPUs of its own it wants.

Ranks that wait for each other for ever say where: after MOECORE_RANKS_TIMEOUT_S seconds (900) each
prints its stacks and ends.
"""

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessContext

from tests.helpers.grids import asked_for
from tests.helpers.shared_memory import SharedMemoryGroup

Worker = Callable[..., Any]
LIBRARY = torch.library.Library("_c10d_functional", "IMPL")  # what it holds lives as long
TIMEOUT_S = "MOECORE_RANKS_TIMEOUT_S"
SHARED_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None  # in memory
ON_ONE_GPU = 4  # ranks that share the only GPU of a host, where any number would do
IMPORTED = (
    "tests.helpers.ranks",
    "moecore.parallelize",
    "moecore.io",
    "moecore.models",
    "moecore.packing",
    "moecore.planning",
    "moecore.train",
    "pytest",
    "torch._dynamo",
    "torch._functorch.aot_autograd",  # what a first compile imports, and the next line's
    "torch._inductor.compile_fx",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",  # if it is there: a second per rank
    "peft",  # if it is there
    "tests.helpers.quiet",
)
FIRST, LAST = "tests.helpers.sparing", "tests.helpers.frozen"
SERVERS = "MOECORE_RANKS_SERVERS"  # addresses of the two that a parent has started
STARTING = threading.Lock()  # which server forks is a global of multiprocessing


def run_ranks(
    world_size: int,
    worker: Worker,
    *args: Any,
    device_type: str = "cpu",
    over_gloo: bool = False,
    imported: str = "",
) -> Any:
    """Run `worker(rank, device, *args)` on `world_size` new processes; return rank 0's result.

    With `imported`, CPU ranks fork from servers that have imported this module as well.
    """
    transport = device_type if device_type == "cuda" else "gloo" if over_gloo else "shared memory"
    with tempfile.TemporaryDirectory(dir=SHARED_FOLDER) as folder:
        path = os.path.join(folder, "result.pt")
        setup = (world_size, transport, path, dict(os.environ), worker, args)
        try:
            if device_type == "cuda":
                _join(_start(setup, range(world_size), "spawn"))
            else:
                num_alike, servers = max(1, world_size - 1), _servers(imported)
                last = _fork(setup, range(num_alike, world_size), servers[1])
                _join(_fork(setup, range(num_alike), servers[0]), last)
        finally:
            for output in sorted(Path(folder).glob("*.output")):
                sys.stderr.write(output.read_text(errors="replace"))
        return torch.load(path, weights_only=False)


def ranks_fixture(
    world_size: int, worker: Worker, *names: str, in_folder: bool = False, **how: Any
) -> Any:
    """Return a module's fixture: what ranks bring home, of the cases that are asked for.

    With `in_folder` the worker gets an empty folder before them.
    """

    def results(request: pytest.FixtureRequest) -> Any:
        args: list[Any] = [asked_for(request, *names)] if names else []
        if in_folder:
            folders = request.getfixturevalue("tmp_path_factory")
            args.insert(0, str(folders.mktemp("ranks")))
        return run_ranks(world_size, worker, *args, **how)

    return pytest.fixture(scope="module")(results)


def num_gpu_ranks() -> int:
    """Return how many ranks the GPUs of this host are for a test that takes any number."""
    num_gpus = torch.cuda.device_count()
    return ON_ONE_GPU if num_gpus == 1 else num_gpus


def gpu_of_rank(rank: int) -> torch.device:
    return torch.device("cuda", rank % torch.cuda.device_count())


def forks() -> ForkServerContext:
    """Return a context whose processes fork from the server.

    The server has no threads: a fork of the process that runs tests would hold their locks forever.
    """
    context = multiprocessing.get_context("forkserver")
    # before the server starts; later it is ignored
    context.set_forkserver_preload([FIRST, *IMPORTED, LAST])
    _servers("")  # which may be there
    return context


@cache
def _servers(imported: str) -> tuple[forkserver.ForkServer, forkserver.ForkServer]:
    """Return the servers of all ranks but the last, and of the last: see Note "starts"."""
    alike = forkserver.ForkServer() if imported else forkserver._forkserver
    for server in (both := (alike, forkserver.ForkServer())):
        server.set_forkserver_preload([FIRST, *IMPORTED, *filter(None, [imported]), LAST])
    if not imported and SERVERS in os.environ:
        for server, address in zip(both, os.environ[SERVERS].split(), strict=True):
            server._forkserver_address = address
            server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # the parent has it
            server.ensure_running = resource_tracker.ensure_running  # type: ignore[method-assign]
    return both


def share_servers() -> None:
    """Start both servers for the processes that this one will start."""
    if sys.version_info < (3, 14):  # which asks for a key
        for server in (both := _servers("")):
            server.ensure_running()
        os.environ[SERVERS] = " ".join(str(server._forkserver_address) for server in both)


def _fork(setup: tuple[Any, ...], ranks: range, server: forkserver.ForkServer) -> ProcessContext:
    with (
        STARTING,
        patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process),
    ):
        return _start(setup, ranks, "forkserver")


def _start(setup: tuple[Any, ...], ranks: range, method: str) -> ProcessContext:
    return mp.start_processes(
        _main, (ranks.start, *setup), len(ranks), join=False, start_method=method
    )


def _join(*parts: ProcessContext) -> None:
    """Wait for all of them; the first that fails stops the others."""
    processes = [process for part in parts for process in part.processes]
    error_files = [file for part in parts for file in part.error_files]
    context = ProcessContext(processes, error_files)
    while not context.join():
        pass


def _main(
    index: int,
    first_rank: int,
    world_size: int,
    transport: str,
    path: str,
    environ: dict[str, str],
    worker: Worker,
    args: Any,
) -> None:
    rank = first_rank + index
    output = os.open(f"{path}.{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)  # pytest shows it if the test fails; a server's own would be the terminal
    os.dup2(output, 2)
    os.environ.clear()  # a fork has the server's, which may be older
    os.environ.update(environ)
    # What loads its data forks from the rank, as by default; else it would start another server.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    timeout_s = int(os.environ.get(TIMEOUT_S, "900"))
    faulthandler.dump_traceback_later(timeout_s, file=sys.__stderr__)
    signal.alarm(timeout_s + 5)  # when all have printed; it ends a process that holds the GIL, too
    start_group(rank, world_size, transport, store=f"{path}.store")
    device = gpu_of_rank(rank) if transport == "cuda" else torch.device("cpu")
    result = worker(rank, device, *args)
    if rank == 0:
        torch.save(result, path)
    dist.barrier()
    # Without destructors: gloo's threads may outlive what they use and abort the process.
    os._exit(0)


def start_group(rank: int, world_size: int, transport: str, *, store: str) -> None:
    """Make the default process group of a rank: over "cuda", "gloo" or "shared memory"."""
    backend = "gloo"
    if transport == "cuda":
        torch.cuda.set_device(gpu_of_rank(rank))
        if world_size <= torch.cuda.device_count():
            backend = "cpu:gloo,cuda:nccl"
        else:
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
            LIBRARY.impl("all_gather_into_tensor", _all_gather_into_tensor, "CUDA")
            dist.batch_isend_irecv = _batch_through_host
            dist.send, dist.recv = _send_through_host, _recv_through_host
    elif transport == "gloo":
        _share_gloo_device()
    else:
        SharedMemoryGroup.folder = Path(store).parent
        dist.distributed_c10d.ProcessGroupGloo = SharedMemoryGroup
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size
    )


def _share_gloo_device() -> None:
    """Give all process groups of this process one thread that polls, see Note "pollers"."""
    device = dist.ProcessGroupGloo.create_default_device()

    class OneDevice(dist.ProcessGroupGloo):
        def __init__(
            self, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: object
        ) -> None:  # 2.15 gives an option more
            options = dist.ProcessGroupGloo._Options()
            options._devices = [device]
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    dist.distributed_c10d.ProcessGroupGloo = OneDevice


class _ThroughHost:
    """A message of a GPU by gloo, which would read and write the host's memory at its address."""

    def __init__(self, op: dist.P2POp) -> None:
        self._tensor, self._sends = op.tensor, op.op is dist.isend
        self._on_host = (
            op.tensor.cpu() if self._sends else torch.empty_like(op.tensor, device="cpu")
        )
        self._work = op.op(self._on_host, op.peer, op.group, op.tag)

    def wait(self) -> None:
        self._work.wait()
        if not self._sends:
            self._tensor.copy_(self._on_host)


def _send_through_host(x: torch.Tensor, *where: Any, **how: Any) -> None:
    dist.isend(x.cpu(), *where, **how).wait()


def _recv_through_host(x: torch.Tensor, *where: Any, **how: Any) -> None:
    on_host = torch.empty_like(x, device="cpu")
    dist.irecv(on_host, *where, **how).wait()
    x.copy_(on_host)


def _batch_through_host(ops: list[dist.P2POp]) -> list[_ThroughHost]:
    return [_ThroughHost(op) for op in ops]


def _all_gather_into_tensor(x: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """What DTensors gather by; gloo's own reads memory of a GPU as if it were the host's."""
    out = x.new_empty(x.shape[0] * group_size, *x.shape[1:])
    group = dist.distributed_c10d._resolve_process_group(group_name)
    dist.all_gather_into_tensor(out, x.contiguous(), group)
    return out
