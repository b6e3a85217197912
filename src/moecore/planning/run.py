"""TrainingRun: a model and its training on a number of GPUs, and the calls that build it.

`model_of` and `optimizer_of` build the run on meta in a `fake_world`; `call_of` returns the source
of the calls that build it on GPUs.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache, lru_cache
from typing import Annotated, Any, get_args

import torch
import torch.distributed as dist
from torch import nn

from moecore.base.fields import Bound, CheckedRecord, Count, CountOrZero, Rules, check_arguments
from moecore.base.options.dispatch import DispatcherName, DispatchOptions, NVLinkOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.memory import GEMM_LAST, MemoryOptions
from moecore.base.options.names import MomentDtype, PlannedDispatcher, PrecisionName
from moecore.base.options.precision import Precision
from moecore.base.torch_private import clear_sharding_caches
from moecore.models.config import DecoderConfig
from moecore.parallel.mesh import ParallelConfig, build_meshes
from moecore.parallel.pipeline.schedule import PipelineConfig
from moecore.parallelize import parallelize_moe
from moecore.planning.gpus import NODE, are_peers
from moecore.planning.model import NativeModel, PlannedModel
from moecore.planning.transformers import StockModel, TransformersModel, refusing
from moecore.train.optim.adamw import AdamW
from moecore.train.optim.state_offload import StateOffload

# A plan builds meshes of all ranks: of more it would take minutes.
MAX_GPUS = 2**16
NumGpus = Annotated[int, Bound(">=", 1), Bound("<=", MAX_GPUS), "plan a part of so many ranks"]
# Largest runs that a plan simulates: a larger run would take minutes, or exceed host memory.
SeqLen = Annotated[int, Bound(">=", 1), Bound("<=", 2**24), "plan rows of so many tokens"]
MOST_LAYERS = 1024
MOST_STAGES = 256  # pipeline ranks
MOST_IN_FLIGHT = 1024  # micro-batches of schedule "gpipe"
Fraction = Annotated[float, Bound(">=", 0), Bound("<=", 1)]
BF16 = FSDPOptions(param_dtype=torch.bfloat16)
AnyModel = DecoderConfig | TransformersModel


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerOptions(CheckedRecord):
    """Options of a run's `moecore.train.AdamW`.

    Attributes:
        moment_dtype: the dtype of both moments.
        master_remainder: whether parameters are bf16, with the rest of their fp32 masters in the
            optimizer's state.
        offload_fraction: the part of the state that is in host memory while forward and backward
            run.
    """

    moment_dtype: MomentDtype = "float32"
    master_remainder: bool = False
    offload_fraction: Fraction = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun(CheckedRecord):
    """A model, the number of GPUs, and the options of its training.

    Attributes:
        model: the decoder, or a class of transformers.
        num_gpus: the number of ranks.
        parallel: the degrees; -1 = all ranks that other degrees leave.
        seq_len: tokens of a row.
        batch_size: rows of a data rank's micro-batch.
        num_micro_batches: micro-batches of a step on each data rank.
        pipeline: the stages; None = no pipeline.
        fsdp: options of sharding.
        memory: options of recompute, offload and pages.
        precision: the products in FP8; None = no FP8.
        optimizer: options of AdamW.
        nvlink: the capacity of dispatcher "nvlink", which stores tokens into the memory of GPUs of
            one node; None = dispatcher "alltoall".
        dispatcher: "hierarchical" = the two levels of that dispatcher, with `nvlink` inside of a
            domain; "auto" = one level.
        ranks_per_domain: neighbouring ranks that NVLink connects.
        num_peers: neighbouring ranks that reach each other's memory: those of a server; 1 = none.
        fp8_dispatch: whether tokens travel and are kept as FP8.
    """

    model: AnyModel
    num_gpus: NumGpus
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    seq_len: SeqLen = 4096
    batch_size: Count = 1
    num_micro_batches: Count = 1
    pipeline: PipelineConfig | None = None
    fsdp: FSDPOptions = BF16
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    precision: Precision | None = None
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    nvlink: NVLinkOptions | None = None
    dispatcher: PlannedDispatcher = "auto"
    ranks_per_domain: Count = NODE
    num_peers: Count = NODE
    fp8_dispatch: bool = False

    def _rules(self) -> Rules:
        if (self.parallel.pp > 1) != (self.pipeline is not None):
            yield "pipeline", f"be there when pp ({self.parallel.pp}) is > 1 alone: set both"
        group = self.parallel.ep * self.parallel.etp
        if self.dispatcher == "hierarchical":
            if self.nvlink is None:
                yield "nvlink", "be there with dispatcher ('hierarchical'): add NVLinkOptions()"
        elif self.nvlink is not None and not are_peers(group, self.num_peers):
            size = f"> 1 and divides num_peers ({self.num_peers})"
            yield "nvlink", f"be None with ep * etp ({group}), unless it is {size}: leave it out"
        longest = self.planned_model.max_seq_len
        if longest is not None and self.seq_len > longest:
            yield "seq_len", f"be <= DecoderConfig.max_seq_len ({longest}): raise that"
        if self.batch_size * self.seq_len >= 1 << 31:
            seq_len = f"with seq_len ({self.seq_len})"
            yield "batch_size", f"give fewer than 2**31 tokens {seq_len}: take fewer rows"
        yield from self._bounds()

    def _bounds(self) -> Rules:
        """Yield what no plan simulates."""
        if self.planned_model.num_layers > MOST_LAYERS:
            yield "planned_model.num_layers", f"be <= {MOST_LAYERS}: plan a model of so many layers"
        if self.parallel.pp > MOST_STAGES:
            yield "parallel.pp", f"be <= {MOST_STAGES}: plan a pipeline of so many ranks"
        is_gpipe = self.pipeline is not None and self.pipeline.schedule == "gpipe"
        if is_gpipe and self.num_micro_batches > MOST_IN_FLIGHT:
            yield (
                "num_micro_batches",
                f"be <= {MOST_IN_FLIGHT} with schedule 'gpipe', which holds the activations of all "
                "micro-batches: use '1f1b'",
            )

    @property
    def planned_model(self) -> PlannedModel:
        """The model, as plans read it."""
        return planned_model_of(self.model)

    @property
    def resolved(self) -> ParallelConfig:
        """The degrees, with the number of ranks in place of -1."""
        return self.parallel.resolve(self.num_gpus)

    @property
    def even(self) -> TrainingRun:
        """The run whose shapes are those of the rows in use, with even loads.

        It has capacity for them only. Choices of experts that return their input have no rows, so
        tokens of a native decoder have as many choices less, rounded to whole ones.
        """
        nvlink = None if self.nvlink is None else replace(self.nvlink, row_factor=1.0)
        return replace(self, nvlink=nvlink, model=_with_used_choices(self.model))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the trained parameters."""
        return torch.bfloat16 if self.optimizer.master_remainder else torch.float32


