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
        0, or the exit code of the first rank that failed.

    Raises:
        ProcessRaisedException: with the traceback of a rank that raised.
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
    try:
        torch.multiprocessing.spawn(_start_rank, (run_rank, args), nprocs=world_size)
    except torch.multiprocessing.ProcessExitedException as error:
        return error.exit_code if error.exit_code > 0 else 1
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
