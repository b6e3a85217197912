"""SearchRequest -> SearchResult: all foldings of a model over GPUs, refused, planned and ranked.

    divisors of the GPUs -> rules -> most promising first -> levers until it fits -> ranked by time

A folding that a rule refuses costs microseconds, one that is planned some seconds: so few are
planned in full (`plan_memory`, `plan_time`), in the order of the guidelines, and a result has how
many were not. Legality is what `ParallelConfig` and `plan_sharding` refuse; guidelines are the
report's.

Legend of a folding: pp, tp, cp, ep, etp as in `ParallelConfig`; the data ranks are what is left.

Source: arXiv:2603.07685, section 9.1.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain
from math import gcd, prod
from typing import Annotated, Any, Literal, NamedTuple

from moecore._fields import Bound, Count, OneOf, Rules, check_arguments, check_fields
from moecore.attention.context_parallel.group import ContextOptions
from moecore.memory.options import MemoryOptions
from moecore.mesh import ParallelConfig
from moecore.models.config import DecoderConfig
from moecore.models.size import num_params
from moecore.models.tensor_parallel import check_tensor_parallel
from moecore.pipeline.config import PipelineConfig
from moecore.planning.costs import CostTable
from moecore.planning.gpus import GPUS
from moecore.planning.levers import OVERHEADS, Levers, ladder
from moecore.planning.memory import MemoryPlan, plan_memory
from moecore.planning.run import OptimizerOptions, TrainingRun
from moecore.planning.time_plan import TimePlan, plan_time
from moecore.precision.roles import Precision
from moecore.shard.options import FSDPOptions
from moecore.tables import columns, shown_bytes

CHUNKS = (1, 2, 4)  # stages per rank that are tried
LONG, CP_TOKENS = 8192, 4096  # tokens of a row from which cp pays, and those of a cp rank
ROWS_PER_GPU = 8  # of a step, where nobody gives its rows
ANY: Literal["any"] = "any"
FOLDING = ("pp", "tp", "cp", "ep", "etp", "chunks")


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """What is to be trained, on which GPUs, and what may vary.

    Attributes:
        model: the decoder.
        num_gpus: ranks of the world.
        gpu: a key of `GPUS`.
        gpus_per_node: ranks among which NVLink runs.
        seq_len: tokens of a row.
        global_batch: rows of a step over all data ranks; None = 8 per GPU.
        fsdp: how parameters are sharded; "any" = weights stay whole in a step where that fits.
        memory: what is computed again or offloaded; "any" = as much as is needed.
        precision: which products are in FP8; "any" = where it is needed.
        optimizer: what is kept between steps; "any" = as little as is needed.
        reserve: share of a GPU's memory that no plan may use: it is left to what an operation needs
            while it runs, the allocator, NCCL and the CUDA context.
    """

    model: DecoderConfig
    num_gpus: Count
    gpu: Annotated[str, OneOf(tuple(GPUS))] = "h100-80"
    gpus_per_node: Count = 8
    seq_len: Count = 4096
    global_batch: Count | None = None
    fsdp: FSDPOptions | Literal["any"] = ANY
    memory: MemoryOptions | Literal["any"] = ANY
    precision: Precision | Literal["any"] | None = ANY
    optimizer: OptimizerOptions | Literal["any"] = ANY
    reserve: Annotated[float, Bound(">=", 0), Bound("<", 1)] = 0.1

    def __post_init__(self) -> None:
        check_fields(self, self._rules)

    def _rules(self) -> Rules:
        longest = self.model.max_seq_len
        if self.seq_len > longest:
            yield "seq_len", f"be <= DecoderConfig.max_seq_len ({longest}): raise that"

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.global_batch or ROWS_PER_GPU * self.num_gpus

    @property
    def limit(self) -> int:
        """Bytes that a plan may use."""
        return int((1 - self.reserve) * GPUS[self.gpu].memory)


class Folding(NamedTuple):
    """Degrees, and stages per pipeline rank."""

    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    chunks: int = 1

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self.named().items() if v > 1) or "data alone"

    def named(self) -> dict[str, int]:
        """Return the numbers by name."""
        return dict(zip(FOLDING, self, strict=True))


class Refusal(NamedTuple):
    """Why a folding is not planned.

    Attributes:
        rule: in few words, for counts.
        reason: in one line.
    """

    rule: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A folding that was planned, with the cheapest levers with which it fits, or with all.

    Attributes:
        folding: degrees.
        run: what was planned.
        levers: their last rung.
        plan: bytes of each pipeline rank.
        headroom: bytes of the limit that the largest rank leaves; negative where it does not fit.
    """

    folding: Folding
    run: TrainingRun
    levers: Levers
    plan: MemoryPlan
    headroom: int

    @property
    def fits(self) -> bool:
        """Whether every rank fits."""
        return self.headroom >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitting(Candidate):
    """A candidate that fits.

    Attributes:
        time: of a step.
    """

    time: TimePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """What was found, and what was not looked at.

    Attributes:
        request: what was asked.
        fitting: foldings that fit, best first.
        too_large: foldings that do not fit with any levers.
        refused: how many foldings each rule refused.
        not_planned: foldings that no rule refused, behind those that were planned.
        change: the smallest change that makes a folding fit, where none does; None = it is not
            needed, or nobody knows one.
    """

    request: SearchRequest
    fitting: tuple[Fitting, ...]
    too_large: tuple[Candidate, ...]
    refused: Mapping[str, int]
    not_planned: int
    change: str | None

    def table(self) -> str:
        """Return a row per folding that fits."""
        names = ("", "pp", "tp", "cp", "ep", "schedule", "micro-batches", "levers", "bytes", "left")
        lines: list[tuple[str, ...]] = [(*names, "s/step", "tokens/s", "wall")]
        for i, found in enumerate(self.fitting):
            p, pipeline = found.folding, found.run.pipeline
            order = (
                "-"
                if pipeline is None
                else f"{pipeline.schedule}{f' x{p.chunks}' * (p.chunks > 1)}"
            )
            numbers = (str(i + 1), *map(str, (p.pp, p.tp, p.cp, p.ep)), order)
            used = shown_bytes(found.plan.largest.num_bytes)
            rows = str(found.run.num_micro_batches)
            memory = (used, shown_bytes(found.headroom))
            lines.append((*numbers, rows, shown_levers(found), *memory, *_shown_time(found)))
        return "\n".join(columns(lines))