def _with_used_choices(model: AnyModel) -> AnyModel:
    if not isinstance(model, DecoderConfig) or model.moe is None or not model.moe.zero_experts:
        return model
    moe = model.moe
    num_choices = max(1, round(moe.top_k * moe.num_experts / moe.num_candidates))
    return replace(model, moe=replace(moe, top_k=num_choices, zero_experts=0))


@lru_cache(maxsize=64)
def planned_model_of(model: AnyModel) -> PlannedModel:
    """Return a model as plans read it."""
    if isinstance(model, DecoderConfig):
        return NativeModel.of(model)
    return StockModel.of(model)


def model_of(run: TrainingRun, device_type: str) -> Any:
    """Return the model of a run, parallelized on meta; needs a default process group."""
    domain = run.ranks_per_domain if run.dispatcher == "hierarchical" else None
    with refusing(run.model):
        model = run.planned_model.build(run.dtype)
        parallelize_moe(
            model,
            build_meshes(run.parallel, device_type, ranks_per_domain=domain),
            dispatch=dispatch_of(run),
            memory=run.memory,
            precision=run.precision,
            fsdp=run.fsdp,
            pipeline=run.pipeline,
        )
    return model


def dispatcher_of(run: TrainingRun) -> DispatcherName:
    """Return the name of a run's dispatcher, if it sends tokens."""
    if run.dispatcher == "hierarchical":
        return "hierarchical"
    return "alltoall" if run.nvlink is None else "nvlink"


