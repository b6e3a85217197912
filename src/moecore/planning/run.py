"""TrainingRun: a model and its training on a number of GPUs.

`model_of` and `optimizer_of` build the run on meta in a `fake_world`. `planning/recipe.py` returns
the source of the calls that build it on GPUs.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.fields import Bound, CheckedRecord, Count, CountOrZero, Rules, check_arguments
from moecore.base.options.dispatch import DispatchOptions, NVLinkOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.memory import MemoryOptions
from moecore.base.options.names import MomentDtype, PlannedDispatcher
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

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype of the trained parameters."""
        return torch.bfloat16 if self.master_remainder else torch.float32


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
        return self.optimizer.param_dtype

    def tokens(self) -> Tensor:
        """Return the tokens of a micro-batch, [batch_size, seq_len] int64 on meta."""
        return torch.empty(self.batch_size, self.seq_len, dtype=torch.int64, device="meta")


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


def dispatch_of(run: TrainingRun) -> DispatchOptions:
    """Return the options by which a run sends tokens."""
    name = "alltoall" if run.nvlink is None else "nvlink"
    name = "hierarchical" if run.dispatcher == "hierarchical" else name
    return DispatchOptions(name=name, nvlink=run.nvlink, fp8=run.fp8_dispatch)


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
