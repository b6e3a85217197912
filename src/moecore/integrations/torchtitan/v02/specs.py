"""TrainSpecs of torchtitan 0.2 with moecore's layers. Importing this module registers models.

    torchtitan.train --experimental.custom_import moecore.integrations.torchtitan.v02.specs \
        --model.name NAME

The names are in the last lines, and docs/torchtitan.md has their models and flavors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moecore.base import torch_private
from moecore.integrations.torchtitan.options import MoECore, get_moecore_options, make_import_error

try:
    from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
except ModuleNotFoundError as error:
    raise make_import_error(error, "v02.specs") from error
from torchtitan.components import optimizer as titan_optimizer
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.hf_datasets.text_datasets import build_text_dataloader
from torchtitan.models import deepseek_v3, qwen3
from torchtitan.models.deepseek_v3.infra import parallelize as deepseek_v3_infra
from torchtitan.models.moe.moe import GroupedExperts, MoE, TokenChoiceTopKRouter
from torchtitan.models.qwen3.infra import parallelize as qwen3_infra
from torchtitan.models.utils import trunc_normal_
from torchtitan.protocols import BaseModelArgs

from moecore.base.options.layer import BalanceConfig
from moecore.integrations.torchtitan import models, parallelize
from moecore.integrations.torchtitan.layer import TitanLayer, adopt_block, shard_dense_parts
from moecore.integrations.torchtitan.pipeline import RowSchedule, check_stages
from moecore.integrations.torchtitan.sections import list_changed_fields, read_arguments
from moecore.integrations.torchtitan.step import MoEMetricsProcessor, register_step_hooks
from moecore.models import PRESETS, DecoderConfig
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.layer import LayerLayout
from moecore.parallel.mesh import Meshes
from moecore.train import AdamW, Muon, assign_matrices

# torchtitan's functions that shard all modules except MoE blocks over tp.
DENSE_TP: dict[type, Callable[..., None]] = {
    qwen3.Qwen3Model: partial(qwen3_infra.apply_non_moe_tp, enable_async_tp=False),
    deepseek_v3.DeepSeekV3Model: deepseek_v3_infra.apply_non_moe_tp,
}
# Operations whose results selective checkpointing saves: matrix products and attention.
SAVED_OPS = {torch.ops.aten.mm.default, torch.ops.aten.max.default}
SAVED_OPS |= {torch_private.grouped_mm_overload, *torch_private.attention_overloads}
SAVED_OPS |= {torch_private.reduce_scatter_overload}
MOVING_BIAS = titan_optimizer.build_optimizers_with_moe_load_balancing
# Fields that `accelerated` replaces, and the values that it may replace.
REPLACED: dict[str, tuple[Any, ...]] = {
    "parallelize_fn": (qwen3_infra.parallelize_qwen3, deepseek_v3_infra.parallelize_deepseekv3),
    "build_optimizers_fn": (titan_optimizer.build_optimizers, MOVING_BIAS),
    "build_metrics_processor_fn": (None,),
}


class TitanMoE(TitanLayer):
    """A TitanLayer with the parameter names of torchtitan 0.2's `MoE`."""

    names = LayerLayout(
        router="router.gate",
        shared="shared_experts",
        expert_layout=ExpertLayout(gate_up="separate"),
    )
    known_classes: ClassVar = {"router": (TokenChoiceTopKRouter,), "experts": (GroupedExperts,)}

    def init_weights(self, init_std: float, buffer_device: Any = None) -> None:  # type: ignore[override]
        """Initialize w1 with std 0.02, other matrices with std `init_std`, and biases with 0."""
        fill = partial(trunc_normal_, mean=0.0, std=init_std)
        experts = {"w1": partial(trunc_normal_, mean=0.0, std=0.02), "w2": fill, "w3": fill}
        gate: dict[str, Any] = {"weight": fill, "bias": nn.init.zeros_}
        self.init_parameters(
            {"experts": experts, "router": gate}, lambda s: s.init_weights(init_std)
        )