def dispatch_of(run: TrainingRun) -> DispatchOptions:
    """Return the options by which a run sends tokens."""
    return DispatchOptions(name=dispatcher_of(run), nvlink=run.nvlink, fp8=run.fp8_dispatch)


def optimizer_of(run: TrainingRun, model: nn.Module) -> AdamW:
    """Return the AdamW of a run's model, with a `StateOffload` if the run has one."""
    options = run.optimizer
    optimizer = AdamW(
        model.parameters(),
        lr=1e-6,
        moment_dtype=getattr(torch, options.moment_dtype),
        master_remainder=options.master_remainder,
    )
    if options.offload_fraction:
        StateOffload(optimizer, model, fraction=options.offload_fraction)
    return optimizer


def lever_flags(run: TrainingRun) -> list[str]:
    """Return the options of a run that decide its memory as flags of `moecore plan`."""
    flags, options = list[str](), run.optimizer
    if run.precision is not None:
        name = _precision(run.precision)
        flags += ["--precision", name.strip("'")]
    parts: tuple[str, ...] = tuple(part for part in run.memory.parts if part not in GEMM_LAST)
    if len(parts) + len(GEMM_LAST) == len(run.memory.parts):
        parts = ("gemm_last", *parts)
    else:
        parts = run.memory.parts
    flags += ["--recompute", *parts] if parts else []
    flags += ["--offload", *run.memory.offload] if run.memory.offload else []
    flags += ["--stash"] if run.memory.stash is not None else []
    if run.nvlink is not None and run.nvlink.row_factor is not None:
        flags += ["--row-factor", f"{run.nvlink.row_factor:g}"]
    flags += ["--dispatcher", run.dispatcher] if run.dispatcher != "auto" else []
    flags += ["--fp8-dispatch"] if run.fp8_dispatch else []
    flags += ["--dense-strategy", run.fsdp.dense_strategy]
    flags += ["--fp8-param-gather"] if run.fsdp.fp8_param_gather else []
    flags += ["--moments", options.moment_dtype] if options.moment_dtype != "float32" else []
    flags += ["--master-remainder"] if options.master_remainder else []
    fraction = options.offload_fraction
    return [*flags, *(["--state-offload", f"{fraction:g}"] if fraction else [])]


def flags_of(run: TrainingRun) -> list[str]:
    """Return the degrees and options of a run as flags of `moecore plan`."""
    p, flags = run.resolved, ["--seq-len", str(run.seq_len)]
    degrees = {name: getattr(p, name) for name in ("pp", "tp", "cp", "ep", "etp")}
    for name, degree in degrees.items():
        flags += [f"--{name}", str(degree)] if degree > 1 or name == "ep" else []
    flags += ["--batch-size", str(run.batch_size)]
    flags += ["--micro-batches", str(run.num_micro_batches)]
    if run.pipeline is not None:
        flags += ["--schedule", run.pipeline.schedule]
        layout, chunks = run.pipeline.layout, run.pipeline.chunks
        flags += ["--layout", layout] if layout else ["--chunks", str(chunks)] if chunks else []
    return flags + lever_flags(run)