def shown_levers(found: Candidate) -> str:
    """Return what a candidate changes of a plain run, in few words."""
    run, texts = found.run, []
    if run.precision is not None:
        texts.append(f"fp8 {run.precision.recipe.scaling}")
    if run.memory.parts:
        texts.append("+".join(run.memory.parts).replace("norm+activation+rope", "gemm_last"))
    if run.memory.offload:
        texts.append(f"offload {'+'.join(run.memory.offload)}")
    if run.fsdp.dense_strategy != "optim":
        texts.append(run.fsdp.dense_strategy)
    if run.optimizer.moment_dtype != "float32":
        texts.append(f"{run.optimizer.moment_dtype} moments")
    if run.optimizer.offload_fraction:
        texts.append("state on host")
    return ", ".join(texts) or "none"


def _shown_time(found: Fitting) -> tuple[str, ...]:
    time = found.time
    return f"{time.seconds:.3g}", f"{time.tokens_per_second:,.0f}", time.wall


def by_time(found: Fitting) -> float:
    """Return the seconds of a step: those of a search have the same tokens."""
    return found.time.seconds


def search(
    request: SearchRequest,
    *,
    rank_by: Callable[[Fitting], Any] = by_time,
    table: CostTable | None = None,
    wanted: Count = 3,
    most_planned: Count = 4,
) -> SearchResult:
    """Return foldings that fit, ranked; where none does, the smallest change that helps.

    Args:
        request: what is trained, and what may vary.
        rank_by: sorts those that fit, the least first.
        table: what operations take; None = the one that moecore ships for the GPU.
        wanted: as many that fit with cheap levers are enough.
        most_planned: foldings that are planned in full.
    """
    check_arguments(search, locals())
    table = CostTable.of(request.gpu) if table is None else table
    refused, open_foldings = Counter[str](), list[Folding]()
    for folding in foldings(request.num_gpus):
        refusal = refuse(request, folding)
        if refusal is None:
            open_foldings.append(folding)
        else:
            refused[refusal.rule] += 1
    open_foldings.sort(key=_promise(request))
    planned, cheap = list[Candidate](), 0
    for folding in open_foldings[:most_planned]:
        try:
            planned.append(fit(request, folding))
        except (ValueError, NotImplementedError):
            refused["parallelize_moe"] += 1
            continue
        cheap += planned[-1].fits and planned[-1].levers.overhead == "low"
        if cheap == wanted:
            break
    fitting = sorted((_timed(found, table) for found in planned if found.fits), key=rank_by)
    return SearchResult(
        request=request,
        fitting=tuple(fitting),
        too_large=tuple(found for found in planned if not found.fits),
        refused=dict(refused),
        not_planned=len(open_foldings) - len(planned) - refused["parallelize_moe"],
        change=None if fitting else smallest_change(request),
    )


