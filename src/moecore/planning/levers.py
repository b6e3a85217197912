"""Options of a run that save memory or time, in one table: `OPTIONS`.

    ladder        a request -> rungs of options that save memory, cheapest first
    next_change   a plan    -> the option that gains most tokens per second and fits
    report.py     a trace   -> the options that shorten its largest parts (`takes_from`)

Overheads are those of table 13 of the report (arXiv:2603.07685). Low: recompute of parts without
communication, FP8, short moments. Medium: offload, weights that every micro-batch all-gathers.
High: recompute of whole MoE layers. docs/memory.md has times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from moecore.base.fields import NumBytes, check_arguments
from moecore.base.options.dispatch import NVLinkOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.memory import MemoryOptions, Offloaded, Recomputed
from moecore.base.options.names import GpuName
from moecore.base.options.precision import Precision
from moecore.parallel.pipeline.schedule import PipelineConfig
from moecore.planning.costs import CostTable
from moecore.planning.gpus import Gpu, gpu_of
from moecore.planning.memory import plan_peak
from moecore.planning.run import AnyModel, OptimizerOptions, TrainingRun
from moecore.planning.times import TimePlan, plan_time

Overhead = Literal["low", "medium", "high"]
PLAIN_FSDP = FSDPOptions(param_dtype=torch.bfloat16, dense_strategy="optim")
TWICE = NVLinkOptions(row_factor=2.0)  # capacity for twice the rows of even loads
CHAIN: tuple[Recomputed, ...] = ("norm", "activation", "rope")
FIELDS = ("fsdp", "memory", "precision", "optimizer")  # fields of a run that decide its memory
MIN_GAIN = 0.01  # the least gain, as a share of the tokens per second, that is worth a change
NO_TIME = 1e-12


def _recompute(run: TrainingRun, *parts: Recomputed, **changes: Any) -> TrainingRun:
    up: Recomputed = "mla_up_proj" if run.planned_model.has_latents else "qkv_proj"
    memory = replace(run.memory, recompute=(*CHAIN, up, *parts), **changes)
    return replace(run, memory=memory)


def _offloaded(run: TrainingRun) -> tuple[Offloaded, ...]:
    """Return the parts to offload that the model has."""
    experts: tuple[Offloaded, ...] = ("experts",) if run.planned_model.num_moe_runs else ()
    return ("attention", *experts, *(("mlp",) if run.planned_model.dense else ()))


def _fp8(run: TrainingRun) -> TrainingRun:
    moe = run.planned_model.moe
    has_products = moe is None or not (moe.expert_dim % 128 or moe.hidden_dim % 128)
    if run.precision is not None or not has_products:
        return run
    return replace(run, precision=Precision.of("blockwise"))


def _fp8_gather(run: TrainingRun) -> TrainingRun:
    if run.precision is None or run.precision.recipe.scaling != "blockwise":
        return run
    return replace(run, fsdp=replace(run.fsdp, fp8_param_gather=True))


def _optimizer(run: TrainingRun, **changes: Any) -> TrainingRun:
    return replace(run, optimizer=replace(run.optimizer, **changes))


def _more_chunks(run: TrainingRun) -> TrainingRun:
    if run.pipeline is None or run.pipeline.layout is not None:
        return run
    chunks = 2 * (run.pipeline.chunks or 1)
    return replace(run, pipeline=PipelineConfig(schedule="interleaved", chunks=chunks))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)  # each is in `OPTIONS` once
class Option:
    """An option of a run; `change` returns the same run where it does not apply."""

    name: str  # its source, or words
    page: str  # and section of docs
    change: Callable[[TrainingRun], TrainingRun] | None = None  # None = no plan shows it
    overhead: Overhead | None = None  # in time, of the memory that it saves; None = it saves none
    gains: bool = False  # whether it may save time
    takes_from: tuple[str, ...] = ()  # parts of a report (`report.PARTS`) that it shortens
    max_share: float = 1.0  # the largest share of these parts that it saves, by bytes or arithmetic
    unless: str = r"(?!)"  # kernels and launches of a trace in which it is set, or cannot be set

    def applied(self, run: TrainingRun, gpu: GpuName | Gpu) -> TrainingRun:
        """Return the run with the option, or the same run where the option does not apply."""
        try:
            changed = run if self.change is None else self.change(run)
        except ValueError:  # such as "nvlink" between nodes
            return run
        has_products = changed.precision == run.precision or gpu_of(gpu).has_blockwise
        return changed if has_products else run


HOST = ("waits of the host", "late launches", "gaps between kernels")
GRAPHS = Option(
    name="CUDA graphs (GraphedForwardBackward)",
    takes_from=HOST,
    page="cuda_graphs.md",
    unless=r"GraphLaunch|SendRecv",  # its dispatcher waits for sizes
)
# Options that save memory are in the order of their overhead, those that gain time first. Among
# options with the same `takes_from` the cheapest comes first.
OPTIONS = (
    Option(
        name='precision="blockwise"',
        change=_fp8,
        overhead="low",
        gains=True,
        takes_from=("experts", "dense products"),
        max_share=1 / 2,  # FP8 has twice the peak of bf16
        unless=r"quantise_",
        page="precision.md#recipes",
    ),
    Option(
        name="FSDPOptions(fp8_param_gather=True)",
        change=_fp8_gather,
        overhead="low",
        gains=True,
        page="sharding.md#fp8",
    ),
    Option(
        name='MemoryOptions(recompute="gemm_last")',
        change=lambda run: replace(run, memory=replace(run.memory, recompute="gemm_last")),
        overhead="low",
        page="memory.md#recompute",
    ),
    Option(
        name="recompute of up-projections",
        change=_recompute,
        overhead="low",
        page="memory.md#recompute",
    ),
    Option(
        name="moecore.train.AdamW(moment_dtype=torch.bfloat16)",
        change=lambda run: _optimizer(run, moment_dtype="bfloat16"),
        overhead="low",
        takes_from=("optimizer",),
        max_share=3 / 8,  # 20 bytes per parameter in place of the 32 of torch's with clipping
        page="performance.md#adamw",
    ),
    Option(
        name="moecore.train.AdamW(moment_dtype=torch.float8_e4m3fn)",
        change=lambda run: _optimizer(run, moment_dtype="float8_e4m3fn"),
        overhead="low",
        page="memory.md#optimizer-state",
    ),
    Option(
        name="moecore.train.AdamW(master_remainder=True)",
        change=lambda run: _optimizer(run, master_remainder=True),
        overhead="low",
        page="memory.md#optimizer-state",
    ),
    Option(
        name="recompute of FC1",
        change=lambda run: _recompute(run, "expert_fc1" if run.planned_model.moe else "mlp"),
        overhead="medium",
        page="memory.md#recompute",
    ),
    Option(
        name='FSDPOptions(dense_strategy="optim_grads_params")',
        change=lambda run: replace(
            run, fsdp=replace(run.fsdp, dense_strategy="optim_grads_params")
        ),
        overhead="medium",
        page="sharding.md#strategies",
    ),
    Option(
        name='MemoryOptions(offload=("attention", "experts", "mlp"))',
        change=lambda run: replace(run, memory=replace(run.memory, offload=_offloaded(run))),
        overhead="medium",
        page="memory.md#offload",
    ),
    Option(
        name="StateOffload(optimizer, model)",
        change=lambda run: _optimizer(run, offload_fraction=1.0),
        overhead="medium",
        page="memory.md#optimizer-state",
    ),
    Option(
        name="recompute of MoE layers",
        change=lambda run: _recompute(run, "moe") if run.planned_model.moe else run,
        overhead="high",
        page="memory.md#recompute",
    ),
    Option(
        name="nothing computed again",
        change=lambda run: replace(run, memory=replace(run.memory, recompute=())),
        gains=True,
        page="memory.md#recompute",
    ),
    Option(
        name='recompute="gemm_last" alone',
        change=lambda run: (
            replace(run, memory=replace(run.memory, recompute="gemm_last"))
            if run.memory.parts
            else run
        ),
        gains=True,
        page="memory.md#recompute",
    ),
    Option(
        name=f'DispatchOptions(name="nvlink", nvlink=NVLinkOptions(row_factor={TWICE.row_factor}))',
        change=lambda run: run if run.nvlink is not None else replace(run, nvlink=TWICE),
        gains=True,
        takes_from=("dispatch by collectives",),
        page="dispatchers.md#nvlink",
    ),
    Option(
        name='PipelineConfig(schedule="overlapped"), dispatch="alltoall"',
        takes_from=("dispatch by collectives",),
        max_share=0.31,  # measured with NCCL in a node; between nodes `CostTable.pairs_hide`
        page="pipeline.md#schedules",
    ),
    Option(
        name="twice PipelineConfig.chunks",
        change=_more_chunks,
        gains=True,
        takes_from=("pipeline",),
        page="pipeline.md#schedules",
    ),
    Option(
        name="PipelineConfig.layout of balanced_layout",
        takes_from=("pipeline",),
        page="pipeline.md#layout",
    ),
    Option(
        name="PYTORCH_ALLOC_CONF=expandable_segments:True",
        takes_from=("allocator",),
        page="performance.md#when-memory-runs-out",
    ),
    Option(
        name="a smaller MemoryOptions.offload_fraction, and recompute in its place",
        takes_from=("host copies",),
        page="memory.md#offload",
    ),
    Option(
        name="parallelize_moe(dispatch=DispatchOptions(fp8=True))",
        takes_from=("nvlink dispatch", "copies to peers", "dispatch by collectives"),
        max_share=1 / 8,  # one of four transfers in half its bytes
        page="dispatchers.md#tokens-as-fp8",
        unless=r"_pack_rows",
    ),
    Option(
        name="FSDPOptions(prefetch_blocks=2)", takes_from=("sharding",), page="sharding.md#units"
    ),
    Option(
        name='FSDPOptions(dense_strategy="optim", experts_strategy="optim") with micro-batches',
        takes_from=("sharding",),
        page="sharding.md#strategies",
    ),
    Option(
        name="a smaller ParallelConfig.tp: ep for experts, cp for long sequences",
        takes_from=("tensor parallelism",),
        page="guide.md#degrees",
    ),
    Option(
        name="another ContextOptions.way, or a smaller ParallelConfig.cp",
        takes_from=("context parallelism",),
        page="sequences.md#which-way",
    ),
    Option(
        name="a smaller CloneOptions.per_rank",
        takes_from=("nvlink clones",),
        page="balancing.md#skewed-loads",
    ),
    GRAPHS,
    Option(
        name="parallelize_moe(dense=DenseOptions(graph=True)): parts of blocks as graphs",
        takes_from=HOST[:2],
        page="cuda_graphs.md#graphs-of-parts",
        unless=r"GraphLaunch|_spread_kernel",
    ),
    Option(
        name="fewer launches: more rows of a micro-batch, FSDPOptions(blocks_per_unit=4)",
        takes_from=("late launches",),
        page="performance.md#what-each-option-does",
    ),
    Option(
        name='parallelize_moe(expert_backend="auto"): grouped products',
        takes_from=("experts by other products",),
        page="parallelize.md",
    ),
    Option(
        name="parallelize_moe(dense=DenseOptions(compile=True))",
        takes_from=("other",),
        page="performance.md#what-each-option-does",
        unless=r"^triton_",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Levers:
    """Options in the order of `OPTIONS`, and the fields of a run that they decide."""

    options: tuple[Option, ...]
    fsdp: FSDPOptions
    memory: MemoryOptions
    precision: Precision | None
    optimizer: OptimizerOptions

    @property
    def name(self) -> str:
        """The last option, which is the dearest."""
        return self.options[-1].name if self.options else "none"

    @property
    def overhead(self) -> Overhead:
        """The overhead of the last option."""
        return (self.options[-1].overhead if self.options else None) or "low"


def ladder(model: AnyModel, gpu: GpuName | Gpu, **settings: Any) -> tuple[Levers, ...]:
    """Return rungs, cheapest first, each with one more option; `settings` has FIELDS, or "any".

    The first one has the options that gain time as well as memory.
    """
    rungs = [levers_with((), model, gpu, **settings)]
    for option in OPTIONS:
        rung = levers_with((*rungs[-1].options, option), model, gpu, **settings)
        changes = [name for name in FIELDS if getattr(rung, name) != getattr(rungs[-1], name)]
        if option.overhead and changes and all(settings[name] == "any" for name in changes):
            rungs.append(rung)
    return tuple(rungs[sum(option.gains for option in rungs[-1].options) :])


def levers_with(
    options: tuple[Option, ...], model: AnyModel, gpu: GpuName | Gpu, **settings: Any
) -> Levers:
    """Return the fields of a run with these options, in the order of `OPTIONS`."""
    plain = dict(
        fsdp=PLAIN_FSDP, memory=MemoryOptions(), precision=None, optimizer=OptimizerOptions()
    )
    fields: dict[str, Any] = {n: plain[n] if settings[n] == "any" else settings[n] for n in FIELDS}
    run = TrainingRun(model=model, num_gpus=1, seq_len=1, **fields)
    for option in options:
        run = option.applied(run, gpu)
    return Levers(options=options, **{name: getattr(run, name) for name in FIELDS})


def fewer(
    levers: Levers, model: AnyModel, gpu: GpuName | Gpu, *, gains: bool, **settings: Any
) -> Iterator[Levers]:
    """Yield levers with one option less, the dearest first; `gains` = those that gain time too."""
    for removal in (option for option in reversed(levers.options) if gains or not option.gains):
        options = tuple(option for option in levers.options if option is not removal)
        candidate = levers_with(options, model, gpu, **settings)
        if any(getattr(candidate, name) != getattr(levers, name) for name in FIELDS):
            yield candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """An option and its gain: tokens per second with it over tokens per second without, minus 1."""

    text: str
    gain: float

    def __str__(self) -> str:
        return f"{self.text}: {self.gain:+.0%}"


def next_change(plan: TimePlan, table: CostTable, limit: NumBytes | None = None) -> Change | None:
    """Return the change that gains most tokens per second; None = no option gains `MIN_GAIN`.

    Args:
        plan: the plan of a run.
        table: the cost table of that plan.
        limit: bytes that a rank may use; None = the GPU's memory.
    """
    check_arguments(next_change, locals())
    limit = gpu_of(plan.gpu).memory if limit is None else limit
    changes, run = list[Change](), plan.run

    def add(text: str, other: TimePlan) -> None:
        gain = other.tokens_per_second / plan.tokens_per_second - 1
        changes.append(Change(text=text, gain=gain))

    p = run.parallel
    if run.pipeline is None and (p.ep * p.etp == 1 or run.nvlink is not None):  # nothing waits
        add(f"{GRAPHS.name}, at most", plan_time(run, replace(table, host_seconds=NO_TIME)))
    for option in OPTIONS:
        changed = option.applied(run, plan.gpu) if option.gains else run
        try:
            if changed != run and max(plan_peak(changed)) <= limit:
                add(option.name, plan_time(changed, table))
        except (ValueError, NotImplementedError):  # other options of the run exclude this one
            continue
    best = max(changes, key=lambda change: change.gain, default=None)
    return best if best is not None and best.gain >= MIN_GAIN else None
