"""The options that all trainings share, the options of sharding, and checks of both."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from torch import nn
from typing_extensions import override

from moecore.base.command_options import Fields, Table, make_internal_field, make_unsaved_field
from moecore.base.fields import Bound, Count, CountOrZero, Positive, PositiveOrZero
from moecore.base.options.context import ContextOptions
from moecore.base.options.dense import DenseOptions
from moecore.base.options.dispatch import CloneOptions, DispatchOptions, NVLinkOptions
from moecore.base.options.layer import BalanceConfig, MoEConfig, MoEOverrides
from moecore.base.options.names import GpuName, PrecisionName
from moecore.models import DecoderConfig
from moecore.packing.collate import get_length_multiple
from moecore.packing.corpus.scheduled_batch import TILE
from moecore.parallel.mesh import Meshes, ParallelConfig
from moecore.parallelize import parallelize_moe
from moecore.planning.options import ShardingOptions
from moecore.recipes.metrics import LoggerOptions
from moecore.recipes.optimizer import OptimizerConfig
from moecore.recipes.schedule import LearningRateSchedule, TrainingStage
from moecore.train.spikes import SpikeOptions

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
        checkpoint_dir: a directory or URL of checkpoints; None = RUN_DIR/checkpoints.
        steps: optimizer steps of the run.
        batch_size: rows per data rank and micro-batch.
        grad_accum: micro-batches per step.
        global_batch_size: rows of a step over all data ranks, in place of grad_accum.
        seq_len: tokens of a row.
        aux_loss: coefficient of the balance loss per micro-batch; None = the model's.
        dtype: the compute dtype; None = float32 on CPU, bfloat16 on GPU.
        precision: the recipe of FP8 and FP4 GEMMs; None = all GEMMs are in `dtype`.
        cuda_graph: run forward and backward as one CUDA graph.
        seed: seed of the data order, weight initialization and sampling.
        eval_every: steps between losses on evaluation data; 0 = none.
        checkpoint_every: steps between checkpoints; 0 = none.
        memory_checkpoint_every: steps between checkpoints in the memory of hosts; 0 = none.
        expert_loads_every: steps between logs of the load of each expert; 0 = none.
        move_experts_every: steps between moves of experts that balance the ranks' loads, by the
            loads of all these steps; 0 = none.
        profile: steps that the profiler traces for `moecore report`; 0 = none.
        peak_tflops: peak TFLOP/s of one device for MFU; None = the bfloat16 peak of a known GPU.
        hang_timeout: maximum seconds of a phase of a step; a longer phase ends the run with a
            report. None = nine tenths of the process group's timeout.
        ranks: processes; None = one per GPU, two on CPU, or the ranks of torchrun.
        plain_host: do not set CPU affinity and do not disable automatic garbage collection.
        deterministic: compute the same bits in every run of the command on the same machine.
        parallel: parallel degrees; ep not set = the largest of 1, 2, 4 and 8 that fits.
        optimizer: the optimizers.
        schedule: the learning rate over the steps.
        skip_spikes: skip steps whose gradient norm is far above recent norms; None = skip none.
        logging: loggers.
        stage: the stage whose options this record has; None = no stage is planned.
        run: the options of the run that the stage belongs to; None = this record.
    """

    config: Path | None = make_unsaved_field(None)
    dry_run: bool = make_unsaved_field(False)
    gpus: Count | None = make_unsaved_field(None)
    gpu: GpuName = make_unsaved_field("h100-80")
    run_dir: Path
    checkpoint_dir: str | None = None
    steps: Count = 400
    batch_size: Count
    grad_accum: Count = 1
    global_batch_size: Count | None = None
    seq_len: Count
    aux_loss: PositiveOrZero | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    precision: PrecisionName | None = None
    cuda_graph: bool = False
    seed: RunSeed = 0
    eval_every: CountOrZero = 0
    checkpoint_every: CountOrZero = 100
    memory_checkpoint_every: CountOrZero = 0
    expert_loads_every: CountOrZero = 10
    move_experts_every: CountOrZero = 0
    profile: CountOrZero = 0
    peak_tflops: Positive | None = None
    hang_timeout: Positive | None = None
    ranks: Count | None = None
    plain_host: bool = False
    deterministic: bool = False
    parallel: Annotated[Fields, Table(record=ParallelConfig)] = field(default_factory=dict)
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: LearningRateSchedule = LearningRateSchedule()
    skip_spikes: Annotated[SpikeOptions | None, Table(prefix=True)] = None
    logging: LoggerOptions = LoggerOptions()
    stage: TrainingStage | None = make_internal_field(None)
    run: "RunConfig | None" = make_internal_field(None)

    def resolve(self) -> Self:
        """Return the options, with defaults that depend on other options filled in."""
        return self

    def count_micro_batches(self, data_ranks: int) -> int:
        """Return --grad-accum, or --global-batch-size / micro-batch rows; ValueError if uneven."""
        if self.global_batch_size is None:
            return self.grad_accum
        rows = data_ranks * self.batch_size
        if self.global_batch_size % rows or self.grad_accum > 1:
            raise ValueError(
                f"--global-batch-size ({self.global_batch_size}) must be a multiple of data "
                f"ranks x --batch-size ({data_ranks} x {self.batch_size}), without --grad-accum"
            )
        return self.global_batch_size // rows

    def get_degree(self, name: str) -> int:
        """Return the parallel degree `name`, such as "pp"; 1 if the degree is not set or -1."""
        return max(1, int(self.parallel.get(name, 1)))

    def make_parallel_config(self, world_size: int, *, num_experts: int) -> ParallelConfig:
        """Return the parallel degrees for `world_size` ranks; unset ep = the largest that fits."""
        degrees: dict[str, Any] = dict(self.parallel)
        if "ep" not in degrees:
            product = math.prod(map(self.get_degree, ("pp", "etp", "edp_shard", "edp_replicate")))
            fits = [n for n in (1, 2, 4, 8) if world_size % (n * product) == 0]
            degrees["ep"] = max((n for n in fits if num_experts % n == 0), default=1)
        return ParallelConfig(**degrees).resolve(world_size)

    def make_moe_overrides(self) -> MoEOverrides:
        """Return changes to a transformers model's MoE config: --aux-loss as its coefficient."""
        if not self.aux_loss:
            return MoEOverrides()
        return MoEOverrides(balance=BalanceConfig(micro_batch_coef=self.aux_loss))

    def get_compute_dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype of activations on a device."""
        return DTYPES[self.dtype or ("bfloat16" if device.type == "cuda" else "float32")]


def get_moe_config(config: DecoderConfig) -> MoEConfig:
    """Return the config of a decoder's MoE layers; ValueError for a dense decoder."""
    if config.moe is None:
        raise ValueError("the model must have MoE layers: choose another --preset or --hf-config")
    return config.moe