class TitanHFArgs(models.HFArgs, BaseModelArgs):
    """`HFArgs` whose directory is the `model.hf_assets_path` of a torchtitan 0.2 job."""

    assets = "model.hf_assets_path"


def _list_version_rules(
    job: Any, parallel_dims: ParallelDims, returns_loss: bool
) -> list[parallelize.Rule]:
    degrees, checkpoint, mode = job.parallelism, job.checkpoint, job.activation_checkpoint.mode
    backend, async_tp = degrees.expert_parallel_comm_backend, degrees.enable_async_tensor_parallel
    converters, replicas = job.model.converters, parallel_dims.dp_replicate
    # torchtitan's own reader and writer of these files know no replicas.
    uses_hf = checkpoint.enable and (checkpoint.initial_load_in_hf or checkpoint.last_save_in_hf)
    optimizer, changed_options = job.optimizer, list_changed_fields(get_moecore_options(job))
    optimizer_options = [n for n in changed_options if n.startswith(("adamw.", "muon."))]
    has_other_optimizer = bool(optimizer_options) and not _is_fused_adamw(optimizer)
    name = f"{optimizer.name}, {optimizer.implementation}"
    changed_option = "".join(optimizer_options[:1])
    fused = f"'AdamW', 'fused', without early_step_in_backward, beside moecore.{changed_option}"
    requirement = "1 with checkpoint.initial_load_in_hf or last_save_in_hf"
    modes = "'none', 'full' or 'selective'"
    replicate = "parallelism.data_parallel_replicate_degree"
    return [
        ("validation.enable", True, returns_loss and job.validation.enable, "False"),
        ("parallelism.enable_async_tensor_parallel", True, bool(async_tp), "False"),
        ("parallelism.expert_parallel_comm_backend", backend, backend != "standard", "'standard'"),
        ("model.converters", converters, bool(converters), "[], or moecore.precision.enable set,"),
        ("optimizer", name, has_other_optimizer, fused),
        ("activation_checkpoint.mode", mode, mode == "memory_budget", modes),
        (replicate, replicas, uses_hf and replicas > 1, requirement),
    ]


def _shard_over_tp(model: Any, _: ParallelDims, meshes: Meshes, job: Any) -> Meshes:
    """Shard a torchtitan model over tp, in place; return `meshes` unchanged."""
    tp_mesh = meshes.dense["tp"]
    dense_tp = next(plan for kind, plan in DENSE_TP.items() if isinstance(model, kind))
    options = dict(loss_parallel=not job.parallelism.disable_loss_parallel, cp_enabled=False)
    dense_tp(model, tp_mesh, enable_float8_tensorwise_tp=False, **options)
    for layer in (m for m in model.modules() if isinstance(m, TitanMoE)):
        shard_dense_parts(layer, tp_mesh)
    if parallelize.is_compiled_job(job):
        # The embedding returns an AsyncCollectiveTensor. In torch 2.13 such an input of a compiled
        # graph has no gradient.
        model.tok_embeddings.register_forward_hook(lambda _, __, x: x.clone())
    return meshes


def _apply_activation_checkpointing(model: nn.Module, job: Any) -> None:
    """Apply the job's activation checkpointing, in place; the router is not recomputed."""
    ac, field = job.activation_checkpoint, "per_op_sac_force_recompute_mm_shapes_by_fqns"
    if ac.mode != "none":
        ac = replace(ac, **{field: parallelize.remove_router_name(getattr(ac, field))})
        apply_ac(model, ac, op_sac_save_list=SAVED_OPS)


make_titan_moe = partial(adopt_block, TitanMoE)
V02 = parallelize.Version(
    rules=_list_version_rules,
    block=MoE,
    adapter=make_titan_moe,
    apply_tp=_shard_over_tp,
    checkpoint=_apply_activation_checkpointing,
)


