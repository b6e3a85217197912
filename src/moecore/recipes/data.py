"""Text as bytes, and which of them a step reads.

Training reads documents, which are packed into rows: `PackedSteps`, of `finetune` too. In a
text a file is a document, and so is each text of a jsonl file; one longer than a row is cut into
pieces. `read_batches` reads windows of the text instead, whatever borders are inside: a pure
function of seed, step and data rank.

Legend: N bytes of the corpus, n documents, A micro-batches of a step, B rows of one micro-batch,
T tokens of a row.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.packing import CutDocuments, PackedBatchSampler, PackedCollator
from moecore.packing.collate import get_length_multiple
from moecore.packing.corpus.files import strip_line
from moecore.recipes.files import named, read_file
from moecore.train import GraphedForwardBackward

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
VOCAB_SIZE = 256
HELD_OUT = 20  # one part of so many of the text


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """What one optimizer step reads, over all data ranks.

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


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents, laid end to end.

    Attributes:
        text_N: uint8 bytes.
        borders: int64 [n + 1], where documents begin in the text, and N.
    """

    text_N: Tensor
    borders: Tensor

    def __len__(self) -> int:
        return len(self.borders) - 1

    def __getitem__(self, document: int) -> Tensor:
        return self.text_N[int(self.borders[document]) : int(self.borders[document + 1])]

    def split(self, start: int) -> tuple[Corpus, Corpus]:
        """Return the text before byte `start` and that from it on, 0 < start < N."""
        borders = self.borders
        inner = torch.tensor([start])
        before = torch.cat([borders[borders < start], inner])
        after = torch.cat([inner, borders[borders > start]]) - start
        return Corpus(self.text_N[:start], before), Corpus(self.text_N[start:], after)


def read_corpus(files: Sequence[Path], *, seq_len: int) -> Corpus:
    """Return the files, or without any the Python standard library. Documents end with a newline.

    Raises:
        ValueError: for a file that cannot be read, or too little text for one row.
    """
    texts = [text for path in files or standard_library() for text in _read(path)]
    text = b"\n".join(texts)
    if len(text) <= seq_len:
        raise ValueError(f"--data ({len(text)} bytes) must be longer than --seq-len ({seq_len})")
    ends = torch.tensor([len(document) + 1 for document in texts]).cumsum(0)
    ends[-1] -= 1  # no newline follows the last
    borders = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).unique()  # the last may be empty
    return Corpus(torch.frombuffer(bytearray(text), dtype=torch.uint8), borders)


def hold_out(corpus: Corpus, *, seq_len: int) -> tuple[Corpus, Tensor]:
    """Return the text to train on, and the bytes of its end, a twentieth, to evaluate on.

    Raises:
        ValueError: for too little text for one row of each.
    """
    num_bytes = corpus.text_N.numel()
    size = max(num_bytes // HELD_OUT, seq_len + 1)
    if num_bytes - size <= seq_len:
        raise ValueError(
            f"--data ({num_bytes} bytes) must be longer than two of --seq-len ({seq_len}) "
            "with --eval-every, which holds its end out: use more text, or --eval-every 0"
        )
    training, held_out = corpus.split(num_bytes - size)
    return training, held_out.text_N


def standard_library() -> list[Path]:
    """Return the sources that every Python brings along, without its tests, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIPPED_FOLDERS]  # not walked
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """What one data rank reads in a step, on the CPU.

    Attributes:
        tokens_ABT: int64 ids.
        labels_ABT: int64, the token that should follow, -100 where none does.
        padding_ABT: bool, True = padding; None = rows are full and of one document each.
        cu_seqlens_An: int32, borders of the documents of each micro-batch, the last one repeated
            up to a length that is the same in every step; None like `padding_ABT`.
        num_labels: int64 scalar, those that count.
    """

    tokens_ABT: Tensor
    labels_ABT: Tensor
    padding_ABT: Tensor | None = None
    cu_seqlens_An: Tensor | None = None
    num_labels: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """Return tokens and labels, and for packed documents padding and borders."""
        tensors = (self.tokens_ABT, self.labels_ABT, self.padding_ABT, self.cu_seqlens_An)
        return tuple(tensor for tensor in tensors if tensor is not None)

    def counts(self) -> Tensor:
        """Return labels that count, tokens without padding, pairs, tokens with padding: int64 [4].

        Pairs are the sum of the squared lengths of documents, twice what causal attention computes.
        """
        if self.padding_ABT is None or self.cu_seqlens_An is None:
            lengths = torch.full(self.tokens_ABT.shape[:2], self.tokens_ABT.shape[2])
        else:
            tokens_AN = F.pad((~self.padding_ABT).flatten(1).cumsum(1), (1, 0))
            lengths = tokens_AN.gather(1, self.cu_seqlens_An.long()).diff()
        size = torch.tensor(self.tokens_ABT.numel())
        return torch.stack([self.num_labels, lengths.sum(), lengths.square().sum(), size])


