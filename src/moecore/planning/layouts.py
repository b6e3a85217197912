"""Parallel layouts: all ways to distribute a model over GPUs, and the rules that refuse some.

    divisors of the number of GPUs -> rules of parallelize_moe -> rules of the guidelines

A `Layout` is a parallel layout. It has the degrees pp, tp, cp, ep and etp of `ParallelConfig`. The
remaining ranks are data ranks. It also has the number of pipeline stages per rank and the rows of a
micro-batch. `list_schedules` returns the schedules in which its stages can run. `make_run` returns
the run of a layout with a set of options that save memory.

Source of the guidelines: arXiv:2603.07685, section 9.1.2. "Parallel Folding" is its term.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product
from typing import Annotated, Any, Literal, NamedTuple

from moecore.base.fields import Bound, CheckedRecord, Count, FieldErrors
from moecore.base.options.dispatch import NVLinkOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.memory import MemoryOptions
from moecore.base.options.names import GpuName, ScheduleName
from moecore.base.options.precision import Precision
from moecore.parallel.mesh import ParallelConfig
from moecore.parallel.pipeline.orders import RULES
from moecore.parallel.pipeline.schedule import PipelineConfig
from moecore.planning.costs import CostTable
from moecore.planning.gpus import Gpu, NodeSize, are_peers, count_domain_ranks, count_peers, get_gpu
from moecore.planning.model import PlannedModel
from moecore.planning.option_sets import OPTIONS, PLAIN_FSDP, TWICE, Option, Overhead
from moecore.planning.run import AnyModel, NumGpus, OptimizerOptions, TrainingRun, get_planned_model

CHUNKS = (1, 2, 4)  # stages per rank that are tried
BATCH_SIZES = (1, 2, 4)  # rows of a micro-batch that are tried
LONG, CP_TOKENS = 8192, 4096  # tokens of a row from which cp pays, and those of a cp rank
ROWS_PER_GPU = 8  # of a step, where nobody gives its rows
ANY: Literal["any"] = "any"
LAYOUT_FIELDS = ("pp", "tp", "cp", "ep", "etp", "chunks", "batch_size")
# A search makes dozens of dry runs, each with every chunk of the loss: a minute for longer rows.
MAX_SEARCH_TOKENS = 2**20
SearchSeqLen = Annotated[
    int, Bound(">=", 1), Bound("<=", MAX_SEARCH_TOKENS), "give degrees such as --cp 8"
]
# The fields of a run that decide its memory, without any option.
DEFAULTS: Mapping[str, Any] = {
    "fsdp": PLAIN_FSDP,
    "memory": MemoryOptions(),
    "precision": None,
    "optimizer": OptimizerOptions(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest(CheckedRecord):
    """A model, its training, the GPUs, and the options that a search may choose ("any").

    Attributes:
        model: the decoder, or a model class of transformers.
        num_gpus: the world size.
        gpu: a key of `GPUS`, or a record of another GPU.
        gpus_per_node: neighbouring ranks that NVLink connects; None = the largest node
            of this GPU in `GPUS` that divides the world.
        seq_len: tokens of a row, a packed sequence.
        global_batch: rows of a step over all data ranks; None = 8 per GPU.
        fsdp: the sharding of parameters; "any" = weights stay unsharded in a step if that fits.
        memory: recomputation and offload; "any" = the least that fits.
        precision: the matmuls in FP8; "any" = FP8 if it is needed to fit or saves time.
        optimizer: the optimizer's state; "any" = the least reduction that fits.
        nvlink: the capacity of dispatcher "nvlink" for layouts whose expert ranks are in one node;
            "any" = twice the rows of even loads; None = dispatcher "alltoall".
        reserve: share of GPU and host memory that no plan may use: for the CUDA context, NCCL, the
            allocator, the operating system and data loaders.
    """

    model: AnyModel
    num_gpus: NumGpus
    gpu: GpuName | Gpu = "h100-80"
    gpus_per_node: NodeSize | None = None
    seq_len: SearchSeqLen = 4096
    global_batch: Count | None = None
    fsdp: FSDPOptions | Literal["any"] = ANY
    memory: MemoryOptions | Literal["any"] = ANY
    precision: Precision | Literal["any"] | None = ANY
    optimizer: OptimizerOptions | Literal["any"] = ANY
    nvlink: NVLinkOptions | Literal["any"] | None = ANY
    reserve: Annotated[float, Bound(">=", 0), Bound("<", 1)] = 0.1

    def _find_field_errors(self) -> FieldErrors:
        longest = self.planned_model.max_seq_len
        if longest is not None and self.seq_len > longest:
            yield "seq_len", f"be <= DecoderConfig.max_seq_len ({longest}): raise that"
        if self.memory != ANY and self.memory.offload_params:
            yield "memory", "have no offload_params in a search: give degrees, such as --ep 8"

    @property
    def planned_model(self) -> PlannedModel:
        """The model's sizes and layers."""
        return get_planned_model(self.model)

    @property
    def rows(self) -> int:
        """The rows (sequences) of a step over all data ranks."""
        return self.global_batch or ROWS_PER_GPU * self.num_gpus

    @property
    def ranks_per_domain(self) -> int:
        """The number of neighbouring ranks that NVLink connects."""
        return self.gpus_per_node or count_domain_ranks(self.gpu, self.num_gpus)

    @property
    def num_peers(self) -> int:
        """The number of neighbouring ranks that access each other's memory; 1 = no access."""
        return count_peers(self.gpu, self.ranks_per_domain)

    @property
    def cost_table(self) -> CostTable:
        """The shipped costs of operations on the GPU."""
        return CostTable.of(self.gpu)

    @property
    def max_gpu_bytes(self) -> int:
        """The bytes of a GPU's memory that a plan may use."""
        return int((1 - self.reserve) * get_gpu(self.gpu).memory)

    @property
    def max_host_bytes(self) -> int:
        """The bytes of a server's host memory that a plan may pin."""
        return int((1 - self.reserve) * get_gpu(self.gpu).host_memory)


