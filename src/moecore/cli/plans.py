"""The options of `moecore plan`, `dry-run`, `measure`, `doctor` and `report`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

from moecore.base.options.names import (
    GpuName,
    MomentDtype,
    PlannedDispatcher,
    PrecisionName,
    PresetName,
    ScheduleName,
    Strategy,
)

DENSE, EXPERT = ("pp", "dp_replicate", "dp_shard", "cp", "tp"), ("edp_replicate", "edp_shard")


DEGREES: tuple[str, ...] = (*DENSE, *EXPERT, "ep", "etp")  # as `ParallelConfig` has them


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run_of_options`."""
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--preset", choices=get_args(PresetName), help="the model")
    help = "its Hugging Face config.json, or the directory: of any family that moecore trains"
    model.add_argument("--config", type=Path, help=help)
    add("--gpus", type=int, required=True, help="ranks of the world")
    gpu = parser.add_mutually_exclusive_group()
    gpu.add_argument("--gpu", default="h100-80", choices=get_args(GpuName), help="their kind")
    help = "their kind as TOML: fields of moecore.planning.Gpu, and like = a name to take others of"
    gpu.add_argument("--gpu-spec", type=Path, metavar="FILE", help=help)
    add("--seq-len", type=int, default=4096, help="tokens of a row")
    help = "rows of a data rank's micro-batch; with degrees; default: 1"
    add("--batch-size", type=int, help=help)
    add("--micro-batches", type=int, help="of a step, on a data rank; with degrees; default: 1")
    for name in DEGREES:
        add(f"--{name.replace('_', '-')}", type=int, help="degree; default: search")
    add("--layout", help='pipeline stages, such as "Et*3|(tt|)*29m|L"')
    add("--chunks", type=int, help="pipeline stages of a rank; not with --layout")
    add("--schedule", choices=get_args(ScheduleName), help="of pipeline stages; default: 1f1b")
    strategies = get_args(Strategy)
    help = "ZeRO of blocks; with degrees; default: optim_grads_params"
    add("--dense-strategy", choices=strategies, help=help)
    add("--fp8-param-gather", action="store_true", help="gather weights of blockwise FP8 as FP8")
    help = "how tokens travel between NVLink domains; with degrees; default: auto, in one level"
    add("--dispatcher", choices=get_args(PlannedDispatcher), help=help)
    add("--fp8-dispatch", action="store_true", help="tokens travel as FP8; with degrees")
    add("--experts-strategy", choices=strategies, help="of experts; default: as blocks")
    precisions = (*get_args(PrecisionName), "bf16")
    add("--precision", choices=precisions, help="default: bf16, or in a search as needed")
    add("--recompute", nargs="+", default=(), help="parts, as of MemoryOptions")
    add("--offload", nargs="+", default=(), help="parts, likewise")
    add("--moments", default="float32", choices=get_args(MomentDtype), help="dtype of AdamW's")
    add("--stash", action="store_true", help="experts' rows in pages, with dispatcher nvlink")
    help = "capacity of dispatcher nvlink over even loads; default: 2.0 within nodes"
    add("--row-factor", type=float, help=help)
    add("--master-remainder", action="store_true", help="bf16 weights, see moecore.train.AdamW")
    add("--state-offload", type=float, default=0.0, help="fraction of AdamW's state in host memory")


PLAN_EXAMPLE = """\
examples:
  moecore plan --preset deepseek-v3 --gpus 256 --gpu h100-80
  moecore plan --preset deepseek-v3 --gpus 256 --gpu h100-80 --explain pp=8,ep=8
  moecore plan --preset deepseek-v3 --gpus 256 --gpu h100-80 --pp 8 --tp 2 --ep 32 \\
    --schedule interleaved --chunks 4 --micro-batches 128 --dense-strategy optim \\
    --precision blockwise --fp8-param-gather --moments bfloat16 --recompute gemm_last \\
    --offload attention experts mlp"""


