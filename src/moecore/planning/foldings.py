"""SearchRequest -> Folding, ..: all ways to cut a model over GPUs, and why one is refused.

    divisors of the GPUs -> what parallelize_moe refuses -> what the guidelines advise against

Legend of a folding: pp, tp, cp, ep, etp as in `ParallelConfig`; the data ranks are what is left.
Of stages a folding has the number; `schedules_of` has the orders that they may run in.

Source of the guidelines: arXiv:2603.07685, section 9.1.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple

from moecore.base.fields import Bound, CheckedRecord, Count, Rules
from moecore.base.options.dispatch import NVLinkOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.memory import MemoryOptions
from moecore.base.options.names import GpuName
from moecore.base.options.precision import Precision
from moecore.parallel.mesh import ParallelConfig
from moecore.parallel.pipeline.orders import RULES
from moecore.parallel.pipeline.schedule import PipelineConfig
from moecore.planning.costs import CostTable
from moecore.planning.gpus import Gpu, NumNeighbours, are_peers, domain_of, gpu_of, peers_of
from moecore.planning.levers import FIELDS, TWICE, Levers, Option, fewer, ladder, levers_with
from moecore.planning.model import PlannedModel
from moecore.planning.run import (
    AnyModel,
    NumGpus,
    OptimizerOptions,
    SeqLen,
    TrainingRun,
    planned_model_of,
)

CHUNKS = (1, 2, 4)  # stages per rank that are tried
BATCH_SIZES = (1, 2, 4)  # rows of a micro-batch that are tried
LONG, CP_TOKENS = 8192, 4096  # tokens of a row from which cp pays, and those of a cp rank
ROWS_PER_GPU = 8  # of a step, where nobody gives its rows
ANY: Literal["any"] = "any"
FOLDING = ("pp", "tp", "cp", "ep", "etp", "chunks", "batch_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest(CheckedRecord):
    """What is to be trained, on which GPUs, and what may vary.

    Attributes:
        model: the decoder, or a class of transformers.
        num_gpus: ranks of the world.
        gpu: a key of `GPUS`, or a GPU of your own.
        gpus_per_node: ranks among which NVLink runs; None = as many as divide the world.
        seq_len: tokens of a row.
        global_batch: rows of a step over all data ranks; None = 8 per GPU.
        fsdp: how parameters are sharded; "any" = weights stay whole in a step where that fits.
        memory: what is computed again or offloaded; "any" = as much as is needed.
        precision: which products are in FP8; "any" = where it is needed.
        optimizer: what is kept between steps; "any" = as little as is needed.
        nvlink: the room of dispatcher "nvlink" where a node has the ranks that share experts;
            "any" = for twice the rows of even loads; None = tokens travel by all-to-all.
        reserve: share of a GPU's and of its server's memory that no plan may use: it is left to
            what an operation needs while it runs, the allocator, NCCL and the CUDA context, and to
            the system and the loader.
    """

    model: AnyModel
    num_gpus: NumGpus
    gpu: GpuName | Gpu = "h100-80"
    gpus_per_node: NumNeighbours | None = None
    seq_len: SeqLen = 4096
    global_batch: Count | None = None
    fsdp: FSDPOptions | Literal["any"] = ANY
    memory: MemoryOptions | Literal["any"] = ANY
    precision: Precision | Literal["any"] | None = ANY
    optimizer: OptimizerOptions | Literal["any"] = ANY
    nvlink: NVLinkOptions | Literal["any"] | None = ANY
    reserve: Annotated[float, Bound(">=", 0), Bound("<", 1)] = 0.1

    def _rules(self) -> Rules:
        longest = self.planned_model.max_seq_len
        if longest is not None and self.seq_len > longest:
            yield "seq_len", f"be <= DecoderConfig.max_seq_len ({longest}): raise that"

    @property
    def planned_model(self) -> PlannedModel:
        """The model, as plans read it."""
        return planned_model_of(self.model)

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.global_batch or ROWS_PER_GPU * self.num_gpus

    @property
    def domain(self) -> int:
        """Neighbouring ranks among which NVLink runs."""
        return self.gpus_per_node or domain_of(self.gpu, self.num_gpus)

    @property
    def peers(self) -> int:
        """Neighbouring ranks that reach each other's memory; 1 = none."""
        return peers_of(self.gpu, self.domain)

    @property
    def costs(self) -> CostTable:
        """The shipped costs of operations on the GPU."""
        return CostTable.of(self.gpu)

    @property
    def limit(self) -> int:
        """Bytes that a plan may use."""
        return int((1 - self.reserve) * gpu_of(self.gpu).memory)

    @property
    def host_limit(self) -> int:
        """Bytes of a server's host memory that a plan may pin."""
        return int((1 - self.reserve) * gpu_of(self.gpu).host_memory)


class Folding(NamedTuple):
    """Degrees, stages per pipeline rank, and rows of a data rank's micro-batch."""

    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    chunks: int = 1
    batch_size: int = 1

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self.named().items() if v > 1) or "data alone"

    def named(self) -> dict[str, int]:
        """Return the numbers by name."""
        return dict(zip(FOLDING, self, strict=True))


