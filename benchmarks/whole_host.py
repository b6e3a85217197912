"""Runs on a whole host, in calls of at most ten minutes: checks first, then measurements.

    python -m benchmarks.whole_host qwen3 --out runs/qwen3           # 8 GPUs
    python -m benchmarks.whole_host tensor --gpus 2 --out runs/tensor
    python -m benchmarks.whole_host qwen3 --gpus 2 --tiny --out x    # sizes for CPU ranks
    python -m benchmarks.whole_host --predict                        # the table of plans

`--only` selects runs by name. A run that fails or exceeds its time does not end the call. The
output of each run is OUT/<number>-<name>.txt; records are in OUT/records.
results/planning/whole-host.txt has the predictions of `moecore plan` for the steps, made before
their first run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gate import ROOT

LIMIT = 600  # seconds of a call
STEP = (
    "-m benchmarks.bench_train --compile-dense --dense-strategy optim "
    "--experts-strategy optim_grads_params --seq-len 4096 --moment-dtype bfloat16 "
    "--dispatcher nvlink --warm-up 8 --timed 8 --results {records}"
)
GRAPH = "--cuda-graph"
EVEN = "--tokens random --routing balanced --row-factor 1.5"
FRESH = "--lr 3e-4 --schedule-steps 40000"  # 2,000 steps of warm-up
QUANTILE = (
    "--expert-bias --score-function sigmoid --bias-update quantile --bias-update-rate 1 "
    "--bias-per-micro-batch"
)
KINDS = {  # of routing: even by force, or what a router has learned in 16 steps
    "even": f"{EVEN} {GRAPH}",
    "eager": EVEN,
    "natural": f"{FRESH} {GRAPH} --row-factor 2 --tokens random",
    "text": f"{FRESH} {GRAPH} --row-factor 3",  # a busier rank would capture in a timed step
    "quantile": f"{FRESH} {GRAPH} --row-factor 2 {QUANTILE}",
}
PACKED = "--fp8-dispatch"
FP8 = f"--precision blockwise {PACKED}"
PRECISIONS = {"bf16": "", "fp8": FP8, "head": f"{FP8} --fp8-head"}
FORCED = ("even-bf16", "even-fp8", "even-head", "eager-bf16", "eager-fp8")
LEARNED = ("natural-bf16", "natural-head", "text-bf16", "text-head", "quantile-bf16")
TINY_STEP = (
    "-m benchmarks.bench_train --preset tiny --seq-len 32 --batch-size 2 --warm-up 1 --timed 2 "
    "--results {records}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A command of one call.

    Attributes:
        name: of its output.
        command: module and arguments for torchrun on each GPU, or after "!" a command.
        seconds: its time limit.
        tiny: the same in sizes for CPU ranks; None = it needs GPUs.
        ranks: number of GPUs; None = all.
    """

    name: str
    command: str
    seconds: int
    tiny: str | None = None
    ranks: int | None = None


def make_step(name: str, arguments: str, seconds: int = 90, tiny: str = "") -> Run:
    return Run(
        name=name, command=f"{STEP} {arguments}", seconds=seconds, tiny=f"{TINY_STEP} {tiny}"
    )


def make_steps(preset: str, rows: int, kinds: Iterable[str]) -> tuple[Run, ...]:
    """Return steps of a whole model over all GPUs."""
    runs = []
    for name in kinds:
        kind, _, precision = name.partition("-")
        more = PRECISIONS[precision]
        arguments = f"--preset {preset} --ep {{gpus}} --batch-size {rows} {KINDS[kind]} {more}"
        runs.append(make_step(name, arguments, 115, f"--ep {{gpus}} {more.replace(PACKED, '')}"))
    return tuple(runs)


def make_scaled_step(ranks: int) -> Run:
    """Return a step of 6 layers on some of the GPUs."""
    ep = f"--ep {ranks}" if ranks > 1 else "--dispatcher auto"
    arguments = f"--preset qwen3-30b-a3b --num-layers 6 --batch-size 4 {EVEN} {GRAPH} {ep}"
    return replace(make_step(f"{ranks}-ranks", arguments, 60, f"--ep {ranks}"), ranks=ranks)


