"""Which document a token of a packed batch belongs to, and its place there. Plain PyTorch.

`cu_seqlens` [n + 1] has the first token of each of n documents, and the number of tokens. Documents
without tokens may stand anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor


def documents_of(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return int64 [num_tokens], the document of each token. No host sync.

    Example: cu_seqlens [0, 2, 3, 3] gives [0, 0, 1].
    """
    tokens = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)


def positions_of(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return int64 [num_tokens], the place of each token in its document. No host sync.

    Example: cu_seqlens [0, 2, 3, 3] gives [0, 1, 0].
    """
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    return tokens - cu_seqlens[documents_of(cu_seqlens, num_tokens)]
