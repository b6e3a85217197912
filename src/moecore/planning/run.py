"""TrainingRun: a model, and how it is trained on how many GPUs; how it is built in any world."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Annotated, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from moecore.base.fields import Bound, Count, CountOrZero, Rules, check_arguments, check_fields
from moecore.base.options.dispatch import NVLinkOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.memory import MemoryOptions
from moecore.base.options.precision import Precision, PrecisionName
from moecore.base.torch_names import clear_sharding_caches
from moecore.models import Decoder
from moecore.models.config import DecoderConfig
from moecore.models.presets import PRESETS
from moecore.parallel.mesh import ParallelConfig, build_meshes
from moecore.parallel.pipeline.config import PipelineConfig
from moecore.parallelize import parallelize_moe
from moecore.planning.gpus import NODE
from moecore.train.optim.adamw import AdamW
from moecore.train.optim.state_offload import StateOffload

MomentDtype = Literal["float32", "bfloat16", "float8_e4m3fn"]
Fraction = Annotated[float, Bound(">=", 0), Bound("<=", 1)]
BF16 = FSDPOptions(param_dtype=torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerOptions:
    """What AdamW keeps between steps (`moecore.train.AdamW`).

    Attributes:
        moment_dtype: of both moments.
        master_remainder: parameters are bf16, and their state has what fp32 has more.
        offload_fraction: of the state, in host memory while forward and backward run.
    """

    moment_dtype: MomentDtype = "float32"
    master_remainder: bool = False
    offload_fraction: Fraction = 0.0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """What is trained, on how many GPUs, and how.

    Attributes:
        model: the decoder.
        num_gpus: ranks of the world.
        parallel: its degrees; -1 takes what is left.
        seq_len: tokens of a row.
        batch_size: rows of a data rank's micro-batch.
        num_micro_batches: of a step, on each data rank.
        pipeline: stages; None without.
        fsdp: how parameters are sharded.
        memory: what is computed again, offloaded or in pages.
        precision: which products are in FP8; None = none.
        optimizer: what is kept between steps.
        nvlink: tokens travel by stores into the memory of GPUs of one node, with this capacity;
            None = by all-to-all.
    """

    model: DecoderConfig
    num_gpus: Count
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    seq_len: Count = 4096
    batch_size: Count = 1
    num_micro_batches: Count = 1
    pipeline: PipelineConfig | None = None
    fsdp: FSDPOptions = BF16
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    precision: Precision | None = None
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    nvlink: NVLinkOptions | None = None

    def __post_init__(self) -> None:
        check_fields(self, self._rules)

    def _rules(self) -> Rules:
        if (self.parallel.pp > 1) != (self.pipeline is not None):
            yield "pipeline", f"be there when pp ({self.parallel.pp}) is > 1 alone: set both"
        group = self.parallel.ep * self.parallel.etp
        if self.nvlink is not None and (group == 1 or NODE % group):
            size = f"2 to {NODE} GPUs of a node"
            yield "nvlink", f"be None with ep * etp ({group}), unless it is {size}: leave it out"
        longest = self.model.max_seq_len
        if self.seq_len > longest:
            yield "seq_len", f"be <= DecoderConfig.max_seq_len ({longest}): raise that"

    @property
    def resolved(self) -> ParallelConfig:
        """The degrees, without -1."""
        return self.parallel.resolve(self.num_gpus)

    @property
    def even(self) -> TrainingRun:
        """The run with room for even loads alone: its shapes are those of the rows that come."""
        if self.nvlink is None:
            return self
        room = replace(self.nvlink, row_factor=1.0)
        return replace(self, nvlink=room)

    @property
    def dtype(self) -> torch.dtype:
        """Of the trained parameters."""
        return torch.bfloat16 if self.optimizer.master_remainder else torch.float32


def model_of(run: TrainingRun, device_type: str) -> Decoder:
    """Return the model of a run, parallelized on meta. A process group must be there."""
    model = Decoder(run.model, device="meta", dtype=run.dtype)
    parallelize_moe(
        model,
        build_meshes(run.parallel, device_type),
        dispatcher="alltoall" if run.nvlink is None else "nvlink",
        nvlink=run.nvlink,
        memory=run.memory,
        precision=run.precision,
        fsdp=run.fsdp,
        pipeline=run.pipeline,
    )
    return model


def optimizer_of(run: TrainingRun, model: nn.Module) -> AdamW:
    """Return the AdamW of a run's model, its state offloaded where the run says so."""
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


