"""What each pipeline rank of a run stores: parameters, gradients, buffers, optimizer state.

TrainingRun -> ShardPlan of each pipeline rank -> RankBytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from moecore.planning.model import LayerKind, config_of_kinds, kind_of
from moecore.planning.run import OptimizerOptions, TrainingRun, fake_world, quiet
from moecore.planning.transformers import refusing
from moecore.train.optim.adamw import AdamW

SAMPLE = 1 << 20  # elements whose optimizer state is counted


def stages_of(run: TrainingRun) -> Sequence[Stage]:
    """Return the stages of a run, in the order of forward; without a pipeline, one of all parts."""
    model = run.planned_model
    if run.pipeline is None:
        layers, mtp = tuple(range(model.num_layers)), tuple(range(model.num_mtp_layers))
        return [Stage(index=0, embedding=True, layers=layers, mtp=mtp, loss=True)]
    parts = model.num_layers, model.num_mtp_layers, model.bound()
    layout = run.pipeline.stages(run.resolved.pp, *parts)
    layout.chunks(run.resolved.pp)  # refuses stages that pp does not divide
    return layout.stages


def ranks_of(run: TrainingRun) -> Sequence[int]:
    """Return the pipeline rank of each stage."""
    if run.pipeline is None:
        return (0,)
    pp = run.resolved.pp
    chunks = len(stages_of(run)) // pp
    return make_schedule(run.pipeline.schedule, pp=pp, chunks=chunks, num_micro_batches=1).rank_of


def stages_by_rank(run: TrainingRun) -> list[list[Stage]]:
    """Return the stages of each pipeline rank."""
    pairs = list(zip(stages_of(run), ranks_of(run), strict=True))
    return [[stage for stage, of in pairs if of == rank] for rank in range(run.resolved.pp)]


def stored_bytes(run: TrainingRun) -> int:
    """Return the bytes of the parameters of the pipeline rank that stores most of them."""
    return max(size.parameters for size in sizes_of(run))


def resident_kinds(run: TrainingRun, size: RankBytes) -> dict[str, int]:
    """Return the resident bytes of a rank between steps by kind, with all state on the device."""
    sizes = {f"parameters: {role.role}": role.parameters for role in size.roles}
    sizes |= {"gathered weights": size.weights, "sums of gradients": size.sums}
    per_element = state_bytes(run.optimizer)
    sizes["optimizer state"] = int(size.gradients // run.dtype.itemsize * per_element)
    return sizes


@cache
def state_bytes(options: OptimizerOptions) -> float:
    """Return the bytes of AdamW's state per element of a parameter."""
    param = nn.Parameter(torch.empty(SAMPLE, dtype=options.param_dtype, device="meta"))
    optimizer = AdamW(
        [param],
        moment_dtype=getattr(torch, options.moment_dtype),
        master_remainder=options.master_remainder,
    )
    state = optimizer.state_of(param)
    return sum(t.nbytes for name, t in state.items() if name != "step") / SAMPLE


def sizes_of(run: TrainingRun) -> tuple[RankBytes, ...]:
    """Return what each pipeline rank stores."""
    is_fc1 = "expert_fc1" in run.memory.parts  # which experts may refuse
    run = replace(  # without options that change no parameter, so that equal ranks are planned once
        run,
        seq_len=min(run.seq_len, run.planned_model.num_mtp_layers + 1),
        batch_size=1,
        num_micro_batches=1,
        memory=MemoryOptions(recompute=("expert_fc1",) if is_fc1 else ()),
        optimizer=OptimizerOptions(master_remainder=run.optimizer.master_remainder),
        nvlink=None,
        dispatcher="auto",
    )
    if run.pipeline is None or _needs_all_layers(run):
        return tuple(_rank_size(run, rank) for rank in range(run.resolved.pp))
    config: Any = run.model
    one_stage = replace(run, parallel=run.resolved, pipeline=PipelineConfig(layout="EL"))
    sizes = []
    for stages in stages_by_rank(run):
        kinds = tuple(kind_of(config, i) for stage in stages for i in stage.layers)
        has_embedding = any(stage.embedding for stage in stages)
        has_loss, mtp = any(stage.loss for stage in stages), sum(len(stage.mtp) for stage in stages)
        sizes.append(_size_of_parts(one_stage, has_embedding, has_loss, kinds, mtp))
    return tuple(sizes)


def _needs_all_layers(run: TrainingRun) -> bool:
    """Return whether the plan of a rank depends on layers of other ranks."""
    config = run.model
    # Names of layers decide their precision, and units may have blocks of two ranks.
    has_overrides = run.precision is not None and bool(run.precision.overrides)
    if not isinstance(config, DecoderConfig) or has_overrides or run.fsdp.blocks_per_unit > 1:
        return True
    # The last layer fills the stages of other ranks, so it alone must be a valid model.
    last = kind_of(config, config.num_layers - 1)
    return last[:2] != ("attention", "dense" if config.moe is None else "moe")


@lru_cache(maxsize=1024)
def _size_of_parts(
    run: TrainingRun, embedding: bool, loss: bool, kinds: tuple[LayerKind, ...], mtp: int
) -> RankBytes:
    """Return what a pipeline rank with these parts stores, from a model of few other layers."""
    config: Any = run.model
    kind = kind_of(config, config.num_layers - 1)
    # The ranks before and behind it have a layer each, or the other parts of the model.
    letters = "E" * embedding + "t" * len(kinds) + "m" * mtp + "L" * loss
    before, after = "Et" * (not embedding), "" if loss else "t" * (not mtp) + "L"
    if loss and not letters.strip("L"):  # the final norm is with the predictions
        before += "m" * (surplus := config.num_mtp_layers)
        mtp += surplus
    stages = [part for part in (before, letters, after) if part]
    pp, kinds = len(stages), (kind,) * before.count("t") + kinds + (kind,) * after.count("t")
    small = replace(
        run,
        model=config_of_kinds(config, kinds, mtp),
        num_gpus=run.num_gpus // run.parallel.pp * pp,
        parallel=replace(run.parallel, pp=pp),
        pipeline=PipelineConfig(layout="|".join(stages)) if pp > 1 else None,
    )
    return _rank_size(small, int(not embedding))


@lru_cache(maxsize=1024)
def _rank_size(run: TrainingRun, pp_rank: int) -> RankBytes:
    rank = pp_rank * run.num_gpus // run.resolved.pp
    with refusing(run.model), fake_world(run.num_gpus, rank), quiet():
        model = run.planned_model.build(run.dtype)
        # No run trains the indexers of sparse attention, so their parameters have no gradients.
        layers: Any = family_of(model).indexers(model)
        indexers = {param for layer in layers for param in layer.indexer.parameters()}
        frozen = {name for name, param in model.named_parameters() if param in indexers}
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
    return rank_bytes(replace(plan, params=tuple(params)), rank)
