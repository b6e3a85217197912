"""The most bytes that each pipeline rank of a run has at once, and of what kinds these are.

    ShardPlan of each pipeline rank              what it holds between steps, by kind
    dry run of few layers -> Pieces, by kind     what a pass of a stage adds and frees
                                                 -> levels in the order of the rank's schedule

A dry run sees what an operation needs while it runs. Not counted: what an allocator cannot use,
NCCL's buffers. Ranks of a pipeline stage hold as much as its first one, or less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from moecore.base.fields import check_arguments
from moecore.base.tables import columns, shown_bytes
from moecore.parallel.pipeline.layout import Stage
from moecore.parallel.pipeline.orders import Action, Item, actions_of
from moecore.parallel.pipeline.schedule import make_schedule
from moecore.planning.gpus import Gpu
from moecore.planning.record import HOST_COPIES, PASSES, RESIDENT, Pass
from moecore.planning.run import TrainingRun, fake_world
from moecore.planning.segments import (
    MIDDLE,
    Pieces,
    QueuePiece,
    like_of,
    memory_pieces_of,
    pieces_of,
    small_of,
    small_step,
    timed_stages,
)
from moecore.planning.stored import (
    SINGLE_STAGE,
    held_bytes,
    held_kinds,
    ranks_of,
    sizes_of,
    state_bytes,
)


class _Pass(NamedTuple):
    """A pass of a stage in a rank's order."""

    stage: int
    of: Pass
    pieces: list[QueuePiece]


class _Level(NamedTuple):
    """Most bytes within a piece, and the bytes of optimizer state on the host at that time."""

    num_bytes: int
    offloaded_state: int
    passed: int  # passes before it
    at: int  # pieces of its pass before it
    piece: QueuePiece


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    """A pipeline rank: what it holds between steps by kind, and its passes."""

    resident: Mapping[str, int]
    passes: Sequence[_Pass]
    end: QueuePiece
    offloaded_state: (
        int  # of the optimizer's state: leaves in the first pass, comes back in the last
    )

    def levels(self) -> Iterator[_Level]:
        """Yield the most bytes within each piece."""
        level, offloaded, last = sum(self.resident.values()), 0, len(self.passes) - 1
        for number, (_, _, pieces) in enumerate(self.passes):
            share = self.offloaded_state // max(1, len(pieces))
            for at, piece in enumerate(pieces):
                offloaded -= share * (number == last)
                yield _Level(level - offloaded + piece.rise, offloaded, number, at, piece)
                level += piece.delta
                offloaded += share * (number == 0)
        yield _Level(level - offloaded + self.end.rise, offloaded, last + 1, 0, self.end)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """What one rank holds when it holds most, in bytes by kind.

    Attributes:
        pp_rank: pipeline rank.
        stages: of this rank, in the letters of a layout.
        device: in the GPU's memory: what it stores, and what the step has allocated, "activations"
            of forwards by part of the model and the rest by pass.
        host: the most in pinned host memory: activations, and all state that is away in a step.
        in_flight: micro-batches of its stages that wait for their backward then.
    """

    pp_rank: int
    stages: tuple[str, ...]
    device: Mapping[str, int]
    host: Mapping[str, int]
    in_flight: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """In the GPU's memory, of all kinds: that of `plan_peak`."""
        return sum(self.device.values())

    @property
    def activations(self) -> int:
        """What forwards have left for their backward."""
        return sum(n for kind, n in self.device.items() if kind.startswith("activations"))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """What all pipeline ranks of a run hold when each holds most."""

    run: TrainingRun
    ranks: tuple[RankMemory, ...]

    @property
    def largest(self) -> RankMemory:
        """The rank that holds most."""
        return max(self.ranks, key=lambda rank: rank.num_bytes)

    def pinned_bytes(self, gpu: Gpu) -> int:
        """Return the host memory that a server pins whose ranks all hold as much as the largest."""
        ranks = min(gpu.server, self.run.num_gpus)
        return ranks * max(sum(rank.host.values()) for rank in self.ranks)

    def table(self) -> str:
        """Return a row per kind and a column per pipeline rank."""
        kinds = dict.fromkeys(kind for rank in self.ranks for kind in rank.device)
        hosts = dict.fromkeys(kind for rank in self.ranks for kind in rank.host)
        lines = [("pp rank", *(str(rank.pp_rank) for rank in self.ranks))]
        lines += [("stages", *(" ".join(rank.stages) for rank in self.ranks))]
        in_flight = (" ".join(map(str, rank.in_flight)) for rank in self.ranks)
        lines += [("in flight", *in_flight)]
        for kind in kinds:
            lines.append((kind, *(shown_bytes(rank.device.get(kind, 0)) for rank in self.ranks)))
        lines.append(("at once", *(shown_bytes(rank.num_bytes) for rank in self.ranks)))
        for kind in hosts:
            sizes = (shown_bytes(rank.host.get(kind, 0)) for rank in self.ranks)
            lines.append((f"host: {kind}", *sizes))
        return "\n".join(columns(lines))