def _timed(found: Candidate, table: CostTable) -> Fitting:
    known = {field.name: getattr(found, field.name) for field in fields(found)}
    return Fitting(**known, time=plan_time(found.run, table))


def explain_folding(request: SearchRequest, folding: Folding) -> str:
    """Return in one line why a folding is refused or too large, or with what it fits."""
    check_arguments(explain_folding, locals())
    refusal = refuse(request, folding)
    if refusal is not None:
        return f"{folding}: refused ({refusal.rule}): {refusal.reason}"
    found = fit(request, folding)
    largest = found.plan.largest
    used = f"{shown_bytes(largest.num_bytes)} of {shown_bytes(request.limit)}"
    if found.fits:
        line = plan_time(found.run, CostTable.of(request.gpu)).line
        return f"{folding}: fits, {used}, levers: {shown_levers(found)}; {line}"
    kind, size = max(largest.device.items(), key=lambda item: item[1])
    return (
        f"{folding}: too large: with all levers pipeline rank {largest.pp_rank} holds {used}, "
        f"most of it {kind} ({shown_bytes(size)})"
    )


def foldings(num_gpus: int) -> Iterator[Folding]:
    """Yield every way to fold so many GPUs, legal for a model or not."""
    sizes = [n for n in range(1, num_gpus + 1) if num_gpus % n == 0]
    for pp in sizes:
        stage = num_gpus // pp
        pairs = [(a, b) for a in sizes if stage % a == 0 for b in sizes if stage % (a * b) == 0]
        for tp, cp in pairs:
            for ep, etp in pairs:
                for chunks in CHUNKS if pp > 1 else (1,):
                    yield Folding(pp, tp, cp, ep, etp, chunks)


def refuse(request: SearchRequest, folding: Folding) -> Refusal | None:
    """Return the first rule that a folding breaks: of moecore, then of the guidelines."""
    return next(chain(_illegal(request, folding), _unwise(request, folding)), None)


def fit(request: SearchRequest, folding: Folding) -> Candidate:
    """Plan a folding with the cheapest levers with which it fits; with all where none suffice.

    Memory falls from rung to rung, so the first that fits is found by halves.
    """
    rungs = rungs_of(request)
    low, high = 0, len(rungs) - 1
    ends = [i for i, rung in enumerate(rungs[:-1]) if rung.overhead != rungs[i + 1].overhead]
    found = None
    for end in (*ends, high):  # the last rung of each overhead
        found = planned_with(request, folding, rungs[end])
        if found.fits:
            high = end
            break
        low = end + 1
    assert found is not None, "there is a rung"
    while found.fits and low < high:
        middle = (low + high) // 2
        other = planned_with(request, folding, rungs[middle])
        if other.fits:
            found, high = other, middle
        else:
            low = middle + 1
    return found


