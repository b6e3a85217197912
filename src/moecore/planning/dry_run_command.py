"""`moecore dry-run`: what one rank of a world that is not there holds and does in a step."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import asdict
from typing import Any

from moecore.base.tables import columns, shown_bytes
from moecore.planning.command import add_run_options, run_of_options
from moecore.planning.costs import CostTable
from moecore.planning.dry_run import DryRun, dry_run
from moecore.planning.gpus import GPUS
from moecore.planning.on_gpu import run_on_gpu
from moecore.planning.peak import plan_peak
from moecore.planning.step_time import time_step

EXAMPLE = """\
example:
  moecore dry-run --rank 37 --preset deepseek-v3 --gpus 2048 --pp 16 --ep 64 \\
    --schedule 1f1b --micro-batches 4 --precision blockwise --recompute moe"""


def add_dry_run(rooms: Any) -> None:
    """Add the command to those of `moecore`."""
    parser = rooms.add_parser(
        "dry-run",
        help="what one rank of a world that is not there holds and does in a step",
        description="Runs the host's code of a training step of one rank, without its GPU and "
        "without the other ranks. Loads are balanced. Other ranks answer at once.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_dry_run)
    parser.add_argument("--rank", type=int, default=0, help="of the world")
    add_run_options(parser)
    parser.add_argument("--on-gpu", action="store_true", help="run its steps on this GPU as well")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_dry_run(args: Any) -> int:
    """Print what a rank holds and does; 1 where it does not fit."""
    run, memory = run_of_options(args), GPUS[args.gpu].memory
    real = run_on_gpu(run, args.rank) if args.on_gpu else None
    found = dry_run(run, args.rank)
    plan = plan_peak(run)[args.rank * run.resolved.pp // run.num_gpus]
    table, fits = CostTable.of(args.gpu), found.peak + found.buffers <= memory
    rows, time = _rows(found, table), time_step(found, table)
    if args.json:
        sizes = {"held": found.held, "peak": found.peak, "buffers": found.buffers}
        sizes |= {"plan": plan, "memory": memory}
        whole = {"rank": found.rank, "gpu": args.gpu, **sizes, "fits": fits}
        whole |= {"seconds": time.seconds, "parts": time.parts, "works": rows}
        print(json.dumps(whole | ({} if real is None else {"on_gpu": asdict(real)})))
        return 0 if fits else 1
    print(f"rank {found.rank} of {args.gpus} holds {shown_bytes(found.held)} between steps")
    most = shown_bytes(found.peak + found.buffers)
    at_most = f"{most} at most in a step, of {shown_bytes(memory)} ({args.gpu})"
    print(f"{at_most}{'' if fits else ': does not fit'}")
    print(f"{shown_bytes(plan)} by the plan, from few layers")
    if real is not None:
        held, peak = shown_bytes(real.held), shown_bytes(real.peak)
        alone = f"{real.seconds * 1e3:.1f} ms a step without communication"
        print(f"on this GPU: {held} between steps, {peak} at most, {alone}")
    parts = [f"{part} {s * 1e3:.1f}" for part, s in time.parts.items() if s > 1e-4]
    print(f"{time.seconds * 1e3:.1f} ms a step, of which ms by what limits: {', '.join(parts)}")
    lines: list[tuple[str, ...]] = [("what runs", "times", "TFLOP", "GB moved", "ms alone")]
    for kind, (times, flops, moved, seconds) in rows.items():
        sums = (f"{flops / 1e12:.1f}", f"{moved / 1e9:.1f}", f"{seconds * 1e3:.1f}")
        lines.append((kind, f"{times:.0f}", *sums))
    print("\n".join(columns(lines)))
    return 0 if fits else 1


def _rows(found: DryRun, table: CostTable) -> dict[str, list[float]]:
    """Return by kind: how many, FLOP, bytes, seconds."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    for part, works in (("", found.forward_backward), ("optimizer", found.optimizer)):
        for work in works:
            numbers = (1, work.flops, work.num_bytes, table.seconds(work))
            row = sums[part or work.kind]
            row[:] = (a + b for a, b in zip(row, numbers, strict=True))
    return dict(sums)
