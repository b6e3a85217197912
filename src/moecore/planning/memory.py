"""Bytes that each pipeline rank of a run holds, by kind.

    TrainingRun -> ShardPlan of each pipeline rank    parameters, gradients, buffers of units
                -> kept_bytes of a model on meta      what each block's forward leaves
                -> Schedule                           how many forwards wait for their backward

These are the records that the run itself uses, made in a fake world: there is no formula beside
them. Ranks of a pipeline stage hold as much as its first one, or less.

A sum of kinds, some of which are never there at once: `plan_peak` has what is. Not counted: what an
operation needs while it runs, what an allocator cannot use, NCCL's buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import nn

from moecore.base.fields import check_arguments
from moecore.base.tables import columns, shown_bytes
from moecore.kernels.common import meta_as
from moecore.models import Decoder
from moecore.parallel.attached import attached
from moecore.parallel.mesh import build_meshes
from moecore.parallel.pipeline.layout import Stage
from moecore.parallel.pipeline.orders import actions_of
from moecore.parallel.pipeline.schedule import Schedule, make_schedule
from moecore.parallel.shard.plan import ShardPlan
from moecore.parallel.shard.size import RankBytes, rank_bytes
from moecore.parallelize import parallelize_moe, plan_sharding
from moecore.planning.alike import deeper, few_layers, lone_rank, shallow
from moecore.planning.run import OptimizerOptions, TrainingRun
from moecore.planning.world import fake_world, quiet
from moecore.train.memory.kept import KeptBytes, ModelKept, kept_bytes
from moecore.train.optim.adamw import AdamW

WHOLE = Stage(index=0, embedding=True, layers=(), mtp=(), loss=True)
WITHIN_STEP = ("gradients", "sums over micro-batches")  # what is stored, but not between steps
SAMPLE = 1 << 20  # elements whose optimizer state is counted


class _Forward(NamedTuple):
    """What a forward keeps for its backward, and buffers of dispatcher "nvlink"."""

    kept: ModelKept
    buffers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """What one rank holds at most, in bytes by kind.

    Attributes:
        pp_rank: pipeline rank.
        stages: of this rank, in the letters of a layout.
        device: in the GPU's memory.
        host: in pinned host memory.
        in_flight: micro-batches of the stages that wait for their backward when activations are
            largest, in the order of the stages.
    """

    pp_rank: int
    stages: tuple[str, ...]
    device: Mapping[str, int]
    host: Mapping[str, int]
    in_flight: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """In the GPU's memory, of all kinds."""
        return sum(self.device.values())

    @property
    def activations(self) -> int:
        """What forwards have left for their backward."""
        return sum(n for kind, n in self.device.items() if kind.startswith("activations"))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """What all ranks of a run hold.

    Attributes:
        run: what was planned.
        ranks: by pipeline rank.
    """

    run: TrainingRun
    ranks: tuple[RankMemory, ...]

    @property
    def largest(self) -> RankMemory:
        """The rank that holds most."""
        return max(self.ranks, key=lambda rank: rank.num_bytes)

    def table(self, peaks: Sequence[int] = ()) -> str:
        """Return a row per kind and a column per pipeline rank.

        Args:
            peaks: what each rank has at once, of `plan_peak`.
        """
        kinds = dict.fromkeys(kind for rank in self.ranks for kind in rank.device)
        hosts = dict.fromkeys(kind for rank in self.ranks for kind in rank.host)
        lines = [("pp rank", *(str(rank.pp_rank) for rank in self.ranks))]
        lines += [("stages", *(" ".join(rank.stages) for rank in self.ranks))]
        in_flight = (" ".join(map(str, rank.in_flight)) for rank in self.ranks)
        lines += [("in flight", *in_flight)]
        for kind in kinds:
            lines.append((kind, *(shown_bytes(rank.device.get(kind, 0)) for rank in self.ranks)))
        lines.append(("sum", *(shown_bytes(rank.num_bytes) for rank in self.ranks)))
        if peaks:
            lines.append(("at once", *map(shown_bytes, peaks)))
        for kind in hosts:
            found = (shown_bytes(rank.host.get(kind, 0)) for rank in self.ranks)
            lines.append((f"host: {kind}", *found))
        return "\n".join(columns(lines))