def make_torchtitan_run(variant: str, rows: int) -> Run:
    """Return a run in torchtitan, installed by `pip install '.[titan]' 'torch<2.14'`."""
    command = f"-m benchmarks.bench_torchtitan --variant {variant}"
    is_stock = variant == "stock"  # gloo has no sum that its FSDP2 takes
    return Run(
        name=f"{variant}-{rows}",
        command=f"{command} --batch-size {rows} --results {{records}}",
        seconds=150,
        tiny=None if is_stock else f"{command} --tiny --layers 2 --batch-size 1 --seq-len 32",
    )


def make_staged_steps(ranks: int) -> Iterator[Run]:
    """Yield steps of pipeline stages over some of the GPUs, each schedule against data ranks."""
    one = f"Ett|{'tt|' * (ranks - 2)}tL"
    two = f"Et|{'t|' * (2 * ranks - 2)}L"
    for layout, schedules in (
        (one, ("gpipe", "1f1b", "zero-bubble")),
        (two, ("interleaved", "overlapped", "zbv", "dualpipe-v")),
    ):
        for schedule in schedules:
            kind = f"--layouts {shlex.quote(layout)} --schedules {schedule}"
            command = f"-m benchmarks.bench_pipeline --layers {2 * ranks - 1} {kind}"
            yield Run(
                name=f"{schedule}-of-{ranks}-ranks",
                command=f"{command} --results {{records}}",
                seconds=80,
                tiny=f"{command} --preset tiny --seq-len 16 --micro-batches 8 --turns 1 --steps 1",
                ranks=ranks,
            )


HF = "-m benchmarks.bench_hf --batch-size 1 --variants transformers moecore moecore+loss+auto"
LORA = "-m benchmarks.bench_lora --results {records}"
TINY_HF = "--preset tiny-qwen3 --layers 2 --batch-size 1 --seq-len 32 --warm-up 1 --timed 1"
PARITY = "!{python} -m pytest -q -m gpu tests/test_parity.py -k '{gpus}r or 2r'"
PAIRS = "-m benchmarks.bench_pairs --ep {gpus} --batch-sizes 1 2 --layers 6 --results {records}"
CALLS: dict[str, tuple[Run, ...]] = {
    "qwen3": make_steps("qwen3-30b-a3b", 2, FORCED),
    "qwen3-learned": make_steps("qwen3-30b-a3b", 2, LEARNED),
    "qwen3-batch-3": make_steps("qwen3-30b-a3b", 3, FORCED),
    "qwen3-batch-4": make_steps("qwen3-30b-a3b", 4, FORCED),
    "moonlight": make_steps("moonlight-16b-a3b", 4, FORCED),
    "moonlight-learned": make_steps("moonlight-16b-a3b", 4, LEARNED),
    "finetune": (
        Run(
            name="transformers",
            command=f"{HF} --results {{records}}",
            seconds=240,
            tiny=f"-m benchmarks.bench_hf {TINY_HF} --variants moecore",
        ),
        Run(name="lora", command=f"{LORA} --batch-size 2", seconds=120, tiny=f"{LORA} {TINY_HF}"),
        Run(
            name="lora-fp8",
            command=f"{LORA} --batch-size 2 --precision blockwise --fp8-base",
            seconds=120,
        ),
    ),
    "torchtitan": tuple(
        make_torchtitan_run(*case) for case in (("stock", 2), ("layers", 4), ("decoder", 4))
    ),
    "pairs": (Run(name="pairs", command=PAIRS, seconds=300),),
    "pipelines-2": tuple(make_staged_steps(2)),
    "pipelines-4": tuple(make_staged_steps(4)),
    "dispatch": (
        Run(
            name="dispatch",
            command="-m benchmarks.bench_dispatch --fp8-dispatch --out {records}",
            seconds=580,
        ),
    ),
    "context": (
        Run(
            name="attention",
            command="-m benchmarks.bench_context_parallel --part attention "
            "--tokens 65536 262144 --seconds 6 --results {records}",
            seconds=300,
        ),
        Run(
            name="step",
            command="-m benchmarks.bench_context_parallel --part step --tokens 65536 131072 "
            "--results {records}",
            seconds=280,
        ),
    ),
    "tensor": (
        Run(
            name="tensor",
            command="-m benchmarks.bench_tp --results {records}",
            seconds=300,
            tiny="-m benchmarks.bench_tp --layers tiny --seq-lens 64 --batch-sizes 1 --warm-up 1 "
            "--steps 1 --rounds 1",
        ),
    ),
    "foldings": (Run(name="parity", command=PARITY, seconds=590),),
    "scaling": (make_scaled_step(1), make_scaled_step(2), make_scaled_step(4), make_scaled_step(8)),
}
PLANS = (  # preset, options of a plan; of every GPU that is lent
    ("qwen3-30b-a3b", "--batch-size 2"),
    ("qwen3-30b-a3b", "--batch-size 4"),
    ("qwen3-30b-a3b", "--batch-size 2 --precision blockwise --fp8-dispatch"),
    ("qwen3-30b-a3b", "--batch-size 4 --precision blockwise --fp8-dispatch"),
    ("moonlight-16b-a3b", "--batch-size 4"),
    ("moonlight-16b-a3b", "--batch-size 4 --precision blockwise --fp8-dispatch"),
)
PLAN = (
    "--ep {gpus} --gpus {gpus} --row-factor 1.5 --dense-strategy optim "
    "--experts-strategy optim_grads_params --moments bfloat16"
)


