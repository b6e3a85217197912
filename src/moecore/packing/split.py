"""part_of: splits a packed batch over context parallel ranks (`kernels/zigzag.py`), with checks.

Legend: t tokens of all documents, n documents, cp ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moecore.base.fields import Count, CountOrZero, check_arguments, quote
from moecore.kernels.cross_entropy import IGNORE_INDEX
from moecore.kernels.zigzag import held_tokens
from moecore.packing.collate import PackedBatch
from moecore.packing.documents import Integers, Lengths, as_lengths


def padded_lengths(lengths: Lengths, cp: Count) -> Integers:
    """Return int64 [n]: lengths rounded up to multiples of 2 * cp; unchanged if cp is 1."""
    check_arguments(padded_lengths, locals())
    multiple = multiple_of(cp)
    return -(-as_lengths(lengths) // multiple) * multiple


def multiple_of(cp: int) -> int:
    """Return the number that must divide every document's length: 2 * cp, or 1 if cp is 1."""
    return 2 * cp if cp > 1 else 1


def indices_of(cu_seqlens: Tensor, cp: Count, rank: CountOrZero) -> Tensor:
    """Return the token indices of a cp rank, int64 [t / cp], on the device of `cu_seqlens`.

    The indices ascend. If `cu_seqlens` is on a GPU, the function synchronises the host.

    Args:
        cu_seqlens: integers [n + 1], cumulative document lengths from 0. With cp > 1 each length is
            a multiple of 2 * cp. Documents without tokens are allowed.
        cp: number of context parallel ranks.
        rank: index of the cp rank, from 0.

    Raises:
        ValueError: if `cu_seqlens` does not have this form, or `rank` is not less than `cp`.
    """
    check_arguments(indices_of, locals())
    if rank >= cp:
        raise ValueError(f"rank ({rank}) must be < cp ({cp}): count from 0")
    return _rank_tokens(cu_seqlens, cp)[rank]


def inverse_of(cu_seqlens: Tensor, cp: Count) -> Tensor:
    """Return the inverse permutation of the concatenated `indices_of` of all cp ranks, int64 [t].

    `torch.cat([x[indices_of(cu, cp, r)] for r in range(cp)])[inverse_of(cu, cp)]` is x. Arguments
    and errors: see `indices_of`.
    """
    check_arguments(inverse_of, locals())
    tokens = _rank_tokens(cu_seqlens, cp).flatten()
    inverse = torch.empty_like(tokens)
    inverse[tokens] = torch.arange(len(tokens), device=tokens.device)
    return inverse


def part_of(batch: PackedBatch, cp: Count, rank: CountOrZero) -> PackedBatch:
    """Return the part of a batch that a cp rank computes: a `PackedBatch` of shape [B, T / cp].

    Labels are selected, not recomputed: collate with `shift_labels=True`, which shifts them before
    the split. `cu_seqlens`, `max_seqlen` and `num_tokens` describe this rank's part.

    Args:
        batch: the result of a `PackedCollator` with `multiple=2 * cp`.
        cp: number of context parallel ranks.
        rank: index of the cp rank, from 0.

    Raises:
        ValueError: if `batch` is no `PackedBatch`, and as `indices_of`.
    """
    if not isinstance(batch, Mapping) or not PackedBatch.__required_keys__ <= set(batch):
        raise ValueError(
            f"batch ({quote(batch)}) must be a PackedBatch: pass what a PackedCollator returns"
        )
    tokens = indices_of(batch["cu_seqlens"], cp, rank)
    rows = batch["input_ids"].shape[0]

    def take_local(x_BT: Tensor) -> Tensor:
        return x_BT.flatten()[tokens.to(x_BT.device)].view(rows, -1)

    labels = take_local(batch["labels"])
    return PackedBatch(
        input_ids=take_local(batch["input_ids"]),
        labels=labels,
        position_ids=take_local(batch["position_ids"]),
        padding_mask=take_local(batch["padding_mask"]),
        cu_seqlens=batch["cu_seqlens"] // cp,
        max_seqlen=batch["max_seqlen"] // cp,
        num_tokens=(labels != IGNORE_INDEX).sum(),
    )


def _rank_tokens(cu_seqlens: Tensor, cp: int) -> Tensor:
    """Check `cu_seqlens`; return the token indices of each rank, int64 [cp, t / cp]."""
    lengths_n = cu_seqlens.long().diff() if cu_seqlens.ndim == 1 else None
    if lengths_n is None or cu_seqlens.is_floating_point() or not len(lengths_n):
        raise ValueError(
            f"cu_seqlens ({quote(cu_seqlens)}) must be whole numbers [documents + 1]: pass that of "
            "a PackedBatch"
        )
    if int(cu_seqlens[0]) or bool((lengths_n < 0).any()):
        raise ValueError(
            f"cu_seqlens ({quote(cu_seqlens)}) must ascend from 0: pass that of a PackedBatch"
        )
    uneven = (lengths_n % multiple_of(cp)).nonzero()
    if len(uneven):
        raise ValueError(
            f"cu_seqlens (document {int(uneven[0])} of {int(lengths_n[uneven[0]])} tokens) must "
            f"have documents of multiples of 2 * cp ({2 * cp}): collate with multiple={2 * cp}"
        )
    return held_tokens(cu_seqlens, int(lengths_n.sum()), cp)
