"""Learning rate schedule, batch ramp, and the stages of a run with their steps."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, NamedTuple

from moecore.base.fields import Bound, CheckedRecord, Count, CountOrZero, FieldErrors, quote

Share = Annotated[float, Bound(">=", 0), Bound("<=", 1)]
NumTokens = Annotated[int, Bound(">=", 1), Bound("<", 2**62)]
Shape = Literal["linear", "cosine", "1-sqrt"]
# From 1 to 0 over the decay; the argument is the completed share of the decay.
SHAPES: dict[Shape, Callable[[float], float]] = {
    "linear": lambda share: 1 - share,
    "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
    "1-sqrt": lambda share: 1 - math.sqrt(share),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRateSchedule(CheckedRecord):
    """The learning rate over the steps of a run: linear warm-up, then constant, then decay.

    Attributes:
        lr_schedule: "cosine" and "linear" decay from the end of the warm-up to the last step;
            "wsd" (warm-up, stable, decay) decays over the last `decay_steps` steps; "constant"
            never decays.
        warmup_steps: steps of the warm-up; None = `warmup_tokens` if set, or 5% of the
            schedule.
        min_warmup_steps: lower bound of the 5% warm-up, but at most a third of the schedule.
        warmup_tokens: tokens of the warm-up, rounded up to full steps.
        schedule_steps: the step at which the decay ends; None = the last step of the run.
        decay_steps: steps of the decay of "wsd"; None = 10% of the schedule.
        decay_shape: the curve of the decay of "wsd".
        min_lr_ratio: the rate after the decay, divided by the peak.
    """

    lr_schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: CountOrZero | None = None
    min_warmup_steps: CountOrZero = 0
    warmup_tokens: NumTokens | None = None
    schedule_steps: Count | None = None
    decay_steps: Count | None = None
    decay_shape: Shape = "1-sqrt"
    min_lr_ratio: Share = 0.1

    def _find_field_errors(self) -> FieldErrors:
        if self.warmup_steps is not None and self.warmup_tokens is not None:
            yield "warmup_tokens", f"be None with warmup_steps ({self.warmup_steps}): drop one"
        if self.decay_steps is not None and self.lr_schedule != "wsd":
            yield "decay_steps", f"be None with lr_schedule ({self.lr_schedule!r}): use 'wsd'"

    def compute_factor(
        self, step: int, *, num_steps: int, count_steps: Callable[[int], int]
    ) -> float:
        """Return the learning rate of `step` / peak; `count_steps` converts tokens to steps."""
        total = self.schedule_steps or num_steps
        warmup = self.warmup_steps
        if self.warmup_tokens is not None:
            warmup = count_steps(self.warmup_tokens)
        elif warmup is None:
            warmup = max(1, round(0.05 * total), min(self.min_warmup_steps, total // 3))
        if step <= warmup:
            return step / warmup
        if self.lr_schedule == "constant":
            return 1.0
        shape: Shape = self.decay_shape if self.lr_schedule == "wsd" else self.lr_schedule
        begin = warmup
        if self.lr_schedule == "wsd":
            begin = max(warmup, total - (self.decay_steps or max(1, round(0.1 * total))))
        share = min(1.0, max(0, step - begin) / max(1, total - begin))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * SHAPES[shape](share)


def is_due(step: int, *, every: int, last_step: int) -> bool:
    """Return whether an event is due, every `every` steps and at `last_step`; `every` 0 = never."""
    return every > 0 and (step % every == 0 or step == last_step)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRamp(CheckedRecord):
    """The growth of the batch at the beginning of a run.

    The first steps have `ramp_start` rows. After each equal part of `ramp_tokens`, a step has
    `ramp_increment` more rows, until it has all rows: batch_size x grad_accum x data ranks. The
    number of rows is a function of the tokens that the run has read, including padding.

    Attributes:
        ramp_start: rows of the first step over all ranks; None = all steps have all rows.
        ramp_increment: rows of one increment: full micro-batches of all data ranks.
        ramp_tokens: tokens after which a step has all rows.
    """

    ramp_start: Count | None = None
    ramp_increment: Count | None = None
    ramp_tokens: NumTokens | None = None

    def _find_field_errors(self) -> FieldErrors:
        names = ("ramp_start", "ramp_increment", "ramp_tokens")
        missing = [name for name in names if getattr(self, name) is None]
        names_set = ", ".join(name for name in names if name not in missing)
        if missing and names_set:
            rule = f"be given with {names_set}: give all three options of [batch] or none"
            yield missing[0], rule

    def check_multiples(self, *, rows: int, micro_batch_rows: int) -> None:
        """Raise ValueError unless increments are full micro-batches and reach `rows` exactly."""
        if self.ramp_start is None or self.ramp_increment is None:
            return
        for name in ("ramp_start", "ramp_increment"):
            if (value := getattr(self, name)) % micro_batch_rows:
                raise ValueError(
                    f"{name} ({value}) must be a multiple of {micro_batch_rows}, the rows of a "
                    "micro-batch of all data ranks: round it"
                )
        if self.ramp_start > rows or (rows - self.ramp_start) % self.ramp_increment:
            raise ValueError(
                f"ramp_start ({self.ramp_start}) plus a multiple of ramp_increment "
                f"({self.ramp_increment}) must be {rows}, the rows of a step: change one of them"
            )


class EqualSteps(NamedTuple):
    """A range of equal steps: its first step, the rows of a step, and the tokens of a row."""

    first: int
    rows: int
    seq_len: int


class StepSizes:
    """The rows and tokens of each step; the first step is 1.

    `StepSizes([EqualSteps(1, 2, 8), EqualSteps(4, 4, 8)])` has 16 tokens in steps 1, 2 and 3, and
    32 in each later step: `count_tokens_through(5)` is 112, and `count_steps(49)` is 4.
    """

    def __init__(self, parts: Sequence[EqualSteps]) -> None:
        self.parts = tuple(parts)

    def get_rows(self, step: int) -> int:
        """Return the rows of a step over all data ranks."""
        return max(part for part in self.parts if part.first <= max(step, 1)).rows

    def count_tokens_through(self, step: int) -> int:
        """Return the tokens of a step and of all earlier steps, including padding."""
        ends = [*(part.first for part in self.parts), step + 1][1:]
        return sum(
            max(0, min(end, step + 1) - part.first) * part.rows * part.seq_len
            for part, end in zip(self.parts, ends, strict=True)
        )

    def count_steps(self, num_tokens: int) -> int:
        """Return the smallest number of steps that read at least `num_tokens` tokens."""
        for number, part in enumerate(self.parts):
            remaining = num_tokens - self.count_tokens_through(part.first - 1)
            step = part.first - 1 + -(-remaining // (part.rows * part.seq_len))
            if number + 1 == len(self.parts) or step < self.parts[number + 1].first:
                return max(step, 0)
        raise AssertionError("the last part has no end")


def iterate_equal_steps(
    ramp: BatchRamp, *, first_step: int, rows: int, seq_len: int, tokens_before: int
) -> Iterator[EqualSteps]:
    """Yield ranges of steps with equal numbers of rows; steps after the ramp have `rows` rows."""
    if ramp.ramp_start is None or ramp.ramp_increment is None or ramp.ramp_tokens is None:
        yield EqualSteps(first_step, rows, seq_len)
        return
    num_increments = (rows - ramp.ramp_start) // ramp.ramp_increment
    while True:
        number = min(num_increments, tokens_before * num_increments // ramp.ramp_tokens)
        step_rows = ramp.ramp_start + number * ramp.ramp_increment
        yield EqualSteps(first_step, step_rows, seq_len)
        if number == num_increments:
            return
        end = -(-(number + 1) * ramp.ramp_tokens // num_increments)  # tokens of the next increment
        num_steps = -(-(end - tokens_before) // (step_rows * seq_len))
        first_step += num_steps
        tokens_before += num_steps * step_rows * seq_len


# Options that all stages of a run share.
SHARED = (
    *("run_dir", "checkpoint_dir", "ranks", "tokenizer", "preset", "hf_config"),
    *("logging", "wandb", "mlflow"),
)
SCHEDULE = {"schedule", *(field.name for field in fields(LearningRateSchedule))}
NO_RAMP = BatchRamp()
Options = Mapping[str, Any]  # of a TOML file


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLength(CheckedRecord):
    """The name and the length of a training stage."""

    name: str  # in checkpoints and messages
    steps: Count | None = None  # optimizer steps; None = `tokens` sets the length
    tokens: NumTokens | None = None  # of all ranks, with padding, rounded up to full steps

    def _find_field_errors(self) -> FieldErrors:
        if (self.steps is None) == (self.tokens is None):
            yield "steps", f"be given without tokens ({self.tokens}), or tokens alone: give one"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStage:
    """A stage of a run: its range of steps, and the rows and tokens of each step."""

    name: str  # "" = the run has no stages
    begin: int  # number of steps of the stages before this stage
    end: int  # the number of its last step
    last: int  # the number of the run's last step
    has_schedule: bool  # the learning rate follows a schedule over this stage, not over the run
    sizes: StepSizes  # of the run's steps up to this stage's end

    def compute_rate_factor(self, schedule: LearningRateSchedule, step: int) -> float:
        """Return the learning rate of step `step` under `schedule`, divided by the peak."""
        if not self.has_schedule:
            return schedule.compute_factor(
                step, num_steps=self.last, count_steps=self.sizes.count_steps
            )
        before = self.sizes.count_tokens_through(self.begin)
        return schedule.compute_factor(
            step - self.begin,
            num_steps=self.end - self.begin,
            count_steps=lambda tokens: self.sizes.count_steps(before + tokens) - self.begin,
        )

    def get_metrics(self, step: int) -> dict[str, float]:
        """Return "rows" of `step` and "tokens" of the run so far; {} if all steps are equal."""
        if len(self.sizes.parts) == 1:
            return {}
        return {
            "rows": float(self.sizes.get_rows(step)),
            "tokens": float(self.sizes.count_tokens_through(step)),
        }

    def is_previous_stage(self, step: int, saved_name: str | None) -> bool:
        """Return whether the checkpoint of `step` ends the stage before this stage.

        ValueError if `saved_name` is another stage and `step` is not this stage's `begin`.
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
    """Split a TOML file's content into the run's options and its [[stages]] (training stages)."""
    options, tables = dict(content), content.get("stages")
    options.pop("stages", None)
    if tables is None:
        return options, []
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError("stages must be tables: write [[stages]] above each of them")
    lengths = [read_stage_length(table) for table in tables]
    names = [length.name for length in lengths]
    if len(set(names)) < len(names) or "" in names:
        raise ValueError(f"stages ({quote(names)}) must have names that differ: rename one")
    for name in ("steps", "tokens"):
        if isinstance(options.get(name), int):  # `tokens` may be "text" or "random"
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


