"""From where a run goes on: the last whole checkpoint in its directory."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from report import CHECKPOINTS

from moecore.checkpoint import latest, load
from moecore.checkpoint.ranks import on_first_rank

KEPT_CHECKPOINTS = 2


def resume(
    args: argparse.Namespace, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Load the newest checkpoint of the run and return how many steps it has done; 0 = none."""
    # On one rank: a slow file system may show another one, or none, to another rank.
    newest = on_first_rank(lambda: latest(checkpoint_dir(args)))
    if newest is None:
        return 0
    extra = load(newest, model, optimizer)
    if not {"step", "seed"} <= extra.keys():
        raise ValueError(f"--run-dir ({newest}) must be this script's: use another one")
    if extra["seed"] != args.seed:
        raise ValueError(
            f"--seed ({args.seed}) must be {extra['seed']} as in {newest}, because the data "
            "position depends on it: use that seed or another --run-dir"
        )
    return extra["step"]


def checkpoint_dir(args: argparse.Namespace) -> Path:
    return args.run_dir / CHECKPOINTS
