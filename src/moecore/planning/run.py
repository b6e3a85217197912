"""TrainingRun: a model, and how it is trained on how many GPUs. Records alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch

from moecore.base.fields import Bound, Count, Rules, check_fields
from moecore.base.options.dispatch import NVLinkOptions
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.memory import MemoryOptions
from moecore.base.options.precision import Precision
from moecore.models.config import DecoderConfig
from moecore.parallel.mesh import ParallelConfig
from moecore.parallel.pipeline.config import PipelineConfig
from moecore.planning.gpus import NODE

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
