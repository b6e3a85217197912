"""Rounds of micro-batches, one by one, of the documents that are left.

Legend: N documents, longest first; cp ranks of a block, which becomes a group of `schedule.py`.

A round has a limit of time. The longest documents that are left each open a block of the fewest
ranks on which they stay below the limit, until all ranks are taken. Then the block with the least
work takes the longest document that fits its time and its memory, until none fits any block. So
documents of like length meet, and short ones fill the gaps between them. Ranks for which no
document is left join a block.

Each round is tried with several limits, and with blocks of at least 1, 2, 4, ... ranks: a wide
block has finer steps. The first trial that is busy enough is taken, else the busiest: that by which
the least time of the whole step shrinks most, per time of the round.

Source: the task is that of Dynamic-CP in Megatron-Core (arXiv:2603.07685).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from moecore.packing.cost import Cost, Costs
from moecore.packing.documents import Integers
from moecore.packing.split import padded_lengths

ENOUGH = 0.98  # busy, of the time of a round
GROWTH = 1.1  # of one limit over the next
ROUNDING = 1e-9  # of sums of costs, relative


@dataclass(slots=True)
class RankBlock:
    """Documents that the same ranks share in a round."""

    cp: int
    documents: list[int] = field(default_factory=list)  # longest first
    load: float = 0.0
    tokens: int = 0


Blocks = list[RankBlock]


class Documents:
    """The documents of a global batch, longest first, and their costs on 1, 2, 4, ... ranks."""

    def __init__(self, lengths_N: Integers, ranks: int, max_tokens: int, cost: Cost) -> None:
        self.ranks, self.max_tokens, self.fixed = ranks, max_tokens, cost.fixed
        order_N = np.argsort(-lengths_N, kind="stable")
        self.order: list[int] = order_N.tolist()  # the caller's numbers
        lengths_N = lengths_N[order_N]
        max_cp = min(ranks & -ranks, cost.most_cp or ranks)
        self.cps = [1 << i for i in range(max_cp.bit_length())]
        tokens = {cp: padded_lengths(lengths_N, cp) // cp for cp in self.cps}
        if tokens[max_cp][0] > max_tokens:
            raise ValueError(
                f"max_tokens ({max_tokens}) must be >= {tokens[max_cp][0]}, what each of {max_cp} "
                f"ranks holds of document {self.order[0]} ({lengths_N[0]} tokens): raise it, use "
                "more ranks, or leave the document out"
            )
        costs = {cp: cost.of(lengths_N, cp) for cp in self.cps}
        self._rank_costs = np.stack(
            [np.where(tokens[cp] <= max_tokens, costs[cp], np.inf) for cp in self.cps]
        )  # cost on each rank; inf = does not fit
        self.min_costs: list[float] = self._rank_costs.min(axis=0).tolist()
        work = self._work_below(np.inf)
        self.work: list[float] = work.tolist()  # of each, over its ranks, where it costs least
        self.all_work, self.all_tokens = float(work.sum()), int(lengths_N.sum())
        # By cp, of each document on each of cp ranks.
        self.cost = {cp: costs[cp].tolist() for cp in self.cps}
        self.tokens = {cp: tokens[cp].tolist() for cp in self.cps}
        self.lengths: list[int] = lengths_N.tolist()
        self._cost_up = {cp: (-costs[cp]).tolist() for cp in self.cps}
        self._tokens_up = {cp: (-tokens[cp]).tolist() for cp in self.cps}

    def __len__(self) -> int:
        return len(self.work)

    def fewest_rounds(self, tokens: int) -> int:
        """Return how many rounds hold so many tokens."""
        return -(-tokens // (self.ranks * self.max_tokens))

    def bound(self, longest: int, work: float, tokens: int) -> float:
        """Return a time below which the documents that are left cannot be done."""
        if longest == len(self):
            return 0.0
        fixed = self.fewest_rounds(tokens) * self.fixed
        return max(work / self.ranks, self.min_costs[longest]) + fixed

    def lower_bound(self) -> float:
        """Return a time that no schedule is below."""
        fixed = self.fewest_rounds(self.all_tokens) * self.fixed
        # In a step of time t no document costs its ranks more than t, so each is on enough ranks
        # for that, and all of their work fits into t on all ranks.
        low, high = float(self._rank_costs.min(axis=0).max()), float(self._rank_costs[-1].sum())
        for _ in range(50):
            middle = (low + high) / 2
            if self._work_below(middle).sum() > middle * self.ranks:
                low = middle
            else:
                high = middle
        return low + fixed

    def _work_below(self, time: float) -> Costs:
        """Return the least work of each document that costs each of its ranks at most a time."""
        ranks_1 = np.array(self.cps)[:, None]
        costs = np.where(self._rank_costs <= time, self._rank_costs * ranks_1, np.inf)
        min_costs: Costs = costs.min(axis=0)
        return min_costs

    def sums(self, indices: list[int]) -> tuple[float, int]:
        """Return the work and the tokens of some documents."""
        return sum(self.work[i] for i in indices), sum(self.lengths[i] for i in indices)

    def loads(self, index: int) -> list[float]:
        """Return the cost of a document on each number of ranks that can hold it."""
        fitting = (cp for cp in self.cps if self.tokens[cp][index] <= self.max_tokens)
        return [self.cost[cp][index] for cp in fitting]

    def first_fitting(self, cp: int, load: float, tokens: int) -> int:
        """Return the longest document of at most that cost and that many tokens on cp ranks."""
        return max(bisect_left(self._cost_up[cp], -load), bisect_left(self._tokens_up[cp], -tokens))


class RemainingDocuments:
    """The documents that are left: a chain past those that are gone, one past those on trial."""

    def __init__(self, count: int) -> None:
        self._next = list(range(count + 1))
        self.trial: dict[int, int] = {}

    def first(self, index: int) -> int:
        """Return the longest that is left from an index on; N when none is."""
        chain, trial = self._next, self.trial
        passed = []
        while True:  # both chains are shortened where they are walked
            end = index
            while chain[end] != end:
                end = chain[end]
            while chain[index] != end:
                chain[index], index = end, chain[index]
            if end not in trial:
                break
            passed.append(end)
            index = trial[end]
        for before in passed:
            trial[before] = end
        return end

    def take(self, index: int) -> None:
        """Take a document on trial."""
        self.trial[index] = index + 1

    def keep(self) -> None:
        """Make final what is on trial."""
        for index in self.trial:
            self._next[index] = index + 1
        self.trial.clear()


def make_rounds(documents: Documents) -> list[Blocks]:
    """Return the rounds: blocks, those of most ranks first, that fill all ranks."""
    search = _Search(documents)
    rounds = []
    while search.remaining.first(0) < len(documents):
        rounds.append(sorted(search.next_round(), key=lambda block: -block.cp))
    return rounds


class _Search:
    """Rounds one after the other, and what is left after them."""

    def __init__(self, documents: Documents) -> None:
        self.documents, self.remaining = documents, RemainingDocuments(len(documents))
        self._work, self._tokens = documents.all_work, documents.all_tokens

    def next_round(self) -> Blocks:
        """Return the round with the least idle time, and take its documents."""
        best: tuple[float, Blocks] = (-np.inf, [])
        bound = self._bound(0.0, 0)
        for blocks in self._trials():
            work, tokens = self.documents.sums([i for block in blocks for i in block.documents])
            time = max(block.load for block in blocks) + self.documents.fixed
            share = (bound - self._bound(work, tokens)) / time
            self.remaining.trial.clear()
            if share > best[0]:
                best = (share, blocks)
            if share > ENOUGH:
                break
        self._take([i for block in best[1] for i in block.documents])
        return best[1]

    def _trials(self) -> Iterator[Blocks]:
        """Yield blocks, those of few ranks and high limits first, which exchange least.

        Limits above what the last one needed would give the same blocks.
        """
        limits = self._limits()
        for fewest in self.documents.cps:
            min_limit = np.inf
            for limit in limits:
                if limit <= min_limit:
                    blocks, min_limit = _fill(self.documents, self.remaining, limit, fewest)
                    yield blocks

    def _take(self, indices: list[int]) -> None:
        for index in indices:
            self.remaining.take(index)
        self.remaining.keep()
        work, tokens = self.documents.sums(indices)
        self._work, self._tokens = self._work - work, self._tokens - tokens

    def _bound(self, work: float, tokens: int) -> float:
        """Return the least time of what is left, when that much of it has just been taken."""
        return self.documents.bound(
            self.remaining.first(0), self._work - work, self._tokens - tokens
        )

    def _limits(self) -> list[float]:
        """Return limits of time, from that of the longest document on few ranks to that on many."""
        documents, longest = self.documents, self.remaining.first(0)
        mean = self._work / (documents.ranks * documents.fewest_rounds(max(self._tokens, 1)))
        loads = documents.loads(longest)
        # They reach the mean time of the fewest rounds for what is left, and a quarter of it.
        low, high = max(mean / 4, min(loads)), max(*loads, mean) * 1.01
        limits = [high]
        while limits[-1] > low * GROWTH:
            limits.append(limits[-1] / GROWTH)
        return [*limits, low * 1.0001]


def _fill(
    documents: Documents, remaining: RemainingDocuments, limit: float, fewest: int
) -> tuple[Blocks, float]:
    """Return the blocks of a round below a limit, and the least limit that would give them.

    Their documents are taken.
    """
    limit *= 1 + ROUNDING
    blocks, min_limit = _open_blocks(documents, remaining, limit, fewest)
    heap = [(block.load, i) for i, block in enumerate(blocks)]
    heapq.heapify(heap)
    while heap:
        load, i = heapq.heappop(heap)
        block = blocks[i]
        room = documents.max_tokens - block.tokens
        index = remaining.first(documents.first_fitting(block.cp, limit - load, room))
        if index < len(documents):
            remaining.take(index)
            _add(documents, block, index)
            heapq.heappush(heap, (block.load, i))
    min_limit = max([min_limit, *(block.load for block in blocks)]) * (1 + ROUNDING)
    _join_idle(documents, blocks)
    return blocks, min_limit


def _open_blocks(
    documents: Documents, remaining: RemainingDocuments, limit: float, fewest: int
) -> tuple[Blocks, float]:
    """Return a block for each of the longest documents, of the fewest ranks below the limit.

    Returns with them the least limit that lets them all in: each must cost at most the limit on
    the most ranks that are free when its block is opened.
    """
    blocks: Blocks = []
    min_limit = 0.0
    free = documents.ranks
    while free:
        widest = min(documents.cps[-1], 1 << (free.bit_length() - 1))
        index = remaining.first(documents.first_fitting(widest, limit, documents.max_tokens))
        if index == len(documents):
            break
        cp = next(
            cp
            for cp in documents.cps
            if min(fewest, widest) <= cp
            and documents.cost[cp][index] <= limit
            and documents.tokens[cp][index] <= documents.max_tokens
        )
        min_limit = max(min_limit, documents.cost[widest][index])
        remaining.take(index)
        blocks.append(RankBlock(cp))
        _add(documents, blocks[-1], index)
        free -= cp
    return blocks, min_limit


def _add(documents: Documents, block: RankBlock, index: int) -> None:
    block.documents.append(index)
    block.load += documents.cost[block.cp][index]
    block.tokens += documents.tokens[block.cp][index]


def _join_idle(documents: Documents, blocks: Blocks) -> None:
    """Give ranks without a document to the slowest block that can double, or to empty blocks."""
    free = documents.ranks - sum(block.cp for block in blocks)
    max_cp = documents.cps[-1]
    while free:
        doubling = [block for block in blocks if block.cp <= free and block.cp < max_cp]
        if not doubling:
            blocks.extend(RankBlock(max_cp) for _ in range(free // max_cp))
            return
        block = max(doubling, key=lambda block: block.load)
        free -= block.cp
        indices, block.cp = block.documents, 2 * block.cp
        block.documents, block.load, block.tokens = [], 0.0, 0
        for index in indices:
            _add(documents, block, index)
