"""Batches of optimizer steps: packed rows of documents, or random tokens; CUDA graphs of steps.

Legend: n documents, A micro-batches of a step, B rows of one micro-batch, T tokens of a row.
"""

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
from moecore.parallel.mesh import ParallelConfig
from moecore.recipes.options import RunConfig
from moecore.train import GraphedForwardBackward

StepT = TypeVar("StepT")
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """Numbers of ranks, micro-batches, rows and tokens of one optimizer step's batch."""

    data_ranks: int  # data parallel ranks, each with different rows
    grad_accum: int  # micro-batches of a step
    batch_size: int  # rows of one micro-batch on one data rank
    seq_len: int  # tokens of a row
    cp: int = 1  # ranks that share a row; documents are padded to a multiple of 2 * cp

    @property
    def rows(self) -> int:
        """The rows of a step over all data ranks."""
        return self.data_ranks * self.grad_accum * self.batch_size


def make_batch_shape(args: RunConfig, parallel: ParallelConfig) -> BatchShape:
    """Return the shape of a step's batch over all ranks; `parallel` has degrees without -1."""
    data_ranks = parallel.dp_replicate * parallel.dp_shard
    return BatchShape(
        data_ranks=data_ranks,
        grad_accum=args.count_micro_batches(data_ranks),
        batch_size=args.batch_size,
        seq_len=args.seq_len,
        cp=parallel.cp,
    )


def scan_stdlib() -> list[Path]:
    """Return the sorted paths of the Python files of the standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIPPED_FOLDERS]  # not walked
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """The batch of one data rank and one step, on the CPU."""

    tokens_ABT: Tensor  # int64 ids
    labels_ABT: Tensor  # int64; the next token, or -100 if the loss does not count it
    padding_ABT: Tensor | None = None  # bool, True = padding; None = rows of one full document
    # int32, document bounds of each micro-batch; the last one is repeated to a common length.
    cu_seqlens_An: Tensor | None = None
    num_labels: Tensor  # int64 scalar, the number of labels other than -100
    extras: tuple[Tensor, ...] = ()  # further tensors [A, ...], which an objective needs

    def list_tensors(self) -> tuple[Tensor, ...]:
        """Return tokens, labels, padding and document bounds unless they are None, and extras."""
        tensors = (self.tokens_ABT, self.labels_ABT, self.padding_ABT, self.cu_seqlens_An)
        return tuple(tensor for tensor in (*tensors, *self.extras) if tensor is not None)

    def count_labels_and_tokens(self) -> Tensor:
        """Return int64 [4]: labels, tokens without padding, squared lengths, tokens with padding.

        The squared lengths of documents are summed.
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
    """An endless reader of this data rank's batches, which calls `collate` on `sampler`'s items."""

    def __init__(self, sampler: Any, collate: Callable[[Any], StepT]) -> None:
        self.sampler, self._collate = sampler, collate
        self._items = chain.from_iterable(repeat(sampler))

    def next_batch(self) -> StepT:
        """Return the batch of the next step."""
        return self._collate(next(self._items))


def make_item_steps(
    items: Sequence[Any],
    shape: BatchShape,
    *,
    make_batch: Callable[[list[Any], int], StepT],
    seed: int | None,
    data_rank: int,
) -> Steps[StepT]:
    """Return this data rank's reader of `make_batch(items, seq_len)`; `seed` None = no shuffle."""
    sampler = PackedBatchSampler(
        [1] * len(items),
        1,
        rows=shape.grad_accum * shape.batch_size,
        data_rank=data_rank,
        data_ranks=shape.data_ranks,
        seed=seed or 0,
        shuffle=seed is not None,
    )
    return Steps(sampler, lambda numbers: make_batch([items[i] for i in numbers], shape.seq_len))


