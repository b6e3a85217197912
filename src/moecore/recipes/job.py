"""`TrainingJob`: model, data, loss and results of one rank's part of a run."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.progress import track_progress
from moecore.base.streams import copy_to_device
from moecore.io.checkpoint.ranks import run_on_first_rank
from moecore.packing.corpus.scheduled_batch import ScheduledBatch
from moecore.parallel.mesh import Meshes
from moecore.planning.options import DEGREES
from moecore.recipes.data import BatchShape, GraphedStep, StepBatch
from moecore.recipes.errors import SAVES_MEMORY
from moecore.recipes.hangs import HangWatch
from moecore.recipes.metrics import Metrics, StageMetrics, find_peak_tflops
from moecore.recipes.moves import ExpertMoves
from moecore.recipes.options import RunConfig
from moecore.recipes.parser import format_toml
from moecore.recipes.resume import print_option_changes, resume
from moecore.recipes.rollback import LeftOut, SpikeStreak, read_history
from moecore.recipes.schedule import StepSizes, TrainingStage, plan_stage
from moecore.recipes.sdc import SDCCheck
from moecore.recipes.stragglers import Stragglers
from moecore.train.loss_scale import DynamicLossScale
from moecore.train.step import TrainStep
from moecore.train.step_result import StepResult


class StepData(Protocol):
    """Protocol of the batch of one data rank for one optimizer step."""

    def count_labels_and_tokens(self) -> Tensor:
        """Return int64 [4]: labels in the loss, tokens, and two counts that the class defines."""


BatchT = TypeVar("BatchT", bound=StepData)


@dataclass(kw_only=True)
class TrainingJob(ABC, Generic[BatchT]):
    """One rank's part of a run; the constructor loads the last checkpoint, if any."""

    args: Any  # of a subclass of `RunConfig`
    meshes: Meshes
    model: Any  # parallelized, with its weights
    optimizers: list[torch.optim.Optimizer]
    shape: BatchShape
    config: Any  # of the model, for its checkpoints
    facts: Mapping[str, object]  # that must equal those of a checkpoint that is loaded
    batches: Any  # the reader of the data

    unit = "token"  # the loss is a mean over these units of text
    saves_memory = SAVES_MEMORY  # options that lower the memory of a step
    chosen_by = "--data, --seq-len, --eval-every and --tokens"  # options that rows depend on
    finish_note = ""  # work after the last step, for the message of a finished run
    num_nan = 0  # consecutive steps whose loss is not finite
    is_stopping = False  # a signal has reached a rank

    def __post_init__(self) -> None:
        self.device = torch.device(self.meshes.device_type)
        self.sdc: Any = None  # an `SDCCheck`
        self.data_metrics: Metrics = {}
        torch.manual_seed(self.args.seed)
        args: RunConfig = self.args
        self.stage: TrainingStage = args.stage or plan_stage(
            args, {}, StepSizes([]), 0, rows=self.shape.rows
        )
        dtype = args.get_compute_dtype(self.device)
        self.owner = TrainStep(
            self.model,
            self.optimizers,
            max_norm=args.optimizer.max_norm,
            clip_groups=self.list_clip_groups(),
            num_micro_batches=self.shape.grad_accum,
            loss_scale=DynamicLossScale() if dtype == torch.float16 else None,
            skip_spikes=args.skip_spikes,
        )
        self.moves = ExpertMoves(args.move_experts_every, self.device)
        self.stage_metrics = StageMetrics(self.meshes, self.model)
        owners = self.owner, self.moves
        restored = self.model, self.optimizers, self.facts, *owners, self.batches.sampler
        self.toml = format_toml((args.run or args).resolve())
        print_option_changes(args, self.toml)
        # The step of the loaded checkpoint; 0 = no checkpoint.
        began = time.perf_counter()
        self.start = resume(args, *restored, stage=self.stage, chosen_by=self.chosen_by)
        self.load_seconds = time.perf_counter() - began if self.start else 0.0
        # The batches without training because of spikes, and the consecutive spikes so far.
        ranges, losses = run_on_first_rank(lambda: read_history(args, self.start))
        self.left_out, self.spikes = LeftOut(ranges), SpikeStreak(args.skip_spikes, losses)
        self.stragglers, self.hangs = Stragglers(self.device), HangWatch(args.hang_timeout)
        # Copies of metrics to the host on this stream do not wait for kernels of later steps.
        self.reader = torch.cuda.Stream(priority=-1) if self.device.type == "cuda" else None
        self.peak_tflops = args.peak_tflops or find_peak_tflops(self.device, dtype)

    def list_clip_groups(self) -> list[list[nn.Parameter]] | None:
        """Return the `clip_groups` of the `TrainStep`."""
        return None

    def describe_ranks(self, *notes: str) -> str:
        """Return text: number of ranks, device, parallel degrees above 1, and `notes`."""
        p = self.meshes.parallel
        degrees = " ".join(f"{d}={getattr(p, d)}" for d in DEGREES if getattr(p, d) > 1)
        details = ", ".join([degrees or "no sharding", *notes])
        return f"{dist.get_world_size()} {self.device.type} ranks ({details})"

    def describe_start(self, new_run_text: str) -> str:
        """Return text that names the step from which a run continues; `new_run_text` if new."""
        return f"from step {self.start}" if self.start else new_run_text

    @abstractmethod
    def print_start(self) -> None:
        """Print model, data and ranks before the first step of a start."""

    def next_batch(self, step: int) -> BatchT:
        """Return this data rank's batch for a step; the first step is 1."""
        batch: BatchT = self.batches.next_batch()
        return batch

    def drop_batch(self, step: int) -> None:
        """Read and ignore the batch of step `step`, which a rollback has removed from the run."""
        self.next_batch(step)

    def check_replays(self, step: int, num_labels: Tensor, batch: BatchT) -> Metrics:
        """Replay a micro-batch if [sdc_check] is due; DivergedError for results that differ."""
        run = partial(self.forward_backward, num_labels)
        return {} if self.sdc is None else self.sdc.check(step, batch, run)

    @abstractmethod
    def forward_backward(self, num_labels: Tensor, batch: BatchT) -> Tensor:
        """Run forward and backward of a step; return this rank's part of the mean loss.

        The mean is the sum of all ranks' parts, divided by the number of ranks with the same batch.
        `num_labels` is the number of labels in the loss over all data ranks, at least 1.
        """

    def finish_step(self) -> StepResult:
        """Clip gradients and update the weights after the last backward of a step."""
        return self.owner.finish()

    def evaluate(self) -> Metrics:
        """Return metrics of the evaluation data, such as "eval_loss". Synchronizes the device."""
        return {}

    def close(self) -> None:
        """Free communication buffers before the next stage of the run begins. Collective."""
        self.owner.close()

    def sample(self, step: int) -> None:
        """Generate texts with the model and write them, if due. Synchronizes the device."""

    @abstractmethod
    def finish(self) -> None:
        """Write the result of the run after its last step."""

    def get_data_metrics(self) -> dict[str, Any]:
        """Return metrics of the last batch that was read, as numbers or 0-dim tensors."""
        return self.data_metrics

    def compute_metrics(self, counts: list[int], seconds: float) -> Metrics:
        """Return more metrics of a step; `counts` of the batch are summed over data ranks."""
        return {}


