"""The auxiliary losses of load balance, from the statistics of the logits and the counts.

Letters: T tokens, B sequences, E experts, K choices per token, X = E + 1 columns (counts of the
experts, then the number of tokens).

Forward and backward are one program each, which reads [B, E] a few times. The order of sums depends
only on shapes, so equal inputs give equal bits.
"""

import torch
from torch import Tensor

from moecore.kernels.common import can_use_kernel, launch, next_power_of_2, warn_on_fallback
from moecore.kernels.ops import Op, make_setup_context
from moecore.kernels.routing.counts import MAX_EXPERTS
from moecore.kernels.triton_api import tl, triton


def balance_loss_ref(
    score_sums_BE: Tensor,
    z_sum: Tensor,
    counts_BX: Tensor,
    factors: list[float],
    *,
    global_counts_E: Tensor | None = None,
) -> Tensor:
    """Compute `balance_loss` in plain PyTorch, in the dtype of the sums."""
    E = score_sums_BE.shape[1]
    counts_BE, tokens_B1 = counts_BX[:, :E].to(z_sum.dtype), counts_BX[:, E:].clamp(min=1)
    tokens = counts_BX[:, E].sum().clamp(min=1)
    mean_scores_E = score_sums_BE.sum(0) / tokens
    micro_batch = (counts_BE.sum(0) / tokens * mean_scores_E).sum()
    sequences = (counts_BX[:, E] > 0).sum().clamp(min=1)
    sequence = (counts_BE / tokens_B1 * (score_sums_BE / tokens_B1)).sum() / sequences
    global_batch = torch.zeros_like(micro_batch)
    if global_counts_E is not None:
        share_E = global_counts_E.to(z_sum.dtype) / global_counts_E.sum().clamp(min=1)
        global_batch = (share_E * mean_scores_E).sum()
    parts = (micro_batch, sequence, global_batch, z_sum / tokens)
    return torch.stack([f * p for f, p in zip(factors, parts, strict=True)])


LOSS_TILE = 4096


@triton.jit
def _clamp_divisor(count):
    """Return max(count, 1) as fp32."""
    return tl.maximum(count, 1).to(tl.float32)


@triton.jit
def _load_counts(
    counts, first_sequence, num_sequences, columns, E: tl.constexpr, BLOCK_B: tl.constexpr
):
    """Return choices per expert [b, e] in fp32, tokens [b], and the choices' offsets and mask."""
    rows = (first_sequence + tl.arange(0, BLOCK_B)).to(tl.int64)
    in_rows = rows < num_sequences
    inside = in_rows[:, None] & (columns < E)[None, :]
    n = tl.load(counts + rows[:, None] * (E + 1) + columns[None, :], mask=inside, other=0)
    t = tl.load(counts + rows * (E + 1) + E, mask=in_rows, other=0)
    return n.to(tl.float32), t, rows[:, None] * E + columns[None, :], inside


@triton.jit
def _load_global_shares(global_counts, columns, E: tl.constexpr):
    """Return each expert's share of all choices of the global batch, fp32."""
    counts_E = tl.load(global_counts + columns, mask=columns < E, other=0)
    return counts_E.to(tl.float32) / _clamp_divisor(tl.sum(counts_E, axis=0))


