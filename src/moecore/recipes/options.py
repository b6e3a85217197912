"""RunConfig: the options that all trainings share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch

from moecore.base.command_options import Fields, Table, make_internal_field, make_unsaved_field
from moecore.base.fields import Bound, Count, CountOrZero, Positive, PositiveOrZero
from moecore.base.options.layer import MoEConfig
from moecore.base.options.names import PrecisionName
from moecore.models import DecoderConfig
from moecore.parallel.mesh import ParallelConfig
from moecore.recipes.loggers import LoggerOptions
from moecore.recipes.optimizer import OptimizerConfig
from moecore.recipes.schedule import LearningRateSchedule
from moecore.recipes.stages import TrainingStage
from moecore.train.loss_scale import DynamicLossScale

DEGREES = tuple(field.name for field in fields(ParallelConfig))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RunSeed = Annotated[int, Bound(">=", 0), Bound("<", 10**18)]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options of a training.

    Attributes:
        config: a TOML file of options; flags win over the file.
        run_dir: the directory of checkpoints, metrics and results.
        steps: optimizer steps of the run.
        batch_size: rows per data rank and micro-batch.
        grad_accum: micro-batches per step.
        seq_len: tokens of a row.
        aux_loss: coefficient of the balance loss per micro-batch; None = the model's.
        dtype: of compute; None = float32 on CPU, bfloat16 on GPU.
        precision: the recipe of FP8 and FP4 products; None = all products are in `dtype`.
        cuda_graph: run forward and backward as one CUDA graph.
        seed: of the order of the data, of new weights and of samples.
        eval_every: steps between losses on evaluation data; 0 = none.
        checkpoint_every: steps between checkpoints; 0 = none.
        expert_loads_every: steps between logs of the load of each expert; 0 = none.
        profile: steps that the profiler traces for `moecore report`; 0 = none.
        peak_tflops: peak of one device for MFU; None = the bfloat16 peak of a known GPU.
        ranks: processes; None = one per GPU, two on CPU, or those that torchrun has started.
        plain_host: leave CPU affinity and garbage collection to the system.
        parallel: degrees; ep not set = the largest of 1, 2, 4 and 8 that fits.
        optimizer: the optimizers.
        schedule: the learning rate over the steps.
        logging: loggers.
        stage: the stage whose options these are; None = the run has no stages yet.
        run: the options of the run that the stage belongs to; None = these options.
    """

    config: Path | None = make_unsaved_field(None)
    run_dir: Path
    steps: Count = 400
    batch_size: Count
    grad_accum: Count = 1
    seq_len: Count
    aux_loss: PositiveOrZero | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    precision: PrecisionName | None = None
    cuda_graph: bool = False
    seed: RunSeed = 0
    eval_every: CountOrZero = 0
    checkpoint_every: CountOrZero = 100
    expert_loads_every: CountOrZero = 10
    profile: CountOrZero = 0
    peak_tflops: Positive | None = None
    ranks: Count | None = None
    plain_host: bool = False
    parallel: Annotated[Fields, Table(record=ParallelConfig)] = field(default_factory=dict)
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: LearningRateSchedule = LearningRateSchedule()
    logging: LoggerOptions = LoggerOptions()
    stage: TrainingStage | None = make_internal_field(None)
    run: RunConfig | None = make_internal_field(None)

    def resolve(self) -> Self:
        """Return the options with which the run can be started again."""
        return self

    def degree(self, name: str) -> int:
        """Return a parallel degree, or 1 if it is not set or depends on the number of ranks."""
        return max(1, int(self.parallel.get(name, 1)))

    def parallel_config(self, world_size: int, *, num_experts: int) -> ParallelConfig:
        """Return the degrees for a number of ranks.

        Raises:
            ValueError: for degrees whose product is not the number of ranks.
        """
        degrees: dict[str, Any] = dict(self.parallel)
        if "ep" not in degrees:
            product = math.prod(map(self.degree, ("pp", "etp", "edp_shard", "edp_replicate")))
            fits = [n for n in (1, 2, 4, 8) if world_size % (n * product) == 0]
            degrees["ep"] = max((n for n in fits if num_experts % n == 0), default=1)
        return ParallelConfig(**degrees).resolve(world_size)

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype of activations."""
        return DTYPES[self.dtype or ("bfloat16" if device.type == "cuda" else "float32")]

    def loss_scale(self, device: torch.device) -> DynamicLossScale | None:
        """Return the loss scale of fp16, and None for other dtypes."""
        return DynamicLossScale() if self.compute_dtype(device) == torch.float16 else None


def moe_of(config: DecoderConfig) -> MoEConfig:
    """Return the config of the MoE layers.

    Raises:
        ValueError: for a dense model.
    """
    if config.moe is None:
        raise ValueError("the model must have MoE layers: choose another --preset or --hf-config")
    return config.moe
