"""A save that dies leaves the previous checkpoint, or the new one, whole and loadable."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moecore.checkpoint import directory, latest, load, save

NUM_KILLS = 10
CRASH_EXIT = 77


def build(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and moments that all hold the same number."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        nn.init.constant_(param, value)
        state = {"step": torch.tensor(value), "exp_avg": torch.full_like(param, value)}
        optimizer.state[param] = {**state, "exp_avg_sq": torch.full_like(param, value)}
    return model, optimizer


def loaded_step(root: Path) -> int:
    """Load what `latest` names, check that all of it is of one step, and return the step."""
    path = latest(root)
    assert path is not None
    model, optimizer = build(-1.0)
    step = load(path, model, optimizer)["step"]
    assert path.name == f"step-{step:06d}"
    for param in model.parameters():
        for tensor in (param, *optimizer.state[param].values()):
            assert (tensor == step).all()
    return step


def save_forever(rank: int, root: Path, start: int, store: Path, done: object) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for step in range(start, 100_000):
        save(root, step, *build(float(step)), {"step": step}, keep=2)
        done.value = step  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_kill_at_random_moments(tmp_path: Path) -> None:
    # Ranks fork from a process that has torch imported and no threads: ten starts in seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    root, start = tmp_path / "root", 1
    save(root, 0, *build(0.0), {"step": 0})
    dice = random.Random(0)
    for attempt in range(NUM_KILLS):
        done = context.Value("i", 0)
        args = (root, start, tmp_path / f"store-{attempt}", done)
        ranks = [context.Process(target=save_forever, args=(r, *args)) for r in range(2)]
        for process in ranks:
            process.start()
        while done.value < start:
            assert all(process.is_alive() for process in ranks)
            time.sleep(0.01)
        time.sleep(dice.uniform(0.0, 0.3))
        for process in ranks:
            os.kill(process.pid, signal.SIGKILL)
        for process in ranks:
            process.join()
        step = loaded_step(root)
        assert done.value <= step <= done.value + 1
        start = step + 1


# What a save does on rank 0, in order; a save may do each of them more than once.
CRASH_POINTS = {
    "draft": (Path, "mkdir"),
    "write": (directory, "_write"),
    "sync": (directory, "_sync"),
    "rename": (Path, "rename"),
    "replace": (Path, "replace"),
    "remove": (directory.shutil, "rmtree"),
}


def crash_at(root: Path, step: int, point: str, nth: int, *, after: bool) -> bool:
    """Save in a forked child that dies at the nth call of a point; return whether it died."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == CRASH_EXIT
    owner, name = CRASH_POINTS[point]
    original, calls = getattr(owner, name), 0

    def crashing(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == nth and not after:
            os._exit(CRASH_EXIT)
        result = original(*args, **kwargs)
        if calls == nth:
            os._exit(CRASH_EXIT)
        return result

    setattr(owner, name, crashing)
    save(root, step, *build(float(step)), {"step": step}, keep=1)
    os._exit(0)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_crash_at_every_file_operation(tmp_path: Path, point: str, after: bool) -> None:
    torch.set_num_threads(1)
    step, nth = 1, 1
    save(tmp_path, step, *build(1.0), {"step": 1})
    while crash_at(tmp_path, step + 1, point, nth, after=after):
        left = loaded_step(tmp_path)
        assert left in (step, step + 1)
        step, nth = left, nth + 1
    assert nth > 1 or point == "remove"
    assert loaded_step(tmp_path) == step + 1
    assert len(directory.whole_directories(tmp_path)) == 1
    assert not list(tmp_path.glob(".*"))
