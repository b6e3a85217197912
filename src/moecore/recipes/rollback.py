"""Rollbacks: after several spikes in a row, a run returns to a checkpoint without their data.

Batches are numbered as a run reads them without a rollback: batch n is the batch of step n. A
rollback to step c writes the numbers of the batches of the spikes as "left_out" into the line of
step c in metrics.jsonl. A start at step c or later reads and drops these batches. It then trains on
the batches of a run whose data never had them:

    step        19  20 | 21  22  23       spikes in steps 22 and 23, the last checkpoint is step 20
    batch       19  20 | 21  22  23
    again              | 21  24  25       line 20 has "left_out": [[22, 23]]
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from moecore.io.checkpoint.ranks import run_on_first_rank
from moecore.recipes.errors import DivergedError
from moecore.recipes.files import replace_lines
from moecore.recipes.metrics import Metrics
from moecore.recipes.options import RunConfig
from moecore.recipes.report import METRICS, read_metrics
from moecore.recipes.resume import read_latest_step
from moecore.train.spikes import SpikeLimit, SpikeOptions

LEFT_OUT = "left_out"  # in metrics.jsonl: first and last batch of each rollback to this step
MAX_ROLLBACKS = 3  # to one checkpoint
ROLLED_BACK = -1  # the exit status of a stage that starts again from the last checkpoint


class SpikeStreak:
    """Counts consecutive loss spikes; the counts are equal on all ranks.

    A step is a spike if it was skipped because of its gradient norm, or if its loss is nan or above
    the `SpikeLimit` of earlier losses. `options` None disables the count.
    """

    def __init__(self, options: SpikeOptions | None, losses: Iterable[float] = ()) -> None:
        self._after = 0 if options is None else options.rollback_after
        self._losses = SpikeLimit(options or SpikeOptions(), torch.device("cpu"))
        self.length, self.last_step = 0, 0
        for loss in losses if self._after else ():
            self._record_loss(loss)

    @property
    def is_persistent(self) -> bool:
        """Whether the number of consecutive spikes reaches the limit for a rollback."""
        return 0 < self._after <= self.length

    def may_roll_back(self, *, has_checkpoint: bool) -> bool:
        """Whether a rollback is due; if there is no checkpoint, reset the count at the limit."""
        if self.is_persistent and not has_checkpoint:
            self.length = 0
        return self.is_persistent

    def record(self, step: int, metrics: Metrics) -> None:
        """Count a step. Once `is_persistent` is True, further steps change nothing."""
        if not self._after or self.is_persistent:
            return
        is_overflow = "loss_scale" in metrics and not math.isfinite(metrics["grad_norm"])
        is_skipped = metrics.get("skipped", 0.0) > 0 and not is_overflow
        is_high = not metrics["loss"] <= float(self._losses.compute_limit())
        self.length, self.last_step = (self.length + 1) * (is_skipped or is_high), step
        self._record_loss(metrics["loss"])

    def _record_loss(self, loss: float) -> None:
        self._losses.record_norm(torch.tensor(loss, dtype=torch.float64, device="cpu"))


class LeftOut:
    """The batches that a run skips after rollbacks, as ranges [first batch, last batch]."""

    def __init__(self, ranges: Sequence[Sequence[int]]) -> None:
        self._batches = sorted({n for first, last in ranges for n in range(first, last + 1)})

    def find_batch(self, step: int) -> int:
        """Return the batch number of a step: if batches [2, 3] are skipped, step 2 has batch 4."""
        batch = step
        for left_out in self._batches:
            batch += left_out <= batch
        return batch

    def count_before(self, step: int) -> int:
        """Return how many batches are skipped between the batches of `step` - 1 and `step`."""
        before = self.find_batch(step - 1) if step > 1 else 0
        return self.find_batch(step) - before - 1


def check_rollback(stages: Iterable[RunConfig]) -> None:
    """Raise ValueError for a stage with rollbacks enabled but without checkpoints."""
    for args in stages:
        after = 0 if args.skip_spikes is None else args.skip_spikes.rollback_after
        if after and not args.checkpoint_every:
            raise ValueError(
                f"--skip-spikes-rollback-after ({after}) must go with --checkpoint-every > 0: set "
                "that"
            )


def read_history(args: RunConfig, step: int) -> tuple[list[list[int]], list[float]]:
    """Return the ranges of skipped batches, and the losses in metrics.jsonl, up to a step."""
    lines, _ = read_metrics(Path(args.run_dir, METRICS)) if step else ([], 0)
    lines = [line for line in lines if line["step"] <= step]
    ranges = [numbers for line in lines for numbers in line.get(LEFT_OUT, [])]
    return ranges, [line["loss"] for line in lines]


def roll_back(args: RunConfig, spikes: SpikeStreak, left_out: LeftOut) -> None:
    """Write batches to skip to metrics.jsonl; DivergedError after `MAX_ROLLBACKS`. Collective."""
    last = spikes.last_step
    numbers = [left_out.find_batch(step) for step in (last - spikes.length + 1, last)]
    path, step = Path(args.run_dir, METRICS), read_latest_step(args)

    def write_left_out() -> None:
        lines, _ = read_metrics(path)
        all_ranges = (line.setdefault(LEFT_OUT, []) for line in lines if line["step"] == step)
        ranges = next(all_ranges, None)
        if ranges is None or len(ranges) >= MAX_ROLLBACKS:
            raise DivergedError(
                f"spikes must end after {MAX_ROLLBACKS} rollbacks to step {step}, whose line "
                f"{path} must have: lower --lr, or raise --skip-spikes-factor"
            )
        ranges.append(numbers)
        replace_lines(path, map(json.dumps, lines))
        batches = " to ".join(map(str, numbers))
        text = f"rollback to step {step} because of spikes: leaving out batches {batches}"
        print(text, flush=True)

    run_on_first_rank(write_left_out)
