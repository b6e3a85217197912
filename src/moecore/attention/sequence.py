"""`Sequence`: documents, positions and rotary table of the tokens of a micro-batch.

Legend: B rows, T tokens of a row, n documents, H heads, d rotated dims of a head.

Each row is one document, or several documents are packed into the rows, end to end:

    tokens      a b c d | e f | g     cu_seqlens  [0, 4, 6, 7]
    positions   0 1 2 3   0 1   0     max_seqlen  4

`cu_seqlens` has the cumulative document lengths over all rows, and ends with B * T. It may end with
documents of zero tokens, so that its length is identical in every step (CUDA graphs).
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from moecore.attention.context_parallel.local_tokens import LocalTokens
from moecore.attention.kv_cache import KVCache
from moecore.kernels.attention import AttentionMask
from moecore.kernels.rows.rotary import rotary
from moecore.kernels.zigzag import find_positions_in_documents


class RotaryTable:
    """cos and sin of every position and frequency, computed once per forward.

    The class is plain because FSDP's mixed precision would cast tensors in tuples and dataclasses
    to 16 bits. If `is_shared`, all rows have equal positions.

    Source: RoFormer (arXiv:2104.09864).
    """

    def __init__(
        self,
        positions: Tensor,  # whole numbers, [T] for all rows, or [B, T]: then T below is B * T
        frequencies_d: Tensor,  # fp32 [d / 2], radians from one position to the next
        scale: float = 1.0,  # on cos and sin
    ) -> None:
        self.is_shared = positions.ndim == 1
        angles_Td = positions.flatten().to(frequencies_d.dtype).outer(frequencies_d)
        self.cos_Td, self.sin_Td = angles_Td.cos(), angles_Td.sin()
        if scale != 1.0:
            self.cos_Td *= scale
            self.sin_Td *= scale

    def rotate(self, x_BTHd: Tensor) -> Tensor:
        """Return x with each pair (i, i + d / 2) of its first d dims rotated in fp32 (Llama)."""
        d = 2 * self.cos_Td.shape[-1]
        if x_BTHd.shape[-1] == d:
            return self._rotate_dims(x_BTHd, interleaved=False)
        turned = self._rotate_dims(x_BTHd[..., :d], interleaved=False)
        return torch.cat((turned, x_BTHd[..., d:]), dim=-1)

    def rotate_pairs(self, x_BTHw: Tensor) -> Tensor:
        """Return x with each pair (2i, 2i + 1) of its last d dims rotated in fp32 (DeepSeek)."""
        # The d dims of the result are reordered: the first dim of each pair, then each second dim.
        # A reordering that is equal for q and k does not change their scores.
        return self._rotate_dims(x_BTHw, interleaved=True)

    def _rotate_dims(self, x_BTHw: Tensor, interleaved: bool) -> Tensor:
        """Return x, rotated in pairs (2i, 2i + 1) if `interleaved`, otherwise (i, i + d / 2)."""
        if self.is_shared:
            return rotary(x_BTHw, self.cos_Td, self.sin_Td, interleaved=interleaved)
        one_row = x_BTHw.flatten(0, 1)[None]
        return rotary(one_row, self.cos_Td, self.sin_Td, interleaved=interleaved).view(x_BTHw.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequence:
    """Documents and positions of a forward's tokens; `Sequence()` = each row is one document.

    Blocks and attention modules receive the record with the hidden states. Under tensor parallelism
    `padding_mask_BT` and `token_ids_BT` describe this rank's tokens, and the other fields the full
    rows that attention receives.
    """

    # int32 [n + 1] on the device: the index of each document's first token over all rows, then
    # B * T; None = every row is one document
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0  # >= the length of the longest document; 0 without `cu_seqlens`
    # int64, the position of each token in its document; None = 0 .. T - 1 in each row
    positions_BT: Tensor | None = None
    # bool, True = padding, of this rank's tokens; None = no padding
    padding_mask_BT: Tensor | None = None
    # integers, of this rank's tokens, for MoE layers that select experts by token id; None = unused
    token_ids_BT: Tensor | None = None
    # cos and sin for the tokens that attention receives; None = the model computes its own
    rotary: RotaryTable | None = None
    # the tokens that this cp rank's attention receives; None = all. The first three fields describe
    # the full rows in both cases
    local_tokens: LocalTokens | None = None
    # 0, or k in the k-th multi-token prediction, where a document's last k tokens are padding
    depth: int = 0
    # keys and values of earlier tokens, in generation; None = attention reads this forward's tokens
    cache: KVCache | None = None

    def mask(self, window: int | None = None) -> AttentionMask:
        """Return a causal mask per document. `window` limits the keys per token; None = all."""
        if self.cu_seqlens is None:
            return AttentionMask(window=window)
        return AttentionMask(
            window=window,
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_k=self.cu_seqlens,
            max_length_q=self.max_seqlen,
            max_length_k=self.max_seqlen,
        )

    def slice_local(self, x_BT: Tensor) -> Tensor:
        """Return this cp rank's tokens [B, t] of full rows [B, T]. No communication."""
        return x_BT if self.local_tokens is None else self.local_tokens.slice_local(x_BT)

    def shift_tokens(self, x_BT: Tensor, shift: int, fill_value: int) -> Tensor:
        """Return [B, T]: for each token the value of x at the token `shift` later in its document.

        The value is `fill_value` if the document has no such token.
        """
        # Example: [1 2 3 | 4 5] by 1 with 0 gives [2 3 0 | 5 0].
        if self.positions_BT is None:
            return shift_rows(x_BT, shift, fill_value)
        # A token of another document has another position than expected.
        next_positions = shift_rows(self.positions_BT.flatten()[None], shift, -1).view_as(x_BT)
        shifted = shift_rows(x_BT.flatten()[None], shift, fill_value).view_as(x_BT)
        return shifted.masked_fill(next_positions != self.positions_BT + shift, fill_value)


