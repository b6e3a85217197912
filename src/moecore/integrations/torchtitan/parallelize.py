"""parallelize_fns for any version of torchtitan: degrees -> meshes, job -> options, then shard.

    swap blocks -> dense tensor parallel -> activation checkpointing -> torch.compile of all but the
    MoE layers -> parallelize_moe

A job is 0.2's JobConfig or 0.3's Trainer.Config: the sections read here have the same names. What
differs is a `Version`. Tensor parallelism of the dense parts is torchtitan's own. Inside an MoE
block each tp rank keeps its slice of every sequence: the router is whole on each rank, shared
experts are cut like an MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils

from moecore.base.options.fsdp import FSDPOptions
from moecore.families.family import swap_blocks
from moecore.integrations.torchtitan.options import (
    dispatcher_of,
    memory_options,
    moecore_options,
    nvlink_options,
)
from moecore.moe.layer import RoutedLayer
from moecore.moe.shortage import Holder
from moecore.parallel.attached import capacity_of, moe_state
from moecore.parallel.mesh import Meshes, ParallelConfig, build_meshes
from moecore.parallelize import parallelize_moe
from moecore.train import compile_blocks

Rule = tuple[str, Any, bool, str]  # a field, its value, whether that is refused, what it must be


@dataclass(frozen=True, kw_only=True)
class Version:
    """What moecore does in its own way for a version of torchtitan; `Any` is a job."""

    rules: Callable[[Any, ParallelDims, bool], list[Rule]]  # bool: the model makes its own loss
    block: type  # torchtitan's class of MoE blocks
    adapter: Callable[..., RoutedLayer]  # takes `update_bias` too, see `titan_layer`
    cut: Callable[[nn.Module, ParallelDims, Meshes, Any], Meshes]  # a model over tp, in place
    checkpoint: Callable[[nn.Module, Any], None]  # activation checkpointing, in place


def parallelize_titan(
    model: nn.Module,
    parallel_dims: ParallelDims,
    job: Any,
    *,
    version: Version,
    update_bias: bool,
    **_: Any,
) -> nn.Module:
    """Return torchtitan's model with its MoE blocks as sharded moecore layers; a parallelize_fn."""
    check_job(job, parallel_dims, version, own_loss=False)
    weights = moecore_options(job).hf_weights
    if weights is not None:
        raise NotImplementedError(
            f"moecore.hf_weights ({weights!r}) must be absent for torchtitan's own models: use "
            "checkpoint.initial_load_in_hf"
        )
    swap_blocks(model, {version.block: partial(version.adapter, update_bias=update_bias)})
    meshes = titan_meshes(parallel_dims)
    if parallel_dims.tp > 1:
        meshes = version.cut(model, parallel_dims, meshes, job)
    version.checkpoint(model, job)
    return compile_and_shard(model, meshes, job)


def parallelize_own_loss(
    model: nn.Module, parallel_dims: ParallelDims, job: Any, *, version: Version, **_: Any
) -> nn.Module:
    """Shard a model that makes its own loss by the job's config; a parallelize_fn."""
    check_job(job, parallel_dims, version, own_loss=True)
    version.checkpoint(model, job)
    return compile_and_shard(model, titan_meshes(parallel_dims), job)


def check_job(job: Any, parallel_dims: ParallelDims, version: Version, *, own_loss: bool) -> None:
    """Raise a NotImplementedError for what a job asks and cannot have, before any collective."""
    cp, tp, seq_len = parallel_dims.cp, parallel_dims.tp, job.training.seq_len
    rules: list[Rule] = [
        ("parallelism.context_parallel_degree", cp, cp > 1, "1"),
        ("training.enable_cpu_offload", True, job.training.enable_cpu_offload, "False"),
        (
            "training.seq_len",
            seq_len,
            seq_len % tp != 0,
            f"a multiple of tensor parallelism ({tp})",
        ),
    ]
    for field, value, refused, wanted in rules + version.rules(job, parallel_dims, own_loss):
        if refused:
            raise NotImplementedError(
                f"{field} ({value!r}) must be {wanted} for a moecore model: change the job config"
            )
    if tp > 1 and parallel_dims.ep == 1:
        raise NotImplementedError(
            f"parallelism.expert_parallel_degree (1) must be > 1 with tensor_parallel_degree "
            f"({tp}), because torchtitan clips the gradients of only two meshes: set "
            f"expert_parallel_degree to {tp} or a multiple of it"
        )


