"""`make_rounds` assigns documents to rounds of micro-batches, one round at a time.

Legend: N documents, longest first; cp ranks of a block. A block becomes a `DocumentGroup`.

A trial of a round has a time limit and has three phases:

    1. Each of the longest remaining documents opens a block, until all ranks are used. The block
       has the fewest ranks on which the document's time is below the limit.
    2. The block with the least load takes the longest remaining document that fits its time and its
       tokens, until no document fits any block.
    3. Ranks without a document are added to blocks.

The search tries several limits, and blocks of at least 1, 2, 4, ... ranks. A trial's score is the
decrease of the lower bound of the remaining step time, divided by the round's time. The search
takes the first trial with a score above `GOOD_SCORE`, otherwise the trial with the highest score.

Source: Dynamic-CP in Megatron-Core solves the same problem (arXiv:2603.07685).
"""

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from moecore.packing.collate import padded_lengths
from moecore.packing.documents import Cost, Costs, Integers

GOOD_SCORE = 0.98  # score of a trial at which the search of a round ends
GROWTH = 1.1  # ratio of one limit to the next lower limit
ROUNDING = 1e-9  # relative error of sums of costs


@dataclass(slots=True)
class RankBlock:
    """A group of `cp` ranks in one round: indices of its documents, time and tokens per rank."""

    cp: int
    documents: list[int] = field(default_factory=list)  # longest first
    load: float = 0.0
    tokens: int = 0


Blocks = list[RankBlock]