def shift_rows(x_BT: Tensor, shift: int, fill_value: int) -> Tensor:
    """Return rows with x[:, i + shift] at position i, and `fill_value` after the end of x."""
    # Example: shift_rows([[1, 2, 3]], 2, 0) is [[3, 0, 0]].
    end = x_BT.new_full((x_BT.shape[0], min(shift, x_BT.shape[1])), fill_value)
    return torch.cat((x_BT[:, shift:], end), dim=1)


def make_packed_sequence(
    cu_seqlens: Tensor, max_seqlen: int | None, shape: tuple[int, int], device: torch.device
) -> Sequence:
    """Return the `Sequence` of documents packed into rows; `shape` is (B, T).

    `cu_seqlens` is int32 or int64 [n + 1]; invalid values of a CPU tensor are a ValueError.
    `max_seqlen` None = the longest document if `cu_seqlens` is a CPU tensor, otherwise B * T.
    """
    num_tokens = shape[0] * shape[1]
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens {tuple(cu_seqlens.shape)} ({cu_seqlens.dtype}) must be int32 [n + 1]: "
            "pass the first token of each document, and the number of tokens"
        )
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        borders = cu_seqlens.tolist()
        lengths = [end - start for start, end in pairwise(borders)]
        ends = (borders[0], borders[-1]) if lengths else None
        if ends != (0, num_tokens) or min(lengths) < 0:
            raise ValueError(
                f"cu_seqlens (first and last {ends}) must rise from 0 to the number of tokens "
                f"({num_tokens}): give padding a document of its own"
            )
        if max_seqlen is not None and max_seqlen < max(lengths):
            raise ValueError(
                f"max_seqlen ({max_seqlen}) must be >= the longest document ({max(lengths)}): "
                "raise it or leave it out"
            )
        max_seqlen = max(lengths) if max_seqlen is None else max_seqlen
    cu_seqlens = cu_seqlens.to(device, torch.int32)
    return Sequence(
        cu_seqlens=cu_seqlens,
        max_seqlen=num_tokens if max_seqlen is None else max_seqlen,
        positions_BT=find_positions_in_documents(cu_seqlens, num_tokens).view(shape),
    )


def split_documents(
    sequence: Sequence, shape: tuple[int, int], max_length: int, device: torch.device
) -> Sequence:
    """Return the `Sequence` whose documents are chunks of at most `max_length` tokens.

    Chunks are counted from the first token of each document. `shape` is (B, T) of the full rows.
    `positions_BT` and `local_tokens` still describe the uncut documents. No host sync.
    """
    # Example: cu_seqlens [0, 5, 8] by 2 gives [0, 2, 4, 5, 7, 8].
    (B, T), num_tokens = shape, shape[0] * shape[1]
    if (sequence.max_seqlen or T) <= max_length:
        return sequence
    num_documents = B if sequence.cu_seqlens is None else len(sequence.cu_seqlens) - 1
    positions = torch.arange(T, device=device).expand(B, T).flatten()
    if sequence.positions_BT is not None:
        positions = sequence.positions_BT.flatten()
    tokens = torch.arange(num_tokens, device=device, dtype=torch.int32)
    starts = tokens.masked_fill(positions % max_length != 0, num_tokens).sort().values
    # A document of n tokens has at most n // max_length + 1 chunks; the others are empty.
    num_chunks = min(num_documents + num_tokens // max_length, num_tokens)
    cu_seqlens = F.pad(starts[:num_chunks], (0, 1), value=num_tokens)
    return replace(sequence, cu_seqlens=cu_seqlens, max_seqlen=max_length)
