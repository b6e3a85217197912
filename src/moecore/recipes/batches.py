"""Examples as documents to pack, which of them are held out, and what they are known by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moecore.packing import PackedBatchSampler, ScheduledCollator
from moecore.packing.corpus.scheduled_batch import ScheduledBatch
from moecore.recipes.chat import Example
from moecore.recipes.data import BatchShape, PackedSteps, generator_of
from moecore.recipes.examples import ExampleT, LearnedExample

IGNORED = -100  # label of a token that is not learned


def packed_examples(
    examples: Sequence[Example],
    shape: BatchShape,
    *,
    seed: int | None,
    data_rank: int,
    packs: bool,
) -> PackedSteps:
    """Return the steps of examples, whose answers are learned; see `PackedSteps`."""
    documents = [_document(example) for example in examples]
    lengths = [len(example.tokens_T) for example in examples]
    return PackedSteps(documents, lengths, shape, seed=seed, data_rank=data_rank, packs=packs)


class ScheduledExamples:
    """Reads the next step of this data rank, whose micro-batches have a cp each.

    The rows of a step, their order and the position are those of `packed_examples`.

    Attributes:
        sampler: its state is the position in the data, the same on every rank.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        shape: BatchShape,
        *,
        seed: int | None,
        collator: ScheduledCollator,
    ) -> None:
        self._documents = [_document(example) for example in examples]
        self._collator = collator
        self.sampler = PackedBatchSampler(
            [len(example.tokens_T) for example in examples],
            shape.seq_len,
            rows=shape.data_ranks * shape.grad_accum * shape.batch_size,
            seed=seed or 0,
            shuffle=seed is not None,
        )
        self._batches = self._all_batches()

    def next(self) -> ScheduledBatch:
        """Return the step behind the one before, in the next epoch after the last of one."""
        return self._collator([self._documents[number] for number in next(self._batches)])

    def _all_batches(self) -> Iterator[list[int]]:
        while True:
            yield from self.sampler


def _document(example: Example) -> dict[str, Tensor]:
    ids_T = example.tokens_T.long()
    return {"input_ids": ids_T, "labels": ids_T.where(example.is_answer_T, IGNORED)}


def split_examples(
    examples: list[ExampleT], *, share: float, seed: int
) -> tuple[list[ExampleT], list[ExampleT]]:
    """Return what is trained on and what is held out: at least one example of each."""
    order = torch.randperm(len(examples), generator=generator_of(f"{seed}/held out")).tolist()
    count = min(max(1, round(share * len(examples))), len(examples) - 1)
    held_out = set(order[:count])
    return [e for i, e in enumerate(examples) if i not in held_out], [
        examples[i] for i in sorted(held_out)
    ]


def digest_of(examples: Sequence[LearnedExample]) -> str:
    """Return what other tokens, answers or another order of examples change."""
    digest = hashlib.sha256()
    for part in (part for example in examples for part in example.parts):
        digest.update(len(part.tokens_T).to_bytes(8, "little"))
        digest.update(part.tokens_T.numpy().data)
        digest.update(part.is_answer_T.numpy().data)
    return digest.hexdigest()[:12]
