"""Kills ranks of trainings that continue from storage, from host memory, or by other replicas.

    python -m benchmarks.kills --results benchmarks/results/kills
    python -m benchmarks.kills --ways replicas --replicas 3 --steps 8000 --every 20 60
    python -m benchmarks.kills --steps 100 --every 20 30 --ways storage memory
    python -m benchmarks.kills --at-once            on a machine with 16 cores

With the default of 1,500 steps, "storage" and "memory" each have about 7 kills. Each restart costs
20 to 30 seconds, nearly all for imports in five processes. All ways need about 20 minutes.
A random rank is killed by SIGKILL at a random moment, each time after `--every` more steps:

    undisturbed   `moecore pretrain` on four CPU ranks, no kills
    storage       the same command, started again after a kill; a checkpoint every 50 steps
    memory        the same with a checkpoint in host memory every 10 steps, in storage every 1,000
    replicas      `Replicas` of two CPU ranks each; after a kill only the ranks of its replica start
                  again, while the others continue (needs torchft)

The model has two layers of the preset "tiny" ("tiny-shared" for replicas). The losses and the last
checkpoint of "storage" and "memory" must have the bits of "undisturbed". All replicas of a step
must have the same bits. One process repeats all steps of the replicas. Its gradient norms must
agree to 1e-9, and its losses to the last bit of fp32. Replicas and this process train in fp64: in
fp32, training amplifies the roundings of the first steps to 1e-3 in 3,000 steps. The fields of a
row:

    lost_steps        steps that were computed again, or attempts of replicas that were repeated
    restart_s         mean seconds from a kill to the first step of the ranks that start again
    longest_pause_s   longest time without a new step after the first one
    goodput           share of the wall time, from the first start, spent in steps that count
    full_steps        steps of all replicas
    timeouts          replicas that have ended by an error, and were started again as well
    difference        largest relative difference of a loss, or of a norm for replicas, from the
                      other run
    differences       the same for each tenth of the steps of replicas
    loss_difference   largest relative difference of a loss of replicas, which are rounded to fp32
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import safetensors
import torch
from tests.integrations.torchft_runs import NUM_RANKS, Replica, lighthouse, lines_of, repeat_steps

from benchmarks.records import append_rows, results_path
from moecore.io.checkpoint.host_memory import HOST_VARIABLE

RANKS = 4
COMMAND = (
    f"pretrain --preset tiny --num-layers 2 --data python: --ranks {RANKS} --batch-size 1 "
    "--seq-len 32 --workers 0 --sample-every 0"
)
OPTIONS = {
    "undisturbed": "--checkpoint-every 1000",
    "storage": "--checkpoint-every 50",
    "memory": "--checkpoint-every 1000 --memory-checkpoint-every 10",
}
AWAY_STEPS = (5, 20)  # from a kill to the start of a new replica
# Largest values of a row. Losses are rounded to fp32, whose spacing is at most 2**-23 of a value.
BOUNDS = {
    "difference": 1e-9,
    "loss_difference": 2**-23,
    "differing_losses": 0,
    "differing_tensors": 0,
}
PATIENCE_S = 300.0  # without a new step, or until ranks end
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run's steps, the fewest and most steps between kills, and the seed of all choices.

    Attributes:
        timeout_s: seconds after which a replica that does not answer has left.
    """

    steps: int
    every: tuple[int, int]
    num_replicas: int
    timeout_s: float
    seed: int

    def list_kills(self, dice: random.Random) -> list[int]:
        """Return the steps after which a rank is killed."""
        kills, step = list[int](), 0
        while (step := step + dice.randint(*self.every)) < self.steps - 10:
            kills.append(step)
        return kills


def read_last(path: Path, key: str) -> Any:
    """Return a field of the last complete line of a file of JSON lines, or 0 without a line."""
    text = path.read_bytes() if path.exists() else b""
    end = text.rfind(b"\n")
    return 0 if end < 0 else json.loads(text[text.rfind(b"\n", 0, end) + 1 : end])[key]


