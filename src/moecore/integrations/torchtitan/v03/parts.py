"""The parts of a torchtitan 0.3 job that moecore replaces: trainer, parallelize_fn, loss, metrics.

torchtitan hands its parallelize_fn a few sections of the job; the trainer here binds the whole job
to it, with section `moecore`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torchtitan.components.loss import BaseLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config.override import derive
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.moe import MoE
from torchtitan.trainer import Trainer

from moecore.base.torch_names import grouped_mm_overload
from moecore.families.family import swap_blocks
from moecore.integrations.torchtitan.options import MoECore
from moecore.integrations.torchtitan.shared import (
    Rule,
    check_tensor_parallel,
    compile_and_shard,
    compiles_model,
    refuse,
    titan_meshes,
    without_router,
)
from moecore.integrations.torchtitan.step import MoEMetricsProcessor
from moecore.integrations.torchtitan.v03.moe import titan_moe
from moecore.parallel.mesh import Meshes

LABELS = "labels"  # the keyword under which a model that makes its own loss gets them


class MoETrainer(Trainer):
    """torchtitan's trainer with a section `moecore`, whose parallelize_fn sees the whole job.

    Args:
        config: the job.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's job.

        Attributes:
            moecore: choices for moecore's layers.
        """

        moecore: MoECore = field(default_factory=MoECore)

    def __init__(self, config: Config) -> None:
        spec = config.model_spec
        config.model_spec = replace(spec, parallelize_fn=partial(spec.parallelize_fn, job=config))
        super().__init__(config)


class OwnLossTrainer(MoETrainer):
    """A MoETrainer whose model gets the labels too and returns its summed loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoETrainer.Config):
        """See `MoETrainer.Config`."""

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return torchtitan's inputs and labels, and the labels among the model's arguments."""
        inputs, labels, extra = super().post_dataloading_process(input_dict, labels)
        return inputs, labels, {**extra, LABELS: labels}


class SumLoss(BaseLoss):
    """The loss of a model that returned its summed loss; torchtitan divides it by tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """No fields."""

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        self.fn: Callable[[Tensor, Tensor], Tensor] = _first


def _first(loss: Tensor, labels: Tensor) -> Tensor:
    return loss


class TitanMetrics(MoEMetricsProcessor):
    """`MoEMetricsProcessor` as a part of 0.3's job."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """torchtitan's fields."""


class SavingAC(SelectiveAC):
    """torchtitan's selective checkpointing, which keeps the experts' products too."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """torchtitan's fields."""

    def get_save_ops(self) -> set[Any]:
        """Return the operations whose results are kept."""
        return super().get_save_ops() | {grouped_mm_overload}


def parallelize_titan(
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    job: MoETrainer.Config,
    update_bias: bool,
    **_: Any,
) -> nn.Module:
    """Return torchtitan's model with its MoE blocks as sharded moecore layers; a parallelize_fn.

    Args:
        model: on meta, with `layers` of blocks whose `moe` is torchtitan's `MoE`.
        job: bound by `MoETrainer`.
        update_bias: see `titan_moe`.

    Raises:
        ValueError, NotImplementedError: see `check_job`, `titan_moe` and `parallelize_moe`.
    """
    check_job(job, parallel_dims)
    if job.moecore.hf_weights is not None:
        raise NotImplementedError(
            f"moecore.hf_weights ({job.moecore.hf_weights!r}) must be absent for torchtitan's own "
            "models: use checkpoint.initial_load_in_hf"
        )
    if parallel_dims.tp > 1:
        _check_dense_tensor_parallel(job)
    swap_blocks(model, {MoE: partial(titan_moe, update_bias=update_bias)})
    meshes = titan_meshes(parallel_dims)
    if parallel_dims.tp > 1:
        cast(Any, model).parallelize(parallel_dims)
        # Units want one root mesh above its own and that of the tensors which torchtitan has cut.
        names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate > 1 else "fsdp"
        meshes = replace(meshes, dense_fsdp=parallel_dims.get_mesh(names))
    return finish(model, meshes, job)


def parallelize_own_loss(
    model: nn.Module, *, parallel_dims: ParallelDims, job: MoETrainer.Config, **_: Any
) -> nn.Module:
    """Shard a model that makes its own loss by the job's config; a parallelize_fn.

    Raises:
        ValueError, NotImplementedError: see `check_job` and `parallelize_moe`.
    """
    check_job(job, parallel_dims)
    refuse([("validator.enable", True, job.validator.enable, "False")])
    return finish(model, titan_meshes(parallel_dims), job)


def finish(model: nn.Module, meshes: Meshes, job: MoETrainer.Config) -> nn.Module:
    """Checkpoint blocks, then `compile_and_shard`.

    Args:
        model: `get_submodule("layers")` gives its blocks.
        meshes: from `titan_meshes`.
    """
    checkpointing = job.activation_checkpoint
    if type(checkpointing) is SelectiveAC.Config:
        names = without_router(checkpointing.force_recompute_mm_shapes_by_fqns)
        checkpointing = derive(
            checkpointing, SavingAC.Config, force_recompute_mm_shapes_by_fqns=names
        )
    if checkpointing is not None:
        checkpointing.build(dump_folder=job.dump_folder).apply(model)
    return compile_and_shard(model, meshes, job)


def check_job(job: Trainer.Config, parallel_dims: ParallelDims) -> None:
    """Raise for what a job asks and this integration cannot do, before any collective.

    Raises:
        NotImplementedError: with the field, its value and the fix.
    """
    degrees, training, ac = job.parallelism, job.training, job.activation_checkpoint
    backend, cp = degrees.spmd_backend, parallel_dims.cp
    known_ac = ac is None or isinstance(ac, SelectiveAC.Config | FullAC.Config)
    rules: list[Rule] = [
        ("parallelism.context_parallel_degree", cp, cp > 1, "1"),
        ("parallelism.spmd_backend", backend, backend == "full_dtensor", "'spmd_types'"),
        ("parallelism.enable_fsdp_symm_mem", True, degrees.enable_fsdp_symm_mem, "False"),
        ("debug.spmd_typechecking", True, job.debug.spmd_typechecking, "False"),
        ("training.enable_cpu_offload", True, training.enable_cpu_offload, "False"),
        ("training.disable_cuda_graphs", False, not training.disable_cuda_graphs, "True"),
        ("activation_checkpoint", ac, not known_ac, "selective, full or none"),
    ]
    refuse(rules)
    check_tensor_parallel(parallel_dims)


def _check_dense_tensor_parallel(job: Trainer.Config) -> None:
    """Raise for what torchtitan's own tensor parallelism must be beside moecore's sharding."""
    degrees, compiled = job.parallelism, compiles_model(job)
    backend, sequence = degrees.spmd_backend, degrees.enable_sequence_parallel
    rules: list[Rule] = [
        ("parallelism.spmd_backend", backend, backend != "partial_dtensor", "'partial_dtensor'"),
        ("parallelism.enable_sequence_parallel", False, not sequence, "True"),
        ("compile.components", job.compile.components, compiled, "without 'model'"),
    ]
    refuse(rules)
