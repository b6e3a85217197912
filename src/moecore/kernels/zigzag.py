"""Zigzag layout of a packed batch for context parallelism: the tokens of each rank.

Attention is causal, so the last tokens of a document need the most work. Each document is divided
into 2 * size chunks, and rank r has chunks r and 2 * size - 1 - r, so all ranks have equal work.
Example, size 3, documents of 12, 24 and 6 tokens, so chunks have 2, 4 and 1 tokens:

    rank 0   0 1 10 11    12 .. 15 32 .. 35    36 41
    rank 1   2 3 8 9      16 .. 19 28 .. 31    37 40
    rank 2   4 5 6 7      20 .. 23 24 .. 27    38 39

The tokens of a rank are packed documents too, with the offsets `cu_seqlens // size`. `cu_seqlens`
[n + 1] has the first token of each of n documents, and the number of tokens. Documents may be
empty.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")
_TABLES = WeakTensorKeyDictionary()  # cu_seqlens -> {(function, num_tokens): (version, table)}


def get_shared_table(make: Callable[[Tensor, int], T], cu_seqlens: Tensor, num_tokens: int) -> T:
    """Return make(cu_seqlens, num_tokens), shared by all layers until `cu_seqlens` changes.

    A table is freed with `cu_seqlens`, to which it must not refer. A captured CUDA graph has
    separate tables, because its replays run no Python.
    """
    is_captured = cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()
    is_special = type(cu_seqlens) is not Tensor or cu_seqlens.is_meta or cu_seqlens.is_inference()
    if is_captured or is_special:
        return make(cu_seqlens, num_tokens)
    tables = _TABLES.setdefault(cu_seqlens, {})
    if tables.get((make, num_tokens), [None])[0] != cu_seqlens._version:
        with torch.inference_mode(False):  # the backward of a later call may save the table
            tables[make, num_tokens] = cu_seqlens._version, make(cu_seqlens, num_tokens)
    return tables[make, num_tokens][1]  # type: ignore[no-any-return]


def find_document_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return each token's document index: cu_seqlens [0, 2, 3, 3] give int64 [0, 0, 1]."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)


def find_positions_in_documents(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return each token's position in its document: cu_seqlens [0, 2, 3, 3] give [0, 1, 0]."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    return tokens - cu_seqlens[find_document_ids(cu_seqlens, num_tokens)]


def make_row_cu_seqlens(num_rows: int, num_tokens: int, device: torch.device) -> Tensor:
    """Return offsets, int32 [num_rows + 1], of rows of equal length; num_tokens counts all rows."""
    rows = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    return rows * (num_tokens // max(num_rows, 1))


def assign_tokens_to_cp_ranks(cu_seqlens: Tensor, num_tokens: int, cp_size: int) -> Tensor:
    """Return each context-parallel rank's token indices: int64 [cp_size, num_tokens / cp_size].

    The indices ascend. Document lengths must be multiples of 2 * cp_size (unchecked). No host sync.
    """
    num_local = num_tokens // cp_size
    cu_seqlens = cu_seqlens.long()
    borders = cu_seqlens // cp_size
    documents = find_document_ids(borders, num_local)
    places = torch.arange(num_local, device=cu_seqlens.device) - borders[documents]
    chunks = (cu_seqlens.diff() // (2 * cp_size))[documents]
    is_late = places >= chunks
    ranks = torch.arange(cp_size, device=cu_seqlens.device)[:, None]
    numbers = torch.where(is_late, 2 * cp_size - 1 - ranks, ranks)
    return cu_seqlens[documents] + numbers * chunks + places - is_late * chunks
