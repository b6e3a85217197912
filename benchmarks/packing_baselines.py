"""Baselines of `schedule_documents`: one cp for all, and Megatron-Core's scheduler.

Legend: M tokens per rank at most.

All have the same costs, and simulated times have the same unit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from moecore.packing import DocumentCost, MeasuredCost, pack_lengths, padded_lengths
from moecore.packing.documents import Integers

Cost = DocumentCost | MeasuredCost
Draw = Callable[[np.random.Generator, int], np.ndarray]

NEAR = DocumentCost()  # 200 GB/s between ranks
FAR = DocumentCost(exchange=3000.0)  # 50 GB/s
LONGEST = 128 * 1024
DISTRIBUTIONS: dict[str, Draw] = {
    "lognormal (7, 1.5)": lambda draw, n: draw.lognormal(7.0, 1.5, n),
    "lognormal (7.5, 1)": lambda draw, n: draw.lognormal(7.5, 1.0, n),
    "5% of 16K to 128K": lambda draw, n: np.where(
        draw.random(n) < 0.05, draw.uniform(16384, LONGEST, n), draw.lognormal(6.5, 0.8, n)
    ),
    "20% about 24K": lambda draw, n: np.where(draw.random(n) < 0.2, draw.normal(24e3, 3e3, n), 800),
    "uniform to 16K": lambda draw, n: draw.uniform(64, 16384, n),
}


def draw_lengths(distribution: str, number: int, seed: int = 0) -> Integers:
    """Return document lengths, int64, 16 tokens to 128K."""
    drawn = DISTRIBUTIONS[distribution](np.random.default_rng(seed), number)
    return np.clip(drawn, 16, LONGEST).astype(np.int64)


def compute_static_time(
    lengths: Integers, *, ranks: int, max_tokens: int, cost: Cost, seed: int | None
) -> float:
    """Return the time of a step with the fewest ranks per document that fit the longest.

    Documents are packed to bins of cp * M tokens, one per group of cp ranks and micro-batch. All
    groups synchronise in every micro-batch, because experts exchange tokens there.

    Args:
        lengths: of the documents.
        ranks: dp x cp.
        max_tokens: M.
        cost: of a document.
        seed: for bins in random order, like a shuffled dataset; None = sorted by cost, the best
            order.
    """
    cp = count_ranks(int(lengths.max()), ranks, max_tokens)
    padded = padded_lengths(lengths, cp)
    costs = cost.estimate(lengths, cp)
    bins = np.array([costs[bin_].sum() for bin_ in pack_lengths(padded, cp * max_tokens)])
    bins = np.sort(bins) if seed is None else np.random.default_rng(seed).permutation(bins)
    groups = ranks // cp
    rounds = [bins[i : i + groups] for i in range(0, len(bins), groups)]
    return float(sum(r.max() for r in rounds)) + cost.fixed * len(rounds)


def count_ranks(length: int, ranks: int, max_tokens: int) -> int:
    """Return the smallest power of two of ranks that a document fits."""
    cp = 1
    while padded_lengths([length], cp)[0] > cp * max_tokens:
        cp *= 2
    assert ranks % cp == 0
    return cp


@dataclass
class Column:
    """A group of ranks and the documents that it computes in sequence.

    Attributes:
        cp: number of ranks.
        documents: each is a separate forward.
        time: of all documents.
    """

    cp: int
    documents: list[int] = field(default_factory=list)
    time: float = 0.0


def compute_balanced_time(
    lengths: Integers, *, ranks: int, max_tokens: int, cost: Cost
) -> tuple[float, list[list[Column]]]:
    """Return the time and the rounds of a BalancedCPScheduler, as described by its authors.

    A document is a separate forward, so M limits a document, not a micro-batch. Ranks synchronise
    only at the end of a round, with any number of forwards: without expert parallelism.

    Source: "Megatron CP, HCP and DCP" (2026): bucket by ranks, largest first; fill the lighter
    column; stop when even; trim; double the smallest group until no rank is idle.
    """
    order = sorted(range(len(lengths)), key=lambda i: -int(lengths[i]))
    needs = [count_ranks(int(length), ranks, max_tokens) for length in lengths]
    costs = {cp: cost.estimate(lengths, cp) + cost.fixed for cp in set(_list_powers(ranks))}
    rounds, left = [], order
    while left:
        columns, left = _make_round(left, needs, costs, ranks)
        rounds.append(columns)
    return sum(max(c.time for c in columns) for columns in rounds), rounds


def _list_powers(ranks: int) -> list[int]:
    return [1 << i for i in range((ranks & -ranks).bit_length())]


def _make_round(
    left: list[int], needs: list[int], costs: dict[int, np.ndarray], ranks: int
) -> tuple[list[Column], list[int]]:
    """Return the columns of a round and the documents left over.

    If no rank is idle, documents that would exceed the tallest column are left over at once, where
    the description trims them afterwards: no round gets longer by that.
    """
    columns: list[Column] = []
    rest: list[int] = []
    free, tallest = ranks, 0.0
    for i in left:
        cp = needs[i]
        if free >= cp:  # idle ranks are the lightest column
            free -= cp
            column = Column(cp)
            columns.append(column)
        else:
            same = [c for c in columns if c.cp == cp]
            lightest = min(same, key=lambda c: c.time, default=None)
            if lightest is None or lightest.time + costs[cp][i] > tallest:
                rest.append(i)
                continue
            column = lightest
        column.documents.append(i)
        column.time += float(costs[cp][i])
        tallest = max(tallest, column.time)
    _fill_idle(columns, free, costs, max(costs))
    return columns, rest


def _fill_idle(columns: list[Column], free: int, costs: dict[int, np.ndarray], most: int) -> None:
    """Double the smallest group until no rank is idle."""
    while free:
        small = [c for c in columns if c.cp <= free and c.cp < most]
        if not small:
            return
        column = min(small, key=lambda c: (c.cp, -c.time))
        free -= column.cp
        column.cp *= 2
        column.time = float(sum(costs[column.cp][i] for i in column.documents))