class Layout(NamedTuple):
    """Parallel layout: degrees, stages per pipeline rank, and rows (sequences) of a micro-batch."""

    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    chunks: int = 1
    batch_size: int = 1

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self._asdict().items() if v > 1) or "data alone"


class Refusal(NamedTuple):
    """The rule that refuses a layout (a name in a few words), and the reason as a sentence."""

    rule: str
    reason: str


@cache
def list_divisors(integer: int) -> tuple[int, ...]:
    """Return the divisors of an integer, ascending."""
    return tuple(n for n in range(1, integer + 1) if integer % n == 0)


def enumerate_layouts(num_gpus: int) -> Iterator[Layout]:
    """Yield all layouts of `num_gpus` GPUs with etp 1, including layouts that a rule refuses."""
    for pp in list_divisors(num_gpus):
        degrees = list_divisors(num_gpus // pp)
        for tp in degrees:
            cp_degrees, chunks = list_divisors(num_gpus // (pp * tp)), CHUNKS if pp > 1 else (1,)
            for rest in product(cp_degrees, degrees, (1,), chunks, BATCH_SIZES):
                yield Layout(pp, tp, *rest)


def find_refusal(request: SearchRequest, layout: Layout) -> Refusal | None:
    """Check a layout against all rules; return the first `Refusal`; None = all rules allow it."""
    return next(
        chain(_find_rule_violations(request, layout), _find_guideline_violations(request, layout)),
        None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionSet:
    """Memory-saving options, in the order of `OPTIONS`, and the resulting option records."""

    options: tuple[Option, ...]
    fsdp: FSDPOptions
    memory: MemoryOptions
    precision: Precision | None
    optimizer: OptimizerOptions

    @property
    def overhead(self) -> Overhead:
        """The overhead of the slowest option, the last one; "low" without options."""
        return (self.options[-1].overhead if self.options else None) or "low"


def make_option_set(request: SearchRequest, options: tuple[Option, ...]) -> OptionSet:
    """Apply `options`, in the order of `OPTIONS`, to a request's fields; return the `OptionSet`."""
    fields: dict[str, Any] = {name: getattr(request, name) for name in DEFAULTS}
    fields = {name: DEFAULTS[name] if value == ANY else value for name, value in fields.items()}
    run = TrainingRun(model=request.model, num_gpus=1, seq_len=1, **fields)
    for option in options:
        run = option.apply(run, request.gpu)
    return OptionSet(options=options, **{name: getattr(run, name) for name in DEFAULTS})


def list_option_sets(request: SearchRequest) -> tuple[OptionSet, ...]:
    """Return option sets, each with one more option; the first has options that may save time."""
    sets = [make_option_set(request, ())]
    for option in OPTIONS:
        larger = make_option_set(request, (*sets[-1].options, option))
        changes = _list_different_fields(larger, sets[-1])
        if option.overhead and changes and all(getattr(request, name) == ANY for name in changes):
            sets.append(larger)
    return tuple(sets[sum(option.gains for option in sets[-1].options) :])


def list_smaller_option_sets(
    request: SearchRequest, option_set: OptionSet, *, includes_gains: bool
) -> Iterator[OptionSet]:
    """Yield copies of `option_set`, each without one option that costs time.

    If `includes_gains`, also yield copies without one option that may save time.
    """
    # The option with the largest overhead is removed first.
    for removal in (o for o in reversed(option_set.options) if includes_gains or not o.gains):
        options = tuple(option for option in option_set.options if option is not removal)
        smaller = make_option_set(request, options)
        if _list_different_fields(smaller, option_set):
            yield smaller


def _list_different_fields(first_set: OptionSet, second_set: OptionSet) -> list[str]:
    """Return the names of fields of `TrainingRun` whose values differ between two option sets."""
    return [name for name in DEFAULTS if getattr(first_set, name) != getattr(second_set, name)]


def make_run(request: SearchRequest, layout: Layout, options: OptionSet) -> TrainingRun:
    """Return the request's run in a layout, with a set of options that save memory."""
    pipeline, nvlink = None, None
    if layout.pp > 1:
        chunks = layout.chunks if layout.chunks > 1 else None
        name: ScheduleName = "interleaved" if chunks else "1f1b"
        pipeline = PipelineConfig(schedule=name, chunks=chunks)
    if are_peers(layout.ep * layout.etp, request.num_peers):
        nvlink = TWICE if request.nvlink == ANY else request.nvlink
    return TrainingRun(
        model=request.model,
        num_gpus=request.num_gpus,
        parallel=ParallelConfig(
            pp=layout.pp, tp=layout.tp, cp=layout.cp, ep=layout.ep, etp=layout.etp
        ),
        seq_len=request.seq_len,
        batch_size=layout.batch_size,
        num_micro_batches=count_micro_batches(request, layout),
        pipeline=pipeline,
        nvlink=nvlink,
        ranks_per_domain=request.ranks_per_domain,
        num_peers=request.num_peers,
        has_block_scales=get_gpu(request.gpu).has_block_scales,
        **{name: getattr(options, name) for name in DEFAULTS},
    )


def list_schedules(run: TrainingRun) -> list[TrainingRun]:
    """Return `run`, and a copy for each other schedule with the same number of stages per rank."""
    if run.pipeline is None:
        return [run]
    chunks = run.pipeline.chunks or 1
    # Schedule "gpipe" takes as long as "1f1b" and needs more memory.
    names: Any = [
        name
        for name, rule in RULES.items()
        if rule.chunks in (None, chunks) and name not in ("gpipe", run.pipeline.schedule)
    ]
    pipelines = (PipelineConfig(schedule=name, chunks=chunks) for name in names)
    return [run, *(replace(run, pipeline=pipeline) for pipeline in pipelines)]


def count_data_ranks(request: SearchRequest, layout: Layout) -> int:
    """Return the number of data ranks, which have different rows: num_gpus / (pp * tp * cp)."""
    return request.num_gpus // (layout.pp * layout.tp * layout.cp)


def count_micro_batches(request: SearchRequest, layout: Layout) -> int:
    """Return the number of micro-batches of a step on each data rank."""
    return request.rows // (count_data_ranks(request, layout) * layout.batch_size)


def _find_rule_violations(request: SearchRequest, layout: Layout) -> Iterator[Refusal]:
    """Check a layout as `parallelize_moe` does, and yield a Refusal for each violated rule."""
    model, (pp, tp, cp, ep, etp, chunks, batch_size) = request.planned_model, layout
    for view, size in (("dense", pp * tp * cp), ("expert", pp * ep * etp)):
        if request.num_gpus % size:
            reason = f"the {view} view ({size} ranks) must divide the GPUs ({request.num_gpus})"
            yield Refusal("degrees divide the GPUs", reason)
            return
    if model.moe is None and ep * etp > 1:
        yield Refusal("experts divide", "a model without experts must have ep and etp 1")
    elif model.moe is not None:
        for name, degree, field in (("num_experts", ep, "ep"), ("hidden_dim", etp, "etp")):
            if (value := getattr(model.moe, name)) % degree:
                reason = f"MoEConfig.{name} ({value}) must be divisible by {field} ({degree})"
                yield Refusal("experts divide", reason)
    try:
        model.check_degrees(pp=pp, tp=tp, cp=cp)
    except (ValueError, NotImplementedError) as error:
        yield Refusal("heads divide", str(error))
    parts = 2 * cp if cp > 1 else 1
    if request.seq_len % (parts * tp):
        reason = f"seq_len ({request.seq_len}) must be a multiple of {parts * tp} (tp, 2 cp)"
        yield Refusal("rows divide", reason)
    if pp * chunks > model.num_layers:
        reason = f"stages (pp {pp} x {chunks}) must be <= num_layers ({model.num_layers})"
        yield Refusal("a layer per stage", reason)
    ranks = count_data_ranks(request, layout)
    if request.rows % (ranks * batch_size):
        reason = (
            f"rows of a step ({request.rows}) must be a multiple of the data ranks ({ranks}) times "
            f"batch_size ({batch_size})"
        )
        yield Refusal("rows for all data ranks", reason)


def _find_guideline_violations(request: SearchRequest, layout: Layout) -> Iterator[Refusal]:
    """Check a layout against the guidelines, and yield a Refusal for each violated guideline."""
    pp, tp, cp, _, etp, chunks, _ = layout
    node, stage = request.ranks_per_domain, request.num_gpus // pp
    if etp > 1:
        reason = "experts are cut by ep, with larger products and less communication: use etp=1"
        yield Refusal("EP before TP for experts", reason)
    if tp > node:
        reason = f"tp ({tp}) must stay within NVLink ({node} GPUs): use pp"
        yield Refusal("TP within NVLink", reason)
    if cp > 1 and (request.seq_len < LONG or request.seq_len < cp * CP_TOKENS):
        reason = (
            f"cp ({cp}) pays from {LONG} tokens a row on, with {CP_TOKENS} on each rank, and rows "
            f"have {request.seq_len}: use fewer"
        )
        yield Refusal("CP for long rows", reason)
    if pp > 1 and stage % node:
        reason = f"a stage ({stage} GPUs) must be whole nodes ({node} GPUs): use tp or ep inside"
        yield Refusal("PP across nodes", reason)
    if pp > 1 and chunks == 1 and CHUNKS[1] * pp <= request.planned_model.num_layers:
        reason = f"pp ({pp}) leaves ranks idle less with {CHUNKS[1]} stages each: use chunks"
        yield Refusal("VPP where there is PP", reason)
    micro_batches = count_micro_batches(request, layout)
    if pp > 1 and micro_batches < pp:
        reason = f"micro-batches ({micro_batches}) must be >= pp ({pp}), or ranks idle: use more"
        yield Refusal("micro-batches fill the pipeline", reason)
