"""What a document is: token ids, or a row of a dataset; its length, and pieces of it.

A document is a list, numpy array or tensor of token ids, or a mapping as datasets give it:

    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}           labels of the tokens themselves
    {"input_ids": [5, 6, 7], "assistant_masks": [0, 1, 1]}     1 = the token is learned

Other keys are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from torch import Tensor

from moecore.base.fields import Count, check_arguments, quote

KEYS = ("input_ids", "labels", "assistant_masks")  # values of one number per token

Document = Annotated[Any, "token ids, or a mapping with input_ids"]
Lengths = Annotated[Any, "one whole number >= 1 per document: a list, numpy array or tensor"]
Integers = np.ndarray[Any, np.dtype[np.int64]]


def as_lengths(lengths: Lengths, name: str = "lengths", minimum: int = 1) -> Integers:
    """Return lengths as int64 [N], or refuse what is not whole, >= least and < 2**31."""
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
    """Return the number of a document's tokens, or refuse what is no document."""
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
    """Return tokens start .. stop of a document, with their labels."""
    if not isinstance(document, Mapping):
        return document[start:stop]
    return {key: document[key][start:stop] for key in KEYS if key in document}


def check_fits(lengths_N: Integers, max_tokens: int) -> None:
    """Raise when a document is longer than a bin."""
    if lengths_N.size and lengths_N.max() > max_tokens:
        longest = int(lengths_N.argmax())
        raise ValueError(
            f"lengths ({lengths_N[longest]} of document {longest}) must be <= the tokens of a bin "
            f"({max_tokens}): take larger bins, leave it out, or cut it with CutDocuments"
        )


class CutDocuments:
    """A dataset in which no document is longer than a bin: longer ones are several items.

    The pieces of a document lie behind each other, all full but for the last. A piece does not
    attend to the piece before it, and the label across a cut is lost.

    Example, lengths 3, 10, 4 and 4 tokens: items 0, 1 .. 3 and 4 of lengths 3, 4 4 2 and 4.

    Attributes:
        lengths: int64 [items], what `PackedBatchSampler` needs.

    Args:
        documents: by index; only the length of a document that is read is looked at.
        lengths: of each document.
        max_tokens: of an item.

    Raises:
        ValueError: when `documents` has no items by index, or lengths are not one per document.
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
