"""How many tokens chose each expert, per sequence.

    counts[b, e] = number of choices of expert e in sequence b; -1 is not counted

Letters: T tokens, B sequences of T / B tokens, E experts, K choices per token, N = T K.

Bytes moved: 4 N, 8 B E for the counts, and T for a padding mask. Each program makes a histogram of
its ids and adds it with one integer atomic per expert that occurs. Counts are int64, because they
are summed over ranks and micro-batches of a step.
"""

import torch
from torch import Tensor

from moecore.kernels.common import can_use_kernel, cdiv, launch, next_power_of_2, warn_on_fallback
from moecore.kernels.ops import Op
from moecore.kernels.triton_api import tl, triton

# Bins of a program's histogram, and (balance.py) a row of a tile; more use the references.
MAX_EXPERTS = 1024
BLOCK = 2048  # ids per program


def add_expert_counts_ref(counts_BE: Tensor, ids_TK: Tensor) -> None:
    """Compute `add_expert_counts` in plain PyTorch."""
    B = counts_BE.shape[0]
    ids_BN = ids_TK.reshape(B, ids_TK.numel() // max(B, 1)).long()
    counts_BE.scatter_add_(1, ids_BN.clamp(min=0), (ids_BN >= 0).long())


def check_padding_mask(padding_mask_T: Tensor | None, num_tokens: int) -> None:
    """Raise a ValueError for a mask that is neither None nor bool [num_tokens]."""
    if padding_mask_T is None:
        return
    shape, dtype = tuple(padding_mask_T.shape), padding_mask_T.dtype
    if shape != (num_tokens,) or dtype != torch.bool:
        raise ValueError(
            f"padding_mask_T ({shape}, {dtype}) must be bool of [T] ({num_tokens}): flatten it"
        )


def view_mask_as_bytes(padding_mask_T: Tensor | None) -> Tensor | None:
    """Return a bool mask as contiguous uint8, 1 = True; None if the mask is None."""
    return None if padding_mask_T is None else padding_mask_T.contiguous().view(torch.uint8)


@triton.jit(do_not_specialize=["num_ids", "num_tokens", "num_blocks"])
def expert_counts_fwd_kernel(
    ids,  # int32 [B, num_ids]; -1 is not counted
    padding,  # uint8 [B, num_tokens], 1 = padding, whose ids are -1; None = there is none
    counts,  # int64 [B, WIDTH], added to
    num_ids,  # of one sequence
    num_tokens,  # of one sequence
    num_blocks,  # programs of one sequence
    E: tl.constexpr,
    WIDTH: tl.constexpr,  # E, or E + 1 with the tokens in the last column
    BINS: tl.constexpr,  # power of two >= E
    BLOCK: tl.constexpr,
):
    """Add to `counts` how often each expert id is in one block of a sequence's ids."""
    block = tl.program_id(0) % num_blocks
    sequence = (tl.program_id(0) // num_blocks).to(tl.int64)
    position = block * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    expert = tl.load(ids + sequence * num_ids + position, mask=inside, other=-1)
    histogram = tl.histogram(expert, BINS, mask=(expert >= 0) & (expert < E))
    bins = tl.arange(0, BINS)
    out = counts + sequence * WIDTH
    mask = (bins < E) & (histogram > 0)
    tl.atomic_add(out + bins, histogram.to(tl.int64), mask=mask, sem="relaxed")
    if WIDTH > E:
        if padding is None:
            if block == 0:
                tl.store(out + E, num_tokens)
        else:
            # There are at least as many ids as tokens: these programs see each token once.
            at = padding + sequence * num_tokens + position
            masked = tl.load(at, mask=position < num_tokens, other=1)
            num_real = tl.sum((masked == 0).to(tl.int32), axis=0)
            tl.atomic_add(out + E, num_real.to(tl.int64), mask=num_real > 0, sem="relaxed")


def _add_counts(
    counts_BX: Tensor, ids_TK: Tensor, padding_mask_T: Tensor | None, num_experts: int
) -> None:
    """Launch the kernel; column E of counts_BX, if it has E + 1, receives the tokens, too."""
    (B, width), (T, K) = counts_BX.shape, ids_TK.shape
    if not T * K:
        return
    num_tokens = T // B
    num_blocks = cdiv(num_tokens * K, BLOCK)
    padding = view_mask_as_bytes(padding_mask_T)
    args = (ids_TK.contiguous(), padding, counts_BX, num_tokens * K, num_tokens, num_blocks)
    bins = max(32, next_power_of_2(num_experts))
    sizes = dict(E=num_experts, WIDTH=width, BINS=bins, BLOCK=BLOCK, num_warps=8)
    launch(expert_counts_fwd_kernel, B * num_blocks, *args, **sizes)


_add_counts_op = Op("add_expert_counts", _add_counts, lambda *_: None, mutates_args=("counts_BX",))


def add_expert_counts(counts_BE: Tensor, ids_TK: Tensor) -> None:
    """Add each sequence's number of tokens per expert to `counts_BE` in place, by one kernel.

    ids_TK are int32, -1 = dropped. counts_BE is int64, contiguous. Row b counts T / B tokens.
    """
    E = counts_BE.shape[1]
    if can_use_kernel(ids_TK) and E <= MAX_EXPERTS:
        _add_counts_op(counts_BE, ids_TK, None, E)
    else:
        warn_on_fallback(ids_TK, f"counting {E} experts")
        add_expert_counts_ref(counts_BE, ids_TK)


def count_experts_and_tokens(
    ids_TK: Tensor,
    num_sequences: int,
    num_experts: int,
    padding_mask_T: Tensor | None = None,
    sequences_T: Tensor | None = None,
) -> Tensor:
    """Return int64 [B, E + 1]: per sequence, the tokens of each expert, then the number of tokens.

    Ids are int32; -1 = dropped or padding, not counted. The number of tokens includes tokens that
    were dropped, but no padding. Other arguments are as for `balance_statistics`.

    Example, B=2, E=3: ids [[0, 2], [2, -1], [1, 0], [-1, -1]] give [[1, 0, 2, 2], [1, 1, 0, 2]].
    """
    B, E, T = num_sequences, num_experts, ids_TK.shape[0]
    check_padding_mask(padding_mask_T, T)
    counts_BX = torch.zeros(B, E + 1, dtype=torch.int64, device=ids_TK.device)
    if sequences_T is not None:
        real_T = torch.ones_like(sequences_T)
        if padding_mask_T is not None:
            real_T = (~padding_mask_T).long()
        counts_BX[:, E].index_add_(0, sequences_T, real_T)
        places_TK = sequences_T[:, None] * (E + 1) + ids_TK.clamp(min=0)
        counts_BX.view(-1).scatter_add_(0, places_TK.flatten(), (ids_TK >= 0).long().flatten())
        return counts_BX
    if can_use_kernel(ids_TK) and E <= MAX_EXPERTS:
        _add_counts_op(counts_BX, ids_TK, padding_mask_T, E)
        return counts_BX
    warn_on_fallback(ids_TK, f"counting {E} experts")
    add_expert_counts_ref(counts_BX[:, :E], ids_TK)
    if padding_mask_T is None:
        counts_BX[:, E] = T // max(B, 1)
    else:
        counts_BX[:, E] = (~padding_mask_T).reshape(B, T // max(B, 1)).sum(1)
    return counts_BX
