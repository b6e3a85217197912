"""`FSDPOptions`: how `parallelize_moe` shards, all-gathers and reduces parameters."""

from dataclasses import dataclass
from typing import Annotated

import torch

from moecore.base.fields import CheckedRecord, Count, CountOrZero, OneOf
from moecore.base.options.names import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPOptions(CheckedRecord):
    """Sharding strategies, dtypes and prefetching of units (FSDP2's parameter groups).

    Attributes:
        param_dtype: dtype of compute and all-gathers: fp32, bf16, or fp16 with a loss scale
            (`TrainStep(loss_scale=...)`); None = the dtype of the parameters. Routers, and
            parameters that a transformers class keeps in fp32, keep their dtype.
        reduce_dtype: dtype in which gradients are reduced, fp32 or bf16. Gradients of parameters
            that are all-gathered in fp64 are reduced in fp64.
        dense_strategy: ZeRO stage of blocks. "no_shard" (0): gradients are all-reduced. "optim"
            (1): a step has one all-gather and one reduction for all its micro-batches.
            "optim_grads" (2): each micro-batch reduces gradients. "optim_grads_params" (3): weights
            are also resharded after each forward and backward.
        experts_strategy: ZeRO stage of routed experts; None = `dense_strategy`. For experts that
            are not sharded over data ranks, "optim_grads_params" frees cast copies after each use.
        embedding_strategy: ZeRO stage of embedding, final norm, head, and routers whose dtype
            differs from `param_dtype`.
        prefetch_blocks: number of blocks whose all-gathers are prefetched; 0 = no prefetch, so that
            compute does not hide the all-gathers.
        blocks_per_unit: blocks that are all-gathered and reduced together, with fewer and larger
            collectives and more memory. The experts of each layer remain a separate unit.
        fp8_param_gather: all-gather weights in the FP8 format of their matrix products: half the
            bytes of bf16 (a quarter with "nvfp4"). Only for recipes "blockwise", "tensorwise" and
            "nvfp4".
        nccl_ub: register the buffers of all-gathers and reduce-scatters with NCCL (user buffers),
            so that NCCL's kernels need fewer SMs. Requires NCCL and sharded parameters. The
            gradient sums of all units then stay allocated.
    """

    param_dtype: (
        Annotated[torch.dtype, OneOf((torch.float32, torch.bfloat16, torch.float16))] | None
    ) = None
    reduce_dtype: Annotated[
        torch.dtype, OneOf((torch.float32, torch.bfloat16)), "fp16 sums overflow"
    ] = torch.float32
    dense_strategy: Strategy = "optim_grads_params"
    experts_strategy: Strategy | None = None
    embedding_strategy: Strategy = "optim"
    prefetch_blocks: Annotated[CountOrZero, "use 0 for none"] = 1
    blocks_per_unit: Annotated[Count, "use 1 for a unit per block"] = 1
    fp8_param_gather: bool = False
    nccl_ub: bool = False