def wait_for(count: Callable[[], int], least: int = 1) -> None:
    """Wait until a count is reached; RuntimeError if it stays the same for too long."""
    value, end = count(), time.monotonic() + PATIENCE_S
    while value < least:
        time.sleep(0.05)
        if (new_value := count()) != value:
            value, end = new_value, time.monotonic() + PATIENCE_S
        elif time.monotonic() > end:
            raise RuntimeError(f"no progress from {value} to {least}")


def has_ended(session: int) -> bool:
    """Return whether all processes of a session have ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            state, _, _, number = path.read_text().rpartition(")")[2].split()[:4]
            if int(number) == session and state != "Z":
                return False
    return True


def list_ranks(launcher: int) -> list[int]:
    """Return the ranks that a command has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(n) for n in children if b"spawn_main" in Path(f"/proc/{n}/cmdline").read_bytes()]


def run_command(way: str, plan: Plan, run_dir: Path) -> Row:
    """Train with the command, which starts again after each kill; return the figures of the run."""
    dice = random.Random(plan.seed)
    kills = [] if way == "undisturbed" else plan.list_kills(dice)
    words = [*f"{COMMAND} {OPTIONS[way]} --steps {plan.steps}".split(), "--run-dir", str(run_dir)]
    host = f"kills-{os.getpid()}-{way}"
    env = os.environ | {HOST_VARIABLE: host, "CUDA_VISIBLE_DEVICES": ""}
    # A start consists of imports in five processes, which compile all modules without a cache.
    env |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(run_dir.parent / "bytecode")}
    metrics, log = run_dir / "metrics.jsonl", run_dir.with_suffix(".txt")
    restarts, num_lost, last, killed = list[float](), 0, 0, 0.0
    began = time.monotonic()
    for index, kill in enumerate([*kills, plan.steps]):
        with log.open("w") as file:
            launcher = subprocess.Popen(
                [sys.executable, "-m", "moecore", *words],
                **dict(env=env, stdout=file, stderr=file, start_new_session=True),
            )
        wait_for(partial(read_first_step, log))
        if index:
            restarts.append(time.monotonic() - killed)
            num_lost += last + 1 - read_first_step(log)
        wait_for(partial(read_last, metrics, "step"), kill)
        if is_killed := index < len(kills):
            time.sleep(dice.uniform(0.0, 0.5))
            ranks = list_ranks(launcher.pid)
            assert len(ranks) == RANKS, log.read_text()
            os.kill(dice.choice(ranks), signal.SIGKILL)
            killed = time.monotonic()
        code = launcher.wait(PATIENCE_S)
        assert (code != 0) == is_killed, log.read_text()
        last = read_last(metrics, "step")
        wait_for(partial(has_ended, launcher.pid))
    shutil.rmtree(f"/dev/shm/moecore-{os.getuid()}-{host}", ignore_errors=True)  # ends its server
    return {
        "minutes": (time.monotonic() - began) / 60,
        "kills": len(kills),
        "lost_steps": num_lost,
        "restart_s": sum(restarts) / max(1, len(restarts)),
        "longest_pause_s": max(restarts, default=0.0),
        "goodput": read_last(metrics, "goodput"),
    }


def read_first_step(log: Path) -> int:
    """Return the first step that a start of the command has printed, or 0."""
    step = re.search(r"^step (\d+) of", log.read_text(), re.MULTILINE)
    return int(step[1]) if step else 0


