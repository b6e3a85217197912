"""Runs a card: the run of a published figure, defined by a file in `benchmarks/cards`.

    make card CARD=qwen3-30b-a3b-1gpu
    python -m benchmarks.card moonlight-16b-a3b-2gpus --record

It runs 50 steps of `benchmarks.bench_train` under torchrun, the last ten timed, and prints the
result with the figures in the card: those published by others for the same model, and those
measured here before. `--record` adds the result to the card, with GPU, versions, commit and day.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.gate import ROOT
from benchmarks.records import TRIALS

CARDS = ROOT / "benchmarks" / "cards"
WARM_UP, TIMED = 40, 10  # steps: losses of the first and the last are the card's
FIGURES = {
    "tokens_per_second_per_gpu": "tokens/s/GPU",
    "tflops_per_gpu": "TFLOP/s/GPU",
    "step_ms": "step, ms",
    "peak_gib": "peak, GiB",
    "loss_step_1": "loss, step 1",
    "loss_step_50": "loss, step 50",
}
Card = dict[str, Any]


def main() -> int:
    """Run a card, print its result, and optionally record it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("card", choices=sorted(path.stem for path in CARDS.glob("*.toml")))
    parser.add_argument("--record", action="store_true", help="add what was found to the card")
    args = parser.parse_args()
    path = CARDS / f"{args.card}.toml"
    card = tomllib.loads(path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        trial = {} if args.record else {TRIALS: folder}
        typed = format_command(card, folder)
        code = subprocess.run(typed, cwd=ROOT, env=os.environ | trial, check=False).returncode
        if code:
            return code
        (line,) = (
            text for file in Path(folder).glob("*") for text in file.read_text().split("\n")[:-1]
        )
    found = select_fields(json.loads(line))
    print("\n".join(table(card, found)))
    if args.record:
        path.write_text(path.read_text() + "\n".join(["", "[[measured]]", *format_toml(found), ""]))
    return 0


def format_command(card: Card, folder: str) -> list[str]:
    """Return the command of a card, which writes its row into `folder`."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    steps = ["--warm-up", str(WARM_UP), "--timed", str(TIMED), "--results", folder]
    of_ranks = ["--nproc-per-node", str(card["gpus"]), "-m", "benchmarks.bench_train"]
    return [*start, *of_ranks, *shlex.split(card["arguments"]), *steps]


def select_fields(row: dict[str, Any]) -> Card:
    """Return the fields of a row of `bench_train` that a card records."""
    losses = row["losses"]
    found = row | {"loss_step_1": losses[0], "loss_step_50": losses[-1], "day": row["date"][:10]}
    return {name: found[name] for name in ("gpu", "day", "commit", "torch", "triton", *FIGURES)}


def table(card: Card, found: Card) -> list[str]:
    """Return the new result, earlier results and published figures as a Markdown table."""
    rows = [("found", found)]
    rows += [(f"{r['gpu']}, {r['day']}, {r['commit']}", r) for r in card.get("measured", ())]
    rows += [(f"published: {r['who']}", r) for r in card.get("published", ())]
    head = [f"{card['what']}; routing: {card['routing']}", ""]
    head += [f"| | {' | '.join(FIGURES.values())} |", "|---" * (len(FIGURES) + 1) + "|"]
    return [
        *head,
        *(
            f"| {who} | {' | '.join(_format_number(r.get(n)) for n in FIGURES)} |"
            for who, r in rows
        ),
    ]


def format_toml(found: Card) -> list[str]:
    """Return the result as TOML."""
    shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}
    return [f"{name} = {json.dumps(value)}" for name, value in shown.items() if value is not None]


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
