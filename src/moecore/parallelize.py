"""`parallelize_moe`: checks the arguments, compares ranks, plans the sharding and applies the plan.

Only this file imports every package. The plan is applied in phases. Each phase changes the model
and stores its result in one record, `ParallelState`. A new capability is a new phase after the
phases whose results it reads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Annotated, Any, ParamSpec, TypeVar, get_type_hints

from torch import nn

from moecore.base.failures import publish_errors, share_call_errors, share_errors
from moecore.base.fields import check_arguments
from moecore.base.options.context import ContextOptions
from moecore.base.options.dense import DenseOptions
from moecore.base.options.dispatch import DispatcherName, DispatchOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.indexer import IndexerConfig
from moecore.base.options.layer import MoEOverrides
from moecore.base.options.memory import MemoryOptions
from moecore.base.options.precision import NamedPrecision, Precision, Recipe
from moecore.families.family import find_family
from moecore.moe.backends import ExpertBackend
from moecore.parallel.choice import choose_meshes, start_default_group
from moecore.parallel.fsdp.plan import ShardPlan
from moecore.parallel.mesh import Meshes
from moecore.parallel.model import phases
from moecore.parallel.model.checks import check_layers, check_request
from moecore.parallel.model.family import ADAPTER_FIX, Adapter
from moecore.parallel.model.module_protocols import patch_module_protocols
from moecore.parallel.model.parallel_state import PARALLEL_STATE, ParallelState
from moecore.parallel.model.parameter_guards import mark_replaced_params
from moecore.parallel.model.plan import Layers, make_shard_plan, shard_over_ep_and_tp
from moecore.parallel.model.request import LossConvention, Request, compare_models, compare_stages
from moecore.parallel.model.shard_model import shard_model
from moecore.parallel.pipeline.schedule import PipelineConfig
from moecore.precision.apply import apply_precision, defer_linears
from moecore.precision.stored import store_experts_in_four_bits, store_linears_in_four_bits
from moecore.train.phases import (
    apply_compile,
    apply_cuda_graphs,
    apply_frozen_offload,
    apply_param_offload,
    apply_recompute_and_offload,
)

P = ParamSpec("P")
T = TypeVar("T")
Model = TypeVar("Model", bound=nn.Module)


@share_call_errors
def parallelize_moe(
    model: Model,
    meshes: Annotated[Meshes | None, "pass build_meshes(ParallelConfig(...))"] = None,
    *,
    dispatch: DispatcherName | DispatchOptions = "auto",
    expert_backend: ExpertBackend = "auto",
    memory: MemoryOptions | None = None,
    dense: DenseOptions | None = None,
    moe: MoEOverrides | None = None,
    context: ContextOptions | None = None,
    indexer: IndexerConfig | None = None,
    precision: Precision | Recipe | NamedPrecision | None = None,
    fsdp: FSDPOptions | None = None,
    loss: LossConvention = "mean",
    pipeline: PipelineConfig | None = None,
    adapters: Annotated[Mapping[type, Adapter] | None, ADAPTER_FIX] = None,
) -> Model:
    """Shard a model over the dense and the expert mesh, in place, and return it. Collective.

    Parameters become DTensors with unchanged names and global shapes. The model may be on the meta
    device, or have weights that are equal on every rank. docs/parallelize.md has every argument.

    Args:
        model: any module; its routed experts use the expert mesh, other parameters the dense mesh.
        meshes: the result of `build_meshes`; None = meshes over all ranks (`choose_meshes`).
        dispatch: name or options of the dispatcher; "auto" chooses one that the hardware supports.
        expert_backend: implementation of the experts' matrix products, see `moe/backends.py`.
        memory: activations to recompute or offload; None = all saved activations stay on the GPU.
        dense: compilation, CUDA graphs and overlap of attention, norms, shared experts; None = off.
        moe: fields of `MoEConfig` for every MoE layer; other fields keep the layer's values.
        context: how attention communicates between cp ranks; None = the defaults.
        indexer: how indexers of sparse attention are trained; None = they are not trained.
        precision: the modules that run in FP8, and the format of frozen experts; None = no FP8.
        fsdp: how parameters are sharded and all-gathered; None = the defaults.
        loss: "mean" over a rank's tokens, or "sum" divided by the global number of tokens.
        pipeline: stages of the pp ranks, which `TrainStep.forward_backward` runs.
        adapters: block class -> function `(block, model) -> MoELayer`, before moecore's adapters.
    """
    arguments = locals()
    if meshes is None:
        arguments["meshes"] = _choose_meshes(arguments)
    with share_errors():
        check_arguments(parallelize_moe, arguments)
        request = _make_request(arguments)
        root = request.family.unwrap_peft(model)
        replaced = list(model.parameters())
        check_request(root, request)
        layers = request.family.swap_blocks(root, adapters or {})
        fp32 = _set_dtypes(root, layers, request)
    compare_models(root, layers, request)
    with share_errors():
        state = _make_state(root, layers, fp32, request)
        request.family.prepare_for_sharding(root)
    compare_stages(root, state.plan, request)
    with publish_errors("parallelize_moe()"):
        for phase in PHASES:
            phase(root, state)
    setattr(root, PARALLEL_STATE, state)
    warns_about_cache = request.dense.compile or request.memory.parts or request.memory.offload
    request.family.install_guards(root, wrapper=model, warns_about_cache=bool(warns_about_cache))
    patch_module_protocols(model)
    mark_replaced_params(replaced)
    return model


def _with_arguments_of(other: Callable[P, Any]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Return a decorator for a function of {name: argument}, which is called as `other`."""

    def decorate(function: Any) -> Any:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            bound = signature(other).bind(*args, **kwargs)
            bound.apply_defaults()
            return function(bound.arguments)

        returns = get_type_hints(function)["return"]
        call.__signature__ = signature(other).replace(return_annotation=returns)  # type: ignore[attr-defined]
        return call

    return decorate