class Documents:
    """The documents of a global batch, longest first, and the time of each on 1, 2, 4, ... ranks.

    Raises a ValueError if a document exceeds `max_tokens` per rank on the largest number of ranks.
    """

    def __init__(self, lengths_N: Integers, ranks: int, max_tokens: int, cost: Cost) -> None:
        self.ranks, self.max_tokens, self.fixed = ranks, max_tokens, cost.fixed
        order_N = np.argsort(-lengths_N, kind="stable")
        self.order: list[int] = order_N.tolist()  # the caller's document indices
        lengths_N = lengths_N[order_N]
        max_cp = min(ranks & -ranks, cost.max_cp or ranks)
        self.cps = [1 << i for i in range(max_cp.bit_length())]
        tokens = {cp: padded_lengths(lengths_N, cp) // cp for cp in self.cps}
        if tokens[max_cp][0] > max_tokens:
            raise ValueError(
                f"max_tokens ({max_tokens}) must be >= {tokens[max_cp][0]}, what each of {max_cp} "
                f"ranks holds of document {self.order[0]} ({lengths_N[0]} tokens): raise it, use "
                "more ranks, or leave the document out"
            )
        costs = {cp: cost.estimate(lengths_N, cp) for cp in self.cps}
        self._rank_costs = np.stack(
            [np.where(tokens[cp] <= max_tokens, costs[cp], np.inf) for cp in self.cps]
        )  # time on each rank; inf = exceeds max_tokens
        self.min_costs: list[float] = self._rank_costs.min(axis=0).tolist()
        work = self._compute_min_work(np.inf)
        self.work: list[float] = work.tolist()  # per document: least sum of its times over ranks
        self.all_work, self.all_tokens = float(work.sum()), int(lengths_N.sum())
        # cp -> time and tokens of each document on each of its cp ranks.
        self.cost = {cp: costs[cp].tolist() for cp in self.cps}
        self.tokens = {cp: tokens[cp].tolist() for cp in self.cps}
        self.lengths: list[int] = lengths_N.tolist()
        self._cost_up = {cp: (-costs[cp]).tolist() for cp in self.cps}
        self._tokens_up = {cp: (-tokens[cp]).tolist() for cp in self.cps}

    def __len__(self) -> int:
        return len(self.work)

    def count_min_rounds(self, num_tokens: int) -> int:
        """Return the least number of rounds in which all ranks can process `num_tokens` tokens."""
        return -(-num_tokens // (self.ranks * self.max_tokens))

    def compute_min_step_time(self) -> float:
        """Return a lower bound of the step time of every schedule."""
        fixed = self.count_min_rounds(self.all_tokens) * self.fixed
        # In a step of time t, each document is on enough ranks to take at most t, and the work of
        # all documents is at most t * ranks. The bisection finds the least such t.
        low, high = float(self._rank_costs.min(axis=0).max()), float(self._rank_costs[-1].sum())
        for _ in range(50):
            middle = (low + high) / 2
            if self._compute_min_work(middle).sum() > middle * self.ranks:
                low = middle
            else:
                high = middle
        return low + fixed

    def _compute_min_work(self, max_time: float) -> Costs:
        """Return each document's least cp * (time on cp ranks), of times <= `max_time`, or inf."""
        ranks_1 = np.array(self.cps)[:, None]
        costs = np.where(self._rank_costs <= max_time, self._rank_costs * ranks_1, np.inf)
        return costs.min(axis=0)  # type: ignore[no-any-return]

    def sum_work_and_tokens(self, document_idxs: list[int]) -> tuple[float, int]:
        """Return the total work (time summed over ranks) and tokens of these documents."""
        return sum(self.work[i] for i in document_idxs), sum(self.lengths[i] for i in document_idxs)

    def find_first_fitting(self, cp: int, max_time: float, max_tokens: int) -> int:
        """Return the index of the first (longest) document that fits on `cp` ranks, or `len(self)`.

        `max_time` and `max_tokens` limit one rank. The document may already be in a round.
        """
        return max(
            bisect_left(self._cost_up[cp], -max_time), bisect_left(self._tokens_up[cp], -max_tokens)
        )


class RemainingDocuments:
    """The indices of documents that are not in a round (a micro-batch per rank) yet.

    The keys of `trial` are the documents that a candidate round uses.
    """

    def __init__(self, count: int) -> None:
        self._next = list(range(count + 1))
        self.trial: dict[int, int] = {}

    def find_first(self, min_idx: int) -> int:
        """Return the first remaining index >= `min_idx`, or `count` if there is none."""
        chain, trial = self._next, self.trial
        passed = []
        while True:  # both chains are shortened where they are walked
            end = min_idx
            while chain[end] != end:
                end = chain[end]
            while chain[min_idx] != end:
                chain[min_idx], min_idx = end, chain[min_idx]
            if end not in trial:
                break
            passed.append(end)
            min_idx = trial[end]
        for before in passed:
            trial[before] = end
        return end

    def take_document(self, document_idx: int) -> None:
        """Mark a document as used by a candidate round; `trial.clear()` removes all marks."""
        self.trial[document_idx] = document_idx + 1

    def remove_documents(self, document_idxs: list[int]) -> None:
        """Remove the documents of a round that was accepted."""
        for index in document_idxs:
            self._next[index] = index + 1


def make_rounds(documents: Documents) -> list[Blocks]:
    """Return all rounds: each is a list of groups, largest first, that together have all ranks."""
    search = _RoundSearch(documents)
    rounds = []
    while search.remaining.find_first(0) < len(documents):
        rounds.append(sorted(search.find_next_round(), key=lambda block: -block.cp))
    return rounds


class _RoundSearch:
    """The search for the rounds of a schedule; each `find_next_round` takes remaining documents."""

    def __init__(self, documents: Documents) -> None:
        self.documents, self.remaining = documents, RemainingDocuments(len(documents))
        self._work, self._tokens = documents.all_work, documents.all_tokens

    def find_next_round(self) -> Blocks:
        """Try several rounds, return the one with the best score, and take its documents."""
        best: tuple[float, Blocks] = (-np.inf, [])
        bound = self._compute_min_remaining_time(0.0, 0)
        for blocks in self._try_time_limits():
            work, tokens = self.documents.sum_work_and_tokens(
                [i for block in blocks for i in block.documents]
            )
            time = max(block.load for block in blocks) + self.documents.fixed
            share = (bound - self._compute_min_remaining_time(work, tokens)) / time
            self.remaining.trial.clear()
            if share > best[0]:
                best = (share, blocks)
            if share > GOOD_SCORE:
                break
        document_idxs = [i for block in best[1] for i in block.documents]
        self.remaining.remove_documents(document_idxs)
        work, tokens = self.documents.sum_work_and_tokens(document_idxs)
        self._work, self._tokens = self._work - work, self._tokens - tokens
        return best[1]

    def _try_time_limits(self) -> Iterator[Blocks]:
        """Yield rank groups with documents for each time limit that changes them."""
        documents, longest = self.documents, self.remaining.find_first(0)
        mean = self._work / (documents.ranks * documents.count_min_rounds(max(self._tokens, 1)))
        cps = (cp for cp in documents.cps if documents.tokens[cp][longest] <= documents.max_tokens)
        loads = [documents.cost[cp][longest] for cp in cps]
        # The limits descend to a quarter of the mean round time of the remaining work.
        low, high = max(mean / 4, min(loads)), max(*loads, mean) * 1.01
        limits = [high]
        while limits[-1] > low * GROWTH:
            limits.append(limits[-1] / GROWTH)
        limits.append(low * 1.0001)
        for min_ranks in documents.cps:
            min_limit = np.inf
            for limit in limits:
                if limit <= min_limit:
                    blocks, min_limit = _fill_blocks(documents, self.remaining, limit, min_ranks)
                    yield blocks

    def _compute_min_remaining_time(self, work: float, num_tokens: int) -> float:
        """Return a lower bound of the remaining time after a round of this work and tokens."""
        documents, longest = self.documents, self.remaining.find_first(0)
        if longest == len(documents):
            return 0.0
        fixed = documents.count_min_rounds(self._tokens - num_tokens) * documents.fixed
        mean = (self._work - work) / documents.ranks
        return max(mean, documents.min_costs[longest]) + fixed


def _fill_blocks(
    documents: Documents, remaining: RemainingDocuments, time_limit: float, min_ranks: int
) -> tuple[Blocks, float]:
    """Assign documents to blocks; return the blocks, and the least limit that gives them."""
    time_limit *= 1 + ROUNDING
    blocks, min_limit = _open_blocks(documents, remaining, time_limit, min_ranks)
    heap = [(block.load, i) for i, block in enumerate(blocks)]
    heapq.heapify(heap)
    while heap:
        load, i = heapq.heappop(heap)
        block = blocks[i]
        room = documents.max_tokens - block.tokens
        idx = remaining.find_first(documents.find_first_fitting(block.cp, time_limit - load, room))
        if idx < len(documents):
            remaining.take_document(idx)
            _add_document(documents, block, idx)
            heapq.heappush(heap, (block.load, i))
    min_limit = max([min_limit, *(block.load for block in blocks)]) * (1 + ROUNDING)
    # Idle ranks double the cp of the slowest blocks, and form empty blocks otherwise.
    free = documents.ranks - sum(block.cp for block in blocks)
    max_cp = documents.cps[-1]
    while free:
        doubling = [block for block in blocks if block.cp <= free and block.cp < max_cp]
        if not doubling:
            blocks.extend(RankBlock(max_cp) for _ in range(free // max_cp))
            break
        block = max(doubling, key=lambda block: block.load)
        free -= block.cp
        indices, block.cp = block.documents, 2 * block.cp
        block.documents, block.load, block.tokens = [], 0.0, 0
        for index in indices:
            _add_document(documents, block, index)
    return blocks, min_limit


def _open_blocks(
    documents: Documents, remaining: RemainingDocuments, time_limit: float, min_ranks: int
) -> tuple[Blocks, float]:
    """Open blocks for the longest documents until no rank is idle; also return the least limit."""
    blocks: Blocks = []
    min_limit = 0.0
    free = documents.ranks
    while free:
        widest = min(documents.cps[-1], 1 << (free.bit_length() - 1))
        first = documents.find_first_fitting(widest, time_limit, documents.max_tokens)
        index = remaining.find_first(first)
        if index == len(documents):
            break
        cp = next(
            cp
            for cp in documents.cps
            if min(min_ranks, widest) <= cp
            and documents.cost[cp][index] <= time_limit
            and documents.tokens[cp][index] <= documents.max_tokens
        )
        min_limit = max(min_limit, documents.cost[widest][index])
        remaining.take_document(index)
        blocks.append(RankBlock(cp))
        _add_document(documents, blocks[-1], index)
        free -= cp
    return blocks, min_limit


def _add_document(documents: Documents, block: RankBlock, document_idx: int) -> None:
    block.documents.append(document_idx)
    block.load += documents.cost[block.cp][document_idx]
    block.tokens += documents.tokens[block.cp][document_idx]