def plan_peak(run: TrainingRun) -> tuple[int, ...]:
    """Return the most bytes of each pipeline rank, as `torch.cuda.max_memory_allocated` counts.

    And buffers of dispatcher "nvlink", which that does not count.

    Raises:
        ValueError, NotImplementedError: as `parallelize_moe`, for what does not fit the model.
    """
    check_arguments(plan_peak, locals())
    return tuple(max(level.num_bytes for level in rank.levels()) for rank in _ranks(run))


def plan_memory(run: TrainingRun) -> MemoryPlan:
    """Return what each pipeline rank holds when it holds most, by kind. No GPU, no communication.

    Raises:
        ValueError, NotImplementedError: as `parallelize_moe`, for what does not fit the model.
    """
    check_arguments(plan_memory, locals())
    with fake_world(1):
        pass  # refused inside of another one, whatever was found before
    stages, rank_of, pieces = timed_stages(run), ranks_of(run), pieces_of(run)
    ranks = []
    for pp_rank, rank in enumerate(_ranks(run)):
        rank_stages = [s for s in stages if rank_of[s.index] == pp_rank]
        peak = max(rank.levels(), key=lambda level: level.num_bytes)
        device, in_flight = Counter(rank.resident), Counter[int]()
        for number, (stage, of, passed) in enumerate(rank.passes[: peak.passed + 1]):
            is_last = number == peak.passed
            pieces_before = passed[: peak.at] if is_last else passed
            for piece in pieces_before:
                device.update(piece.kinds)
            in_flight[stage] += 1 if of == "F" else -(not is_last)
        device.update(peak.piece.rise_kinds)
        device["optimizer state"] -= peak.offloaded_state
        device["other"] += device.pop(RESIDENT, 0)
        device["other"] += peak.num_bytes - sum(device.values())
        host = {"activations": _host_peak(rank, pieces), "optimizer state": rank.offloaded_state}
        ranks.append(
            RankMemory(
                pp_rank=pp_rank,
                stages=("all",) if run.pipeline is None else tuple(s.letters for s in rank_stages),
                device=_positive(device, rank.resident.keys() - {"other"}),
                host={kind: n for kind, n in host.items() if n},
                in_flight=tuple(in_flight[s.index] for s in rank_stages),
            )
        )
    return MemoryPlan(run=run, ranks=tuple(ranks))


def _positive(sizes: Mapping[str, int], resident_kinds: Collection[str]) -> dict[str, int]:
    """Return bytes by kind with the same sum, each of them positive."""
    # A tensor that is allocated once per step may be freed in a layer that stands for several
    # layers, so that its kind becomes negative. The level of these pieces counts these bytes as
    # freed: they are taken from the largest kinds, and from stored ones last.
    positive = {kind: n for kind, n in sizes.items() if n > 0}
    excess = sum(positive.values()) - sum(sizes.values())
    for kind in sorted(positive, key=lambda kind: (kind in resident_kinds, -positive[kind])):
        deduction = min(excess, positive[kind])
        positive[kind], excess = positive[kind] - deduction, excess - deduction
    return {kind: n for kind, n in positive.items() if n}


def _host_peak(rank: _Rank, pieces: Pieces) -> int:
    """Return the most bytes that forwards have copied to the host for backwards to come."""
    level, peak, copies = 0, 0, dict[int, int]()
    for stage, of, passed in rank.passes:
        if of == "F":
            works = (pieces.queued[i].work for piece in passed for i in piece.place)
            copies[stage] = sum(work.num_bytes for work in works if work.name == HOST_COPIES[0])
        level += copies[stage] if of == "F" else -copies[stage]
        peak = max(peak, level)
    return peak