def call_of(run: TrainingRun) -> str:
    """Return the calls that make a run: meshes, model, `parallelize_moe`, optimizer, step."""
    check_arguments(call_of, locals())
    name = next((name for name, config in PRESETS.items() if config == run.model), None)
    arguments = {"fsdp": _shown(run.fsdp)}
    if run.memory.parts or run.memory.offload or run.memory.stash:
        arguments["memory"] = _shown(run.memory)
    if run.precision is not None:
        arguments["precision"] = _precision(run.precision)
    if run.nvlink is not None:
        arguments |= {"dispatcher": "'nvlink'", "nvlink": _shown(run.nvlink)}
    elif run.resolved.ep * run.resolved.etp > 1:
        arguments["dispatcher"] = "'alltoall'"
    if run.pipeline is not None:
        arguments["pipeline"] = _shown(run.pipeline)
    options = run.optimizer
    moments = (
        "" if options.moment_dtype == "float32" else f", moment_dtype=torch.{options.moment_dtype}"
    )
    moments += ", master_remainder=True" if options.master_remainder else ""
    away = options.offload_fraction
    lines = [
        "import torch",
        "",
        "from moecore import *",
        "from moecore.models import Decoder, preset",
        f"from moecore.train import AdamW{', StateOffload' if away else ''}",
        *(["from moecore.precision import *"] if "Precision(" in str(arguments) else []),
        "",
        f"meshes = build_meshes({_shown(run.parallel)})",
        f"config = preset({name!r})" if name else f"config = {run.model!r}",
        f'model = Decoder(config, device="meta", dtype={run.dtype})',
        "parallelize_moe(",
        "    model,",
        "    meshes,",
        *(f"    {key}={value}," for key, value in arguments.items()),
        ")",
        "model.to_empty(device=meshes.device_type)",
        "model.init_weights(0)",
        f"optimizer = AdamW(model.parameters(){moments})",
        *([f"StateOffload(optimizer, model, fraction={away})"] if away else []),
        f"step = TrainStep(model, optimizer, num_micro_batches={run.num_micro_batches})",
    ]
    return "\n".join(lines)


def _shown(record: Any) -> str:
    """Return a record with the fields that are not its defaults."""
    given = []
    for each in fields(record):
        value = getattr(record, each.name)
        default = each.default
        if default is MISSING and each.default_factory is not MISSING:
            default = each.default_factory()
        if value != default:
            given.append(f"{each.name}={value!r}")
    return f"{type(record).__name__}({', '.join(given)})"


def _precision(precision: Precision) -> str:
    names = get_args(PrecisionName)
    name = next((name for name in names if Precision.of(name) == precision), None)
    return repr(precision) if name is None else repr(name)


@contextmanager
def fake_world(world_size: Count, rank: CountOrZero = 0) -> Iterator[None]:
    """Within, this process is one rank of a world, whose collectives return at once.

    What a collective would bring is whatever its output held, so numbers mean nothing; shapes,
    sizes and who owns what are those of the real world.

    Args:
        world_size: ranks.
        rank: which one this is.

    Raises:
        ValueError: where a process group is there already, or for a rank that the world lacks.
    """
    check_arguments(fake_world, locals())
    if dist.is_initialized():
        raise ValueError(
            f"the default process group ({dist.get_world_size()} ranks) must not be there for a "
            "fake world: plan in a process of its own"
        )
    if rank >= world_size:
        raise ValueError(f"rank ({rank}) must be < world_size ({world_size}): pass a smaller one")
    clear_sharding_caches()  # of meshes with the same sizes, whose groups are gone
    store, hook = dist.HashStore(), sys.excepthook
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # each group puts its rank before the lines of errors
        clear_sharding_caches()


@contextmanager
def quiet() -> Iterator[None]:
    """Within, nobody is warned of what a plan is not asked about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def new_garbage() -> Iterator[None]:
    """Within, garbage is collected among new objects alone: modules are many, and none of it."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
