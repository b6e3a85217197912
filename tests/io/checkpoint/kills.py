"""Kill ranks, or jobs that contend for one run, at random moments of saving; load what is left."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moecore.io import Saver, latest, load, save, verify
from tests.helpers.ranks import forks

FORKS = forks()
CRASH_EXIT = 77


def build(value: float, width: int = 64) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and moments that all hold the same number."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    fill(model, optimizer, value)
    return model, optimizer


@torch.no_grad()
def fill(model: nn.Module, optimizer: torch.optim.Optimizer, value: float) -> None:
    for param in model.parameters():
        state = optimizer.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            state |= {slot: torch.empty_like(param) for slot in ("exp_avg", "exp_avg_sq")}
        for tensor in (param, *state.values()):
            tensor.fill_(value)


def loaded_step(root: Path, width: int = 64) -> int:
    """Load what `latest` names, check that all of it is of one step, and return the step."""
    path = latest(root)
    model, optimizer = build(-1.0, width)
    step = load(path, model, optimizer)["step"]
    assert path.name == f"step-{step:06d}"
    for param in model.parameters():
        for tensor in (param, *optimizer.state[param].values()):
            assert (tensor == step).all()
    return step


def in_child(action: Callable[..., None], *args: object, **kwargs: object) -> int:
    """Run in a process of its own, where limits and crashes stay; return how it ended.

    Raises:
        AssertionError: when it neither finished nor crashed where it was told to.
    """
    child = FORKS.Process(target=action, args=args, kwargs=kwargs)
    child.start()
    child.join()
    assert child.exitcode in (0, CRASH_EXIT), f"exit code {child.exitcode}: see stderr"
    return child.exitcode


def save_forever(rank, world, root, width, start, store, *, wait, done):
    """Save step after step; `done` is the last one that is known to be on disk."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    model, optimizer = build(0.0, width)
    saver = Saver(root, model, optimizer, keep=2)
    for step in range(start, 100_000):
        saver.check()
        fill(model, optimizer, float(step))
        saver.save(step, {"step": step}, wait=wait)
        fill(model, optimizer, -7.0)  # must not reach the disk
        if rank == 0:
            done.value = step if wait else step - 1  # type: ignore[attr-defined]


def kill_at_random(root, num_kills, *, world, width, wait, seed):
    """Return after each kill: 0 = the save before is left, 1 = the newer one.

    Raises:
        AssertionError: when something else is left, or nothing that loads.
    """
    start, left = 1, []
    save(root, 0, *build(0.0, width), {"step": 0})
    dice = random.Random(seed)
    for attempt in range(num_kills):
        done = FORKS.Value("i", start - 1)
        store = root.parent / f"store-{seed}-{attempt}"
        args = (world, root, width, start, store)
        ranks = [
            FORKS.Process(
                target=save_forever, args=(rank, *args), kwargs={"wait": wait, "done": done}
            )
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        while done.value < start:
            assert all(process.is_alive() for process in ranks)
            time.sleep(0.01)
        time.sleep(dice.uniform(0.0, 0.3))
        for process in ranks:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        for process in ranks:
            process.join()
        step = loaded_step(root, width)
        assert done.value <= step <= done.value + (1 if wait else 2), (done.value, step)
        left.append(step - done.value)
        start = step + 1
    return left


def contend(root: Path, job: int, rounds: int, go: Any) -> None:
    """Save again and again as one of several jobs; note which saves returned."""
    model, optimizer = build(float(job), 8)
    go.wait(30)
    for _ in range(rounds):
        newest = latest(root)
        step = 1 + (0 if newest is None else int(newest.name.removeprefix("step-")))
        with contextlib.suppress(OSError, ValueError):
            path = save(root, step, model, optimizer, {"step": step}, keep=1)
            with (root.parent / f"saved-{job}").open("a") as file:
                file.write(f"{path.name}\n")


def kill_contenders(root: Path, num_kills: int, *, jobs: int, seed: int) -> tuple[int, int]:
    """Kill one of several jobs after the other, each replaced by a new one.

    Returns:
        Checkpoints that a reader verified meanwhile, and saves that returned.

    Raises:
        AssertionError: when a reader finds damage, a step was saved twice, or a save is lost.
    """
    dice, go, started, reads = random.Random(seed), FORKS.Event(), 0, 0
    running: list[Any] = []
    go.set()
    for _ in range(num_kills):
        while len(running) < jobs:
            running.append(FORKS.Process(target=contend, args=(root, started, 10**6, go)))
            running[-1].start()
            started += 1
        time.sleep(dice.uniform(0.05, 0.5))
        reads += all_is_whole(root)
        job = running.pop(dice.randrange(jobs))
        job.kill()
        job.join()
    for job in running:
        job.kill()
        job.join()
    files = root.parent.glob("saved-*")
    saved = [name for file in files for name in file.read_text().split()]
    assert len(saved) == len(set(saved)), "a step was saved twice"
    newest = latest(root)
    assert newest is not None and newest.name >= max(saved) and verify(newest)
    return reads, len(saved)


def all_is_whole(root: Path) -> bool:
    """Verify what `latest` names, beside jobs that write; False where it was pruned meanwhile."""
    found = latest(root)
    if found is None:
        return False
    try:
        verify(found)
    except ValueError:
        assert not found.exists()
        return False
    return True