@_with_arguments_of(parallelize_moe)
def plan_sharding(arguments: Mapping[str, Any]) -> ShardPlan:
    """Return the sharding plan that `parallelize_moe` makes from the same arguments.

    The model is not changed: block adapters and `apply_tensor_parallel` receive a copy on the meta
    device. With `meshes` the function does not communicate, so the world may be larger than this
    machine. Without `meshes` it is collective. It raises the errors of `parallelize_moe`, except
    for comparisons of ranks and checks that need the GPUs of all ranks. `explain` prints a plan.
    """
    if arguments["meshes"] is None:
        arguments = {**arguments, "meshes": _choose_meshes(arguments)}
    check_arguments(parallelize_moe, arguments)
    request = _make_request(arguments)
    root = request.family.unwrap_peft(arguments["model"])
    check_request(root, request)
    twin, layers = request.family.copy_with_layers(root, arguments["adapters"] or {})
    return _make_state(twin, layers, _set_dtypes(twin, layers, request), request).plan


def _choose_meshes(arguments: Mapping[str, Any]) -> Meshes:
    """Build the default meshes for `parallelize_moe(**arguments)`. Collective."""
    start_default_group()  # in which ranks share errors
    with share_errors():
        check_arguments(parallelize_moe, arguments)
        family, model = find_family(arguments["model"]), arguments["model"]
        adapters = arguments["adapters"] or {}
        _, layers = family.copy_with_layers(family.unwrap_peft(model), adapters)
    return choose_meshes(layer.config.num_experts for layer in layers.values())


def _make_request(arguments: Mapping[str, Any]) -> Request:
    values = {name: arguments[name] for name in arguments if name not in ("model", "adapters")}
    values |= dict(
        family=find_family(arguments["model"]),
        dispatch=DispatchOptions.of(arguments["dispatch"]),
        memory=arguments["memory"] or MemoryOptions(),
        dense=arguments["dense"] or DenseOptions(),
        moe={**(arguments["moe"] or {})},
        precision=Precision.of(arguments["precision"]),
        fsdp=arguments["fsdp"] or FSDPOptions(),
    )
    return Request(**values)


