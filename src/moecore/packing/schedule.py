"""`schedule_documents` assigns the documents of a global batch to groups of cp ranks.

Legend: N documents, cp ranks that share the documents of a micro-batch.

This is dynamic context parallelism. In a round, each rank computes one micro-batch. The ranks form
groups of 1, 2, 4, ... consecutive ranks, and a group splits its documents over its ranks
(`split_batch`). Expert parallelism synchronises all ranks in every round, so a round lasts as long
as its slowest group. The schedule therefore balances the groups of a round (`rounds.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moecore.base.fields import Count, CountOrZero, check_arguments
from moecore.packing.documents import DocumentCost, Lengths, MeasuredCost, as_lengths
from moecore.packing.rounds import Documents, make_rounds

DEFAULT_COST = DocumentCost()


@dataclass(frozen=True, slots=True)
class DocumentGroup:
    """Ranks `first_rank` to `first_rank + cp - 1`, which share the documents of a micro-batch."""

    first_rank: int
    cp: int
    documents: tuple[int, ...]  # indices, longest document first; () = only padding
    tokens: int  # tokens per rank, with the padding to a multiple of 2 * cp
    cost: float  # time of the micro-batch on each rank, without `fixed`
    labels: int  # number of labels in the loss of the group


@dataclass(frozen=True, slots=True)
class DocumentSchedule:
    """The rounds of a global batch: in a round, each rank is in one group with one micro-batch.

    Use `loss="sum"`, which sums gradients over ranks, and divide the loss sum of each micro-batch
    by `num_labels`. The gradient is then the gradient of the mean over all labels.
    """

    rounds: tuple[tuple[DocumentGroup, ...], ...]  # of each round, in the order of their ranks
    num_labels: int  # number of labels in the loss of the global batch
    time: float  # of the step: the sum over rounds of the slowest group's time and `fixed`
    lower_bound: float  # of the time of every schedule of these documents

    def select_rank_groups(self, rank: CountOrZero) -> tuple[DocumentGroup, ...]:
        """Return the group that contains a rank, for each round."""
        check_arguments(DocumentSchedule.select_rank_groups, locals())
        last = self.rounds[0][-1]
        if rank >= (ranks := last.first_rank + last.cp):
            relation = f"must be < the ranks of the schedule ({ranks}): count dp x cp ranks from 0"
            raise ValueError(f"rank ({rank}) {relation}")
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
    """Return a schedule that assigns each document of a global batch to a round and a rank group.

    Each document is in one micro-batch, and each rank has one micro-batch per round. The function
    is deterministic and does not communicate: every rank computes the same schedule. Rounds are
    ordered so that their times first rise and then fall.

    Args:
        lengths: tokens of each document [N].
        ranks: number of dp x cp ranks. Group sizes are powers of two that divide this number.
        max_tokens: the largest number of tokens that one rank has in a micro-batch.
        cost: the cost model of a document, by its length and cp.
        num_labels: number of labels in the loss, per document [N]; None = tokens - 1.

    Raises:
        ValueError: if `lengths` is empty, or a document exceeds `max_tokens` in the largest group.
    """
    check_arguments(schedule_documents, locals())
    lengths_N = as_lengths(lengths)
    if not lengths_N.size:
        raise ValueError("lengths ([]) must have at least one document: pass a global batch")
    labels_N = lengths_N - 1 if num_labels is None else as_lengths(num_labels, "num_labels", 0)
    if len(labels_N) != len(lengths_N):
        relation = f"must be one per document ({len(lengths_N)}): count those of these documents"
        raise ValueError(f"num_labels ({len(labels_N)} numbers) {relation}")
    documents = Documents(lengths_N, ranks, max_tokens, cost)
    labels, rounds = labels_N.tolist(), make_rounds(documents)
    times = [max(block.load for block in blocks) + cost.fixed for blocks in rounds]
    group_rounds = []
    for blocks in (rounds[i] for i in order_by_rise_and_fall(times)):
        groups, first = [], 0
        for block in blocks:
            numbers = tuple(documents.order[i] for i in block.documents)
            total = sum(labels[i] for i in numbers)
            groups.append(DocumentGroup(first, block.cp, numbers, block.tokens, block.load, total))
            first += block.cp
        group_rounds.append(tuple(groups))
    return DocumentSchedule(
        rounds=tuple(group_rounds),
        num_labels=int(labels_N.sum()),
        time=sum(times),
        lower_bound=documents.compute_min_step_time(),
    )


def order_by_rise_and_fall(costs: Sequence[float]) -> list[int]:
    """Return indices that order micro-batches so that costs first rise and then fall.

    The cheapest micro-batches are at both ends, in the warm-up and cool-down of a pipeline.
    Example: [4, 1, 3, 2] gives [1, 2, 0, 3].
    """
    check_arguments(order_by_rise_and_fall, locals())
    rising = sorted(range(len(costs)), key=lambda i: (costs[i], i))
    return rising[0::2] + rising[1::2][::-1]
