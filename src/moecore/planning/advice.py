"""What to try where a step's time goes: a table of limits, the parts of a step, and levers.

    limit   what bounds a step             compute, communication, ...
    part    a share of its time            each microsecond belongs to one
    lever   an option that may take some of a part away

The walls are those of https://arxiv.org/abs/2603.07685, section 9.1.3, the options are moecore's.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

# Where several run at once, the first part of this table counts: what computes hides the rest.
PARTS = {
    "compute": ("experts", "experts by other products", "attention", "dense products"),
    "memory-bound operations": (
        "quantisation",
        "routing",
        "loss",
        "optimizer",
        "pages",
        "fsdp copies",
        "compiled",
        "other",
    ),
    "communication": (
        "dispatch by collectives",
        "dispatch by nvlink",
        "sharding",
        "pipeline",
        "tensor parallelism",
        "context parallelism",
        "clones",
        "other collectives",
    ),
    "memory": ("host copies", "allocator"),
    "host": ("waits of the host", "late launches", "gaps between kernels"),
}
LIMIT_OF = {part: limit for limit, parts in PARTS.items() for part in parts}


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """When a lever may help.

    Attributes:
        parts: of which it takes something away.
        most: how much of them at most, by bytes or arithmetic.
        lever: what to try.
        page: of docs, with its section.
        unless: a pattern of names of kernels and launches that show that it is pulled already, or
            cannot be.
    """

    parts: tuple[str, ...]
    lever: str
    page: str
    most: float = 1.0
    unless: str = r"(?!)"

    def fits(self, names: Collection[str]) -> bool:
        """Whether no name speaks against it."""
        return not any(re.search(self.unless, name) for name in names)


# A part with several levers has the one that costs least first.
TABLE = (
    Advice(
        parts=("allocator",),
        lever="PYTORCH_ALLOC_CONF=expandable_segments:True, then MemoryOptions(recompute="
        '"gemm_last")',
        page="performance.md#when-memory-runs-out",
    ),
    Advice(
        parts=("host copies",),
        lever="a smaller MemoryOptions.offload_fraction, and recompute in its place",
        page="memory.md#offload",
    ),
    Advice(
        parts=("dispatch by collectives",),
        lever='parallelize_moe(dispatcher="nvlink") where ep x etp ranks share a host',
        page="dispatchers.md#nvlink",
    ),
    Advice(
        parts=("dispatch by collectives",),
        lever='PipelineConfig(schedule="overlapped") or TrainStep.side_by_side: a forward beside '
        "a backward",
        page="pipeline.md#schedules",
    ),
    Advice(
        parts=("dispatch by nvlink",),
        lever="NVLinkOptions(fp8_dispatch=True)",
        page="dispatchers.md#tokens-as-fp8",
        most=1 / 8,  # one of four transfers in half its bytes
    ),
    Advice(
        parts=("sharding",),
        lever="FSDPOptions(prefetch_blocks=2)",
        page="sharding.md#units",
    ),
    Advice(
        parts=("sharding",),
        lever='FSDPOptions(dense_strategy="optim", experts_strategy="optim") with several '
        "micro-batches",
        page="sharding.md#strategies",
    ),
    Advice(
        parts=("pipeline",),
        lever="balanced_layout, then another PipelineConfig.schedule or more chunks",
        page="pipeline.md#schedules",
    ),
    Advice(
        parts=("tensor parallelism",),
        lever="a smaller ParallelConfig.tp: ep for experts, cp for long sequences",
        page="guide.md#degrees",
    ),
    Advice(
        parts=("context parallelism",),
        lever="another ContextOptions.way, or a smaller ParallelConfig.cp",
        page="sequences.md#which-way",
    ),
    Advice(
        parts=("clones",),
        lever="a smaller CloneOptions.per_rank",
        page="balancing.md#skewed-loads",
    ),
    Advice(
        parts=("waits of the host", "late launches", "gaps between kernels"),
        lever="GraphedForwardBackward: forward and backward as one launch",
        page="cuda_graphs.md",
        unless=r"GraphLaunch|SendRecv",  # its dispatcher waits for sizes
    ),
    Advice(
        parts=("waits of the host", "late launches"),
        lever="parallelize_moe(graph_dense=True): parts of blocks as graphs",
        page="cuda_graphs.md#graphs-of-parts",
        unless=r"GraphLaunch|_spread_kernel",
    ),
    Advice(
        parts=("late launches",),
        lever="fewer launches: more tokens per micro-batch, less tp, FSDPOptions("
        "blocks_per_unit=4)",
        page="performance.md#what-each-option-does",
    ),
    Advice(
        parts=("experts by other products",),
        lever='parallelize_moe(expert_backend="auto"): grouped products',
        page="parallelize.md",
    ),
    Advice(
        parts=("experts", "dense products"),
        lever='parallelize_moe(precision="auto"), or "blockwise" for dense products too',
        page="precision.md#recipes",
        most=1 / 2,  # FP8 has twice the peak of bf16
        unless=r"quantise_",
    ),
    Advice(
        parts=("other",),
        lever="parallelize_moe(compile_dense=True)",
        page="performance.md#what-each-option-does",
        unless=r"^triton_",
    ),
    Advice(
        parts=("optimizer",),
        lever="moecore.train.AdamW(moment_dtype=torch.bfloat16)",
        page="performance.md#adamw",
        most=3 / 8,  # 20 bytes per parameter in place of the 32 of torch's with clipping
    ),
)