def add_plan(rooms: Any) -> None:
    """Add the command to those of `moecore`."""
    parser = rooms.add_parser(
        "plan",
        description="Without degrees: foldings that fit, best first. With degrees: bytes by kind "
        "for each pipeline rank and the most at once, from the plan and the step that the run has.",
        epilog=PLAN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run="planning.commands:run_plan")
    add_run_options(parser)
    add = parser.add_argument
    add("--global-batch", type=int, help="rows of a step; without degrees; default: 8 per GPU")
    add("--gpus-per-node", type=int, help="within NVLink; without degrees; default: the GPU's")
    add("--top", type=int, help="foldings to print, of four times as many plans; default: 3")
    add("--explain", metavar="PP=8,EP=8", help="why this folding is refused, or what it needs")
    add("--call", action="store_true", help="print the Python of the run, or of the best one")
    help = "write the TOML of the run, or of the best one, for moecore pretrain"
    add("--write", type=Path, metavar="FILE", help=help)
    add("--png", type=Path, metavar="FILE", help="write bars of its memory")
    add("--timeline", type=Path, metavar="FILE", help="write a PNG of its pipeline's step")
    add("--html", type=Path, metavar="FILE", help="write a page of its memory, time and stages")
    add("--table", type=Path, metavar="FILE", help="costs that `moecore measure` has written")
    help = "share of exchanges between nodes that overlapped stages hide; default: 0.93"
    add("--pairs-hide", type=float, help=help)
    add("--json", action="store_true", help="print one JSON object")


DRY_RUN_EXAMPLE = """\
example:
  moecore dry-run --rank 37 --preset deepseek-v3 --gpus 2048 --pp 16 --ep 64 \\
    --schedule 1f1b --micro-batches 4 --precision blockwise --recompute moe"""


def add_dry_run(rooms: Any) -> None:
    """Add the command to those of `moecore`."""
    parser = rooms.add_parser(
        "dry-run",
        description="Runs the host's code of a training step of one rank, without its GPU and "
        "without the other ranks. Loads are balanced. Other ranks answer at once.",
        epilog=DRY_RUN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run="planning.commands:run_dry_run")
    parser.add_argument("--rank", type=int, default=0, help="of the world")
    add_run_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_measure(rooms: Any) -> None:
    """Add the command to those of `moecore`."""
    parser = rooms.add_parser(
        "measure",
        description="Times products, attention, copies and kernels of rows on this GPU, under "
        "torchrun collectives too, and writes them as a table of costs.",
    )
    parser.set_defaults(run="planning.measure:run_measure")
    parser.add_argument("--out", type=Path, default=Path("table.json"), help="what to write")


DOCTOR_EXAMPLE = """\
example, on every host of a job as it will train:
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
      -m moecore doctor --checkpoints /shared/runs"""


def add_doctor(rooms: Any) -> None:
    """Add the command to those of `moecore`."""
    parser = rooms.add_parser(
        "doctor",
        description="Compares versions, environment and clocks of all ranks; looks at limits, "
        "memory, disks and peer access of their hosts; and measures their links.",
        epilog=DOCTOR_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run="parallel.doctor:run_doctor")
    help = "directory that all ranks write, which is tried; default: none"
    parser.add_argument("--checkpoints", type=Path, help=help)
    help = "seconds that ranks wait for each other; default: 60"
    parser.add_argument("--timeout", type=int, default=60, help=help)


REPORT_EXAMPLE = """\
example, for a trace of rank 0 that prof.export_chrome_trace("trace.json.gz") has written:
  moecore report trace.json.gz --steps 3"""


def add_report(rooms: Any) -> None:
    """Add the command to those of `moecore`."""
    parser = rooms.add_parser(
        "report",
        description="Reads a Chrome trace of torch.profiler: what bounds the step, which "
        "communication nothing hides, why the GPU is idle, and the options that may win most.",
        epilog=REPORT_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run="planning.commands:run_report")
    parser.add_argument("trace", type=Path, help=".json or .json.gz, of one rank")
    parser.add_argument(
        "--steps", type=int, help="that it holds; default: as profile.step() has marked, else 1"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
