"""What makes a folding need less memory, in the order of its price: `ladder`.

Each rung adds to the one before, so memory falls from rung to rung. Overheads are those of table
13 of the report: recompute of parts without communication, FP8 and short moments cost little, what
travels to the host and weights that are gathered by every micro-batch more, whole MoE layers that
are computed twice most.

Source: arXiv:2603.07685, table 13; docs/memory.md has times of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.memory import MemoryOptions, Recomputed
from moecore.base.options.precision import Precision
from moecore.models.config import DecoderConfig
from moecore.planning.run import OptimizerOptions

Overhead = Literal["low", "medium", "high"]
OVERHEADS: tuple[Overhead, ...] = ("low", "medium", "high")
FP8_GPUS = ("h100-80", "h200-141")  # whose blockwise products exist
WHOLE = FSDPOptions(param_dtype=torch.bfloat16, dense_strategy="optim")


@dataclass(frozen=True, kw_only=True, slots=True)
class Levers:
    """One rung: everything of a run that decides its memory and not its folding.

    Attributes:
        overhead: what it costs, in words of table 13.
        name: what this rung adds to the one before.
        fsdp: how parameters are sharded.
        memory: what is computed again or offloaded.
        precision: which products are in FP8.
        optimizer: what is kept between steps.
    """

    overhead: Overhead
    name: str
    fsdp: FSDPOptions
    memory: MemoryOptions
    precision: Precision | None
    optimizer: OptimizerOptions


def ladder(
    model: DecoderConfig,
    gpu: str,
    *,
    fsdp: FSDPOptions | Literal["any"],
    memory: MemoryOptions | Literal["any"],
    precision: Precision | Literal["any"] | None,
    optimizer: OptimizerOptions | Literal["any"],
) -> tuple[Levers, ...]:
    """Return the rungs, cheapest first. What is given stays as it is on all of them.

    Args:
        model: whose projections are computed again.
        gpu: a key of `GPUS`.
        fsdp: "any" = weights are whole in a step, unless that is too much.
        memory: "any" = what is needed.
        precision: "any" = FP8 where it is needed and the GPU has it.
        optimizer: "any" = what is needed.
    """
    levers = Levers(
        overhead="low",
        name="none",
        fsdp=WHOLE if fsdp == "any" else fsdp,
        memory=MemoryOptions() if memory == "any" else memory,
        precision=None if precision == "any" else precision,
        optimizer=OptimizerOptions() if optimizer == "any" else optimizer,
    )
    rungs = [levers]

    def add(overhead: Overhead, name: str, is_open: bool, **changes: object) -> None:
        if is_open:
            same = dict(overhead=overhead, name=name)
            rungs.append(replace(rungs[-1], **same, **changes))  # type: ignore[arg-type]

    up: Recomputed = "qkv_proj" if model.mla is None else "mla_up_proj"
    short = OptimizerOptions(moment_dtype="bfloat16")
    chain: tuple[Recomputed, ...] = ("norm", "activation", "rope")
    fc1: tuple[Recomputed, ...] = (*chain, up, "expert_fc1") if model.moe else (*chain, up, "mlp")
    away = MemoryOptions(recompute=fc1, offload=("attention", "experts", "mlp"))
    twice = MemoryOptions(recompute=(*chain, up, "moe") if model.moe else fc1, offload=away.offload)
    is_open = memory == "any"
    add("low", "recompute gemm_last", is_open, memory=MemoryOptions(recompute="gemm_last"))
    add("low", f"recompute {up}", is_open, memory=MemoryOptions(recompute=(*chain, up)))
    add(
        "low",
        "FP8",
        precision == "any" and has_fp8(model, gpu),
        precision=Precision.of("blockwise"),
    )
    add("low", "bf16 moments", optimizer == "any", optimizer=short)
    sharded = replace(WHOLE, dense_strategy="optim_grads_params")
    add("medium", f"recompute {fc1[-1]}", is_open, memory=MemoryOptions(recompute=fc1))
    add("medium", "weights gathered by micro-batch", fsdp == "any", fsdp=sharded)
    add("medium", "activations offloaded", is_open, memory=away)
    hosted = replace(short, offload_fraction=1.0)
    add("medium", "optimizer state offloaded", optimizer == "any", optimizer=hosted)
    add("high", "recompute moe", is_open and bool(model.moe), memory=twice)
    return tuple(rungs)


def has_fp8(model: DecoderConfig, gpu: str) -> bool:
    """Whether blockwise products of a model exist for a GPU."""
    sizes = () if model.moe is None else (model.moe.expert_dim, model.moe.hidden_dim)
    return gpu in FP8_GPUS and not any(size % 128 for size in sizes)
