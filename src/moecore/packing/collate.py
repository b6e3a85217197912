"""`PackedCollator` makes a batch of rows from documents; `split_batch` splits it over cp ranks.

Legend: B rows, T tokens of a row, n documents of a batch, with padding documents; t tokens of all
documents, cp ranks.

Example, [5 6 7] and [8 9] in one row of 8 tokens:

    input_ids      5    6    7    8    9    0    0    0
    labels         6    7 -100    9 -100 -100 -100 -100
    position_ids   0    1    2    0    1    0    1    2
    padding_mask   -    -    -    -    -    x    x    x
    cu_seqlens     0              3         5              8      num_tokens 3, max_seqlen 3
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from moecore.base.fields import (
    CheckedRecord,
    Count,
    CountOrZero,
    FieldErrors,
    check_arguments,
    quote,
)
from moecore.kernels.cross_entropy import IGNORE_INDEX
from moecore.kernels.zigzag import assign_tokens_to_cp_ranks
from moecore.packing.documents import Document, Integers, Lengths, as_lengths, count_document_tokens


class PackedBatch(TypedDict):
    """A batch of rows of documents, on the CPU. Padding at the end of a row is also a document."""

    input_ids: Tensor  # int64 [B, T]
    labels: Tensor  # int64 [B, T]; -100 = ignored by the loss
    position_ids: Tensor  # int64 [B, T], from 0 in each document
    padding_mask: Tensor  # bool [B, T]; True = padding
    cu_seqlens: Tensor  # int32 [n + 1], the start of each document in the flattened rows, and B * T
    max_seqlen: int  # tokens of the longest document, with padding documents
    num_tokens: Tensor  # int64 scalar, the number of labels that are not -100


class Piece(NamedTuple):
    """Consecutive tokens of one document (all or a part of it) in one row, with their labels."""

    ids: Integers
    next_id: int  # the label of the last token; -100 = ignored by the loss
    labels: Integers | None = None  # unshifted labels of the tokens; None = ids

    @property
    def num_labels(self) -> int:
        """The number of labels that are not -100 (ignored by the loss)."""
        count = len(self.ids) - 1
        if self.labels is not None:
            count = int((self.labels[1:] != IGNORE_INDEX).sum())
        return count + (self.next_id != IGNORE_INDEX)


Rows = Sequence[Sequence[Piece]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedCollator(CheckedRecord):
    """A `collate_fn` for DataLoader that makes a `PackedBatch` from a list of documents.

    The collator places documents in their order. A document that does not fit the current row
    starts the next row. Documents from a `PackedBatchSampler` therefore always fit in `rows` rows.

    Attributes:
        row_tokens: tokens T of a row.
        rows: rows B of every batch. A row without documents is padding.
        multiple: each document is padded at its end to a multiple of this number of tokens, and the
            padding belongs to the document. Context parallelism needs 2 * cp (`split_batch`).
        max_documents: if given, every batch has static shapes, as CUDA graphs need: `cu_seqlens`
            has `max_documents` + 1 entries (the last is repeated), and `max_seqlen` is
            `row_tokens`. Padding documents count too.
        shift_labels: True = a token's label is the next token, as `moecore.models.Decoder` expects,
            and -100 at a document's end. False = a token's label is its own id, as transformers'
            models expect because they shift labels, and -100 at a document's start.
        pad_id: token id of padding.
    """

    row_tokens: Count
    rows: Count = 1
    multiple: Count = 1
    max_documents: Count | None = None
    shift_labels: bool = True
    pad_id: CountOrZero = 0

    def _find_field_errors(self) -> FieldErrors:
        if self.row_tokens % self.multiple:
            yield "row_tokens", f"be a multiple of multiple ({self.multiple}): round it up"
        if self.rows * self.row_tokens >= 2**31:
            yield "row_tokens", f"be < 2**31 / rows ({self.rows}): cu_seqlens is int32"

    def __call__(self, documents: Sequence[Document]) -> PackedBatch:
        """Return the batch of these documents.

        Args:
            documents: token ids (lists, numpy arrays or tensors), or mappings with `input_ids`. A
                mapping may have unshifted `labels` (-100 = ignored by the loss) and
                `assistant_masks` (0 = ignored by the loss). Without both keys the loss uses all
                tokens.

        Raises:
            ValueError: for an object that is no document, a document without tokens, a number of
                labels that differs from the number of tokens, or documents that need more than
                `rows` rows or exceed `max_documents`.
        """
        check_arguments(PackedCollator.__call__, locals())
        rows, row, row_length = [list[Piece]() for _ in range(self.rows)], 0, 0
        for number, document in enumerate(documents):
            piece = read_document(document, number)
            length = -(-len(piece.ids) // self.multiple) * self.multiple
            if row_length + length > self.row_tokens:
                row, row_length = row + 1, 0
            if length > self.row_tokens or row >= self.rows:
                raise ValueError(
                    f"documents (number {number}, {len(piece.ids)} tokens) must fit the rows "
                    f"({self.rows} of {self.row_tokens} tokens): give it the batches of a "
                    "PackedBatchSampler with these rows and bin_tokens"
                )
            rows[row].append(piece)
            row_length += length
        return build_batch(
            rows,
            row_tokens=self.row_tokens,
            multiple=self.multiple,
            shift_labels=self.shift_labels,
            pad_id=self.pad_id,
            max_documents=self.max_documents,
        )


def build_batch(
    rows: Rows,
    *,
    row_tokens: int,
    multiple: int,
    max_padding_tokens: int | None = None,
    shift_labels: bool = True,
    pad_id: int = 0,
    max_documents: int | None = None,
) -> PackedBatch:
    """Return the batch of these rows, each a list of pieces of documents, on the CPU.

    `max_padding_tokens` limits the length of a padding document at the end of a row; None = no
    limit. The other arguments are fields of `PackedCollator`. Raises a ValueError for more than
    `max_documents` documents, padding documents included.
    """
    B, T = len(rows), row_tokens
    ids_BT, labels_BT = np.full((B, T), pad_id), np.full((B, T), IGNORE_INDEX)
    padding_BT, borders = np.ones((B, T), bool), [0]
    for b, pieces in enumerate(rows):
        start = 0
        for ids, next_id, labels in pieces:
            stop, first = start + len(ids), start + (not shift_labels)
            ids_BT[b, start:stop] = ids
            labels_BT[b, first : first + len(ids) - 1] = (ids if labels is None else labels)[1:]
            if shift_labels:
                labels_BT[b, stop - 1] = next_id
            padding_BT[b, start:stop] = False
            start += -(-len(ids) // multiple) * multiple
            borders.append(b * T + start)
        if start < T:
            borders.extend(range(b * T + start, (b + 1) * T, max_padding_tokens or T)[1:])
            borders.append((b + 1) * T)
    cu_n = np.array(borders)
    lengths_n = np.diff(cu_n)
    if max_documents is not None:
        if len(lengths_n) > max_documents:
            raise ValueError(
                f"documents ({len(lengths_n)} with those of padding) must be <= max_documents "
                f"({max_documents}): raise it, or leave short ones out"
            )
        borders += [borders[-1]] * (max_documents - len(lengths_n))
    positions_N = np.arange(B * T) - np.repeat(cu_n[:-1], lengths_n)
    return PackedBatch(
        input_ids=torch.from_numpy(ids_BT),
        labels=torch.from_numpy(labels_BT),
        position_ids=torch.from_numpy(positions_N.reshape(B, T)),
        padding_mask=torch.from_numpy(padding_BT),
        cu_seqlens=torch.tensor(borders, dtype=torch.int32, device="cpu"),
        max_seqlen=row_tokens if max_documents is not None else int(lengths_n.max()),
        num_tokens=torch.from_numpy(labels_BT != IGNORE_INDEX).sum(),
    )


def read_document(document: Document, document_idx: int) -> Piece:
    """Return a document's ids and labels, maybe views of its memory; ValueError if invalid."""
    name = f"documents[{document_idx}]"
    length = count_document_tokens(document, name)
    if not length:
        raise ValueError(f"{name} (0 tokens) must have >= 1 token: leave it out")
    if not isinstance(document, Mapping):
        return Piece(_convert_to_int64(document, name), IGNORE_INDEX)
    ids = labels = _convert_to_int64(document["input_ids"], f"{name}['input_ids']")
    if "labels" in document:
        labels = _read_token_values(document, "labels", name, length)
    if "assistant_masks" in document:
        mask = _read_token_values(document, "assistant_masks", name, length)
        labels = np.where(mask != 0, labels, IGNORE_INDEX)
    return Piece(ids, IGNORE_INDEX, labels)


