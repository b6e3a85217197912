"""TrainingRun: a model and its training on a number of GPUs, and the bytes that its ranks store.

`build_model` and `build_optimizer` build the run on meta in a `fake_world`. `planning/recipe.py`
returns the source of the calls that build the run on GPUs. `list_rank_bytes` returns the bytes of
parameters, gradients and buffers of each pipeline rank, from its `ShardPlan`.
"""

import gc
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Annotated, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.fields import (
    Bound,
    CheckedRecord,
    Count,
    CountOrZero,
    FieldErrors,
    check_arguments,
)
from moecore.base.options.dispatch import DispatchOptions, NVLinkOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.memory import MemoryOptions
from moecore.base.options.names import MomentDtype, PlannedDispatcher
from moecore.base.options.precision import Precision
from moecore.base.torch_private import clear_sharding_caches
from moecore.families.family import find_family
from moecore.models.config import DecoderConfig
from moecore.parallel.fsdp.size import RankBytes, compute_rank_bytes
from moecore.parallel.mesh import ParallelConfig, build_meshes
from moecore.parallel.pipeline.layout import Stage
from moecore.parallel.pipeline.schedule import PipelineConfig, make_schedule
from moecore.parallelize import parallelize_moe, plan_sharding
from moecore.planning.gpus import NODE, are_peers
from moecore.planning.model import NativeModel, PlannedModel
from moecore.planning.transformers import StockModel, TransformersModel, convert_model_errors
from moecore.train.optim.adamw import AdamW
from moecore.train.optim.state_offload import StateOffload

# A plan builds meshes of all ranks, which takes minutes for more ranks.
MAX_GPUS = 2**16
NumGpus = Annotated[int, Bound(">=", 1), Bound("<=", MAX_GPUS), "plan a part of so many ranks"]
# Largest runs that a plan simulates.
SeqLen = Annotated[int, Bound(">=", 1), Bound("<=", 2**24), "plan rows of so many tokens"]
MAX_LAYERS = 1024
MAX_STAGES = 256  # pipeline ranks
MAX_IN_FLIGHT = 1024  # micro-batches of schedule "gpipe"
Fraction = Annotated[float, Bound(">=", 0), Bound("<=", 1)]
BF16 = FSDPOptions(param_dtype=torch.bfloat16)
AnyModel = DecoderConfig | TransformersModel


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerOptions(CheckedRecord):
    """Options of a run's `moecore.train.AdamW`.

    Attributes:
        moment_dtype: the dtype of both moments.
        master_remainder: bf16 parameters; the state has the other 16 bits of fp32 masters.
        offload_fraction: the fraction of the state in host memory during forward and backward.
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
        model: the decoder, or a model class of transformers.
        num_gpus: the number of ranks.
        parallel: the parallel degrees; -1 = all remaining ranks.
        seq_len: tokens of a row.
        batch_size: rows of a data rank's micro-batch.
        num_micro_batches: micro-batches of a step on each data rank.
        pipeline: stages and schedule; None = no pipeline.
        fsdp: options of parameter sharding.
        memory: recomputation, offload, and the paged buffer of expert activations.
        precision: the matmuls in FP8; None = no FP8.
        optimizer: options of AdamW.
        nvlink: the capacity of dispatcher "nvlink", which stores tokens into the memory of GPUs of
            one node; None = dispatcher "alltoall".
        dispatcher: "hierarchical" = one exchange between NVLink domains and one inside a domain,
            with `nvlink`; "auto" = a single exchange.
        ranks_per_domain: neighbouring ranks that NVLink connects.
        num_peers: neighbouring ranks of a server that access each other's memory; 1 = none.
        has_block_scales: whether the GPU's tensor cores multiply MXFP8 and NVFP4 (Blackwell).
        fp8_dispatch: whether tokens are dispatched and saved as FP8.
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
    has_block_scales: bool = False
    fp8_dispatch: bool = False

    def _find_field_errors(self) -> FieldErrors:
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
        # Larger runs would take minutes to simulate.
        if self.planned_model.num_layers > MAX_LAYERS:
            yield "planned_model.num_layers", f"be <= {MAX_LAYERS}: plan a model of so many layers"
        if self.parallel.pp > MAX_STAGES:
            yield "parallel.pp", f"be <= {MAX_STAGES}: plan a pipeline of so many ranks"
        is_gpipe = self.pipeline is not None and self.pipeline.schedule == "gpipe"
        if is_gpipe and self.num_micro_batches > MAX_IN_FLIGHT:
            reason = "which holds the activations of all micro-batches: use '1f1b'"
            yield "num_micro_batches", f"be <= {MAX_IN_FLIGHT} with schedule 'gpipe', {reason}"

    @property
    def planned_model(self) -> PlannedModel:
        """The sizes and layers of the model."""
        return get_planned_model(self.model)

    @property
    def resolved(self) -> ParallelConfig:
        """The parallel degrees, with -1 replaced by the number of remaining ranks."""
        return self.parallel.resolve(self.num_gpus)

    @property
    def with_even_loads(self) -> Self:
        """A copy of the run with even loads of experts, and "nvlink" without spare capacity."""
        nvlink = None if self.nvlink is None else replace(self.nvlink, row_factor=1.0)
        model = self.model
        if isinstance(model, DecoderConfig) and model.moe is not None and model.moe.zero_experts:
            moe = model.moe  # top_k is reduced by the identity experts' share
            num_choices = max(1, round(moe.top_k * moe.num_experts / moe.num_candidates))
            model = replace(model, moe=replace(moe, top_k=num_choices, zero_experts=0))
        return replace(self, nvlink=nvlink, model=model)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the trained parameters."""
        return self.optimizer.param_dtype

    def make_tokens(self) -> Tensor:
        """Return the tokens of a micro-batch, [batch_size, seq_len] int64 on meta."""
        return torch.empty(self.batch_size, self.seq_len, dtype=torch.int64, device="meta")


