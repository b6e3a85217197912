"""`Schedule`: assigns stages to ranks, and defines the order of actions on each rank.

    (name, pp, chunks, micro-batches) -> Schedule: orders[rank] = (Action | Overlap, ..)

`orders.py` makes the order of one rank. A `Schedule` also has the dependencies of actions between
ranks, and checks that no order waits forever.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from moecore.base.fields import CheckedRecord, Count, FieldErrors, check_arguments
from moecore.base.options.names import ScheduleName
from moecore.parallel.pipeline.layout import PipelineLayout, even_layout, parse_layout
from moecore.parallel.pipeline.orders import (
    DEFERRING,
    RULES,
    Action,
    Item,
    Shape,
    list_actions,
    make_order,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The rank of each virtual stage, and the order of forwards and backwards on each rank."""

    name: str
    pp: int  # pipeline ranks
    num_stages: int  # pp times chunks
    num_micro_batches: int  # of a step
    rank_of: tuple[int, ...]  # the rank of each stage
    orders: tuple[tuple[Item, ...], ...]  # the items of each rank, in order

    def list_dependencies(self, action: Action) -> list[Action]:
        """Return the actions whose results `action` reads. "D" stands for "D" or "B" there."""
        kind, stage, micro_batch = action
        if kind == "F":
            return [Action("F", stage - 1, micro_batch)] if stage else []
        if kind == "W":
            return [Action("D", stage, micro_batch)]
        after = [] if stage == self.num_stages - 1 else [Action("D", stage + 1, micro_batch)]
        return [Action("F", stage, micro_batch), *after]

    def iterate_in_time_order(self) -> Iterator[tuple[int, Item]]:
        """Yield (rank, item) in an order that satisfies dependencies; ends at a deadlock."""
        finished: set[Action] = set()
        pending = [deque(order) for order in self.orders]
        has_progress = True
        while has_progress:
            has_progress = False
            for rank, items in enumerate(pending):
                while items:
                    actions = list_actions(items[0])
                    needs = chain.from_iterable(map(self.list_dependencies, actions))
                    if not finished.issuperset(needs):
                        break
                    yield rank, items.popleft()
                    finished.update(actions)
                    finished.update(a._replace(kind="D") for a in actions if a.kind == "B")
                    has_progress = True

    def check(self) -> None:
        """Raise a ValueError unless every pass runs once, on its stage's rank, without deadlock.

        A rank waits only for inputs; it does not wait until its sends are received.
        """
        kind_of: dict[tuple[int, int], str] = {}
        for rank, order in enumerate(self.orders):
            for kind, stage, micro_batch in chain.from_iterable(map(list_actions, order)):
                if not (0 <= stage < self.num_stages and self.rank_of[stage] == rank):
                    raise ValueError(f"stage ({stage}) must not run on rank {rank}: fix orders")
                key = stage, micro_batch
                kind_of[key] = kind_of.get(key, "") + kind
        for stage in range(self.num_stages):
            for micro_batch in range(self.num_micro_batches):
                kinds = kind_of.pop((stage, micro_batch), "")
                if sorted(kinds) not in (["B", "F"], ["D", "F", "W"]):
                    raise ValueError(
                        f"passes ({kinds!r}) of stage {stage} and micro-batch {micro_batch} must be"
                        " F and B, or F, D and W, once each: fix orders"
                    )
        if kind_of:
            raise ValueError(
                f"passes ({min(kind_of)}) must be of micro-batches of the step: fix them"
            )
        ran = [0] * self.pp
        for rank, _ in self.iterate_in_time_order():
            ran[rank] += 1
        for rank, order in enumerate(self.orders):
            if ran[rank] < len(order):
                raise ValueError(
                    f"orders ({self.name}) must not wait for each other: rank {rank} never runs "
                    f"{order[ran[rank]]}: move it after what it needs"
                )

    def compute_peak_live(
        self, sizes: Sequence[int], deferred_sizes: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Return the peak size of saved activations on each rank.

        In an `Overlap` the forward saves activations before the backward frees activations.

        Args:
            sizes: size of a micro-batch's activations on each stage, in any unit.
            deferred_sizes: size that each stage saves between input gradients (D) and weight
                gradients (W), in the same unit (`WeightGradients.nbytes`); None = `sizes`.
        """
        deferred_sizes = sizes if deferred_sizes is None else deferred_sizes
        peaks = []
        for order in self.orders:
            changes = []
            for kind, stage, _ in chain.from_iterable(map(list_actions, order)):
                first, second = sizes[stage], deferred_sizes[stage]
                changes.append({"F": first, "B": -first, "D": second - first, "W": -second}[kind])
            peaks.append(max(accumulate(changes, initial=0)))
        return tuple(peaks)


def make_schedule(
    name: ScheduleName, *, pp: Count, chunks: Count, num_micro_batches: Count
) -> Schedule:
    """Create the schedule with this name for all ranks.

    | name | chunks | stage s is on rank | order |
    |---|---|---|---|
    | gpipe | any | s % pp | all forwards, then all backwards |
    | 1f1b | 1 | s | forwards and backwards alternate |
    | interleaved | any | s % pp | 1F1B by rounds of at least pp micro-batches |
    | overlapped | any | s % pp | interleaved, with one more warm-up forward and `Overlap`s |
    | zero-bubble | 1 | s | 1F1B with deferred weight gradients (ZB-H1) |
    | zbv | 2 | min(s, 2 pp - 1 - s) | zero bubble with stages in a V |
    | dualpipe-v | 2 | min(s, 2 pp - 1 - s) | zbv with `Overlap`s (DualPipeV) |

    Raises:
        ValueError: if the schedule does not support this number of chunks.

    Source: https://arxiv.org/abs/2104.04473 (interleaved), https://arxiv.org/abs/2401.10241
    (zero bubble), https://arxiv.org/abs/2412.19437 (overlapped pairs).
    """
    check_arguments(make_schedule, locals())
    rule = RULES[name]
    if rule.chunks not in (None, chunks):
        several = "; use 'interleaved' for more" if rule.chunks == 1 else ""
        raise ValueError(
            f"chunks ({chunks}) must be {rule.chunks} for schedule {name!r}: "
            f"pass {rule.chunks}{several}"
        )
    num_stages = pp * chunks
    ranks = [min(s, num_stages - 1 - s) if rule.is_v else s % pp for s in range(num_stages)]
    shapes = (Shape(pp, chunks, rank, num_micro_batches) for rank in range(pp))
    return Schedule(
        name=name,
        pp=pp,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        rank_of=tuple(ranks),
        orders=tuple(tuple(make_order(rule.turns(shape))) for shape in shapes),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig(CheckedRecord):
    """The division of a model into stages over `ParallelConfig.pp` ranks, and the schedule.

    Attributes:
        layout: the layers of each stage, such as "Et*3|(tt|)*29m|L": E embedding, t layer, m
            multi-token prediction module, L head and loss, | border of two stages, () group, *n
            repetition. None = equal numbers of layers in `chunks` stages per rank.
        chunks: stages per rank; None = the number in the layout. Without a layout None = two for
            schedules "zbv" and "dualpipe-v", otherwise one.
        schedule: the order of forwards and backwards, see `make_schedule`.
    """

    layout: str | None = None
    chunks: Count | None = None
    schedule: ScheduleName = "1f1b"

    def _find_field_errors(self) -> FieldErrors:
        if self.layout is not None and self.chunks is not None:
            yield "chunks", f"be None with a layout ({self.layout!r}), which has them: drop one"

    @property
    def defers(self) -> bool:
        """Whether the schedule computes weight gradients (W) after input gradients (D)."""
        return self.schedule in DEFERRING

    def stages(
        self,
        pp: int,
        num_layers: int,
        num_mtp_layers: int = 0,
        bound_layers: frozenset[int] = frozenset(),
    ) -> PipelineLayout:
        """Return the pipeline layout of a model with these numbers of layers over pp ranks.

        No stage can begin with a layer in `bound_layers`, because it reads more than the hidden
        states of the previous layer.

        Raises:
            ValueError: if the layout does not have the model's numbers of layers.
        """
        if self.layout is not None:
            return parse_layout(self.layout, num_layers=num_layers, num_mtp_layers=num_mtp_layers)
        chunks = self.chunks or RULES[self.schedule].chunks or 1
        return even_layout(
            num_layers,
            num_stages=pp * chunks,
            num_mtp_layers=num_mtp_layers,
            bound_layers=bound_layers,
        )
