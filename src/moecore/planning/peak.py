"""The most bytes that each pipeline rank of a run has at once: `plan_peak`.

    Pieces of few layers -> levels of all layers, in the order of the rank's schedule -> the highest

What an operation needs while it runs is in it, because a dry run sees it; gradients are there when
activations are gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moecore.base.fields import check_arguments
from moecore.parallel.pipeline.layout import Stage
from moecore.parallel.pipeline.orders import Action, Item, actions_of
from moecore.parallel.pipeline.schedule import make_schedule
from moecore.planning.memory import (
    WHOLE,
    buffer_bytes,
    held_bytes,
    sizes_of,
    state_bytes,
    until_steady,
)
from moecore.planning.pieces import MIDDLE, PASSES, Pass, Piece, Pieces
from moecore.planning.run import TrainingRun
from moecore.planning.time_plan import like_of, pages_of, pieces_of, small_of, timed_stages


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