def compare_commands(run_dir: Path, undisturbed: Path) -> Row:
    """Return how the losses and the last checkpoint of two runs of the command differ."""
    losses, other_losses = (
        [line["loss"] for line in lines_of(path / "metrics.jsonl")]
        for path in (run_dir, undisturbed)
    )
    tensors, other_tensors = (
        read_tensors(path / f"checkpoints/step-{len(losses):06}") for path in (run_dir, undisturbed)
    )
    pairs = list(zip(losses, other_losses, strict=True))
    names = tensors.keys() | other_tensors.keys()
    return {
        "difference": max(abs(loss - other) / other for loss, other in pairs),
        "differing_losses": sum(loss != other for loss, other in pairs),
        "differing_tensors": sum(tensors.get(x) != other_tensors.get(x) for x in names),
    }


def read_tensors(checkpoint: Path) -> dict[str, list[bytes]]:
    """Return the bytes of a checkpoint's tensors: one block per rank, or one replica."""
    tensors = defaultdict[str, list[bytes]](list)
    for path in sorted(checkpoint.glob("*.safetensors")):
        for name, content in safetensors.deserialize(path.read_bytes()):
            tensors[name].append(bytes(content["data"]))
    return tensors


def run_replicas(plan: Plan, folder: Path) -> Row:
    """Train with replicas that start again after each kill; return the figures of the run."""
    dice, began = random.Random(plan.seed), time.time()
    kills, restarts = plan.list_kills(dice), list[float]()
    with lighthouse() as address, ExitStack() as ends:
        replicas, alive = list[Replica](), list[Replica]()

        def start() -> None:
            replica = Replica(len(replicas), folder, address, -1, 0, plan.timeout_s)
            ends.callback(replica.stop)
            replicas.append(replica)
            alive.append(replica)

        def read_step() -> int:
            """Return the newest step; start replicas again that a timeout has ended."""
            for replica in alive.copy():
                if any(rank.exitcode for rank in replica.ranks):
                    alive.remove(replica)
                    replica.stop()
                    start()
            return read_newest_step(alive)

        def count_first_steps() -> int:
            """Return the fewest steps that a replica has made since its start."""
            read_step()
            return min(replica.steps for replica in alive)

        for _ in range(plan.num_replicas):
            start()
        wait_for(count_first_steps)
        for kill in kills:
            wait_for(read_step, kill)
            victim = alive.pop(dice.randrange(len(alive)))
            time.sleep(dice.uniform(0.0, 0.5))
            dice.choice(victim.ranks).kill()
            killed = time.time()
            time.sleep(dice.uniform(0.0, 0.5))
            victim.stop()  # as torchrun does when a rank has died
            wait_for(read_step, kill + dice.randint(*AWAY_STEPS))
            start()
            wait_for(count_first_steps)
            restarts.append(lines_of(alive[-1].logs[0])[0]["ended"] - killed)
        last = max(plan.steps, read_newest_step(alive) + 30)
        (folder / "draft").write_text(str(last))
        (folder / "draft").rename(folder / "stop")
        wait_for(partial(read_newest_step, alive), last - 1)
        for rank in [rank for replica in alive for rank in replica.ranks]:
            rank.join(PATIENCE_S)
            assert rank.exitcode == 0, rank
    logs = [log for replica in replicas for log in replica.logs]
    rows = [row for log in logs for row in lines_of(log)]
    figures = compare_replicas(rows, plan.num_replicas, began)
    figures["timeouts"] = len(replicas) - plan.num_replicas - len(kills)
    return {"kills": len(kills), "restart_s": sum(restarts) / max(1, len(restarts)), **figures}


def read_newest_step(replicas: list[Replica]) -> int:
    """Return the number of the newest step of replicas, from 0."""
    logs = [replica.logs[0] for replica in replicas]
    return max(max(read_last(log, "place") or [0]) for log in logs)


