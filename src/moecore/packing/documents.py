"""Documents: their lengths, checks, pieces and cost models.

A document is a list, numpy array or tensor of token ids, or a mapping such as a dataset's row:

    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}           unshifted labels, -100 = ignored
    {"input_ids": [5, 6, 7], "assistant_masks": [0, 1, 1]}     0 = ignored by the loss

Other keys of a mapping are ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar

import numpy as np
from torch import Tensor

from moecore.base.fields import (
    CheckedRecord,
    Count,
    FieldErrors,
    Positive,
    PositiveOrZero,
    check_arguments,
    quote,
)

KEYS = ("input_ids", "labels", "assistant_masks")  # keys whose value has one number per token

Document = Annotated[Any, "token ids, or a mapping with input_ids"]
Lengths = Annotated[Any, "one whole number >= 1 per document: a list, numpy array or tensor"]
Integers = np.ndarray[Any, np.dtype[np.int64]]


def hash_values(*values: object) -> int:
    """Return a hash of the texts of `values`, 0 to 2^64 - 1, equal in all processes and runs."""
    text = "/".join(map(str, values)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def as_lengths(lengths: Lengths, name: str = "lengths", min_length: int = 1) -> Integers:
    """Return a new int64 array; ValueError naming `name` unless `min_length` <= lengths < 2**31."""
    numbers = lengths
    if isinstance(numbers, Tensor):
        numbers = numbers.numpy(force=True)
    elif isinstance(numbers, Sequence) and not isinstance(numbers, str | bytes):
        try:
            numbers = np.asarray(list(numbers)) if len(numbers) else np.zeros(0, np.int64)
        except (ValueError, OverflowError):  # ragged, or beyond int64
            numbers = None
    if not isinstance(numbers, np.ndarray) or numbers.dtype.kind not in "iu" or numbers.ndim != 1:
        raise ValueError(
            f"{name} ({quote(lengths)}) must be one whole number per document: pass a list of ints"
        )
    wrong = np.flatnonzero((numbers < min_length) | (numbers >= 2**31))
    if wrong.size:
        first = int(wrong[0])
        raise ValueError(
            f"{name} ({numbers[first]} of document {first}) must be >= {min_length} and "
            "< 2**31: leave out the document"
        )
    return numbers.astype(np.int64)


def count_document_tokens(document: Document, name: str = "documents") -> int:
    """Return a document's number of tokens; ValueError (naming `name`) if it is no document."""
    ids = document
    if isinstance(document, Mapping):
        if "input_ids" not in document:
            raise ValueError(
                f"{name} (a row with {quote(list(document))}) must have input_ids: tokenize it"
            )
        ids = document["input_ids"]
    is_ids = isinstance(ids, np.ndarray | Tensor) and ids.ndim == 1
    if not is_ids and (not isinstance(ids, Sequence) or isinstance(ids, str | bytes)):
        raise ValueError(
            f"{name} ({quote(document)}) must be token ids or rows with input_ids: tokenize them"
        )
    return len(ids)


def cut_document(document: Document, start: int, stop: int) -> Document:
    """Return tokens [start, stop) of a document: sliced ids, or a dict with sliced entries."""
    if not isinstance(document, Mapping):
        return document[start:stop]
    return {key: document[key][start:stop] for key in KEYS if key in document}


def cut_lengths(lengths_N: Integers, max_tokens: int) -> tuple[Integers, Integers, Integers]:
    """Cut documents of these lengths into pieces of at most `max_tokens` tokens.

    Returns each piece's document index, first token and length, each int64 [pieces].
    """
    pieces_N = -(-lengths_N // max_tokens)
    documents = np.repeat(np.arange(len(lengths_N)), pieces_N)
    firsts = np.repeat(np.cumsum(pieces_N) - pieces_N, pieces_N)
    starts = (np.arange(len(documents)) - firsts) * max_tokens
    return documents, starts, np.minimum(lengths_N[documents] - starts, max_tokens)


def check_max_length(lengths_N: Integers, max_tokens: int) -> None:
    """Raise a ValueError if a document has more than `max_tokens` tokens."""
    if lengths_N.size and lengths_N.max() > max_tokens:
        longest = int(lengths_N.argmax())
        raise ValueError(
            f"lengths ({lengths_N[longest]} of document {longest}) must be <= the tokens of a bin "
            f"({max_tokens}): take larger bins, leave it out, or cut it with CutDocuments"
        )


class CutDocuments:
    """A dataset that cuts each document into items of at most `max_tokens` tokens.

    The pieces of a document are consecutive items; only the last may have fewer tokens. A piece
    does not attend to earlier pieces, and its last token has no label.

    Example: with `max_tokens` 4, documents of 3, 10 and 4 tokens give items of 3, 4, 4, 2 and 4.

    Attributes:
        lengths: int64 [items], tokens of each item, an argument of `PackedBatchSampler`.

    Args:
        documents: a list or a dataset with an index. Reading an item reads its document.
        lengths: tokens of each document.
        max_tokens: the largest number of tokens of an item.

    Raises:
        ValueError: if `documents` has no index or length, or `lengths` is not one per document.
    """

    def __init__(self, documents: Any, lengths: Lengths, max_tokens: Count) -> None:
        check_arguments(CutDocuments.__init__, locals())
        if not hasattr(documents, "__getitem__") or not hasattr(documents, "__len__"):
            relation = "must have a length and items by index: pass a list or a dataset"
            raise ValueError(f"documents ({quote(documents)}) {relation}")
        lengths_N = as_lengths(lengths)
        if len(lengths_N) != len(documents):
            relation = f"must be one per document ({len(documents)}): measure this dataset"
            raise ValueError(f"lengths ({len(lengths_N)} numbers) {relation}")
        self._documents = documents
        self._document, self._start, self.lengths = cut_lengths(lengths_N, max_tokens)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, item: int) -> Document:
        start, length = int(self._start[item]), int(self.lengths[item])
        return cut_document(self._documents[int(self._document[item])], start, start + length)

    def __iter__(self) -> Iterator[Document]:
        return (self[item] for item in range(len(self)))


