r"""Compares the bits of runs with and without --deterministic, and measures the cost of the option.

    python -m benchmarks.determinism --results benchmarks/results/determinism
    python -m benchmarks.determinism --cases compiled dense auto --ranks 2
    CUDA_VISIBLE_DEVICES= python -m benchmarks.determinism --size tiny --cases bf16 --blocks 0

A case is a model and its options (`make_activation_options`); its runs are processes that execute a
rank of `moecore train` or `moecore finetune`. With --ranks the command's launcher starts the ranks.
The runs of a case:

    first, again      with the option, from the same options
    resumed           with the option, killed by SIGKILL after a checkpoint and started again
    plain, plain 2    without the option

All runs but the second start of "resumed" are concurrent on the same GPU. "again" and "resumed" are
compared with "first", and "plain 2" with "plain": losses and gradient norms of all steps, and after
the last step the SHA-256 of each parameter, buffer and optimizer state.

Afterwards one process trains the model of each native case in blocks of steps, alternately with and
without the option. A step's time is that from the end of the step before it to its own, on the
device. Both kinds of block run with the option's environment. On one GPU this leaves NCCL out.

The compared native models have 228 M parameters. Times are those of four layers with all 128
experts of Qwen3-30B-A3B, 2.5 B parameters. Tokens are bytes of the Python installation's sources.
The case "finetune" needs transformers, tokenizers and jinja2.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bench_train import free_memory
from benchmarks.records import append_rows, results_path
from moecore.base.torch_private import get_local_tensor
from moecore.models.size import num_params
from moecore.planning.options import Sharding
from moecore.recipes import finetune, loop, tiny_model, train
from moecore.recipes.corpus_training import get_dispatcher_name
from moecore.recipes.finetune import FinetuneConfig
from moecore.recipes.generate import SampleOptions
from moecore.recipes.launch import exit_rank, launch
from moecore.recipes.metrics import LoggerOptions
from moecore.recipes.optimizer import OptimizerConfig
from moecore.recipes.process import use_deterministic_algorithms
from moecore.recipes.train import TrainConfig

Row = dict[str, Any]
FINETUNE = "finetune"
CASES: dict[str, dict[str, Any]] = {  # options of `moecore train`
    "bf16": {},
    "blockwise": {"precision": "blockwise"},
    FINETUNE: {},
    "auto": {"precision": "auto"},
    "dense": {"tokens": "random"},  # attention without documents
    "compiled": {"sharding": Sharding(compile_dense=True)},
    "graph": {"cuda_graph": True},
}
DEFAULT_CASES = ("bf16", "blockwise", FINETUNE)
STEPS = {"full": 30, "tiny": 6}
NATIVE: dict[str, dict[str, Any]] = {
    "full": {
        "preset": "qwen3-30b-a3b",
        "model": {"num_layers": 4, "vocab_size": 256},
        "moe": {"num_experts": 8, "top_k": 2},
        "batch_size": 4,
        "seq_len": 4096,
    },
    "tiny": {"preset": "tiny", "model": {"num_layers": 2}, "batch_size": 1, "seq_len": 64},
}
STOCK: dict[str, dict[str, int]] = {  # fields of Qwen3MoeConfig
    "full": {
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_intermediate_size": 512,
        "num_experts": 16,
    },
    "tiny": {},
}
TIMES = "times"  # name of the runs that measure, whose model has all experts of its preset
WARM_UP, TIMED = 3, 10  # steps of a block
WORKERS = 6
DIGESTS = "digests.json"
ONE_RANK = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A training run, which is passed to another process as JSON.

    Attributes:
        case: see `CASES`.
        size: "full" or "tiny".
        folder: of the run and of the model of `finetune`.
        name: of the run.
        ranks: number of ranks.
        deterministic: whether the run has the option.
        kill_at: step after which each rank kills itself; 0 = none.
    """

    case: str
    size: str
    folder: str
    name: str
    ranks: int = 1
    deterministic: bool = True
    kill_at: int = 0

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return Path(self.folder, self.case, self.name.replace(" ", "-"))