def plan_memory(run: TrainingRun) -> MemoryPlan:
    """Return what each pipeline rank of a run holds. No GPU, no communication.

    Raises:
        ValueError, NotImplementedError: as `parallelize_moe`, for what does not fit the model.
    """
    check_arguments(plan_memory, locals())
    with fake_world(1):
        pass  # refused inside of another one, whatever was found before
    p, config = run.resolved, run.model
    stages, schedule = stages_of(run), None
    if run.pipeline is not None:
        schedule = make_schedule(
            run.pipeline.schedule,
            pp=p.pp,
            chunks=len(stages) // p.pp,
            num_micro_batches=until_steady(run),
        )
    (kept, buffers), ranks = _forward_of_layers(run), []
    parts = [blocks_of_stage(stage, kept, config.num_layers) for stage in stages]
    sizes = [sum(block.num_bytes for block in blocks) for blocks in parts]
    for pp_rank in range(p.pp):
        own = [s for s in stages if schedule is None or schedule.rank_of[s.index] == pp_rank]
        device = _stored(run, _rank_size(run, pp_rank, own))
        in_flight = (1,) if schedule is None else in_flight_at_most(schedule, pp_rank, sizes)
        here, there = Counter[str]({"exchange buffers": buffers}), Counter[str]()
        for stage, number in zip(own, in_flight, strict=True):
            for block in parts[stage.index]:
                for part, num_bytes in block.device.items():
                    here[f"activations: {part}"] += number * num_bytes
                for part, num_bytes in block.host.items():
                    there[f"activations: {part}"] += number * num_bytes
        state = device.pop("optimizer state")
        away = int(run.optimizer.offload_fraction * state)
        device["optimizer state"] = state - away
        if away:
            there["optimizer state"] = away
        ranks.append(
            RankMemory(
                pp_rank=pp_rank,
                stages=tuple(s.letters for s in own) if schedule is not None else ("all",),
                device={kind: n for kind, n in (device | here).items() if n},
                host=dict(there),
                in_flight=tuple(in_flight),
            )
        )
    return MemoryPlan(run=run, ranks=tuple(ranks))


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


def blocks_of_stage(stage: Stage, kept: ModelKept, num_layers: int) -> list[KeptBytes]:
    """Return what a stage's parts keep: its layers, its predictions, and what is outside of them.

    The head and the loss count with the last stage, and so does the embedding, which keeps tokens.
    """
    if stage is WHOLE:
        return [*kept.blocks, kept.outside]
    found = [kept.blocks[i] for i in stage.layers]
    found += [kept.blocks[num_layers + i] for i in stage.mtp]
    return [*found, kept.outside] if stage.loss else found


def in_flight_at_most(schedule: Schedule, rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return how many micro-batches of a rank's stages wait when they keep the most bytes.

    A micro-batch waits from its forward to the gradient of its weights.

    Args:
        schedule: of all ranks.
        rank: whose stages.
        sizes: what a micro-batch of each stage keeps.
    """
    own = [stage for stage, of in enumerate(schedule.rank_of) if of == rank]
    waiting, most, found = Counter[int](), -1, (0,) * len(own)
    for item in schedule.orders[rank]:
        for kind, stage, _ in actions_of(item):
            waiting[stage] += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
        size = sum(number * sizes[stage] for stage, number in waiting.items())
        if size > most:
            most, found = size, tuple(waiting[stage] for stage in own)
    return found


def until_steady(run: TrainingRun) -> int:
    """Return micro-batches after which no rank holds more: rounds of a pipeline are alike."""
    number, round_ = run.num_micro_batches, run.resolved.pp
    is_steady = run.pipeline is not None and run.pipeline.schedule != "gpipe"
    return min(number, 4 * round_) if is_steady and number % round_ == 0 else number


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


def _forward_of_layers(run: TrainingRun) -> _Forward:
    """Return what `_forward` does, found once for all layers and runs that are alike."""
    alone = replace(run, num_micro_batches=1)
    small, like = few_layers(run) or (alone, range(run.model.num_layers))
    kept, buffers = _forward(small)
    mtp = kept.blocks[small.model.num_layers :]
    return _Forward(ModelKept((*(kept.blocks[i] for i in like), *mtp), kept.outside), buffers)


def buffer_bytes(run: TrainingRun) -> int:
    """Return the bytes of a rank's buffers of dispatcher "nvlink"."""
    return 0 if run.nvlink is None else _forward_of_layers(run).buffers


@lru_cache(maxsize=256)
def _forward(run: TrainingRun) -> _Forward:
    """Return a forward of one micro-batch of a data rank, of all layers on one rank."""
    p = run.resolved
    alone = {name: getattr(p, name) for name in ("tp", "cp", "ep", "etp")}
    model = Decoder(run.model, device="meta", dtype=run.dtype)
    tokens_BT = torch.zeros(run.batch_size, run.seq_len, dtype=torch.int64)
    with fake_world(run.num_gpus // p.pp), quiet(), meta_as("cuda"):
        meshes = build_meshes(type(p)(**alone), "cpu")
        parallelize_moe(
            model,
            meshes,
            dispatcher="alltoall" if run.nvlink is None else "nvlink",
            nvlink=run.nvlink,
            precision=run.precision,
            fsdp=run.fsdp,
        )
        blocks: list[nn.Module] = [*model.layers, *model.mtp]
        kept = kept_bytes(
            model,
            blocks,
            lambda copy: copy(tokens_BT, tokens_BT),
            options=run.memory,
            device_type="cuda",
            dtype_of=lambda param: run.fsdp.param_dtype or param.dtype,
        )
        record = attached(model)
    exchanges = None if record is None else record.exchanges
    return _Forward(kept, 0 if exchanges is None else exchanges.planned_bytes)


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