class DocumentSequence(Protocol):
    """Documents by index: a list, a data set or `CutDocuments`."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int, /) -> Any: ...


class PackedSteps:
    """Reads the next step of this data rank: each document once per epoch, over all of them.

    The rows of a step are the same however ranks and micro-batches share them.

    Attributes:
        sampler: its state is the position in the data, the same on every rank.

    Args:
        documents: of all ranks, as `PackedCollator` reads them.
        lengths: tokens of each, at most those of a row.
        shape: of a step.
        seed: of the order; None = documents in their order.
        data_rank: this one.
        packs: False = a row has one document, and its padding belongs to it.
    """

    def __init__(
        self,
        documents: DocumentSequence,
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
        self._lengths = -(-torch.as_tensor(lengths) // multiple) * multiple
        self.sampler = PackedBatchSampler(
            self._lengths,
            T,
            rows=rows,
            data_rank=data_rank,
            data_ranks=shape.data_ranks,
            seed=seed or 0,
            shuffle=seed is not None,
        )
        self._collator = PackedCollator(row_tokens=T, rows=rows, multiple=multiple)
        self._batches = self._all_batches()
        self._max_documents = self._most_documents()

    def next(self) -> StepBatch:
        """Return the step behind the one before, in the next epoch after the last of one."""
        rows = self._collator([self._documents[number] for number in next(self._batches)])
        size = (self._shape.grad_accum, self._shape.batch_size, self._shape.seq_len)
        return StepBatch(
            tokens_ABT=rows["input_ids"].view(size),
            labels_ABT=rows["labels"].view(size),
            padding_ABT=rows["padding_mask"].view(size),
            cu_seqlens_An=self._borders(rows["cu_seqlens"]),
            num_labels=rows["num_tokens"],
        )

    def _all_batches(self) -> Iterator[list[int]]:
        while True:
            yield from self.sampler

    def _most_documents(self) -> int:
        """Return the most documents that rows of a micro-batch hold, those of padding included."""
        B, tokens = self._shape.batch_size, self._shape.batch_size * self._shape.seq_len
        shortest = self._lengths.sort().values[:tokens]
        return int((shortest.cumsum(0) <= tokens).sum()) + B

    def _borders(self, cu_seqlens: Tensor) -> Tensor:
        """Return the borders of each micro-batch; ends of rows are borders."""
        tokens = self._shape.batch_size * self._shape.seq_len
        of_all = []
        for number in range(self._shape.grad_accum):
            borders = cu_seqlens - number * tokens
            borders = borders[(borders >= 0) & (borders <= tokens)]
            of_all.append(with_borders(borders, self._max_documents + 1))
        return torch.stack(of_all).int()


def with_borders(cu_seqlens_n: Tensor, number: int) -> Tensor:
    """Return so many borders, [..., number]: the last is repeated, for documents without tokens."""
    num_copies = number - cu_seqlens_n.shape[-1]
    return torch.cat(
        [cu_seqlens_n, cu_seqlens_n[..., -1:].expand(*cu_seqlens_n.shape[:-1], num_copies)], -1
    )


def packed_corpus(corpus: Corpus, shape: BatchShape, *, seed: int, data_rank: int) -> PackedSteps:
    """Return the steps of a text, whose documents are cut into pieces that fit a row."""
    pieces = CutDocuments(corpus, corpus.borders.diff(), shape.seq_len)
    return PackedSteps(
        pieces, torch.from_numpy(pieces.lengths), shape, seed=seed, data_rank=data_rank
    )


def read_batches(
    corpus_N: Tensor, shape: BatchShape, *, seed: int, step: int | Literal["eval"], data_rank: int
) -> list[tuple[Tensor, Tensor]]:
    """Return one (tokens_BT, labels_BT) per micro-batch, int64 on the CPU.

    All sequences of a step are drawn together and dealt out, so that the same global batch is read
    however many data ranks share it. Nothing is kept between steps: the data position is the step.
    """
    generator = generator_of(f"{seed}/{step}")
    num = shape.grad_accum * shape.data_ranks * shape.batch_size
    starts = torch.randint(corpus_N.numel() - shape.seq_len, (num,), generator=generator)
    starts_AB = starts.view(shape.grad_accum, shape.data_ranks, shape.batch_size)[:, data_rank]
    batches = []
    for starts_B in starts_AB:
        rows_BT = corpus_N[starts_B[:, None] + torch.arange(shape.seq_len + 1)].long()
        batches.append((rows_BT[:, :-1], rows_BT[:, 1:]))
    return batches


def random_step(
    vocab_size: int, shape: BatchShape, *, seed: int, step: int, data_rank: int
) -> StepBatch:
    """Return full rows of uniformly random tokens: for measuring speed."""
    generator = generator_of(f"{seed}/{step}/{data_rank}")
    size = (shape.grad_accum, shape.batch_size, shape.seq_len + 1)
    rows_ABT = torch.randint(vocab_size, size, generator=generator)
    labels_ABT = rows_ABT[..., 1:]
    return StepBatch(
        tokens_ABT=rows_ABT[..., :-1],
        labels_ABT=labels_ABT,
        num_labels=torch.tensor(labels_ABT.numel()),
    )


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a copy that nothing waits for; from memory that is not pinned the host would wait."""
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def generator_of(key: str) -> torch.Generator:
    """Return a generator that the same key always starts alike."""
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _read(path: Path) -> list[bytes]:
    """Return the documents of a file."""
    content = read_file(path, "--data")
    return _texts(path, content) if path.suffix == ".jsonl" else [content]


