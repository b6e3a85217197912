"""Which examples a step reads, and how they lie in a batch: a pure function of seed and step.

Legend: A micro-batches of a step, R data ranks, B sequences, T tokens of the longest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from chat import Example
from data import BatchShape, generator_of
from torch import Tensor

IGNORED = -100  # label of a token that is not learned


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one forward, padded behind their ends.

    Attributes:
        tokens_BT: int64.
        labels_BT: int64, the token after each where that is learned, else -100.
        padding_BT: bool, True where no sequence is.
    """

    tokens_BT: Tensor
    labels_BT: Tensor
    padding_BT: Tensor

    def counts(self) -> Tensor:
        """Return the number of learned tokens and that of all tokens, int64 [2]."""
        return torch.stack([(self.labels_BT != IGNORED).sum(), (~self.padding_BT).sum()])


def make_batch(examples: Sequence[Example]) -> Batch:
    """Return examples side by side. Attention is causal, so no token sees the padding."""
    T = max(len(e.tokens_T) for e in examples) - 1
    tokens_BT = torch.zeros(len(examples), T, dtype=torch.int64)
    labels_BT = torch.full_like(tokens_BT, IGNORED)
    padding_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    for b, example in enumerate(examples):
        length = len(example.tokens_T) - 1
        tokens_BT[b, :length] = example.tokens_T[:-1]
        next_T = example.tokens_T[1:].long()
        labels_BT[b, :length] = next_T.where(example.is_answer_T[1:], IGNORED)
        padding_BT[b, :length] = False
    return Batch(tokens_BT, labels_BT, padding_BT)


def step_batches(
    examples: Sequence[Example], shape: BatchShape, *, seed: int, step: int, data_rank: int
) -> list[Batch]:
    """Return one batch per micro-batch of a step >= 1.

    Each epoch has an order of its own, and one follows the other without a gap. The examples of a
    step are dealt out, so it reads the same ones however many ranks and micro-batches share it. Of
    a rank's examples those of like length meet in a micro-batch, which has less padding then.
    """
    A, R, B = shape.grad_accum, shape.data_ranks, shape.batch_size
    first = (step - 1) * A * R * B
    mine = [examples[_drawn(i, len(examples), seed)] for i in range(first, first + A * R * B)]
    mine = sorted(mine[data_rank::R], key=lambda example: len(example.tokens_T))
    return [make_batch(mine[a * B : (a + 1) * B]) for a in range(A)]


def _drawn(position: int, count: int, seed: int) -> int:
    """Return which example stands at a position of all epochs."""
    epoch, place = divmod(position, count)
    return _order(count, seed, epoch)[place]


@lru_cache(maxsize=2)  # a step may lie in two epochs
def _order(count: int, seed: int, epoch: int) -> list[int]:
    return torch.randperm(count, generator=generator_of(f"{seed}/epoch {epoch}")).tolist()


def eval_batches(
    examples: Sequence[Example], *, batch_size: int, data_ranks: int, data_rank: int
) -> Iterator[Batch]:
    """Yield this rank's batches; every rank has as many, because a forward is collective.

    Where examples run out, others stand in that have nothing to learn.
    """
    ordered = sorted(examples, key=lambda example: len(example.tokens_T))
    width = batch_size * data_ranks
    for start in range(0, len(ordered), width):
        mine = ordered[start : start + width][data_rank::data_ranks]
        fill = Example(ordered[0].tokens_T, torch.zeros_like(ordered[0].is_answer_T))
        yield make_batch([*mine, *[fill] * (batch_size - len(mine))])


def split_examples(
    examples: list[Example], *, share: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Return what is trained on and what is held out: at least one example of each."""
    order = torch.randperm(len(examples), generator=generator_of(f"{seed}/held out")).tolist()
    count = min(max(1, round(share * len(examples))), len(examples) - 1)
    held_out = set(order[:count])
    return [e for i, e in enumerate(examples) if i not in held_out], [
        examples[i] for i in sorted(held_out)
    ]


def digest_of(examples: Sequence[Example]) -> str:
    """Return what other tokens, answers or another order of examples change."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(len(example.tokens_T).to_bytes(8, "little"))
        digest.update(example.tokens_T.numpy())
        digest.update(example.is_answer_T.numpy())
    return digest.hexdigest()[:12]
