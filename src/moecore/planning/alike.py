"""Runs of few layers that stand for a run of many, because layers of one kind are alike.

    few_layers(run)        a layer of each kind, and the last one     what layers keep for backward
    lone_rank(run, own)    the stages of one pipeline rank            what that rank stores
    shallow(run)           4 and 5 layers of the last kind            what n layers store
    timed_layers(run)      four layers of the last kind               how long a layer takes

The first three are exact, and made equal where they can be: runs whose small ones are equal share
what was found out about them. None where layers of a kind may differ: a precision that goes by
names, an offload that counts layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Literal

from moecore.base.options.memory import MemoryOptions
from moecore.models.config import DecoderConfig
from moecore.parallel.pipeline.config import PipelineConfig
from moecore.parallel.pipeline.layout import Stage
from moecore.parallel.shard.size import RankBytes, RoleBytes
from moecore.planning.run import OptimizerOptions, TrainingRun

Likes = Mapping[Literal["F", "B"], Sequence[int]]  # of forward and backward
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


def timed_layers(run: TrainingRun, num_micro_batches: int) -> tuple[TrainingRun, Likes]:
    """Return a run of few layers on the ranks of one stage, and which is like each layer.

    Of the last layer's kind there are the first two and the last two, of the other kind one. What a
    layer prefetches is that of the next but one: so between them a forward is like the second one's
    and a backward like the last but one's.
    """
    p, model = run.resolved, run.model
    kinds = [model.is_dense(i) for i in range(model.num_layers)]
    alike = [i for i, kind in enumerate(kinds) if kind == kinds[-1]]
    others = [i for i, kind in enumerate(kinds) if kind != kinds[-1]][:1]
    found = sorted({*others, *alike[:2], *alike[-2:]})
    small = replace(
        run,
        model=_of_kinds(model, [kinds[i] for i in found], model.num_mtp_layers),
        num_gpus=run.num_gpus // p.pp,
        parallel=replace(p, pp=1),
        num_micro_batches=num_micro_batches,
        pipeline=None,
    )

    def like(between: int) -> tuple[int, ...]:
        of = {kinds[-1]: between, not kinds[-1]: [*others, 0][0]}
        return tuple(found.index(i if i in found else of[kind]) for i, kind in enumerate(kinds))

    return small, {"F": like(alike[:2][-1]), "B": like(alike[-2:][0])}


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
