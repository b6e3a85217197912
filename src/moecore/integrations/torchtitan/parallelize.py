"""parallelize_fns for any version of torchtitan, which shard a model as a job says.

    replace MoE blocks -> dense tensor parallel -> activation checkpointing -> torch.compile of all
    modules except MoE layers -> parallelize_moe

A job is 0.2's JobConfig or 0.3's Trainer.Config. A `Version` has the differences. torchtitan shards
dense modules over tp. In an MoE block each tp rank has a slice of every sequence, the router is
replicated, and shared experts are sharded like an MLP.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils

from moecore.base.options.layer import BalanceConfig
from moecore.families.family import swap_blocks
from moecore.integrations.torchtitan.options import get_moecore_options, make_parallelize_arguments
from moecore.integrations.torchtitan.sections import (
    list_changed_fields,
    read_changed_arguments,
    replace_name_in_errors,
)
from moecore.moe.layer import RoutedLayer
from moecore.moe.shortage import BufferOwner
from moecore.parallel.mesh import Meshes, ParallelConfig, build_meshes
from moecore.parallel.model.parallel_state import get_capacity, get_moe_state
from moecore.parallelize import parallelize_moe
from moecore.train.graphs.regions import compile_blocks

OPTIONS = "moecore_options"  # attribute of a model: the job's `MoECore`, for its optimizers
TOKENS = "tokens"  # keyword of a model's forward: full rows under cp
Rule = tuple[str, Any, bool, str]  # field, value, whether it is an error, required value


@dataclass(frozen=True, kw_only=True)
class Version:
    """Functions and classes that differ between torchtitan versions."""  # Any: a job's config

    rules: Callable[[Any, ParallelDims, bool], list[Rule]]  # bool: forward returns a loss
    block: type  # torchtitan's class of MoE blocks
    adapter: Callable[..., RoutedLayer]  # see `adopt_block`
    apply_tp: Callable[[nn.Module, ParallelDims, Meshes, Any], Meshes]  # shards over tp, in place
    checkpoint: Callable[[nn.Module, Any], None]  # activation checkpointing, in place


def parallelize_titan_model(
    model: nn.Module,
    parallel_dims: ParallelDims,
    job: Any,
    *,
    version: Version,
    update_bias: bool,
    **_: Any,
) -> nn.Module:
    """Replace MoE blocks of a torchtitan model, and shard the model: a parallelize_fn."""
    check_job(job, parallel_dims, version, returns_loss=False)
    weights = get_moecore_options(job).hf_weights
    if weights is not None:
        raise NotImplementedError(
            f"moecore.hf_weights ({weights!r}) must be absent for torchtitan's own models: use "
            "checkpoint.initial_load_in_hf"
        )
    swap_blocks(model, {version.block: partial(version.adapter, update_bias=update_bias)})
    meshes = make_meshes(parallel_dims)
    if parallel_dims.tp > 1:
        meshes = version.apply_tp(model, parallel_dims, meshes, job)
    version.checkpoint(model, job)
    return compile_and_shard(model, meshes, job)


def parallelize_own_loss_model(
    model: nn.Module, parallel_dims: ParallelDims, job: Any, *, version: Version, **_: Any
) -> nn.Module:
    """Shard a model that returns its loss: torchtitan's `parallelize_fn`; `job` is its config."""
    check_job(job, parallel_dims, version, returns_loss=True)
    version.checkpoint(model, job)
    return compile_and_shard(model, make_meshes(parallel_dims), job)


def check_job(
    job: Any, parallel_dims: ParallelDims, version: Version, *, returns_loss: bool
) -> None:
    """Raise NotImplementedError for options of a job that moecore does not support."""
    tp, rules = parallel_dims.tp, version.rules(job, parallel_dims, returns_loss)
    rules += _list_titan_rules(job, parallel_dims)
    rules += _list_common_rules(job, parallel_dims, returns_loss)
    for field, value, refused, requirement in rules:
        if refused:
            raise NotImplementedError(
                f"{field} ({value!r}) must be {requirement} for a moecore model: change the job "
                "config"
            )
    if tp > 1 and parallel_dims.ep == 1:
        raise NotImplementedError(
            f"parallelism.expert_parallel_degree (1) must be > 1 with tensor_parallel_degree "
            f"({tp}), because torchtitan clips the gradients of only two meshes: set "
            f"expert_parallel_degree to {tp} or a multiple of it"
        )


