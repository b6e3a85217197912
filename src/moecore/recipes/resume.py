"""A run's checkpoints, continuing from the newest one, and options that changed since the start.

Checkpoints are in a directory or at a URL, and in the memory of the run's hosts. The file
`memory-id` in the directory of the checkpoints names the checkpoints in memory. Without this file,
such as in a new directory or after `set_latest`, a run begins without checkpoints in memory.
"""

import shlex
import sys
import tomllib
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from moecore.base.progress import show_progress
from moecore.base.torch_private import patch_attributes
from moecore.io import Saver, connect_host_memory, latest, load
from moecore.io.checkpoint.comparison import STRICT_HINT
from moecore.io.checkpoint.directory import CHECKPOINTS, MEMORY_ID, parse_step
from moecore.io.checkpoint.files import read_regular_file
from moecore.io.checkpoint.host_memory import SCHEME, find_complete
from moecore.io.checkpoint.manifest import read_manifest
from moecore.io.checkpoint.object_storage import AnyPath, RemotePath, make_path
from moecore.io.checkpoint.ranks import run_on_first_rank
from moecore.models import Decoder
from moecore.planning.options import DEGREES
from moecore.recipes.decoder_config import replace_rotary
from moecore.recipes.files import name_option_in_errors
from moecore.recipes.moves import ExpertMoves
from moecore.recipes.options import RunConfig
from moecore.recipes.parser import flatten_tables, read_toml
from moecore.recipes.report import CONFIG
from moecore.recipes.schedule import TrainingStage
from moecore.train.step import TrainStep


def get_checkpoint_dir(args: RunConfig) -> AnyPath:
    """Return the path of a run's checkpoints; ValueError for a URL that fsspec does not open."""
    with name_option_in_errors("--checkpoint-dir"):
        return make_path(args.checkpoint_dir or args.run_dir / CHECKPOINTS)


def connect_memory(args: RunConfig) -> AnyPath | None:
    """Return the root of the run's checkpoints in host memory; None = disabled. Collective."""
    if not args.memory_checkpoint_every:
        return None
    connect_host_memory()
    path = get_checkpoint_dir(args) / MEMORY_ID

    def read_or_create_id() -> str:
        with suppress(FileNotFoundError):
            return read_regular_file(path, max_bytes=32).decode("ascii")
        new_id = uuid.uuid4().hex
        if isinstance(path, RemotePath):
            path.write(new_id.encode())
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(new_id)
        return new_id

    return make_path(f"{SCHEME}://{run_on_first_rank(read_or_create_id)}")


def find_newest_checkpoint(args: RunConfig) -> AnyPath | None:
    """Return the newest checkpoint of a run, in memory or in its directory. Collective.

    Older and incomplete checkpoints in memory are deleted, so the run can save their steps again.
    """
    memory = connect_memory(args)

    def find() -> AnyPath | None:
        newest = latest(get_checkpoint_dir(args))
        in_memory = None if memory is None else find_complete(memory)
        if in_memory is not None and (newest is None or _get_step(in_memory) >= _get_step(newest)):
            return in_memory
        if isinstance(memory, RemotePath):
            memory.remove_all()
        return newest

    # On one rank: a slow file system may show another one, or none, to another rank.
    return run_on_first_rank(find)


def read_latest_step(args: RunConfig) -> int:
    """Return the step of a run's newest checkpoint; 0 = no checkpoint. Collective."""
    newest = find_newest_checkpoint(args)
    return 0 if newest is None else _get_step(newest)


def _get_step(path: AnyPath) -> int:
    """Return the step that a checkpoint's directory is named after."""
    step = parse_step(path)
    assert step is not None, "latest returns paths of steps"
    return step


def open_memory_saver(args: RunConfig, job: Any) -> AbstractContextManager[Saver | None]:
    """Return a context with the `Saver` of checkpoints in host memory; None = off. Collective."""
    memory = connect_memory(args)
    if memory is None:
        return nullcontext()
    return Saver(memory, job.model, job.optimizers, keep=1, config=job.config)


def clear_memory(args: RunConfig) -> None:
    """Delete the checkpoints in memory of a run that has finished. Collective."""
    memory = connect_memory(args)
    if isinstance(memory, RemotePath):
        run_on_first_rank(memory.remove_all)


def resume(
    args: RunConfig,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    facts: Mapping[str, object],
    owner: TrainStep,
    moves: ExpertMoves,
    sampler: Stateful,
    *,
    stage: TrainingStage,
    chosen_by: str,
) -> int:
    """Load a run's newest checkpoint, if any; return its step, or 0 without one. Collective.

    Raises ValueError unless the checkpoint's facts equal `facts` and the data is the same.
    `chosen_by` names, for errors, the options that determine the data. If the checkpoint ends the
    stage before `stage`, the data and the rotary embedding may differ. The hyperparameters of
    `optimizers` do not change.
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
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    hyperparameters = [{k: v for k, v in group.items() if k != "params"} for group in groups]
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
    for group, values in zip(groups, hyperparameters, strict=True):
        group.update(values)  # of this run, whose options may differ from those of the checkpoint
    owner.load_state_dict(extra)
    moves.load_state_dict(extra)
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