@dataclass(frozen=True, kw_only=True)
class ShardedConfig(RunConfig, ShardingOptions):
    """Options of a training whose model `parallelize_moe` shards.

    Attributes:
        clones: replicas of the most loaded experts on other ranks.
        context: context parallelism.
    """

    clones: CloneOptions | None = None
    context: Annotated[ContextOptions | None, Table(without=("dynamic",))] = None

    def make_context_options(self) -> ContextOptions | None:
        """Return the options of [context], dynamic if --dynamic-cp is set; None = defaults."""
        if self.sharding.dynamic_cp is None:
            return self.context
        return replace(self.context or ContextOptions(), dynamic=True)

    @override
    def make_dispatch_options(self, max_tokens: int | None = None) -> DispatchOptions:
        """Return the options of token dispatch; `max_tokens` is the default of [nvlink]'s field."""
        dispatch = super().make_dispatch_options()
        nvlink, name = dispatch.nvlink, dispatch.name
        if max_tokens is not None and (nvlink or name in ("auto", "nvlink", "hierarchical")):
            nvlink = nvlink or NVLinkOptions()
            nvlink = nvlink if nvlink.max_tokens else replace(nvlink, max_tokens=max_tokens)
        clones = self.clones or (CloneOptions() if self.sharding.clones else None)
        return replace(dispatch, nvlink=nvlink, clones=clones)

    def check_sharding(self) -> None:
        """Raise ValueError for options of sharding that cannot be combined."""
        self.make_memory_options(), self.make_pipeline_options(), self.make_context_options()
        self.make_precision(), self.make_dispatch_options()
        if self.deterministic and self.sharding.dispatcher == "nccl_ep":
            raise ValueError(
                "--dispatcher (nccl_ep) must be another one with --deterministic, because NCCL EP "
                "promises no order of its sums: use nvlink or alltoall"
            )
        pp, dynamic_cp = self.get_degree("pp"), self.sharding.dynamic_cp
        for name, other, reason in (
            ("--optimizer muon", self.optimizer.optimizer == "muon", "steps on the GPU"),
            ("--state-offload", self.optimizer.state_offload > 0, "copies state to the GPU"),
            ("--move-experts-every", self.move_experts_every > 0, "sends weights from the GPU"),
        ):
            if self.memory.offload_params and other:
                raise ValueError(
                    f"--offload-params must not go with {name}, which {reason}: drop one of them"
                )
        for name, other, reason in (
            (f"--pp {pp}", pp > 1, "wait for other ranks"),
            (f"--dynamic-cp {dynamic_cp}", dynamic_cp is not None, "have shapes of their own"),
            ("--move-experts-every", self.move_experts_every > 0, "read other tables of experts"),
        ):
            if self.cuda_graph and other:
                raise ValueError(
                    f"--cuda-graph must not go with {name}, whose micro-batches {reason}: drop it"
                )

    def check_seq_len(self, parallel: ParallelConfig) -> None:
        """Raise ValueError if --seq-len or --dynamic-cp does not fit tp, cp and the data ranks."""
        cp, tp, max_tokens = parallel.cp, parallel.tp, self.sharding.dynamic_cp
        if max_tokens is not None:
            name, multiple = f"--dynamic-cp ({max_tokens})", math.lcm(2, tp)
            if cp > 1:
                raise ValueError(
                    f"{name} must go with --cp ({cp}) = 1, because each micro-batch has its own "
                    "cp: drop one of them"
                )
            if TILE % tp or max_tokens < 1 or max_tokens % multiple:
                raise ValueError(
                    f"{name} must be a multiple of {multiple} with --tp ({tp}), a power of two: "
                    "round it"
                )
            ranks = parallel.dp_replicate * parallel.dp_shard
            largest = ranks & -ranks
            if self.seq_len % (chunks := get_length_multiple(largest)):
                raise ValueError(
                    f"--seq-len ({self.seq_len}) must be a multiple of {chunks}, two chunks of "
                    f"each of {largest} data ranks, with {name}: round it up"
                )
            if self.seq_len > largest * max_tokens:
                raise ValueError(
                    f"{name} must be >= what each of {largest} data ranks holds of --seq-len "
                    f"({self.seq_len}): raise it, or lower --seq-len"
                )
        multiple = cp * math.lcm(2, tp) if cp > 1 else tp
        if self.seq_len % multiple:
            raise ValueError(
                f"--seq-len ({self.seq_len}) must be a multiple of {multiple} with --cp {cp} and "
                f"--tp {tp}: use {-(-self.seq_len // multiple) * multiple}"
            )


def parallelize(
    model: nn.Module,
    meshes: Meshes,
    config: ShardedConfig,
    *,
    max_tokens: int | None = None,
    **options: Any,
) -> None:
    """Shard a model in place by `parallelize_moe`, with the options of a run and `options`."""
    sharding = config.sharding
    parallelize_moe(
        model,
        meshes,
        dispatch=config.make_dispatch_options(max_tokens),
        expert_backend=sharding.expert_backend,
        dense=DenseOptions(
            overlap_shared=sharding.overlap_shared,
            compile=sharding.compile_dense,
            graph=sharding.graph_dense,
        ),
        precision=config.make_precision(),
        loss="sum",
        memory=config.make_memory_options(),
        context=config.make_context_options(),
        pipeline=config.make_pipeline_options(),
        fsdp=config.make_fsdp_options(config.get_compute_dtype(torch.device(meshes.device_type))),
        **options,
    )
