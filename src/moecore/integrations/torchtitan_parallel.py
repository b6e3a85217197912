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
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.moe import MoE
from torchtitan.tools import utils

from moecore.adapters.base import swap_blocks
from moecore.config import MoEConfig, ParallelConfig
from moecore.fsdp import FSDPOptions
from moecore.graphs import compile_blocks
from moecore.integrations.torchtitan_moe import titan_moe
from moecore.integrations.torchtitan_options import moecore_options, nvlink_options
from moecore.mesh import Meshes, build_meshes
from moecore.moe.layer import MoELayer
from moecore.moe.params import shard_parameter
from moecore.parallelize import moe_state, parallelize_moe

DenseTensorParallel = Callable[[nn.Module, DeviceMesh, JobConfig], None]
# What selective checkpointing of single operations keeps: every matrix product and attention.
SAVED_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_attention_math.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
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
        parallel_dims: the degrees.
        job_config: the job.
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
            _tensor_parallel(layer, tp_mesh)
        if compiles_model(job_config):
            # What the embedding's reduce-scatter returns is a tensor that still waits. torch 2.13
            # gives such an input of a compiled graph no gradient.
            model.get_submodule("tok_embeddings").register_forward_hook(_waited)
        # Done here, before checkpointing hides the parts from torchtitan's plans.
        model.apply_tensor_parallel = lambda _: model  # type: ignore[assignment]
    return finish(model, meshes, job_config)


def finish(model: nn.Module, meshes: Meshes, job_config: JobConfig) -> nn.Module:
    """Checkpoint and compile blocks, then `parallelize_moe` in torchtitan's loss convention.

    Args:
        model: `get_submodule("layers")` gives its blocks.
        meshes: from `titan_meshes`.
        job_config: the job.
    """
    options = moecore_options(job_config)
    nvlink = nvlink_options(options)
    checkpointing = job_config.activation_checkpoint
    if checkpointing.mode != "none":
        apply_ac(model, checkpointing, op_sac_save_list=SAVED_OPS)
    if compiles_model(job_config):
        blocks = model.get_submodule("layers").children()
        inner = [getattr(b, "_checkpoint_wrapped_module", b) for b in blocks]
        compile_blocks(inner, backend=job_config.compile.backend, dynamic=False)
    parallelize_moe(
        model,
        meshes,
        dispatcher=options.dispatcher,
        nvlink=nvlink,
        experts=options.experts,
        recompute_fc1=options.recompute_fc1,
        fsdp=_fsdp_options(job_config),
        loss="sum",  # torchtitan's is a sum divided by the global number of tokens
    )
    training = job_config.training
    local = training.local_batch_size * meshes.data_ranks
    moe_state(model).set_num_micro_batches(max(1, training.global_batch_size // local))
    return model


def compiles_model(job_config: JobConfig) -> bool:
    """Return whether the job asks for torch.compile of the model."""
    return job_config.compile.enable and "model" in job_config.compile.components


def dealt(config: MoEConfig) -> MoEConfig:
    """Return the config with experts dealt out in turn, for `debug.moe_force_load_balance`.

    That choice reads no selection bias, so none moves.
    """
    still = replace(config.balance, bias_update_rate=0.0, bias_update="sign")
    return replace(config, assignment="balanced", balance=still)


def _waited(_: nn.Module, __: tuple[Any, ...], x: Tensor) -> Tensor:
    return x.clone()


def titan_meshes(parallel_dims: ParallelDims) -> Meshes:
    """Return moecore's meshes for torchtitan's degrees: the same ranks, dims in the same order.

    torchtitan clips gradients of one mesh at a time: those of meshes with an "ep" dim, and the
    rest. So without ep the experts are sharded over the dense mesh.
    """
    d = parallel_dims
    parallel = ParallelConfig(
        dp_replicate=d.dp_replicate,
        dp_shard=d.dp_shard,
        tp=d.tp,
        edp_replicate=d.dp_replicate,
        ep=d.ep,
        etp=d.etp if d.ep > 1 else 1,
    )
    meshes = build_meshes(parallel, device_type=utils.device_type)
    return meshes if d.ep > 1 else replace(meshes, expert_fsdp=meshes.dense_fsdp)


def check_job(job_config: JobConfig, parallel_dims: ParallelDims) -> None:
    """Raise for what a job asks and this integration cannot do, before any collective.

    Raises:
        NotImplementedError: with the field, its value and the fix.
    """
    job, degrees = job_config, job_config.parallelism
    backend = degrees.expert_parallel_comm_backend
    rules: list[tuple[str, Any, bool, str]] = [
        ("parallelism.context_parallel_degree", parallel_dims.cp, parallel_dims.cp > 1, "1"),
        ("parallelism.enable_async_tensor_parallel", True, _async_tp(job), "False"),
        ("parallelism.expert_parallel_comm_backend", backend, backend != "standard", "'standard'"),
        ("training.enable_cpu_offload", True, job.training.enable_cpu_offload, "False"),
        ("model.converters", job.model.converters, bool(job.model.converters), "[]"),
    ]
    for field, value, refused, wanted in rules:
        if refused:
            raise NotImplementedError(
                f"{field} ({value!r}) must be {wanted} for a moecore model: change the job config"
            )
    if parallel_dims.tp > 1 and parallel_dims.ep == 1:
        raise NotImplementedError(
            f"parallelism.expert_parallel_degree (1) must be > 1 with tensor_parallel_degree "
            f"({parallel_dims.tp}), because torchtitan clips the gradients of only two meshes: set "
            f"expert_parallel_degree to {parallel_dims.tp} or a multiple of it"
        )


def _async_tp(job_config: JobConfig) -> bool:
    return bool(job_config.parallelism.enable_async_tensor_parallel)


def _fsdp_options(job_config: JobConfig) -> FSDPOptions:
    training = job_config.training
    return FSDPOptions(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        reshard_after_forward=job_config.parallelism.fsdp_reshard_after_forward != "never",
        reshard_experts=True,
        prefetch_blocks=moecore_options(job_config).prefetch_blocks,
    )


def _tensor_parallel(layer: MoELayer, tp_mesh: DeviceMesh) -> None:
    """Keep the router whole on every tp rank and cut the shared experts. No communication."""
    router = layer.part("router")
    for name in dict(router.named_parameters(recurse=False)):
        shard_parameter(router, name, tp_mesh, (Replicate(),))
    if layer.layout.shared not in layer._modules:
        return
    # Every rank brings its own tokens [T, D]; all ranks' tokens meet at the cut matrices.
    tokens = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))
    plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel(output_layouts=Shard(0))}
    shared = layer.part("shared")
    parallelize_module(shared, tp_mesh, tokens)
    parallelize_module(shared, tp_mesh, {**plan, "w3": ColwiseParallel()})
