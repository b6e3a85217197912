"""Parts of a torchtitan 0.3 job that moecore replaces: trainer, loss, metrics, models, `V03`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import BaseLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config.override import derive
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.moe import GroupedExperts, MoE, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from moecore.base.torch_private import grouped_mm_overload
from moecore.integrations.torchtitan import models
from moecore.integrations.torchtitan.layer import Fills, TitanLayer, adopt_block, shard_dense_parts
from moecore.integrations.torchtitan.options import MoECore
from moecore.integrations.torchtitan.parallelize import (
    TOKENS,
    Rule,
    Version,
    is_compiled_job,
    remove_router_name,
)
from moecore.integrations.torchtitan.pipeline import MicroBatchSchedule, check_stages
from moecore.integrations.torchtitan.sections import list_changed_fields
from moecore.integrations.torchtitan.step import MoEMetricsProcessor
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.layer import LayerLayout
from moecore.parallel.mesh import Meshes


class MoETrainer(Trainer):
    """torchtitan's trainer with a config section `moecore`, which a `parallelize_fn` receives."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's job config with an additional section `moecore`."""

        moecore: MoECore = field(default_factory=MoECore)

    def __init__(self, config: Config) -> None:
        spec = config.model_spec
        config.model_spec = replace(spec, parallelize_fn=partial(spec.parallelize_fn, job=config))
        super().__init__(config)


class OwnLossTrainer(MoETrainer):
    """A MoETrainer for models that receive labels and return their summed loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoETrainer.Config):
        """torchtitan's job config with an additional section `moecore`."""

    def batch_generator(self, data_iterable: Iterable[Any]) -> Iterator[Any]:
        """Yield torchtitan's batches; if `moecore.documents` is set, with document boundaries."""
        for inputs, labels in super().batch_generator(data_iterable):
            if self.config.moecore.documents:
                inputs = inputs | models.make_document_inputs(inputs["positions"] == 0)
            yield inputs, labels

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return inputs, labels, and forward arguments: labels and, under cp, unsharded rows."""
        model_inputs = {models.LABELS: labels, TOKENS: input_dict["input"]}
        inputs, labels, extra = super().post_dataloading_process(input_dict, labels)
        if self.parallel_dims.cp == 1:
            model_inputs = {models.LABELS: labels}
        return inputs, labels, extra | model_inputs


class SumLoss(BaseLoss):
    """A torchtitan loss that returns its input, because the model's forward computes the loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """A config without fields."""

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        self.fn: Callable[[Tensor, Tensor], Tensor] = lambda loss, labels: loss


class TitanMetrics(MoEMetricsProcessor):
    """torchtitan 0.3's metrics processor, which also logs the load of the experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """The options of torchtitan's metrics processor."""


class SavingAC(SelectiveAC):
    """torchtitan's selective activation checkpointing that also saves outputs of grouped GEMMs."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """The options of torchtitan's selective checkpointing."""

    def get_save_ops(self) -> set[Any]:
        """Return the operations whose outputs are saved for backward."""
        result: set[Any] = super().get_save_ops() | {grouped_mm_overload}
        return result


class TitanDecoder(models.LossDecoder, BaseModel):
    """A LossDecoder with the base class that torchtitan 0.3 requires."""

    @dataclass(kw_only=True, slots=True)
    class Config(models.DecoderArgs, BaseModel.Config):
        """The arguments of moecore's decoder in torchtitan 0.3."""

    def verify_module_protocol(self) -> None:
        """Do nothing: `init_weights` initialises all of moecore's modules."""


class TitanHF(models.HFModel, BaseModel):
    """An HFModel with the base class that torchtitan 0.3 requires."""

    @dataclass(kw_only=True, slots=True)
    class Config(models.HFArgs, BaseModel.Config):
        """The arguments of a transformers model in torchtitan 0.3."""

        source: models.Source | None = None
        hf_config: Any = None
        hf_weights: str | None = None

    def verify_module_protocol(self) -> None:
        """Do nothing: `init_weights` initialises all modules of transformers."""


