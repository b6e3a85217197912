"""FSDPOptions: choices of `parallelize_moe` about units of parameters. A record alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from moecore.base.fields import CheckedRecord, Count, CountOrZero, OneOf
from moecore.base.options.names import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPOptions(CheckedRecord):
    """How `parallelize_moe` shards parameters, gathers them and reduces gradients.

    Attributes:
        param_dtype: dtype of compute and all-gathers, fp32, bf16, or fp16 with a loss scale
            (`TrainStep(loss_scale=...)`); None = the parameters' own. Routers keep theirs, and so
            do names that a class of transformers keeps fp32.
        reduce_dtype: dtype in which gradients are reduced, fp32 or bf16.
        dense_strategy: what is sharded of blocks, ZeRO stage 0 to 3. "no_shard": nothing, gradients
            are all-reduced. "optim": weights are gathered once per step, for all micro-batches that
            a `TrainStep` announces, and gradients are reduced in the last of them. "optim_grads":
            every micro-batch reduces gradients. "optim_grads_params": weights too are gathered for
            each forward and backward, and freed between them.
        experts_strategy: the same for routed experts, usually most of the memory; None = like the
            blocks. Experts that no other rank holds have nothing to shard: "optim_grads_params"
            frees their cast weights.
        embedding_strategy: of embedding, final norm and head, and of routers in their own dtype.
        prefetch_blocks: how many blocks ahead parameters are gathered, in whole units; 0 = none,
            and nothing hides the gathers.
        blocks_per_unit: blocks that are gathered and reduced together; experts stay a unit each.
            Fewer, larger collectives and less host time, for the memory of as many gathered blocks.
        fp8_param_gather: gather weights as their products quantise them, of the trained shards:
            "blockwise" and "tensorwise" FP8 has half the bytes of bf16, "nvfp4" a quarter, in
            collectives and while they are whole. Other recipes quantise a weight twice and gather
            it in the dtype of compute.
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
