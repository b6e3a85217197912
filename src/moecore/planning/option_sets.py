"""Options of a run that save memory or time, in one table: `OPTIONS`.

    layouts.py    a request -> sets of options that save memory, the fastest first
    next_change   a plan    -> the option that gains most tokens per second and fits
    report.py     a trace   -> the options that shorten its largest parts (`shortens`)

The overheads are from table 13 of arXiv:2603.07685. Recomputation of parts without
communication, FP8 and short moments have a low overhead. Offload and all-gathers of weights in
every micro-batch have a medium overhead. Recomputation of full MoE layers has a high overhead.
docs/memory.md has times.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from moecore.base.fields import NumBytes, check_arguments
from moecore.base.options.dispatch import NVLinkOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.memory import Offloaded, Recomputed
from moecore.base.options.names import GpuName
from moecore.base.options.precision import Precision
from moecore.parallel.pipeline.schedule import PipelineConfig
from moecore.planning.costs import CostTable
from moecore.planning.gpus import Gpu, get_gpu
from moecore.planning.memory import plan_peak_memory
from moecore.planning.run import TrainingRun
from moecore.planning.times import TimePlan, plan_time

Overhead = Literal["low", "medium", "high"]
PLAIN_FSDP = FSDPOptions(param_dtype=torch.bfloat16, dense_strategy="optim")
TWICE = NVLinkOptions(row_factor=2.0)  # capacity for twice the rows of even loads
MIN_GAIN = 0.01  # the least gain, as a share of the tokens per second, that is worth a change
NO_TIME = 1e-12


def _replace_options(run: TrainingRun, record_name: str, **changes: Any) -> TrainingRun:
    """Return the run with changed options in its record `record_name`, such as "memory"."""
    return replace(run, **{record_name: replace(getattr(run, record_name), **changes)})


def _recompute_parts(run: TrainingRun, *parts: Recomputed) -> TrainingRun:
    """Return the run with recompute of norms, activations, rope, up-projections and `parts`."""
    up: Recomputed = "mla_up_proj" if run.planned_model.has_latents else "qkv_proj"
    return _replace_options(run, "memory", recompute=("gemm_last", up, *parts))


def _list_offloadable_parts(run: TrainingRun) -> tuple[Offloaded, ...]:
    """Return the parts of a run's model whose saved activations can be offloaded."""
    experts: tuple[Offloaded, ...] = ("experts",) if run.planned_model.num_moe_runs else ()
    return ("attention", *experts, *(("mlp",) if run.planned_model.dense else ()))


def _enable_blockwise_fp8(run: TrainingRun) -> TrainingRun:
    """Return the run with blockwise FP8; unchanged with FP8 or expert dims not divisible by 128."""
    moe = run.planned_model.moe
    has_products = moe is None or not (moe.expert_dim % 128 or moe.hidden_dim % 128)
    if run.precision is not None or not has_products:
        return run
    return replace(run, precision=Precision.of("blockwise"))


def _enable_fp8_weight_gather(run: TrainingRun) -> TrainingRun:
    """Return the run with all-gathers of weights as FP8, or unchanged without blockwise FP8."""
    recipe = None if run.precision is None else run.precision.recipe
    is_blockwise = recipe is not None and recipe.scaling == "blockwise"
    return _replace_options(run, "fsdp", fp8_param_gather=True) if is_blockwise else run


def _double_stages_per_rank(run: TrainingRun) -> TrainingRun:
    """Return the run with twice its stages per pipeline rank, or unchanged if it sets a layout."""
    if run.pipeline is None or run.pipeline.layout is not None:
        return run
    chunks = 2 * (run.pipeline.chunks or 1)
    return replace(run, pipeline=PipelineConfig(schedule="interleaved", chunks=chunks))


@dataclass(frozen=True, slots=True, eq=False)  # each is in `OPTIONS` once
class Option:
    """An option of a run that saves memory or time, and its page in the documentation."""

    name: str  # the Python source that sets the option, or a description in words
    page: str  # of docs, and its section
    # Returns the run with the option, or the same run if the option does not apply; None = no plan
    # shows its effect.
    change: Callable[[TrainingRun], TrainingRun] | None = None
    overhead: Overhead | None = None  # the time that it costs; None = it saves no memory
    gains: bool = False  # whether it may save time
    shortens: tuple[str, ...] = ()  # the parts of a report (`report.PARTS`) that it shortens
    max_share: float = 1.0  # the upper bound of the share of these parts' time that it saves
    unless: str = r"(?!)"  # matches kernels and launches of traces that have it, or cannot have it

    def apply(self, run: TrainingRun, gpu: GpuName | Gpu) -> TrainingRun:
        """Return the run with this option; unchanged if run or GPU do not support the option."""
        try:
            changed = run if self.change is None else self.change(run)
        except ValueError:  # such as "nvlink" between nodes
            return run
        has_products = changed.precision == run.precision or get_gpu(gpu).has_blockwise
        return changed if has_products else run


