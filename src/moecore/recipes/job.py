"""TrainingJob: a recipe's model, data, loss and results, which the loop runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from moecore.parallel.mesh import Meshes
from moecore.recipes.data import BatchShape
from moecore.recipes.errors import SAVES_MEMORY
from moecore.recipes.metrics import Metrics, peak_tflops
from moecore.recipes.options import RunConfig
from moecore.recipes.parser import to_toml
from moecore.recipes.resume import resume
from moecore.recipes.run_config import print_changes
from moecore.recipes.stages import TrainingStage, plan_stage
from moecore.recipes.steps import StepSizes
from moecore.train.step import TrainStep


class StepData(Protocol):
    """The batch of one data rank and one step."""

    def counts(self) -> Tensor:
        """Return int64 [4]: labels that the mean loss counts, tokens, and two more counts."""


BatchT = TypeVar("BatchT", bound=StepData)


class BatchReader(Protocol):
    """The reader of a job's batches; the sampler's state is the position in the data."""

    @property
    def sampler(self) -> Stateful:
        """The order of the documents."""


@dataclass(kw_only=True)
class TrainingJob(ABC, Generic[BatchT]):
    """One rank's part of a run that is ready to train; loads the last checkpoint, if there is one.

    The subclass of a recipe has the data, the loss and the result.

    Attributes:
        args: the options, of a class that derives from `RunConfig`.
        model: parallelized, with weights.
        optimizers: the optimizers of the model's trained parameters.
        config: of the model, for its checkpoints.
        facts: values that a resumed run must have in common with this one, see `resume`.
        batches: the data, as steps read it; None = it has no position.
        owner: of the optimizer steps.
        toml: the options of the run, as RUN_DIR/config.toml has them.
        start: steps that the loaded checkpoint has done; 0 = none was there.
        reader: the CUDA stream that copies metrics to the host, so that the copies do not wait for
            kernels of later steps. None on other devices.
    """

    args: Any
    meshes: Meshes
    model: Any
    optimizers: list[torch.optim.Optimizer]
    shape: BatchShape
    config: Any
    facts: Mapping[str, object]
    batches: BatchReader | None

    unit = "token"  # of text, which the mean loss is of
    saves_memory = SAVES_MEMORY  # options that lower the memory of a step
    chosen_by = "--data, --seq-len, --eval-every and --tokens"  # options that rows depend on
    finish_note = ""  # work after the last step, for the message of a finished run
    num_nan = 0  # steps in turn
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
            loss_scale=args.loss_scale(self.device),
        )
        sampler = self.batches.sampler if self.batches else None
        restored = self.model, self.optimizers, self.facts, self.owner, sampler
        self.toml = to_toml((args.run or args).resolve())
        print_changes(args, self.toml)
        self.start = resume(args, *restored, stage=self.stage, chosen_by=self.chosen_by)
        self.reader = torch.cuda.Stream(priority=-1) if self.device.type == "cuda" else None
        dtype = args.compute_dtype(self.device)
        self.peak_tflops = args.peak_tflops or peak_tflops(self.device, dtype)

    @abstractmethod
    def begin(self) -> None:
        """Print model, data and ranks before the first step of a start."""

    @abstractmethod
    def next_batch(self, step: int) -> BatchT:
        """Return the batch of this data rank."""

    @abstractmethod
    def forward_backward(self, num_labels: Tensor, batch: BatchT) -> Tensor:
        """Run backward and return this rank's part of the mean loss.

        Args:
            num_labels: int64 scalar, the labels of all data ranks.
            batch: of this data rank.
        """

    def evaluate(self) -> Metrics:
        """Return metrics of held-out data, such as "eval_loss". Waits for the device."""
        return {}

    def close(self) -> None:
        """Free the objects that the next stage builds. Collective."""
        self.owner.close()

    def sample(self, step: int) -> None:
        """Write samples of the model if they are due. Waits for the device."""
        return

    @abstractmethod
    def finish(self) -> None:
        """Write the result of the run after its last step."""

    def position(self) -> Metrics:
        """Return metrics of the data up to the batch that was last read."""
        return {}

    def more_metrics(self, counts: list[int], seconds: float) -> Metrics:
        """Return a recipe's own metrics of a step, whose batches have these counts together."""
        return {}
