"""The tokens that each cp rank stores, and collectives between these tokens and full rows.

Activations are sharded along the tokens. Only attention communicates, in one of four ways:

    allgather   each rank all-gathers keys and values and computes its local queries
    a2a         an all-to-all gives each rank all tokens of some heads, and one returns the outputs
    p2p         keys and values pass around a ring, and each rank merges partial outputs
    a2a+p2p     all-to-alls within groups of neighbouring ranks, rings between the groups

Each row, or each document packed into rows, is cut into 2 * G chunks (`kernels/zigzag.py`). A rank
stores two chunks of each document, the early half and the late half.
Rows are split and joined by views and one copy, documents by one index per forward.

Legend: B rows, T tokens of a row, G cp ranks, t = T / G tokens of a row of this rank, C = t / 2
tokens of a chunk, X any further dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.attention.context_parallel.states import LocalChunks
from moecore.base.regions import run_and_save
from moecore.kernels.attention import AttentionMask
from moecore.kernels.zigzag import assign_tokens_to_cp_ranks, find_document_ids, make_row_cu_seqlens
from moecore.moe.dispatch.collectives import (
    all_gather_rows,
    exchange_with_grad,
    reduce_scatter_rows,
)

Half = Literal["all", "early", "late"]


class ChunkLayout:
    """The assignment of tokens of full rows [B, T] to G cp ranks: two chunks of each document.

    `size` is G, and `num_tokens` B * T. `cu_seqlens` describes documents packed into rows; None =
    each row is one document. Document lengths are multiples of 2 * G, at most `max_seqlen`.
    """

    def __init__(
        self, num_ranks: int, num_tokens: int, cu_seqlens: Tensor | None = None, max_seqlen: int = 0
    ) -> None:
        self.size = num_ranks
        self._num_tokens = num_tokens
        self._cu_seqlens = cu_seqlens
        self._max_chunk = -(-max_seqlen // (2 * num_ranks))
        self._first_chunk_ids: dict[int, Tensor] = {}

    def split_by_rank(self, x_BTX: Tensor) -> Tensor:
        """Return [G, B, T / G, ...], the tokens of each cp rank, from full rows [B, T, ...]."""
        G, (B, T) = self.size, x_BTX.shape[:2]
        if self._cu_seqlens is not None:
            x_GBtX = x_BTX.flatten(0, 1)[self._token_ids.flatten()]
            return x_GBtX.view(G, B, T // G, *x_BTX.shape[2:])
        chunks = x_BTX.unflatten(1, (2 * G, T // (2 * G)))
        halves = torch.stack((chunks[:, :G], chunks[:, G:].flip(1)), dim=2)
        return halves.flatten(2, 3).transpose(0, 1)

    def join_ranks(self, x_GBtX: Tensor) -> Tensor:
        """Return full rows [B, T, ...] from each cp rank's tokens [G, B, T / G, ...]."""
        G, B, t = x_GBtX.shape[:3]
        if self._cu_seqlens is not None:
            return x_GBtX.flatten(0, 2)[self._inverse_token_ids].view(B, G * t, *x_GBtX.shape[3:])
        halves = x_GBtX.unflatten(2, (2, t // 2))
        chunks = torch.cat((halves[:, :, 0], halves[:, :, 1].flip(0)))
        return chunks.transpose(0, 1).flatten(1, 2)

    def flatten_rows(self, x_BtX: Tensor) -> Tensor:
        """Return rows with packed documents as one row [1, B * t, ...], other rows unchanged."""
        return x_BtX if self._cu_seqlens is None else x_BtX.flatten(0, 1)[None]

    def select_half(self, x_BtX: Tensor, half: Half, dim: int = 1) -> Tensor:
        """Return this rank's "early" (first) or "late" (second) chunk of each document; "all" = x.

        x is a result of `flatten_rows`, with tokens in dim `dim`. The result may be a view.
        """
        if half == "all":
            return x_BtX
        if self._cu_seqlens is not None:
            return x_BtX.index_select(dim, self._half_ids[half == "late"])
        C = x_BtX.shape[dim] // 2
        return x_BtX.narrow(dim, C if half == "late" else 0, C)

    def write_half(self, x_BtX: Tensor, half: Half, values_BCX: Tensor, dim: int = 1) -> None:
        """Write values to this rank's "early" (first) or "late" chunk of each document, or "all".

        `x_BtX`, `half` and `dim` are as in `select_half`. In place.
        """
        if half == "all":
            x_BtX.copy_(values_BCX)
        elif self._cu_seqlens is not None:
            x_BtX.index_copy_(dim, self._half_ids[half == "late"], values_BCX)
        else:
            self.select_half(x_BtX, half, dim).copy_(values_BCX)

    def select_first_chunks(self, x_BTX: Tensor, num_chunks: int) -> Tensor:
        """Return each document's first `num_chunks` chunks from full rows (by `flatten_rows`)."""
        if self._cu_seqlens is None:
            return x_BTX[:, : num_chunks * (x_BTX.shape[1] // (2 * self.size))]
        return x_BTX[:, self._find_first_chunks(num_chunks)]

    def add_first_chunks(self, x_BTX: Tensor, num_chunks: int, values: Tensor) -> None:
        """Add values, in place, to the tokens of each document's first `num_chunks` chunks."""
        if self._cu_seqlens is None:
            self.select_first_chunks(x_BTX, num_chunks).add_(values)
        else:
            x_BTX.index_add_(1, self._find_first_chunks(num_chunks), values)

    def make_mask(
        self,
        num_query_chunks: int,
        num_key_chunks: int,
        *,
        causal: bool = True,
        window: int | None = None,
    ) -> AttentionMask:
        """Return the mask for attention of these numbers of query and key chunks per document."""
        if self._cu_seqlens is None:
            return AttentionMask(causal=causal, window=window)
        return AttentionMask(
            causal=causal,
            window=window,
            cu_seqlens_q=self._chunk_cu_seqlens * num_query_chunks,
            cu_seqlens_k=self._chunk_cu_seqlens * num_key_chunks,
            max_length_q=self._max_chunk * num_query_chunks,
            max_length_k=self._max_chunk * num_key_chunks,
        )

    @cached_property
    def _chunk_cu_seqlens(self) -> Tensor:
        """int32 [n + 1], the `cu_seqlens` of one chunk of each document."""
        assert self._cu_seqlens is not None, "rows have no index"
        return self._cu_seqlens // (2 * self.size)

    @cached_property
    def _token_ids(self) -> Tensor:
        """int64 [G, B * t], the indices of each rank's tokens among the B * T tokens."""
        assert self._cu_seqlens is not None, "rows have no index"
        return assign_tokens_to_cp_ranks(self._cu_seqlens, self._num_tokens, self.size)

    @cached_property
    def _inverse_token_ids(self) -> Tensor:
        """int64 [B * T], the index of each token in rank order: the inverse of `_token_ids`."""
        token_ids = self._token_ids.flatten()
        places = torch.empty_like(token_ids)
        places[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
        return places

    @cached_property
    def _half_ids(self) -> tuple[Tensor, Tensor]:
        """int64 [B * C] each, indices of the early and of the late chunks' tokens on a rank."""
        num = self._num_tokens // (2 * self.size)
        borders = self._chunk_cu_seqlens.long()
        documents = find_document_ids(borders, num)
        early = torch.arange(num, device=borders.device) + borders[documents]
        return early, early + borders.diff()[documents]

    def _find_first_chunks(self, num_chunks: int) -> Tensor:
        """Return int64 [B * C * num_chunks], the token indices of `select_first_chunks`. Cached."""
        assert self._cu_seqlens is not None, "rows have no index"
        if num_chunks not in self._first_chunk_ids:
            borders = self._chunk_cu_seqlens.long()
            num = self._num_tokens // (2 * self.size) * num_chunks
            documents = find_document_ids(borders * num_chunks, num)
            places = torch.arange(num, device=borders.device) - borders[documents] * num_chunks
            self._first_chunk_ids[num_chunks] = self._cu_seqlens[documents] + places
        return self._first_chunk_ids[num_chunks]


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """This rank's process groups of context parallelism (cp): all cp ranks, all-to-all, ring."""

    group: dist.ProcessGroup
    # consecutive ranks of `group` that exchange heads for tokens; None = no all-to-all
    a2a: dist.ProcessGroup | None = None
    # the ranks of the ring, every len(a2a)-th rank of `group`; None = no ring. If `a2a` and `ring`
    # are None, keys and values are all-gathered
    ring: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """The number of cp ranks."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank's index among the cp ranks."""
        return self.group.rank()

    @property
    def gathers(self) -> bool:
        """Whether attention all-gathers keys and values, without an all-to-all or a ring."""
        return self.a2a is None and self.ring is None


def select_cp_ranks(
    cp_size: int | None, default: ContextParallel | None, groups: Mapping[int, ContextParallel]
) -> ContextParallel | None:
    """Return `groups[cp_size]`; for None or the size of `default`, return `default`."""
    size = 1 if default is None else default.size
    if cp_size in (None, size):
        return default
    if cp_size not in groups:
        raise ValueError(
            f"cp ({cp_size}) must be one of {[size, *groups]}, which have groups of ranks: "
            "parallelize with ContextOptions(dynamic=True), and plan for its data ranks"
        )
    return groups[cp_size]


class LocalTokens:
    """This cp rank's share of the tokens of one forward, with collectives over the cp ranks.

    The class is plain because FSDP's mixed precision casts tensors in tuples and dataclasses.
    `shape` is (B, T) of the full rows. `cu_seqlens` describes documents packed into the rows, with
    lengths that are multiples of 2 * cp; None = each row is one document. `layout` assigns tokens
    to all cp ranks, and `a2a_layout` to the ranks of the all-to-all. `LocalTokens(*arguments)` is a
    copy without cached indices.
    """

    def __init__(
        self,
        cp: ContextParallel,
        shape: tuple[int, int],
        cu_seqlens: Tensor | None = None,
        max_seqlen: int = 0,
    ) -> None:
        (B, T), ring = shape, 1 if cp.ring is None else cp.ring.size()
        if T % (2 * cp.size):
            raise ValueError(
                f"sequence length ({T}) must be a multiple of 2 * cp ({2 * cp.size}): pad the rows"
            )
        self.cp, self.arguments = cp, (cp, shape, cu_seqlens, max_seqlen)
        self._shape, self._cu_seqlens = shape, cu_seqlens
        self._local_chunks: LocalChunks | None = None
        self.layout = ChunkLayout(cp.size, B * T, cu_seqlens, max_seqlen)
        part = None if cu_seqlens is None else cu_seqlens // ring
        self.a2a_layout = ChunkLayout(cp.size // ring, B * T // ring, part, -(-max_seqlen // ring))
        self._ring = None
        if cp.a2a is not None and cp.ring is not None:
            self._ring = LocalTokens(ContextParallel(cp.ring), shape, cu_seqlens, max_seqlen)

    @property
    def ring_tokens(self) -> LocalTokens:
        """This rank's tokens among the ranks of its ring ("a2a+p2p"), or among all cp ranks."""
        return self._ring or self

    def make_local_chunks(self, device: torch.device) -> LocalChunks:
        """Return this rank's two chunks of each document, for linear attention. Cached."""
        if self._local_chunks is None:
            B, T = self._shape
            rows = make_row_cu_seqlens(B, B * T, device)
            documents = rows if self._cu_seqlens is None else self._cu_seqlens
            self._local_chunks = LocalChunks(self.cp.group, documents)
        return self._local_chunks

    def slice_local(self, x_BTX: Tensor) -> Tensor:
        """Return x_BtX, this rank's tokens of full rows. No communication."""
        return self.layout.split_by_rank(x_BTX)[self.cp.rank].contiguous()

    @torch.compiler.disable
    def gather(self, x_BtX: Tensor) -> Tensor:
        """Return full rows, all-gathered; backward sums gradients over cp ranks. Collective."""
        back = self.reduce_scatter_values
        return run_and_save(exchange_with_grad, x_BtX, self.gather_values, back)  # type: ignore[no-any-return]

    def gather_replicated(self, x_BtX: Tensor) -> Tensor:
        """Return full rows, all-gathered; backward slices a gradient that is equal on cp ranks."""
        back = self.slice_local
        return run_and_save(exchange_with_grad, x_BtX, self.gather_values, back)  # type: ignore[no-any-return]

    def gather_values(self, x_BtX: Tensor) -> Tensor:
        """Return full rows x_BTX, all-gathered in token order, without autograd. Collective."""
        rows = all_gather_rows(x_BtX, self.cp.group)
        return self.layout.join_ranks(rows.unflatten(0, (self.cp.size, x_BtX.shape[0])))

    def reduce_scatter_values(self, x_BTX: Tensor) -> Tensor:
        """Return x_BtX: this rank's tokens of x_BTX, summed over ranks in fp32. Collective."""
        return reduce_scatter_rows(self.layout.split_by_rank(x_BTX).flatten(0, 1), self.cp.group)


def check_document_lengths(cu_seqlens: Tensor, cp_size: int) -> None:
    """Raise a ValueError if a document length on the CPU is no multiple of 2 * cp_size."""
    if cu_seqlens.device.type != "cpu":
        return
    lengths = cu_seqlens.diff().tolist()
    for document, length in enumerate(lengths):
        if length % (2 * cp_size):
            raise ValueError(
                f"cu_seqlens (document {document} of {length} tokens) must have documents of "
                f"multiples of 2 * cp ({2 * cp_size}): pad each"
            )