def _set_dtypes(model: nn.Module, layers: Layers, request: Request) -> frozenset[str]:
    """Cast the model for compute in `FSDPOptions.param_dtype`; return names that stay in fp32."""
    fp32 = request.family.set_dtypes(model, request.fsdp.param_dtype)
    check_layers(model, layers, request)
    return fp32


def _make_state(
    model: nn.Module, layers: Layers, fp32: frozenset[str], request: Request
) -> ParallelState:
    """Remove other ranks' stages; return the state with the plan of the remaining model."""
    dtype = next(model.parameters()).dtype
    layout, stages = phases.select_local_stages(model, request)
    local_modules = set(model.modules())
    layers = {name: layer for name, layer in layers.items() if layer in local_modules}
    plan = make_shard_plan(model, layers, request, fp32)
    precision = request.precision
    # A log line says why experts are not faster.
    may_be_wide = precision is None or (layers and (precision.only_faster or precision.frozen))
    if layout is None and not plan.is_in_fp8 and not may_be_wide:
        warnings.warn("precision is not used: the model has none of its roles", stacklevel=4)
    return ParallelState(
        request=request, plan=plan, layers=layers, dtype=dtype, layout=layout, stages=stages
    )


def _shard_over_tp_and_ep(model: nn.Module, state: ParallelState) -> None:
    """Replace parameters by DTensors with this rank's shards over ep, etp and tp, in place."""
    shard_over_ep_and_tp(model, state.layers, state.request)


def _enable_fp8(model: nn.Module, state: ParallelState) -> None:
    """Set FP8 products on the linears that `Precision` selects; parameters do not change."""
    if state.request.precision is not None:
        is_stage = state.layout is not None
        apply_precision(model, state.request.precision, is_stage=is_stage)


def _add_indexer_losses(model: nn.Module, state: ParallelState) -> None:
    if state.request.indexer is not None:
        state.request.family.add_indexer_losses(model, state.request.indexer)


def _defer_weight_gradients(model: nn.Module, state: ParallelState) -> None:
    pipeline = state.request.pipeline
    if state.layout is not None and pipeline is not None and pipeline.defers:
        defer_linears(model)


def _shard_over_data_ranks(model: nn.Module, state: ParallelState) -> None:
    state.engine = shard_model(model, state.plan, state.request.meshes)


def _store_frozen_experts(model: nn.Module, state: ParallelState) -> None:
    precision = state.request.precision
    if precision is not None and precision.frozen is not None:
        for layer in state.layers.values():
            store_experts_in_four_bits(layer.get_part("experts"), precision.frozen)
        store_linears_in_four_bits(model, precision)


def _fuse_loss(model: nn.Module, state: ParallelState) -> None:
    precision = state.request.precision
    if state.request.memory.fused_loss:
        recipe = precision.recipe if precision is not None and precision.fp8_head else None
        state.request.family.fuse_loss(model, recipe)


PHASES: tuple[Callable[[nn.Module, ParallelState], None], ...] = (
    phases.check_registered_buffers,  # before anything is sharded
    phases.resolve_dispatcher,  # completes the plan
    _shard_over_tp_and_ep,  # ep, etp and tp: layers and units read the local shapes
    phases.apply_context_parallel,  # before balance, whose groups it makes
    _add_indexer_losses,  # before balance, which sets the factors of their losses
    _enable_fp8,  # before `_defer_weight_gradients`, which looks for linears in FP8
    phases.configure_moe_layers,  # after sharding over tp and ep: local shapes choose products
    _defer_weight_gradients,  # before sharding, because units look for linears that defer
    _shard_over_data_ranks,  # after changes of classes and parameters, before wrappers of forwards
    _store_frozen_experts,  # units have copied the values, and find the new parameters in forward
    apply_frozen_offload,
    apply_param_offload,  # after the units have made the shards
    apply_compile,  # inside the hooks of units
    apply_recompute_and_offload,  # around compiled modules
    apply_cuda_graphs,  # around recomputation and offload
    _fuse_loss,  # after `_enable_fp8`, which changes heads
    phases.create_balance_state,  # after exchanges and stash, whose capacities it checks
    phases.install_argument_checks,  # its hook runs before all other forward hooks
    phases.apply_pipeline,  # last: stages compare their shared parameters as sharded
)
