"""What each pipeline rank of a run stores: parameters, gradients, buffers, optimizer state.

TrainingRun -> ShardPlan of each pipeline rank -> RankBytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from math import lcm

import torch
from torch import nn

from moecore.memory.options import MemoryOptions
from moecore.mesh import build_meshes
from moecore.models import Decoder
from moecore.models.config import DecoderConfig
from moecore.optim.adamw import AdamW
from moecore.parallelize import plan_sharding
from moecore.pipeline.config import PipelineConfig
from moecore.pipeline.layout import Stage
from moecore.pipeline.schedule import make_schedule
from moecore.planning.record import fake_world, quiet
from moecore.planning.run import OptimizerOptions, TrainingRun
from moecore.shard.plan import ShardPlan
from moecore.shard.size import RankBytes, RoleBytes, rank_bytes

WHOLE = Stage(index=0, embedding=True, layers=(), mtp=(), loss=True)


WITHIN_STEP = ("gradients", "sums over micro-batches")  # what is stored, but not between steps


SAMPLE = 1 << 20  # elements whose optimizer state is counted


def stages_of(run: TrainingRun) -> Sequence[Stage]:
    """Return the stages of a run, in the order of forward."""
    if run.pipeline is None:
        return [WHOLE]
    model = run.model
    layout = run.pipeline.stages(run.resolved.pp, model.num_layers, model.num_mtp_layers)
    layout.chunks(run.resolved.pp)  # refused where these do not divide
    return layout.stages


def stored_bytes(run: TrainingRun) -> int:
    """Return the bytes of parameters that the pipeline rank with the most of them stores."""
    return max(size.parameters for size in sizes_of(run))


def held_bytes(run: TrainingRun) -> tuple[int, ...]:
    """Return what each pipeline rank holds between steps, with all state on the device."""
    return tuple(
        sum(n for kind, n in _stored(run, size).items() if kind not in WITHIN_STEP)
        for size in sizes_of(run)
    )


def sizes_of(run: TrainingRun) -> list[RankBytes]:
    """Return what each pipeline rank stores."""
    stages = stages_of(run)
    rank_of = ranks_of(run)
    ranks = [[s for s in stages if rank_of[s.index] == rank] for rank in range(run.resolved.pp)]
    return [_rank_size(run, rank, own) for rank, own in enumerate(ranks)]


def ranks_of(run: TrainingRun) -> Sequence[int]:
    """Return the pipeline rank of each stage."""
    if run.pipeline is None:
        return (0,)
    pp = run.resolved.pp
    chunks = len(stages_of(run)) // pp
    return make_schedule(run.pipeline.schedule, pp=pp, chunks=chunks, num_micro_batches=1).rank_of


def _rank_size(run: TrainingRun, pp_rank: int, own: Sequence[Stage]) -> RankBytes:
    """Return the bytes of a pipeline rank, found once for all ranks that are alike."""
    if (pair := shallow(run)) is not None:
        low, high, times = pair
        return deeper(_size(low, 0), _size(high, 0), times)
    found = None if run.pipeline is None else lone_rank(run, own)
    return _size(*(found or (replace(run, num_micro_batches=1), pp_rank)))


@lru_cache(maxsize=1024)
def _size(run: TrainingRun, pp_rank: int) -> RankBytes:
    return rank_bytes(_shard_plan(run, pp_rank), pp_rank * run.num_gpus // run.resolved.pp)


def _shard_plan(run: TrainingRun, pp_rank: int) -> ShardPlan:
    """Return the plan of a pipeline rank."""
    with fake_world(run.num_gpus, pp_rank * run.num_gpus // run.resolved.pp), quiet():
        return plan_sharding(
            Decoder(run.model, device="meta", dtype=run.dtype),
            build_meshes(run.parallel, "cpu"),
            dispatcher="alltoall",
            memory=run.memory,
            precision=run.precision,
            fsdp=run.fsdp,
            pipeline=run.pipeline,
        )


def _stored(run: TrainingRun, size: RankBytes) -> dict[str, int]:
    """Return what a rank holds whatever it computes, by kind."""
    found = {f"parameters: {role.role}": role.parameters for role in size.roles}
    found |= {"gradients": size.gradients, "gathered weights": size.weights}
    found["sums of gradients"] = size.sums
    if run.num_micro_batches > 1:
        found["sums over micro-batches"] = size.accumulated
    per_element = state_bytes(run.optimizer, run.dtype)
    found["optimizer state"] = int(size.parameters // run.dtype.itemsize * per_element)
    return found


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


LAYERS = 4  # of a kind, from which on each adds as much as the one before


def few_layers(run: TrainingRun) -> tuple[TrainingRun, tuple[int, ...]] | None:
    """Return a run of few layers on few ranks without stages, and which is like each layer.

    The last layer is one of its own, because an offload leaves it.
    """
    p, model = run.resolved, run.model
    if not _are_alike(run):
        return None
    kinds = [model.is_dense(i) for i in range(model.num_layers)]
    found = [kinds.index(kind) for kind in dict.fromkeys(kinds[:-1])] + [model.num_layers - 1]
    like = [next(n for n, i in enumerate(found) if kinds[i] == kind) for kind in kinds]
    small = replace(
        run,
        model=_of_kinds(model, [kinds[i] for i in found], model.num_mtp_layers),
        num_gpus=lcm(p.tp * p.cp, p.ep * p.etp),
        parallel=type(p)(tp=p.tp, cp=p.cp, ep=p.ep, etp=p.etp),
        num_micro_batches=1,
        pipeline=None,
        optimizer=_of_dtype(run),
    )
    return small, (*like[:-1], len(found) - 1)


def lone_rank(run: TrainingRun, own: Sequence[Stage]) -> tuple[TrainingRun, int] | None:
    """Return a run of two or three pipeline ranks, and which of them holds these stages alone.

    Args:
        run: with a pipeline.
        own: the stages of one rank, in their order.
    """
    p, model = run.resolved, run.model
    embeds, has_loss = own[0].embedding, own[-1].loss
    kinds = [model.is_dense(i) for stage in own for i in stage.layers]
    mtp = sum(len(stage.mtp) for stage in own)
    last = model.is_dense(model.num_layers - 1)  # multi-token prediction has a layer of this kind
    is_split = mtp != model.num_mtp_layers and (mtp or has_loss)  # the norm is with the first one
    is_wide = embeds and (has_loss or mtp)
    if not _are_alike(run) or is_split or is_wide or (mtp and kinds[-1:] == [not last]):
        return None
    # A model has a layer, and one with experts where it has any: it may be another rank's.
    spare = [] if any(kind == last for kind in kinds) else [last]
    letters = "E" * embeds + "t" * len(kinds) + "m" * mtp + "L" * has_loss
    if embeds:
        stages, kinds, place = [letters, "t" * len(spare) + "L"], kinds + spare, 0
    else:
        stages, kinds, place = ["E" + "t" * len(spare), letters], spare + kinds, 1
        stages += [] if has_loss else ["L"]
    small = replace(
        run,
        model=_of_kinds(model, kinds, mtp),
        num_gpus=run.num_gpus // p.pp * len(stages),
        parallel=replace(p, pp=len(stages)),
        seq_len=min(run.seq_len, model.num_mtp_layers + 1),
        batch_size=1,
        num_micro_batches=1,
        pipeline=PipelineConfig(layout="|".join(stages)),
        memory=_only_fc1(run),
        optimizer=_of_dtype(run),
    )
    return small, place


def shallow(run: TrainingRun) -> tuple[TrainingRun, TrainingRun, int] | None:
    """Return two runs that differ by a layer, and how many more of it the run has than the first.

    Stored bytes grow by as many per layer: units of a kind take turns in a few buffers.
    """
    model = run.model
    kinds = [model.is_dense(i) for i in range(model.num_layers)]
    first = next(i for i, kind in enumerate(kinds) if kinds[i:] == [kind] * (len(kinds) - i))
    units = run.fsdp.blocks_per_unit == 1 and run.fsdp.prefetch_blocks <= 1
    if run.pipeline is not None or not units or not _are_alike(run) or len(kinds) < first + LAYERS:
        return None
    plain = replace(run, num_micro_batches=1, batch_size=1, memory=_only_fc1(run))
    plain = replace(plain, seq_len=model.num_mtp_layers + 1, optimizer=_of_dtype(run))
    low, high = (
        replace(plain, model=_of_kinds(model, kinds[: first + n], model.num_mtp_layers))
        for n in (LAYERS, LAYERS + 1)
    )
    return low, high, len(kinds) - first - LAYERS


def deeper(low: RankBytes, high: RankBytes, times: int) -> RankBytes:
    """Return `low` with the difference to `high` added so many times."""

    def grown(a: int, b: int) -> int:
        return a + times * (b - a)

    roles = tuple(
        RoleBytes(
            role=a.role,
            num_units=grown(a.num_units, b.num_units),
            parameters=grown(a.parameters, b.parameters),
            gradients=grown(a.gradients, b.gradients),
            gathered=grown(a.gathered, b.gathered),
        )
        for a, b in zip(low.roles, high.roles, strict=True)
    )
    sums = {n: grown(getattr(low, n), getattr(high, n)) for n in ("weights", "sums", "accumulated")}
    return RankBytes(roles=roles, **sums)


def _only_fc1(run: TrainingRun) -> MemoryOptions:
    """Return what alone of the memory options experts may refuse."""
    return MemoryOptions(recompute=("expert_fc1",) if "expert_fc1" in run.memory.parts else ())


def _are_alike(run: TrainingRun) -> bool:
    memory, precision = run.memory, run.precision
    counts = memory.offload_fraction != 1.0 or memory.offload_host_bytes is not None
    return not counts and memory.stash is None and (precision is None or not precision.overrides)


def _of_kinds(model: DecoderConfig, kinds: Sequence[bool], mtp: int) -> DecoderConfig:
    """Return the model with these layers, True = dense, and so many predictions."""
    dense = () if model.moe is None else tuple(i for i, kind in enumerate(kinds) if kind)
    return replace(
        model,
        num_layers=len(kinds),
        dense_layers=dense,
        mlp_hidden_dim=model.mlp_hidden_dim if any(kinds) else 0,
        num_mtp_layers=mtp,
        mtp_loss_coef=model.mtp_loss_coef if mtp else 0.0,
    )


def _of_dtype(run: TrainingRun) -> OptimizerOptions:
    """Return what alone of an optimizer decides the parameters' dtype."""
    return OptimizerOptions(master_remainder=run.optimizer.master_remainder)