@lru_cache(maxsize=64)
def get_planned_model(model: AnyModel) -> PlannedModel:
    """Return the `PlannedModel` of a decoder config or a transformers model (cached)."""
    if isinstance(model, DecoderConfig):
        return NativeModel.from_config(model)
    with convert_model_errors(model):
        return StockModel.from_model(model)


def build_model(run: TrainingRun, device_type: str) -> Any:
    """Return a run's model on meta, parallelized over `device_type` meshes of the default group."""
    domain = run.ranks_per_domain if run.dispatcher == "hierarchical" else None
    with convert_model_errors(run.model):
        model = run.planned_model.build(run.dtype)
        parallelize_moe(
            model,
            build_meshes(run.parallel, device_type, ranks_per_domain=domain),
            dispatch=make_dispatch_options(run),
            memory=run.memory,
            precision=run.precision,
            fsdp=run.fsdp,
            pipeline=run.pipeline,
        )
    return model


def make_dispatch_options(run: TrainingRun) -> DispatchOptions:
    """Return the `DispatchOptions` that the run's `parallelize_moe` receives."""
    name = "alltoall" if run.nvlink is None else "nvlink"
    name = "hierarchical" if run.dispatcher == "hierarchical" else name
    return DispatchOptions(name=name, nvlink=run.nvlink, fp8=run.fp8_dispatch)


def build_optimizer(run: TrainingRun, model: nn.Module) -> AdamW:
    """Return the AdamW of a run's model, with a `StateOffload` if the run offloads its state."""
    optimizer = _make_adamw(model.parameters(), run.optimizer)
    if run.optimizer.offload_fraction:
        StateOffload(optimizer, model, fraction=run.optimizer.offload_fraction)
    return optimizer


def _make_adamw(params: Iterable[nn.Parameter], options: OptimizerOptions) -> AdamW:
    """Return the AdamW of these parameters and options."""
    dtype = getattr(torch, options.moment_dtype)
    return AdamW(params, lr=1e-6, moment_dtype=dtype, master_remainder=options.master_remainder)


@contextmanager
def fake_world(world_size: Count, rank: CountOrZero = 0) -> Iterator[None]:
    """Return a context in which this process is one rank of a world without communication.

    A collective returns at once and does not change its output, so tensors have the shapes and
    owners of the real world but no meaningful values.

    Raises:
        ValueError: if a process group exists already, or `rank` is not less than `world_size`.
    """
    check_arguments(fake_world, locals())
    if dist.is_initialized():
        raise ValueError(
            f"the default process group ({dist.get_world_size()} ranks) must not be there for a "
            "fake world: plan in a process of its own"
        )
    if rank >= world_size:
        raise ValueError(f"rank ({rank}) must be < world_size ({world_size}): pass a smaller one")
    clear_sharding_caches()  # the caches have destroyed groups of earlier meshes
    store, hook = dist.HashStore(), sys.excepthook
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # a process group replaces the hook by one that prints the rank
        clear_sharding_caches()