def _read_token_values(
    document: Mapping[str, Any], key: str, document_name: str, num_tokens: int
) -> Integers:
    """Return `document[key]` as int64 [num_tokens]; errors name `document_name`."""
    name = f"{document_name}[{key!r}]"
    numbers = _convert_to_int64(document[key], name)
    if len(numbers) != num_tokens:
        raise ValueError(
            f"{name} ({len(numbers)} numbers) must have one per token ({num_tokens}): "
            "make them from the same tokens"
        )
    return numbers


def _convert_to_int64(values: Any, value_name: str) -> Integers:
    """Return integers as int64, which may share memory; ValueError for other objects."""
    try:
        array = np.asarray(values) if isinstance(values, list) else values
        tensor = torch.as_tensor(array, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        tensor = torch.empty(0, dtype=torch.float32, device="cpu")
    if tensor.ndim != 1 or tensor.is_floating_point() or tensor.is_complex():
        relation = "must be whole numbers, one per token: tokenize it"
        raise ValueError(f"{value_name} ({quote(values)}) {relation}")
    return tensor.long().numpy(force=True)


def padded_lengths(lengths: Lengths, cp: Count) -> Integers:
    """Return lengths, int64 [documents], rounded up to multiples of 2 * cp; unchanged for cp 1."""
    check_arguments(padded_lengths, locals())
    multiple = get_length_multiple(cp)
    return -(-as_lengths(lengths) // multiple) * multiple


def get_length_multiple(cp: int) -> int:
    """Return the number that must divide every document's length: 2 * cp, or 1 if cp is 1."""
    return 2 * cp if cp > 1 else 1


def select_token_indices(cu_seqlens: Tensor, cp: Count, rank: CountOrZero) -> Tensor:
    """Return the token indices of a cp rank, int64 [tokens / cp], on the device of `cu_seqlens`.

    A rank has chunks `rank` and 2 * cp - 1 - `rank` of the 2 * cp chunks of each document. The
    indices ascend. If `cu_seqlens` is on a GPU, the function synchronises the host.

    Args:
        cu_seqlens: integers [documents + 1], cumulative document lengths from 0. With cp > 1 each
            length is a multiple of 2 * cp. Documents without tokens are allowed.
        cp: number of context parallel ranks.
        rank: index of the cp rank, from 0.

    Raises:
        ValueError: if `cu_seqlens` is not as described, or `rank` >= `cp`.
    """
    check_arguments(select_token_indices, locals())
    if rank >= cp:
        raise ValueError(f"rank ({rank}) must be < cp ({cp}): count from 0")
    return _split_tokens_over_ranks(cu_seqlens, cp)[rank]


def invert_token_indices(cu_seqlens: Tensor, cp: Count) -> Tensor:
    """Return the inverse permutation of the concatenated indices of all cp ranks, int64 [tokens].

        parts = [x[select_token_indices(cu_seqlens, cp, rank)] for rank in range(cp)]
        torch.cat(parts)[invert_token_indices(cu_seqlens, cp)]  # equals x

    Arguments and errors: see `select_token_indices`.
    """
    check_arguments(invert_token_indices, locals())
    tokens = _split_tokens_over_ranks(cu_seqlens, cp).flatten()
    inverse = torch.empty_like(tokens)
    inverse[tokens] = torch.arange(len(tokens), device=tokens.device)
    return inverse


def split_batch(batch: PackedBatch, cp: Count, rank: CountOrZero) -> PackedBatch:
    """Return the part of a batch that a cp rank computes, with shape [rows, tokens / cp].

    Labels are selected, not recomputed, so they must be shifted beforehand (`shift_labels=True`).
    `cu_seqlens`, `max_seqlen` and `num_tokens` describe this rank's part.

    Args:
        batch: the result of a `PackedCollator` with `multiple=2 * cp`.
        cp, rank: number of context parallel ranks, and index of the cp rank.

    Raises:
        ValueError: if `batch` is no `PackedBatch`, or for the reasons of `select_token_indices`.
    """
    if not isinstance(batch, Mapping) or not PackedBatch.__required_keys__ <= set(batch):
        relation = "must be a PackedBatch: pass what a PackedCollator returns"
        raise ValueError(f"batch ({quote(batch)}) {relation}")
    tokens = select_token_indices(batch["cu_seqlens"], cp, rank)
    rows = batch["input_ids"].shape[0]

    def take_local(x_BT: Tensor) -> Tensor:
        """Return this cp rank's tokens of each row, [rows, tokens / cp]."""
        return x_BT.flatten()[tokens.to(x_BT.device)].view(rows, -1)

    labels = take_local(batch["labels"])
    return PackedBatch(
        input_ids=take_local(batch["input_ids"]),
        labels=labels,
        position_ids=take_local(batch["position_ids"]),
        padding_mask=take_local(batch["padding_mask"]),
        cu_seqlens=batch["cu_seqlens"] // cp,
        max_seqlen=batch["max_seqlen"] // cp,
        num_tokens=(labels != IGNORE_INDEX).sum(),
    )


def _split_tokens_over_ranks(cu_seqlens: Tensor, cp: int) -> Tensor:
    """Return token indices by rank, int64 [cp, tokens / cp]; ValueError for bad `cu_seqlens`."""
    lengths_n = cu_seqlens.long().diff() if cu_seqlens.ndim == 1 else None
    relation = None
    if lengths_n is None or cu_seqlens.is_floating_point() or not len(lengths_n):
        relation = "be whole numbers [documents + 1]"
    elif int(cu_seqlens[0]) or bool((lengths_n < 0).any()):
        relation = "ascend from 0"
    if lengths_n is None or relation is not None:
        fix = "pass that of a PackedBatch"
        raise ValueError(f"cu_seqlens ({quote(cu_seqlens)}) must {relation}: {fix}")
    uneven = (lengths_n % get_length_multiple(cp)).nonzero()
    if len(uneven):
        raise ValueError(
            f"cu_seqlens (document {int(uneven[0])} of {int(lengths_n[uneven[0]])} tokens) must "
            f"have documents of multiples of 2 * cp ({2 * cp}): collate with multiple={2 * cp}"
        )
    return assign_tokens_to_cp_ranks(cu_seqlens, int(lengths_n.sum()), cp)
