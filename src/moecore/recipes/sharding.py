"""How a run shards its model: what `train`, `pretrain` and `finetune` share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import nn

from moecore.base.command_options import Fields, Table, make_unsaved_field
from moecore.base.fields import Count
from moecore.base.options.context import ContextOptions
from moecore.base.options.dense import DenseOptions
from moecore.base.options.dispatch import (
    CloneOptions,
    DispatcherName,
    DispatchOptions,
    NVLinkOptions,
)
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.memory import MemoryOptions, StashOptions
from moecore.base.options.names import GpuName
from moecore.base.options.precision import Precision, Recipe
from moecore.moe.backends import ExpertBackend
from moecore.parallel.mesh import Meshes
from moecore.parallel.pipeline.schedule import PipelineConfig
from moecore.parallelize import parallelize_moe
from moecore.recipes.options import RunConfig


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
        dry_run: print options, plan and first batch; train nothing.
        gpus: ranks of the plan of a dry run; None = the ranks that would start.
        gpu: the GPU of the plan of a dry run.
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

    dry_run: bool = make_unsaved_field(False)
    gpus: Count | None = make_unsaved_field(None)
    gpu: GpuName = make_unsaved_field("h100-80")
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
        """Return [memory] with the pages of [stash]."""
        stash = self.stash or (StashOptions() if self.sharding.stash else None)
        return replace(self.memory, stash=stash)

    def pipeline_options(self) -> PipelineConfig | None:
        """Return the pipeline stages; None = --pp is 1.

        Raises:
            ValueError: for options of [pipeline] without stages.
        """
        pp = self.parallel.get("pp")
        if self.degree("pp") > 1:
            return self.pipeline or PipelineConfig()
        if self.pipeline is not None:
            raise ValueError(f"--pp ({pp}) must be > 1 with options of [pipeline]: drop those")
        return None

    def context_options(self) -> ContextOptions | None:
        """Return [context], dynamic with --dynamic-cp."""
        if self.sharding.dynamic_cp is None:
            return self.context
        return replace(self.context or ContextOptions(), dynamic=True)

    def precision_options(self) -> Precision | None:
        """Return which products are in FP8; None = no product is.

        Raises:
            ValueError: for --precision with options of [recipe].
        """
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
        """Return [fsdp] with the dtype of the run."""
        return replace(self.fsdp, param_dtype=dtype)

    def dispatch_options(self, max_tokens: int | None = None) -> DispatchOptions:
        """Return the options of dispatch.

        Args:
            max_tokens: maximum tokens of a rank in a micro-batch; None = those of the first one.
        """
        nvlink, name = self.nvlink, self.sharding.dispatcher
        if max_tokens is not None and (nvlink or name in ("auto", "nvlink", "hierarchical")):
            nvlink = nvlink or NVLinkOptions()
            nvlink = nvlink if nvlink.max_tokens else replace(nvlink, max_tokens=max_tokens)
        clones = self.clones or (CloneOptions() if self.sharding.clones else None)
        return DispatchOptions(
            name=name, nvlink=nvlink, fp8=self.sharding.fp8_dispatch, clones=clones
        )

    def check_sharding(self) -> None:
        """Raise ValueError for options of records that do not fit together."""
        self.memory_options(), self.pipeline_options(), self.context_options()
        self.precision_options(), self.dispatch_options()


def parallelize(
    model: nn.Module,
    meshes: Meshes,
    config: ShardedConfig,
    *,
    max_tokens: int | None = None,
    **options: Any,
) -> None:
    """Shard a model over the ranks.

    Args:
        model: on the meta device.
        meshes: of the ranks.
        config: the options of the run.
        max_tokens: see `ShardedConfig.dispatch_options`.
        options: further arguments of `parallelize_moe`.
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