def call_of(run: TrainingRun) -> str:
    """Return the source of a run's calls: meshes, model, `parallelize_moe`, optimizer, step."""
    check_arguments(call_of, locals())
    sizes = f"{run.num_micro_batches}, {run.batch_size}, {run.seq_len}"
    arguments = {"fsdp": _record_source(run.fsdp), "loss": "'mean'"}
    if run.memory.parts or run.memory.offload or run.memory.stash:
        arguments["memory"] = _record_source(run.memory)
    if run.precision is not None:
        arguments["precision"] = _precision(run.precision)
    if run.resolved.ep * run.resolved.etp > 1 or run.nvlink is not None or run.fp8_dispatch:
        dispatch = dispatch_of(run)
        is_name = dispatch == DispatchOptions.of(dispatch.name)
        arguments["dispatch"] = repr(dispatch.name) if is_name else _record_source(dispatch)
    if run.pipeline is not None:
        arguments["pipeline"] = _record_source(run.pipeline)
    options = run.optimizer
    moments = (
        "" if options.moment_dtype == "float32" else f", moment_dtype=torch.{options.moment_dtype}"
    )
    moments += ", master_remainder=True" if options.master_remainder else ""
    fraction = options.offload_fraction
    is_split = run.dispatcher == "hierarchical"
    domain = f", ranks_per_domain={run.ranks_per_domain}" if is_split else ""
    source = run.planned_model.source(run.dtype)
    replaces = any("replace(" in line for line in source.build)
    lines = [
        *(["from dataclasses import replace", ""] if replaces else []),
        "import torch",
        "",
        "from moecore import *",
        *source.imports,
        f"from moecore.train import AdamW{', StateOffload' if fraction else ''}",
        *(["from moecore.precision import *"] if "Precision(" in str(arguments) else []),
        "",
        f"meshes = build_meshes({_record_source(run.parallel)}{domain})",
        *source.build,
        "parallelize_moe(",
        "    model,",
        "    meshes,",
        *(f"    {key}={value}," for key, value in arguments.items()),
        ")",
        "model.to_empty(device=meshes.device_type)",
        source.fill,
        f"optimizer = AdamW(model.parameters(){moments})",
        *([f"StateOffload(optimizer, model, fraction={fraction})"] if fraction else []),
        f"num_micro_batches, rows, seq_len = {sizes}  # of a step and of a data rank",
        "step = TrainStep(model, optimizer, max_norm=1.0, num_micro_batches=num_micro_batches)",
        f"# step.forward_backward(num_micro_batches dicts of {source.inputs}, both int64",
        "# [rows, seq_len]), then step.finish()",
    ]
    return "\n".join(lines)


def _record_source(record: Any) -> str:
    """Return the source of a record, with the fields that differ from their defaults."""
    arguments = []
    for item in fields(record):
        value = getattr(record, item.name)
        default = item.default
        if default is MISSING and item.default_factory is not MISSING:
            default = item.default_factory()
        if value != default:
            text = _record_source(value) if is_dataclass(value) else repr(value)
            arguments.append(f"{item.name}={text}")
    return f"{type(record).__name__}({', '.join(arguments)})"


def precision_name(precision: Precision) -> str | None:
    """Return the name that stands for a precision, if one does."""
    names = get_args(PrecisionName)
    return next((name for name in names if Precision.of(name) == precision), None)


def _precision(precision: Precision) -> str:
    return repr(precision_name(precision) or precision)


@contextmanager
def fake_world(world_size: Count, rank: CountOrZero = 0) -> Iterator[None]:
    """Return a context in which this process is one rank of a world without communication.

    A collective returns at once and leaves its output as it was. So values are meaningless, but
    shapes, sizes and owners are those of the real world.

    Raises:
        ValueError: when a process group exists already, or `rank` is not below `world_size`.
    """
    check_arguments(fake_world, locals())
    if dist.is_initialized():
        raise ValueError(
            f"the default process group ({dist.get_world_size()} ranks) must not be there for a "
            "fake world: plan in a process of its own"
        )
    if rank >= world_size:
        raise ValueError(f"rank ({rank}) must be < world_size ({world_size}): pass a smaller one")
    clear_sharding_caches()  # they hold freed groups of earlier meshes with the same sizes
    store, hook = dist.HashStore(), sys.excepthook
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # a group replaces it by one that prints the rank before errors
        clear_sharding_caches()


@contextmanager
def quiet() -> Iterator[None]:
    """Return a context without warnings, which concern the planned run and not the plan."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def new_garbage() -> Iterator[None]:
    """Return a context in which garbage is collected by call alone, of what is new in it."""
    is_frozen, is_on = _is_frozen(), gc.isenabled()
    if is_frozen:
        gc.collect()  # of what is newer than that, such as earlier dry runs: none walks it again
    gc.freeze()
    gc.disable()  # when it would run depends on what ran before
    try:
        yield
    finally:
        (gc.enable if is_on else gc.disable)()
        if not is_frozen:
            gc.unfreeze()


@cache
def _is_frozen() -> bool:
    """Whether the caller has frozen what it has imported; to ask walks all of that."""
    return gc.get_freeze_count() > 0