def read_stage_length(table: Options) -> StageLength:
    """Return the name and length of a stage's TOML table; ValueError without a name."""
    names = {field.name for field in fields(StageLength)} & table.keys()
    if "name" not in names:
        raise ValueError(f"stages ({quote(dict(table))}) must have a name: give one")
    return StageLength(**{name: table[name] for name in names})


def get_stage_options(table: Options) -> dict[str, Any]:
    """Return the options of a stage's table without its name and length."""
    names = {field.name for field in fields(StageLength)}
    return {key: value for key, value in table.items() if key not in names}


def plan_stages(
    args: Any, get_batch_sizes: Callable[[Any], tuple[int, int, BatchRamp]]
) -> list[Any]:
    """Return the options of each stage, or the run's options if the run has no stages.

    In the returned options, `steps` is the number of the stage's last step, `stage` is the
    `TrainingStage`, and `run` is `args`. For a stage's options, `get_batch_sizes` returns the rows
    of a step after the ramp, the rows of a micro-batch over all data ranks, and the ramp.
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
        rows, micro_batch_rows, ramp = get_batch_sizes(options)
        ramp.check_multiples(rows=rows, micro_batch_rows=micro_batch_rows)
        stage = plan_stage(options, table, sizes, begin, rows=rows, ramp=ramp)
        sizes, begin = stage.sizes, stage.end
        plans.append(replace(options, steps=begin, stage=stage, run=args))
    return [replace(options, stage=replace(options.stage, last=begin)) for options in plans]


def plan_stage(
    args: Any,
    table: Options,
    step_sizes: StepSizes,
    start: int,
    *,
    rows: int,
    ramp: BatchRamp = NO_RAMP,
) -> TrainingStage:
    """Return the stage that begins after step `start`; `table` is its TOML table, or {}."""
    tokens = step_sizes.count_tokens_through(start)
    parts = iterate_equal_steps(
        ramp, first_step=start + 1, rows=rows, seq_len=args.seq_len, tokens_before=tokens
    )
    before = (part for part in step_sizes.parts if part.first <= start)
    step_sizes, name, end = StepSizes([*before, *parts]), "", args.steps
    if table:
        length = read_stage_length(table)
        name, end = length.name, start + (length.steps or 0)
        if length.tokens is not None:
            end = step_sizes.count_steps(tokens + length.tokens)
    return TrainingStage(
        name=name,
        begin=start,
        end=end,
        last=end,
        has_schedule=bool({key.replace("-", "_") for key in table} & SCHEDULE),
        sizes=step_sizes,
    )
