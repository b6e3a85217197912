"""The batches of steps: packed rows of documents, or random tokens; and CUDA graphs of steps.

Legend: n documents, A micro-batches of a step, B rows of one micro-batch, T tokens of a row.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.packing import PackedBatchSampler, PackedCollator
from moecore.packing.collate import get_length_multiple
from moecore.train import GraphedForwardBackward

StepT = TypeVar("StepT")
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """The shape of the batch of one optimizer step, over all data ranks.

    Attributes:
        data_ranks: ranks with different data.
        grad_accum: micro-batches per step.
        batch_size: rows per data rank and micro-batch.
        seq_len: tokens of a row.
        cp: ranks that share a row; documents are padded to a multiple of 2 * cp.
    """

    data_ranks: int
    grad_accum: int
    batch_size: int
    seq_len: int
    cp: int = 1

    @property
    def rows(self) -> int:
        """Rows of a step over all data ranks."""
        return self.data_ranks * self.grad_accum * self.batch_size


def scan_standard_library() -> list[Path]:
    """Return the paths of Python's standard library, without its tests, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIPPED_FOLDERS]  # not walked
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """The batch of one data rank and step, on the CPU.

    Attributes:
        tokens_ABT: int64 ids.
        labels_ABT: int64, the token that should follow, -100 where none does.
        padding_ABT: bool, True = padding; None = rows are full and of one document each.
        cu_seqlens_An: int32, borders of the documents of each micro-batch, the last one repeated
            up to a length that most steps share; None like `padding_ABT`.
        num_labels: int64 scalar, the number of labels other than -100.
    """

    tokens_ABT: Tensor
    labels_ABT: Tensor
    padding_ABT: Tensor | None = None
    cu_seqlens_An: Tensor | None = None
    num_labels: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """Return (tokens, labels), or (tokens, labels, padding, borders) unless these are None."""
        tensors = (self.tokens_ABT, self.labels_ABT, self.padding_ABT, self.cu_seqlens_An)
        return tuple(tensor for tensor in tensors if tensor is not None)

    def count_labels_and_tokens(self) -> Tensor:
        """Return labels that count, tokens without padding, pairs, tokens with padding: int64 [4].

        Pairs are the sum of the squared lengths of documents, twice what causal attention computes.
        """
        if self.padding_ABT is None or self.cu_seqlens_An is None:
            lengths = torch.full(
                self.tokens_ABT.shape[:2], self.tokens_ABT.shape[2], dtype=torch.int64, device="cpu"
            )
        else:
            tokens_AN = F.pad((~self.padding_ABT).flatten(1).cumsum(1), (1, 0))
            lengths = tokens_AN.gather(1, self.cu_seqlens_An.long()).diff()
        size = torch.tensor(self.tokens_ABT.numel(), dtype=torch.int64, device="cpu")
        return torch.stack([self.num_labels, lengths.sum(), lengths.square().sum(), size])


class Steps(Generic[StepT]):
    """An endless iterator of the batches of this data rank, epoch after epoch.

    Attributes:
        sampler: yields the argument of `collate`. Its state is the position in the data, which is
            the same on every rank.
    """

    def __init__(self, sampler: Any, collate: Callable[[Any], StepT]) -> None:
        self.sampler, self._collate = sampler, collate
        self._items = chain.from_iterable(repeat(sampler))

    def next(self) -> StepT:
        """Return the batch of the next step."""
        return self._collate(next(self._items))