def main() -> int:
    """Run a call, or print the predictions."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("call", nargs="?", choices=CALLS)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="sizes for CPU ranks")
    parser.add_argument("--out", type=Path, help="folder of outputs and records")
    parser.add_argument("--only", nargs="+", help="names of runs, such as 4-ranks; default: all")
    parser.add_argument("--predict", action="store_true", help="print what plans say of the steps")
    args = parser.parse_args()
    if args.predict:
        return predict(args.gpus)
    if args.call is None or args.out is None:
        parser.error("a call and --out must be given")
    (args.out / "records").mkdir(parents=True, exist_ok=True)
    runs = {run.name: run for run in CALLS[args.call]}
    if unknown := set(args.only or ()) - set(runs):
        parser.error(f"--only {' '.join(sorted(unknown))}: {args.call} has {' '.join(runs)}")
    codes = []
    for number, (name, run) in enumerate(runs.items()):
        if args.only and name not in args.only:
            continue
        typed = make_command(run, args.gpus, args.out / "records", tiny=args.tiny)
        if typed is not None:
            codes.append(start(typed, run, args.out / f"{number}-{run.name}.txt"))
    return max(codes, default=0)


def make_command(run: Run, gpus: int, records: Path, *, tiny: bool) -> list[str] | None:
    """Return the command of a run; None = no tiny variant, or too few GPUs."""
    command = run.tiny if tiny else run.command
    if command is None or (run.ranks or gpus) > gpus:
        return None
    command = command.format(gpus=gpus, records=records, python=sys.executable)
    if command.startswith("!"):
        return shlex.split(command[1:])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(run.ranks or gpus), *shlex.split(command)]


def start(typed: list[str], run: Run, output: Path) -> int:
    """Run a command within its time limit; return its exit code, or 124 after a timeout."""
    began = time.monotonic()
    with output.open("w") as file:
        file.write(shlex.join(typed) + "\n")
        file.flush()
        ended = subprocess.Popen(
            typed,
            cwd=ROOT,
            env={"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = ended.wait(run.seconds)
        except subprocess.TimeoutExpired:
            ended.terminate()  # torchrun ends its ranks, which have sessions of their own
            try:
                ended.wait(40)
            except subprocess.TimeoutExpired:
                os.killpg(ended.pid, signal.SIGKILL)
                ended.wait()
            code = 124
    print(f"{run.name}: {code} in {time.monotonic() - began:.0f} s, see {output}", flush=True)
    return code


def predict(gpus: int) -> int:
    """Print a line for each step that a plan supports."""
    for gpu in ("h200-141", "h100-80"):
        for preset, options in PLANS:
            typed = [sys.executable, "-m", "moecore", "plan", "--preset", preset, "--gpu", gpu]
            typed += shlex.split(f"{PLAN.format(gpus=gpus)} {options}")
            found = subprocess.run(typed, cwd=ROOT, capture_output=True, text=True, check=False)
            lines = found.stdout.splitlines()
            told = [x for x in lines if "at once:" in x or "tokens/s" in x]
            print(f"{gpu} {preset} {options}: {'; '.join(told) or found.stderr.strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