Costs = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentCost(CheckedRecord):
    """An analytic cost model of attention, other matmuls and key/value exchange, in any time unit.

        linear * L / cp + max(quadratic * L^2 / cp, exchange * L * (cp - 1) / cp)

    L is the length of the document. The exchange overlaps with attention, so the longer of both
    times counts. A model has h heads of dim d, k key/value heads and P active parameters per layer.
    A GPU has F FLOP/s and B bytes/s to the next GPU. Then the forward of a layer has

        quadratic = 2 h d / F       linear = 2 P / F       exchange = 4 k d / B

    The defaults are for Qwen3-30B-A3B on H200 with 200 GB/s between GPUs, scaled to `quadratic` 1.

    Attributes:
        quadratic: time of causal attention per squared token.
        linear: time of all other matmuls per token.
        exchange: time per token whose keys and values a rank receives from other ranks.
        fixed: time per micro-batch for launches and FSDP all-gathers; by default 1,000 * `linear`.
    """

    quadratic: PositiveOrZero = 1.0
    linear: PositiveOrZero = 20_000.0
    exchange: PositiveOrZero = 750.0
    fixed: PositiveOrZero = 2e7
    max_cp: ClassVar[int | None] = None  # the largest cp of the cost model; None = no limit

    def _find_field_errors(self) -> FieldErrors:
        if not self.quadratic and not self.linear:
            yield "quadratic", f"be > 0 with linear ({self.linear}): give one of them"

    def estimate(self, lengths_N: Integers, cp: int) -> Costs:
        """Return each document's time on each of its `cp` ranks, float64 [documents]."""
        length = lengths_N.astype(np.float64)
        exchange = self.exchange * length * (cp - 1)
        compute = self.linear * length + np.maximum(self.quadratic * length**2, exchange)
        return compute / cp  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCost(CheckedRecord):
    """A cost model from measured times of documents.

    Times are interpolated linearly between measured lengths. Below the first, times are
    proportional to the length, and above the last to its square.

    Attributes:
        lengths: the measured lengths in tokens, ascending.
        seconds: cp -> measured times of one document of each length, ascending. The keys are 1, 2,
            4, ...; the largest key limits the cp of every document.
        fixed: time of a micro-batch without tokens, in seconds.
    """

    lengths: Annotated[tuple[Count, ...], "pass the lengths that were measured"]
    seconds: Mapping[int, tuple[Positive, ...]]
    fixed: PositiveOrZero = 0.0

    def _find_field_errors(self) -> FieldErrors:
        if not self.lengths or any(a >= b for a, b in pairwise(self.lengths)):
            yield "lengths", "ascend, with at least one: sort the table"
        if not self.seconds or set(self.seconds) != {1 << i for i in range(len(self.seconds))}:
            yield "seconds", "have the keys 1, 2, 4, ... without a gap: measure each cp"
        for cp, times in self.seconds.items():
            if len(times) != len(self.lengths) or any(a >= b for a, b in pairwise(times)):
                relation = f"ascend with lengths, {len(self.lengths)} for each cp, also for {cp}"
                yield "seconds", f"{relation}: take medians"

    @property
    def max_cp(self) -> int | None:
        """The largest cp that was measured."""
        return max(self.seconds)

    def estimate(self, lengths_N: Integers, cp: int) -> Costs:
        """Return each document's seconds on each of its `cp` ranks, float64 [documents]."""
        first, last = self.lengths[0], self.lengths[-1]
        times = self.seconds[cp]
        inside = np.interp(lengths_N, self.lengths, times)
        below = times[0] * lengths_N / first
        beyond = times[-1] * (lengths_N / last) ** 2
        return np.where(lengths_N < first, below, np.where(lengths_N > last, beyond, inside))


Cost = DocumentCost | MeasuredCost
