"""Dynamic context parallelism: which ranks share which documents of a global batch, and when.

Legend: N documents, cp ranks that share the documents of a micro-batch.

A round is one micro-batch on every rank. In it the ranks form groups of 1, 2, 4, ... neighbours,
and the documents of a group are cut over its ranks (`split.py`). Ranks meet in every round, because
experts on other ranks need the same number of forwards everywhere, so a round takes as long as
its slowest group. Rounds may take different times, but the groups of one round should not.

`rounds.py` makes the rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moecore.base.fields import Count, CountOrZero, check_arguments
from moecore.packing.cost import DocumentCost, MeasuredCost
from moecore.packing.documents import Lengths, as_lengths
from moecore.packing.rounds import Blocks, Documents, make_rounds

DEFAULT_COST = DocumentCost()


@dataclass(frozen=True, slots=True)
class DocumentGroup:
    """Neighbouring ranks that share the documents of one micro-batch.

    Attributes:
        first_rank: ranks `first_rank` .. `first_rank + cp - 1`.
        cp: number of ranks.
        documents: their numbers, longest first; none where documents have run out, and the
            micro-batch is all padding.
        tokens: that each rank holds, padding to 2 * cp included.
        cost: of the micro-batch on each rank, without `fixed`.
        labels: that count in the whole group.
    """

    first_rank: int
    cp: int
    documents: tuple[int, ...]
    tokens: int
    cost: float
    labels: int


@dataclass(frozen=True, slots=True)
class DocumentSchedule:
    """The rounds of a global batch.

    A gradient is that of the mean over all labels when the loss of a micro-batch is the sum over
    its labels divided by `num_labels`, and gradients are summed over ranks: `loss="sum"`.

    Attributes:
        rounds: groups by rank, for each micro-batch.
        num_labels: that count in the global batch.
        time: of the step, the sum over rounds of the slowest group and `fixed`.
        lower_bound: of any schedule's time: the work of all documents, each on as many ranks as it
            costs least, spread evenly; or the longest document alone.
    """

    rounds: tuple[tuple[DocumentGroup, ...], ...]
    num_labels: int
    time: float
    lower_bound: float

    def of_rank(self, rank: CountOrZero) -> tuple[DocumentGroup, ...]:
        """Return the group of a rank in each round."""
        check_arguments(DocumentSchedule.of_rank, locals())
        last = self.rounds[0][-1]
        if rank >= last.first_rank + last.cp:
            raise ValueError(
                f"rank ({rank}) must be < the ranks of the schedule ({last.first_rank + last.cp}): "
                "count dp x cp ranks from 0"
            )
        return tuple(
            next(g for g in groups if g.first_rank <= rank < g.first_rank + g.cp)
            for groups in self.rounds
        )


def schedule_documents(
    lengths: Lengths,
    *,
    ranks: Count,
    max_tokens: Count,
    cost: DocumentCost | MeasuredCost = DEFAULT_COST,
    num_labels: Lengths | None = None,
) -> DocumentSchedule:
    """Return which ranks compute which documents of a global batch in which round.

    Every document is in one micro-batch, every rank has one micro-batch per round, and none holds
    more than `max_tokens`. Deterministic, so every rank may make it on its own; no communication.
    Rounds go from little work to much and back (`serpentine`).

    Args:
        lengths: tokens of each document [N].
        ranks: dp x cp ranks. Groups have 1, 2, 4, ... ranks, up to the largest power of two that
            divides it.
        max_tokens: of one rank's micro-batch, all its documents together.
        cost: of a document, by its length and cp.
        num_labels: that count of each document [N]; None = all tokens but the last.

    Raises:
        ValueError: for no documents, or one that all ranks of the largest group cannot hold.
    """
    check_arguments(schedule_documents, locals())
    lengths_N = as_lengths(lengths)
    if not lengths_N.size:
        raise ValueError("lengths ([]) must have at least one document: pass a global batch")
    labels_N = lengths_N - 1 if num_labels is None else as_lengths(num_labels, "num_labels", 0)
    if len(labels_N) != len(lengths_N):
        raise ValueError(
            f"num_labels ({len(labels_N)} numbers) must be one per document ({len(lengths_N)}): "
            "count those of the same documents"
        )
    documents = Documents(lengths_N, ranks, max_tokens, cost)
    labels = labels_N.tolist()
    rounds = make_rounds(documents)
    times = [max(block.load for block in blocks) + cost.fixed for blocks in rounds]
    return DocumentSchedule(
        rounds=tuple(_groups(rounds[i], documents.order, labels) for i in serpentine(times)),
        num_labels=int(labels_N.sum()),
        time=sum(times),
        lower_bound=documents.lower_bound(),
    )


def serpentine(costs: Sequence[float]) -> list[int]:
    """Return an order of micro-batches in which costs rise to the largest, and fall.

    Neighbours then have like costs, and the ends, where a pipeline is not full, the least. Costs
    are finite numbers; for attention, sums of squared lengths. [4, 1, 3, 2] gives [1, 2, 0, 3].
    """
    check_arguments(serpentine, locals())
    rising = sorted(range(len(costs)), key=lambda i: (costs[i], i))
    return rising[0::2] + rising[1::2][::-1]


def _groups(blocks: Blocks, order: list[int], labels: list[int]) -> tuple[DocumentGroup, ...]:
    groups, first = [], 0
    for block in blocks:
        numbers = tuple(order[i] for i in block.documents)
        total = sum(labels[i] for i in numbers)
        groups.append(DocumentGroup(first, block.cp, numbers, block.tokens, block.load, total))
        first += block.cp
    return tuple(groups)
