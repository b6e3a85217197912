"""What each pipeline rank of a run stores: parameters, gradients, buffers, optimizer state.

TrainingRun -> ShardPlan of each pipeline rank -> RankBytes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import nn

from moecore.base.options.memory import MemoryOptions
from moecore.families.family import family_of
from moecore.models.config import DecoderConfig
from moecore.parallel.fsdp.size import RankBytes, rank_bytes
from moecore.parallel.mesh import build_meshes
from moecore.parallel.pipeline.layout import Stage
from moecore.parallel.pipeline.schedule import PipelineConfig, make_schedule
from moecore.parallelize import plan_sharding
from moecore.planning.model import LayerKind, kind_of, of_kinds
from moecore.planning.run import OptimizerOptions, TrainingRun, fake_world, quiet
from moecore.planning.transformers import refusing
from moecore.train.optim.adamw import AdamW

SINGLE_STAGE = Stage(index=0, embedding=True, layers=(), mtp=(), loss=True)
STEADY_LAYERS = (
    2  # layers from which on one more adds the same, beside those that are gathered ahead
)
SAMPLE = 1 << 20  # elements whose optimizer state is counted


def stages_of(run: TrainingRun) -> Sequence[Stage]:
    """Return the stages of a run, in the order of forward."""
    if run.pipeline is None:
        return [SINGLE_STAGE]
    model = run.planned_model
    parts = model.num_layers, model.num_mtp_layers, model.bound()
    layout = run.pipeline.stages(run.resolved.pp, *parts)
    layout.chunks(run.resolved.pp)  # refused where these do not divide
    return layout.stages


def stored_bytes(run: TrainingRun) -> int:
    """Return the bytes of parameters that the pipeline rank with the most of them stores."""
    return max(size.parameters for size in sizes_of(run))


def held_bytes(run: TrainingRun) -> tuple[int, ...]:
    """Return what each pipeline rank holds between steps, with all state on the device."""
    return tuple(sum(held_kinds(run, size).values()) for size in sizes_of(run))


def sizes_of(run: TrainingRun) -> tuple[RankBytes, ...]:
    """Return what each pipeline rank stores."""
    is_fc1 = "expert_fc1" in run.memory.parts  # which experts may refuse
    plain = replace(
        run,
        seq_len=min(run.seq_len, run.planned_model.num_mtp_layers + 1),
        batch_size=1,
        num_micro_batches=1,
        memory=MemoryOptions(recompute=("expert_fc1",) if is_fc1 else ()),
        optimizer=OptimizerOptions(master_remainder=run.optimizer.master_remainder),
        nvlink=None,
        dispatcher="auto",
    )
    return _sizes(plain)


def _sizes(run: TrainingRun) -> tuple[RankBytes, ...]:
    """Return what each pipeline rank stores, of ranks and runs with the same parts once."""
    pp, rank_of, model = run.resolved.pp, ranks_of(run), run.model
    by_name = run.precision is not None and bool(run.precision.overrides)  # layers may differ
    needs_all_layers = by_name or run.fsdp.blocks_per_unit > 1
    if isinstance(model, DecoderConfig):  # the last layer alone must be a model
        last, moe_layer = kind_of(model, model.num_layers - 1), ("attention", "moe")
        needs_all_layers |= last[:2] != (
            moe_layer if model.moe is not None else ("attention", "dense")
        )
    if run.pipeline is None or needs_all_layers or not isinstance(model, DecoderConfig):
        return tuple(_rank_size(run, rank) for rank in range(pp))
    sizes, one_stage = [], replace(run, parallel=run.resolved, pipeline=PipelineConfig(layout="EL"))
    for rank in range(pp):
        rank_stages = [stage for stage in stages_of(run) if rank_of[stage.index] == rank]
        kinds = tuple(kind_of(model, i) for stage in rank_stages for i in stage.layers)
        ends = (
            any(stage.embedding for stage in rank_stages),
            any(stage.loss for stage in rank_stages),
        )
        mtp = sum(len(stage.mtp) for stage in rank_stages)
        sizes.append(_of_parts(one_stage, *ends, kinds, mtp))
    return tuple(sizes)


@lru_cache(maxsize=1024)
def _of_parts(
    run: TrainingRun, embedding: bool, loss: bool, kinds: tuple[LayerKind, ...], mtp: int
) -> RankBytes:
    """Return what a pipeline rank with these parts stores."""
    model: Any = run.model
    max_layers = STEADY_LAYERS + run.fsdp.prefetch_blocks
    for kind, number in Counter(kinds).items():
        if (surplus := number - max_layers) > 1:  # each one more adds the same
            short, long = (
                _of_parts(run, embedding, loss, _without(kinds, kind, surplus - n), mtp)
                for n in (0, 1)
            )
            return _extended(short, long, surplus)
    kind = kind_of(model, model.num_layers - 1)
    # A rank before it and one behind it have something too, which it does not see.
    letters = "E" * embedding + "t" * len(kinds) + "m" * mtp + "L" * loss
    before, after = "Et" * (not embedding), "" if loss else "t" * (not mtp) + "L"
    if loss and not letters.strip("L"):  # the final norm is with the predictions
        before += "m" * (surplus := model.num_mtp_layers)
        mtp += surplus
    stages = [part for part in (before, letters, after) if part]
    pp, kinds = len(stages), (kind,) * before.count("t") + kinds + (kind,) * after.count("t")
    small = replace(
        run,
        model=of_kinds(model, kinds, mtp),
        num_gpus=run.num_gpus // run.parallel.pp * pp,
        parallel=replace(run.parallel, pp=pp),
        pipeline=PipelineConfig(layout="|".join(stages)) if pp > 1 else None,
    )
    return _rank_size(small, int(not embedding))


def _without(kinds: tuple[LayerKind, ...], kind: LayerKind, number: int) -> tuple[LayerKind, ...]:
    """Return layers without the first so many of a kind."""
    indices = [i for i, layer in enumerate(kinds) if layer == kind][:number]
    return tuple(layer for i, layer in enumerate(kinds) if i not in indices)


def _extended(short: RankBytes, long: RankBytes, times: int) -> RankBytes:
    """Return the bytes with so many layers more than `short`, where `long` has one more."""

    def extended(first: Any, second: Any) -> Any:
        if isinstance(first, int):
            return first + times * (second - first)
        if isinstance(first, tuple):
            return tuple(map(extended, first, second))
        names = (field.name for field in fields(first) if field.name != "role")
        return replace(first, **{n: extended(getattr(first, n), getattr(second, n)) for n in names})

    all_layers: RankBytes = extended(short, long)
    return all_layers


@lru_cache(maxsize=1024)
def _rank_size(run: TrainingRun, pp_rank: int) -> RankBytes:
    rank = pp_rank * run.num_gpus // run.resolved.pp
    with refusing(run.model), fake_world(run.num_gpus, rank), quiet():
        model = run.planned_model.build(run.dtype)
        idle = _idle(model)
        plan = plan_sharding(
            model,
            build_meshes(run.parallel, "cpu"),
            dispatch="alltoall",
            memory=run.memory,
            precision=run.precision,
            fsdp=run.fsdp,
            pipeline=run.pipeline,
        )
    params = (replace(p, trainable=p.trainable and p.name not in idle) for p in plan.params)
    return rank_bytes(replace(plan, params=tuple(params)), rank)


def _idle(model: nn.Module) -> set[str]:
    """Return the names of parameters without gradients: of indexers, which no run lets learn."""
    layers: Any = family_of(model).indexers(model)
    idle = {param for layer in layers for param in layer.indexer.parameters()}
    return {name for name, param in model.named_parameters() if param in idle}


def ranks_of(run: TrainingRun) -> Sequence[int]:
    """Return the pipeline rank of each stage."""
    if run.pipeline is None:
        return (0,)
    pp = run.resolved.pp
    chunks = len(stages_of(run)) // pp
    return make_schedule(run.pipeline.schedule, pp=pp, chunks=chunks, num_micro_batches=1).rank_of


def held_kinds(run: TrainingRun, size: RankBytes) -> dict[str, int]:
    """Return what a rank holds between steps, by kind."""
    sizes = {f"parameters: {role.role}": role.parameters for role in size.roles}
    sizes |= {"gathered weights": size.weights, "sums of gradients": size.sums}
    per_element = state_bytes(run.optimizer, run.dtype)
    sizes["optimizer state"] = int(size.gradients // run.dtype.itemsize * per_element)
    return sizes


@cache
def state_bytes(options: OptimizerOptions, dtype: torch.dtype) -> float:
    """Return bytes that AdamW keeps per element of a parameter."""
    param = nn.Parameter(torch.empty(SAMPLE, dtype=dtype, device="meta"))
    optimizer = AdamW(
        [param],
        moment_dtype=getattr(torch, options.moment_dtype),
        master_remainder=options.master_remainder,
    )
    state = optimizer.state_of(param)
    return sum(t.nbytes for name, t in state.items() if name != "step") / SAMPLE
