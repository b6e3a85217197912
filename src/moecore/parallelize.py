"""parallelize_moe: collect the request, check it, compare ranks, make the plan, apply the plan.

Only this file imports every package. Each phase changes the model and adds its results to one
record, `ParallelState`. A new capability is a new phase, after the phases whose results it reads.
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
from moecore.families.family import family_of
from moecore.moe.backends import ExpertBackend
from moecore.parallel.choice import choose_meshes, start_default_group
from moecore.parallel.fsdp.plan import ShardPlan
from moecore.parallel.mesh import Meshes
from moecore.parallel.model.checks import check_layers, check_request
from moecore.parallel.model.family import ADAPTER_FIX, Adapter
from moecore.parallel.model.module_protocols import act_as_modules
from moecore.parallel.model.parallel_state import PARALLEL_STATE, ParallelState
from moecore.parallel.model.parameter_guards import mark_replaced
from moecore.parallel.model.phases import (
    apply_balance,
    apply_context,
    apply_layers,
    apply_pipeline,
    compare_arguments,
    cut_stages,
    resolve_dispatcher,
)
from moecore.parallel.model.plan import Layers, cut_model, make_plan
from moecore.parallel.model.request import LossConvention, Request, compare_models, compare_stages
from moecore.parallel.model.shard_model import shard_model
from moecore.parallel.pipeline.schedule import PipelineConfig
from moecore.precision.apply import apply_precision, defer_linears
from moecore.train.phases import compile_dense, graph_dense, reduce_saved_memory

P = ParamSpec("P")
T = TypeVar("T")


@share_call_errors
def parallelize_moe(
    model: nn.Module,
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
) -> nn.Module:
    """Shard a model over the dense and the expert mesh, in place, and return the model.

    Parameters become DTensors with unchanged names and global shapes. The model may be on the meta
    device and be materialised afterwards, or have real weights that are identical on every rank.
    docs/parallelize.md describes every argument. Collective.

    Args:
        model: any module. The routed experts of its MoE layers are sharded over the expert mesh,
            and all other parameters over the dense mesh.
        meshes: the result of `build_meshes`. None = meshes over all ranks, chosen from the numbers
            of experts and of ranks per host (`choose_meshes`). `explain` prints the choice.
        dispatch: how tokens are sent to the ranks of their experts: the name of a dispatcher, or a
            record with its options. "auto" chooses by the hardware, see docs/dispatchers.md.
        expert_backend: the implementation of the experts' matmuls, see `moe/backends.py`.
        memory: activations that are recomputed in backward or offloaded to host memory; None =
            every saved activation stays on the GPU.
        dense: whether attention, norms, routers and shared experts are compiled, captured in CUDA
            graphs, or run on a second stream; None = none of these options.
        moe: values for fields of `MoEConfig` in every MoE layer: balance, capacity, router_dtype,
            router_jitter. A field that is not given keeps the layer's value. A layer that selects
            experts by token id keeps its balance.
        context: how attention communicates between cp ranks; None = chosen by the heads.
        indexer: how the indexers of sparse attention are trained; None = they are not trained.
        precision: which matmuls run in FP8: "auto", one scaling or recipe for all roles, or a
            `Precision`; None = no FP8. FP8 routed experts need expert_backend "auto" or "triton".
        fsdp: how parameters are sharded; None = the defaults.
        loss: "mean" = each rank's loss is the mean over its tokens; "sum" = each rank's loss is a
            sum, divided by the global number of tokens.
        pipeline: the pipeline stages of the pp ranks; `TrainStep.forward_backward` runs them.
        adapters: block class -> function `(block, model) -> MoELayer`. These adapters take
            precedence over moecore's adapters.

    Raises:
        ValueError: if the model, the meshes and the options do not fit each other, before any
            parameter is sharded (MoE blocks may be replaced already). Also if ranks differ in
            model, arguments or versions.
        NotImplementedError: if pp > 1, tp > 1 or cp > 1 and the model does not support this
            parallelism; for a customised block of transformers.

    If one rank raises an error for its model or arguments, every rank raises this error.
    """
    arguments = locals()
    if meshes is None:
        arguments["meshes"] = _choose_meshes(arguments)
    with share_errors():
        check_arguments(parallelize_moe, arguments)
        request = _request(arguments)
        root = request.family.unwrap(model)
        before = list(model.parameters())
        check_request(root, request)
        layers = request.family.swap_blocks(root, adapters or {})
        fp32 = _set_dtypes(root, layers, request)
    compare_models(root, layers, request)
    with share_errors():
        state = _plan(root, layers, fp32, request)
        request.family.prepare(root)
    compare_stages(root, state.plan, request)
    with publish_errors("parallelize_moe()"):
        for phase in PHASES:
            phase(root, state)
    setattr(root, PARALLEL_STATE, state)
    memory_options = request.memory
    drops_cache = bool(request.dense.compile or memory_options.parts or memory_options.offload)
    request.family.finish(root, wrapper=model, drops_cache=drops_cache)
    mark_replaced(before)
    act_as_modules(model)
    return model


def _with_arguments_of(other: Callable[P, Any]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Return a decorator: the wrapped function has `other`'s signature and receives a dict."""

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

    The model is not changed: adapters and `apply_tensor_parallel` receive a copy on the meta
    device. If `meshes` is given, the function does not communicate, so the world may be larger than
    this machine (docs/parallelize.md). If `meshes` is None, the call is collective. `explain(plan)`
    prints the plan.

    Raises:
        ValueError, NotImplementedError: as `parallelize_moe`. The plan does not compare ranks, and
            does not check conditions that need the GPUs of all ranks.
    """
    if arguments["meshes"] is None:
        arguments = {**arguments, "meshes": _choose_meshes(arguments)}
    check_arguments(parallelize_moe, arguments)
    request = _request(arguments)
    root = request.family.unwrap(arguments["model"])
    check_request(root, request)
    twin, layers = request.family.copy_with_layers(root, arguments["adapters"] or {})
    return _plan(twin, layers, _set_dtypes(twin, layers, request), request).plan


def _choose_meshes(arguments: Mapping[str, Any]) -> Meshes:
    """Return meshes for a call without the argument `meshes`. Collective."""
    start_default_group()  # in which ranks share errors
    with share_errors():
        check_arguments(parallelize_moe, arguments)
        family, model = family_of(arguments["model"]), arguments["model"]
        adapters = arguments["adapters"] or {}
        _, layers = family.copy_with_layers(family.unwrap(model), adapters)
    return choose_meshes(layer.config.num_experts for layer in layers.values())


def _request(arguments: Mapping[str, Any]) -> Request:
    """Return the `Request` of a call, with default options in place of None."""
    return Request(
        family=family_of(arguments["model"]),
        meshes=arguments["meshes"],
        dispatch=DispatchOptions.of(arguments["dispatch"]),
        expert_backend=arguments["expert_backend"],
        memory=arguments["memory"] or MemoryOptions(),
        dense=arguments["dense"] or DenseOptions(),
        moe={**(arguments["moe"] or {})},
        context=arguments["context"],
        indexer=arguments["indexer"],
        precision=Precision.of(arguments["precision"]),
        fsdp=arguments["fsdp"] or FSDPOptions(),
        loss=arguments["loss"],
        pipeline=arguments["pipeline"],
    )


def _set_dtypes(model: nn.Module, layers: Layers, request: Request) -> frozenset[str]:
    """Set parameter dtypes, check the MoE layers; return the names of tensors that stay fp32."""
    fp32 = request.family.set_dtypes(model, request.fsdp.param_dtype)
    check_layers(model, layers, request)
    return fp32


def _plan(
    model: nn.Module, layers: Layers, fp32: frozenset[str], request: Request
) -> ParallelState:
    """Remove other ranks' pipeline stages from the model; return the initial `ParallelState`."""
    dtype = next(model.parameters()).dtype
    layout, stages = cut_stages(model, request)
    local_modules = set(model.modules())
    layers = {name: layer for name, layer in layers.items() if layer in local_modules}
    plan = make_plan(model, layers, request, fp32)
    precision = request.precision
    may_be_wide = precision is None or (precision.only_faster and layers)  # a log line says why
    if not plan.is_in_fp8 and not may_be_wide:
        warnings.warn("precision is not used: the model has none of its roles", stacklevel=4)
    known: dict[str, Any] = dict(plan=plan, layers=layers, dtype=dtype)
    return ParallelState(request=request, layout=layout, stages=stages, **known)