def until_steady(run: TrainingRun) -> int:
    """Return a number of micro-batches with which every rank holds as much as with the run's."""
    # The middle rounds of a pipeline are identical. A run without stages
    # has rounds of one micro-batch. Schedule "gpipe" holds the activations of all micro-batches.
    number, round_ = run.num_micro_batches, run.resolved.pp
    if run.pipeline is not None and run.pipeline.schedule == "gpipe":
        return number
    return min(number, 4 * round_ + number % round_)


def _ranks(run: TrainingRun) -> Iterator[_Rank]:
    """Yield the pipeline ranks of a run."""
    pieces, step = memory_pieces_of(run), small_step(run)
    beside = pieces.resident_bytes - max(held_bytes(small_of(run)))  # of what no plan counts
    beside -= step.pages  # which have a part for each layer
    per_byte = run.optimizer.offload_fraction * state_bytes(run.optimizer, run.dtype)
    for size, passes, pages in zip(sizes_of(run), _passes(run, pieces), _pages(run), strict=True):
        resident = held_kinds(run, size)
        resident |= {"other": beside, "pages": pages, "exchange buffers": step.buffers}
        offloaded_state = round(per_byte / run.dtype.itemsize * size.gradients)
        yield _Rank(
            resident=resident, passes=passes, end=pieces.end, offloaded_state=offloaded_state
        )


def _pages(run: TrainingRun) -> Iterator[int]:
    """Yield the bytes of each pipeline rank's pages: as many for each run of an MoE layer."""
    model = run.planned_model
    bytes_per_run = small_step(run).pages / max(1, small_of(run).planned_model.num_moe_runs)
    stages, rank_of = timed_stages(run), ranks_of(run)
    for rank in range(run.resolved.pp):
        rank_stages = [stage for stage, of in zip(stages, rank_of, strict=True) if of == rank]
        layers = sum(i not in model.dense for stage in rank_stages for i in stage.layers)
        yield round(
            bytes_per_run * (layers + model.mtp_runs * sum(len(stage.mtp) for stage in rank_stages))
        )


def _passes(run: TrainingRun, pieces: Pieces) -> Iterator[list[_Pass]]:
    """Yield each pipeline rank's passes, in its order."""
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
    passes: dict[str, tuple[Pass, ...]] = {"F": ("F",), "B": ("B",), "W": ("B",)}  # D and W are B
    for order, size in zip(orders, sizes_of(run), strict=True):
        actions = [action for item in order for action in actions_of(item)]
        rank_stages = {action.stage for action in actions}
        ends = {i for i in rank_stages if stages[i].embedding or stages[i].loss} or rank_stages
        share = (size.accumulated / sums if sums else 1 / pp) / len(ends)
        yield [
            _Pass(stage, of, _of_stage(stages[stage], of, like[i], pieces, share * (stage in ends)))
            for kind, stage, i in actions
            for of in passes.get(kind, ())
        ]


def _of_stage(
    stage: Stage, of: Pass, micro_batch: int, pieces: Pieces, share: float
) -> list[QueuePiece]:
    """Return the pieces of a stage's pass, and what it frees or keeps at the end of a backward."""
    stage_pieces = pieces.of_stage(stage, of, micro_batch)
    if of == "F" or pieces.num_micro_batches < MIDDLE:
        return stage_pieces
    # In the cut step, what a backward frees or keeps at its end is in the embedding's piece, for
    # all layers. A micro-batch between the first and the last keeps nothing. These keep what their
    # pieces have more than its, and of the ends' surplus the stage's share of gradient sums.
    layers = replace(stage, embedding=False, loss=False)
    ends = replace(SINGLE_STAGE, layers=(), mtp=())
    net_bytes = sum(
        part_share * (_net(part, micro_batch, pieces) - _net(part, MIDDLE // 2, pieces))
        for part, part_share in ((layers, 1.0), (ends, share))
    )
    surplus = round(net_bytes) - _net(stage, micro_batch, pieces)
    *first_pieces, last = stage_pieces or [QueuePiece(range(0), 0, 0, {}, {})]
    rise, kinds = max(0, last.rise + min(0, surplus)), dict(last.kinds)
    kinds["backward"] = kinds.get("backward", 0) + surplus
    return [*first_pieces, last._replace(delta=last.delta + surplus, rise=rise, kinds=kinds)]


def _net(stage: Stage, micro_batch: int, pieces: Pieces) -> int:
    """Return the bytes that a stage's pieces of a micro-batch leave."""
    return sum(p.delta for of in PASSES for p in pieces.of_stage(stage, of, micro_batch))