def _list_titan_rules(job: Any, parallel_dims: ParallelDims) -> list[Rule]:
    training, seq_len = job.training, job.training.seq_len
    offload = training.enable_cpu_offload
    length = f"a multiple of tensor parallelism ({parallel_dims.tp})"
    rules = [
        ("training.enable_cpu_offload", True, offload, "False, or moecore.memory.offload set,"),
        ("training.seq_len", seq_len, seq_len % parallel_dims.tp != 0, length),
    ]
    one_pass = training.local_batch_size * parallel_dims.dp_replicate * parallel_dims.dp_shard
    batch = training.global_batch_size
    further = parallel_dims.pp > 1 and batch not in (-1, one_pass)
    requirement = f"{one_pass}, one pass of the pipeline (raise training.local_batch_size),"
    rules.append(("training.global_batch_size", batch, further, requirement))
    plain = type(job.parallelism)()
    for name in (f.name for f in fields(plain)):
        value, default = getattr(job.parallelism, name), getattr(plain, name)
        differs = value != default and not name.endswith(("_degree", "_microbatch_size"))
        for prefix, size, option in (
            ("context_parallel_", parallel_dims.cp, "moecore.context.way"),
            ("pipeline_parallel_", parallel_dims.pp, "moecore.pipeline.schedule"),
            ("module_fqns_per_model_part", parallel_dims.pp, "moecore.pipeline.layout"),
        ):
            if name.startswith(prefix) and size > 1:
                requirement = f"{default!r}, or replaced by {option},"
                rules.append((f"parallelism.{name}", value, differs, requirement))
    return rules


def _list_common_rules(job: Any, parallel_dims: ParallelDims, returns_loss: bool) -> list[Rule]:
    """Return rules for all jobs: (option, value, is an error, required value)."""
    options, ac, degrees = get_moecore_options(job), job.activation_checkpoint, job.parallelism
    reshard, backend = degrees.fsdp_reshard_after_forward, job.compile.backend
    recomputes = _is_compiled_by_moecore(options, parallel_dims.pp)
    mode = getattr(ac, "mode", ac)  # None or "none" = none
    checkpoints = mode is not None and mode != "none"
    wrong_backend = is_compiled_job(job) and backend != "inductor"
    strategies = [options.fsdp.dense_strategy, options.fsdp.experts_strategy]
    twice = reshard != "default" and strategies != [None, None]
    requirement = "1 for torchtitan's own models (use moecore's decoder),"
    suffix = "with moecore.memory or a pipeline,"
    no_strategy = "'default' with moecore.fsdp.dense_strategy or experts_strategy"
    own_mask = "False for torchtitan's own models, which have an attn_mask_type,"
    documents, cp = options.documents, parallel_dims.cp
    no_cp = cp > 1 and not returns_loss
    rules: list[Rule] = [
        ("parallelism.context_parallel_degree", cp, no_cp, requirement),
        ("activation_checkpoint", mode, recomputes and checkpoints, f"none {suffix}"),
        ("compile.backend", backend, recomputes and wrong_backend, f"'inductor' {suffix}"),
        ("parallelism.fsdp_reshard_after_forward", reshard, twice, no_strategy),
        ("moecore.documents", True, documents and cp > 1, "False with cp > 1"),
        ("moecore.documents", True, documents and not returns_loss, own_mask),
    ]
    for name in list_changed_fields(options):
        for part, size in (("context", cp), ("pipeline", parallel_dims.pp)):
            unused, degree = name.startswith(f"{part}.") and size == 1, f"{part}_parallel_degree"
            rules.append((f"moecore.{name}", "set", unused, f"absent where {degree} is 1"))
    return rules


def check_model(option_name: str, model_class: type, known_classes: Iterable[type]) -> None:
    """Raise NotImplementedError unless `option_name`'s model class extends a known class."""
    if not issubclass(model_class, tuple(known_classes)):
        raise NotImplementedError(
            f"{option_name} ({model_class.__qualname__}) must be one of "
            f"{', '.join(c.__qualname__ for c in known_classes)}: write a parallelize_fn around "
            "moecore.integrations.torchtitan.parallelize.parallelize_titan_model"
        )


def refuse_custom_function(option_name: str, value: Any, known_values: Container[Any]) -> None:
    """Raise NotImplementedError if an option that moecore replaces is not in `known_values`."""
    if value not in known_values:
        raise NotImplementedError(
            f"{option_name} ({value!r:.80}) must be torchtitan's own, because moecore's takes its "
            "place: set yours on what accelerated returns, around the one that it has there"
        )


