"""What every version of torchtitan needs: degrees -> meshes, job -> options, then shard.

A job is 0.2's JobConfig or 0.3's Trainer.Config: the sections read here have the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from moecore.base.options.fsdp import FSDPOptions
from moecore.integrations.torchtitan.options import (
    dispatcher_of,
    memory_options,
    moecore_options,
    nvlink_options,
)
from moecore.moe.shortage import Holder
from moecore.parallel.attached import capacity_of, moe_state
from moecore.parallel.mesh import Meshes, ParallelConfig, build_meshes
from moecore.parallelize import parallelize_moe
from moecore.train import compile_blocks

Rule = tuple[str, Any, bool, str]  # a field, its value, whether that is refused, what it must be


def compile_and_shard(model: nn.Module, meshes: Meshes, job: Any) -> nn.Module:
    """Compile blocks, then `parallelize_moe` in torchtitan's loss convention.

    Args:
        model: `get_submodule("layers")` gives its blocks, in their checkpoint wrappers if any.
        meshes: from `titan_meshes`.

    Raises:
        ValueError, NotImplementedError: see `nvlink_options` and `parallelize_moe`.
    """
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
        holders = capacity_of(model).holders
        model.register_forward_pre_hook(partial(_watch, holders))
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
    """Return the modules whose product selective checkpointing makes again, without the router.

    It is among torchtitan's, but moecore's router is no nn.Linear, which they must be.
    """
    return [name for name in names if name != "moe.router.gate"]


def compiles_model(job: Any) -> bool:
    """Return whether the job asks for torch.compile of the model."""
    return job.compile.enable and "model" in job.compile.components


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
        etp=getattr(d, "etp", 1) if d.ep > 1 else 1,  # 0.3 has none
    )
    meshes = build_meshes(parallel, device_type=utils.device_type)
    return meshes if d.ep > 1 else replace(meshes, expert_fsdp=meshes.dense_fsdp)


def refuse(rules: list[Rule]) -> None:
    """Raise for the first rule that is broken.

    Raises:
        NotImplementedError: with the field, its value and the fix.
    """
    for field, value, refused, wanted in rules:
        if refused:
            raise NotImplementedError(
                f"{field} ({value!r}) must be {wanted} for a moecore model: change the job config"
            )


def check_tensor_parallel(parallel_dims: ParallelDims) -> None:
    """Check that tp comes with ep.

    Raises:
        NotImplementedError: for tp without ep.
    """
    if parallel_dims.tp > 1 and parallel_dims.ep == 1:
        raise NotImplementedError(
            f"parallelism.expert_parallel_degree (1) must be > 1 with tensor_parallel_degree "
            f"({parallel_dims.tp}), because torchtitan clips the gradients of only two meshes: set "
            f"expert_parallel_degree to {parallel_dims.tp} or a multiple of it"
        )


def check_length(seq_len: int, longest: int) -> None:
    """Check a job's sequences against a decoder.

    Raises:
        ValueError: for sequences that are too long.
    """
    if seq_len > longest:
        raise ValueError(
            f"training.seq_len ({seq_len}) must be <= DecoderConfig.max_seq_len ({longest}): "
            "shorten it, or register a flavor with a larger max_seq_len"
        )


def load_weights(path: str, model: nn.Module) -> None:
    """Fill a model from a Hugging Face directory; each rank reads its own shards. Collective.

    Values are rounded to the dtype of the parameters, which is the job's `training.dtype`.

    Args:
        path: see `load_hf`.
        model: a transformers model or a moecore decoder, with storage.

    Raises:
        ValueError, OSError: see `load_hf`.
    """
    from moecore.io import load_hf

    report = load_hf(path, model, cast=True)
    logger.info(
        f"{report.tensors} tensors from {path}: {report.bytes_read / 1e9:.2f} GB read by this rank "
        f"in {report.seconds:.1f} s"
    )


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
