"""Layout: how tokens of rows lie on G ranks, and how to get from one order to the other.

Legend: B rows, T tokens of a row, G ranks, t = T / G tokens of a row of one rank, C = t / 2 tokens
of a chunk, X any dims behind.

Rows, or documents that are packed into rows, are cut as in `kernels/zigzag.py`. The chunk that
stands earlier in its document is a rank's early half, the other its late half.

Rows are cut and joined by views and one copy, documents by one index per forward. What reads halves
of packed documents gets all rows as one, [1, B * t, ...].
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from moecore.kernels.attention import AttentionMask
from moecore.kernels.zigzag import documents_of, held_tokens

Half = Literal["all", "early", "late"]


class ChunkLayout:
    """How tokens lie on ranks; a plain class, as `RotaryTable` is, made once per forward.

    `num_tokens` is B * T. Documents over all rows are each a multiple of 2 * G; None = rows.
    """

    def __init__(
        self, size: int, num_tokens: int, cu_seqlens: Tensor | None = None, max_seqlen: int = 0
    ) -> None:
        self.size = size
        self._num_tokens = num_tokens
        self._cu_seqlens = cu_seqlens
        self._max_chunk = -(-max_seqlen // (2 * size))
        self._firsts: dict[int, Tensor] = {}

    def split(self, x_BTX: Tensor) -> Tensor:
        """Return x_GBtX, the tokens of each rank."""
        G, (B, T) = self.size, x_BTX.shape[:2]
        if self._cu_seqlens is not None:
            return x_BTX.flatten(0, 1)[self._token_ids.flatten()].view(
                G, B, T // G, *x_BTX.shape[2:]
            )
        chunks = x_BTX.unflatten(1, (2 * G, T // (2 * G)))
        halves = torch.stack((chunks[:, :G], chunks[:, G:].flip(1)), dim=2)
        return halves.flatten(2, 3).transpose(0, 1)

    def join(self, x_GBtX: Tensor) -> Tensor:
        """Return x_BTX; undoes `split`."""
        G, B, t = x_GBtX.shape[:3]
        if self._cu_seqlens is not None:
            return x_GBtX.flatten(0, 2)[self._places].view(B, G * t, *x_GBtX.shape[3:])
        halves = x_GBtX.unflatten(2, (2, t // 2))
        chunks = torch.cat((halves[:, :, 0], halves[:, :, 1].flip(0)))
        return chunks.transpose(0, 1).flatten(1, 2)

    def flat(self, x_BtX: Tensor) -> Tensor:
        """Return packed rows as one; rows that are documents as they are."""
        return x_BtX if self._cu_seqlens is None else x_BtX.flatten(0, 1)[None]

    def half(self, x_BtX: Tensor, half: Half, dim: int = 1) -> Tensor:
        """Return a rank's early or late half of `flat` tokens."""
        if half == "all":
            return x_BtX
        if self._cu_seqlens is not None:
            return x_BtX.index_select(dim, self._halves[half == "late"])
        C = x_BtX.shape[dim] // 2
        return x_BtX.narrow(dim, C if half == "late" else 0, C)

    def write_half(self, x_BtX: Tensor, half: Half, values_BCX: Tensor, dim: int = 1) -> None:
        """Write what `half` reads."""
        if half == "all":
            x_BtX.copy_(values_BCX)
        elif self._cu_seqlens is not None:
            x_BtX.index_copy_(dim, self._halves[half == "late"], values_BCX)
        else:
            self.half(x_BtX, half, dim).copy_(values_BCX)

    def first_chunks(self, x_BTX: Tensor, num_chunks: int) -> Tensor:
        """Return the first of the 2 * G chunks of every document of `flat` whole rows."""
        if self._cu_seqlens is None:
            return x_BTX[:, : num_chunks * (x_BTX.shape[1] // (2 * self.size))]
        return x_BTX[:, self._first(num_chunks)]

    def add_first_chunks(self, x_BTX: Tensor, num_chunks: int, values: Tensor) -> None:
        """Add to what `first_chunks` reads."""
        if self._cu_seqlens is None:
            self.first_chunks(x_BTX, num_chunks).add_(values)
        else:
            x_BTX.index_add_(1, self._first(num_chunks), values)

    def mask(
        self, queries: int, keys: int, *, causal: bool = True, window: int | None = None
    ) -> AttentionMask:
        """Return the mask between so many chunks of every document."""
        if self._cu_seqlens is None:
            return AttentionMask(causal=causal, window=window)
        return AttentionMask(
            causal=causal,
            window=window,
            cu_seqlens_q=self._chunk_borders * queries,
            cu_seqlens_k=self._chunk_borders * keys,
            max_length_q=self._max_chunk * queries,
            max_length_k=self._max_chunk * keys,
        )

    @cached_property
    def _borders(self) -> Tensor:
        assert self._cu_seqlens is not None, "rows have no index"
        return self._cu_seqlens

    @cached_property
    def _chunk_borders(self) -> Tensor:
        """int32 [n + 1], of the documents where every one has a chunk alone."""
        return self._borders // (2 * self.size)

    @cached_property
    def _token_ids(self) -> Tensor:
        """int64 [G, B * t], the tokens of each rank."""
        return held_tokens(self._borders, self._num_tokens, self.size)

    @cached_property
    def _places(self) -> Tensor:
        """int64 [B * T], where each token lies among those of all ranks."""
        token_ids = self._token_ids.flatten()
        places = torch.empty_like(token_ids)
        places[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
        return places

    @cached_property
    def _halves(self) -> tuple[Tensor, Tensor]:
        """int64 [B * C] each, the early and the late ones of a rank's tokens."""
        num = self._num_tokens // (2 * self.size)
        borders = self._chunk_borders.long()
        documents = documents_of(borders, num)
        early = torch.arange(num, device=borders.device) + borders[documents]
        return early, early + borders.diff()[documents]

    def _first(self, num_chunks: int) -> Tensor:
        """Return int64 [B * C * num_chunks], the tokens of `first_chunks`."""
        if num_chunks not in self._firsts:
            borders = self._chunk_borders.long()
            num = self._num_tokens // (2 * self.size) * num_chunks
            documents = documents_of(borders * num_chunks, num)
            places = torch.arange(num, device=borders.device) - borders[documents] * num_chunks
            self._firsts[num_chunks] = self._borders[documents] + places
        return self._firsts[num_chunks]