@dataclass(kw_only=True)
class TextTraining(TrainingJob[StepBatch | ScheduledBatch]):
    """A job whose batches are rows of text, with --cuda-graph and [sdc_check]."""

    is_transformers = False  # whether forwards have the arguments of transformers models

    def __post_init__(self) -> None:
        super().__post_init__()

        def run_tensors(num_labels: Tensor, *tensors: Tensor) -> Tensor:
            inputs = self.make_inputs(num_labels, zip(*tensors, strict=True))
            return self.owner.forward_backward(inputs).sum()

        self.graph = GraphedStep(run_tensors, self.model) if self.args.cuda_graph else None
        options = self.args.sdc_check
        self.sdc = options and SDCCheck(options, self.meshes.parallel, self.owner)

    @abstractmethod
    def make_inputs(
        self, num_labels: Tensor, micro_batches: Iterable[Sequence[Tensor]]
    ) -> list[dict[str, Any]]:
        """Return the forward arguments of micro-batches; each loss is divided by `num_labels`."""

    def iterate_micro_batches(self, batch: StepBatch) -> Iterable[Sequence[Tensor]]:
        """Return each micro-batch's tensors on the device, without the micro-batch dimension A."""
        return zip(*(copy_to_device(x, self.device) for x in batch.list_tensors()), strict=True)

    def forward_backward(self, num_labels: Tensor, batch: StepBatch | ScheduledBatch) -> Tensor:
        """Run the micro-batches; return this rank's part of the mean loss over `num_labels`."""
        number = len(batch.tokens_ABT if isinstance(batch, StepBatch) else batch.cps)
        if self.owner.num_micro_batches != number:  # in a [batch] ramp; a replay has one
            self.owner.num_micro_batches = number
        if self.graph is None or isinstance(batch, ScheduledBatch):
            return self.run_batch(self.owner.forward_backward, num_labels, batch)
        return self.graph(
            num_labels, *(copy_to_device(x, self.device) for x in batch.list_tensors())
        )

    def run_batch(
        self, run: Callable[..., Tensor], num_labels: Tensor, batch: StepBatch | ScheduledBatch
    ) -> Tensor:
        """Return this rank's part of a mean loss; `run` returns the losses of micro-batches."""
        if isinstance(batch, ScheduledBatch):
            inputs = batch.inputs(self.device, transformers=self.is_transformers)
            return batch.compute_local_loss(run(inputs))
        return run(self.make_inputs(num_labels, self.iterate_micro_batches(batch))).sum()

    @torch.no_grad()
    def compute_eval_loss(self, batches: Iterable[Any], total: int = 1) -> float:
        """Return the mean loss of `total` batches, in nats per label. Collective."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.model.eval()
        for batch in track_progress(
            batches, "evaluating", total=total, unit="batches", as_lines=True
        ):
            sums[0] += self.sum_losses(batch)
            sums[1] += copy_to_device(batch.count_labels_and_tokens()[0], self.device)
        self.model.train()
        dist.all_reduce(sums)
        loss, num_labels = sums.tolist()
        return float(loss / max(num_labels, 1))

    def sum_losses(self, batch: StepBatch | ScheduledBatch) -> Tensor:
        """Return this rank's part of the sum of losses over a batch's labels, 0-dim."""
        divisor = torch.ones((), dtype=torch.int64, device=self.device)
        loss = self.run_batch(self.owner.compute_losses, divisor, batch)
        return loss * batch.num_labels if isinstance(batch, ScheduledBatch) else loss


def average_losses(losses: Metrics) -> Metrics:
    """Return the losses "eval_loss/NAME" of several sets with their mean "eval_loss"; {} of {}."""
    return losses and {"eval_loss": sum(losses.values()) / len(losses), **losses}