def make_activation_options(run: Run) -> TrainConfig | FinetuneConfig:
    """Return the command-line options of a run."""
    steps = STEPS[run.size]
    options: dict[str, Any] = {
        "run_dir": run.run_dir,
        "deterministic": run.deterministic,
        # Saves change no bits, and take gigabytes.
        "checkpoint_every": steps // 3 if run.name in ("first", "resumed") else 0,
        "logging": LoggerOptions(),
    }
    if run.case == FINETUNE:
        model = Path(run.folder, "model")
        return FinetuneConfig(
            model=model,
            data=(model / tiny_model.CHATS,),
            max_steps=steps,
            seq_len=1024 if run.size == "full" else 64,
            batch_size=4,
            eval_every=0,
            optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0),
            **options,
        )
    native = NATIVE[run.size] | CASES[run.case]
    if run.name == TIMES:
        native.pop("moe", None)
    optimizer = OptimizerConfig(lr=3e-4)
    return TrainConfig(
        steps=steps, samples=SampleOptions(), optimizer=optimizer, **native, **options
    )


def import_recipe(run: Run) -> ModuleType:
    """Return the module of the run's recipe."""
    return finetune if run.case == FINETUNE else train


def run_rank(run: Run) -> int:
    """Train as one rank, and write the digests of all state after the last step."""
    jobs: list[Any] = []

    def build_job(args: Any) -> Any:
        jobs.append(import_recipe(run).build_job(args))
        return jobs[-1]

    if run.kill_at:
        loop.collect_garbage = lambda step: kill_rank(run, step)  # called at the end of each step
    code = loop.run(make_activation_options(run), build_job)
    if code == 0:
        digests = dict(compute_digests(jobs[-1]))
        rank = dist.get_rank()
        (run.run_dir / f"{rank}-{DIGESTS}").write_text(json.dumps(digests))
        dist.barrier()
    return code


def kill_rank(run: Run, step: int) -> None:
    """Kill this process after a step; the checkpoint before it is complete."""
    if step == run.kill_at:
        while not (run.run_dir / "checkpoints" / "latest").exists():
            time.sleep(0.01)  # it is written in the background
        os.kill(os.getpid(), signal.SIGKILL)


def compute_digests(job: Any) -> Iterator[tuple[str, str]]:
    """Yield the name of each local tensor of model and optimizers and its SHA-256."""
    tensors = dict(job.model.named_parameters()) | dict(job.model.named_buffers())
    for number, optimizer in enumerate(job.optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer {number} {index} {name}": x for name, x in state.items()}
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor):
            flat = get_local_tensor(x.detach()).contiguous().flatten().view(torch.uint8)
            yield name, hashlib.sha256(flat.cpu().numpy().data).hexdigest()


def start(run: Run) -> None:
    """Run in a new process and wait for it.

    Raises:
        RuntimeError: if the process ends differently than expected.
    """
    here = ONE_RANK if run.ranks == 1 else {}
    command = [sys.executable, "-m", "benchmarks.determinism", "--run", json.dumps(asdict(run))]
    done = subprocess.run(command, env=os.environ | here, capture_output=True, text=True)
    if (done.returncode == 0) == bool(run.kill_at):
        raise RuntimeError(f"{run}: code {done.returncode}: {done.stdout}{done.stderr}")


def read_trace(run: Run) -> dict[str, Any]:
    """Return the values by which two runs are compared, by name."""
    found: dict[str, Any] = {}
    for line in map(json.loads, (run.run_dir / "metrics.jsonl").read_text().splitlines()):
        found |= {f"{name} {line['step']:04d}": line[name] for name in ("loss", "grad_norm")}
    for file in sorted(run.run_dir.glob(f"*-{DIGESTS}")):
        found |= {f"{file.name}: {k}": v for k, v in json.loads(file.read_text()).items()}
    return found


def compare_runs(run: Run, with_run: Run) -> Row:
    """Return a row with the values in which two runs differ."""
    ours, theirs = read_trace(run), read_trace(with_run)
    assert ours.keys() == theirs.keys(), (ours.keys() ^ theirs.keys(), run)
    losses = [name for name in ours if name.startswith("loss ")]
    state = [name for name in ours if DIGESTS in name]
    assert len(losses) == STEPS[run.size] and state, run
    differing = [name for name in ours if ours[name] != theirs[name]]
    return {
        "op": "determinism",
        "case": run.case,
        "run": run.name,
        "compared_with": with_run.name,
        "deterministic": run.deterministic,
        "steps": len(losses),
        "differing_losses": sum(name in losses for name in differing),
        "first_difference": min(
            (int(n.split()[1]) for n in differing if n in losses), default=None
        ),
        "tensors": len(state),
        "differing_tensors": sum(name in state for name in differing),
        "last_loss": ours[losses[-1]],
        "last_loss_of_other": theirs[losses[-1]],
    }


