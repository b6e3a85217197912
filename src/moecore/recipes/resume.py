"""From where a run goes on: the last whole checkpoint in its directory."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.distributed.checkpoint.stateful import Stateful

from moecore.base.progress import show_progress
from moecore.io import latest, load
from moecore.io.checkpoint.directory import CHECKPOINTS
from moecore.io.checkpoint.manifest import read_manifest
from moecore.io.checkpoint.ranks import on_first_rank
from moecore.models import Decoder
from moecore.recipes.options import RunConfig
from moecore.recipes.rotary import with_rotary
from moecore.recipes.stages import TrainingStage
from moecore.train.step import TrainStep

KEPT_CHECKPOINTS = 2


def resume(
    args: RunConfig,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
    facts: Mapping[str, object],
    owner: TrainStep | None = None,
    sampler: Stateful | None = None,
    stage: TrainingStage | None = None,
    chosen_by: str = "--data",
) -> int:
    """Load the newest checkpoint of the run and return how many steps it has done; 0 = none.

    Args:
        args: of the run.
        model: to fill.
        optimizer: to fill.
        facts: name -> what the run that saved must have had in common with this one, or it would
            go on with other data, or at another place in it; a checkpoint has them.
        owner: of the steps, which goes on with the loss scale of the checkpoint.
        sampler: of the data, which goes on behind the checkpoint's, its `extra["data"]`.
        stage: of the run; a checkpoint of the stage before it may have other data and positions of
            rotary embedding. Data that are the same continue.
        chosen_by: the options that rows depend on.

    Raises:
        ValueError: for a checkpoint of another script, for a fact or data that differ, and where a
            loss scale is wanted, for a checkpoint without.
    """
    # On one rank: a slow file system may show another one, or none, to another rank.
    newest = on_first_rank(lambda: latest(checkpoint_dir(args)))
    if newest is None:
        return 0
    saved_facts = on_first_rank(lambda: read_manifest(newest).facts)
    begins_stage = stage is not None and stage.begins_at(
        saved_facts.step, saved_facts.extra.get("stage")
    )
    with (
        rotary_of(saved_facts.config, model) if begins_stage else nullcontext(),
        show_progress(f"loading {newest.name}", unit="B") as report,
    ):
        extra = load(newest, model, optimizer, progress=report)
    if not {"step", *facts} <= extra.keys():
        raise ValueError(f"--run-dir ({newest}) must be this script's: use another one")
    for name, value in facts.items():
        if value != extra[name]:
            raise ValueError(
                f"{name} ({value}) must be {extra[name]} as in {newest}, which this run would "
                "continue: use that, or another --run-dir"
            )
    if owner is not None:
        owner.load_state_dict(extra)
    if sampler is not None:
        try:
            sampler.load_state_dict(extra.get("data", {}))
        except ValueError as error:
            if begins_stage:  # with data or rows of another length, which begin at the beginning
                return int(extra["step"])
            raise ValueError(
                f"{chosen_by} must be as in {newest}, which this run would continue ({error}): use "
                "those, or another --run-dir"
            ) from None
    return int(extra["step"])


@contextmanager
def rotary_of(values: Mapping[str, object] | None, model: torch.nn.Module) -> Iterator[None]:
    """Give a decoder the rotary embedding of a saved config while it loads, which compares it."""
    if values is None or not isinstance(model, Decoder):
        yield
        return
    config = model.config
    model.config = with_rotary(config, values)
    try:
        yield
    finally:
        model.config = config


def latest_step(args: RunConfig) -> int:
    """Return the step of the newest checkpoint of a run; 0 = it has none."""
    newest = latest(checkpoint_dir(args))
    return 0 if newest is None else read_manifest(newest).facts.step


def continuation(args: RunConfig) -> str:
    """Return from where the same command would go on, for the user who has stopped a run."""
    try:
        newest = latest(checkpoint_dir(args))
    except (OSError, ValueError) as error:
        return str(error)
    if newest is None:
        return f"there is no checkpoint yet, so {command_line()} starts from the beginning"
    return f"{command_line()} continues from {newest}"


def command_line() -> str:
    """Return the command of this process as a shell reads it."""
    program, *words = sys.argv
    is_moecore = program.endswith(("moecore", "moecore/__main__.py")) and words
    return shlex.join(["moecore", *words]) if is_moecore else "the same command"


def checkpoint_dir(args: RunConfig) -> Path:
    """Return the directory of the checkpoints of a run."""
    return Path(args.run_dir, CHECKPOINTS)
