"""Load-balance statistics of the router's logits, from which `balance_loss` computes the losses.

    score_sums[b, e] = sum over the tokens of sequence b of softmax(logits)[e], or, with a score
                       function of each logit, of score[e] / (sum of the token's scores + 1e-20)
    z_sum            = sum over all tokens of logsumexp(logits)^2

Letters: T tokens, B sequences of T / B tokens, E experts.

Bytes moved: 4 T E forward (the logits are read once), 8 T E backward, and T for a mask. About 10
flops and one or two exponentials per logit, 50 flops for sqrtsoftplus. There are no atomics, and
the order of sums depends only on shapes and device, so equal inputs give equal bits.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from moecore.kernels.common import (
    can_use_kernel,
    cdiv,
    count_sms,
    launch,
    next_power_of_2,
    warn_on_fallback,
)
from moecore.kernels.ops import Op, make_setup_context
from moecore.kernels.routing.counts import MAX_EXPERTS, check_padding_mask, view_mask_as_bytes
from moecore.kernels.routing.scores import compute_scores_ref, compute_sqrtsoftplus
from moecore.kernels.triton_api import tl, triton


def balance_statistics_ref(
    logits_TE: Tensor,
    num_sequences: int,
    score_function: str,
    padding_mask_T: Tensor | None = None,
    sequences_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `balance_statistics` in plain PyTorch, in fp32 (fp64 for fp64 logits)."""
    T, E = logits_TE.shape
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    if padding_mask_T is not None:
        # On both sides: 0 * NaN would reach the gradient of padding.
        logits_TE = torch.where(padding_mask_T[:, None], 0, logits_TE)
    scores_TE, log_sums_T = compute_scores_ref(logits_TE, score_function), logits_TE.logsumexp(-1)
    if score_function != "softmax":
        scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
    if padding_mask_T is not None:
        scores_TE = torch.where(padding_mask_T[:, None], 0, scores_TE)
        log_sums_T = torch.where(padding_mask_T, 0, log_sums_T)
    if sequences_T is not None:  # as a product, whose order of sums is fixed
        is_in_BT = torch.arange(num_sequences, device=sequences_T.device)[:, None] == sequences_T
        return is_in_BT.to(scores_TE.dtype) @ scores_TE, log_sums_T.square().sum()
    score_sums_BE = scores_TE.view(num_sequences, T // max(num_sequences, 1), E).sum(1)
    return score_sums_BE, log_sums_T.square().sum()


TILE = 4096  # logits that a program holds at a time: 32 per thread with 4 warps
PROGRAMS_PER_SM = 4


@triton.jit
def _compute_softmax(logits, column_mask):
    """Return softmax (0 in masked columns) and logsumexp of rows; masked logits must be -inf."""
    top = tl.max(logits, axis=1)
    exps = tl.where(column_mask[None, :], tl.exp(logits - top[:, None]), 0.0)
    total = tl.sum(exps, axis=1)
    return exps * (1.0 / total)[:, None], top + tl.log(total)


@triton.jit
def _compute_scores(logits, column_mask, FUNCTION: tl.constexpr):
    """Return scores (0 in masked columns), their derivatives, and 1 / each row's sum of scores."""
    if FUNCTION == "sigmoid":
        scores = tl.sigmoid(logits)
        slopes = scores * (1.0 - scores)
    else:
        scores, slopes = compute_sqrtsoftplus(logits)
    scores = tl.where(column_mask[None, :], scores, 0.0)
    return scores, slopes, 1.0 / (tl.sum(scores, axis=1) + 1e-20)


@triton.jit
def _find_real_rows(padding, first_row, rows, num_rows):
    """Return bool per row: True for real tokens among `rows` of a sequence of `num_rows` rows.

    The sequence begins at `first_row` of `padding`.
    """
    real = rows < num_rows
    if padding is not None:
        real = real & (tl.load(padding + first_row + rows, mask=real, other=1) == 0)
    return real


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def balance_statistics_fwd_kernel(
    logits,  # fp32 [B * num_rows, E]
    padding,  # uint8 [B * num_rows], 1 = padding; None = there is none
    score_parts,  # fp32 [B * num_parts, E], written
    z_parts,  # fp32 [B * num_parts], written
    num_rows,  # tokens of one sequence
    num_parts,  # programs of one sequence; part p takes tiles p, p + num_parts, ...
    E: tl.constexpr,
    FUNCTION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write one program's partial sums over tokens: scores per expert, and logsumexp^2."""
    program = tl.program_id(0)
    sequence = program // num_parts
    cols = tl.arange(0, BLOCK_E)
    in_cols = cols < E
    first = sequence.to(tl.int64) * num_rows
    base = logits + first * E
    score_sums = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    z_sums = tl.zeros([BLOCK_T], tl.float32)
    for tile in range(program % num_parts, tl.cdiv(num_rows, BLOCK_T), num_parts):
        rows = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        in_rows = _find_real_rows(padding, first, rows, num_rows)
        inside = in_rows[:, None] & in_cols[None, :]
        addresses = base + rows.to(tl.int64)[:, None] * E + cols[None, :]
        x = tl.load(addresses, mask=inside, other=-float("inf"))
        x = tl.where(in_rows[:, None], x, 0.0)  # other rows: finite, then dropped
        scores, log_sum = _compute_softmax(x, in_cols)
        if FUNCTION != "softmax":
            scores, _, normalizer = _compute_scores(x, in_cols, FUNCTION)
            scores = scores * normalizer[:, None]
        score_sums += tl.where(in_rows[:, None], scores, 0.0)
        z_sums += tl.where(in_rows, log_sum * log_sum, 0.0)
    out = score_parts + program.to(tl.int64) * E + cols
    tl.store(out, tl.sum(score_sums, axis=0), mask=in_cols)
    tl.store(z_parts + program, tl.sum(z_sums, axis=0))


@triton.jit(do_not_specialize=["num_parts", "num_all_parts"])
def balance_statistics_fwd_reduce_kernel(
    score_parts,  # fp32 [B * num_parts, E]
    z_parts,  # fp32 [num_all_parts]
    score_sums,  # fp32 [B, E], written
    z_sum,  # fp32 [], written
    num_parts,  # of one sequence
    num_all_parts,  # B * num_parts
    E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Sum score_parts over the programs of a sequence, for a block of experts."""
    program = tl.program_id(0)
    if program == tl.num_programs(0) - 1:  # the last program has z
        z_sums = tl.zeros([BLOCK_P], tl.float32)
        for start in range(0, num_all_parts, BLOCK_P):
            parts = start + tl.arange(0, BLOCK_P)
            z_sums += tl.load(z_parts + parts, mask=parts < num_all_parts, other=0.0)
        tl.store(z_sum, tl.sum(z_sums, axis=0))
    else:
        sequence = (program // tl.cdiv(E, BLOCK_E)).to(tl.int64)
        cols = (program % tl.cdiv(E, BLOCK_E)) * BLOCK_E + tl.arange(0, BLOCK_E)
        sums = tl.zeros([BLOCK_P, BLOCK_E], tl.float32)
        for start in range(0, num_parts, BLOCK_P):
            parts = start + tl.arange(0, BLOCK_P)
            inside = (parts < num_parts)[:, None] & (cols < E)[None, :]
            addresses = (sequence * num_parts + parts)[:, None] * E + cols[None, :]
            sums += tl.load(score_parts + addresses, mask=inside, other=0.0)
        tl.store(score_sums + sequence * E + cols, tl.sum(sums, axis=0), mask=cols < E)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def balance_statistics_bwd_kernel(
    logits,  # fp32 [B * num_rows, E]
    padding,  # uint8 [B * num_rows], 1 = padding; None = there is none
    dscore_sums,  # fp32 [B, E]
    dz_sum,  # fp32 []
    dlogits,  # fp32 [B * num_rows, E], written
    num_rows,  # tokens of one sequence
    num_tiles,  # programs of one sequence
    E: tl.constexpr,
    FUNCTION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write the logits' gradient for one tile of tokens and experts; 0 for padding."""
    sequence = (tl.program_id(0) // num_tiles).to(tl.int64)
    cols = tl.arange(0, BLOCK_E)
    in_cols = cols < E
    rows = (tl.program_id(0) % num_tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_rows = _find_real_rows(padding, sequence * num_rows, rows, num_rows)
    inside = in_rows[:, None] & in_cols[None, :]
    addresses = (sequence * num_rows + rows)[:, None] * E + cols[None, :]
    dscores = tl.load(dscore_sums + sequence * E + cols, mask=in_cols, other=0.0)[None, :]
    dz = tl.load(dz_sum)
    x = tl.load(logits + addresses, mask=inside, other=-float("inf"))
    x = tl.where(in_rows[:, None], x, 0.0)
    softmax, log_sum = _compute_softmax(x, in_cols)
    dx = softmax * (2.0 * dz * log_sum)[:, None]
    if FUNCTION != "softmax":
        scores, slopes, normalizer = _compute_scores(x, in_cols, FUNCTION)
        mean = tl.sum(scores * dscores, axis=1) * normalizer
        dx += (dscores - mean[:, None]) * normalizer[:, None] * slopes
    else:
        dx += softmax * (dscores - tl.sum(softmax * dscores, axis=1)[:, None])
    if padding is not None:
        dx = tl.where(in_rows[:, None], dx, 0.0)
        inside = (rows < num_rows)[:, None] & in_cols[None, :]
    tl.store(dlogits + addresses, dx, mask=inside)


@cache
def _make_constants(num_experts: int, score_function: str) -> dict[str, Any]:
    """Return the kernels' compile-time constants: a tile has full rows and about TILE logits."""
    block_e = next_power_of_2(num_experts)
    block_t = max(1, min(256, TILE // block_e))
    return dict(E=num_experts, FUNCTION=score_function, BLOCK_T=block_t, BLOCK_E=block_e)


def _launch_statistics(
    logits_TE: Tensor, padding_mask_T: Tensor | None, num_sequences: int, score_function: str
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernels; return each sequence's sums of scores, and sum of logsumexp^2."""
    (T, E), B = logits_TE.shape, num_sequences
    if not T:
        return logits_TE.new_zeros(B, E), logits_TE.new_zeros(())
    logits_TE, num_rows = logits_TE.contiguous(), T // B
    constants = _make_constants(E, score_function)
    num_parts = max(1, PROGRAMS_PER_SM * count_sms(logits_TE.device) // B)
    num_parts = min(num_parts, cdiv(num_rows, constants["BLOCK_T"]))
    score_parts = logits_TE.new_empty(B * num_parts, E)
    z_parts = logits_TE.new_empty(B * num_parts)
    score_sums_BE, z_sum = logits_TE.new_empty(B, E), logits_TE.new_empty(())
    padding = view_mask_as_bytes(padding_mask_T)
    args = (logits_TE, padding, score_parts, z_parts, num_rows, num_parts)
    launch(balance_statistics_fwd_kernel, B * num_parts, *args, **constants)
    block_e = min(constants["BLOCK_E"], 16)
    args = (score_parts, z_parts, score_sums_BE, z_sum, num_parts, B * num_parts)
    grid = B * cdiv(E, block_e) + 1
    launch(balance_statistics_fwd_reduce_kernel, grid, *args, E=E, BLOCK_P=256, BLOCK_E=block_e)
    return score_sums_BE, z_sum


def _launch_statistics_bwd(
    logits_TE: Tensor,
    padding_mask_T: Tensor | None,
    dscore_sums_BE: Tensor,
    dz_sum: Tensor,
    score_function: str,
) -> Tensor:
    """Launch the backward kernel; return the gradient of the logits."""
    (T, E), B = logits_TE.shape, dscore_sums_BE.shape[0]
    logits_TE = logits_TE.contiguous()
    dlogits_TE = torch.empty_like(logits_TE)
    if not T:
        return dlogits_TE
    constants = _make_constants(E, score_function)
    num_tiles = cdiv(T // B, constants["BLOCK_T"])
    grads = (dscore_sums_BE.contiguous(), dz_sum.contiguous())
    args = (logits_TE, view_mask_as_bytes(padding_mask_T), *grads, dlogits_TE, T // B, num_tiles)
    launch(balance_statistics_bwd_kernel, B * num_tiles, *args, **constants)
    return dlogits_TE


_balance_statistics_bwd = Op(
    "balance_statistics_bwd", _launch_statistics_bwd, lambda x, *_: x.new_empty(x.shape)
)


_balance_statistics = Op(
    "balance_statistics",
    _launch_statistics,
    lambda x_TE, _, B, function: (x_TE.new_empty(B, x_TE.shape[1]), x_TE.new_empty(())),
    setup_context=make_setup_context(slice(2), slice(3, 4)),
    backward=lambda ctx, *grads: (
        _balance_statistics_bwd(*ctx.saved_tensors, *grads, *ctx.others),
        *[None] * 3,
    ),
)


def balance_statistics(
    logits_TE: Tensor,
    num_sequences: int,
    score_function: str,
    padding_mask_T: Tensor | None = None,
    sequences_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each sequence's sums of scores per expert [B, E], and the sum of logsumexp(logits)^2.

    Both sums have the dtype of the logits. Differentiable in the logits; saves the logits and the
    mask. Two kernels forward, one backward.

    Args:
        logits_TE: fp32; plain PyTorch computes fp64.
        num_sequences: B. Without `sequences_T` a sequence has T / B consecutive tokens.
        score_function: scores other than "softmax" are divided by their sum.
        padding_mask_T: bool [T], True = padding, which is in no sum and has gradient 0, also if its
            logits are NaN. None = no padding.
        sequences_T: int64 [T], each token's sequence; computed in plain PyTorch.
    """
    check_padding_mask(padding_mask_T, logits_TE.shape[0])
    is_small = logits_TE.dtype == torch.float32 and logits_TE.shape[1] <= MAX_EXPERTS
    if sequences_T is None:
        if can_use_kernel(logits_TE) and is_small:
            return _balance_statistics(logits_TE, padding_mask_T, num_sequences, score_function)
        operation = f"balance statistics of {logits_TE.shape[1]} experts {logits_TE.dtype}"
        warn_on_fallback(logits_TE, operation)
    return balance_statistics_ref(
        logits_TE, num_sequences, score_function, padding_mask_T, sequences_T
    )