def compare_replicas(rows: list[Row], num_replicas: int, began: float) -> Row:
    """Return the figures of replicas, of which one process repeats all steps; check their bits."""
    steps, bits = defaultdict[int, list[Row]](list), defaultdict[Any, set[Any]](set)
    for row in rows:
        (step, _, size), rank = row["place"], row["rank"]
        if "norm" in row:
            steps[step].append(row)
            bits[step, rank].add((row["digest"], row["norm"], size))
            bits["chosen"].add(row["chosen"] / size)
    assert sorted(steps) == list(range(len(steps))), "a step is missing"
    assert all(len(values) == 1 for values in bits.values()), "replicas differ"
    sizes = [steps[step][0]["place"][2] for step in range(len(steps))]
    differences, loss_differences = list[float](), list[float]()
    for step, made in enumerate(repeat_steps(sizes)):
        norm, losses = steps[step][0]["norm"], made.losses
        differences.append(abs(norm - made.norm) / made.norm)
        for row in steps[step]:
            loss = losses[row["place"][1] * NUM_RANKS + row["rank"]]
            loss_differences.append(abs(row["loss"] - loss) / loss)
    ends = [min(row["ended"] for row in steps[step]) for step in range(len(steps))]
    seconds = sum(min(row["seconds"] for row in rows) for rows in steps.values())
    tenth = -(-len(steps) // 10)
    return {
        "minutes": (ends[-1] - began) / 60,
        "steps": len(steps),
        "lost_steps": len({(*row["place"][::2],) for row in rows if "norm" not in row}),
        "longest_pause_s": max(after - before for before, after in pairwise(ends)),
        "goodput": seconds / (ends[-1] - began),
        "full_steps": sizes.count(num_replicas),
        "difference": max(differences),
        "differences": [max(differences[i : i + tenth]) for i in range(0, len(steps), tenth)],
        "loss_difference": max(loss_differences),
    }


def count_problems(row: Row) -> int:
    """Return how many fields of a row exceed their bounds."""
    return sum(row.get(key, 0) > bound for key, bound in BOUNDS.items())


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    ways = ("undisturbed", "storage", "memory", "replicas")
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    parser.add_argument("--at-once", action="store_true", help="all ways at the same time")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=int, nargs=2, default=(100, 300), metavar=("MIN", "MAX"))
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=20.0, help="of replicas, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=results_path, help="a folder, or a .jsonl file, for rows")
    return parser.parse_args()


def run_way(way: str, plan: Plan, run_dir: Path) -> Row:
    """Train in one way; return its row, in which commands are not compared."""
    run_dir.mkdir()
    min_every, max_every = plan.every
    row: Row = {"way": way, "steps": plan.steps, "min_every": min_every, "max_every": max_every}
    if way != "replicas":
        return row | run_command(way, plan, run_dir)
    torch.set_num_threads(1)  # of this thread
    row |= {"replicas": plan.num_replicas, "timeout_s": plan.timeout_s}
    return row | run_replicas(plan, run_dir)


def main() -> int:
    """Run all ways, print and record their rows; return 1 if a loss differs."""
    args, problems = parse_arguments(), 0
    os.environ.setdefault("RUST_LOG", "error")  # torchft logs every step otherwise
    plan = Plan(
        steps=args.steps,
        every=(args.every[0], args.every[1]),
        num_replicas=args.replicas,
        timeout_s=args.timeout,
        seed=args.seed,
    )
    commands = [way for way in args.ways if way in OPTIONS]
    ways = dict.fromkeys([*["undisturbed"] * bool(commands), *args.ways])
    with (
        tempfile.TemporaryDirectory(prefix="kills-") as folder,
        ThreadPoolExecutor(len(ways) if args.at_once else 1) as pool,
    ):
        rows = {way: pool.submit(run_way, way, plan, Path(folder) / way) for way in ways}
        for way, future in rows.items():
            row = future.result()
            if way != "replicas":
                row |= compare_commands(Path(folder) / way, Path(folder) / "undisturbed")
            problems += count_problems(row)
            print(
                ", ".join(
                    f"{k} {v:.4g}" if type(v) is float else f"{k} {v}" for k, v in row.items()
                ),
                flush=True,
            )
            if args.results:
                append_rows(args.results, "benchmarks.kills", [row])
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
