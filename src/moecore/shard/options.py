"""FSDPOptions: choices of `parallelize_moe` about units of parameters. A record alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from moecore._fields import Count, CountOrZero, OneOf, check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPOptions:
    """How `parallelize_moe` shards parameters, gathers them and reduces gradients.

    Attributes:
        param_dtype: dtype of compute and all-gathers, fp32, bf16, or fp16 with a loss scale
            (`TrainStep(loss_scale=...)`); None = the parameters' own.
        reduce_dtype: dtype in which gradients are reduced, fp32 or bf16.
        reshard_after_forward: free a block's gathered parameters between forward and backward;
            embedding, final norm and head stay gathered.
        reshard_experts: the same for routed experts, usually most of the memory; None = like the
            others. Experts that no other rank holds are not gathered: they free their cast weights.
        prefetch_blocks: how many blocks ahead parameters are gathered, in whole units; 0 = none,
            and nothing hides the gathers.
        blocks_per_unit: blocks that are gathered and reduced together; experts stay a unit each.
            Fewer, larger collectives and less host time, for the memory of as many gathered blocks.

    Raises:
        ValueError: for a dtype or a number that is not among these.
    """

    param_dtype: (
        Annotated[torch.dtype, OneOf((torch.float32, torch.bfloat16, torch.float16))] | None
    ) = None
    reduce_dtype: Annotated[
        torch.dtype, OneOf((torch.float32, torch.bfloat16)), "fp16 sums overflow"
    ] = torch.float32
    reshard_after_forward: bool = True
    reshard_experts: bool | None = None
    prefetch_blocks: Annotated[CountOrZero, "use 0 for none"] = 1
    blocks_per_unit: Annotated[Count, "use 1 for a unit per block"] = 1

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def reshards_experts(self) -> bool:
        """`reshard_experts`, or what the others do."""
        if self.reshard_experts is None:
            return self.reshard_after_forward
        return self.reshard_experts
