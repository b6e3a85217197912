"""Functions that read the length of documents, check it, and cut documents into pieces.

A document is a list, numpy array or tensor of token ids, or a mapping such as a dataset's row:

    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}           unshifted labels, -100 = ignored
    {"input_ids": [5, 6, 7], "assistant_masks": [0, 1, 1]}     0 = ignored by the loss

Other keys of a mapping are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from torch import Tensor

from moecore.base.fields import Count, check_arguments, quote

KEYS = ("input_ids", "labels", "assistant_masks")  # keys whose value has one number per token

Document = Annotated[Any, "token ids, or a mapping with input_ids"]
Lengths = Annotated[Any, "one whole number >= 1 per document: a list, numpy array or tensor"]
Integers = np.ndarray[Any, np.dtype[np.int64]]


def as_lengths(lengths: Lengths, name: str = "lengths", minimum: int = 1) -> Integers:
    """Return lengths as int64 [N]. Raise unless they are integers >= `minimum` and < 2**31."""
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
    wrong = np.flatnonzero((numbers < minimum) | (numbers >= 2**31))
    if wrong.size:
        first = int(wrong[0])
        raise ValueError(
            f"{name} ({numbers[first]} of document {first}) must be >= {minimum} and < 2**31: "
            "leave out the document"
        )
    return numbers.astype(np.int64)


def length_of(document: Document, name: str = "documents") -> int:
    """Return the number of tokens of a document. Raise if the object is no document."""
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
    """Return the tokens [start, stop) of a document, with their labels and masks."""
    if not isinstance(document, Mapping):
        return document[start:stop]
    return {key: document[key][start:stop] for key in KEYS if key in document}


def check_fits(lengths_N: Integers, max_tokens: int) -> None:
    """Raise a ValueError if a document has more than `max_tokens` tokens."""
    if lengths_N.size and lengths_N.max() > max_tokens:
        longest = int(lengths_N.argmax())
        raise ValueError(
            f"lengths ({lengths_N[longest]} of document {longest}) must be <= the tokens of a bin "
            f"({max_tokens}): take larger bins, leave it out, or cut it with CutDocuments"
        )


class CutDocuments:
    """A dataset that cuts each document into items of at most `max_tokens` tokens.

    The pieces of a document are consecutive items of `max_tokens` tokens; the last piece may be
    shorter. A piece does not attend to earlier pieces. No label spans a cut: the last token of a
    piece has no label.

    Example, lengths 3, 10, 4 and 4 tokens: items 0, 1 .. 3 and 4 of lengths 3, 4 4 2 and 4.

    Attributes:
        lengths: int64 [items], tokens of each item, an argument of `PackedBatchSampler`.

    Args:
        documents: a list or a dataset with an index. Documents are read only when an item is read.
        lengths: tokens of each document.
        max_tokens: the largest number of tokens of an item.

    Raises:
        ValueError: if `documents` has no index or length, or `lengths` is not one per document.
    """

    def __init__(self, documents: Any, lengths: Lengths, max_tokens: Count) -> None:
        check_arguments(CutDocuments.__init__, locals())
        if not hasattr(documents, "__getitem__") or not hasattr(documents, "__len__"):
            raise ValueError(
                f"documents ({quote(documents)}) must have a length and items by index: pass a "
                "list or a dataset"
            )
        lengths_N = as_lengths(lengths)
        if len(lengths_N) != len(documents):
            raise ValueError(
                f"lengths ({len(lengths_N)} numbers) must be one per document "
                f"({len(documents)}): measure this dataset"
            )
        self._documents = documents
        pieces_N = -(-lengths_N // max_tokens)
        self._document = np.repeat(np.arange(len(lengths_N)), pieces_N)
        firsts = np.repeat(np.cumsum(pieces_N) - pieces_N, pieces_N)
        self._start = (np.arange(len(self._document)) - firsts) * max_tokens
        self.lengths = np.minimum(lengths_N[self._document] - self._start, max_tokens)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, item: int) -> Document:
        start, length = int(self._start[item]), int(self.lengths[item])
        return cut_document(self._documents[int(self._document[item])], start, start + length)

    def __iter__(self) -> Iterator[Document]:
        return (self[item] for item in range(len(self)))