@contextmanager
def enter_run_world(run: TrainingRun, rank: int = 0) -> Iterator[None]:
    """Return a context in which this process is `rank` of a run's fake world, without warnings."""
    quiet = warnings.catch_warnings(action="ignore")
    with convert_model_errors(run.model), fake_world(run.num_gpus, rank), quiet:
        yield


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Return a context without automatic garbage collection of new or existing objects."""
    is_frozen, is_on = _has_frozen_objects(), gc.isenabled()
    if is_frozen:
        gc.collect()  # objects of earlier dry runs, before they are frozen too
    gc.freeze()
    gc.disable()  # the moment of an automatic collection depends on earlier code
    try:
        yield
    finally:
        (gc.enable if is_on else gc.disable)()
        if not is_frozen:
            gc.unfreeze()


@cache
def _has_frozen_objects() -> bool:
    """Return whether objects are frozen (`gc.freeze`); cached, because the count takes long."""
    return gc.get_freeze_count() > 0


SAMPLE = 1 << 20  # elements whose optimizer state is counted


def list_stages(run: TrainingRun) -> Sequence[Stage]:
    """Return the pipeline stages in forward order; without a pipeline, one full stage."""
    model = run.planned_model
    if run.pipeline is None:
        layers, mtp = tuple(range(model.num_layers)), tuple(range(model.num_mtp_layers))
        return [Stage(index=0, embedding=True, layers=layers, mtp=mtp, loss=True)]
    parts = model.num_layers, model.num_mtp_layers, model.list_bound_layers()
    layout = run.pipeline.stages(run.resolved.pp, *parts)
    layout.chunks(run.resolved.pp)  # refuses stages that pp does not divide
    return layout.stages


def list_rank_stages(run: TrainingRun) -> list[list[Stage]]:
    """Return the stages of each pipeline rank, in forward order."""
    stages, pp = list_stages(run), run.resolved.pp
    if run.pipeline is None:
        return [list(stages)]
    chunks = len(stages) // pp
    schedule = make_schedule(run.pipeline.schedule, pp=pp, chunks=chunks, num_micro_batches=1)
    pairs = list(zip(stages, schedule.rank_of, strict=True))
    return [[stage for stage, stage_rank in pairs if stage_rank == rank] for rank in range(pp)]


def count_max_parameter_bytes(run: TrainingRun) -> int:
    """Return the largest number of bytes of parameters that a pipeline rank stores."""
    return max(size.parameters or size.host for size in list_rank_bytes(run))


def count_resident_bytes(run: TrainingRun, rank_bytes: RankBytes) -> dict[str, int]:
    """Return {kind: bytes} of a rank between steps, including state that `StateOffload` moves."""
    sizes = {f"parameters: {role.role}": role.parameters for role in rank_bytes.roles}
    sizes |= {"gathered weights": rank_bytes.weights, "sums of gradients": rank_bytes.sums}
    if not run.memory.offload_params:
        sizes["optimizer state"] = count_optimizer_bytes(run, rank_bytes)
    return sizes


def count_optimizer_bytes(run: TrainingRun, rank_bytes: RankBytes) -> int:
    """Return the bytes of a rank's optimizer state, on the GPU and in host memory."""
    return int(rank_bytes.gradients // run.dtype.itemsize * count_state_bytes(run.optimizer))


@cache
def count_state_bytes(options: OptimizerOptions) -> float:
    """Return the bytes of AdamW's state per element of a parameter."""
    param = nn.Parameter(torch.empty(SAMPLE, dtype=options.param_dtype, device="meta"))
    state = _make_adamw([param], options).prepare_state(param)
    return sum(t.nbytes for name, t in state.items() if name != "step") / SAMPLE


def list_rank_bytes(run: TrainingRun) -> tuple[RankBytes, ...]:
    """Return the bytes of parameters, gradients and buffers that each pipeline rank stores."""
    is_fc1 = "expert_fc1" in run.memory.parts  # which experts may refuse
    run = replace(  # without options that change no parameter, so that equal ranks are planned once
        run,
        seq_len=min(run.seq_len, run.planned_model.num_mtp_layers + 1),
        batch_size=1,
        num_micro_batches=1,
        memory=MemoryOptions(
            recompute=("expert_fc1",) if is_fc1 else (),
            offload_frozen=run.memory.offload_frozen,
            offload_params=run.memory.offload_params,
        ),
        optimizer=OptimizerOptions(master_remainder=run.optimizer.master_remainder),
        nvlink=None,
        dispatcher="auto",
    )
    # Ranks with equal parts store as much, unless names of layers decide their precision, or units
    # have blocks of two ranks.
    has_overrides = run.precision is not None and bool(run.precision.overrides)
    is_distinct = has_overrides or run.fsdp.blocks_per_unit > 1
    layers = run.planned_model.layers
    parts = [
        [(s.embedding, [layers[i] for i in s.layers], len(s.mtp), s.loss) for s in stages]
        for stages in list_rank_stages(run)
    ]
    ranks = range(len(parts)) if is_distinct else map(parts.index, parts)
    return tuple(_compute_rank_bytes(run, rank) for rank in ranks)


@lru_cache(maxsize=2)
def _build_with_frozen(model: PlannedModel, dtype: torch.dtype) -> tuple[nn.Module, frozenset[str]]:
    """Return a model on meta, and the names of its indexers' parameters, which no run trains."""
    module = model.build(dtype)
    layers: Any = find_family(module).find_indexers(module)
    indexers = {param for layer in layers for param in layer.indexer.parameters()}
    return module, frozenset(n for n, param in module.named_parameters() if param in indexers)


@lru_cache(maxsize=1024)
def _compute_rank_bytes(run: TrainingRun, pp_rank: int) -> RankBytes:
    """Return the bytes that a pipeline rank stores, from its `ShardPlan`."""
    rank = pp_rank * run.num_gpus // run.resolved.pp
    with enter_run_world(run, rank):
        model, frozen = _build_with_frozen(run.planned_model, run.dtype)
        plan = plan_sharding(
            model,
            build_meshes(run.parallel, "cpu"),
            dispatch="alltoall",
            memory=run.memory,
            precision=run.precision,
            fsdp=run.fsdp,
            pipeline=run.pipeline,
        )
    params = (replace(p, trainable=p.trainable and p.name not in frozen) for p in plan.params)
    return compute_rank_bytes(replace(plan, params=tuple(params)), rank)