class LabelledDataLoader(BaseDataLoader):
    """Adds labels, document boundaries and, under cp, unsharded rows to a loader's inputs."""

    def __init__(self, loader: BaseDataLoader, job: Any, tokenizer: Any) -> None:
        self.loader = loader
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict
        self.has_cp = job.parallelism.context_parallel_degree > 1
        self.eos = None
        if get_moecore_options(job).documents:
            self.eos = getattr(tokenizer, "eos_id", None)
            if self.eos is None:
                raise ValueError(
                    "moecore.documents (True) must have a tokenizer with eos_id, which ends a "
                    "document: drop it"
                )

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for inputs, labels_BT in self.loader:
            tokens_BT = inputs["input"]
            labels: dict[str, Any] = {models.LABELS: labels_BT}
            if self.has_cp:  # torchtitan shards the input
                labels[parallelize.TOKENS] = tokens_BT
            if self.eos is not None:
                labels |= models.make_document_inputs(tokens_BT.roll(1, 1) == self.eos)
            yield {**inputs, **labels}, labels_BT


def add_labels(build_loader: Callable[..., BaseDataLoader]) -> Callable[..., BaseDataLoader]:
    """Wrap a build_dataloader_fn to build a `LabelledDataLoader`."""

    def build_labelled(**kwargs: Any) -> LabelledDataLoader:
        job, tokenizer = kwargs["job_config"], kwargs.get("tokenizer")
        return LabelledDataLoader(build_loader(**kwargs), job, tokenizer)

    return build_labelled


def build_pipeline_schedule(
    model: nn.Module,
    parallel_dims: ParallelDims,
    job: Any,
    device: torch.device,
    args: Any,
    parallelize_fn: Callable[..., nn.Module],
    loss_fn: Any,
) -> Any:
    """Shard a model: a `pipelining_fn`. Returns (schedule, [model], has first stage, has last)."""
    check_stages(model, parallel_dims.pp)
    model = parallelize_fn(model, parallel_dims, job)
    batch = parallel_dims.get_optional_mesh("batch")
    group = None if batch is None else batch.get_group()
    rows = job.parallelism.pipeline_parallel_microbatch_size
    return RowSchedule(model, group, micro_batch_rows=rows), [model], True, True


def accelerated(spec: TrainSpec) -> TrainSpec:
    """Return the TrainSpec of a torchtitan model whose MoE blocks become moecore layers.

    Names, shapes and the checkpoint layout of torchtitan do not change. Selection biases are
    updated if the given spec updates them (DeepSeek-V3 does, Qwen3 does not).

    Args:
        spec: spec of torchtitan's Qwen3Model or DeepSeekV3Model or a subclass, with any flavors.

    Raises:
        NotImplementedError: for another model, or customised functions that would be replaced.
    """
    parallelize.check_model("TrainSpec.model_cls", spec.model_cls, DENSE_TP)
    for field, classes in REPLACED.items():
        parallelize.refuse_custom_function(f"TrainSpec.{field}", getattr(spec, field), classes)
    updates = spec.build_optimizers_fn is MOVING_BIAS
    shard = partial(parallelize.parallelize_titan_model, version=V02, update_bias=updates)
    return replace(
        spec,
        parallelize_fn=shard,
        pipelining_fn=build_pipeline_schedule,
        build_optimizers_fn=build_optimizers,
        build_metrics_processor_fn=build_metrics_processor,
    )


def decoder_spec(flavors: Mapping[str, DecoderConfig]) -> TrainSpec:
    """Return the TrainSpec of moecore's decoder; `flavors` maps names to configs."""
    args = {name: models.DecoderArgs(decoder=config) for name, config in flavors.items()}
    return _make_own_loss_spec(models.LossDecoder, args, parallelize.parallelize_own_loss_model)


def hf_spec(
    flavors: Mapping[str, models.Source | None], *, balance: BalanceConfig | None = None
) -> TrainSpec:
    """Return the TrainSpec of Hugging Face MoE models with an adapter (docs/extending.md).

    Args:
        flavors: name -> a transformers config, or a directory with a config.json; None = the
            job's `model.hf_assets_path`.
        balance: balance options of all MoE layers; None = no auxiliary loss and no bias updates.
    """
    args = {name: TitanHFArgs(source) for name, source in flavors.items()}
    spec = _make_own_loss_spec(
        models.HFModel, args, partial(models.parallelize_hf_model, balance=balance)
    )
    return replace(spec, state_dict_adapter=models.HFNames)