@triton.jit(do_not_specialize=["num_sequences"])
def balance_loss_fwd_kernel(
    score_sums,  # fp32 [B, E]
    z_sum,  # fp32 []
    counts,  # int64 [B, E + 1], the last column = number of tokens
    global_counts,  # int64 [E] or None
    losses,  # fp32 [4], written
    num_sequences,  # B
    micro_batch_factor,
    sequence_factor,
    global_batch_factor,
    z_factor,
    E: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write the four losses of `balance_loss`, each times its factor. One program."""
    cols = tl.arange(0, BLOCK_E)
    scores_BE = tl.zeros([BLOCK_B, BLOCK_E], tl.float32)
    counts_BE = tl.zeros([BLOCK_B, BLOCK_E], tl.float32)
    products_BE = tl.zeros([BLOCK_B, BLOCK_E], tl.float32)
    tokens_B = tl.zeros([BLOCK_B], tl.int64)
    sequences_B = tl.zeros([BLOCK_B], tl.int32)  # sequences with a token
    for start in range(0, num_sequences, BLOCK_B):
        n, t, at, inside = _load_counts(counts, start, num_sequences, cols, E, BLOCK_B)
        s = tl.load(score_sums + at, mask=inside, other=0.0)
        t1 = _clamp_divisor(t)[:, None]
        scores_BE += s
        counts_BE += n
        products_BE += (n / t1) * (s / t1)
        tokens_B += t
        sequences_B += (t > 0).to(tl.int32)
    total = _clamp_divisor(tl.sum(tokens_B, axis=0))
    mean_scores = tl.sum(scores_BE, axis=0) / total
    micro_batch = tl.sum(tl.sum(counts_BE, axis=0) / total * mean_scores, axis=0)
    sequence = tl.sum(tl.sum(products_BE, axis=0), axis=0)
    sequence /= _clamp_divisor(tl.sum(sequences_B, axis=0))
    global_batch = 0.0
    if global_counts is not None:
        share = _load_global_shares(global_counts, cols, E)
        global_batch = tl.sum(share * mean_scores, axis=0)
    tl.store(losses, micro_batch_factor * micro_batch)
    tl.store(losses + 1, sequence_factor * sequence)
    tl.store(losses + 2, global_batch_factor * global_batch)
    tl.store(losses + 3, z_factor * (tl.load(z_sum) / total))


@triton.jit(do_not_specialize=["num_sequences"])
def balance_loss_bwd_kernel(
    dlosses,  # fp32 [4]
    counts,  # int64 [B, E + 1], the last column = number of tokens
    global_counts,  # int64 [E] or None
    dscore_sums,  # fp32 [B, E], written
    dz_sum,  # fp32 [], written
    num_sequences,  # B
    micro_batch_factor,
    sequence_factor,
    global_batch_factor,
    z_factor,
    E: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write the gradients of score_sums and z_sum. One program."""
    cols = tl.arange(0, BLOCK_E)
    counts_BE = tl.zeros([BLOCK_B, BLOCK_E], tl.float32)
    tokens_B = tl.zeros([BLOCK_B], tl.int64)
    sequences_B = tl.zeros([BLOCK_B], tl.int32)  # sequences with a token
    for start in range(0, num_sequences, BLOCK_B):
        n, t, _, _ = _load_counts(counts, start, num_sequences, cols, E, BLOCK_B)
        counts_BE += n
        tokens_B += t
        sequences_B += (t > 0).to(tl.int32)
    total = _clamp_divisor(tl.sum(tokens_B, axis=0))
    dmean_scores = tl.sum(counts_BE, axis=0) / total * (micro_batch_factor * tl.load(dlosses))
    if global_counts is not None:
        share = _load_global_shares(global_counts, cols, E)
        dmean_scores += share * (global_batch_factor * tl.load(dlosses + 2))
    dscores = (dmean_scores / total)[None, :]
    dsequence = sequence_factor * tl.load(dlosses + 1) / _clamp_divisor(tl.sum(sequences_B, axis=0))
    for start in range(0, num_sequences, BLOCK_B):
        n, t, at, inside = _load_counts(counts, start, num_sequences, cols, E, BLOCK_B)
        t1 = _clamp_divisor(t)[:, None]
        ds = dscores + dsequence * (n / t1) / t1
        tl.store(dscore_sums + at, ds, mask=inside)
    tl.store(dz_sum, z_factor * tl.load(dlosses + 3) / total)


def _make_constants(num_sequences: int, num_experts: int) -> dict[str, int]:
    """Return the compile-time constants and num_warps of both kernels, which have one program."""
    block_e = next_power_of_2(num_experts)
    block_b = min(next_power_of_2(num_sequences), LOSS_TILE // block_e)
    return {"E": num_experts, "BLOCK_B": block_b, "BLOCK_E": block_e, "num_warps": 8}


def _launch_balance_loss(
    score_sums_BE: Tensor,
    z_sum: Tensor,
    counts_BX: Tensor,
    global_counts_E: Tensor | None,
    factors: list[float],
) -> Tensor:
    """Launch the forward kernel; return the four losses of `balance_loss` times their factors."""
    B, E = score_sums_BE.shape
    if not B:
        return z_sum.new_zeros(4)
    losses = z_sum.new_empty(4)
    args = (score_sums_BE.contiguous(), z_sum, counts_BX.contiguous(), global_counts_E, losses)
    launch(balance_loss_fwd_kernel, 1, *args, B, *factors, **_make_constants(B, E))
    return losses


def _launch_balance_loss_bwd(
    dlosses: Tensor, counts_BX: Tensor, global_counts_E: Tensor | None, factors: list[float]
) -> tuple[Tensor, Tensor]:
    """Launch the backward kernel; return the gradients of score_sums_BE and z_sum."""
    B, E = counts_BX.shape[0], counts_BX.shape[1] - 1
    if not B:
        return dlosses.new_zeros(0, E), dlosses.new_zeros(())
    dscores, dz = dlosses.new_empty(B, E), dlosses.new_empty(())
    args = (dlosses.contiguous(), counts_BX.contiguous(), global_counts_E, dscores, dz)
    launch(balance_loss_bwd_kernel, 1, *args, B, *factors, **_make_constants(B, E))
    return dscores, dz


_balance_loss_bwd = Op(
    "balance_loss_bwd",
    _launch_balance_loss_bwd,
    lambda d, counts_BX, *_: (d.new_empty(len(counts_BX), counts_BX.shape[1] - 1), d.new_empty(())),
)


_balance_loss = Op(
    "balance_loss",
    _launch_balance_loss,
    lambda score_sums_BE, z_sum, *_: z_sum.new_empty(4),
    setup_context=make_setup_context(slice(2, 4), slice(4, 5)),
    backward=lambda ctx, dlosses: (
        *_balance_loss_bwd(dlosses, *ctx.saved_tensors, *ctx.others),
        *[None] * 3,
    ),
)


def balance_loss(
    score_sums_BE: Tensor,
    z_sum: Tensor,
    counts_BX: Tensor,
    factors: list[float],
    *,
    global_counts_E: Tensor | None = None,
) -> Tensor:
    """Return four load-balance losses, fp32: "micro_batch", "sequence", "global_batch" and "z".

    Each loss is the product of its factor and, in this order,

            sum_e(N/T * S/T)
            the mean over sequences with tokens of sum_e(n/t * s/t)
            sum_e(g/sum(g) * S/T)
            z_sum/T

    A sequence has n choices of expert e, t tokens and the score sum s. N, T and S are the sums of
    n, t and s over sequences, and g are the global counts. A divisor of 0 becomes 1.

    If counts are over more ranks than score sums, the result is this rank's share of the losses.
    Differentiable in score_sums_BE and z_sum. One kernel forward, one backward.

    Args:
        score_sums_BE, z_sum: from `balance_statistics`, fp32 or fp64.
        counts_BX: from `count_experts_and_tokens`.
        factors: one per loss, each including the loss's constant (E / K or E).
        global_counts_E: int64, contiguous; None = no global-batch loss (0).
    """
    E = score_sums_BE.shape[1]
    is_small = score_sums_BE.dtype == torch.float32 and E <= MAX_EXPERTS
    if can_use_kernel(score_sums_BE) and is_small:
        return _balance_loss(score_sums_BE, z_sum, counts_BX, global_counts_E, factors)
    warn_on_fallback(score_sums_BE, f"balance losses of {E} experts in {score_sums_BE.dtype}")
    sums = (score_sums_BE, z_sum, counts_BX)
    return balance_loss_ref(*sums, factors, global_counts_E=global_counts_E).float()
