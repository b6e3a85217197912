"""The most bytes that each pipeline rank of a run holds at once, and bytes by kind.

TrainingRun -> ShardPlan of each pipeline rank    parameters, gradients, buffers of units
-> kept_bytes of a model on meta      what each block's forward leaves
-> Schedule                           how many forwards wait for their backward
Pieces of few layers -> levels of all layers, in the order of the rank's schedule -> `plan_peak`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

from moecore._fields import check_arguments
from moecore.kernels.common import meta_as
from moecore.memory.kept import KeptBytes, ModelKept, kept_bytes
from moecore.mesh import build_meshes
from moecore.models import Decoder
from moecore.moe.state import moe_state
from moecore.parallelize import parallelize_moe
from moecore.pipeline.layout import Stage
from moecore.pipeline.orders import Action, Item, actions_of
from moecore.pipeline.schedule import Schedule, make_schedule
from moecore.planning.pieces import (
    MIDDLE,
    Piece,
    Pieces,
    like_of,
    pages_of,
    pieces_of,
    small_of,
    timed_stages,
)
from moecore.planning.record import PASSES, Pass, fake_world, quiet
from moecore.planning.run import TrainingRun
from moecore.planning.stored import (
    WHOLE,
    _rank_size,
    _stored,
    few_layers,
    held_bytes,
    sizes_of,
    stages_of,
    state_bytes,
)
from moecore.tables import columns, shown_bytes


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
        exchanges = moe_state(model).exchanges
    return _Forward(kept, 0 if exchanges is None else exchanges.planned_bytes)


def plan_peak(run: TrainingRun) -> tuple[int, ...]:
    """Return the most bytes of each pipeline rank, as `torch.cuda.max_memory_allocated` counts.

    And buffers of dispatcher "nvlink", which that does not count.

    Args:
        run: what is trained, and how.

    Raises:
        ValueError, NotImplementedError: as `parallelize_moe`, for what does not fit the model.
    """
    check_arguments(plan_peak, locals())
    pieces, share = pieces_of(run), run.optimizer.offload_fraction
    beside = pieces.held - max(held_bytes(small_of(run)))  # of what no plan counts
    beside -= pages_of(run)  # which have a part for each layer
    buffers = buffer_bytes(run)
    per_byte = share * state_bytes(run.optimizer, run.dtype) / run.dtype.itemsize
    return tuple(
        buffers + _peak(held + beside + pages, passes, pieces, round(per_byte * size.parameters))
        for held, size, passes, pages in zip(
            held_bytes(run), sizes_of(run), _passes(run, pieces), _pages(run), strict=True
        )
    )


def _pages(run: TrainingRun) -> Iterator[int]:
    """Yield the bytes of each pipeline rank's pages: as many for each layer with experts."""
    small = small_of(run).model
    each = pages_of(run) / max(1, small.num_moe_layers + small.num_mtp_layers)
    stages, pp = timed_stages(run), run.resolved.pp
    rank_of: Sequence[int] = [0] * len(stages)
    if run.pipeline is not None:
        name, chunks = run.pipeline.schedule, len(stages) // pp
        rank_of = make_schedule(name, pp=pp, chunks=chunks, num_micro_batches=1).rank_of
    for rank in range(pp):
        own = [stage for stage, of in zip(stages, rank_of, strict=True) if of == rank]
        layers = [i for stage in own for i in stage.layers if not run.model.is_dense(i)]
        yield round(each * (len(layers) + sum(len(stage.mtp) for stage in own)))


def _peak(level: int, passes: Sequence[Sequence[Piece]], pieces: Pieces, away: int) -> int:
    """Return the most bytes of a rank.

    Args:
        level: between steps.
        passes: in its order.
        pieces: of the step that was cut.
        away: state that leaves with the blocks of the first pass and comes back with the last's.
    """
    highest = level
    for number, queue in enumerate(passes):
        for piece in queue:
            level += away // len(queue) * (number == len(passes) - 1)
            highest = max(highest, level + piece.rise)
            level += piece.delta - away // len(queue) * (number == 0)
    return max(highest, level + pieces.end.rise)


def _passes(run: TrainingRun, pieces: Pieces) -> Iterator[list[list[Piece]]]:
    """Yield the pieces of each pipeline rank's passes, in its order."""
    stages, number = timed_stages(run), until_steady(run)
    like = like_of(number, pieces.num_micro_batches)
    pp = run.resolved.pp
    chunks = len(stages) // pp
    orders: Sequence[Sequence[Item]] = [
        [Action(kind, 0, i) for i in range(number) for kind in PASSES]
    ]
    if run.pipeline is not None:
        name = run.pipeline.schedule
        orders = make_schedule(name, pp=pp, chunks=chunks, num_micro_batches=number).orders
    sums = sizes_of(small_of(run))[0].accumulated
    passes: dict[str, Pass] = {"F": "F", "B": "B", "W": "B"}  # D and W together are B
    for order, size in zip(orders, sizes_of(run), strict=True):
        actions = [action for item in order for action in actions_of(item)]
        own = {action.stage for action in actions}
        ends = {i for i in own if stages[i].embedding or stages[i].loss} or own
        share = (size.accumulated / sums if sums else 1 / pp) / len(ends)
        yield [
            _of_stage(stages[stage], passes[kind], like[i], pieces, share * (stage in ends))
            for kind, stage, i in actions
            if kind in passes
        ]


def _of_stage(
    stage: Stage, of: Pass, micro_batch: int, pieces: Pieces, share: float
) -> list[Piece]:
    """Return the pieces of a stage's pass, and what it frees or keeps at the end of a backward.

    In the step that was cut this is in the embedding's piece, for all layers. A micro-batch between
    the first and the last keeps nothing. These keep what their pieces have more than its, and of
    what ends have more the stage's share of gradients that are summed up.
    """
    own = pieces.of_stage(stage, of, micro_batch)
    if of == "F" or pieces.num_micro_batches < MIDDLE:
        return own
    layers, ends = replace(stage, embedding=False, loss=False), replace(WHOLE, layers=(), mtp=())
    kept = sum(
        part_share * (_net(part, micro_batch, pieces) - _net(part, MIDDLE // 2, pieces))
        for part, part_share in ((layers, 1.0), (ends, share))
    )
    more = round(kept) - _net(stage, micro_batch, pieces)
    *others, (place, delta, rise) = own or [Piece(range(0), 0, 0)]
    return [*others, Piece(place, delta + more, max(0, rise + min(0, more)))]


def _net(stage: Stage, micro_batch: int, pieces: Pieces) -> int:
    """Return the bytes that a stage's pieces of a micro-batch leave."""
    return sum(p.delta for of in PASSES for p in pieces.of_stage(stage, of, micro_batch))