class PackedSteps(Steps[StepBatch]):
    """A reader of this data rank's batches of packed documents; `seed` None = no shuffle.

    If `packs` is False, each row has one document, whose bounds in cu_seqlens include the padding.
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
        # At most so many of the shortest documents fit, and each row may end with padding.
        tokens = shape.batch_size * T
        shortest = self._lengths.sort().values[:tokens].cumsum(0)
        self._max_documents = int((shortest <= tokens).sum()) + shape.batch_size
        super().__init__(sampler, self.build_batch)

    def build_batch(self, document_idxs: list[int]) -> StepBatch:
        """Return the batch of one step from the documents at the indices `document_idxs`."""
        rows = self._collator([self._documents[number] for number in document_idxs])
        size = (self._shape.grad_accum, self._shape.batch_size, self._shape.seq_len)
        # The bounds of the documents of each micro-batch.
        tokens, length = self._shape.batch_size * self._shape.seq_len, self._max_documents + 1
        shifted = (rows["cu_seqlens"] - i * tokens for i in range(self._shape.grad_accum))
        parts = (bounds[(bounds >= 0) & (bounds <= tokens)] for bounds in shifted)
        return StepBatch(
            tokens_ABT=rows["input_ids"].view(size),
            labels_ABT=rows["labels"].view(size),
            padding_ABT=rows["padding_mask"].view(size),
            cu_seqlens_An=torch.stack([repeat_last_bound(part, length) for part in parts]).int(),
            num_labels=rows["num_tokens"],
        )


def repeat_last_bound(cu_seqlens_n: Tensor, length: int) -> Tensor:
    """Pad `cu_seqlens_n` with its last entry, which means empty documents, to `length` entries."""
    num_copies = length - cu_seqlens_n.shape[-1]
    return torch.cat(
        [cu_seqlens_n, cu_seqlens_n[..., -1:].expand(*cu_seqlens_n.shape[:-1], num_copies)], -1
    )


class RandomSteps:
    """An endless reader of batches of uniformly random tokens, to measure speed."""

    def __init__(self, vocab_size: int, shape: BatchShape, *, seed: int, data_rank: int) -> None:
        self._vocab_size, self._shape = vocab_size, shape
        self._seed, self._data_rank = seed, data_rank
        self._step = 0
        self.sampler = self

    def next_batch(self, num_micro_batches: int | None = None) -> StepBatch:
        """Return the next batch with `num_micro_batches` micro-batches; None = `grad_accum`."""
        self._step += 1
        generator = make_generator(f"{self._seed}/{self._step}/{self._data_rank}")
        count = num_micro_batches or self._shape.grad_accum
        size = (count, self._shape.batch_size, self._shape.seq_len + 1)
        rows_ABT = torch.randint(self._vocab_size, size, generator=generator, device="cpu")
        x_ABT, labels_ABT = rows_ABT[..., :-1], rows_ABT[..., 1:]
        num_labels = torch.tensor(labels_ABT.numel(), dtype=torch.int64, device="cpu")
        return StepBatch(tokens_ABT=x_ABT, labels_ABT=labels_ABT, num_labels=num_labels)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the seed."""
        return {"step": self._step, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the number of steps in `state`; ValueError if the seeds differ."""
        if state.get("seed") != self._seed:
            raise ValueError(f"random tokens of seed {state.get('seed')}, not {self._seed}")
        self._step = state["step"]

    def get_epochs(self) -> dict[str, float]:
        """Return {}, because there are no sources."""
        return {}

    def close(self) -> None:
        """Do nothing, because there are no processes."""


def make_generator(seed_text: str) -> torch.Generator:
    """Return a CPU generator whose seed is a hash of the text `seed_text`."""
    digest = hashlib.sha256(seed_text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class GraphedStep:
    """A CUDA graph of `forward_backward`, which is recaptured when input shapes change."""

    def __init__(self, forward_backward: Callable[..., Tensor], model: nn.Module) -> None:
        self._graph = GraphedForwardBackward(forward_backward, model)
        self._shapes: list[torch.Size] = []

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Replay the graph with copies of `tensors`; return a copy of the loss."""
        shapes = [tensor.shape for tensor in tensors]
        if shapes != self._shapes:
            self._graph.close()
            self._shapes = shapes
        loss: Tensor = self._graph(*tensors)
        return loss


def pad_bounds(batch: StepBatch) -> StepBatch:
    """Pad a batch's cu_seqlens to the longest length on any rank. Collective, on the CPU."""
    if batch.cu_seqlens_An is None:
        return batch
    num_borders = torch.tensor(batch.cu_seqlens_An.shape[1], dtype=torch.int64, device="cpu")
    dist.all_reduce(num_borders, op=dist.ReduceOp.MAX)
    return replace(batch, cu_seqlens_An=repeat_last_bound(batch.cu_seqlens_An, int(num_borders)))