def check_model(field: str, found: type, known: Iterable[type]) -> None:
    """Raise NotImplementedError for a model that is none of torchtitan's which moecore knows."""
    if not issubclass(found, tuple(known)):
        raise NotImplementedError(
            f"{field} ({found.__qualname__}) must be one of "
            f"{', '.join(c.__qualname__ for c in known)}: write a parallelize_fn around "
            "moecore.integrations.torchtitan.parallelize.parallelize_titan"
        )


def check_replaced(field: str, value: Any, known: Container[Any]) -> None:
    """Raise NotImplementedError for a function of the user's own in a place that moecore takes."""
    if value not in known:
        raise NotImplementedError(
            f"{field} ({value!r:.80}) must be torchtitan's own, because moecore's takes its place: "
            "set yours on what accelerated returns, around the one that it has there"
        )


def compile_and_shard(model: nn.Module, meshes: Meshes, job: Any) -> nn.Module:
    """Compile blocks, then `parallelize_moe` in torchtitan's loss convention."""
    options = moecore_options(job)
    nvlink = nvlink_options(options)
    if compiles_model(job):
        blocks = model.get_submodule("layers").children()
        compile_blocks(map(_unwrapped, blocks), backend=job.compile.backend, dynamic=False)
    head = getattr(model, "lm_head", None)
    if head is not None:  # torchtitan 0.3's chunked loss runs it, after the model
        head.is_fsdp_head = True
    parallelize_moe(
        model,
        meshes,
        dispatcher=dispatcher_of(options),
        nvlink=nvlink,
        expert_backend=options.expert_backend,
        memory=memory_options(options),
        fsdp=_fsdp_options(job),
        loss="sum",  # torchtitan's is a sum divided by the global number of tokens
    )
    if nvlink is not None:  # `finish_step` looks at shortages, which are errors
        model.register_forward_pre_hook(partial(_watch, capacity_of(model).holders))
    local = job.training.local_batch_size * meshes.data_ranks
    moe_state(model).set_num_micro_batches(max(1, job.training.global_batch_size // local))
    return model


def _watch(holders: Sequence[Holder | None], *_: Any) -> None:
    """Let a capacity hold in forwards of training alone."""
    for holder in holders:
        if holder is not None:
            holder.watch = "skips" if torch.is_grad_enabled() else None


def _unwrapped(block: nn.Module) -> nn.Module:
    """Return what a checkpoint wrapper, which has one child, runs; a block has several."""
    children = list(block.children())
    return children[0] if len(children) == 1 else block


def without_router(names: list[str]) -> list[str]:
    """Return the modules whose product selective checkpointing makes again, without the router."""
    return [name for name in names if name != "moe.router.gate"]


def compiles_model(job: Any) -> bool:
    """Return whether the job asks for torch.compile of the model."""
    return job.compile.enable and "model" in job.compile.components


def titan_meshes(parallel_dims: ParallelDims) -> Meshes:
    """Return moecore's meshes for torchtitan's degrees: the same ranks, dims in the same order."""
    d = parallel_dims
    parallel = ParallelConfig(
        dp_replicate=d.dp_replicate,
        dp_shard=d.dp_shard,
        tp=d.tp,
        edp_replicate=d.dp_replicate,
        ep=d.ep,
        etp=getattr(d, "etp", 1) if d.ep > 1 else 1,  # 0.3 has none
    )
    meshes = build_meshes(parallel, device_type=utils.device_type)
    return meshes if d.ep > 1 else replace(meshes, expert_fsdp=meshes.dense_fsdp)


def _fsdp_options(job: Any) -> FSDPOptions:
    training, options = job.training, moecore_options(job)
    keeps = job.parallelism.fsdp_reshard_after_forward == "never"
    return FSDPOptions(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        dense_strategy="optim" if keeps else "optim_grads_params",
        experts_strategy="optim_grads_params",
        prefetch_blocks=options.prefetch_blocks,
        blocks_per_unit=options.blocks_per_unit,
    )
