"""`moecore report`: where a step's time went on one rank's GPU, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moecore.base.fields import UsageError
from moecore.planning.report import report_trace

EXAMPLE = """\
example, for a trace of rank 0 that prof.export_chrome_trace("trace.json.gz") has written:
  moecore report trace.json.gz --steps 3"""


def add_report(rooms: Any) -> None:
    """Add the command to those of `moecore`."""
    parser = rooms.add_parser(
        "report",
        help="where a step's time went on one rank's GPU, and what to try next",
        description="Reads a Chrome trace of torch.profiler: what bounds the step, which "
        "communication nothing hides, why the GPU is idle, and the options that may win most.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_report)
    parser.add_argument("trace", type=Path, help=".json or .json.gz, of one rank")
    parser.add_argument(
        "--steps", type=int, help="that it holds; default: as profile.step() has marked, else 1"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_report(args: Any) -> int:
    """Print the report."""
    try:
        found = report_trace(args.trace, num_steps=args.steps)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if args.json:
        facts = {"limit": found.limit, "limits": found.limits, "wall": found.breakdown.wall}
        print(json.dumps(facts | asdict(found)))
    else:
        print(found.table())
    return 0