class TitanMoE(TitanLayer, Module):
    """A TitanLayer with the parameter names of torchtitan 0.3's `MoE`."""

    names = LayerLayout(
        router="router.gate",
        experts="routed_experts.inner_experts",
        shared="shared_experts",
        expert_bias="expert_bias_E",
        expert_layout=ExpertLayout(w1="w1_EFD", w2="w2_EDF", w3="w3_EFD", gate_up="separate"),
    )
    known_classes: ClassVar = {
        "routed_experts.inner_experts": (GroupedExperts,),
        "router": (TokenChoiceTopKRouter,),
        "routed_experts.token_dispatcher": (AllToAllTokenDispatcher, LocalTokenDispatcher),
    }
    fills: Fills

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Shard the shared experts over tp and replicate the router, in place."""
        shard_dense_parts(self, parallel_dims.get_mesh("tp"))

    def forward(  # type: ignore[override]  # a forward of torchtitan has no cp of its own
        self, x: Tensor, padding_mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Return the block's output, with the placements of `x` if `x` is a DTensor."""
        y_BtD = super().forward(x, padding_mask, cu_seqlens)
        if not isinstance(x, DTensor):
            return y_BtD
        return DTensor.from_local(y_BtD, x.device_mesh, x.placements, run_check=False)

    def init_states(self, *, buffer_device: Any = None) -> None:
        """Initialize parameters with torchtitan's functions for the replaced block."""
        self.init_parameters(
            self.fills, lambda shared: shared.init_states(buffer_device=buffer_device)
        )


def make_titan_moe(block: Any, model: nn.Module, *, update_bias: bool = True) -> TitanMoE:
    """Return a TitanMoE with the parameters and initialisers of a torchtitan MoE block."""
    layer = adopt_block(TitanMoE, block, model, update_bias=update_bias)
    parts = {"experts": block.routed_experts.inner_experts, "router": block.router.gate}
    layer.fills = {
        role: {name: part._param_init[name] for name, _ in part.named_parameters(recurse=False)}
        for role, part in parts.items()
    }
    return layer


def _list_version_rules(job: Any, parallel_dims: ParallelDims, returns_loss: bool) -> list[Rule]:
    degrees, ac = job.parallelism, job.activation_checkpoint
    backend, sequence = degrees.spmd_backend, degrees.enable_sequence_parallel
    known_ac = ac is None or isinstance(ac, SelectiveAC.Config | FullAC.Config)
    has_titan_tp = parallel_dims.tp > 1 and not returns_loss  # torchtitan's own tensor parallelism
    has_other_backend = has_titan_tp and backend != "partial_dtensor"
    is_compiled = has_titan_tp and is_compiled_job(job)
    changed_options = list_changed_fields(job.moecore)
    optimizer_options = [n for n in changed_options if n.startswith(("adamw.", "muon."))]
    optimizer = "absent, because optimizers of 0.3 are its own, 'DistMuon' among them,"
    return [
        *((f"moecore.{name}", "set", True, optimizer) for name in optimizer_options),
        ("validator.enable", True, returns_loss and job.validator.enable, "False"),
        ("parallelism.spmd_backend", backend, backend == "full_dtensor", "'spmd_types'"),
        ("parallelism.enable_fsdp_symm_mem", True, degrees.enable_fsdp_symm_mem, "False"),
        ("debug.spmd_typechecking", True, job.debug.spmd_typechecking, "False"),
        ("training.disable_cuda_graphs", False, not job.training.disable_cuda_graphs, "True"),
        ("activation_checkpoint", ac, not known_ac, "selective, full or none"),
        ("parallelism.spmd_backend", backend, has_other_backend, "'partial_dtensor'"),
        ("parallelism.enable_sequence_parallel", False, has_titan_tp and not sequence, "True"),
        ("compile.components", job.compile.components, is_compiled, "without 'model'"),
    ]


def build_pipeline_schedule(
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    parallelize_fn: Callable[..., nn.Module],
    **_: Any,
) -> Any:
    """Shard a model: a `pipelining_fn`. Returns (schedule, [model], has first stage, has last)."""
    check_stages(model, parallel_dims.pp)
    model = parallelize_fn(model, parallel_dims=parallel_dims)
    return MicroBatchSchedule(model), [model], True, True


def _shard_over_tp(
    model: nn.Module, parallel_dims: ParallelDims, meshes: Meshes, job: Any
) -> Meshes:
    """Shard a model over tp by torchtitan's plan; return `meshes` with torchtitan's FSDP mesh."""
    cast(Any, model).parallelize(parallel_dims)
    # The FSDP mesh must have the same root mesh as the tensors that torchtitan has sharded.
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate > 1 else "fsdp"
    return replace(meshes, dense_fsdp=parallel_dims.get_mesh(names))


def _apply_activation_checkpointing(model: nn.Module, job: Any) -> None:
    """Apply the job's activation checkpointing; matrix products of MoE layers are saved."""
    ac = job.activation_checkpoint
    if type(ac) is SelectiveAC.Config:
        names = remove_router_name(ac.force_recompute_mm_shapes_by_fqns)
        ac = derive(ac, SavingAC.Config, force_recompute_mm_shapes_by_fqns=names)
    if ac is not None:
        ac.build(dump_folder=job.dump_folder).apply(model)


V03 = Version(
    rules=_list_version_rules,
    block=MoE,
    adapter=make_titan_moe,
    apply_tp=_shard_over_tp,
    checkpoint=_apply_activation_checkpointing,
)
