"""Rollouts -> micro-batches of one packed row each, with a maximum number of tokens.

Legend: N tokens of the sequences of a micro-batch, T tokens of its row, M tokens of the row that
predict a response token.

    sequences     are not cut (`packing/bins.py`), and a group of sequences is in one micro-batch
    row           sequences end to end, each padded for cp, and the row padded for tp
    rows_M        positions in the row that predict a response token
    tokens_M      the indices of the predicted tokens among the N

Example, the response [8 9] to [5 6] and cp 2:

    row       5  6  8  9  -  -  -  -
    labels    -  8  9  -  -  -  -  -       rows_M  1 2       tokens_M  2 3
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from moecore.kernels.cross_entropy import IGNORE_INDEX
from moecore.packing.bins import pack_lengths
from moecore.packing.collate import PackedBatch, PackedCollator, get_length_multiple
from moecore.rl.rollouts import PER_TOKEN, Rollouts


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLimits:
    """Length limits of the packed row of a micro-batch, in tokens."""

    max_tokens: int  # of a row, before cp and tp split the row
    cp: int
    tp: int

    @property
    def row_unit(self) -> int:
        """Each row is padded to a multiple of this number of tokens."""
        return get_length_multiple(self.cp) * self.tp

    def sum_padded_lengths(self, lengths: Iterable[int]) -> int:
        """Return the tokens of sequences of these lengths, each padded to the cp multiple."""
        unit = get_length_multiple(self.cp)
        return sum(-(-length // unit) * unit for length in lengths)


def group_sequences(rollouts: Rollouts, group_size: int) -> list[list[int]]:
    """Split sequence indices into groups of `group_size`; ValueError if not divisible."""
    number = rollouts.num_sequences
    if number % group_size:
        raise ValueError(
            f"rollouts ({number} sequences) must be a multiple of {group_size}, which belong "
            "together: give whole pairs"
        )
    return [list(range(i, i + group_size)) for i in range(0, number, group_size)]


def assign_sequences(rollouts: Rollouts, limits: RowLimits, group_size: int) -> list[list[int]]:
    """Return sequence indices by micro-batch; `group_size` consecutive sequences stay together."""
    lengths, units = rollouts.lengths, group_sequences(rollouts, group_size)
    sums = [limits.sum_padded_lengths(lengths[i] for i in unit) for unit in units]
    longest = max(sums, default=0)
    if longest > limits.max_tokens:
        raise ValueError(
            f"max_tokens ({limits.max_tokens}) must be >= {longest}, the tokens of sequence "
            f"{units[sums.index(longest)][0]} with padding and what belongs to it: raise it, or "
            "leave the sequence out"
        )
    bins = pack_lengths(sums, limits.max_tokens)
    return [[i for unit in bin_ for i in units[unit]] for bin_ in bins]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRow:
    """A micro-batch of rollouts as one packed row, on the device of the model."""

    rollouts: Rollouts  # the sequences of the micro-batch; values outside of responses are 0
    token_idx_N: Tensor  # int64, the index of each token among the tokens of all rollouts
    batch: PackedBatch  # the packed row, [1, T]
    labels_BT: Tensor  # int64 [1, T], the response token that each position predicts, or -100
    rows_M: Tensor  # int64, positions in the row that predict a response token
    tokens_M: Tensor  # int64, the index in `rollouts` of each predicted token
    local_token_idx_T: Tensor  # int64, the index in `rollouts` of each position; -1 = padding
    cp: int  # context parallel ranks that share the row
    is_first: bool = True  # False = another data rank returns the row's loss and scores

    def scatter_to_tokens(self, values_BT: Tensor) -> Tensor:
        """Return [N]: each token's entry of `values_BT` at the position that predicts it, or 0."""
        values_N = values_BT.new_zeros(len(self.token_idx_N))
        return values_N.index_copy(0, self.tokens_M, values_BT.flatten()[self.rows_M])

    def gather_at_positions(self, values_N: Tensor, padding_value: float) -> Tensor:
        """Return [T, ..]: the entry of `values_N` [N, ..] for the token at each row position."""
        values_T = values_N.new_full(
            (len(self.local_token_idx_T), *values_N.shape[1:]), padding_value
        )
        is_token_T = self.local_token_idx_T >= 0
        values_T[is_token_T] = values_N[self.local_token_idx_T[is_token_T]]
        return values_T


def build_row(
    rollouts: Rollouts, sequence_idxs: Sequence[int], limits: RowLimits, device: torch.device
) -> RolloutRow:
    """Pack the sequences with these indices into a row on `device`; [] = only padding."""
    selection = rollouts.take(sequence_idxs)
    borders = selection.borders
    padded_tokens = limits.sum_padded_lengths(selection.lengths)
    row_tokens = -(-max(1, padded_tokens) // limits.row_unit) * limits.row_unit
    collate = PackedCollator(row_tokens=row_tokens, multiple=get_length_multiple(limits.cp))
    # Of the places of tokens, not of their ids: one index finds all that is known of a token.
    batch = collate([torch.arange(a, b, device="cpu") for a, b in pairwise(borders)])
    token_idx_T = batch["input_ids"].flatten().masked_fill(batch["padding_mask"].flatten(), -1)
    next_T = batch["labels"].flatten()
    tokens_N, mask_N = selection.tokens_N.cpu(), selection.response_mask_N.cpu()
    rows_M = torch.arange(row_tokens, device="cpu")[next_T != IGNORE_INDEX]
    rows_M = rows_M[mask_N[next_T[rows_M]]]
    labels_T = torch.full_like(next_T, IGNORE_INDEX)
    labels_T[rows_M] = tokens_N[next_T[rows_M]]
    ids_T = torch.zeros_like(token_idx_T)
    ids_T[token_idx_T >= 0] = tokens_N[token_idx_T[token_idx_T >= 0]]
    batch["input_ids"] = ids_T[None]
    for name in ("input_ids", "position_ids", "padding_mask"):
        batch[name] = batch[name].to(device)
    names = ("tokens_N", "response_mask_N", "routes_NLK", "route_weights_NLK")
    values = {name: getattr(selection, name) for name in names}
    changes = {name: value.to(device) for name, value in values.items() if value is not None}
    for name in PER_TOKEN:
        if (value_N := getattr(selection, name)) is not None:
            changes[name] = value_N.to(device).float().where(changes["response_mask_N"], 0)
    return RolloutRow(
        rollouts=selection.replace(**changes),
        token_idx_N=rollouts.find_token_indices(sequence_idxs).to(device),
        batch=batch,
        labels_BT=labels_T[None].to(device),
        rows_M=rows_M.to(device),
        tokens_M=next_T[rows_M].to(device),
        local_token_idx_T=token_idx_T.to(device),
        cp=limits.cp,
    )
