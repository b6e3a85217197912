"""Load-balance statistics of the router's logits, and the auxiliary losses made of them.

    score_sums[b, e] = sum over the tokens of sequence b of softmax(logits)[e], or, with a score
                       function of each logit, of score[e] / (sum of the token's scores + 1e-20)
    z_sum            = sum over all tokens of logsumexp(logits)^2

Tokens that a mask calls padding are in no sum and get no gradient.

Letters: T tokens, B sequences of T / B tokens, E experts, K choices per token, P parts of a sum,
X = E + 1 columns (counts of the experts, then the number of tokens).

Bytes moved: statistics 4 T E forward (the logits are read once), 8 T E backward, and T for a mask;
the losses read [B, E] only. About 10 flops and one or two exponentials per logit, 50 flops for
sqrtsoftplus. Sums are made in an order that depends on shapes and device alone, without atomics:
equal inputs give equal bits.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moecore.kernels.common import num_sms, on_device, tl, triton, use_kernel
from moecore.kernels.counts import MAX_EXPERTS, check_padding_mask
from moecore.kernels.scores import check_score_function, scores_ref, sqrtsoftplus


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceLossOptions:
    """Factors of the losses.

    Attributes:
        top_k: choices per token.
        micro_batch_coef: on the loss with counts over all sequences.
        sequence_coef: on the mean over sequences of the loss with counts of each.
        global_batch_coef: on the loss with the global counts.
        z_loss_coef: on the mean over tokens of logsumexp(logits)^2.
    """

    top_k: int
    micro_batch_coef: float = 0.0
    sequence_coef: float = 0.0
    global_batch_coef: float = 0.0
    z_loss_coef: float = 0.0

    def factors(self, num_sequences: int, num_experts: int) -> list[float]:
        """Return the four coefficients with the constants of their formula folded in."""
        E, K = num_experts, self.top_k
        return [
            self.micro_batch_coef * E / K,
            self.sequence_coef * E / K / max(num_sequences, 1),
            self.global_batch_coef * E,
            self.z_loss_coef,
        ]


# --------------------------------------------------------------------------- references


def balance_statistics_ref(
    logits_TE: Tensor,
    num_sequences: int,
    score_function: str,
    padding_mask_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return score_sums_BE and z_sum, in fp32 (fp64 for fp64 logits)."""
    T, E = logits_TE.shape
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    if padding_mask_T is not None:
        # On both sides: 0 * NaN would reach the gradient of padding.
        logits_TE = torch.where(padding_mask_T[:, None], 0, logits_TE)
    scores_TE, log_sums_T = scores_ref(logits_TE, score_function), logits_TE.logsumexp(-1)
    if score_function != "softmax":
        scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
    if padding_mask_T is not None:
        scores_TE = torch.where(padding_mask_T[:, None], 0, scores_TE)
        log_sums_T = torch.where(padding_mask_T, 0, log_sums_T)
    score_sums_BE = scores_TE.view(num_sequences, T // max(num_sequences, 1), E).sum(1)
    return score_sums_BE, log_sums_T.square().sum()


def balance_loss_ref(
    score_sums_BE: Tensor,
    z_sum: Tensor,
    counts_BX: Tensor,
    options: BalanceLossOptions,
    *,
    global_counts_E: Tensor | None = None,
) -> Tensor:
    """Return the four losses in the dtype of the sums."""
    B, E = score_sums_BE.shape
    counts_BE, tokens_B1 = counts_BX[:, :E].to(z_sum.dtype), counts_BX[:, E:].clamp(min=1)
    tokens = counts_BX[:, E].sum().clamp(min=1)
    mean_scores_E = score_sums_BE.sum(0) / tokens
    micro_batch = (counts_BE.sum(0) / tokens * mean_scores_E).sum()
    sequence = (counts_BE / tokens_B1 * (score_sums_BE / tokens_B1)).sum()
    global_batch = torch.zeros_like(micro_batch)
    if global_counts_E is not None:
        share_E = global_counts_E.to(z_sum.dtype) / global_counts_E.sum().clamp(min=1)
        global_batch = (share_E * mean_scores_E).sum()
    parts = (micro_batch, sequence, global_batch, z_sum / tokens)
    return torch.stack([f * p for f, p in zip(options.factors(B, E), parts, strict=True)])


# --------------------------------------------------------------------------- statistics

TILE = 4096  # logits that a program holds at a time: 32 per thread with 4 warps
PROGRAMS_PER_SM = 4


@triton.jit
def _softmax_terms(x, in_cols):
    """Return softmax [t, e] (0 in masked columns) and logsumexp [t]; masked x is -inf."""
    top = tl.max(x, axis=1)
    exps = tl.where(in_cols[None, :], tl.exp(x - top[:, None]), 0.0)
    total = tl.sum(exps, axis=1)
    return exps * (1.0 / total)[:, None], top + tl.log(total)


@triton.jit
def _score_terms(x, in_cols, FUNCTION: tl.constexpr):
    """Return scores of each logit [t, e] (0 in masked columns), their slopes and 1 / sum [t]."""
    if FUNCTION == "sigmoid":
        scores = tl.sigmoid(x)
        slopes = scores * (1.0 - scores)
    else:
        scores, slopes = sqrtsoftplus(x)
    scores = tl.where(in_cols[None, :], scores, 0.0)
    return scores, slopes, 1.0 / (tl.sum(scores, axis=1) + 1e-20)


@triton.jit
def _real_rows(
    padding,  # uint8 [B * num_rows], 1 = padding; None = there is none
    first,  # int64, first row of the sequence
    rows,  # int32 [t], in the sequence
    num_rows,
):
    """Return bool [t]: which rows exist and are no padding."""
    real = rows < num_rows
    if padding is not None:
        real = real & (tl.load(padding + first + rows, mask=real, other=1) == 0)
    return real


@partial(triton.jit, do_not_specialize=["num_rows", "num_parts"])
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
    """Sum every num_parts-th tile of one sequence."""
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
        in_rows = _real_rows(padding, first, rows, num_rows)
        inside = in_rows[:, None] & in_cols[None, :]
        addresses = base + rows.to(tl.int64)[:, None] * E + cols[None, :]
        x = tl.load(addresses, mask=inside, other=-float("inf"))
        x = tl.where(in_rows[:, None], x, 0.0)  # other rows: finite, then dropped
        scores, log_sum = _softmax_terms(x, in_cols)
        if FUNCTION != "softmax":
            scores, _, normalizer = _score_terms(x, in_cols, FUNCTION)
            scores = scores * normalizer[:, None]
        score_sums += tl.where(in_rows[:, None], scores, 0.0)
        z_sums += tl.where(in_rows, log_sum * log_sum, 0.0)
    out = score_parts + program.to(tl.int64) * E + cols
    tl.store(out, tl.sum(score_sums, axis=0), mask=in_cols)
    tl.store(z_parts + program, tl.sum(z_sums, axis=0))


@partial(triton.jit, do_not_specialize=["num_parts", "num_all_parts"])
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
    """Sum the parts in a fixed order: a block of columns of one sequence, or z."""
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


@partial(triton.jit, do_not_specialize=["num_rows", "num_tiles"])
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
    """The gradient of one tile of logits, 0 for padding."""
    sequence = (tl.program_id(0) // num_tiles).to(tl.int64)
    cols = tl.arange(0, BLOCK_E)
    in_cols = cols < E
    rows = (tl.program_id(0) % num_tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_rows = _real_rows(padding, sequence * num_rows, rows, num_rows)
    inside = in_rows[:, None] & in_cols[None, :]
    addresses = (sequence * num_rows + rows)[:, None] * E + cols[None, :]
    dscores = tl.load(dscore_sums + sequence * E + cols, mask=in_cols, other=0.0)[None, :]
    dz = tl.load(dz_sum)
    x = tl.load(logits + addresses, mask=inside, other=-float("inf"))
    x = tl.where(in_rows[:, None], x, 0.0)
    softmax, log_sum = _softmax_terms(x, in_cols)
    dx = softmax * (2.0 * dz * log_sum)[:, None]
    if FUNCTION != "softmax":
        scores, slopes, normalizer = _score_terms(x, in_cols, FUNCTION)
        mean = tl.sum(scores * dscores, axis=1) * normalizer
        dx += (dscores - mean[:, None]) * normalizer[:, None] * slopes
    else:
        dx += softmax * (dscores - tl.sum(softmax * dscores, axis=1)[:, None])
    if padding is not None:
        dx = tl.where(in_rows[:, None], dx, 0.0)
        inside = (rows < num_rows)[:, None] & in_cols[None, :]
    tl.store(dlogits + addresses, dx, mask=inside)


def _bytes(mask_T: Tensor | None) -> Tensor | None:
    return None if mask_T is None else mask_T.contiguous().view(torch.uint8)


def _tile(num_experts: int) -> tuple[int, int]:
    """Return BLOCK_T and BLOCK_E of a tile of logits."""
    block_e = triton.next_power_of_2(num_experts)
    return max(1, min(256, TILE // block_e)), block_e


@torch.library.custom_op("moecore::balance_statistics", mutates_args=())
def _balance_statistics(
    logits_TE: Tensor, padding_mask_T: Tensor | None, num_sequences: int, score_function: str
) -> tuple[Tensor, Tensor]:
    (T, E), B = logits_TE.shape, num_sequences
    if not T:
        return logits_TE.new_zeros(B, E), logits_TE.new_zeros(())
    logits_TE, num_rows = logits_TE.contiguous(), T // B
    block_t, block_e = _tile(E)
    num_parts = max(1, PROGRAMS_PER_SM * num_sms(logits_TE.device) // B)
    num_parts = min(num_parts, triton.cdiv(num_rows, block_t))
    score_parts = logits_TE.new_empty(B * num_parts, E)
    z_parts = logits_TE.new_empty(B * num_parts)
    score_sums_BE, z_sum = logits_TE.new_empty(B, E), logits_TE.new_empty(())
    with on_device(logits_TE):
        balance_statistics_fwd_kernel[(B * num_parts,)](
            logits_TE,
            _bytes(padding_mask_T),
            score_parts,
            z_parts,
            num_rows,
            num_parts,
            E=E,
            FUNCTION=score_function,
            BLOCK_T=block_t,
            BLOCK_E=block_e,
        )
        block_e = min(block_e, 16)
        balance_statistics_fwd_reduce_kernel[(B * triton.cdiv(E, block_e) + 1,)](
            score_parts,
            z_parts,
            score_sums_BE,
            z_sum,
            num_parts,
            B * num_parts,
            E=E,
            BLOCK_P=256,
            BLOCK_E=block_e,
        )
    return score_sums_BE, z_sum


@_balance_statistics.register_fake
def _(logits_TE, padding_mask_T, num_sequences, score_function):
    return logits_TE.new_empty(num_sequences, logits_TE.shape[1]), logits_TE.new_empty(())


@torch.library.custom_op("moecore::balance_statistics_bwd", mutates_args=())
def _balance_statistics_bwd(
    logits_TE: Tensor,
    padding_mask_T: Tensor | None,
    dscore_sums_BE: Tensor,
    dz_sum: Tensor,
    score_function: str,
) -> Tensor:
    (T, E), B = logits_TE.shape, dscore_sums_BE.shape[0]
    logits_TE = logits_TE.contiguous()
    dlogits_TE = torch.empty_like(logits_TE)
    if not T:
        return dlogits_TE
    block_t, block_e = _tile(E)
    num_tiles = triton.cdiv(T // B, block_t)
    with on_device(logits_TE):
        balance_statistics_bwd_kernel[(B * num_tiles,)](
            logits_TE,
            _bytes(padding_mask_T),
            dscore_sums_BE.contiguous(),
            dz_sum.contiguous(),
            dlogits_TE,
            T // B,
            num_tiles,
            E=E,
            FUNCTION=score_function,
            BLOCK_T=block_t,
            BLOCK_E=block_e,
        )
    return dlogits_TE


@_balance_statistics_bwd.register_fake
def _(logits_TE, padding_mask_T, dscore_sums_BE, dz_sum, score_function):
    return logits_TE.new_empty(logits_TE.shape)


def _save_statistics(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.score_function = inputs[3]


def _statistics_backward(ctx: Any, dscore_sums_BE: Tensor, dz_sum: Tensor) -> tuple:
    if not ctx.needs_input_grad[0]:
        return (None,) * 4
    grads = (dscore_sums_BE, dz_sum)
    dlogits_TE = _balance_statistics_bwd(*ctx.saved_tensors, *grads, ctx.score_function)
    return dlogits_TE, None, None, None


_balance_statistics.register_autograd(_statistics_backward, setup_context=_save_statistics)


# --------------------------------------------------------------------------- losses

LOSS_TILE = 4096


@triton.jit
def _at_least_one(count):
    """Return max(count, 1) as fp32."""
    return tl.maximum(count, 1).to(tl.float32)


@partial(triton.jit, do_not_specialize=["num_sequences"])
def balance_loss_fwd_kernel(
    score_sums,  # fp32 [B, E]
    z_sum,  # fp32 []
    counts,  # int64 [B, E + 1], the tokens last
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
    """All four losses, in one program."""
    cols = tl.arange(0, BLOCK_E)
    in_cols = cols < E
    scores_BE = tl.zeros([BLOCK_B, BLOCK_E], tl.float32)
    counts_BE = tl.zeros([BLOCK_B, BLOCK_E], tl.float32)
    products_BE = tl.zeros([BLOCK_B, BLOCK_E], tl.float32)
    tokens_B = tl.zeros([BLOCK_B], tl.int64)
    for start in range(0, num_sequences, BLOCK_B):
        rows = (start + tl.arange(0, BLOCK_B)).to(tl.int64)
        in_rows = rows < num_sequences
        inside = in_rows[:, None] & in_cols[None, :]
        s = tl.load(score_sums + rows[:, None] * E + cols[None, :], mask=inside, other=0.0)
        n = tl.load(counts + rows[:, None] * (E + 1) + cols[None, :], mask=inside, other=0)
        t = tl.load(counts + rows * (E + 1) + E, mask=in_rows, other=0)
        n = n.to(tl.float32)
        t1 = _at_least_one(t)[:, None]
        scores_BE += s
        counts_BE += n
        products_BE += (n / t1) * (s / t1)
        tokens_B += t
    total = _at_least_one(tl.sum(tokens_B, axis=0))
    mean_scores = tl.sum(scores_BE, axis=0) / total
    micro_batch = tl.sum(tl.sum(counts_BE, axis=0) / total * mean_scores, axis=0)
    sequence = tl.sum(tl.sum(products_BE, axis=0), axis=0)
    global_batch = 0.0
    if global_counts is not None:
        found = tl.load(global_counts + cols, mask=in_cols, other=0)
        share = found.to(tl.float32) / _at_least_one(tl.sum(found, axis=0))
        global_batch = tl.sum(share * mean_scores, axis=0)
    tl.store(losses, micro_batch_factor * micro_batch)
    tl.store(losses + 1, sequence_factor * sequence)
    tl.store(losses + 2, global_batch_factor * global_batch)
    tl.store(losses + 3, z_factor * (tl.load(z_sum) / total))


@partial(triton.jit, do_not_specialize=["num_sequences"])
def balance_loss_bwd_kernel(
    dlosses,  # fp32 [4]
    counts,  # int64 [B, E + 1], the tokens last
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
    """The gradients of the sums, in one program."""
    cols = tl.arange(0, BLOCK_E)
    in_cols = cols < E
    counts_BE = tl.zeros([BLOCK_B, BLOCK_E], tl.float32)
    tokens_B = tl.zeros([BLOCK_B], tl.int64)
    for start in range(0, num_sequences, BLOCK_B):
        rows = (start + tl.arange(0, BLOCK_B)).to(tl.int64)
        in_rows = rows < num_sequences
        inside = in_rows[:, None] & in_cols[None, :]
        n = tl.load(counts + rows[:, None] * (E + 1) + cols[None, :], mask=inside, other=0)
        counts_BE += n.to(tl.float32)
        tokens_B += tl.load(counts + rows * (E + 1) + E, mask=in_rows, other=0)
    total = _at_least_one(tl.sum(tokens_B, axis=0))
    dmean_scores = tl.sum(counts_BE, axis=0) / total * (micro_batch_factor * tl.load(dlosses))
    if global_counts is not None:
        found = tl.load(global_counts + cols, mask=in_cols, other=0)
        share = found.to(tl.float32) / _at_least_one(tl.sum(found, axis=0))
        dmean_scores += share * (global_batch_factor * tl.load(dlosses + 2))
    dscores = (dmean_scores / total)[None, :]
    dsequence = sequence_factor * tl.load(dlosses + 1)
    for start in range(0, num_sequences, BLOCK_B):
        rows = (start + tl.arange(0, BLOCK_B)).to(tl.int64)
        in_rows = rows < num_sequences
        inside = in_rows[:, None] & in_cols[None, :]
        n = tl.load(counts + rows[:, None] * (E + 1) + cols[None, :], mask=inside, other=0)
        t = tl.load(counts + rows * (E + 1) + E, mask=in_rows, other=0)
        t1 = _at_least_one(t)[:, None]
        ds = dscores + dsequence * (n.to(tl.float32) / t1) / t1
        tl.store(dscore_sums + rows[:, None] * E + cols[None, :], ds, mask=inside)
    tl.store(dz_sum, z_factor * tl.load(dlosses + 3) / total)


def _loss_launch(num_sequences: int, num_experts: int) -> dict[str, int]:
    """Return the launch arguments that forward and backward share; one program does it all."""
    block_e = triton.next_power_of_2(num_experts)
    block_b = min(triton.next_power_of_2(num_sequences), LOSS_TILE // block_e)
    return {"E": num_experts, "BLOCK_B": block_b, "BLOCK_E": block_e, "num_warps": 8}


@torch.library.custom_op("moecore::balance_loss", mutates_args=())
def _balance_loss(
    score_sums_BE: Tensor,
    z_sum: Tensor,
    counts_BX: Tensor,
    global_counts_E: Tensor | None,
    factors: list[float],
) -> Tensor:
    B, E = score_sums_BE.shape
    if not B:
        return z_sum.new_zeros(4)
    losses = z_sum.new_empty(4)
    scores, counts = score_sums_BE.contiguous(), counts_BX.contiguous()
    with on_device(losses):
        balance_loss_fwd_kernel[(1,)](
            scores, z_sum, counts, global_counts_E, losses, B, *factors, **_loss_launch(B, E)
        )
    return losses


@_balance_loss.register_fake
def _(score_sums_BE, z_sum, counts_BX, global_counts_E, factors):
    return z_sum.new_empty(4)


@torch.library.custom_op("moecore::balance_loss_bwd", mutates_args=())
def _balance_loss_bwd(
    dlosses: Tensor, counts_BX: Tensor, global_counts_E: Tensor | None, factors: list[float]
) -> tuple[Tensor, Tensor]:
    B, E = counts_BX.shape[0], counts_BX.shape[1] - 1
    if not B:
        return dlosses.new_zeros(0, E), dlosses.new_zeros(())
    dscores, dz = dlosses.new_empty(B, E), dlosses.new_empty(())
    dlosses, counts = dlosses.contiguous(), counts_BX.contiguous()
    with on_device(dlosses):
        balance_loss_bwd_kernel[(1,)](
            dlosses, counts, global_counts_E, dscores, dz, B, *factors, **_loss_launch(B, E)
        )
    return dscores, dz


@_balance_loss_bwd.register_fake
def _(dlosses, counts_BX, global_counts_E, factors):
    return dlosses.new_empty(counts_BX.shape[0], counts_BX.shape[1] - 1), dlosses.new_empty(())


def _save_loss(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs[2:4])
    ctx.factors = inputs[4]


def _loss_backward(ctx: Any, dlosses: Tensor) -> tuple:
    dscores, dz = _balance_loss_bwd(dlosses, *ctx.saved_tensors, ctx.factors)
    needs_scores, needs_z = ctx.needs_input_grad[:2]
    return dscores if needs_scores else None, dz if needs_z else None, None, None, None


_balance_loss.register_autograd(_loss_backward, setup_context=_save_loss)


# --------------------------------------------------------------------------- public


def balance_statistics(
    logits_TE: Tensor,
    num_sequences: int,
    score_function: str,
    padding_mask_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sums over tokens of which the balance losses and the z-loss are made.

    Differentiable in the logits. Two kernels forward, one backward; saves the logits and the mask.

    Args:
        logits_TE: [T, E] fp32, or fp64, which the reference computes on every device.
        num_sequences: B, a divisor of T; sequences are consecutive tokens of equal number.
        score_function: "softmax", or "sigmoid" or "sqrtsoftplus", whose scores are divided by
            their sum.
        padding_mask_T: bool [T], True = padding: in no sum, and its gradient is 0 whatever its
            logits, NaN included. None = no padding.

    Returns:
        score_sums_BE, the scores summed over each sequence, and the 0-dim sum over all tokens of
        logsumexp(logits)^2, both in the dtype of the logits.

    Raises:
        ValueError: for an unknown score function, or a mask that is not bool [T].
    """
    check_score_function("score_function", score_function)
    check_padding_mask(padding_mask_T, logits_TE.shape[0])
    is_small = logits_TE.dtype == torch.float32 and logits_TE.shape[1] <= MAX_EXPERTS
    if use_kernel(logits_TE) and is_small:
        return _balance_statistics(logits_TE, padding_mask_T, num_sequences, score_function)
    return balance_statistics_ref(logits_TE, num_sequences, score_function, padding_mask_T)


def balance_loss(
    score_sums_BE: Tensor,
    z_sum: Tensor,
    counts_BX: Tensor,
    options: BalanceLossOptions,
    *,
    global_counts_E: Tensor | None = None,
) -> Tensor:
    """Return fp32 [4]: the losses "micro_batch", "sequence", "global_batch" and "z".

    With n the counts, t the tokens and s the score sums of a sequence, N, T and S their sums over
    sequences, and g the global counts, these are the coefficients times

        E * sum_e(N/(T*K) * S/T)
        the mean over sequences of E * sum_e(n/(t*K) * s/t)
        E * sum_e(g/sum(g) * S/T)
        z_sum/T

    where divisors of 0 become 1. Counts that cover the tokens of more ranks than the sums give this
    rank's part of the loss. Differentiable in both sums, one kernel each way.

    Args:
        score_sums_BE: [B, E] fp32 or fp64, from `balance_statistics`.
        z_sum: 0-dim, same dtype.
        counts_BX: int64 [B, E + 1], from `count_experts_and_tokens`.
        options: the coefficients and K.
        global_counts_E: int64 [E], contiguous; None = no global-batch loss (0).
    """
    B, E = score_sums_BE.shape
    is_small = score_sums_BE.dtype == torch.float32 and E <= MAX_EXPERTS
    if use_kernel(score_sums_BE) and is_small:
        factors = options.factors(B, E)
        return _balance_loss(score_sums_BE, z_sum, counts_BX, global_counts_E, factors)
    losses = balance_loss_ref(
        score_sums_BE, z_sum, counts_BX, options, global_counts_E=global_counts_E
    )
    return losses.float()