def _cut(model: nn.Module, state: ParallelState) -> None:
    cut_model(model, state.layers, state.request)


def _quantise(model: nn.Module, state: ParallelState) -> None:
    if state.request.precision is not None:
        apply_precision(model, state.request.precision)


def _train_indexers(model: nn.Module, state: ParallelState) -> None:
    if state.request.indexer is not None:
        state.request.family.train_indexers(model, state.request.indexer)


def _defer(model: nn.Module, state: ParallelState) -> None:
    pipeline = state.request.pipeline
    if state.layout is not None and pipeline is not None and pipeline.defers:
        defer_linears(model)


def _shard(model: nn.Module, state: ParallelState) -> None:
    state.engine = shard_model(model, state.plan, state.request.meshes)


def _fuse_loss(model: nn.Module, state: ParallelState) -> None:
    precision = state.request.precision
    if state.request.memory.fused_loss:
        recipe = precision.recipe if precision is not None and precision.fp8_head else None
        state.request.family.fuse_loss(model, recipe)


PHASES: tuple[Callable[[nn.Module, ParallelState], None], ...] = (
    resolve_dispatcher,  # the plan is whole from here on
    _cut,  # what a rank owns of experts and over tp: layers and units read these shapes
    apply_context,  # before balance, which counts over its groups
    _train_indexers,  # before balance, which sets the factors of their losses
    _quantise,  # before deferring, which looks for linears in FP8
    apply_layers,  # after the cut, whose shapes products are chosen for
    _defer,  # before sharding, which finds the linears whose gradients come later
    _shard,  # after all that changes a module's class or parameters; before wraps of forwards
    compile_dense,  # inside of the units' hooks
    reduce_saved_memory,  # around what is compiled
    graph_dense,  # around what saves less
    _fuse_loss,  # after quantising, which changes heads that it finds
    apply_balance,  # after exchanges and pages, whose shortages it collects
    compare_arguments,  # before all other hooks of a forward
    apply_pipeline,  # last: copies of parameters are compared as they were sharded
)
