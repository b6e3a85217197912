"""From torchtitan's ParallelDims and JobConfig to moecore: checks, meshes, options, the order.

    swap blocks -> dense tensor parallel -> activation checkpointing -> torch.compile of all but the
    MoE layers -> parallelize_moe

Tensor parallelism of the dense parts is torchtitan's own. Inside an MoE block each tp rank keeps
its slice of every sequence: the router is whole on each rank, shared experts are cut like an MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.moe import MoE

from moecore.base.torch_names import (
    attention_overloads,
    grouped_mm_overload,
    reduce_scatter_overload,
)
from moecore.families.family import swap_blocks
from moecore.integrations.torchtitan.layer import cut_dense_parts
from moecore.integrations.torchtitan.options import moecore_options
from moecore.integrations.torchtitan.shared import (
    Rule,
    check_tensor_parallel,
    compile_and_shard,
    compiles_model,
    refuse,
    titan_meshes,
    without_router,
)
from moecore.integrations.torchtitan.v02.moe import titan_moe
from moecore.parallel.mesh import Meshes

DenseTensorParallel = Callable[[nn.Module, DeviceMesh, JobConfig], None]
# What selective checkpointing of single operations keeps: every matrix product and attention.
SAVED_OPS = {
    torch.ops.aten.mm.default,
    grouped_mm_overload,
    *attention_overloads,
    reduce_scatter_overload,
    torch.ops.aten.max.default,
}


def parallelize_titan(
    model: nn.Module,
    parallel_dims: ParallelDims,
    job_config: JobConfig,
    *,
    dense_tp: DenseTensorParallel,
    update_bias: bool,
) -> nn.Module:
    """Return torchtitan's model with its MoE blocks as sharded moecore layers; a parallelize_fn.

    Args:
        model: on meta, with `layers` of blocks whose `moe` is torchtitan's `MoE`.
        dense_tp: cuts everything but the MoE blocks over tp.
        update_bias: see `titan_moe`.

    Raises:
        ValueError, NotImplementedError: see `check_job`, `titan_moe` and `parallelize_moe`.
    """
    check_job(job_config, parallel_dims)
    weights = moecore_options(job_config).hf_weights
    if weights is not None:
        raise NotImplementedError(
            f"moecore.hf_weights ({weights!r}) must be absent for torchtitan's own models: use "
            "checkpoint.initial_load_in_hf"
        )
    adapter = partial(titan_moe, update_bias=update_bias)
    layers = swap_blocks(model, {MoE: adapter})
    meshes = titan_meshes(parallel_dims)
    if parallel_dims.tp > 1:
        tp_mesh = meshes.dense["tp"]
        dense_tp(model, tp_mesh, job_config)
        for layer in layers.values():
            cut_dense_parts(layer, tp_mesh)
        if compiles_model(job_config):
            # What the embedding's reduce-scatter returns is a tensor that still waits. torch 2.13
            # gives such an input of a compiled graph no gradient.
            model.get_submodule("tok_embeddings").register_forward_hook(_waited)
    return finish(model, meshes, job_config)


def finish(model: nn.Module, meshes: Meshes, job_config: JobConfig) -> nn.Module:
    """Checkpoint blocks, then `compile_and_shard`.

    Args:
        model: `get_submodule("layers")` gives its blocks.
        meshes: from `titan_meshes`.
    """
    checkpointing = job_config.activation_checkpoint
    if checkpointing.mode != "none":
        names = without_router(checkpointing.per_op_sac_force_recompute_mm_shapes_by_fqns)
        checkpointing = replace(checkpointing, per_op_sac_force_recompute_mm_shapes_by_fqns=names)
        apply_ac(model, checkpointing, op_sac_save_list=SAVED_OPS)
    return compile_and_shard(model, meshes, job_config)


def _waited(_: nn.Module, __: tuple[Any, ...], x: Tensor) -> Tensor:
    return x.clone()


def check_job(job_config: JobConfig, parallel_dims: ParallelDims) -> None:
    """Raise for what a job asks and this integration cannot do, before any collective.

    Raises:
        NotImplementedError: with the field, its value and the fix.
    """
    job, degrees = job_config, job_config.parallelism
    backend, mode = degrees.expert_parallel_comm_backend, job.activation_checkpoint.mode
    seq_len, tp, replicas = job.training.seq_len, parallel_dims.tp, parallel_dims.dp_replicate
    saved = job.checkpoint
    hf_files = saved.enable and (saved.initial_load_in_hf or saved.last_save_in_hf)
    one = "1 with checkpoint.initial_load_in_hf or last_save_in_hf"
    rules: list[Rule] = [
        ("parallelism.context_parallel_degree", parallel_dims.cp, parallel_dims.cp > 1, "1"),
        ("parallelism.enable_async_tensor_parallel", True, _async_tp(job), "False"),
        ("parallelism.expert_parallel_comm_backend", backend, backend != "standard", "'standard'"),
        ("training.enable_cpu_offload", True, job.training.enable_cpu_offload, "False"),
        ("model.converters", job.model.converters, bool(job.model.converters), "[]"),
        (
            "training.seq_len",
            seq_len,
            seq_len % tp != 0,
            f"a multiple of tensor parallelism ({tp})",
        ),
        (
            "activation_checkpoint.mode",
            mode,
            mode == "memory_budget",
            "'none', 'full' or 'selective'",
        ),
        # torchtitan's own reader and writer of these files know no replicas
        ("parallelism.data_parallel_replicate_degree", replicas, hf_files and replicas > 1, one),
    ]
    refuse(rules)
    check_tensor_parallel(parallel_dims)


def _async_tp(job_config: JobConfig) -> bool:
    return bool(job_config.parallelism.enable_async_tensor_parallel)
