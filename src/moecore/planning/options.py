"""The options that trainings and plans share, and the `TrainingRun` that the options describe.

    flags and TOML -> ShardingOptions -> make_training_run -> TrainingRun

Training commands and `moecore plan` inherit `ShardingOptions`, so each option has one name, and
equal options give equal runs.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

import torch

from moecore.base.command_options import Fields, Table
from moecore.base.options.dispatch import DispatcherName, DispatchOptions, NVLinkOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.memory import MemoryOptions, StashOptions
from moecore.base.options.names import GpuName, PrecisionName
from moecore.base.options.precision import Precision, Recipe
from moecore.moe.backends import ExpertBackend
from moecore.parallel.mesh import ParallelConfig
from moecore.parallel.pipeline.schedule import PipelineConfig
from moecore.planning.gpus import Gpu, are_peers, count_domain_ranks, count_peers, get_gpu
from moecore.planning.run import AnyModel, OptimizerOptions, TrainingRun

DEGREES = tuple(item.name for item in fields(ParallelConfig))


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Options of `parallelize_moe` that are not in TOML tables, and switches that enable tables.

    Attributes:
        dispatcher: how tokens are dispatched; "auto" selects by the hardware.
        fp8_dispatch: dispatch tokens, and save them for backward, as FP8.
        expert_backend: the kernels of the experts.
        overlap_shared: on GPUs, run shared experts on another stream.
        compile_dense: run attention, norms and residual adds through torch.compile.
        graph_dense: on GPUs, run the operations between token exchanges as CUDA graphs.
        stash: save expert activations for backward in a paged buffer, see [stash].
        clones: replicate the most loaded experts on other ranks, see [clones].
        dynamic_cp: maximum tokens per rank and micro-batch; the number of context parallel ranks
            then depends on the micro-batch. None = all micro-batches use --cp.
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


def make_optimizer_options(state: Any) -> OptimizerOptions:
    """Return the plan's options of AdamW from a command's record of optimizer options."""
    return OptimizerOptions(
        moment_dtype=state.moment_dtype,
        master_remainder=state.master_remainder,
        offload_fraction=state.state_offload,
    )


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """Options of a model that `parallelize_moe` shards.

    Attributes:
        batch_size: rows per data rank and micro-batch.
        seq_len: tokens of a row.
        precision: the recipe of FP8 and FP4 GEMMs.
        parallel: parallel degrees.
        sharding: options of `parallelize_moe` that are not in tables.
        fsdp: parameter sharding.
        memory: recomputation and offload.
        stash: the paged buffer of expert activations that are saved for backward.
        nvlink: the dispatcher nvlink.
        pipeline: pipeline stages, with --pp > 1.
        fp8: which GEMMs are in FP8, and other options of --precision or [recipe].
        recipe: a recipe of FP8 GEMMs, in place of --precision.
    """

    batch_size: int | None
    seq_len: int
    precision: PrecisionName | Literal["bf16"] | None = None
    parallel: Annotated[Fields, Table(record=ParallelConfig)] = field(default_factory=dict)
    sharding: Sharding = Sharding()  # frozen
    fsdp: Annotated[FSDPOptions, Table(without=("param_dtype",))] = FSDPOptions()
    memory: MemoryOptions = MemoryOptions()
    stash: StashOptions | None = None
    nvlink: NVLinkOptions | None = None
    pipeline: PipelineConfig | None = None
    fp8: Annotated[Fields, Table(record=Precision)] = field(default_factory=dict)
    recipe: Recipe | None = None

    def make_memory_options(self) -> MemoryOptions:
        """Return the options of [memory], with [stash] if the paged buffer is enabled."""
        stash = self.stash or (StashOptions() if self.sharding.stash else None)
        return replace(self.memory, stash=stash)

    def make_pipeline_options(self) -> PipelineConfig | None:
        """Return the pipeline options; None if --pp is 1. ValueError for [pipeline] with --pp 1."""
        pp = self.parallel.get("pp")
        if int(pp or 1) > 1:
            return self.pipeline or PipelineConfig()
        if self.pipeline is not None:
            raise ValueError(f"--pp ({pp}) must be > 1 with options of [pipeline]: drop those")
        return None

    def make_precision(self) -> Precision | None:
        """Return the FP8 recipe; None = no FP8. ValueError for both --precision and [recipe]."""
        if self.recipe is not None and self.precision is not None:
            raise ValueError(
                f"--precision ({self.precision}) must not go with options of [recipe], which is "
                "a recipe too: drop one of them"
            )
        if self.precision == "bf16" and self.fp8:
            flags = ", ".join(self.fp8)
            raise ValueError(f"--precision (bf16) must not go with [fp8] ({flags}): drop one")
        named = Precision.of(None if self.precision == "bf16" else self.precision)
        if named is None and self.fp8.get("frozen_dense") and not self.fp8.get("frozen"):
            raise ValueError("--frozen-dense must go with a 4-bit format: add --precision nf4")
        if named is None and (self.recipe is not None or self.fp8):
            only_stores = self.fp8.keys() <= {"frozen", "frozen_dense"}
            recipe = self.recipe or (None if only_stores else Recipe())
            return Precision(recipe=recipe, **self.fp8)
        return named and replace(named, **self.fp8)

    def make_fsdp_options(self, dtype: torch.dtype) -> FSDPOptions:
        """Return the options of [fsdp]; parameters are all-gathered in `dtype`."""
        return replace(self.fsdp, param_dtype=dtype)

    def make_dispatch_options(self) -> DispatchOptions:
        """Return the options of token dispatch."""
        name, fp8 = self.sharding.dispatcher, self.sharding.fp8_dispatch
        return DispatchOptions(name=name, nvlink=self.nvlink, fp8=fp8)

    def make_training_run(
        self,
        model: AnyModel,
        num_gpus: int,
        gpu: GpuName | Gpu,
        parallel: ParallelConfig,
        *,
        num_micro_batches: int,
        state: Any,
    ) -> TrainingRun:
        """Return the bf16 run of these options on GPUs of a kind, the input of a plan.

        `state` is the record that `make_optimizer_options` reads.
        """
        dispatch, domain = self.make_dispatch_options(), count_domain_ranks(gpu, num_gpus)
        num_peers, resolved = count_peers(gpu, domain), parallel.resolve(num_gpus)
        is_split = dispatch.name == "hierarchical"
        has_stores = dispatch.name in ("auto", "nvlink") and are_peers(
            resolved.ep * resolved.etp, num_peers
        )
        return TrainingRun(
            model=model,
            num_gpus=num_gpus,
            parallel=parallel,
            seq_len=self.seq_len,
            batch_size=1 if self.batch_size is None else self.batch_size,
            num_micro_batches=num_micro_batches,
            pipeline=self.make_pipeline_options(),
            fsdp=self.make_fsdp_options(torch.bfloat16),
            memory=self.make_memory_options(),
            precision=self.make_precision(),
            optimizer=make_optimizer_options(state),
            nvlink=dispatch.nvlink or NVLinkOptions() if is_split or has_stores else None,
            dispatcher="hierarchical" if is_split else "auto",
            ranks_per_domain=domain,
            num_peers=num_peers,
            has_block_scales=get_gpu(gpu).has_block_scales,
            fp8_dispatch=dispatch.fp8,
        )
