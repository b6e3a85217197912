"""Sequence: where the tokens of a micro-batch stand, their documents, and their angles.

Legend: B rows, T tokens of a row, n documents, H heads, d rotated dims of a head.

Rows are documents, or documents are packed into rows, one after the other:

    tokens      a b c d | e f | g     cu_seqlens  [0, 4, 6, 7]
    positions   0 1 2 3   0 1   0     max_seqlen  4

`cu_seqlens` counts tokens over all rows, row by row, and ends with B * T. Documents without tokens
may stand at its end, so that its length is the same in every step (CUDA graphs).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from moecore.attention.context_parallel.held import LocalTokens
from moecore.kernels.attention import AttentionMask
from moecore.kernels.rows.rotary import rotary
from moecore.kernels.zigzag import positions_of


class RotaryTable:
    """cos and sin of every position and frequency, made once per forward.

    It is no tuple or dataclass, because FSDP's mixed precision casts floating tensors of a block's
    arguments, also those in tuples and dataclasses, and 16 bits are too few for an angle's sine.

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
        """Turn each pair (i, i + d / 2) of the first d dims (Llama); fp32 inside, rounded once."""
        d = 2 * self.cos_Td.shape[-1]
        if x_BTHd.shape[-1] == d:
            return self._turn(x_BTHd, neighbours=False)
        turned = self._turn(x_BTHd[..., :d], neighbours=False)
        return torch.cat((turned, x_BTHd[..., d:]), dim=-1)

    def rotate_pairs(self, x_BTHw: Tensor) -> Tensor:
        """Turn each pair (2i, 2i + 1) of the last d dims (DeepSeek); earlier dims stay."""
        # The result has all firsts, then all seconds: q and k may have any common order of dims.
        return self._turn(x_BTHw, neighbours=True)

    def _turn(self, x_BTHw: Tensor, neighbours: bool) -> Tensor:
        if self.is_shared:
            return rotary(x_BTHw, self.cos_Td, self.sin_Td, neighbours=neighbours)
        one_row = x_BTHw.flatten(0, 1)[None]
        return rotary(one_row, self.cos_Td, self.sin_Td, neighbours=neighbours).view(x_BTHw.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequence:
    """Where the tokens of a forward stand; `Sequence()` is rows of one document each.

    Blocks and attention modules get it beside the hidden states. Under tensor parallelism it
    describes the whole rows, which attention sees, but for `padding_mask_BT` and `token_ids_BT`.
    """

    # int32 [n + 1] on the device, the first token of each document, counted over all rows, and the
    # number B * T; None = every row is one document
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0  # tokens of the longest document, or more; 0 without `cu_seqlens`
    # int64, the place of each token in its document; None = 0 .. T - 1 in each row
    positions_BT: Tensor | None = None
    # bool, True = padding, of this rank's tokens; None = no padding
    padding_mask_BT: Tensor | None = None
    # integers, of this rank's tokens, for MoE layers that choose by them; None = no layer does
    token_ids_BT: Tensor | None = None
    # cos and sin of the positions of the tokens that attention gets; None = the model has its own
    rotary: RotaryTable | None = None
    # the tokens of the rows that this rank's attention gets; None = all. The first three describe
    # whole rows all the same
    local_tokens: LocalTokens | None = None

    def mask(self, window: int | None = None) -> AttentionMask:
        """Return which keys each token of the rows sees: `window` at most, its own included."""
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
        """Return the tokens that this rank's attention gets, of whole rows."""
        return x_BT if self.local_tokens is None else self.local_tokens.slice_local(x_BT)

    def shift_tokens(self, x_BT: Tensor, steps: int, fill: int) -> Tensor:
        """Return x of the token `steps` later in the document and `fill` where there is none."""
        # Example: [1 2 3 | 4 5] by 1 with 0 gives [2 3 0 | 5 0].
        if self.positions_BT is None:
            return shift_rows(x_BT, steps, fill)
        # A token of another document stands elsewhere in its own.
        next_positions = shift_rows(self.positions_BT.flatten()[None], steps, -1).view_as(x_BT)
        shifted = shift_rows(x_BT.flatten()[None], steps, fill).view_as(x_BT)
        return shifted.masked_fill(next_positions != self.positions_BT + steps, fill)


def shift_rows(x_BT: Tensor, steps: int, fill: int) -> Tensor:
    """Return x[:, i + steps] at position i and `fill` where there is none, same shape and dtype."""
    # Example: shift_rows([[1, 2, 3]], 2, 0) is [[3, 0, 0]].
    end = x_BT.new_full((x_BT.shape[0], min(steps, x_BT.shape[1])), fill)
    return torch.cat((x_BT[:, steps:], end), dim=1)


def packed_sequence(
    cu_seqlens: Tensor, max_seqlen: int | None, shape: tuple[int, int], device: torch.device
) -> Sequence:
    """Return where tokens stand in packed documents of rows of `shape`, B and T."""
    # `cu_seqlens`, int32 or int64 [n + 1], is checked where it lies on the CPU. `max_seqlen` is
    # that of the longest document, or more; None = the longest's on the CPU, else B * T.
    num_tokens = shape[0] * shape[1]
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens {tuple(cu_seqlens.shape)} ({cu_seqlens.dtype}) must be int32 [n + 1]: "
            "pass the first token of each document, and the number of tokens"
        )
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        max_seqlen = _check_documents(cu_seqlens.tolist(), max_seqlen, num_tokens)
    cu_seqlens = cu_seqlens.to(device, torch.int32)
    return Sequence(
        cu_seqlens=cu_seqlens,
        max_seqlen=num_tokens if max_seqlen is None else max_seqlen,
        positions_BT=positions_of(cu_seqlens, num_tokens).view(shape),
    )


def _check_documents(cu_seqlens: list[int], max_seqlen: int | None, num_tokens: int) -> int:
    """Return max_seqlen, by default the longest's."""
    lengths = [end - start for start, end in pairwise(cu_seqlens)]
    ends = (cu_seqlens[0], cu_seqlens[-1]) if lengths else None
    if ends != (0, num_tokens) or min(lengths) < 0:
        raise ValueError(
            f"cu_seqlens (first and last {ends}) must rise from 0 to the number of tokens "
            f"({num_tokens}): give padding a document of its own"
        )
    if max_seqlen is not None and max_seqlen < max(lengths):
        raise ValueError(
            f"max_seqlen ({max_seqlen}) must be >= the longest document ({max(lengths)}): raise it "
            "or leave it out"
        )
    return max(lengths) if max_seqlen is None else max_seqlen