class Refusal(NamedTuple):
    """Why a folding is not planned; `rule` is the reason in few words, for counts."""

    rule: str
    reason: str


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def foldings(num_gpus: int) -> Iterator[Folding]:
    """Yield every way to fold so many GPUs with etp 1, legal for a model or not."""
    for pp in divisors(num_gpus):
        sizes = divisors(num_gpus // pp)
        for tp in sizes:
            for cp in divisors(num_gpus // (pp * tp)):
                for ep in sizes:
                    for chunks in CHUNKS if pp > 1 else (1,):
                        for batch_size in BATCH_SIZES:
                            yield Folding(
                                pp=pp, tp=tp, cp=cp, ep=ep, chunks=chunks, batch_size=batch_size
                            )


def refuse(request: SearchRequest, folding: Folding) -> Refusal | None:
    """Return the first rule that a folding breaks: of moecore, then of the guidelines."""
    return next(chain(_illegal(request, folding), _unwise(request, folding)), None)


def rungs_of(request: SearchRequest) -> tuple[Levers, ...]:
    """Return the levers of a request."""
    return ladder(request.model, request.gpu, **_fields(request))


def levers_of(request: SearchRequest, options: tuple[Option, ...]) -> Levers:
    """Return levers of a request with these options."""
    return levers_with(options, request.model, request.gpu, **_fields(request))


def fewer_of(request: SearchRequest, levers: Levers, *, gains: bool) -> Iterator[Levers]:
    """Yield levers of a request with one option less."""
    return fewer(levers, request.model, request.gpu, gains=gains, **_fields(request))


def _fields(request: SearchRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in FIELDS}


def run_of(request: SearchRequest, folding: Folding, levers: Levers) -> TrainingRun:
    """Return the run of a folding with the levers of one rung."""
    return TrainingRun(
        model=request.model,
        num_gpus=request.num_gpus,
        parallel=ParallelConfig(
            pp=folding.pp, tp=folding.tp, cp=folding.cp, ep=folding.ep, etp=folding.etp
        ),
        seq_len=request.seq_len,
        batch_size=folding.batch_size,
        num_micro_batches=num_micro_batches(request, folding),
        pipeline=_stages(folding),
        fsdp=levers.fsdp,
        memory=levers.memory,
        precision=levers.precision,
        optimizer=levers.optimizer,
        nvlink=_room(request, folding),
        ranks_per_domain=request.domain,
        num_peers=request.peers,
    )


def _room(request: SearchRequest, folding: Folding) -> NVLinkOptions | None:
    if not are_peers(folding.ep * folding.etp, request.peers):
        return None
    return TWICE if request.nvlink == ANY else request.nvlink


def data_ranks(request: SearchRequest, folding: Folding) -> int:
    """Return how many ranks have rows of their own."""
    return request.num_gpus // (folding.pp * folding.tp * folding.cp)


def num_micro_batches(request: SearchRequest, folding: Folding) -> int:
    """Return how many micro-batches of a data rank a step has."""
    return request.rows // (data_ranks(request, folding) * folding.batch_size)


def schedules_of(run: TrainingRun) -> list[TrainingRun]:
    """Return a run of a search, and those with the same stages in another order."""
    if run.pipeline is None:
        return [run]
    chunks = run.pipeline.chunks or 1
    takes = (name for name, rule in RULES.items() if rule.chunks in (None, chunks))
    # 1F1B takes as long as "gpipe" and holds less.
    names = (name for name in takes if name not in ("gpipe", run.pipeline.schedule))
    pipelines = (PipelineConfig(schedule=name, chunks=chunks) for name in names)  # type: ignore[arg-type]
    return [run, *(replace(run, pipeline=pipeline) for pipeline in pipelines)]


def _stages(folding: Folding) -> PipelineConfig | None:
    if folding.pp == 1:
        return None
    if folding.chunks == 1:
        return PipelineConfig(schedule="1f1b")
    return PipelineConfig(schedule="interleaved", chunks=folding.chunks)


def _illegal(request: SearchRequest, folding: Folding) -> Iterator[Refusal]:
    """Yield what `parallelize_moe` would refuse."""
    model, (pp, tp, cp, ep, etp, chunks, batch_size) = request.planned_model, folding
    for view, size in (("dense", pp * tp * cp), ("expert", pp * ep * etp)):
        if request.num_gpus % size:
            yield Refusal(
                "degrees divide the GPUs",
                f"the {view} view ({size} ranks) must divide the GPUs ({request.num_gpus})",
            )
            return
    if model.moe is None and ep * etp > 1:
        yield Refusal("experts divide", "a model without experts must have ep and etp 1")
    elif model.moe is not None:
        sizes = (("num_experts", ep, "ep"), ("hidden_dim", etp, "etp"))
        for name, degree, field in sizes:
            if (value := getattr(model.moe, name)) % degree:
                reason = f"MoEConfig.{name} ({value}) must be divisible by {field} ({degree})"
                yield Refusal("experts divide", reason)
    try:
        model.check(pp=pp, tp=tp, cp=cp)
    except (ValueError, NotImplementedError) as error:
        yield Refusal("heads divide", str(error))
    parts = 2 * cp if cp > 1 else 1
    if request.seq_len % (parts * tp):
        reason = f"seq_len ({request.seq_len}) must be a multiple of {parts * tp} (tp, 2 cp)"
        yield Refusal("rows divide", reason)
    if pp * chunks > model.num_layers:
        reason = f"stages (pp {pp} x {chunks}) must be <= num_layers ({model.num_layers})"
        yield Refusal("a layer per stage", reason)
    ranks = data_ranks(request, folding)
    if request.rows % (ranks * batch_size):
        reason = (
            f"rows of a step ({request.rows}) must be a multiple of the data ranks ({ranks}) times "
            f"batch_size ({batch_size})"
        )
        yield Refusal("rows for all data ranks", reason)


def _unwise(request: SearchRequest, folding: Folding) -> Iterator[Refusal]:
    """Yield what the guidelines advise against."""
    pp, tp, cp, _, etp, chunks, _ = folding
    node, stage = request.domain, request.num_gpus // pp
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
    micro_batches = num_micro_batches(request, folding)
    if pp > 1 and micro_batches < pp:
        reason = f"micro-batches ({micro_batches}) must be >= pp ({pp}), or ranks idle: use more"
        yield Refusal("micro-batches fill the pipeline", reason)