def rungs_of(request: SearchRequest) -> tuple[Levers, ...]:
    """Return the levers of a request."""
    names = ("fsdp", "memory", "precision", "optimizer")
    given = {name: getattr(request, name) for name in names}
    return ladder(request.model, request.gpu, **given)


def planned_with(request: SearchRequest, folding: Folding, levers: Levers) -> Candidate:
    """Plan a folding with the levers of one rung."""
    run = TrainingRun(
        model=request.model,
        num_gpus=request.num_gpus,
        parallel=ParallelConfig(**{k: v for k, v in folding.named().items() if k != "chunks"}),
        seq_len=request.seq_len,
        num_micro_batches=request.rows // data_ranks(request, folding),
        pipeline=_stages(folding),
        fsdp=levers.fsdp,
        memory=levers.memory,
        precision=levers.precision,
        optimizer=levers.optimizer,
    )
    plan = plan_memory(run)
    return Candidate(
        folding=folding,
        run=run,
        levers=levers,
        plan=plan,
        headroom=request.limit - plan.largest.num_bytes,
    )


def smallest_change(request: SearchRequest) -> str | None:
    """Return the cheapest change with which a folding fits; None = none of those tried."""
    for text, changed in _changes(request):
        open_ones = [f for f in foldings(changed.num_gpus) if refuse(changed, f) is None]
        for folding in sorted(open_ones, key=_about(changed))[:2]:
            if planned_with(changed, folding, rungs_of(changed)[-1]).fits:
                return f"{text}, with {folding}"
    return None


def data_ranks(request: SearchRequest, folding: Folding) -> int:
    """Return how many ranks have rows of their own."""
    return request.num_gpus // (folding.pp * folding.tp * folding.cp)


def _stages(folding: Folding) -> PipelineConfig | None:
    if folding.pp == 1:
        return None
    if folding.chunks == 1:
        return PipelineConfig(schedule="1f1b")
    return PipelineConfig(schedule="interleaved", chunks=folding.chunks)


def _illegal(request: SearchRequest, folding: Folding) -> Iterator[Refusal]:
    """Yield what `parallelize_moe` would refuse."""
    model, (pp, tp, cp, ep, etp, chunks) = request.model, folding
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
        check_tensor_parallel(model, tp)
        if cp > 1:
            heads = model.num_heads // tp, model.num_kv_heads // tp
            ContextOptions().resolve(cp, *heads, has_latents=model.mla is not None)
    except ValueError as error:
        yield Refusal("heads divide", str(error))
    parts = 2 * cp if cp > 1 else 1
    if request.seq_len % (parts * tp):
        reason = f"seq_len ({request.seq_len}) must be a multiple of {parts * tp} (tp, 2 cp)"
        yield Refusal("rows divide", reason)
    if pp * chunks > model.num_layers:
        reason = f"stages (pp {pp} x {chunks}) must be <= num_layers ({model.num_layers})"
        yield Refusal("a layer per stage", reason)
    ranks = data_ranks(request, folding)
    if request.rows % ranks:
        reason = f"rows of a step ({request.rows}) must be a multiple of the data ranks ({ranks})"
        yield Refusal("rows for all data ranks", reason)


def _unwise(request: SearchRequest, folding: Folding) -> Iterator[Refusal]:
    """Yield what the guidelines advise against."""
    pp, tp, cp, _, etp, chunks = folding
    node, stage = request.gpus_per_node, request.num_gpus // pp
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
    if pp > 1 and chunks == 1 and CHUNKS[1] * pp <= request.model.num_layers:
        reason = f"pp ({pp}) leaves ranks idle less with {CHUNKS[1]} stages each: use chunks"
        yield Refusal("VPP where there is PP", reason)
    micro_batches = request.rows // data_ranks(request, folding)
    if pp > 1 and micro_batches < pp:
        reason = f"micro-batches ({micro_batches}) must be >= pp ({pp}), or ranks idle: use more"
        yield Refusal("micro-batches fill the pipeline", reason)