def _texts(path: Path, content: bytes) -> list[bytes]:
    texts = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        try:
            if text := strip_line(line.decode()):
                texts.append(json.loads(text)["text"].encode())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(
                f'{named("--data", path)} line {number} must be a JSON object with a string "text"'
            ) from None
    return texts


class Graphed:
    """Replays a graph; where a step has other shapes, on every rank, it is captured anew."""

    def __init__(self, forward_backward: Callable[..., Tensor], model: nn.Module) -> None:
        self._graph = GraphedForwardBackward(forward_backward, model)
        self._shapes: list[torch.Size] = []

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Return the loss of a step."""
        shapes = [tensor.shape for tensor in tensors]
        if shapes != self._shapes:
            self._graph.close()
            self._shapes = shapes
        loss: Tensor = self._graph(*tensors)
        return loss


def pad_borders(batch: StepBatch) -> StepBatch:
    """Return the batch with as many borders as that of any rank. Collective, waits on the host."""
    if batch.cu_seqlens_An is None:
        return batch
    num_borders = torch.tensor(batch.cu_seqlens_An.shape[1])
    dist.all_reduce(num_borders, op=dist.ReduceOp.MAX)
    return replace(batch, cu_seqlens_An=with_borders(batch.cu_seqlens_An, int(num_borders)))