def compile_and_shard(model: nn.Module, meshes: Meshes, job: Any) -> nn.Module:
    """Compile blocks, if the job enables torch.compile, and shard by `parallelize_moe`."""
    options, p = get_moecore_options(job), meshes.parallel
    keeps = job.parallelism.fsdp_reshard_after_forward == "never"
    request = make_parallelize_arguments(
        options,
        p,
        param_dtype=TORCH_DTYPE_MAP[job.training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[job.training.mixed_precision_reduce],
        dense_strategy="optim" if keeps else "optim_grads_params",
        experts_strategy="optim_grads_params",
    )
    for layer in (module for module in model.modules() if isinstance(module, RoutedLayer)):
        balance = read_changed_arguments(options.moe.balance, "moecore.moe.balance")
        change = partial(replace, layer.config.balance, **balance)
        layer.set_balance(replace_name_in_errors(change, BalanceConfig, "moecore.moe.balance"))
    compiled = is_compiled_job(job)
    compiles_blocks = compiled and _is_compiled_by_moecore(options, p.pp)
    request["dense"] = replace(request["dense"], compile=compiles_blocks)
    if compiled and not compiles_blocks:
        blocks = model.get_submodule("layers").children()
        compile_blocks(map(_unwrap_checkpoint, blocks), backend=job.compile.backend, dynamic=False)
    head = getattr(model, "lm_head", None)
    if head is not None:  # torchtitan 0.3's chunked loss runs the head after the model
        head.is_fsdp_head = True
    with warnings.catch_warnings():
        if p.pp == 1:  # a stage may not use an option that other stages use
            warnings.filterwarnings("error", message=".* (is|are) not used")
        try:
            # torchtitan's loss is a sum divided by the global number of tokens.
            parallelize_moe(model, meshes, loss="sum", **request)
        except UserWarning as unused:
            raise ValueError(f"{unused}: drop it from section moecore") from unused
    if p.cp > 1 and p.pp == 1:  # before the hook that compares the arguments of cp ranks
        model.register_forward_pre_hook(_restore_full_rows, prepend=True, with_kwargs=True)
    if request["dispatch"].nvlink is not None and p.pp == 1:  # `finish_step` checks capacities
        owners = get_capacity(model).owners
        model.register_forward_pre_hook(partial(_watch_training_forwards, owners))
    local = job.training.local_batch_size * meshes.data_ranks
    get_moe_state(model).set_num_micro_batches(max(1, job.training.global_batch_size // local))
    setattr(model, OPTIONS, options)
    return model


def _is_compiled_by_moecore(moecore_section: Any, pp: int) -> bool:
    """Whether `parallelize_moe` compiles the blocks of a compiled job, and not torchtitan."""
    return bool(list_changed_fields(moecore_section.memory)) or pp > 1


def _restore_full_rows(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook that replaces torchtitan's token slices under cp by full rows."""
    keywords = {name: value for name, value in kwargs.items() if name not in (TOKENS, "positions")}
    return (kwargs[TOKENS],), keywords


def _watch_training_forwards(buffer_owners: Sequence[BufferOwner | None], *_: Any) -> None:
    """Forward pre-hook: in training, skip the step's update if a dispatch buffer overflows."""
    for holder in buffer_owners:
        if holder is not None:
            holder.watch = "skips" if torch.is_grad_enabled() else None


def _unwrap_checkpoint(block: nn.Module) -> nn.Module:
    """Return the module in a checkpoint wrapper (one child); return other modules unchanged."""
    children = list(block.children())
    return children[0] if len(children) == 1 else block


def remove_router_name(names: list[str]) -> list[str]:
    """Return `names`, modules whose matmuls are always recomputed, without the router's gate."""
    return [name for name in names if name != "moe.router.gate"]


def is_compiled_job(job: Any) -> bool:
    """Whether the job enables torch.compile of the model."""
    return job.compile.enable and "model" in job.compile.components


def make_meshes(parallel_dims: ParallelDims) -> Meshes:
    """Build moecore's meshes with torchtitan's degrees and rank order. Collective."""
    d = parallel_dims
    parallel = ParallelConfig(
        dp_replicate=d.dp_replicate,
        dp_shard=d.dp_shard,
        cp=d.cp,
        tp=d.tp,
        pp=d.pp,
        edp_replicate=d.dp_replicate,
        ep=d.ep,
        etp=getattr(d, "etp", 1) if d.ep > 1 else 1,  # a degree of 0.2
    )
    meshes = build_meshes(parallel, device_type=utils.device_type)
    return meshes if d.ep > 1 else replace(meshes, expert_fsdp=meshes.dense_fsdp)
