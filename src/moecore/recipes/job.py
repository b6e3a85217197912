"""`TrainingJob`: model, data, loss and results of one rank's part of a run."""

from __future__ import annotations

import shlex
import sys
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from moecore.base.progress import show_progress
from moecore.io import latest, load
from moecore.io.checkpoint.directory import CHECKPOINTS
from moecore.io.checkpoint.manifest import read_manifest
from moecore.io.checkpoint.ranks import run_on_first_rank
from moecore.models import Decoder
from moecore.parallel.mesh import Meshes
from moecore.recipes.data import BatchShape
from moecore.recipes.decoder_config import replace_rotary
from moecore.recipes.errors import SAVES_MEMORY
from moecore.recipes.metrics import Metrics, find_peak_tflops
from moecore.recipes.options import DEGREES, RunConfig
from moecore.recipes.parser import flatten, read_toml, to_toml
from moecore.recipes.report import CONFIG
from moecore.recipes.schedule import StepSizes, TrainingStage, plan_stage
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
    """Load a run's newest checkpoint into model and optimizer; return its step, 0 = no checkpoint.

    The call is collective. If the checkpoint is of the stage before `stage`, the data and the
    rotary embedding may differ.

    Args:
        facts: values that must equal the checkpoint's values.
        owner, sampler: objects whose state is loaded too.
        chosen_by: names of the options that determine the rows, for errors.

    Raises:
        ValueError: for a checkpoint of another run.
    """
    # On one rank: a slow file system may show another one, or none, to another rank.
    newest = run_on_first_rank(lambda: latest(get_checkpoint_dir(args)))
    if newest is None:
        return 0
    saved_facts = run_on_first_rank(lambda: read_manifest(newest).facts)
    begins_stage = stage is not None and stage.is_previous_stage(
        saved_facts.step, saved_facts.extra.get("stage")
    )
    with (
        use_rotary(saved_facts.config, model) if begins_stage else nullcontext(),
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
def use_rotary(values: Mapping[str, object] | None, model: torch.nn.Module) -> Iterator[None]:
    """Return a context in which a `Decoder` has the rotary embedding of config `values`, if any."""
    if values is None or not isinstance(model, Decoder):
        yield
        return
    config = model.config
    model.config = replace_rotary(config, values)
    try:
        yield
    finally:
        model.config = config


def read_latest_step(args: RunConfig) -> int:
    """Return the step of a run's newest checkpoint; 0 = no checkpoint."""
    newest = latest(get_checkpoint_dir(args))
    return 0 if newest is None else read_manifest(newest).facts.step


def describe_continuation(args: RunConfig) -> str:
    """Return a sentence that names the checkpoint from which the same command would continue."""
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


def get_checkpoint_dir(args: RunConfig) -> Path:
    """Return the directory of a run's checkpoints."""
    return Path(args.run_dir, CHECKPOINTS)


# Keys and tables that change no numbers, except that a layout has other sums in another order.
LAYOUT = {*DEGREES, "parallel", "ranks", "layout", "pipeline"}
SAME_NUMBERS = LAYOUT | {
    *("run_dir", "checkpoint_every", "expert_loads_every", "profile", "peak_tflops", "logging"),
    *("plain_host", "workers", "samples"),
    *("memory", "recompute", "offload", "offload_fraction"),
}


def print_changes(args: RunConfig, toml: str) -> None:
    """Print the options in `toml` whose values have changed since the last start. Collective."""
    path = args.run_dir / CONFIG

    def compare() -> None:
        if not path.exists() or latest(get_checkpoint_dir(args)) is None:
            return
        try:
            lines = list_changes(read_toml(path, "--run-dir"), tomllib.loads(toml))
        except ValueError as error:
            lines = [f"changes since the last start are unknown: {error}"]
        for line in lines:
            print(line, flush=True)

    run_on_first_rank(compare)


def save_config(args: RunConfig, toml: str) -> None:
    """Write a run's options to RUN_DIR/config.toml. Collective."""
    run_on_first_rank(lambda: (args.run_dir / CONFIG).write_text(toml, errors="surrogateescape"))


def list_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return a line for each key whose value differs between two contents of config.toml."""
    old, new = (dict(flatten(name_stages(content))) for content in (before, after))
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r} ({describe_effect(key)})"
        for key in old | new
        if old.get(key) != new.get(key)
    ]


def name_stages(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.toml's content with "stages.NAME" tables in place of its list of stages."""
    stages = {f"stages.{stage['name']}": stage for stage in content.get("stages", [])}
    return {name: value for name, value in content.items() if name != "stages"} | stages


def describe_effect(key: str) -> str:
    """Return text that says whether a new value of an option changes the numbers of a run."""
    table, _, field = key.rpartition(".")
    name = field.replace("-", "_") if table.startswith("stages.") else table or field
    if name not in SAME_NUMBERS:
        return "changes the numbers"
    note = " if a step has as many rows" if name in LAYOUT else ""
    return f"does not change the numbers{note}"


class StepData(Protocol):
    """The batch of one data rank and one step."""

    def count_labels_and_tokens(self) -> Tensor:
        """Return int64 [4]: labels that the loss counts, tokens, and two counts of the class."""


BatchT = TypeVar("BatchT", bound=StepData)


@dataclass(kw_only=True)
class TrainingJob(ABC, Generic[BatchT]):
    """One rank's part of a run, which loads the last checkpoint if there is one.

    Attributes:
        args: the options, of a subclass of `RunConfig`.
        model: the parallelized model with its weights.
        optimizers: the optimizers of the model's trained parameters.
        shape: the shape of a step's batch over all data ranks.
        config: the config of the model, for its checkpoints.
        facts: values that must equal the values in a checkpoint that is loaded.
        batches: the reader of the data.
        owner: the `TrainStep` of the optimizer steps.
        toml: the options of the run as TOML.
        start: the step of the loaded checkpoint; 0 = no checkpoint.
        reader: a CUDA stream that copies metrics to the host, so that the copies do not wait
            for kernels of later steps. None on other devices.
    """

    args: Any
    meshes: Meshes
    model: Any
    optimizers: list[torch.optim.Optimizer]
    shape: BatchShape
    config: Any
    facts: Mapping[str, object]
    batches: Any

    unit = "token"  # the loss is a mean over these units of text
    saves_memory = SAVES_MEMORY  # options that lower the memory of a step
    chosen_by = "--data, --seq-len, --eval-every and --tokens"  # options that rows depend on
    finish_note = ""  # work after the last step, for the message of a finished run
    num_nan = 0  # consecutive steps whose loss is not finite
    is_stopping = False  # a signal has reached a rank

    def __post_init__(self) -> None:
        self.device = torch.device(self.meshes.device_type)
        torch.manual_seed(self.args.seed)
        args: RunConfig = self.args
        self.stage: TrainingStage = args.stage or plan_stage(
            args, {}, StepSizes([]), 0, rows=self.shape.rows
        )
        self.owner = TrainStep(
            self.model,
            self.optimizers,
            max_norm=args.optimizer.max_norm,
            num_micro_batches=args.grad_accum,
            loss_scale=args.make_loss_scale(self.device),
            skip_spikes=args.skip_spikes,
        )
        restored = self.model, self.optimizers, self.facts, self.owner, self.batches.sampler
        self.toml = to_toml((args.run or args).resolve())
        print_changes(args, self.toml)
        self.start = resume(args, *restored, stage=self.stage, chosen_by=self.chosen_by)
        self.reader = torch.cuda.Stream(priority=-1) if self.device.type == "cuda" else None
        dtype = args.get_compute_dtype(self.device)
        self.peak_tflops = args.peak_tflops or find_peak_tflops(self.device, dtype)

    @abstractmethod
    def print_start(self) -> None:
        """Print model, data and ranks before the first step of a start."""

    @abstractmethod
    def next_batch(self, step: int) -> BatchT:
        """Return this data rank's batch for a step; the first step is 1."""

    @abstractmethod
    def forward_backward(self, num_labels: Tensor, batch: BatchT) -> Tensor:
        """Run forward and backward of a step; return this rank's part of the mean loss.

        The mean is the sum of all ranks' parts, divided by the number of ranks with the same batch.
        `num_labels` is the first of the step's counts over all data ranks, at least 1.
        """

    def evaluate(self) -> Metrics:
        """Return metrics of evaluation data, such as "eval_loss". Waits for the device."""
        return {}

    def close(self) -> None:
        """Free the objects that the next stage builds. Collective."""
        self.owner.close()

    def sample(self, step: int) -> None:
        """Write samples of the model if they are due. Waits for the device."""

    @abstractmethod
    def finish(self) -> None:
        """Write the result of the run after its last step."""

    def get_data_metrics(self) -> Metrics:
        """Return metrics of the last batch that was read."""
        return {}

    def compute_metrics(self, counts: list[int], seconds: float) -> Metrics:
        """Return further metrics of a step that took `seconds`.

        `counts` is the sum of the batches' `count_labels_and_tokens` over all data ranks.
        """
        return {}