def _make_own_loss_spec(
    model_cls: type[Any], args: Mapping[str, Any], parallelize_fn: Callable[..., nn.Module]
) -> TrainSpec:
    """Return the TrainSpec of a model that returns its loss; `args`: flavor -> model arguments."""
    return TrainSpec(
        model_cls=model_cls,
        model_args=args,
        parallelize_fn=partial(parallelize_fn, version=V02),
        pipelining_fn=build_pipeline_schedule,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=add_labels(build_text_dataloader),
        build_tokenizer_fn=build_hf_tokenizer,
        build_loss_fn=lambda job_config, **_: lambda loss, labels: loss,
        build_metrics_processor_fn=build_metrics_processor,
    )


class MuonContainer(titan_optimizer.OptimizersContainer):
    """torchtitan's container with two optimizers per model part: Muon for matrices, and AdamW."""

    def __init__(self, model_parts: list[nn.Module], config: Any, options: Any) -> None:
        muon_options = read_arguments(options.muon, "moecore.muon")
        self.optimizers, self.model_parts = [], [part for part in model_parts for _ in range(2)]
        adamw_options = _make_adamw_options(config, options)
        for part in model_parts:
            assignment = assign_matrices(part)
            muon = Muon(assignment, config.lr, weight_decay=config.weight_decay, **muon_options)
            self.optimizers += [muon, AdamW(assignment.adamw_params, **adamw_options)]
        params = [p for part in model_parts for p in part.parameters() if p.requires_grad]
        self._post_init(params, {"lr": config.lr})


def _make_adamw_options(optimizer_config: Any, moecore_section: Any) -> dict[str, Any]:
    keywords = read_arguments(moecore_section.adamw, "moecore.adamw")
    return dict(
        lr=optimizer_config.lr,
        betas=(optimizer_config.beta1, optimizer_config.beta2),
        eps=optimizer_config.eps,
        weight_decay=optimizer_config.weight_decay,
        **keywords,
    )


def build_optimizers(
    model_parts: list[nn.Module], optimizer_config: Any, parallel_dims: Any, ft_manager: Any = None
) -> titan_optimizer.OptimizersContainer:
    """Build the job's optimizers, with the hooks of `register_step_hooks`."""
    options = getattr(model_parts[0], parallelize.OPTIONS, None) or MoECore()
    has_ft = ft_manager is not None and ft_manager.enabled
    changed_options = list_changed_fields(options.adamw) + list_changed_fields(options.muon)
    if has_ft and changed_options:
        raise ValueError(
            f"moecore.adamw and muon ({changed_options[0]}) must be absent with torchft: drop it"
        )
    optimizers: titan_optimizer.OptimizersContainer
    if has_ft or not _is_fused_adamw(optimizer_config):
        optimizers = titan_optimizer.build_optimizers(
            model_parts, optimizer_config, parallel_dims, ft_manager
        )
    elif options.muon.enable:
        optimizers = MuonContainer(model_parts, optimizer_config, options)
    else:
        adamw_options = _make_adamw_options(optimizer_config, options)
        optimizers = titan_optimizer.OptimizersContainer(model_parts, AdamW, adamw_options)
    register_step_hooks(optimizers, model_parts)
    return optimizers


def _is_fused_adamw(config: Any) -> bool:
    fused = (config.name, config.implementation) == ("AdamW", "fused")
    return fused and not config.early_step_in_backward


def build_metrics_processor(
    job_config: Any, parallel_dims: Any, model_args: Any = None, tag: str | None = None
) -> MoEMetricsProcessor:
    """Build the metrics processor of a job; `tag` is a prefix of the metrics' names."""
    return MoEMetricsProcessor(job_config, parallel_dims, tag)


register_train_spec("moecore_qwen3", accelerated(qwen3.get_train_spec()))
register_train_spec("moecore_deepseek_v3", accelerated(deepseek_v3.get_train_spec()))
register_train_spec("moecore", decoder_spec(PRESETS))
register_train_spec("moecore_hf", hf_spec({"assets": None}))
