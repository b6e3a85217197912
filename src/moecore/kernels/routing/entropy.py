"""The entropy of a router's scores, a measure of how uncertain its choices are.

    entropy[t] = -sum over e of p[t, e] log p[t, e], in nats
    p          = softmax(logits), or, with a score function of each logit, score / (sum + 1e-20)
    total      = sum over tokens of round(entropy[t] / UNIT), and the number of tokens

The entropy is 0 if one expert has all the score, and log(E) for equal scores. The total counts
integer units of 2^-24 nats, so it does not depend on the order of sums, ranks or micro-batches. An
int64 can count 7 x 10^10 tokens of 1024 experts.

Letters: T tokens, E experts. Bytes moved: 4 T E, and T for a padding mask. There is one launch, in
backward: eval and no_grad have no launch.
"""

import torch
from torch import Tensor

from moecore.kernels.common import can_use_kernel, cdiv, launch, next_power_of_2
from moecore.kernels.routing.scores import compute_scores_ref, load_token_scores
from moecore.kernels.triton_api import tl, triton

UNIT = 2.0**-24  # nats
TILE = 4096  # logits of a program of 4 warps, which holds whole rows


def add_entropy_ref(
    total_2: Tensor, logits_TE: Tensor, score_function: str, padding_mask_T: Tensor | None
) -> None:
    """Compute `add_entropy_` in plain PyTorch, for fp32 or fp64 logits."""
    scores_TE = compute_scores_ref(logits_TE, score_function)
    if score_function != "softmax":
        scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
    units_T = (torch.special.entr(scores_TE).sum(-1).double() / UNIT).nan_to_num(0.0).round().long()
    if padding_mask_T is None:
        total_2[1] += len(units_T)
    else:
        units_T = units_T.masked_fill(padding_mask_T, 0)
        total_2[1] += (~padding_mask_T).sum()
    total_2[0] += units_T.sum()


@triton.jit(do_not_specialize=["num_tokens"])
def _add_entropy_kernel(
    logits_ptr,  # [T, E] fp32
    padding_ptr,  # [T] bool, or None
    total_ptr,  # [2] int64, added to
    num_tokens,
    E: tl.constexpr,
    FUNCTION: tl.constexpr,
    UNITS_PER_NAT: tl.constexpr,  # of one nat
    BLOCK_T: tl.constexpr,
    E_POW2: tl.constexpr,  # E up to a power of two
):
    """Add the entropy of BLOCK_T tokens, in units of 2^-24 nats, and their number to the total."""
    scores, columns, token_mask = load_token_scores(
        logits_ptr, padding_ptr, num_tokens, FUNCTION, E, BLOCK_T, E_POW2
    )
    scores = tl.where(columns < E, scores, 0.0)
    if FUNCTION != "softmax":
        scores = scores / (tl.sum(scores, axis=1, keep_dims=True) + 1e-20)
    # A NaN is not > 0, so it counts as 0; the step will be skipped.
    terms = tl.where(scores > 0.0, -scores * tl.log(tl.where(scores > 0.0, scores, 1.0)), 0.0)
    entropy = tl.sum(terms, axis=1, keep_dims=True)
    units = tl.where(token_mask, (entropy.to(tl.float64) * UNITS_PER_NAT + 0.5).to(tl.int64), 0)
    tl.atomic_add(total_ptr, tl.sum(tl.sum(units, axis=1), axis=0), sem="relaxed")
    count = tl.sum(tl.sum(token_mask.to(tl.int64), axis=1), axis=0)
    tl.atomic_add(total_ptr + 1, count, sem="relaxed")


def add_entropy_(
    total_2: Tensor, logits_TE: Tensor, score_function: str, padding_mask_T: Tensor | None = None
) -> None:
    """Add the summed entropy of tokens' scores, and the number of tokens, to total_2. No host sync.

    total_2 is int64 [2], contiguous. The entropy is in units of 2^-24 nats; a NaN counts as 0.
    Logits have any float dtype. Scores other than "softmax" are divided by their sum.

    Example, one token, softmax of two equal logits: total_2 gains [round(log(2) * 2^24), 1].
    """
    if not can_use_kernel(logits_TE) or logits_TE.dtype != torch.float32:
        wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        add_entropy_ref(total_2, wide_TE, score_function, padding_mask_T)
        return
    T, E = logits_TE.shape
    E_POW2 = next_power_of_2(E)
    BLOCK_T = max(1, TILE // E_POW2)
    padding = None if padding_mask_T is None else padding_mask_T.contiguous()
    args = (logits_TE.contiguous(), padding, total_2, T)
    sizes = dict(E=E, UNITS_PER_NAT=1 / UNIT, BLOCK_T=BLOCK_T, E_POW2=E_POW2, num_warps=4)
    launch(_add_entropy_kernel, cdiv(T, BLOCK_T), *args, FUNCTION=score_function, **sizes)
