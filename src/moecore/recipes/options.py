"""The options that all trainings share, and how a run shards its model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from torch import nn

from moecore.base.command_options import Fields, Table, make_internal_field, make_unsaved_field
from moecore.base.fields import Bound, Count, CountOrZero, Positive, PositiveOrZero
from moecore.base.options.context import ContextOptions
from moecore.base.options.dense import DenseOptions
from moecore.base.options.dispatch import (
    CloneOptions,
    DispatcherName,
    DispatchOptions,
    NVLinkOptions,
)
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.layer import MoEConfig
from moecore.base.options.memory import MemoryOptions, StashOptions
from moecore.base.options.names import GpuName, PrecisionName
from moecore.base.options.precision import Precision, Recipe
from moecore.models import DecoderConfig
from moecore.moe.backends import ExpertBackend
from moecore.parallel.mesh import Meshes, ParallelConfig
from moecore.parallel.pipeline.schedule import PipelineConfig
from moecore.parallelize import parallelize_moe
from moecore.recipes.metrics import LoggerOptions
from moecore.recipes.optimizer import OptimizerConfig
from moecore.recipes.schedule import LearningRateSchedule, TrainingStage
from moecore.train.loss_scale import DynamicLossScale
from moecore.train.spikes import SpikeOptions

DEGREES = tuple(field.name for field in fields(ParallelConfig))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RunSeed = Annotated[int, Bound(">=", 0), Bound("<", 10**18)]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options of a training.

    Attributes:
        config: a TOML file of options; flags win over the file.
        dry_run: print options, plan and first batch; train nothing.
        gpus: ranks of the plan of a dry run; None = the ranks that would start.
        gpu: the GPU of the plan of a dry run.
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
        deterministic: compute the same bits in every run of the command on the same machine.
        parallel: degrees; ep not set = the largest of 1, 2, 4 and 8 that fits.
        optimizer: the optimizers.
        schedule: the learning rate over the steps.
        skip_spikes: skip steps with a gradient norm far above those before; None = skip none.
        logging: loggers.
        stage: the stage whose options these are; None = the run has no stages yet.
        run: the options of the run that the stage belongs to; None = these options.
    """

    config: Path | None = make_unsaved_field(None)
    dry_run: bool = make_unsaved_field(False)
    gpus: Count | None = make_unsaved_field(None)
    gpu: GpuName = make_unsaved_field("h100-80")
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
    deterministic: bool = False
    parallel: Annotated[Fields, Table(record=ParallelConfig)] = field(default_factory=dict)
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: LearningRateSchedule = LearningRateSchedule()
    skip_spikes: Annotated[SpikeOptions | None, Table(prefix=True)] = None
    logging: LoggerOptions = LoggerOptions()
    stage: TrainingStage | None = make_internal_field(None)
    run: RunConfig | None = make_internal_field(None)

    def resolve(self) -> Self:
        """Return the options with the defaults that depend on other options, for config.toml."""
        return self

    def degree(self, name: str) -> int:
        """Return a parallel degree such as "pp"; 1 = it is not set or -1."""
        return max(1, int(self.parallel.get(name, 1)))

    def parallel_config(self, world_size: int, *, num_experts: int) -> ParallelConfig:
        """Return the degrees for `world_size` ranks; an unset ep is the largest that fits."""
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
    """Return the config of a decoder's MoE layers. Raises ValueError for a dense decoder."""
    if config.moe is None:
        raise ValueError("the model must have MoE layers: choose another --preset or --hf-config")
    return config.moe


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Options of `parallelize_moe` outside its records, and switches of records.

    Attributes:
        dispatcher: how tokens are dispatched; "auto" selects by the hardware.
        fp8_dispatch: dispatch tokens, and save them for backward, as FP8.
        expert_backend: the kernels of the experts.
        overlap_shared: on GPUs, run shared experts on another stream.
        compile_dense: run attention, norms and residual adds through torch.compile.
        graph_dense: on GPUs, run the operations between exchanges as CUDA graphs.
        stash: store saved expert rows in pages, with the options of [stash].
        clones: clone hot experts, with the options of [clones].
        dynamic_cp: maximum tokens of a rank in a micro-batch. Each micro-batch then has its own
            number of context parallel ranks. None = all micro-batches have --cp.
    """

    dispatcher: DispatcherName = "auto"
    fp8_dispatch: bool = False
    expert_backend: ExpertBackend = "auto"
    overlap_shared: bool = False
    compile_dense: bool = False
    graph_dense: bool = False
    stash: bool = False
    clones: bool = False
    dynamic_cp: int | None = None


@dataclass(frozen=True, kw_only=True)
class ShardedConfig(RunConfig):
    """Options of a training whose model `parallelize_moe` shards as the options say.

    Attributes:
        sharding: options outside the records of `parallelize_moe`.
        fsdp: parameter sharding.
        memory: recomputation and offload.
        stash: pages of saved expert rows.
        clones: clones of hot experts.
        nvlink: the dispatcher nvlink.
        context: context parallelism.
        pipeline: pipeline stages, with --pp > 1.
        fp8: roles and other options of FP8 products; with --precision or [recipe].
        recipe: a recipe of FP8 products, in place of --precision.
    """

    sharding: Sharding = Sharding()  # frozen
    fsdp: Annotated[FSDPOptions, Table(without=("param_dtype",))] = FSDPOptions()
    memory: MemoryOptions = MemoryOptions()
    stash: StashOptions | None = None
    clones: CloneOptions | None = None
    nvlink: NVLinkOptions | None = None
    context: Annotated[ContextOptions | None, Table(without=("dynamic",))] = None
    pipeline: PipelineConfig | None = None
    fp8: Annotated[Fields, Table(record=Precision)] = field(default_factory=dict)
    recipe: Recipe | None = None

    def memory_options(self) -> MemoryOptions:
        """Return the options of table [memory], with the pages of [stash]."""
        stash = self.stash or (StashOptions() if self.sharding.stash else None)
        return replace(self.memory, stash=stash)

    def pipeline_options(self) -> PipelineConfig | None:
        """Return the pipeline stages; None = --pp is 1, and [pipeline] must not be set then."""
        pp = self.parallel.get("pp")
        if self.degree("pp") > 1:
            return self.pipeline or PipelineConfig()
        if self.pipeline is not None:
            raise ValueError(f"--pp ({pp}) must be > 1 with options of [pipeline]: drop those")
        return None

    def context_options(self) -> ContextOptions | None:
        """Return the options of table [context], with dynamic cp if --dynamic-cp is set."""
        if self.sharding.dynamic_cp is None:
            return self.context
        return replace(self.context or ContextOptions(), dynamic=True)

    def precision_options(self) -> Precision | None:
        """Return the recipe of FP8 products; None = no FP8. Raises ValueError for two recipes."""
        if self.recipe is not None and self.precision is not None:
            raise ValueError(
                f"--precision ({self.precision}) must not go with options of [recipe], which is "
                "a recipe too: drop one of them"
            )
        if self.recipe is not None or (self.fp8 and self.precision is None):
            return Precision(recipe=self.recipe or Recipe(), **self.fp8)
        named = Precision.of(self.precision)
        return named and replace(named, **self.fp8)

    def fsdp_options(self, dtype: torch.dtype) -> FSDPOptions:
        """Return the options of table [fsdp], with `dtype` for all-gathered parameters."""
        return replace(self.fsdp, param_dtype=dtype)

    def dispatch_options(self, max_tokens: int | None = None) -> DispatchOptions:
        """Return the options of dispatch; `max_tokens` is the default of nvlink's `max_tokens`."""
        nvlink, name = self.nvlink, self.sharding.dispatcher
        if max_tokens is not None and (nvlink or name in ("auto", "nvlink", "hierarchical")):
            nvlink = nvlink or NVLinkOptions()
            nvlink = nvlink if nvlink.max_tokens else replace(nvlink, max_tokens=max_tokens)
        clones = self.clones or (CloneOptions() if self.sharding.clones else None)
        return DispatchOptions(
            name=name, nvlink=nvlink, fp8=self.sharding.fp8_dispatch, clones=clones
        )

    def check_sharding(self) -> None:
        """Raise ValueError for options of records that exclude each other."""
        self.memory_options(), self.pipeline_options(), self.context_options()
        self.precision_options(), self.dispatch_options()
        if self.deterministic and self.sharding.dispatcher == "nccl_ep":
            raise ValueError(
                "--dispatcher (nccl_ep) must be another one with --deterministic, because NCCL EP "
                "promises no order of its sums: use nvlink or alltoall"
            )


def parallelize(
    model: nn.Module,
    meshes: Meshes,
    config: ShardedConfig,
    *,
    max_tokens: int | None = None,
    **options: Any,
) -> None:
    """Shard a model in place by `parallelize_moe` with the options of a run, and further `options`.

    `max_tokens` is the default of nvlink's `max_tokens`.
    """
    sharding = config.sharding
    parallelize_moe(
        model,
        meshes,
        dispatch=config.dispatch_options(max_tokens),
        expert_backend=sharding.expert_backend,
        dense=DenseOptions(
            overlap_shared=sharding.overlap_shared,
            compile=sharding.compile_dense,
            graph=sharding.graph_dense,
        ),
        precision=config.precision_options(),
        loss="sum",
        memory=config.memory_options(),
        context=config.context_options(),
        pipeline=config.pipeline_options(),
        fsdp=config.fsdp_options(config.compute_dtype(torch.device(meshes.device_type))),
        **options,
    )
