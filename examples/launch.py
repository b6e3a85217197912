"""Start the ranks of a job on this host, as torchrun would."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist


def launch(run_rank: Callable[[Any], int], args: Any, world_size: int) -> int:
    """Run `run_rank(args)` in so many processes, with torchrun's environment, and wait for them.

    Args:
        run_rank: a function at the top of a module; returns an exit code.
        args: what it gets; must pickle.
        world_size: number of processes.

    Returns:
        0, or the exit code of a rank that left by itself with one other than 0.

    Raises:
        ProcessRaisedException: with the traceback of a rank that raised, when none has left.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is here, not in rank 0
        WORLD_SIZE=str(world_size),
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    ranks = torch.multiprocessing.spawn(
        _start_rank, (run_rank, args), nprocs=world_size, join=False
    )
    try:
        while not ranks.join():
            pass
    except torch.multiprocessing.ProcessExitedException as error:
        return error.exit_code if error.exit_code > 0 else 1
    except torch.multiprocessing.ProcessRaisedException:
        # A rank that left has said why; the others raise when they miss it.
        codes = [process.exitcode for process in ranks.processes]
        left = [
            code
            for code, trace in zip(codes, ranks.error_files, strict=True)
            if code > 0 and not os.path.exists(trace)
        ]
        if not left:
            raise
        return left[0]
    except KeyboardInterrupt:
        return 130  # what a shell gives for Ctrl-C
    return 0


def _start_rank(rank: int, run_rank: Callable[[Any], int], args: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    leave(run_rank(args))


def leave(code: int) -> NoReturn:
    """End this rank without destructors: gloo's threads may outlive what they use and abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