def compare(cases: list[str], base: Run) -> Iterator[Row]:
    """Run each case, and yield the rows of its comparisons."""
    kill_at = STEPS[base.size] // 3 + 2
    runs = {
        case: [
            replace(base, case=case, name="first"),
            replace(base, case=case, name="again"),
            replace(base, case=case, name="resumed", kill_at=kill_at),
            replace(base, case=case, name="plain", deterministic=False),
            replace(base, case=case, name="plain 2", deterministic=False),
        ]
        for case in cases
    }
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(start, [run for of_case in runs.values() for run in of_case]))
        killed = [replace(of_case[2], kill_at=0) for of_case in runs.values()]
        list(pool.map(start, killed))
    for first, again, resumed, plain, plain_2 in runs.values():
        for run, other in ((again, first), (resumed, first), (plain_2, plain)):
            yield compare_runs(run, other)


def time_steps(run: Run, blocks: int) -> Row:
    """Return a row of step times with and without the option, of a single rank."""
    use_deterministic_algorithms()
    job = train.build_job(make_activation_options(run))
    times: dict[bool, list[float]] = {True: [], False: []}
    step = 0
    for block in range(2 * blocks):
        mode = block % 2 == 0
        torch.use_deterministic_algorithms(mode)
        launched = []
        for _ in range(WARM_UP + TIMED):
            step += 1
            launched.append(loop.train_step(job, step))
        launched[-1].read_metrics()  # waits
        pairs = pairwise(done.ended for done in launched[WARM_UP - 1 :])
        times[mode] += [before.seconds_until(end) * 1e3 for before, end in pairs]
    slow, fast = (statistics.median(times[mode]) for mode in (True, False))
    row = {
        "op": "determinism_cost",
        "case": run.case,
        "parameters": num_params(job.model.config),
        "tokens_per_step": job.shape.rows * job.shape.seq_len,
        "dispatcher": get_dispatcher_name(job.model),
        "blocks": blocks,
        "deterministic_ms": slow,
        "step_ms": fast,
        "cost": slow / fast - 1,
        "deterministic_range_ms": [min(times[True]), max(times[True])],
        "step_range_ms": [min(times[False]), max(times[False])],
    }
    job.close()
    return row


def parse_arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=DEFAULT_CASES)
    add("--size", choices=STEPS, default="full")
    add("--ranks", type=int, default=1, help="of each compared run")
    add("--blocks", type=int, default=4, help="of timed steps with the option; 0 = no times")
    add("--results", type=results_path, help="folder for the record")
    add("--run", help=argparse.SUPPRESS)
    add("--times", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_times(cases: list[str], base: Run, blocks: int) -> list[Row]:
    """Return the rows of step times, measured in a separate process."""
    runs = [asdict(replace(base, case=c, name=TIMES)) for c in cases if c != FINETUNE]
    words = ["-m", "benchmarks.determinism", "--times", json.dumps(runs), "--blocks", str(blocks)]
    done = subprocess.run(
        [sys.executable, *words], env=os.environ | ONE_RANK, stdout=subprocess.PIPE, text=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(rows) != len(runs):
        raise RuntimeError(f"times: code {done.returncode}: {done.stdout}")
    return rows


def run_child(args: argparse.Namespace) -> None:
    """Run what `start` or `run_times` has started this process for."""
    if args.run:
        run = Run(**json.loads(args.run))
        exit_rank(run_rank(run) if run.ranks == 1 else launch(run_rank, run, run.ranks))
    for values in json.loads(args.times):
        print(json.dumps(time_steps(Run(**values), args.blocks)), flush=True)
        free_memory()
    exit_rank(0)


def main() -> int:
    """Compare, measure, print and record; return 1 if runs with the option differ."""
    args = parse_arguments()
    if args.run or args.times:
        run_child(args)
    folder = Path(tempfile.mkdtemp(prefix="determinism-"))
    rows: list[Row] = []
    try:
        if FINETUNE in args.cases:
            tiny_model.write_tiny_model(folder / "model", **STOCK[args.size])
        base = Run(case="", size=args.size, folder=str(folder), name="", ranks=args.ranks)
        rows += compare(args.cases, base)
        if args.blocks:
            rows += run_times(args.cases, base, args.blocks)
    finally:
        shutil.rmtree(folder)
    for row in rows:
        print(", ".join(f"{k} {v:.6g}" if type(v) is float else f"{k} {v}" for k, v in row.items()))
    if args.results:
        append_rows(args.results, "benchmarks.determinism", rows, num_gpus=args.ranks)
    return int(any(row.get("deterministic") and row["differing_tensors"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
