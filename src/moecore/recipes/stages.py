"""[[stages]]: the stages of a run, whose options win over the options of the run.

    [[stages]]
    name = "short"
    tokens = 1_000_000_000

    [[stages]]
    name = "long"
    steps = 500
    seq_len = 32768
    data = [{path = "long.jsonl", weight = 1.0}]
    cp = 4
    [stages.rotary]
    theta = 1e6
    [stages.schedule]
    lr_schedule = "linear"
    warmup_steps = 10

A stage begins with the checkpoint of the stage before it, as a run that continues with other
options does. So it may have another layout, and a run that is killed continues in its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from moecore.base.fields import CheckedRecord, Count, Rules, quote
from moecore.recipes.schedule import LearningRateSchedule, NumTokens
from moecore.recipes.steps import BatchRamp, StepSizes, equal_steps

# Options that all stages of a run share.
SHARED = ("run_dir", "ranks", "tokenizer", "preset", "hf_config", "logging", "wandb", "mlflow")
SCHEDULE = {"schedule", *(field.name for field in fields(LearningRateSchedule))}
NO_RAMP = BatchRamp()
Options = Mapping[str, Any]  # of a TOML file


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLength(CheckedRecord):
    """The name and the length of a stage.

    Attributes:
        name: in checkpoints and messages.
        steps: optimizer steps; None = `tokens`.
        tokens: tokens of all ranks, padding included, rounded up to full steps.
    """

    name: str
    steps: Count | None = None
    tokens: NumTokens | None = None

    def _rules(self) -> Rules:
        if (self.steps is None) == (self.tokens is None):
            yield "steps", f"be given without tokens ({self.tokens}), or tokens alone: give one"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStage:
    """A stage whose steps are known.

    Attributes:
        name: of the stage; "" = the run has no stages.
        begin: steps of the stages before it.
        end: the number of its last step.
        last: the number of the run's last step.
        has_schedule: whether the learning rate follows a schedule over the steps of this stage; if
            not, the run's schedule covers all steps of the run.
        sizes: rows and tokens of the steps of the run up to this stage's end.
    """

    name: str
    begin: int
    end: int
    last: int
    has_schedule: bool
    sizes: StepSizes

    def rate_factor(self, schedule: LearningRateSchedule, step: int) -> float:
        """Return the learning rate of a step as a share of the peak."""
        if not self.has_schedule:
            return schedule.factor(step, steps=self.last, steps_of=self.sizes.steps_of)
        before = self.sizes.tokens_through(self.begin)
        return schedule.factor(
            step - self.begin,
            steps=self.end - self.begin,
            steps_of=lambda tokens: self.sizes.steps_of(before + tokens) - self.begin,
        )

    def metrics(self, step: int) -> dict[str, float]:
        """Return the rows of a step and the tokens of the run up to it, where steps differ."""
        if len(self.sizes.parts) == 1:
            return {}
        return {
            "rows": float(self.sizes.rows(step)),
            "tokens": float(self.sizes.tokens_through(step)),
        }

    def begins_at(self, step: int, saved_name: str | None) -> bool:
        """Return whether a checkpoint of a step is from the previous stage.

        Raises:
            ValueError: for a checkpoint within a stage of another name.
        """
        if (saved_name or "") == self.name:
            return False
        if step != self.begin:
            raise ValueError(
                f"[[stages]] must have stage {quote(saved_name or '')} end at or after step {step} "
                f"of its checkpoint, where stage {quote(self.name)} begins at {self.begin}: "
                "correct the stages, or use another --run-dir"
            )
        return True


def split_stages(content: Options) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the options of a TOML file without its stages, and the tables of the stages.

    Raises:
        ValueError: for a stage without a name or a length, or with an option that stages share.
    """
    options, tables = dict(content), content.get("stages")
    options.pop("stages", None)
    if tables is None:
        return options, []
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError("stages must be tables: write [[stages]] above each of them")
    lengths = [length_of(table) for table in tables]
    names = [length.name for length in lengths]
    if len(set(names)) < len(names) or "" in names:
        raise ValueError(f"stages ({quote(names)}) must have names that differ: rename one")
    for name in ("steps", "tokens"):
        if name in options:
            raise ValueError(
                f"{name} ({quote(options[name])}) must be in each of [[stages]]: move it"
            )
    for table in tables:
        for name in SHARED:
            if name in {key.replace("-", "_") for key in table}:
                raise ValueError(
                    f"stage {quote(table['name'])} must not have {name}, which all stages share: "
                    "move it out of [[stages]]"
                )
    return options, tables


def length_of(table: Options) -> StageLength:
    """Return the name and the length of a stage's table."""
    names = {field.name for field in fields(StageLength)} & table.keys()
    if "name" not in names:
        raise ValueError(f"stages ({quote(dict(table))}) must have a name: give one")
    return StageLength(**{name: table[name] for name in names})


def options_of(table: Options) -> dict[str, Any]:
    """Return the options of a stage's table without its name and length."""
    names = {field.name for field in fields(StageLength)}
    return {key: value for key, value in table.items() if key not in names}


def plan_stages(args: Any, batch_of: Callable[[Any], tuple[int, int, BatchRamp]]) -> list[Any]:
    """Return the options of each stage, or the run's options if it has no stages.

    The fields `stage` and `run` are set, and `steps` is the number of the stage's last step.

    Args:
        args: the `StagedConfig` of the run.
        batch_of: returns for the options of a stage the rows of a step after the ramp, the rows of
            a micro-batch of all data ranks, and the ramp.

    Raises:
        ValueError: for a ramp that micro-batches do not divide, or stages without checkpoints.
    """
    tables: Sequence[Options] = args.stage_tables or [{}]
    plans: list[Any] = []
    sizes, begin = StepSizes([]), 0
    for options, table in zip(args.stages or [args], tables, strict=True):
        if table and not options.checkpoint_every:
            raise ValueError(
                "--checkpoint-every (0) must be > 0 with [[stages]], which begin with the "
                "checkpoint of the stage before them: raise it"
            )
        rows, micro_batch_rows, ramp = batch_of(options)
        ramp.check(rows=rows, micro_batch_rows=micro_batch_rows)
        stage = plan_stage(options, table, sizes, begin, rows=rows, ramp=ramp)
        sizes, begin = stage.sizes, stage.end
        plans.append(replace(options, steps=begin, stage=stage, run=args))
    return [replace(options, stage=replace(options.stage, last=begin)) for options in plans]


def plan_stage(
    args: Any,
    table: Options,
    sizes: StepSizes,
    begin: int,
    *,
    rows: int,
    ramp: BatchRamp = NO_RAMP,
) -> TrainingStage:
    """Return a stage behind the step `begin`, whose steps and those before it have these sizes.

    Args:
        args: of the stage.
        table: of [[stages]]; {} = the run has no stages.
        sizes: of the steps before.
        begin: the number of the last step before.
        rows: of a step after the ramp.
        ramp: of the rows.
    """
    tokens = sizes.tokens_through(begin)
    parts = equal_steps(ramp, first=begin + 1, rows=rows, seq_len=args.seq_len, tokens=tokens)
    before = (part for part in sizes.parts if part.first <= begin)
    sizes, name, end = StepSizes([*before, *parts]), "", args.steps
    if table:
        length = length_of(table)
        name, end = length.name, begin + (length.steps or 0)
        if length.tokens is not None:
            end = sizes.steps_of(tokens + length.tokens)
    return TrainingStage(
        name=name,
        begin=begin,
        end=end,
        last=end,
        has_schedule=bool({key.replace("-", "_") for key in table} & SCHEDULE),
        sizes=sizes,
    )
