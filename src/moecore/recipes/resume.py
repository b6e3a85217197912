"""Continuing a run from its newest checkpoint, and changes of its options since the last start."""

from __future__ import annotations

import shlex
import sys
import tomllib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from moecore.base.progress import show_progress
from moecore.base.torch_private import patch_attributes
from moecore.io import latest, load
from moecore.io.checkpoint.comparison import STRICT_HINT
from moecore.io.checkpoint.manifest import read_manifest
from moecore.io.checkpoint.ranks import run_on_first_rank
from moecore.models import Decoder
from moecore.planning.options import DEGREES
from moecore.recipes.checkpoints import find_newest_checkpoint, get_checkpoint_dir
from moecore.recipes.decoder_config import replace_rotary
from moecore.recipes.options import RunConfig
from moecore.recipes.parser import flatten_tables, read_toml
from moecore.recipes.report import CONFIG
from moecore.recipes.schedule import TrainingStage
from moecore.train.step import TrainStep


def resume(
    args: RunConfig,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    facts: Mapping[str, object],
    owner: TrainStep,
    sampler: Stateful,
    *,
    stage: TrainingStage,
    chosen_by: str,
) -> int:
    """Load a run's newest checkpoint, if any; return its step, or 0 without one. Collective.

    Raises ValueError unless the checkpoint's facts equal `facts` and the data is the same.
    `chosen_by` names, for errors, the options that determine the data. If the checkpoint ends the
    stage before `stage`, the data and the rotary embedding may differ.
    """
    newest = find_newest_checkpoint(args)
    if newest is None:
        return 0
    saved_facts = run_on_first_rank(lambda: read_manifest(newest).facts)
    if not {"step", *facts} <= saved_facts.extra.keys():
        raise ValueError(f"--run-dir ({newest}) must be this script's: use another one")
    for name, value in facts.items():
        if value != saved_facts.extra[name]:
            raise ValueError(
                f"{name} ({value}) must be {saved_facts.extra[name]} as in {newest}, which this "
                "run would continue: use that, or another --run-dir"
            )
    saved_stage = saved_facts.extra.get("stage")
    begins_stage = stage.is_previous_stage(saved_facts.step, saved_stage)
    rotary: AbstractContextManager[None] = nullcontext()
    if begins_stage and saved_facts.config is not None and isinstance(model, Decoder):
        rotary = patch_attributes(model, config=replace_rotary(model.config, saved_facts.config))
    with (
        rotary,  # of the stage before, which the checkpoint has
        show_progress(f"loading {newest.name}", unit="B") as report,
    ):
        try:
            extra = load(newest, model, optimizers, progress=report)
        except ValueError as error:
            text = str(error).removesuffix(STRICT_HINT)  # no flag sets strict
            raise ValueError(f"{text}, or use another --run-dir") from None
    owner.load_state_dict(extra)
    try:
        sampler.load_state_dict(extra.get("data", {}))
    except ValueError as error:
        if not begins_stage:  # else with data or rows of another length, from the beginning
            raise ValueError(
                f"{chosen_by} must be as in {newest}, which this run would continue ({error}): use "
                "those, or another --run-dir"
            ) from None
    return int(extra["step"])


def describe_continuation(args: RunConfig) -> str:
    """Return a sentence that names the checkpoint from which a restart would continue."""
    try:
        newest = latest(get_checkpoint_dir(args))
    except (OSError, ValueError) as error:
        return str(error)
    if newest is None:
        return f"there is no checkpoint yet, so {format_command_line()} starts from the beginning"
    return f"{format_command_line()} continues from {newest}"


def format_command_line() -> str:
    """Return this process's `moecore` command for a shell, or "the same command"."""
    program, *words = sys.argv
    is_moecore = program.endswith(("moecore", "moecore/__main__.py")) and words
    return shlex.join(["moecore", *words]) if is_moecore else "the same command"


# Keys and tables that change no numbers, except that a layout has other sums in another order.
LAYOUT = {*DEGREES, "parallel", "ranks", "layout", "pipeline"}
SAME_NUMBERS = LAYOUT | {
    *("run_dir", "checkpoint_dir", "checkpoint_every", "memory_checkpoint_every"),
    *("expert_loads_every", "profile", "sdc_check"),
    *("peak_tflops", "logging", "plain_host", "workers", "samples", "hang_timeout"),
    *("memory", "recompute", "offload", "offload_fraction"),
}


def print_option_changes(args: RunConfig, toml: str) -> None:
    """Print the options in `toml` whose values have changed since the last start. Collective."""
    path = args.run_dir / CONFIG

    def compare() -> None:
        if not path.exists() or latest(get_checkpoint_dir(args)) is None:
            return
        try:
            lines = list_option_changes(read_toml(path, "--run-dir"), tomllib.loads(toml))
        except ValueError as error:
            lines = [f"changes since the last start are unknown: {error}"]
        for line in lines:
            print(line, flush=True)

    run_on_first_rank(compare)


def save_config(args: RunConfig, toml: str) -> None:
    """Write a run's options to RUN_DIR/config.toml. Collective."""
    run_on_first_rank(lambda: (args.run_dir / CONFIG).write_text(toml, errors="surrogateescape"))


def list_option_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return a line for each key whose value differs between two contents of config.toml."""
    old, new = (dict(flatten_tables(name_stage_tables(content))) for content in (before, after))
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r} ({describe_option_effect(key)})"
        for key in old | new
        if old.get(key) != new.get(key)
    ]


def name_stage_tables(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.toml's content with "stages.NAME" tables in place of its list of stages."""
    stages = {f"stages.{stage['name']}": stage for stage in content.get("stages", [])}
    return {name: value for name, value in content.items() if name != "stages"} | stages


def describe_option_effect(key: str) -> str:
    """Return text: whether a changed option `key` changes the numerics of a run."""
    table, _, field = key.rpartition(".")
    name = field.replace("-", "_") if table.startswith("stages.") else table or field
    if name not in SAME_NUMBERS:
        return "changes the numbers"
    note = " if a step has as many rows" if name in LAYOUT else ""
    return f"does not change the numbers{note}"
