"""Long runs: ranks are killed, disks are full, losses are nan, jobs start again; nothing is lost.

    python -m tests.train.soak --steps 2000 --kills 20
    python -m tests.train.soak --steps 600 --kills 3 --device cuda  # ranks share the GPUs there are

trains a tiny decoder on four ranks twice, undisturbed and disturbed, and prints a line of each. A
step's data depend on its number alone, so both must end with the same bits.
"""

import argparse
import hashlib
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore import FSDPOptions, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.io import Saver, latest, load
from moecore.models import Decoder
from tests.helpers.ranks import forks, start_group
from tests.train.test_step import CONFIG

WORLD = 4
PAGE = resource.getpagesize()
ENDS_WITHIN_S = 60.0  # ranks of which another was killed


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run, and what happens in it. A loss is nan in every `nan_every`th step, killed or not."""

    steps: int
    kills: int = 0
    full_disks: bool = False  # a third of all saves finds the disk full, on one rank
    save_every: int = 10
    nan_every: int = 17
    seed: int = 0
    device: str = "cpu"

    def is_full(self, step: int) -> bool:
        return self.full_disks and step // self.save_every % 3 == 2


@dataclass
class Found:
    """What a run came to.

    Attributes:
        digests: of weights, optimizer state and buffers, by rank.
        resident: bytes of rank 0's process, at twenty equally spaced steps of its last start.
        allocated: bytes of its tensors on a GPU, at the same steps.
        starts: of the job.
        repeated: steps that were computed again after a kill.
        full: saves that raised.
    """

    digests: list[str] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    starts: int = 0
    repeated: int = 0
    full: int = 0


def make(device: str) -> tuple[nn.Module, torch.optim.Optimizer, TrainStep]:
    model = Decoder(CONFIG, device="meta")
    fsdp = FSDPOptions(param_dtype=torch.bfloat16)
    parallelize_moe(model, build_meshes(ParallelConfig(ep=2), device), fsdp=fsdp)
    model.to_empty(device=device)
    model.init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, optimizer, TrainStep(model, optimizer, max_norm=1.0)


def loss_of(model: nn.Module, step: int, rank: int, device: str, *, is_nan: bool) -> Tensor:
    g = torch.Generator().manual_seed(WORLD * step + rank)
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 17), generator=g).to(device)
    loss: Tensor = model(tokens[:, :-1], tokens[:, 1:].contiguous())
    return loss * torch.nan if is_nan else loss


def train(rank: int, plan: Plan, root: Path, store: Path, shared: Any) -> None:
    """Be one rank from the last checkpoint to the end of a plan."""
    torch.set_num_threads(1)
    start_group(rank, WORLD, "cuda" if plan.device == "cuda" else "gloo", store=str(store))
    model, optimizer, step = make(plan.device)
    with Saver(root, model, optimizer, keep=2) as saver:
        path, start = latest(root), 0
        if path is not None:
            start = load(path, model, optimizer)["step"]
        for number in range(start + 1, plan.steps + 1):
            is_nan = number % plan.nan_every == 0
            with step.micro_batch():
                is_here = is_nan and rank == number % WORLD
                loss_of(model, number, rank, plan.device, is_nan=is_here).backward()
            assert bool(step.finish().is_skipped) == is_nan, number
            if number % plan.save_every == 0:
                with full_disk(plan.is_full(number) and rank == number % WORLD):
                    shared.full[rank] += not saved(saver, number, fails=plan.is_full(number))
            if rank == 0:
                shared.reached.value = number
                if number % max(plan.steps // 20, 1) == 0:
                    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
                    shared.resident.append(resident)
                    shared.allocated.append(torch.cuda.memory_allocated())
    shared.digests[rank] = digest(model, optimizer)
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive what they use


def saved(saver: Saver, step: int, *, fails: bool) -> bool:
    """Save; return whether it went well. A full disk on one rank raises on all of them."""
    try:
        saver.save(step, {"step": step}, wait=fails)
    except OSError as error:
        assert fails and "File too large" in str(error), error
        return False
    assert not fails, "a full disk went unnoticed"
    return True


@contextmanager
def full_disk(is_full: bool) -> Iterator[None]:
    """Within, no file of this process may grow: EFBIG in place of ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of all that this rank holds of a model and its optimizer."""
    found = hashlib.sha256()
    states = [optimizer.state[p] for p in model.parameters()]
    states = [state[slot] for state in states for slot in sorted(state)]  # `load` orders otherwise
    for tensor in [*model.state_dict().values(), *states]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(local.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def soak(plan: Plan, folder: Path) -> Found:
    """Run a plan to its end, starting the job again whenever a rank was killed.

    Raises:
        AssertionError: when a rank ends otherwise, or does not end after another was killed.
    """
    folder.mkdir(exist_ok=True)
    dice, found, context = random.Random(plan.seed), Found(), forks()
    kills = sorted(dice.sample(range(1, plan.steps), plan.kills))
    with context.Manager() as manager:
        lists = manager.list(), manager.list()
        shared = _Shared(context.Value("i", 0), *lists, manager.dict(), manager.dict())
        for rank in range(WORLD):
            shared.full[rank] = 0
        while not shared.digests:
            found.starts += 1
            del shared.resident[:], shared.allocated[:]
            store = folder / f"store-{found.starts}"
            args = (plan, folder / "run", store, shared)
            ranks = [context.Process(target=train, args=(rank, *args)) for rank in range(WORLD)]
            for process in ranks:
                process.start()
            if kills:
                kill_one(ranks, kills.pop(0), shared.reached, dice)
                path = latest(folder / "run")
                found.repeated += shared.reached.value - (int(path.name[5:]) if path else 0)
                continue
            for process in ranks:
                process.join()
            assert [process.exitcode for process in ranks] == [0] * WORLD
        found.digests = [shared.digests[rank] for rank in range(WORLD)]
        found.resident, found.allocated = list(shared.resident), list(shared.allocated)
        found.full = shared.full[0]
    return found


@dataclass
class _Shared:
    """What ranks tell the process that started them."""

    reached: Any  # the last step of rank 0
    resident: Any
    allocated: Any
    digests: Any
    full: Any


def kill_one(ranks: list[Any], step: int, reached: Any, dice: random.Random) -> None:
    """Kill a rank at a random moment after a step; the others notice, and end."""
    while reached.value < step:
        assert all(process.is_alive() for process in ranks), "a rank ended by itself"
        time.sleep(0.002)
    time.sleep(dice.uniform(0.0, 0.1))
    os.kill(dice.choice(ranks).pid, signal.SIGKILL)
    for process in ranks:
        process.join(ENDS_WITHIN_S)
        assert not process.is_alive(), "a rank waits for one that is gone"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    quiet = Plan(steps=args.steps, device=args.device)
    found = []
    for plan in (quiet, replace(quiet, kills=args.kills, full_disks=True)):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            one = soak(plan, Path(folder))
        found.append(one)
        late, on_gpu = (x[len(x) // 10 :] for x in (one.resident, one.allocated))
        print(
            f"{plan.steps} steps, {plan.kills} kills: {one.starts} starts, {one.repeated} steps "
            f"repeated, {one.full} saves without room, {time.perf_counter() - began:.0f} s; "
            f"resident {late[0] / 2**20:.1f} to {late[-1] / 2**20:.1f} MiB, "
            f"on a GPU {on_gpu[0]} to {on_gpu[-1]} bytes",
            flush=True,
        )
    return int(found[0].digests != found[1].digests)


if __name__ == "__main__":
    sys.exit(main())
