"""How a run puts its model onto the ranks: what `pretrain` and `finetune` share.

Each field of `TABLES` is a flag and a line of a file, see records.py.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from moecore.base.options.context import ContextOptions
from moecore.base.options.dense import DenseOptions
from moecore.base.options.dispatch import (
    CloneOptions,
    DispatcherName,
    DispatchOptions,
    NVLinkOptions,
)
from moecore.base.options.fsdp import FSDPOptions
from moecore.base.options.memory import MemoryOptions, StashOptions
from moecore.base.options.precision import Precision, Recipe
from moecore.moe.backends import ExpertBackend
from moecore.parallel.mesh import Meshes
from moecore.parallel.pipeline.schedule import PipelineConfig
from moecore.parallelize import parallelize_moe
from moecore.recipes.options import compute_dtype
from moecore.recipes.records import build, values_of


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How the model is put onto the ranks, beside the options that are records.

    Attributes:
        dispatcher: how tokens travel; "auto" chooses by the hardware.
        fp8_dispatch: tokens travel between ranks, and are kept for backward, as FP8.
        expert_backend: which kernels multiply the experts' matrices.
        overlap_shared: on GPUs, run shared experts on a stream of their own.
        compile_dense: run attention, norms and residual adds through torch.compile.
        graph_dense: on GPUs, run what is between exchanges as CUDA graphs.
        stash: experts' rows in pages, as [stash] says.
        clones: clones of hot experts, as [clones] says.
        dynamic_cp: each micro-batch has its own cp, and this is the most tokens that a rank holds
            of one; None = --cp for all.
    """

    dispatcher: DispatcherName = "auto"
    fp8_dispatch: bool = False
    expert_backend: ExpertBackend = "auto"
    overlap_shared: bool = False
    compile_dense: bool = False
    graph_dense: bool = False
    stash: bool = False
    clones: bool = False
    dynamic_cp: int | None = None


TABLES: dict[str, type] = {
    "sharding": Sharding,
    "fsdp": FSDPOptions,
    "memory": MemoryOptions,
    "stash": StashOptions,
    "clones": CloneOptions,
    "nvlink": NVLinkOptions,
    "context": ContextOptions,
    "pipeline": PipelineConfig,
    "fp8": Precision,
    "recipe": Recipe,
}
RECORDS = "memory", "context", "pipeline", "fsdp"  # of parallelize_moe, beside dispatch


def records_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the records that flags or the file have given, by table."""
    sharding = Sharding(**values_of(args, "sharding"))
    context = build(args, "context", ContextOptions)
    if sharding.dynamic_cp is not None:
        context = replace(context or ContextOptions(), dynamic=True)
    stash = build(args, "stash", StashOptions) or (StashOptions() if sharding.stash else None)
    clones = build(args, "clones", CloneOptions) or (CloneOptions() if sharding.clones else None)
    recipe = build(args, "recipe", Recipe)
    if values_of(args, "fp8") and recipe is None:
        recipe = Recipe()
    if recipe is not None and args.precision:
        raise ValueError(
            f"--precision ({args.precision}) must not go with options of [recipe] and [fp8], which "
            "are a recipe of their own: drop it"
        )
    stages = (args.pp or 1) > 1
    if values_of(args, "pipeline") and not stages:
        raise ValueError(f"--pp ({args.pp}) must be > 1 with options of [pipeline]: drop those")
    return {
        "sharding": sharding,
        "memory": MemoryOptions(**values_of(args, "memory"), stash=stash),
        "stash": stash,
        "clones": clones,
        "nvlink": build(args, "nvlink", NVLinkOptions),
        "context": context,
        "pipeline": PipelineConfig(**values_of(args, "pipeline")) if stages else None,
        "recipe": recipe,
        "fp8": recipe and Precision(recipe=recipe, **values_of(args, "fp8")),
    }


def nvlink_of(records: dict[str, Any], max_tokens: int) -> NVLinkOptions | None:
    """Return options with room for the longest micro-batch, which the first one need not be."""
    nvlink, dispatcher = records["nvlink"], records["sharding"].dispatcher
    if nvlink is None and dispatcher not in ("auto", "nvlink", "hierarchical"):
        return None
    nvlink = nvlink or NVLinkOptions()
    return nvlink if nvlink.max_tokens else replace(nvlink, max_tokens=max_tokens)


def fsdp_of(args: argparse.Namespace, meshes: Meshes) -> FSDPOptions:
    """Return the options of [fsdp] with the dtype of the run."""
    dtype = compute_dtype(args, torch.device(meshes.device_type))
    return FSDPOptions(param_dtype=dtype, **values_of(args, "fsdp"))


def parallelize(
    model: nn.Module,
    meshes: Meshes,
    args: argparse.Namespace,
    records: dict[str, Any],
    **options: Any,
) -> None:
    """Put a model onto the ranks, as the records and --precision say."""
    sharding = records["sharding"]
    parallelize_moe(
        model,
        meshes,
        dispatch=DispatchOptions(
            name=sharding.dispatcher,
            nvlink=records["nvlink"],
            fp8=sharding.fp8_dispatch,
            clones=records["clones"],
        ),
        expert_backend=sharding.expert_backend,
        dense=DenseOptions(
            overlap_shared=sharding.overlap_shared,
            compile=sharding.compile_dense,
            graph=sharding.graph_dense,
        ),
        precision=records["fp8"] or args.precision,
        loss="sum",
        **{name: records[name] for name in RECORDS},
        **options,
    )