def _crosses(request: SearchRequest, folding: Folding) -> bool:
    return folding.ep * folding.etp > request.gpus_per_node


def _by_degrees(folding: Folding, crosses_nodes: bool) -> tuple[float, ...]:
    """Sort by guidelines 1 and 2: within NVLink, the fewest model parallel ranks, few messages."""
    degrees = max(folding.tp * folding.cp, folding.ep * folding.etp) * folding.pp
    return (crosses_nodes, degrees, prod(folding[:3]), abs(folding.chunks - CHUNKS[1]))


def _promise(request: SearchRequest) -> Callable[[Folding], tuple[float, ...]]:
    """Return what sorts foldings: those first that may fit with cheap levers, by the guidelines."""
    needs = _about(request)

    def key(folding: Folding) -> tuple[float, ...]:
        crosses_nodes, needed = _crosses(request, folding), needs(folding)
        if needed > request.limit:  # with dear levers: what needs least first
            return (True, crosses_nodes, needed)
        return (False, *_by_degrees(folding, crosses_nodes))

    return key


def _about(request: SearchRequest) -> Callable[[Folding], float]:
    """Return about what the largest rank holds with cheap levers: an order of plans, and no plan.

    bf16 weights and fp32 sums of what a rank computes with; fp32 weights, gradients and bf16
    moments of its part; what one rank of a node keeps of a micro-batch, cut by tp and cp, as often
    as the first rank of a pipeline has it.
    """
    model, experts, ep = request.model, 0, 1
    if model.moe is not None:
        matrix = model.moe.expert_dim * model.moe.hidden_dim
        experts = (model.num_moe_layers + model.num_mtp_layers) * model.moe.num_experts * 3 * matrix
        ep = gcd(model.moe.num_experts, request.gpus_per_node)
    everything = num_params(model)
    cheap = [rung for rung in rungs_of(request) if rung.overhead == OVERHEADS[0]][-1]
    one = replace(request, num_gpus=ep, global_batch=ep)
    kept = planned_with(one, Folding(ep=ep), cheap).plan.largest.activations

    def needs(folding: Folding) -> float:
        pp, tp, cp, ep, etp, chunks = folding
        held = experts / (pp * ep * etp) + (everything - experts) / (pp * tp)
        in_flight = 1 + 1 / chunks if chunks > 1 else 1
        return 6 * held + 12 * everything / request.num_gpus + in_flight * kept / (tp * cp)

    return needs


def _changes(request: SearchRequest) -> Iterator[tuple[str, SearchRequest]]:
    """Yield changes of a request, the cheapest first: free ones, then by the memory rented."""
    given: dict[str, Any] = dict.fromkeys(("memory", "optimizer", "fsdp", "precision"), ANY)
    if any(getattr(request, name) != ANY for name in given):
        yield "leave memory, precision and optimizer open", replace(request, **given)
    fewer = request.num_gpus * max(1, request.rows // request.num_gpus)
    if fewer != request.rows:
        yield f"{fewer} rows of a step", replace(request, global_batch=fewer)
    node = request.gpus_per_node
    rented = list[tuple[int, str, SearchRequest]]()
    counts = {request.num_gpus, *(max(request.num_gpus, node) * 2**n for n in range(6))}
    for num_gpus in counts:
        for gpu, facts in GPUS.items():
            is_less = facts.memory < GPUS[request.gpu].memory
            if is_less or (gpu, num_gpus) == (request.gpu, request.num_gpus):
                continue
            rows = max(request.rows, num_gpus)
            changed = replace(request, gpu=gpu, num_gpus=num_gpus, global_batch=rows)
            rented.append((num_gpus * facts.memory, f"{num_gpus} {gpu}", changed))
    for _, text, changed in sorted(rented, key=lambda item: item[:2]):
        yield text, changed
