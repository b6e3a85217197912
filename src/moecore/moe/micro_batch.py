"""MicroBatch: the tokens of this rank within the tokens that are routed together.

Legend: B sequences, T tokens of this rank, N tokens of the micro-batch on all its ranks, X columns.

With tensor parallelism and sequence parallelism, the ranks of a tp group have consecutive slices
of the same sequences. Decisions that compare tokens (capacity, Sinkhorn, expert choice) use all N
tokens, so that they do not depend on tp. Context parallel ranks have the tokens that
`kernels/zigzag.py` assigns, and the ranks of their tp groups have slices of these tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moecore.base.torch_private import all_gather_single, skips_communication
from moecore.kernels.zigzag import assign_tokens_to_cp_ranks, find_document_ids, make_row_cu_seqlens

ROUNDING = 1e-9  # 1.1 * 40 must not become 45 because of its last binary digit


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The T tokens of this rank, and the layout of all N tokens of the ranks that share rows."""

    # Number of rows, of which this rank has slices of equal length. A row is a sequence, unless
    # `cu_seqlens` has other bounds.
    num_sequences: int = 1
    # Ranks that have the slices of each row, in order; None = only this rank.
    group: dist.ProcessGroup | None = None
    cp: int = 1  # context parallel ranks, a divisor of the size of the group, which is cp-major
    # bool, True = padding, which uses no capacity and has no part in losses and statistics.
    padding_mask_T: Tensor | None = None
    # int32 [n + 1]: the first token of each sequence among the N tokens, row by row, and N. None =
    # every row is a sequence.
    cu_seqlens: Tensor | None = None
    # integers [T], row indices of the hash table; only assignment "hash" reads them
    token_ids_T: Tensor | None = None

    @classmethod
    def from_input(
        cls,
        x: Tensor,
        padding_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        group: dist.ProcessGroup | None,
        cp: int,
        token_ids: Tensor | None,
    ) -> MicroBatch:
        """Return the micro-batch of a layer's input x [T, D] or [B, T, D]."""
        if padding_mask is not None:
            if padding_mask.shape != x.shape[:-1] or padding_mask.dtype != torch.bool:
                raise ValueError(
                    f"padding_mask ({tuple(padding_mask.shape)}, {padding_mask.dtype}) must be "
                    f"bool of the shape of x without its last dim {tuple(x.shape[:-1])}: True "
                    "marks padding"
                )
            padding_mask = padding_mask.reshape(-1)
        if cu_seqlens is not None and (cu_seqlens.ndim != 1 or cu_seqlens.dtype != torch.int32):
            raise ValueError(
                f"cu_seqlens ({tuple(cu_seqlens.shape)}, {cu_seqlens.dtype}) must be int32 "
                "[n + 1]: pass the first token of each sequence, and the number of tokens"
            )
        return cls(
            num_sequences=x.shape[0] if x.ndim == 3 else 1,
            group=group,
            cp=cp,
            padding_mask_T=padding_mask,
            cu_seqlens=cu_seqlens,
            token_ids_T=None if token_ids is None else token_ids.flatten(),
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the micro-batch."""
        return 1 if self.group is None else self.group.size()

    def all_gather_rows(self, x_TX: Tensor) -> Tensor:
        """All-gather T rows of each rank to N rows in the unsliced batch's order. No gradient.

        Example, two ranks, B=2: rows a0 b0 and a1 b1 give a0 a1 b0 b1.
        """
        x_TX = x_TX.detach()
        if self.group is None:
            return x_TX
        out = x_TX.new_empty((self.num_ranks * x_TX.shape[0], *x_TX.shape[1:]))
        if not skips_communication(out):  # a dry run counts bytes and sends nothing
            all_gather_single(out, x_TX.contiguous(), group=self.group)
        if self.cp > 1:
            in_order = torch.empty_like(out)
            in_order[self._compute_token_indices(len(out), out.device).flatten()] = out
            return in_order
        B = max(self.num_sequences, 1)
        by_rank = out.unflatten(0, (self.num_ranks, B, x_TX.shape[0] // B))
        return by_rank.transpose(0, 1).flatten(0, 2)  # type: ignore[no-any-return]

    def slice_local_rows(self, x_NX: Tensor) -> Tensor:
        """Return this rank's T rows of x_NX, whose rows have the order of `all_gather_rows`."""
        if self.group is None:
            return x_NX
        rank = dist.get_rank(self.group)
        if self.cp > 1:
            return x_NX[self._compute_token_indices(len(x_NX), x_NX.device)[rank]]
        B, G = max(self.num_sequences, 1), self.num_ranks
        by_rank = x_NX.unflatten(0, (B, G, x_NX.shape[0] // (B * G)))
        return by_rank[:, rank].flatten(0, 1)  # type: ignore[no-any-return]

    def _compute_token_indices(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return int64 [ranks, T]: each rank's indices among the N tokens. Requires cp > 1."""
        B, tp, borders = max(self.num_sequences, 1), self.num_ranks // self.cp, self.cu_seqlens
        if borders is None:
            borders = make_row_cu_seqlens(B, num_tokens, device)
        token_ids = assign_tokens_to_cp_ranks(borders, num_tokens, self.cp).view(self.cp, B, tp, -1)
        return token_ids.transpose(1, 2).reshape(self.num_ranks, -1)

    def gather_padding(self) -> Tensor | None:
        """All-gather the padding mask, bool [N]; None without a mask."""
        if self.padding_mask_T is None:
            return None
        return self.all_gather_rows(self.padding_mask_T.to(torch.uint8)).bool()

    def find_sequence_ids(self, num_tokens: int) -> tuple[int, Tensor | None]:
        """Return the number of sequences and each token's sequence [T]; None = equal lengths."""
        if self.cu_seqlens is None:
            return self.num_sequences, None
        documents_N = find_document_ids(self.cu_seqlens, num_tokens * self.num_ranks)
        return len(self.cu_seqlens) - 1, self.slice_local_rows(documents_N)


def sort_by_position(
    num_tokens: int,
    num_sequences: int,
    padding_mask_N: Tensor | None,
    device: torch.device,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return int64 [N]: indices of `num_tokens` tokens, sorted by position in their sequence.

    Tokens of equal position are in the order of their sequences. Padding does not count in
    positions. `cu_seqlens` None = `num_sequences` of equal length. Example, two sequences of two
    tokens: 0 2 1 3. With token 2 as padding: 2 0 3 1.
    """
    if cu_seqlens is not None:
        if padding_mask_N is None:
            padding_mask_N = torch.zeros(num_tokens, dtype=torch.bool, device=device)
        real_N = ~padding_mask_N
        count_N = real_N.cumsum(0)
        before_N = count_N - real_N.long()
        starts_N = cu_seqlens[find_document_ids(cu_seqlens, num_tokens)]
        return (count_N - before_N[starts_N]).sort(stable=True).indices
    B = max(num_sequences, 1)
    if padding_mask_N is None:
        return torch.arange(num_tokens, device=device).view(B, num_tokens // B).t().flatten()
    positions_BT = (~padding_mask_N).view(B, num_tokens // B).cumsum(1)
    return positions_BT.flatten().sort(stable=True).indices


def compute_capacity(
    factor: float, num_tokens: int, top_k: int, num_experts: int, padding_mask_N: Tensor | None
) -> tuple[int, Tensor | int]:
    """Return the token limit per expert, factor * num_tokens * top_k / num_experts, rounded up.

    The first limit, for buffer sizes, counts padding as tokens. The second limit does not: it is an
    int64 scalar tensor with a mask (no host sync), otherwise equal to the first.
    """
    per_token = factor * top_k / num_experts
    max_tokens = math.ceil(num_tokens * per_token - ROUNDING)
    if padding_mask_N is None:
        return max_tokens, max_tokens
    return max_tokens, torch.ceil((~padding_mask_N).sum().double() * per_token - ROUNDING).long()
