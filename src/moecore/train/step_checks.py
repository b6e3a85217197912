"""Checks of a new `TrainStep`: first local checks on each rank, then comparisons of ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from moecore.base.params import clean_name
from moecore.base.rank_checks import (
    check_equal,
    describe_optimizers,
    gather_objects,
    list_training_entries,
    raise_problem_on_all_ranks,
)
from moecore.parallel.fsdp.progress import Progress
from moecore.parallel.mesh import Meshes
from moecore.parallel.model.parallel_state import (
    find_staged_module,
    get_moe_state,
    list_parallel_states,
)
from moecore.parallel.model.parameter_guards import check_not_on_meta, check_optimizer_is_newer
from moecore.parallel.model.request import Request
from moecore.train.loss_scale import DynamicLossScale, check_loss_scale


def check_step_arguments(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None,
    loss_scale: DynamicLossScale | None,
) -> tuple[list[nn.Module], list[Optimizer]]:
    """Return the models and optimizers of a `TrainStep` as lists; ValueError if any is invalid."""
    models = [model] if isinstance(model, nn.Module) else list(model)
    if not models:
        raise ValueError("model ([]) must be at least one model: pass that of parallelize_moe")
    for module in models:
        get_moe_state(module)
        list_parallel_states(module)
    optimizers = list(([optimizer] if isinstance(optimizer, Optimizer) else optimizer) or ())
    if optimizer is not None and not optimizers:
        raise ValueError("optimizer ([]) must be one, several or None: leave it out")
    for module in models:
        if optimizers or loss_scale is not None:
            check_not_on_meta(module, "optimizer" if optimizers else "loss scale")
        check_loss_scale(module, loss_scale)
    check_optimizer_is_newer(models[0] if len(models) == 1 else nn.ModuleList(models), optimizers)
    return models, optimizers


def check_clip_groups(
    models: Sequence[nn.Module], groups: Sequence[Sequence[nn.Parameter]] | None
) -> None:
    """Raise ValueError unless groups have each trained parameter once, without pipeline stages."""
    if groups is None:
        return
    if any(list_parallel_states(module)[0].pipeline is not None for module in models):
        raise ValueError(
            f"clip_groups ({len(groups)} groups) must be None with pipeline stages, of which each "
            "has a part of a group's norm: leave it out"
        )
    params = [param for group in groups for param in group]
    trained = {p for module in models for p in module.parameters() if p.requires_grad}
    if len(params) != len(trained) or set(params) != trained:
        raise ValueError(
            f"clip_groups ({len(params)} parameters) must have each of the {len(trained)} trained "
            "parameters in one group: make them from model.parameters()"
        )


def compare_ranks(
    entries: Mapping[str, Any], model: nn.Module, optimizers: Sequence[Optimizer], request: Request
) -> None:
    """Raise ValueError on all ranks if `entries`, optimizers or trained parameters differ."""
    meshes = request.meshes
    check_equal(entries, meshes.device_type)
    trained = list_training_entries(model, optimizers)
    check_equal(trained, meshes.device_type, group=meshes.stage_group)
    if meshes.parallel.pp > 1:
        check_equal(describe_optimizers(optimizers), meshes.device_type)
        _compare_copies(model, optimizers, meshes)


def _compare_copies(model: nn.Module, optimizers: Sequence[Optimizer], meshes: Meshes) -> None:
    """Raise ValueError if copies of a parameter on several stages would be stepped differently."""
    owner, stages = find_staged_module(model)
    assert stages is not None, "the model has pipeline stages"
    names = {param: clean_name(name) for name, param in owner.named_parameters()}
    options: dict[str, dict[str, str]] = {}
    for optimizer, group in ((o, group) for o in optimizers for group in o.param_groups):
        trained = (param for param in group["params"] if param.requires_grad)
        for param in (p for p in trained if names.get(p) in stages.holders):
            values = {key: repr(value) for key, value in group.items() if key != "params"}
            # Host and device round differently.
            on_host = param in getattr(optimizer, "host_params", ())
            options[names[param]] = values | {"HostAdamW's selection": repr(on_host)}
    peers, problem = meshes.dense.get_group("pp"), None
    references: dict[str, dict[str, str]] = {}
    for options_of_stage in gather_objects(options, peers):
        for name, values in options_of_stage.items():
            reference = references.setdefault(name, values)
            for key in (key for key in values if values[key] != reference.get(key)):
                problem = (
                    f"{key} of {name} ({values[key]}) must be {reference.get(key)} as on another "
                    "pipeline stage, or copies of the parameter would differ: use one value, or "
                    "host_fraction=1.0"
                )
    raise_problem_on_all_ranks(problem, meshes.device_type, group=peers)


def check_num_micro_batches_is_unchanged(progress: Progress, num_micro_batches: int) -> None:
    """Raise ValueError if a new `num_micro_batches` is set after a step's first micro-batch."""
    progress.check_no_open_micro_batch("num_micro_batches")
    if progress.num_done:
        raise ValueError(
            f"num_micro_batches ({num_micro_batches}) must be set between steps, because losses "
            f"are divided by it: {progress.num_done} micro-batches of this step are done"
        )


def check_micro_batch(progress: Progress, *, has_stages: bool) -> None:
    """Raise ValueError if the model has pipeline stages, or if all micro-batches have run."""
    progress.check_no_open_micro_batch("micro_batch()")
    if has_stages:
        raise ValueError("micro_batch() must not run a pipeline's stages: call forward_backward()")
    if progress.num_done >= progress.number:
        raise ValueError(
            f"micro_batch() must come at most num_micro_batches ({progress.number}) times in a "
            "step: call finish()"
        )


def check_micro_batches(progress: Progress) -> None:
    """Raise ValueError if a micro-batch has run: `micro_batches()` must begin before the first."""
    progress.check_no_open_micro_batch("micro_batches()")
    if progress.num_done:
        raise ValueError(
            f"micro_batches() must be all of a step, but {progress.num_done} micro-batches of "
            "this step are done: call finish()"
        )


def check_side_by_side(progress: Progress) -> None:
    """Raise ValueError if `side_by_side()` is called outside of `micro_batches()`."""
    if not (progress.is_open and progress.is_several):
        raise ValueError("side_by_side() must be within micro_batches(): open it around the step")