class PackedSteps(Steps[StepBatch]):
    """Steps of packed documents, each document once per epoch over all data ranks.

    Args:
        documents: documents of all ranks, as `PackedCollator` reads them.
        lengths: tokens of each document, at most as many as a row has.
        seed: the seed of the order; None = documents in their order.
        data_rank: the index of this rank among `shape.data_ranks`.
        packs: False = a row has one document, and its padding belongs to it.
    """

    def __init__(
        self,
        documents: Any,
        lengths: Sequence[int] | Tensor,
        shape: BatchShape,
        *,
        seed: int | None,
        data_rank: int,
        packs: bool = True,
    ) -> None:
        self._shape, self._documents = shape, documents
        rows, T = shape.grad_accum * shape.batch_size, shape.seq_len
        multiple = get_length_multiple(shape.cp) if packs else T
        self._lengths = -(-torch.as_tensor(lengths, device="cpu") // multiple) * multiple
        sampler = PackedBatchSampler(
            self._lengths,
            T,
            rows=rows,
            data_rank=data_rank,
            data_ranks=shape.data_ranks,
            seed=seed or 0,
            shuffle=seed is not None,
        )
        self._collator = PackedCollator(row_tokens=T, rows=rows, multiple=multiple)
        self._max_documents = self._count_max_documents()
        super().__init__(sampler, self._build_batch)

    def _build_batch(self, numbers: list[int]) -> StepBatch:
        """Return the batch of one step with the documents at these indices."""
        rows = self._collator([self._documents[number] for number in numbers])
        size = (self._shape.grad_accum, self._shape.batch_size, self._shape.seq_len)
        return StepBatch(
            tokens_ABT=rows["input_ids"].view(size),
            labels_ABT=rows["labels"].view(size),
            padding_ABT=rows["padding_mask"].view(size),
            cu_seqlens_An=self._find_borders(rows["cu_seqlens"]),
            num_labels=rows["num_tokens"],
        )

    def _count_max_documents(self) -> int:
        """Return the maximum number of documents of a micro-batch, with documents of padding."""
        B, tokens = self._shape.batch_size, self._shape.batch_size * self._shape.seq_len
        shortest = self._lengths.sort().values[:tokens]
        return int((shortest.cumsum(0) <= tokens).sum()) + B

    def _find_borders(self, cu_seqlens: Tensor) -> Tensor:
        """Return the document borders of each micro-batch, int32 [grad_accum, max_documents + 1].

        `cu_seqlens` has the borders in all rows of the step. Ends of rows are borders.
        """
        tokens = self._shape.batch_size * self._shape.seq_len
        of_all = []
        for number in range(self._shape.grad_accum):
            borders = cu_seqlens - number * tokens
            borders = borders[(borders >= 0) & (borders <= tokens)]
            of_all.append(repeat_last_border(borders, self._max_documents + 1))
        return torch.stack(of_all).int()


def repeat_last_border(cu_seqlens_n: Tensor, number: int) -> Tensor:
    """Pad borders of documents to [..., number] with their last one: documents without tokens."""
    num_copies = number - cu_seqlens_n.shape[-1]
    return torch.cat(
        [cu_seqlens_n, cu_seqlens_n[..., -1:].expand(*cu_seqlens_n.shape[:-1], num_copies)], -1
    )


class RandomSteps:
    """An iterator of batches of uniformly random tokens, to measure speed; its own sampler."""

    def __init__(self, vocab_size: int, shape: BatchShape, *, seed: int, data_rank: int) -> None:
        self._vocab_size, self._shape = vocab_size, shape
        self._seed, self._data_rank = seed, data_rank
        self._step = 0
        self.sampler = self

    def next(self, num_micro_batches: int | None = None) -> StepBatch:
        """Return the next step; None = `grad_accum` micro-batches."""
        self._step += 1
        generator = generator_of(f"{self._seed}/{self._step}/{self._data_rank}")
        count = num_micro_batches or self._shape.grad_accum
        size = (count, self._shape.batch_size, self._shape.seq_len + 1)
        rows_ABT = torch.randint(self._vocab_size, size, generator=generator, device="cpu")
        labels_ABT = rows_ABT[..., 1:]
        num_labels = torch.tensor(labels_ABT.numel(), dtype=torch.int64, device="cpu")
        return StepBatch(
            tokens_ABT=rows_ABT[..., :-1], labels_ABT=labels_ABT, num_labels=num_labels
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the seed."""
        return {"step": self._step, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the steps of `state`; raise ValueError for another seed."""
        if state.get("seed") != self._seed:
            raise ValueError(f"random tokens of seed {state.get('seed')}, not {self._seed}")
        self._step = state["step"]

    def get_epochs(self) -> dict[str, float]:
        """Return {}: there are no sources."""
        return {}

    def close(self) -> None:
        """Do nothing: there are no workers."""


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a copy on a device, for which the host does not wait, through pinned memory."""
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def generator_of(key: str) -> torch.Generator:
    """Return a CPU generator whose seed is a hash of `key`."""
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class Graphed:
    """A function of tensors that runs `forward_backward`, a step's passes, as a CUDA graph.

    The graph is captured again when shapes of the inputs change, which must happen on all ranks.
    """

    def __init__(self, forward_backward: Callable[..., Tensor], model: nn.Module) -> None:
        self._graph = GraphedForwardBackward(forward_backward, model)
        self._shapes: list[torch.Size] = []

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Return a copy of the loss of a step with these inputs of `forward_backward`."""
        shapes = [tensor.shape for tensor in tensors]
        if shapes != self._shapes:
            self._graph.close()
            self._shapes = shapes
        loss: Tensor = self._graph(*tensors)
        return loss


def pad_borders(batch: StepBatch) -> StepBatch:
    """Return the batch padded to the largest number of borders of any rank. Collective, on CPU."""
    if batch.cu_seqlens_An is None:
        return batch
    num_borders = torch.tensor(batch.cu_seqlens_An.shape[1], dtype=torch.int64, device="cpu")
    dist.all_reduce(num_borders, op=dist.ReduceOp.MAX)
    return replace(batch, cu_seqlens_An=repeat_last_border(batch.cu_seqlens_An, int(num_borders)))