HOST = ("waits of the host", "late launches", "gaps between kernels")
COLLECTIVES = ("dispatch by collectives",)
NVLINK = f'DispatchOptions(name="nvlink", nvlink=NVLinkOptions(row_factor={TWICE.row_factor}))'
GRAPHS = Option(
    "CUDA graphs (GraphedForwardBackward)",
    "memory.md#cuda-graphs",
    shortens=HOST,
    unless=r"GraphLaunch|SendRecv",  # its dispatcher waits for sizes
)
# Options that save memory are in the order of their overhead, those that save time first. Among
# options with the same `shortens` the fastest comes first.
OPTIONS = (
    Option(
        'precision="blockwise"',
        "precision.md#recipes",
        _enable_blockwise_fp8,
        overhead="low",
        gains=True,
        shortens=("experts", "dense products"),
        max_share=1 / 2,  # FP8 has twice the peak of bf16
        unless=r"quantise_",
    ),
    Option(
        "FSDPOptions(fp8_param_gather=True)",
        "sharding.md#fp8",
        _enable_fp8_weight_gather,
        overhead="low",
        gains=True,
    ),
    Option(
        'MemoryOptions(recompute="gemm_last")',
        "memory.md#recompute",
        lambda run: _replace_options(run, "memory", recompute="gemm_last"),
        overhead="low",
    ),
    Option("recompute of up-projections", "memory.md#recompute", _recompute_parts, overhead="low"),
    Option(
        "moecore.train.AdamW(moment_dtype=torch.bfloat16)",
        "performance.md#adamw",
        lambda run: _replace_options(run, "optimizer", moment_dtype="bfloat16"),
        overhead="low",
        shortens=("optimizer",),
        max_share=3 / 8,  # 20 bytes per parameter in place of the 32 of torch's with clipping
    ),
    Option(
        "moecore.train.AdamW(moment_dtype=torch.float8_e4m3fn)",
        "memory.md#optimizer-state",
        lambda run: _replace_options(run, "optimizer", moment_dtype="float8_e4m3fn"),
        overhead="low",
    ),
    Option(
        "moecore.train.AdamW(master_remainder=True)",
        "memory.md#optimizer-state",
        lambda run: _replace_options(run, "optimizer", master_remainder=True),
        overhead="low",
    ),
    Option(
        "recompute of FC1",
        "memory.md#recompute",
        lambda run: _recompute_parts(run, "expert_fc1" if run.planned_model.moe else "mlp"),
        overhead="medium",
    ),
    Option(
        'FSDPOptions(dense_strategy="optim_grads_params")',
        "sharding.md#strategies",
        lambda run: _replace_options(run, "fsdp", dense_strategy="optim_grads_params"),
        overhead="medium",
    ),
    Option(
        'MemoryOptions(offload=("attention", "experts", "mlp"))',
        "memory.md#offload",
        lambda run: _replace_options(run, "memory", offload=_list_offloadable_parts(run)),
        overhead="medium",
    ),
    Option(
        "StateOffload(optimizer, model)",
        "memory.md#optimizer-state",
        lambda run: _replace_options(run, "optimizer", offload_fraction=1.0),
        overhead="medium",
    ),
    Option(
        "recompute of MoE layers",
        "memory.md#recompute",
        lambda run: _recompute_parts(run, "moe") if run.planned_model.moe else run,
        overhead="high",
    ),
    Option(
        "nothing computed again",
        "memory.md#recompute",
        lambda run: _replace_options(run, "memory", recompute=()),
        gains=True,
    ),
    Option(
        'recompute="gemm_last" alone',
        "memory.md#recompute",
        lambda run: (
            _replace_options(run, "memory", recompute="gemm_last") if run.memory.parts else run
        ),
        gains=True,
    ),
    Option(
        NVLINK,
        "dispatchers.md#nvlink",
        lambda run: run if run.nvlink is not None else replace(run, nvlink=TWICE),
        gains=True,
        shortens=COLLECTIVES,
    ),
    Option(
        'PipelineConfig(schedule="overlapped"), dispatch="alltoall"',
        "pipeline.md#schedules",
        shortens=COLLECTIVES,
        max_share=0.31,  # measured with NCCL in a node; between nodes `CostTable.pairs_hide`
    ),
    Option(
        "twice PipelineConfig.chunks",
        "pipeline.md#schedules",
        _double_stages_per_rank,
        gains=True,
        shortens=("pipeline",),
    ),
    Option(
        "PipelineConfig.layout of balanced_layout", "pipeline.md#layout", shortens=("pipeline",)
    ),
    Option(
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
        "performance.md#when-memory-runs-out",
        shortens=("allocator",),
    ),
    Option(
        "a smaller MemoryOptions.offload_fraction, and recompute in its place",
        "memory.md#offload",
        shortens=("host copies",),
    ),
    Option(
        "parallelize_moe(dispatch=DispatchOptions(fp8=True))",
        "dispatchers.md#tokens-as-fp8",
        shortens=("nvlink dispatch", "copies to peers", *COLLECTIVES),
        max_share=1 / 8,  # one of four transfers in half its bytes
        unless=r"_pack_rows",
    ),
    Option("FSDPOptions(prefetch_blocks=2)", "sharding.md#units", shortens=("sharding",)),
    Option(
        'FSDPOptions(dense_strategy="optim", experts_strategy="optim") with micro-batches',
        "sharding.md#strategies",
        shortens=("sharding",),
    ),
    Option(
        "a smaller ParallelConfig.tp: ep for experts, cp for long sequences",
        "guide.md#parallelism-degrees",
        shortens=("tensor parallelism",),
    ),
    Option(
        "another ContextOptions.way, or a smaller ParallelConfig.cp",
        "context_parallel.md#which-way",
        shortens=("context parallelism",),
    ),
    GRAPHS,
    Option(
        "parallelize_moe(dense=DenseOptions(graph=True)): parts of blocks as graphs",
        "memory.md#graphs-of-parts",
        shortens=HOST[:2],
        unless=r"GraphLaunch|_spread_kernel",
    ),
    Option(
        "fewer launches: more rows of a micro-batch, FSDPOptions(blocks_per_unit=4)",
        "performance.md#what-each-option-does",
        shortens=("late launches",),
    ),
    Option(
        'parallelize_moe(expert_backend="auto"): grouped products',
        "parallelize.md",
        shortens=("experts by other products",),
    ),
    Option(
        "parallelize_moe(dense=DenseOptions(compile=True))",
        "performance.md#what-each-option-does",
        shortens=("other",),
        unless=r"^triton_",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """An option, and the relative increase of tokens per second that the option gives."""

    text: str
    gain: float

    def __str__(self) -> str:
        return f"{self.text}: {self.gain:+.0%}"


def next_change(plan: TimePlan, table: CostTable, limit: NumBytes | None = None) -> Change | None:
    """Return the option that gains most tokens per second; None = no option gains 1%.

    `table` is the plan's cost table. `limit` is a rank's maximum bytes; None = the GPU's memory.
    """
    check_arguments(next_change, locals())
    limit = get_gpu(plan.gpu).memory if limit is None else limit
    changes, run = list[Change](), plan.run

    def add(text: str, other: TimePlan) -> None:
        """Append option `text` with its gain in plan `other`."""
        gain = other.tokens_per_gpu_second / plan.tokens_per_gpu_second - 1
        changes.append(Change(text=text, gain=gain))

    p = run.parallel
    if run.pipeline is None and (p.ep * p.etp == 1 or run.nvlink is not None):  # nothing waits
        add(f"{GRAPHS.name}, at most", plan_time(run, replace(table, host_seconds=NO_TIME)))
    for option in OPTIONS:
        changed = option.apply(run, plan.gpu) if option.gains else run
        try:
            if changed != run and max(plan_peak_memory(changed)) <= limit:
                add(option.name, plan_time(changed, table))
        except (ValueError, NotImplementedError):  # other options of the run exclude this one
            continue
    best = max(changes, key=lambda change: change.gain, default=None)
    return best if best is not None and best.gain >= MIN_GAIN else None
